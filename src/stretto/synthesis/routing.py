# SPDX-License-Identifier: Apache-2.0
"""Stage 1: the hops that every chunk takes, by a sparse model.

There are columns only for (chunk, hop) pairs that some near-shortest path uses, one column for all pairs that the
sketch's rotations make equal, and times only as sums per physical link.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ..errors import Infeasible
from ..solvers.milp import Milp, solve
from .routing_problem import POLICY_WEIGHT, Routing, RoutingProblem
from .routing_search import search

HASTE = (0.0, 0.3, 1.0)
"""The weights of early arrival, relative to the load of links, that the quick searches use in turn."""
TIE_WEIGHT = 1e-4
"""The weight of all sends together: of routings that are equally fast, the one that sends less is preferred."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RoutingModel:
    """The model: column k < num_orbits says whether orbit k is chosen, column `total` is the time."""

    problem: RoutingProblem
    model: Milp
    total: int
    connections: tuple[tuple[int, tuple[int, ...]], ...]
    """A column for each connection with a policy, and the orbits that use it."""

    def start(self, routing: Routing) -> list[float]:
        """A starting point from a known routing: values of the binaries; the solver finds the other columns."""
        chosen = self.problem.chosen(routing)
        values = [0.0] * len(self.model.cost)
        values[: len(chosen)] = chosen.astype(float).tolist()
        for column, orbits in self.connections:
            values[column] = float(any(chosen[k] for k in orbits))
        return values


def build(problem: RoutingProblem, *, scale_us: float) -> RoutingModel:
    """Build the sparse model; `scale_us` is about the time to expect, in relation to which policies and ties weigh."""
    sketch = problem.logical.sketch
    scale = max(scale_us, 1e-9)
    model = Milp()
    weight = np.zeros(problem.num_orbits)
    np.add.at(weight, problem.orbit, problem.us)
    weight *= TIE_WEIGHT / max(weight.sum(), 1e-9)
    for orbit in range(problem.num_orbits):
        model.column(cost=float(weight[orbit]), upper=1.0, integer=True)
    most = max((sum(us for _, us in row) for row in problem.link_rows), default=1.0) + problem.limit_us.max(initial=0)
    total = model.column(cost=1 / scale, upper=float(most))
    for row in problem.link_rows:
        model.row({**dict(row), total: -1.0}, upper=0.0)
    _ways(problem, model, total)
    connections = _policies(problem, model)
    if sketch.balance != "none":
        _balance(problem, model, scale, total)
    return RoutingModel(problem=problem, model=model, total=total, connections=tuple(connections))


def route(
    problem: RoutingProblem,
    *,
    limit_s: float,
    seed: int = 0,
    solver: str = "highs",
    solutions: int = 3,
    rate: Callable[[Routing], float] | None = None,
    progress: Callable[[str, float], None] | None = None,
) -> list[Routing]:
    """Find several routings: from the model and its near-optimal ties, and from the quick search that it begins with.

    Args:
        problem: The routing problem.
        limit_s: The seconds to search.
        seed: The seed of the searches.
        solver: The solver of the model, "highs" or "cpsat".
        solutions: How many solutions of the model to look for.
        rate: Returns the expected time of a routing, by which routings are sorted; their load when not given.
        progress: Called with a line of text and the fraction done, 0..1.

    Returns:
        The routings, best first; with a policy those of the model come before the others.

    Raises:
        Infeasible: The sketch leaves no routing.
    """
    tell = progress or (lambda message, fraction: None)
    end = time.monotonic() + limit_s
    policies = problem.logical.has_policies
    quick: list[Routing] = []
    rate = rate or (lambda routing: routing.load_us)
    for attempt in range(max(len(HASTE), solutions)):
        found = search(problem, seed=seed + attempt, haste=HASTE[attempt % len(HASTE)])
        if found is not None:
            quick.append(found)
        if time.monotonic() > end - limit_s * 0.9:
            break
    quick.sort(key=lambda r: max(problem.cost_us(problem.chosen(r)), problem.longest_us(r) if policies else 0.0))
    scale = quick[0].load_us if quick else float(problem.limit_us.max(initial=1.0))
    built = build(problem, scale_us=scale)
    model, total = built.model, built.total
    tell(f"routing: {model.counts}", 0.0)
    free = list(model.cost)
    exact: list[Routing] = []
    costs: list[float] = []
    start = built.start(quick[0]) if quick else None
    rng = np.random.default_rng(seed)
    bound = 0.0
    # With policies no random preferences are added, which would outweigh them, and the gap must be small compared
    # with the weight of one connection, not only with the time.
    gap = POLICY_WEIGHT / (4 * max(len(built.connections), 1)) if policies else 1e-3
    for attempt in range(min(solutions, 2) if policies else solutions):
        left = end - time.monotonic()
        if left < 0.2 and (exact or quick):
            break
        # Different optima of equal time give different schedules. The second solution starts without a hint; from the
        # third on, the time is fixed and random pairs are preferred.
        try:
            solved = solve(
                model,
                solver=solver,
                limit_s=left * 0.6,
                seed=seed + attempt,
                gap=gap if attempt < 2 else 0.05,
                start=None if attempt == 1 else start,
            )
        except Infeasible:
            if exact or quick:
                break  # The fixed time became infeasible by rounding.
            raise Infeasible(
                f"sketch {problem.logical.sketch.name}: its limits and symmetry_offsets together leave no routing"
            ) from None
        if attempt == 0 and not policies and np.isfinite(solved.bound):
            # A cost that includes policies would prove nothing about the time.
            bound = max(0.0, (solved.bound - TIE_WEIGHT) * scale)
        if solved.values is None:
            continue
        chosen = solved.values[: problem.num_orbits] > 0.5
        found = problem.routing(chosen, bound_us=bound, by=solver)
        if found is not None:
            exact.append(found)
            costs.append(float(solved.values @ np.array(free)))
            tell(f"routing {attempt}: busiest link {found.load_us:.4g} us", (attempt + 1) / solutions)
        if attempt >= 1:
            start = built.start(min(exact, key=lambda r: r.load_us)) if exact else start
            model.upper[total] = max(float(solved.values[total]), 1e-9) * (1 + 1e-4)
            model.cost = [c + float(rng.random()) * 0.1 if k < problem.num_orbits else c for k, c in enumerate(free)]
    if policies:
        # A second optimum is only as good if it meets the policy equally well.
        exact = [r for r, cost in zip(exact, costs, strict=True) if cost <= min(costs) + POLICY_WEIGHT * 1e-2]
    exact.sort(key=rate)
    return [*exact, *quick] if policies else sorted([*exact, *quick], key=rate)


def _ways(problem: RoutingProblem, model: Milp, total: int) -> None:
    """Add rows: every target is reached once, chunks are sent only where they are, and ways take time (eq. 2-5)."""
    logical = problem.logical
    arrival: dict[tuple[int, ...], int] = {}
    src, dst = logical.src.tolist(), logical.dst.tolist()
    for c, pairs in enumerate(problem.pairs_of):
        sources, targets = set(logical.sources[c]), set(logical.targets[c])
        into: dict[int, dict[int, float]] = {}
        out: dict[int, dict[int, float]] = {}
        for p in pairs:
            orbit = int(problem.orbit[p])
            for table, rank in ((into, dst[problem.hop[p]]), (out, src[problem.hop[p]])):
                at = table.setdefault(rank, {})
                at[orbit] = at.get(orbit, 0.0) + 1.0
        for rank, terms in into.items():
            if rank in targets:
                model.row(terms, lower=1.0, upper=1.0)
            elif len(targets) == 1:
                model.row(_difference(terms, out.get(rank, {})), lower=0.0, upper=0.0)
            else:
                model.row(terms, upper=1.0)
        for rank, terms in out.items():
            if rank in sources or rank in targets:
                continue
            if rank not in into:
                for orbit in terms:
                    model.row({orbit: 1.0}, upper=0.0)
            elif len(targets) > 1:
                for orbit in terms:
                    model.row(_difference({orbit: 1.0}, into[rank]), upper=0.0)
        _enter_hosts(problem, model, c)
        if len(targets) == 1:
            way: dict[int, float] = {}
            for p in pairs:
                way[int(problem.orbit[p])] = way.get(int(problem.orbit[p]), 0.0) + float(problem.us[p])
            model.row({**way, total: -1.0}, upper=0.0)
        elif targets:
            _arrivals(problem, model, total, c, sources, arrival)


def _enter_hosts(problem: RoutingProblem, model: Milp, c: int) -> None:
    """Add rows: a chunk that is wanted in another host enters it at least once; this tightens the relaxation."""
    logical = problem.logical
    homes = {int(logical.host[r]) for r in logical.sources[c]}
    entering: dict[int, dict[int, float]] = {int(logical.host[r]): {} for r in logical.targets[c]}
    for p in problem.pairs_of[c]:
        hop = problem.hop[p]
        host = int(logical.host[logical.dst[hop]])
        if logical.crosses[hop] and host in entering:
            entering[host][int(problem.orbit[p])] = 1.0
    for host, terms in entering.items():
        if host not in homes:
            model.row(terms, lower=1.0)


def _arrivals(
    problem: RoutingProblem, model: Milp, total: int, c: int, sources: set[int], known: dict[tuple[int, ...], int]
) -> None:
    """Add the arrival times of a chunk's tree, which bound the total time and forbid circles."""
    src, dst = problem.logical.src.tolist(), problem.logical.dst.tolist()
    incoming: dict[int, list[int]] = {}
    for p in problem.pairs_of[c]:
        incoming.setdefault(dst[problem.hop[p]], []).append(p)
    limit = float(problem.limit_us[c])
    column: dict[int, int] = {}
    for rank, pairs in incoming.items():
        # Ranks that are rotations of one another have the same incoming orbits and share one column.
        key = tuple(sorted(int(problem.orbit[p]) for p in pairs))
        if key not in known:
            known[key] = model.column(lower=float(problem.reach_us[c, rank]), upper=limit)
            model.row({known[key]: 1.0, total: -1.0}, upper=0.0)
        column[rank] = known[key]
    _sends_from(problem, model, total, c, column)
    for rank, pairs in incoming.items():
        for p in pairs:
            start, orbit, us = src[problem.hop[p]], int(problem.orbit[p]), float(problem.us[p])
            if start in sources:
                model.row({column[rank]: 1.0, orbit: -us}, lower=0.0)
            elif start in column and column[start] != column[rank]:
                slack = limit - float(problem.reach_us[c, rank]) + us
                model.row({column[rank]: 1.0, column[start]: -1.0, orbit: -slack}, lower=us - slack)


def _sends_from(problem: RoutingProblem, model: Milp, total: int, c: int, column: dict[int, int]) -> None:
    """Add rows: after its arrival, a chunk that is sent several times through one port takes the sum of the sends."""
    ports: dict[tuple[int, int], dict[int, float]] = {}
    for p in problem.pairs_of[c]:
        hop, rank = int(problem.hop[p]), problem.logical.src_list[problem.hop[p]]
        for link, us in problem.send(c, hop)[1]:
            terms = ports.setdefault((rank, link), {})
            orbit = int(problem.orbit[p])
            terms[orbit] = terms.get(orbit, 0.0) + us
    for (rank, _), terms in ports.items():
        if len(terms) > 1 and rank in column:
            model.row({**terms, column[rank]: 1.0, total: -1.0}, upper=0.0)


def _policies(problem: RoutingProblem, model: Milp) -> list[tuple[int, tuple[int, ...]]]:
    """Add the policies uc-min and uc-max: a column per connection of a hyperedge says whether it is used (eq. 9-11)."""
    over: dict[int, set[int]] = {}
    for pair, hop in enumerate(problem.hop.tolist()):
        over.setdefault(hop, set()).add(int(problem.orbit[pair]))
    found: list[tuple[int, tuple[int, ...]]] = []
    for strategy, hops in problem.logical.connections:
        used: dict[tuple[int, ...], int] = {}
        weight = POLICY_WEIGHT / max(len(hops), 1) * (1 if strategy == "uc-min" else -1)
        for hop in hops.tolist():
            orbits = tuple(sorted(over.get(hop, ())))
            if strategy == "none" or not orbits:
                continue
            if orbits in used:
                model.cost[used[orbits]] += weight
                continue
            connection = used[orbits] = model.column(cost=weight, upper=1.0, integer=True)
            found.append((connection, orbits))
            if strategy == "uc-min":
                for orbit in orbits:
                    model.row({orbit: 1.0, connection: -1.0}, upper=0.0)
            else:
                model.row({connection: 1.0, **dict.fromkeys(orbits, -1.0)}, upper=0.0)
    return found


def _balance(problem: RoutingProblem, model: Milp, scale: float, total: int) -> None:
    """Add the balance: minmax minimises the load of the busiest link, maxmin maximises that of the idlest."""
    least = problem.logical.sketch.balance == "maxmin"
    column = model.column(cost=(-POLICY_WEIGHT if least else POLICY_WEIGHT) / scale, upper=model.upper[total])
    for row in problem.link_rows:
        if least:
            model.row({column: 1.0, **{orbit: -us for orbit, us in row}}, upper=0.0)
        else:
            model.row({column: -1.0, **dict(row)}, upper=0.0)


def _difference(a: dict[int, float], b: dict[int, float]) -> dict[int, float]:
    terms = dict(a)
    for key, value in b.items():
        terms[key] = terms.get(key, 0.0) - value
    return terms
