# SPDX-License-Identifier: Apache-2.0
"""Everything that changes and is kept once per process, beyond single objects, belongs to `STATE`.

A module declares what it keeps as a `ProcessPart` and asks for its one object when it is loaded::

    class Ledger(ProcessPart): ...

    LEDGER = STATE.part(Ledger)

So there is one place that knows all of it, and one that says what ends with a job and what a forked child must not
inherit. Registries that are only filled while modules are loaded, and caches of functions without side effects, are
not state. `tests/test_process_state.py` finds what is kept elsewhere.
"""

from __future__ import annotations

import os
from collections.abc import Hashable
from typing import TypeVar


class ProcessPart:
    """What one module keeps per process; made without arguments, once.

    All methods do nothing here. They may call nothing that ranks do together.
    """

    def job_ended(self) -> None:
        """Forget what belongs to the job: its default process group, made on the backend `stretto`, is destroyed."""

    def before_fork(self) -> None:
        """Wait for what a fork would break; called in the thread that is about to fork."""

    def after_fork_in_parent(self) -> None:
        """Go on with what `before_fork` held back."""

    def after_fork(self) -> None:
        """Make good what a fork breaks; called in the child, where no other thread runs.

        A lock may be held for ever by a thread that only the parent has, so it is replaced. Objects that belong to the
        parent's job stay: they know their process and refuse to work in another one (`runtime.executor.forks.Home`),
        and to destroy them here could wait for the parent's threads.
        """


Part = TypeVar("Part", bound=ProcessPart)


class ProcessState:
    """The parts of this process, and how many forks and numbered objects there were."""

    def __init__(self) -> None:
        self.forks = 0
        """How many forks lie between the process that loaded this module and this one."""
        self._parts: dict[type[ProcessPart], ProcessPart] = {}
        self._numbers: dict[Hashable, int] = {}

    def part(self, kind: type[Part]) -> Part:
        """The one object of a kind, made when it is first asked for."""
        found = self._parts.get(kind)
        if found is None:
            found = self._parts[kind] = kind()
        assert isinstance(found, kind)
        return found

    def number(self, what: Hashable) -> int:
        """Count objects of one name: 1, 2, ...

        Ranks that make them in the same order get the same numbers, and so a name for keys in the job's store. The
        numbers go on when a job ends, as the next one may find the same store.
        """
        number = self._numbers[what] = self._numbers.get(what, 0) + 1
        return number

    def job_ended(self) -> None:
        """Called once the default process group is destroyed."""
        for part in list(self._parts.values()):
            part.job_ended()

    def before_fork(self) -> None:
        """Called before this process forks."""
        for part in reversed(list(self._parts.values())):
            part.before_fork()

    def after_fork_in_parent(self) -> None:
        """Called after this process has forked."""
        for part in list(self._parts.values()):
            part.after_fork_in_parent()

    def after_fork(self) -> None:
        """Called in a forked child, before anything else of ours runs there."""
        self.forks += 1
        for part in list(self._parts.values()):
            part.after_fork()


STATE = ProcessState()
os.register_at_fork(
    before=STATE.before_fork, after_in_parent=STATE.after_fork_in_parent, after_in_child=STATE.after_fork
)
