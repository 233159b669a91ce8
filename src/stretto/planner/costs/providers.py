# SPDX-License-Identifier: Apache-2.0
"""Further algorithms for the planner: synthesized for the links at hand, or over the dimensions of a network.

What makes them is imported where it is used: every rank of a job that enforces a plan imports this module for names.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from ...cluster import Cluster
from ...collectives import COLLECTIVES, Collective
from ...errors import Infeasible, InvalidInput, SearchTimeout
from ...programs import Program
from ...units import MB
from ..algebra.recipes import MotifRequest, Provider
from ..plan import ProgramPlan

if TYPE_CHECKING:
    from ...dimensions import Dim

SYNTHESIZED = "synthesised"
KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "reduce")
MAKERS = ("forest", "flow", "greedy", "compose", "exact")
"""The makers that may synthesize. The algorithms of the library are offered without them."""
DIM_KINDS = ("all_reduce", "all_gather", "reduce_scatter")
DIM_CHUNKS = 16
DIM_UNITS = 8 * DIM_CHUNKS
"""The number of units into which a payload is cut; with fewer units, rounding spoils the balance of dimensions."""
DIM_BYTES = 64 * MB
MAX_DIM_MOVES = 1 << 21
BALANCED = f"dimensions:{DIM_CHUNKS}"


def synthesized(*, budget_s: float = 5.0, seed: int = 0) -> Provider:
    """A provider that synthesizes one program per collective, group and set of links, at the first size requested.

    The program is then timed at every size like any other, so that a plan takes it only where it is fastest. Its name
    does not tell that first size: every plan uses a provider of its own, so that equal plans get equal programs.
    """
    from ...synthesis import synthesize

    made: dict[tuple[MotifRequest, str], Program | None] = {}

    def offer(ask: MotifRequest, cluster: Cluster, nbytes: float) -> Mapping[str, Callable[[], Program]]:
        if ask.kind not in KINDS or ask.window is not None:
            return {}
        key = (ask, cluster.digest)
        if key not in made:
            try:
                made[key] = synthesize(
                    _collective(ask), cluster, nbytes, budget_s=budget_s, seed=seed, makers=MAKERS
                ).plain
            except (Infeasible, SearchTimeout, InvalidInput):
                made[key] = None
        found = made[key]
        return {} if found is None else {SYNTHESIZED: lambda: found}

    return lambda ask, cluster, nbytes: dict(offer(ask, cluster, nbytes))


def saved(programs: Sequence[ProgramPlan]) -> Provider:
    """A provider of the programs that a plan brings along, by the names that the plan has for them."""

    def offer(ask: MotifRequest, cluster: Cluster, nbytes: float) -> dict[str, Callable[[], Program]]:
        found: dict[str, Callable[[], Program]] = {}
        for one in programs:
            here = ask.group in one.groups and set(one.channels) == set(cluster.channels)
            if here and one.kind == ask.kind and ask.window is None:
                found[one.algorithm] = partial(_read, one, ask.group)
        return found

    return offer


def _read(program: ProgramPlan, group: tuple[int, ...]) -> Program:
    from ...programs.formats.text import loads

    made = loads(program.text, where=f"program {program.algorithm} of {program.kind}")
    return made.replace(collective=replace(made.collective, ranks=group))


def dimensional(cluster: Cluster) -> Provider:
    """A provider for clusters with dimensions: the schedule over all of them that is fastest, message by message.

    It is our balanced schedule, or Themis' where Themis' is predicted to be faster (`promised_program`).

    The schedule is made for `DIM_BYTES` in as many chunks as its name says (``dimensions:16``), with its messages in
    the order that does best on the links at hand: name, collective and cluster determine the program. It is timed at
    every size like any other. Clusters of more than about ninety devices are not served, because they have too many
    messages (`MAX_DIM_MOVES`).
    """
    from ...dimensions import dims_of
    from ...dimensions.link_search import promised_program

    dims = dims_of(cluster)
    count = math.prod(dim.size for dim in dims)
    programs: dict[tuple[str, str], Program] = {}

    def make(kind: str, part: Cluster) -> Program:
        if (kind, part.digest) not in programs:
            whole = replace(part, dimensions=cluster.dimensions)
            made = promised_program(whole, kind, DIM_BYTES, chunks=DIM_CHUNKS, units=DIM_UNITS)
            programs[kind, part.digest] = made.program
        return programs[kind, part.digest]

    def offer(ask: MotifRequest, part: Cluster, nbytes: float) -> dict[str, Callable[[], Program]]:
        whole = ask.group == tuple(range(count)) and part.num_links == cluster.num_links
        if not whole or ask.window is not None or ask.kind not in DIM_KINDS or not _writable(dims, ask.kind):
            return {}
        return {BALANCED: lambda: make(ask.kind, part)}

    return offer


def _writable(dims: Sequence[Dim], kind: str) -> bool:
    """Whether every message of the schedule can be written down, within a second or so."""
    from ...dimensions import baseline
    from ...dimensions.balance import MAX_BALANCED
    from ...dimensions.program import moves

    halving = all(dim.kind != "switch" or dim.size & (dim.size - 1) == 0 for dim in dims)
    if not halving or len(dims) > MAX_BALANCED:
        return False
    return moves(baseline(dims, kind, DIM_BYTES, chunks=DIM_CHUNKS), units=DIM_UNITS) <= MAX_DIM_MOVES


def providers_for(cluster: Cluster, *, synthesis_s: float = 0.0, seed: int = 0) -> tuple[Provider, ...]:
    """The providers that fit a cluster.

    Args:
        cluster: the cluster; one with dimensions gets the provider `dimensional`.
        synthesis_s: seconds for each synthesized algorithm; 0 leaves synthesis out.
        seed: seed of the synthesis, >= 0.

    Returns:
        The providers, perhaps none.
    """
    found: list[Provider] = [dimensional(cluster)] if any(d.size > 1 for d in cluster.dimensions) else []
    if synthesis_s > 0:
        found.append(synthesized(budget_s=synthesis_s, seed=seed))
    return tuple(found)


def _collective(ask: MotifRequest) -> Collective:
    make = COLLECTIVES[ask.kind]
    return make(ask.group, root=ask.root) if ask.kind in ("broadcast", "reduce") else make(ask.group)
