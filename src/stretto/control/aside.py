# SPDX-License-Identifier: Apache-2.0
"""Small exchanges between all ranks, on connections of their own, beside everything that a job communicates itself."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..runtime.torch_backend.engine import Engine

AGREE_EVERY = 16
"""Iterations between two looks whether all ranks are to record again."""
NOTES = 3
"""Boundaries at which ranks leave notes."""
LEAD = 4
"""Boundaries from the one at which rank 0 has seen all notes to the first at which ranks wait for one another."""
MOST_STEPS = 64
"""Boundaries until a rank that has left no note is not waited for."""
_GO = "go"
_BITS = 64
_SMALL = 1 << 40
"""Notes are added up modulo this, so that the store's numbers do not overflow."""


class SideGroup:
    """All ranks of a job make one, at the same point; every method but `agreed` waits for all of them.

    `store` is a `c10d.Store` of its own. Ranks wait for one another as long as in any collective of the job, its
    `timeout`: with a shorter one a rank could go its own way that others do not.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        import torch
        import torch.distributed as dist

        self._torch, self._dist = torch, dist
        self._size = size
        self._group: Any = dist.ProcessGroupGloo(store, rank, size, timeout=timeout)
        self._wish = torch.zeros(1, dtype=torch.int32)
        self._work: Any = None

    def agreed(self, iteration: int, wish: bool) -> bool:
        """Whether all ranks wished for the same some iterations ago: asked without waiting for the answer.

        The controller's order reaches ranks at different iterations, and recording is a collective matter. All ranks
        call this at the same iterations.
        """
        if iteration % AGREE_EVERY == 0:
            self._wish.fill_(int(wish))
            self._work = self._start(self._wish, self._dist.ReduceOp.MIN)
            return False
        if self._work is None or iteration % AGREE_EVERY != AGREE_EVERY - 1:
            return False
        self._work.wait()
        self._work = None
        return bool(self._wish.item())

    def sums(self, numbers: Sequence[int]) -> list[int]:
        """The sums over all ranks, modulo 2**64 and as signed numbers; the same on every rank."""
        values = self._torch.tensor([_signed(number) for number in numbers], dtype=self._torch.int64)
        self._start(values, self._dist.ReduceOp.SUM).wait()
        return [int(number) for number in values.tolist()]

    def means(self, times: Sequence[float]) -> list[float]:
        """The means over all ranks, in whole microseconds; the same on every rank."""
        return [total / self._size for total in self.sums([round(time) for time in times])]

    def aligned(self, engines: Iterable[Engine]) -> bool:
        """Whether every rank has submitted the same collectives of each group, so that who runs them may change here.

        The iterations of a script that says nothing of them might end at different calls on different ranks. False
        too where a second thread submits: such calls have no place between two iterations.
        """
        known = list(engines)
        other_threads = sum(not engine.by_one_thread for engine in known)
        return self.sums([check_of(known), other_threads]) == [0, 0]

    def _start(self, values: Any, how: Any) -> Any:
        from torch._C import _distributed_c10d as c10d

        options: Any = c10d.AllreduceOptions()
        options.reduceOp = how
        return self._group.allreduce([values], options)


class IterationRollCall:
    """Whether all ranks come to the ends of iterations at all, and at the same calls: found out without waiting.

    A job may step an optimizer on one rank only, or twice as often: who waited for the others there would wait for
    ever. So each rank leaves a note in the job's store at its first boundaries, rank 0 looks whether all have and what
    they add up to, and only then is there a boundary at which ranks wait for one another.
    """

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, rank, size

    def begin_at(self, step: int, engines: Iterable[Engine]) -> int | None:
        """Called at every boundary, which are counted from 1.

        Args:
            step: The number of the boundary.
            engines: Of all groups of this process.

        Returns:
            The boundary at which all ranks may wait for one another; 0: never; None: not known yet.
        """
        if step <= NOTES:
            # The sum comes first: whoever sees all counted sees all added.
            self._store.add(f"{step}/sum", check_of(engines) % _SMALL)
            self._store.add(f"{step}/count", 1)
        if step < NOTES:
            return None
        numbers = range(1, NOTES + 1)
        if step >= MOST_STEPS:
            self._decide(0)
        elif self._rank == 0 and all(self._store.add(f"{number}/count", 0) == self._size for number in numbers):
            same = all(self._store.add(f"{number}/sum", 0) % _SMALL == 0 for number in numbers)
            self._decide(step + LEAD if same else 0)
        return int(self._store.get(_GO)) if self._store.check([_GO]) else None

    def _decide(self, boundary: int) -> None:
        """The first decision of any rank counts."""
        self._store.compare_set(_GO, "", str(boundary))


def check_of(engines: Iterable[Engine]) -> int:
    """A number whose sum over all ranks is 0 if each group's ranks have submitted the same number of calls to it."""
    return sum(_check(engine.name, engine.rank, engine.size, engine.calls) for engine in engines)


def _check(name: str, rank: int, size: int, calls: int) -> int:
    """A number whose sum over the ranks of a group is 0 if all have submitted the same number of calls.

    Else it is not 0 but by an accident of 1 in 2**64, as weights are as good as random. Groups of different names may
    be added up: a rank sends one number, however many groups it is in.

    >>> [sum(_check("g", rank, 3, calls) for rank, calls in enumerate(each)) % 2**64 for each in ((5, 5, 5), (0, 0, 0))]
    [0, 0]
    >>> sum(_check("g", rank, 3, calls) for rank, calls in enumerate((5, 6, 5))) % 2**64 == 0
    False
    """
    return (_weight(name, rank) - _weight(name, (rank + 1) % size)) * calls if size > 1 else 0


def _weight(name: str, rank: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{name}/{rank}".encode()).digest()[: _BITS // 8])


def _signed(number: int) -> int:
    number %= 1 << _BITS
    return number - (1 << _BITS) if number >> (_BITS - 1) else number
