# SPDX-License-Identifier: Apache-2.0
"""What ranks tell each other through the job's store, read only by those who wait too long.

A rank that gives up a plan says where. A rank that waits long in a call between two iterations says in which. A rank
that finds out that two of them cannot both be right says so, and everybody who waits for them ends with that.
"""

from __future__ import annotations

import msgspec

from ...files import typed
from ...process_state import STATE
from ..torch_backend.job_store import job_store

Place = tuple[int, int]
"""(iteration, comm-op) in the order of submission, the same on all ranks."""
PREFIX = "stretto/enforcer"
MOST = 16
"""The most notices of a kind that are read; a rank that differs from all others also differs from these."""


class Notice(msgspec.Struct, frozen=True, kw_only=True):
    """That a rank runs everything from a place on in plain order."""

    iteration: int
    op: int
    rank: int
    why: str


class Stray(msgspec.Struct, frozen=True, kw_only=True):
    """That a rank waits in a call between two iterations: the how many-th among these ranks before `iteration`."""

    iteration: int
    rank: int
    ranks: tuple[int, ...]
    nth: int
    what: str

    def contradicts(self, iteration: int, rank: int, seen: dict[tuple[int, ...], list[str]], *, past: bool) -> str:
        """Why this rank cannot join in, given the calls that it has `seen` here itself; empty where it may still.

        `past`: whether it has gone past this place.

        Args:
            iteration: The iteration that this rank is in.
            rank: This rank.
            seen: This rank's calls before the iteration, by the ranks of their group.
            past: Whether this rank has gone past the place.

        Returns:
            The reason, or an empty text.
        """
        if self.rank == rank or self.iteration != iteration or rank not in self.ranks:
            return ""
        mine = seen.get(self.ranks, [])
        if self.nth < len(mine):
            same = mine[self.nth] == self.what
            return "" if same else f"rank {self.rank} calls {self.what} where rank {rank} calls {mine[self.nth]}"
        return f"rank {self.rank} calls {self.what} before iteration {iteration}, rank {rank} does not" if past else ""


class Announcements:
    """The notices of all ranks. All ranks make it in the same order, as a name for the job is counted.

    `stay` numbers the times for which a plan was active.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._store = job_store("stretto/announced", apart=True)
        self.generation = STATE.number("announcements")
        self._prefix = f"{PREFIX}/{self.generation}"

    def announce(self, number: int, stay: int, place: Place, why: str) -> None:
        """This rank gives up a plan at a place.

        Args:
            number: The plan.
            stay: Which activation of the plan it is.
            place: Iteration and op.
            why: The reason, for people.
        """
        notice = Notice(iteration=place[0], op=place[1], rank=self._rank, why=why)
        self._append(f"{number}.{stay}", msgspec.json.encode(notice))

    def look(self, number: int, stay: int) -> tuple[Place, int, str] | None:
        """The earliest place at which a rank gave up a plan, which rank, and why; None where none did."""
        found = [msgspec.json.decode(one, type=typed(Notice)) for one in self._all(f"{number}.{stay}")]
        first = min(found, key=lambda notice: (notice.iteration, notice.op, notice.rank), default=None)
        return None if first is None else ((first.iteration, first.op), first.rank, first.why)

    def hopeless(self, number: int, stay: int, place: Place, op: str) -> str:
        """Why an op at a place never ends: another rank gave up the plan before it. Then nothing can; empty else.

        Args:
            number: The plan.
            stay: Which activation of the plan it is.
            place: Iteration and op.
            op: The name of the op.

        Returns:
            The reason, or an empty text.
        """
        found = self.look(number, stay)
        if found is None or found[0] > place or found[1] == self._rank:
            return ""
        why = f"{op} cannot end: rank {found[1]} gave up plan {number}: {found[2]}"
        self.end(number, stay, why)
        return why

    def wait_in(self, number: int, stray: Stray) -> None:
        """This rank waits long in a call between two iterations."""
        key = f"{number}/strays/{stray.iteration}"
        if self._count(key) < MOST:
            self._append(key, msgspec.json.encode(stray))

    def strays(self, number: int, iteration: int) -> list[Stray]:
        """The calls before an iteration in which ranks have said that they wait."""
        return [msgspec.json.decode(one, type=typed(Stray)) for one in self._all(f"{number}/strays/{iteration}")]

    def end(self, number: int, stay: int, why: str) -> None:
        """Announce that a plan's ranks cannot come together again; of several reasons the first one stays.

        Args:
            number: The plan.
            stay: Which activation of the plan it is.
            why: The reason, for people.
        """
        if not self.ended(number, stay):
            self._append(f"{number}.{stay}/end", f"{why} (found by rank {self._rank})".encode())

    def ended(self, number: int, stay: int) -> str:
        """Why nothing can bring the ranks of a plan together again; empty where nothing was said."""
        return next((one.decode() for one in self._all(f"{number}.{stay}/end")), "")

    def _append(self, key: str, value: bytes) -> None:
        at = self._store.add(f"{self._prefix}/{key}/count", 1)
        self._store.set(f"{self._prefix}/{key}/{at}", value.decode())

    def _count(self, key: str) -> int:
        return int(self._store.add(f"{self._prefix}/{key}/count", 0))

    def _all(self, key: str) -> list[bytes]:
        keys = [f"{self._prefix}/{key}/{at}" for at in range(1, min(self._count(key), MOST) + 1)]
        return [self._store.get(one) for one in keys if self._store.check([one])]
