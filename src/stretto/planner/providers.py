"""More algorithms for the planner to choose from: synthesised for the links at hand, or over a network's dimensions."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from ..cluster import Cluster
from ..collectives import COLLECTIVES, Collective
from ..dimensions import dims_of
from ..dimensions.balance import stretto as balanced
from ..dimensions.program import program as dim_program
from ..errors import Infeasible, InvalidInput, SearchTimeout
from ..programs import Program
from ..synthesis import synthesize
from .recipes import Ask, Provider

SYNTHESISED = "synthesised"
BALANCED = "dimensions"
KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "reduce")
MAKERS = ("forest", "flow", "greedy", "compose", "exact")
"""Who may synthesise: the library is offered anyway."""
DIM_CHUNKS = 16
DIM_UNITS = 32


def synthesised(*, budget_s: float = 5.0, seed: int = 0) -> Provider:
    """A provider that synthesises one program per collective, group and set of links, at the first size asked for.

    The program is then timed at every size like any other, so that a plan takes it only where it pays.
    """
    made: dict[tuple[Ask, str], Program | None] = {}

    def offer(ask: Ask, cluster: Cluster, nbytes: float) -> Mapping[str, Callable[[], Program]]:
        if ask.kind not in KINDS or ask.window is not None:
            return {}
        key = (ask, cluster.digest)
        if key not in made:
            try:
                made[key] = synthesize(
                    _collective(ask), cluster, nbytes, budget_s=budget_s, seed=seed, makers=MAKERS
                ).program
            except (Infeasible, SearchTimeout, InvalidInput):
                made[key] = None
        found = made[key]
        return {} if found is None else {SYNTHESISED: lambda: found}

    return lambda ask, cluster, nbytes: dict(offer(ask, cluster, nbytes))


def dimensional(cluster: Cluster) -> Provider:
    """A provider for clusters with dimensions: our balanced schedule over all of them, every message of it."""
    dims = dims_of(cluster)
    count = math.prod(dim.size for dim in dims)

    def offer(ask: Ask, part: Cluster, nbytes: float) -> dict[str, Callable[[], Program]]:
        whole = ask.group == tuple(range(count)) and part.num_links == cluster.num_links
        if not whole or ask.window is not None or ask.kind not in ("all_reduce", "all_gather", "reduce_scatter"):
            return {}
        return {BALANCED: lambda: dim_program(balanced(dims, ask.kind, nbytes, chunks=DIM_CHUNKS), units=DIM_UNITS)}

    return offer


def providers_for(cluster: Cluster, *, synthesis_s: float = 0.0, seed: int = 0) -> tuple[Provider, ...]:
    """The providers that make sense on a cluster; synthesis only with a time for it."""
    found: list[Provider] = [dimensional(cluster)] if cluster.dimensions else []
    if synthesis_s > 0:
        found.append(synthesised(budget_s=synthesis_s, seed=seed))
    return tuple(found)


def _collective(ask: Ask) -> Collective:
    make = COLLECTIVES[ask.kind]
    return make(ask.group, root=ask.root) if ask.kind in ("broadcast", "reduce") else make(ask.group)
