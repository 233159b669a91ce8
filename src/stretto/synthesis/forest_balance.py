# SPDX-License-Identifier: Apache-2.0
"""Switches that send and receive at unequal rates: finding the part of their rates that trees can use."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from .. import _native
from ..errors import Infeasible
from ..solvers.linear import LinearProgram
from .forest_optimum import Graph

ROUNDS = 200
FINEST = 1 << 16


def balanced(graph: Graph) -> tuple[Graph, float]:
    """Find rates that leave every switch balanced and supply the terminals best, by a linear program.

    Returns the graph with these rates, and the rate per unit of weight, in the given graph's units, that no trees
    exceed. Without multicast a switch sends what it receives, so any trees use balanced rates; and where switches are
    balanced, cuts alone decide. The linear program has one row per cut, found as they are needed. (Switches that may
    copy need no balance; then the rate is still an upper bound.)
    """
    links, nodes = len(graph.link), graph.cluster.num_nodes
    scale = int(graph.rate.max())
    program = LinearProgram(maximize=True)
    for rate in (graph.rate / scale).tolist():
        program.column(upper=rate)
    program.column(cost=1.0)
    for w in np.flatnonzero(graph.passive).tolist():
        into, out = np.flatnonzero(graph.dst == w), np.flatnonzero(graph.src == w)
        value = np.append(np.ones(len(into)), -np.ones(len(out)))
        program.row(np.append(into, out), value, lower=0.0, upper=0.0)
    sides = [np.arange(nodes) == v for v in graph.terminals.tolist()]
    for _ in range(ROUNDS):
        for side in sides:
            cut = np.flatnonzero(graph.into(side))
            outside = float(graph.weight[~side].sum())
            if outside > 0:
                program.row(np.append(cut, links), np.append(np.ones(len(cut)), -outside), lower=0.0)
        found = program.solve()
        solution = found.values
        if found.status != "optimal" or solution[links] <= 0:
            raise Infeasible("forest: the switches' balance leaves no rate for every rank")
        sides = _violated(graph, solution[:links], float(solution[links]))
        if not sides:
            return _whole(graph, solution[:links] * scale), float(solution[links]) * scale
    raise Infeasible(f"forest: the rates of unequal switches were not settled in {ROUNDS} rounds")


def _violated(graph: Graph, rate: NDArray[np.float64], supply: float) -> list[NDArray[np.bool_]]:
    flow = _native.MaxFlow(graph.cluster.num_nodes, graph.src, graph.dst)
    roots = np.flatnonzero(graph.weight).astype(np.int32)
    amounts = graph.weight[roots].astype(np.float64) * supply
    total = float(amounts.sum())
    flow.set_capacity(np.maximum(rate, 0.0), total * 2.0**-50)
    found = []
    for v in graph.terminals:
        if flow.run(roots, amounts, np.array([v], np.int32), np.array([total])) < total * (1 - 1e-8):
            found.append(flow.sink_side().astype(np.bool_))
    return found


def _whole(graph: Graph, rate: NDArray[np.float64]) -> Graph:
    """The graph with these rates in whole units: as simple fractions if they are such, else rounded down."""
    simple = [Fraction(r).limit_denominator(1000) for r in rate.tolist()]
    common = math.lcm(*(r.denominator for r in simple))
    if common <= FINEST and np.allclose([float(r) for r in simple], rate, rtol=1e-7, atol=1e-7):
        whole = np.array([int(r * common) for r in simple], np.int64)
        candidate = graph.with_rate(np.minimum(whole, graph.rate * common), graph.unit / common)
        if candidate.balanced:
            return candidate
    return graph.with_rate(np.floor(rate * FINEST + 1e-3).astype(np.int64), graph.unit / FINEST)
