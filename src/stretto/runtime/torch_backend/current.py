"""The enforcer of this process, if there is one. Loads no torch: `stretto.step` is always there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

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
        """

    def pass_by(self, group: Any, call: Any) -> None:
        """A call that runs as usual in any case."""

    def step(self) -> None:
        """An iteration ends here."""


class Current:
    """Whom to ask."""

    enforcer: Enforces | None = None
    pilot: Callable[[], None] | None = None
    """Who counts the iterations of a script that was not written for it, and so has to hear of a mark first."""


def step() -> None:
    """Mark the end of an iteration; does nothing where no plan is enforced.

    An enforcer that knows the captured step can count iterations by itself. Marks are safer: an evaluation between two
    iterations is then no surprise, and a missing comm-op is noticed at once.

    >>> step()
    """
    if Current.pilot is not None:
        Current.pilot()
    elif Current.enforcer is not None:
        Current.enforcer.step()
