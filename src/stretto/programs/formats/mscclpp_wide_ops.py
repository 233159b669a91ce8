# SPDX-License-Identifier: Apache-2.0
"""The operations of one threadblock that carry out wide steps."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from ..wide import PACKET, Cell, WideStep

T = TypeVar("T")
EVERYBODY = -1
"""Stands for the rank in a place that a switch channel reaches on all ranks at once."""
MOST_PARTS = 8
"""The most places of peers, or packets, that one operation takes on a side, beside one of its own."""


@dataclass(frozen=True, kw_only=True)
class WideOp:
    """One operation; the k-th of `peers` is the business of thread k."""

    name: str
    src: tuple[Cell, ...] = ()
    dst: tuple[Cell, ...] = ()
    count: int = 1
    peers: tuple[int, ...] = ()
    semaphore: int = -1
    inner: tuple[WideOp, ...] = ()

    @property
    def reduces(self) -> bool:
        """Whether it adds up."""
        return self.name in ("re", "res", "rre", "rres", "repkt", "respkt", "glres")

    def all_peers(self) -> Iterator[int]:
        """The ranks that it, or an operation of its loop, signals or waits for."""
        yield from self.peers
        for op in self.inner:
            yield from op.peers


def _overlap(a: Cell, m: int, b: Cell, n: int) -> bool:
    return a[:2] == b[:2] and a[2] < b[2] + n and b[2] < a[2] + m


class BlockWriter:
    """Writes operations with a `nop`, at which all threads meet, only where one is needed.

    Threads run ahead of each other: a signal says that everything before it is done only if they have met since, and
    what one thread has waited for, the others do not know.
    """

    def __init__(self, rank: int, *, in_place: bool, once: Collection[Cell], multicast: int = 0) -> None:
        self.rank, self._in_place, self._once = rank, in_place, once
        self._multicast = multicast
        """The number of ranks that a switch adds up and copies for; 0 where none does."""
        self.ops: list[WideOp] = []
        self._waited = False
        self._touched: list[tuple[Cell, int, bool]] = []
        self._users: set[tuple[str, int]] = set()

    def wait(self, peers: Sequence[int], *, relaxed: bool = False) -> None:
        """Wait for the next signal of each of some ranks."""
        for some in _parts(peers):
            self._meet(any(("wait", q) in self._users for q in some))
            self._users |= {("wait", q) for q in some}
            self.ops.append(WideOp(name="rlxwait" if relaxed else "wait", peers=tuple(some)))
            self._waited = True

    def signal(self, peers: Sequence[int], *, relaxed: bool = False) -> None:
        """Tell some ranks that all operations so far are done; relaxed: only that this rank has launched."""
        for some in _parts(peers):
            used = any(("signal", q) in self._users for q in some)
            self._meet(used or (not relaxed and (self._waited or bool(self._touched))))
            self._users |= {("signal", q) for q in some}
            self.ops.append(WideOp(name="rlxsignal" if relaxed else "signal", peers=tuple(some)))

    def meet(self, *, always: bool = False) -> None:
        """Let all threads meet, if any has waited."""
        self._meet(always or self._waited)

    def step(self, step: WideStep) -> None:
        """Carry out one wide step."""
        if self._multicast and self._switched(step):
            return
        if any(cell[1] == PACKET for cell in (*step.sources, *step.targets)):
            self._packets(step)
        elif len(step.sources) == 1:
            self._copies(step, step.sources[0], step.targets)
        else:
            self._sums(step)

    def _switched(self, step: WideStep) -> bool:
        """Let the switch add up, or copy, what all ranks have in the same place; False where it cannot."""
        found = switched(step, self._multicast)
        if found is None:
            return False
        source, target = found
        if source is None:
            # In place it stores over its own data, too: the same.
            self._add("gstore", step.count, step.sources, [target], touches=[*step.sources, *step.targets])
        else:
            self._add("glres", step.count, [source], [target], touches=[*step.sources, *step.targets])
        return True

    def _copies(self, step: WideStep, source: Cell, targets: Sequence[Cell]) -> None:
        own, away = self._sides(targets)
        if source[0] != self.rank:
            self._add("get", step.count, [source], own[:1])
            source, own = own[0], own[1:]
        if away and not own and len(away) > 1 and self._in_place and source in self._once:
            own = [source]  # One read for all writes: the operation has a place of its own, which it leaves as it is.
        if away and own:
            for some in _parts(away):
                self._add("res", step.count, [source], [own[0], *some])
            own = [cell for cell in own[1:] if cell != source]
        else:
            for cell in away:
                self._add("put", step.count, [source], [cell])
        for cell in own:
            self._add("copy", step.count, [source], [cell])

    def _sums(self, step: WideStep) -> None:
        first, *others = step.sources
        own, away = self._sides(step.targets)
        here, there = self._sides(others)
        for names, parts in ((("re", "res"), here), (("rre", "rres"), there)):
            rest = _parts(parts)
            for k, some in enumerate(rest):
                last = k == len(rest) - 1 and not (parts is here and there)
                sent = away[:MOST_PARTS] if last else []
                self._add(names[bool(sent)], step.count, [first, *some], [own[0], *sent])
                first = own[0]
        for some in _parts(away[MOST_PARTS:]):
            self._add("res", step.count, [own[0]], [own[0], *some])
        for cell in own[1:]:
            self._add("copy", step.count, [own[0]], [cell])

    def _packets(self, step: WideStep) -> None:
        own, away = self._sides(step.targets)
        packets = [cell for cell in step.sources if cell[1] == PACKET]
        plain = [cell for cell in step.sources if cell[1] != PACKET]
        if not packets:
            for cell in away:
                self._add("ppkt", step.count, plain, [cell])
            for cell in own:
                self._add("copy", step.count, plain, [cell])
        elif not plain:
            for some in _parts(away):
                self._add("rppkt", step.count, packets, some)
            for cell in own:
                self._add("upkt", step.count, packets, [cell])
        else:
            rest = _parts(packets)
            for k, some in enumerate(rest):
                sent = away[:MOST_PARTS] if k == len(rest) - 1 else []
                self._add("respkt" if sent else "repkt", step.count, [*plain, *some], [own[0], *sent])
                plain = own[:1]
            for cell in away[MOST_PARTS:]:
                self._add("ppkt", step.count, own[:1], [cell])
            for cell in own[1:]:
                self._add("copy", step.count, own[:1], [cell])

    def _sides(self, cells: Sequence[Cell]) -> tuple[list[Cell], list[Cell]]:
        """This rank's places, and those of peers, the next rank first so that not all write to one rank at once."""
        away = sorted((c for c in cells if c[0] != self.rank), key=lambda c: (c[0] <= self.rank, c[0]))
        return [c for c in cells if c[0] == self.rank], away

    def _add(
        self, name: str, count: int, src: Sequence[Cell], dst: Sequence[Cell], *, touches: Sequence[Cell] = ()
    ) -> None:
        access = [(c, count, True) for c in touches]
        access += [(c, count, False) for c in src if c[1] != PACKET] + [(c, count, True) for c in dst if c[1] != PACKET]
        clash = any((x or y) and _overlap(a, m, b, n) for a, m, x in access for b, n, y in self._touched)
        self._meet(self._waited or clash)
        last = self.ops[-1] if self.ops else None
        self._touched += access
        joins = last is not None and name in ("put", "ppkt") and (last.name, last.count) == (name, count)
        if last is not None and joins and last.src[0][1] == src[0][1] and len(last.src) < MOST_PARTS:
            self.ops[-1] = replace(last, src=(*last.src, *src), dst=(*last.dst, *dst))
        else:
            self.ops.append(WideOp(name=name, src=tuple(src), dst=tuple(dst), count=count))

    def _meet(self, needed: bool) -> None:
        if needed:
            self.ops.append(WideOp(name="nop"))
            self._waited, self._touched, self._users = False, [], set()


def _parts(items: Sequence[T]) -> list[list[T]]:
    return [list(items[k : k + MOST_PARTS]) for k in range(0, len(items), MOST_PARTS)]


def switched(step: WideStep, ranks: int) -> tuple[Cell | None, Cell] | None:
    """What a switch adds up (None: one rank's own data) and where it copies that to, on all ranks alike.

    Args:
        step: The step.
        ranks: The number of ranks.

    Returns:
        Both places, as those of everybody; None where a switch cannot carry out the step.
    """
    source = _everywhere(step.sources, ranks)
    if source is not None:
        target = _everywhere(step.targets, ranks)
        return None if target is None else (source, target)
    own = step.sources[0]
    if len(step.sources) > 1 or own[0] != step.rank:
        return None
    target = _everywhere(step.targets, ranks) or _everywhere([own, *step.targets], ranks)
    return None if target is None else (None, target)


def _everywhere(cells: Sequence[Cell], ranks: int) -> Cell | None:
    places = {cell[1:] for cell in cells}
    if len(places) > 1 or {cell[0] for cell in cells} != set(range(ranks)):
        return None
    return EVERYBODY, *places.pop()
