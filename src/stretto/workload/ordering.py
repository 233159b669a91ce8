"""An order of ops in which each comes after what it waits for."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from graphlib import TopologicalSorter
from heapq import heapify, heappop, heappush
from typing import TypeVar

K = TypeVar("K", bound=Hashable)


def in_order(needs: Mapping[K, Iterable[K]]) -> list[K]:
    """The keys of `needs`, each after those that it needs, otherwise as they are listed.

    Raises `graphlib.CycleError` where that cannot be.

    >>> in_order({"update": ["reduce"], "forward": [], "reduce": ["forward"], "log": []})
    ['forward', 'reduce', 'update', 'log']
    """
    keys = list(needs)
    position = {key: at for at, key in enumerate(keys)}
    sorter = TopologicalSorter(needs)
    sorter.prepare()
    out: list[K] = []
    ready = [position[key] for key in sorter.get_ready()]
    heapify(ready)
    while ready:
        key = keys[heappop(ready)]
        out.append(key)
        sorter.done(key)
        for free in sorter.get_ready():
            heappush(ready, position[free])
    return out
