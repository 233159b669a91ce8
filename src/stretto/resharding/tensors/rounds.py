# SPDX-License-Identifier: Apache-2.0
"""Divides unit tasks into rounds, so that the bytes that a rank packs at a time stay within a limit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import ceil

import numpy as np

from ...errors import InvalidInput
from .. import UnitTask

GROWTH = 1.25
"""Factor by which the number of rounds grows when the pieces do not fit into the rounds tried."""


def rounds_of(tasks: Sequence[UnitTask], limit_bytes: int) -> list[tuple[UnitTask, ...]]:
    """Cut and distribute tasks so that no device's input and output of a round exceed `limit_bytes`.

    Every round has a part of every task where that is possible, so that all links are used in all rounds.

    >>> halves = rounds_of([UnitTask(tensor=0, box=((0, 8), (0, 4)), nbytes=32, holders=((0,),), receivers=(1,),
    ...                              align=1)], 16)
    >>> [(task.box, task.nbytes) for (task,) in halves]
    [(((0, 4), (0, 4)), 16), (((4, 8), (0, 4)), 16)]
    """
    if not tasks:
        return []
    busiest = max(_load(tasks).values())
    least = max(task.align * _most_of_one(task) for task in tasks)
    if least > limit_bytes:
        raise InvalidInput(f"staging_bytes: {limit_bytes} does not hold one element; give at least {least}")
    count = max(1, ceil(busiest / limit_bytes))
    most = sum(task.nbytes // task.align for task in tasks)
    while True:
        dealt: list[list[UnitTask]] = [[] for _ in range(count)]
        for number, task in enumerate(tasks):
            pieces = list(cut(task, count))
            for at, piece in enumerate(pieces):
                dealt[(at * count // len(pieces) + (number if len(pieces) < count else 0)) % count].append(piece)
        if all(max(_load(these).values(), default=0) <= limit_bytes for these in dealt):
            return [tuple(these) for these in dealt if these]
        if count >= most:
            raise InvalidInput(f"staging_bytes: {limit_bytes} is too little for {busiest} bytes in {count} rounds")
        count = min(most, ceil(count * GROWTH + 1e-9))


def cut(task: UnitTask, count: int) -> Iterator[UnitTask]:
    """A task cut into at most `count` boxes, along its outer dimensions."""
    dim = next((d for d, (begin, end) in enumerate(task.box) if end - begin > 1), None)
    if count <= 1 or dim is None:
        yield task
        return
    begin, end = task.box[dim]
    ways = min(count, end - begin)
    row = task.nbytes // (end - begin)
    for at in range(ways):
        low, high = (begin + (end - begin) * k // ways for k in (at, at + 1))
        piece = replace(task, box=(*task.box[:dim], (low, high), *task.box[dim + 1 :]), nbytes=row * (high - low))
        yield from cut(piece, -(-count // ways))


def _load(tasks: Sequence[UnitTask]) -> dict[int, int]:
    load: dict[int, int] = {}
    for task in tasks:
        for device in (*(d for alike in task.holders for d in alike), *task.receivers):
            load[device] = load.get(device, 0) + task.nbytes
    return load


def _most_of_one(task: UnitTask) -> int:
    """The largest number of buffers of one device that contain a task: 2 where a device both holds and wants it."""
    devices = [d for alike in task.holders for d in alike] + list(task.receivers)
    return int(np.unique(devices, return_counts=True)[1].max())
