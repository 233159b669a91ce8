# SPDX-License-Identifier: Apache-2.0
"""Bounds from switches that only pass data on: a switch sends no more than it receives, which can beat every cut."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ... import _native
from ...solvers.linear import LinearProgram
from .cuts import Cut, Need
from .net import ArcNetwork, Floats, Mask

MAX_ARCS = 4096
MAX_SINKS = 256
ROUNDS = 60


def helps(net: ArcNetwork, passive: Mask) -> bool:
    """Whether some passive node could send faster than it receives, so that bounds from cuts alone are too low."""
    rate = np.where(net.link >= 0, net.rate, 0.0)
    into, out = (np.bincount(ends, rate, net.num_nodes) for ends in (net.dst, net.src))
    return bool(np.any(passive & (out > into * (1 + 1e-9)) & (into > 0)))


def passing_weights(
    net: ArcNetwork, needs: Sequence[Need], passive: Mask, first: Cut
) -> tuple[Floats, float, bool] | None:
    """Find weights w on arcs and a share D with ``sum(w x bytes) >= D x nbytes`` by a linear program.

    Each sink must be supplied over rates within the links', of which every passive node sends no more than it
    receives: a linear program with one row per cut, found as it is needed. Let z be the duals of the cuts and y those
    of the nodes. Adding z times ``bytes into the cut >= what it lacks`` and y times ``bytes out <= bytes in`` gives
    the weights, whatever z and y the solver found: they are only rounded up to 0.

    Args:
        net: The network.
        needs: What each sink needs, and from where.
        passive: Whether each node only passes data on.
        first: The tightest cut that is known already.

    Returns:
        The weights, D, and whether the linear program was solved to the end; None if it is too large or fails.
    """
    arcs = len(net.src)
    if arcs > MAX_ARCS or len(needs) > MAX_SINKS:
        return None
    scale = float(net.rate.max())
    largest = max(float(amounts.sum()) for _, _, amounts in needs)
    program = LinearProgram(maximize=True)
    for rate in (net.rate / scale).tolist():
        program.column(upper=rate)
    program.column(cost=1.0)
    nodes = np.flatnonzero(passive)
    for v in nodes.tolist():
        into, out = np.flatnonzero(net.dst == v), np.flatnonzero(net.src == v)
        value = np.append(np.ones(len(into)), -np.ones(len(out)))
        program.row(np.append(into, out), value, lower=0.0)
    cuts: list[Cut] = []
    fresh, settled = [first], False
    for _ in range(ROUNDS):
        for cut in fresh:
            index = np.append(np.flatnonzero(cut.arcs), arcs)
            value = np.append(np.ones(len(index) - 1), -cut.share / largest)
            program.row(index, value, lower=0.0)
        cuts += fresh
        found = program.solve()
        if found.status != "optimal":
            return None
        solution = found.values
        fresh = _short(net, needs, np.maximum(solution[:arcs], 0.0), float(solution[arcs]) / largest)
        if not fresh:
            settled = True
            break
    dual = np.abs(found.duals)
    potential = np.zeros(net.num_nodes)
    potential[nodes] = dual[: len(nodes)]
    weights = potential[net.dst] - potential[net.src]
    share = 0.0
    for cut, z in zip(cuts, dual[len(nodes) :].tolist(), strict=True):
        weights = weights + z * cut.arcs
        share += z * cut.share
    weights = np.where(weights > 1e-9, weights, 0.0)
    if not weights.max(initial=0.0) > 0:
        return None
    most = float(weights.max())
    return weights / most, share / most, settled


def _short(net: ArcNetwork, needs: Sequence[Need], rate: Floats, supply: float) -> list[Cut]:
    """One cut for each sink that these rates cannot supply with `supply` times its needs."""
    found = []
    flow = _native.MaxFlow(net.num_nodes, net.src, net.dst)
    for sink, sources, amounts in needs:
        total = float(amounts.sum()) * supply
        flow.set_capacity(rate, total * 2.0**-50)
        if flow.run(sources, amounts * supply, np.array([sink], np.int32), np.array([np.inf])) < total * (1 - 1e-8):
            side = flow.sink_side().astype(np.bool_)
            found.append(Cut.into(net, side, float(amounts[~side[sources]].sum())))
    return found
