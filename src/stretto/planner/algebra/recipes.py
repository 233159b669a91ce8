# SPDX-License-Identifier: Apache-2.0
"""Recipes of a motif: library algorithms by name, laid out on the links that the motif is bound to.

A recipe is a name that, with a collective, a group and a cluster, always gives the same program: plans store the name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from ...algorithms import algorithm, defined_for, names
from ...algorithms.orders import fast_orders, rails
from ...cluster import Cluster
from ...errors import InvalidInput, unknown
from ...programs import Program
from .lowering import lower
from .motif import motif_of
from .rules import apply

Window = tuple[int, int]
"""A splined all-to-all: rank i sends to i + first, ..., i + first + count - 1, modulo the number of ranks."""

PIPELINED = ("double_binary_tree", "binary_tree", "chain", "nccl_tree")
"""Algorithms that send piece after piece; ``name:1`` sends one piece only, which has the lower latency."""
FINE = {"chain": 64, "nccl_tree": 64}
"""The number of pieces of a further variant with many small pieces, for algorithms with long paths: ``chain:64``."""
MAX_FINE_RANKS = {"nccl_tree": 128}
"""The largest groups for which a variant with many small pieces is costed; its program has up to 32 trees."""
SAME_AS_RING = "nccl_ring"
"""An algorithm that gives the same programs as the recipe ``ring``, which runs one ring per NIC, too."""


@dataclass(frozen=True, kw_only=True)
class MotifRequest:
    """One motif to be moved: a collective over one group."""

    kind: str
    group: tuple[int, ...]
    root: int = 0
    window: Window | None = None


Provider = Callable[[MotifRequest, Cluster, float], "dict[str, Callable[[], Program]]"]
"""A source of further algorithms: ``provider(request, cluster, nbytes)`` returns builders by algorithm name.

`SimulatedCosts` calls each provider in the planning process, for every motif and size that is costed. `request` is one
motif in one group, `cluster` has only the links that the motif is bound to, `nbytes` is the motif's size. The provider
returns an empty dict for motifs that it does not serve. A builder returns a `Program` of the request's collective over
its group, and is called only when the algorithm is costed or planned; the program is verified, so a wrong one is
refused. The same request must give the same program, since plans are reproducible.
"""


def library(ask: MotifRequest) -> list[str]:
    """The recipes of the algorithm library for a motif.

    >>> library(MotifRequest(kind="broadcast", group=(0, 1, 2)))[4:]
    ['binomial', 'chain', 'chain:1', 'chain:64', 'direct']
    >>> library(MotifRequest(kind="all_to_all", group=(0, 1, 2), window=(1, 1)))
    ['direct']
    """
    if ask.kind == "send" or ask.window is not None:
        return ["direct"]
    return list(_named(ask.kind, len(ask.group), names()))


@cache
def _named(kind: str, count: int, known: tuple[str, ...]) -> tuple[str, ...]:
    """The recipes for a kind and a number of ranks; `known` are the algorithms that there are at the moment."""
    found: list[str] = []
    for name in defined_for(kind, count):
        if name == SAME_AS_RING:
            continue
        found += [name, f"{name}:1"] if name in PIPELINED else [name]
        found += [f"{name}:{FINE[name]}"] if name in FINE and 2 < count <= MAX_FINE_RANKS.get(name, count) else []
    return tuple(found)


def build(recipe: str, ask: MotifRequest, cluster: Cluster, *, in_place: bool = False) -> Program:
    """The program of a recipe on (a part of) a cluster.

    Args:
        recipe: one of ``library(ask)``.
        ask: the motif.
        cluster: the links that the motif may use.
        in_place: whether output and input share one buffer; then several chains are merged into one, because programs
            side by side are composed of programs that are not in place.

    Returns:
        The program, not yet verified.

    Raises:
        InvalidInput: the recipe is unknown or not defined for this motif.
    """
    name, _, chunks = recipe.partition(":")
    if recipe not in library(ask):
        raise unknown(f"recipe for {ask.kind}", recipe, library(ask))
    if ask.kind == "send":
        return algorithm("direct", "permute", ask.group, pairs=[(0, 1)])
    if ask.window is not None:
        return windowed(ask.group, ask.window)
    options: dict[str, Any] = {"in_place": in_place} | ({"chunks": int(chunks)} if chunks else {})
    if ask.kind in ("broadcast", "reduce", "gather", "scatter"):
        options["root"] = ask.root
    lines = rails(cluster, ask.group) if name in ("ring", "chain") else 1
    if name == "ring":
        options["rings"] = lines
    if name == "chain" and lines > 1 and not in_place and (orders := fast_orders(cluster, ask.group, rings=lines)):
        return _side_by_side([algorithm(name, ask.kind, ask.group, order=order, **options) for order in orders], ask)
    return algorithm(name, ask.kind, ask.group, cluster=cluster, **options)


def _side_by_side(parts: Sequence[Program], ask: MotifRequest) -> Program:
    """Programs of one collective, each with its share of the payload and connections of its own, as one program."""
    whole = motif_of(ask.kind, ask.group, len(parts) * max(p.collective.num_chunks for p in parts), ask.root)
    bound = {at: p.replace(lane=np.full(p.num_transfers, at, np.int16)) for at, p in enumerate(parts)}
    made = lower(apply(whole, "segment", parts=len(parts)), whole, algorithms=bound)
    return made.replace(name=f"{parts[0].name.partition('(')[0]}(rails={len(parts)})")


def windowed(group: Sequence[int], window: Window) -> Program:
    """An all-to-all of the pairs in a window, sent directly from rank to rank.

    >>> windowed(range(4), (1, 2)).num_transfers
    8
    """
    first, width = window
    count = len(group)
    if first < 0 or width < 1 or first + width > count:
        raise InvalidInput(f"window: must lie in 0..{count}, not {first}..{first + width}")
    rank = np.arange(count)
    counts = np.zeros((count, count))
    counts[rank[:, None], (rank[:, None] + first + np.arange(width)) % count] = 1.0
    return algorithm("direct", "all_to_all_v", tuple(group), counts=counts.tolist())
