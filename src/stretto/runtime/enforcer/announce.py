"""Who has given up a plan, told through the job's store; read only by those who wait too long."""

from __future__ import annotations

import msgspec
import torch.distributed as dist

Place = tuple[int, int]
"""(iteration, comm-op) in the order of submission, the same on all ranks."""
PREFIX = "stretto/enforcer"


class Notice(msgspec.Struct, frozen=True, kw_only=True):
    """That a rank runs everything from a place on in plain order."""

    iteration: int
    op: int
    rank: int
    why: str


class Announcements:
    """The notices of all ranks. All ranks make it in the same order, as a name for the job is counted."""

    made = 0

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._store = dist.distributed_c10d._get_default_store()
        Announcements.made += 1
        self.generation = Announcements.made
        self._prefix = f"{PREFIX}/{self.generation}"

    def announce(self, number: int, place: Place, why: str) -> None:
        """This rank gives up a plan at a place."""
        notice = Notice(iteration=place[0], op=place[1], rank=self._rank, why=why)
        at = self._store.add(f"{self._prefix}/{number}/count", 1)
        self._store.set(f"{self._prefix}/{number}/{at}", msgspec.json.encode(notice).decode())

    def look(self, number: int) -> tuple[Place, int, str] | None:
        """The earliest place at which a rank gave up a plan, which rank, and why; None where none did."""
        found: list[Notice] = []
        for at in range(1, self._store.add(f"{self._prefix}/{number}/count", 0) + 1):
            key = f"{self._prefix}/{number}/{at}"
            if self._store.check([key]):
                found.append(msgspec.json.decode(self._store.get(key), type=Notice))
        first = min(found, key=lambda notice: (notice.iteration, notice.op, notice.rank), default=None)
        return None if first is None else ((first.iteration, first.op), first.rank, first.why)
