# SPDX-License-Identifier: Apache-2.0
"""Bounds for all-reduce from who sends first: each rank but one sends before a tree from that one to all begins.

Follow one element in time, and let c be the rank whose first sending of its own part comes last. Before it, every other
rank has sent once. Up to then nobody else knows c's part, so from that sending on the links carry a tree from c to
all ranks. The two have no message in common. `docs/bounds.md` has the proof, and the same backwards in time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ... import _native
from ...solvers.linear import LinearProgram
from .net import ArcNetwork, Floats, Mask, Nodes

Columns = NDArray[np.signedinteger]

MAX_ARCS = 2048
MAX_RANKS = 64
ROUNDS = 40
"""The most times that the linear program is solved; what it has by then is a proof, too."""
LESS = 1e-7
"""By which share of the rate a cut must be too narrow to be added."""
TINY = 1e-9
"""The share of the largest dual below which others are taken to be 0."""


@dataclass(frozen=True, kw_only=True, eq=False)
class FirstSends:
    """Weights w of arcs and a share D with ``sum(w x bytes) >= D x nbytes`` for every all-reduce."""

    weights: Floats
    share: float
    hears: bool
    """Whether the argument runs backwards in time: each rank but one hears after a tree from all to that one."""


def first_sends(net: ArcNetwork, ranks: Nodes, copies: Mask) -> Iterator[FirstSends]:
    """The best weights of the argument, and of the same backwards in time.

    Args:
        net: The network.
        ranks: The devices that take part; each reaches each.
        copies: Whether each node may send one message on to several others, though it is no device.

    Yields:
        What was found, at most two; nothing for networks that are too large.
    """
    if len(net.src) > MAX_ARCS or not 2 <= len(ranks) <= MAX_RANKS:
        return
    for hears in (False, True):
        found = _weights(net.reverse if hears else net, ranks, copies, hears)
        if found is not None:
            yield FirstSends(weights=found[0], share=found[1], hears=hears)


def _weights(net: ArcNetwork, ranks: Nodes, copies: Mask, hears: bool) -> tuple[Floats, float] | None:
    """Weights of arcs by the dual of a linear program, evaluated anew, so that they prove what they say.

    The rate s of whole all-reduces is to be as large as it can be, where the shares of the ranks as the last one sum
    up to s, every rank sends at the rate s less its share, and into every set of nodes with a rank come s less the
    shares of its ranks. Each link is divided between the two; of both, what comes into a switch goes out of it. Rows
    for sets are added as they are needed.
    """
    arcs, count, scale = len(net.src), len(ranks), float(net.rate.max())
    switches = np.arange(net.num_devices, net.num_nodes)
    program = LinearProgram(maximize=True)
    for _ in range(2 * arcs + count):
        program.column()
    rate = program.column(cost=1.0)
    sends, spreads, last = np.arange(arcs), arcs + np.arange(arcs), 2 * arcs + np.arange(count)
    program.row([*last.tolist(), rate], [*[1.0] * count, -1.0], lower=0.0, upper=0.0)
    for arc in range(arcs):
        program.row([sends[arc], spreads[arc]], [1.0, 1.0], upper=float(net.rate[arc]) / scale)
    for kind in (sends, spreads):
        for node in switches.tolist():
            out, into = kind[net.src == node], kind[net.dst == node]
            low, high = (-np.inf if hears else 0.0, 0.0 if hears else np.inf) if copies[node] else (0.0, 0.0)
            program.row(
                [*out.tolist(), *into.tolist()], [*[1.0] * len(out), *[-1.0] * len(into)], lower=low, upper=high
            )
    for at, rank in enumerate(ranks.tolist()):
        own = sends[net.src == rank]
        program.row([*own.tolist(), last[at], rate], [*[1.0] * (len(own) + 1), -1.0], lower=0.0)
    cuts, dual = _with_cuts(program, net, ranks, spreads, last)
    if not cuts:
        return None
    # HiGHS gives by how much the rate rises with the side of a row; what counts is what a row is worth.
    _, balances, sending, entering = np.split(-dual, 1 + arcs + np.cumsum([0, 2 * len(switches), count]))
    balance = np.zeros((2, net.num_nodes))
    balance[:, switches] = balances.reshape(2, -1)
    balance[:, copies] = np.minimum(balance[:, copies], 0.0) if hears else np.maximum(balance[:, copies], 0.0)
    return _evaluated(net, ranks, np.maximum(sending, 0.0), balance, cuts, np.maximum(entering, 0.0))


def _with_cuts(
    program: LinearProgram, net: ArcNetwork, ranks: Nodes, spreads: Columns, last: Columns
) -> tuple[list[Mask], Floats]:
    """Solve the program and add the sets of nodes that too little comes into, in turn; these, and the last duals."""
    rate = int(last[-1]) + 1
    cuts: list[Mask] = []
    fresh = list(np.arange(net.num_nodes) == ranks[:, None])
    flow = _native.MaxFlow(net.num_nodes, net.src, net.dst)
    dual = np.zeros(0)
    for _ in range(ROUNDS):
        for inside in fresh:
            into = spreads[~inside[net.src] & inside[net.dst]]
            own = last[inside[ranks]]
            program.row([*into.tolist(), *own.tolist(), rate], [*[1.0] * (len(into) + len(own)), -1.0], lower=0.0)
        found = program.solve()
        if found.status != "optimal":
            break
        cuts, dual, value = cuts + fresh, found.duals, found.values
        fresh = _narrow(flow, ranks, np.maximum(value[spreads], 0.0), np.maximum(value[last], 0.0), float(value[rate]))
        if not fresh:
            break
    return cuts, dual


def _narrow(flow: _native.MaxFlow, ranks: Nodes, spreads: Floats, last: Floats, rate: float) -> list[Mask]:
    """For each rank the set of nodes around it into which too little comes, where there is one."""
    found: dict[bytes, Mask] = {}
    flow.set_capacity(spreads, rate * 2.0**-50)
    for at, rank in enumerate(ranks.tolist()):
        others = np.arange(len(ranks)) != at
        into = flow.run(ranks[others], last[others], np.array([rank], np.int32), np.array([np.inf]))
        if into + float(last[at]) < rate * (1 - LESS):
            side = flow.sink_side().astype(np.bool_)
            found.setdefault(side.tobytes(), side)
    return list(found.values())


def _evaluated(
    net: ArcNetwork, ranks: Nodes, sending: Floats, balance: Floats, cuts: list[Mask], entering: Floats
) -> tuple[Floats, float] | None:
    """The weights of arcs and the share that any weights of ranks, switches and sets of nodes prove."""
    # Any weights prove something: what the solver leaves by rounding is dropped.
    least = TINY * max(float(sending.max()), float(entering.max()))
    sending, balance, entering = (np.where(np.abs(dual) > least, dual, 0.0) for dual in (sending, balance, entering))
    leaves = np.zeros(net.num_nodes)
    leaves[ranks] = sending
    enters, covered = np.zeros(len(net.src)), sending.copy()
    for inside, weight in zip(cuts, entering.tolist(), strict=True):
        enters += weight * (~inside[net.src] & inside[net.dst])
        covered += weight * inside[ranks]
    # A message is the first of its rank, or one that comes into a set of nodes, not both.
    sends, spreads = (balance[:, net.src] - balance[:, net.dst]) + np.stack([leaves[net.src], enters])
    weights = np.maximum(np.maximum(sends, spreads), 0.0)
    share = float(sending.sum() + entering.sum() - covered.max())
    most = float(weights.max(initial=0.0))
    return (weights / most, share / most) if most > 0 and share > 0 else None
