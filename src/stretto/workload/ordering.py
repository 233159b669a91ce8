"""An order of ops in which each comes after what it waits for, and how to name those for which there is none."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from graphlib import TopologicalSorter
from heapq import heapify, heappop, heappush
from typing import TypeVar

K = TypeVar("K", bound=Hashable)
MANY = 8
"""Names beyond which a message leaves some out."""


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

def few(names: Sequence[str]) -> list[str]:
    """Names for a message: where there are many, the first and the last of them.

    >>> few([f"op{at}" for at in range(1000)])
    ['op0', 'op1', 'op2', 'op3', '... (994 more)', 'op998', 'op999']
    """
    return list(names) if len(names) <= MANY else [*names[:4], f"... ({len(names) - 6} more)", *names[-2:]]
