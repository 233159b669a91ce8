# SPDX-License-Identifier: Apache-2.0
"""How wide steps are divided into streams that have nothing in common, so that threadblocks run them side by side."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

PACKET = "p"
"""The buffer of slots whose data carries flags: whoever reads one waits until it has arrived."""

Cell = tuple[int, str, int]
"""A place: rank, buffer (i, o, s or p) and the first chunk."""


@dataclass(slots=True)
class WideStep:
    """Rank `rank` reads `count` chunks at each source, adds them up, and writes the sum to every target."""

    rank: int
    piece: int
    """Steps of different pieces touch different data, but where input and output share memory."""
    count: int
    sources: list[Cell]
    targets: list[Cell]
    level: int = 0
    staged: bool = False
    """Whether it takes messages out of slots of its own rank, rather than out of its peers' memory."""

    def touches(self, cells: Sequence[Cell]) -> bool:
        """Whether it reads or writes any of some places."""
        return any(cell in self.sources or cell in self.targets for cell in cells)

    def writes(self, cells: Sequence[Cell]) -> bool:
        """Whether it writes any of some places."""
        return any(cell in self.targets for cell in cells)


def divide(steps: Sequence[WideStep], group: Sequence[int], streams: int) -> tuple[int, ...]:
    """Divide pieces among streams so that every rank's work is spread.

    Args:
        steps: All steps.
        group: For each piece the first of those that have to stay together.
        streams: The most streams.

    Returns:
        The stream of each piece.
    """
    work: dict[int, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    for s in steps:
        work[group[s.piece]][s.rank] += s.count * (len(s.sources) + len(s.targets))
    load: list[dict[int, float]] = [defaultdict(float) for _ in range(streams)]
    total = [0.0] * streams
    chosen: dict[int, int] = {}
    for number in sorted(set(group)):
        mine = work[number]
        heavy = max(mine, key=lambda r: mine[r], default=0)
        first = min(mine, default=0) + heavy
        order = [(first + k + number) % streams for k in range(streams)]
        # Take the stream with least work among those in which the piece does not delay others on its ranks.
        best = min(order, key=lambda s: (max((load[s][r] + w for r, w in mine.items()), default=0.0), total[s]))
        chosen[number] = best
        total[best] += sum(mine.values())
        for r, w in mine.items():
            load[best][r] += w
    used = {s: k for k, s in enumerate(sorted(set(chosen.values())))}
    return tuple(used[chosen[g]] for g in group)


class _Together:
    """Numbers that belong together; each group is called by its first."""

    def __init__(self, count: int) -> None:
        self.first = list(range(count))

    def of(self, number: int) -> int:
        while self.first[number] != number:
            number = self.first[number]
        return number

    def join(self, a: int, b: int) -> None:
        low, high = sorted((self.of(a), self.of(b)))
        self.first[high] = low

    def groups(self) -> list[int]:
        return [self.of(number) for number in range(len(self.first))]


def shared_pieces(
    pieces: Sequence[tuple[int, int]], inputs: Sequence[Mapping[int, Cell]], outputs: Sequence[Mapping[int, Cell]]
) -> list[int]:
    """The first piece of those that each piece shares memory with, where input and output are one buffer.

    Args:
        pieces: The first chunk and the number of chunks of each.
        inputs: Where the chunks of each rank's input lie.
        outputs: Where those of its output lie.

    Returns:
        For each piece the number of a piece (its own, where it shares nothing).
    """
    together = _Together(len(pieces))
    piece = {chunk + k: number for number, (chunk, count) in enumerate(pieces) for k in range(count)}
    for before, behind in zip(inputs, outputs, strict=True):
        owner = {cell: chunk for chunk, cell in before.items()}
        for chunk, cell in behind.items():
            other = owner.get(cell)
            if other is not None:
                together.join(piece[chunk], piece[other])
    return together.groups()


def split_packets(steps: Sequence[WideStep]) -> tuple[list[WideStep], list[int]]:
    """Make pieces of packets as small as they can be: what one rank does with the same plain memory.

    A step that only sends on what is in memory is cut into one for each place that it writes.

    Args:
        steps: The steps, in order.

    Returns:
        The steps with new pieces, and the group of each piece.
    """
    found: list[WideStep] = []
    for step in steps:
        sends = len(step.sources) == 1 and step.sources[0][1] != PACKET
        parts = [[cell] for cell in step.targets] if sends else [step.targets]
        found += [replace(step, piece=len(found) + k, targets=cells) for k, cells in enumerate(parts)]
    together = _Together(len(found))
    wrote: dict[Cell, int] = {}
    read: dict[Cell, list[int]] = defaultdict(list)
    for step in found:
        for cells, writes in ((step.sources, False), (step.targets, True)):
            for rank, buffer, first in (cell for cell in cells if cell[1] != PACKET):
                for place in ((rank, buffer, first + k) for k in range(step.count)):
                    others = [wrote[place]] if place in wrote else []
                    for other in [*others, *(read[place] if writes else [])]:
                        together.join(other, step.piece)
                    if writes:
                        wrote[place] = step.piece
                    else:
                        read[place].append(step.piece)
    return found, together.groups()
