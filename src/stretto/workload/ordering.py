# SPDX-License-Identifier: Apache-2.0
"""Sorts ops so that each follows its dependencies, and shortens lists of names for messages."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from graphlib import TopologicalSorter
from heapq import heapify, heappop, heappush
from typing import TypeVar

K = TypeVar("K", bound=Hashable)
MANY = 8
"""The largest number of names that a message lists in full."""


def in_order(needs: Mapping[K, Iterable[K]]) -> list[K]:
    """The keys of `needs`, each after the keys that it needs, otherwise in the order in which they are listed.

    Raises `graphlib.CycleError` if keys need each other in a circle.

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
