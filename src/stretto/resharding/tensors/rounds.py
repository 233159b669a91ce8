# SPDX-License-Identifier: Apache-2.0
"""Divides unit tasks into rounds of equal size, so that one program carries every round and staging stays bounded.

Tasks between the same devices are one stream of bytes. Every round carries the same number of bytes of each stream, so
all links are used in all rounds, and one plan serves any number of rounds, also of a part of the tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import ceil

from ...errors import InvalidInput
from .. import UnitTask

GROWTH = 1.25
"""Factor by which the number of rounds grows when the bytes of a round do not fit into the limit."""
WASTE = 16
"""A row of a tensor is cut, too, where it is larger than this part of a stream's bytes of a round."""
MORE_ROUNDS, SLACKS = 3, (0.0, 1 / 256, 1 / 64, 1 / 32)
"""Rounds more, and room in each beyond an even share, that are tried: rows that are not cut leave gaps, and tensors may
end in a round more, which carries as many bytes as any other."""
MAX_DEALT = 4_000
"""The most tasks that are dealt to find out."""


@dataclass(frozen=True, kw_only=True)
class Stream:
    """All unit tasks between the same devices, and the bytes of them that go in one round."""

    holders: tuple[tuple[int, ...], ...]
    receivers: tuple[int, ...]
    reduction: str
    align: int
    nbytes: int
    """The bytes of one round."""

    def task(self) -> UnitTask:
        """The stream's part of a round as one task, which stands for whatever the round carries."""
        return UnitTask(
            tensor=0, box=((0, self.nbytes),), nbytes=self.nbytes, holders=self.holders, receivers=self.receivers,
            align=self.align, reduction=self.reduction,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class RoundPiece:
    """A unit task, or a part of one, and its place among the bytes of its stream in its round."""

    stream: int
    offset: int
    task: UnitTask


Rounds = list[list[RoundPiece]]


def streams_of(tasks: Sequence[UnitTask], limit_bytes: int | None, *, unit: int = 1, depth: int = 1) -> list[Stream]:
    """The streams of some tasks, with so many bytes in a round that no device's input and output exceed the limit.

    >>> task = UnitTask(tensor=0, box=((0, 8), (0, 4)), nbytes=32, holders=((0,),), receivers=(1,), align=1)
    >>> [stream.nbytes for stream in streams_of([task], 16)]
    [16]

    Args:
        tasks: the unit tasks.
        limit_bytes: the most bytes of input and output of any device in a round; None for no limit.
        unit: the bytes of which streams are multiples, where there are several of them.
        depth: the rounds that are under way at a time, and share the limit, where there are several.

    Returns:
        The streams, those with the largest elements first, so that every piece is aligned in a packed buffer.

    Raises:
        InvalidInput: the limit does not hold one element of every stream.
    """
    found: dict[tuple[object, ...], list[UnitTask]] = {}
    for task in tasks:
        found.setdefault((task.holders, task.receivers), []).append(task)
    groups = sorted(found.values(), key=lambda group: -max(task.align for task in group))
    if len(groups) == 1:
        unit = 1
    aligns = [max(max(task.align for task in group), unit) for group in groups]
    totals = [_padded(sum(task.nbytes for task in group), align) for group, align in zip(groups, aligns, strict=True)]

    def sized(sizes: Sequence[int]) -> list[Stream]:
        found = zip(groups, aligns, sizes, strict=True)
        return [_stream(group[0], align, size) for group, align, size in found]

    made = sized(totals)
    if limit_bytes is None or not tasks or _busiest(made) <= limit_bytes:
        return made
    least = depth * _busiest(sized(aligns))
    if least > limit_bytes:
        raise InvalidInput(f"staging_bytes: {limit_bytes} does not hold one element of each; give at least {least}")
    limit_bytes //= depth
    count = max(2, ceil(_busiest(made) / limit_bytes))
    while True:
        made = sized([_padded(ceil(total / count), align) for total, align in zip(totals, aligns, strict=True)])
        if _busiest(made) <= limit_bytes:
            break
        count = ceil(count * GROWTH + 1e-9)
    if len(tasks) > MAX_DEALT:
        return made
    best, least_bytes = made, _moved(tasks, made)
    for rounds, slack in product(range(count, count + MORE_ROUNDS), SLACKS):
        shares = [ceil(total * (1 + slack) / rounds) for total in totals]
        made = sized([_padded(share, align) for share, align in zip(shares, aligns, strict=True)])
        if _busiest(made) <= limit_bytes and (moved := _moved(tasks, made)) < least_bytes:
            best, least_bytes = made, moved
    return best


def _moved(tasks: Sequence[UnitTask], streams: Sequence[Stream]) -> int:
    """The bytes of all rounds together, full or not."""
    return len(deal(tasks, streams)) * sum(stream.nbytes for stream in streams)


def deal(tasks: Sequence[UnitTask], streams: Sequence[Stream]) -> Rounds:
    """Put tasks one behind the other into the rounds of their streams; a task is cut where a round is full.

    >>> task = UnitTask(tensor=0, box=((0, 8), (0, 4)), nbytes=32, holders=((0,),), receivers=(1,), align=1)
    >>> [[(p.task.box, p.offset) for p in these] for these in deal([task], streams_of([task], 16))]
    [[(((0, 4), (0, 4)), 0)], [(((4, 8), (0, 4)), 0)]]

    Args:
        tasks: the unit tasks; each between the devices of one of the streams.
        streams: the streams.

    Returns:
        The pieces of every round, stream by stream.
    """
    number = {(stream.holders, stream.receivers): at for at, stream in enumerate(streams)}
    queues: list[list[UnitTask]] = [[] for _ in streams]
    for task in sorted(tasks, key=lambda task: -task.align):
        queues[number[task.holders, task.receivers]].append(task)
    rounds: Rounds = []
    for at, (stream, queue) in enumerate(zip(streams, queues, strict=True)):
        for turn, pieces in enumerate(_filled(at, queue, stream.nbytes)):
            if turn == len(rounds):
                rounds.append([])
            rounds[turn] += pieces
    return rounds


def _filled(stream: int, queue: Sequence[UnitTask], room: int) -> Rounds:
    """One stream's tasks in rounds of `room` bytes."""
    rounds: Rounds = [[]] if queue else []
    waiting, end = list(reversed(queue)), 0
    while waiting:
        task = waiting.pop()
        offset = _padded(end, task.align)
        head, rest = split(task, room - offset, room // WASTE)
        waiting += reversed(rest)
        if head is None:
            rounds.append([])
            end = 0
            continue
        rounds[-1].append(RoundPiece(stream=stream, offset=offset, task=head))
        end = offset + head.nbytes
    return rounds


def split(task: UnitTask, room: int, largest_row: int) -> tuple[UnitTask | None, list[UnitTask]]:
    """The part of a task that fits into some bytes, and the rest of it.

    Args:
        task: the task.
        room: the bytes that are free.
        largest_row: rows of more bytes than this are cut, others stay whole.

    Returns:
        The first part, or None if nothing fits; and the parts that are left, in order.
    """
    if task.nbytes <= room:
        return task, []
    dim = next((d for d, (begin, end) in enumerate(task.box) if end - begin > 1), None)
    if dim is None or room < task.align:
        return None, [task]
    begin, end = task.box[dim]
    row = task.nbytes // (end - begin)
    rows = room // row

    def part(low: int, high: int) -> UnitTask:
        return replace(task, box=(*task.box[:dim], (low, high), *task.box[dim + 1 :]), nbytes=row * (high - low))

    if rows:
        return part(begin, begin + rows), [part(begin + rows, end)]
    if row <= largest_row:
        return None, [task]
    head, rest = split(part(begin, begin + 1), room, largest_row)
    return head, [*rest, part(begin + 1, end)]


def busiest_bytes(tasks: Sequence[UnitTask]) -> int:
    """The most bytes of input and output of any device, of all tasks together."""
    load: dict[int, int] = {}
    for task in tasks:
        for device in (*(d for alike in task.holders for d in alike), *task.receivers):
            load[device] = load.get(device, 0) + task.nbytes
    return max(load.values(), default=0)


def _stream(task: UnitTask, align: int, nbytes: int) -> Stream:
    return Stream(holders=task.holders, receivers=task.receivers, reduction=task.reduction, align=align, nbytes=nbytes)


def _padded(nbytes: int, align: int) -> int:
    return -(-nbytes // align) * align


def _busiest(streams: Sequence[Stream]) -> int:
    return busiest_bytes([stream.task() for stream in streams])
