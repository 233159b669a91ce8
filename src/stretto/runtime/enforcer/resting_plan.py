# SPDX-License-Identifier: Apache-2.0
"""A plan that rests: the application did something else, and may come back to the step that the plan was made for.

While it rests everything runs in plain order, and each rank follows its own calls. Once it has seen the whole step
some times in a row it offers the plan again; all ranks take it up at the same boundary, or none does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..torch_backend.buffers import CollectiveCall
    from .prepared import ExpectedOps, PreparedPlan

RETURNS = 3
"""How many times a plan is taken up again; a step that leaves it more often has changed."""
WHOLE = 2
"""Iterations in a row that must be as recorded before it is."""
PATIENCE = 20
"""After this many iterations none of which is as recorded, the plan is given up."""
MOST_STRAYS = 1000
"""After this many calls in a row outside the step (or `PATIENCE` iterations' calls) the plan is given up."""


def too_many(strays: int, expected: ExpectedOps) -> bool:
    """Whether there are too many calls between two iterations for them to be an evaluation."""
    return strays > max(MOST_STRAYS, PATIENCE * len(expected))


class RestingPlan:
    """Follows the application's calls in plain order, to see when a plan's step is back."""

    def __init__(self, plan: PreparedPlan) -> None:
        self.plan = plan
        self._position = 0
        self._off = False
        """Whether this iteration is another one; the application's mark ends it."""
        self._whole = 0
        self._calls = 0
        self._steps = 0

    @property
    def back(self) -> bool:
        """Whether the step has come back."""
        return self._whole >= WHOLE

    @property
    def hopeless(self) -> bool:
        """Whether the plan will not become active again."""
        most = PATIENCE * max(len(self.plan.expected), 1)
        return not self.back and (self._steps > PATIENCE or self._calls > max(MOST_STRAYS, most))

    def call(self, call: CollectiveCall, ranks: Sequence[int], *, marked: bool) -> None:
        """The application calls something; what is not of the step may come between two iterations.

        Args:
            call: The call.
            ranks: The ranks of its group.
            marked: Whether the script marks the ends of iterations itself.
        """
        expected = self.plan.expected
        self._calls += 1
        if self._position == len(expected) and not marked:
            self._ended()
        if self._off:
            return
        if self._position < len(expected) and not expected.refusal(self._position, call, ranks):
            self._position += 1
        elif 0 < self._position < len(expected):
            self._whole = 0
            self._off = marked
            self._position = int(not expected.refusal(0, call, ranks))

    def step(self) -> None:
        """An iteration ends here, by the application's mark."""
        self._steps += 1
        if not self._off and self._position == len(self.plan.expected):
            self._ended()
        elif self._off or self._position:
            self._whole = 0
        self._position, self._off = 0, False

    def _ended(self) -> None:
        self._whole += 1
        self._position = 0
        self._steps = self._calls = 0
