# SPDX-License-Identifier: Apache-2.0
"""The enforcer of this process, if there is one. Loads no torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from ...process_state import STATE, ProcessPart

SERVES = "_stretto_serves"
"""An attribute of optimizers that step for other ranks, too: none of their steps ends an iteration."""


class Enforces(Protocol):
    """What the backend and `step` ask of an enforcer."""

    @property
    def asleep(self) -> bool:
        """Whether calls are of no interest to it now: there is no plan, and no order of calls that it follows."""

    def take(self, group: Any, call: Any, tensors: list[Any], opts: Any, plain: Callable[..., Any]) -> Any:
        """Run a call as the plan says; None where it is to run as usual, as `plain` would.

        ``plain(own=True)`` runs it on the backend that the job asked for, ``plain(own=False)`` on ours.

        Args:
            group: The process group of the call.
            call: The call.
            tensors: The tensors that its future gives.
            opts: PyTorch's options of the call.
            plain: Runs the call as usual.

        Returns:
            The work, or None.
        """

    def message(self, group: Any, call: Any, source: int, target: int, plain: Callable[[], Any]) -> Any:
        """Run a message between two ranks of a group in its turn; None where it is to run at once.

        Args:
            group: The process group.
            call: The send or receive.
            source: The sender's position in the group.
            target: The receiver's.
            plain: Runs the call at once.

        Returns:
            The work, or None.
        """

    def pass_by(self, group: Any, call: Any) -> None:
        """A call that runs as usual in any case."""

    def step(self) -> None:
        """An iteration ends here."""


class Current(ProcessPart):
    """The enforcer of this process, and what counts its iterations.

    Both stay after a fork: the enforcer refuses to work in a child, and what counts does nothing there.
    """

    def __init__(self) -> None:
        self.enforcer: Enforces | None = None
        self.pilot: Callable[[], None] | None = None
        """Counts the iterations of a script that was not written for it, and so has to hear of a mark first."""


CURRENT = STATE.part(Current)


def step() -> None:
    """Mark the end of an iteration; does nothing where no plan is enforced.

    An enforcer that knows the captured step can count iterations by itself. Marks are safer: an evaluation between two
    iterations is then no surprise, and a missing comm-op is noticed at once.

    >>> step()
    """
    if CURRENT.pilot is not None:
        CURRENT.pilot()
    elif CURRENT.enforcer is not None:
        CURRENT.enforcer.step()
