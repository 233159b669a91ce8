# SPDX-License-Identifier: Apache-2.0
"""Bounds from many demands at once: the maximum concurrent flow, exactly, or bounded by lengths of links."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ... import _native
from ...solvers.linear import LinearProgram, ProgramArrays
from .demand import Demand
from .net import ArcNetwork, Floats, Nodes

MAX_VARIABLES = 60_000
"""The largest (sources x links) for which the linear program is solved, which takes some seconds."""
ROUNDS_WORK = 40_000_000
"""The number of arcs to look at, over all rounds, in the search for good lengths without the linear program."""


@dataclass(frozen=True, kw_only=True, eq=False)
class FlowNeeds:
    """Demands between pairs: source i must bring ``amounts[k]`` to ``sinks[k]`` for each k in ``ptr[i]:ptr[i+1]``."""

    sources: Nodes
    ptr: NDArray[np.int64]
    sinks: Nodes
    amounts: Floats

    @classmethod
    def of(cls, demand: Demand) -> FlowNeeds:
        """The needs of a demand without reductions: each bundle goes from its source to one device that wants it.

        Further devices that want the bundle are left out, so that the needs are no more than what must move.
        """
        source, sink, bundle = demand.pairs
        _, first = np.unique(bundle, return_index=True)
        amount = demand.share[bundle[first]]
        width = np.int64(sink.max(initial=0)) + 1
        keys, entry = np.unique(source[first] * width + sink[first], return_inverse=True)
        sources, begins = np.unique(keys // width, return_index=True)
        return cls(
            sources=sources.astype(np.int32),
            ptr=np.append(begins, len(keys)).astype(np.int64),
            sinks=(keys % width).astype(np.int32),
            amounts=np.bincount(entry, amount, len(keys)).astype(np.float64),
        )


def needed(net: ArcNetwork, needs: FlowNeeds, length: Floats) -> float:
    """The sum over all needs of amount x shortest path: the least ``sum(length x bytes on the link)`` of any routing.

    Args:
        net: The network.
        needs: What each source must bring where, as shares of nbytes.
        length: The length of each arc, >= 0.

    Returns:
        The sum, as a share of nbytes times a length.
    """
    total = 0.0
    rows = max(1, (1 << 23) // net.num_nodes)
    for first in range(0, len(needs.sources), rows):
        last = min(first + rows, len(needs.sources))
        far = net.distances(length, needs.sources[first:last])
        begin, end = needs.ptr[first], needs.ptr[last]
        row = np.repeat(np.arange(last - first), np.diff(needs.ptr[first : last + 1]))
        total += float(needs.amounts[begin:end] @ far[row, needs.sinks[begin:end]])
    return total


def lengths(net: ArcNetwork, needs: FlowNeeds) -> Iterable[Floats]:
    """Lengths of links that are worth trying: long where demands crowd; and for each channel 1 on its links alone."""
    real = net.link >= 0
    rounds = ROUNDS_WORK // (len(needs.sources) * len(net.src) + 1)
    yield _native.crowded_lengths(
        num_nodes=net.num_nodes,
        src=net.src,
        dst=net.dst,
        rate=net.rate / net.rate[real].max(),
        sources=needs.sources,
        need_ptr=needs.ptr,
        sinks=needs.sinks,
        amounts=needs.amounts,
        rounds=int(np.clip(rounds, 1, 200)),
    )
    for channel in np.unique(net.channel[real]):
        yield (net.channel == channel).astype(np.float64)


def concurrent_flow(net: ArcNetwork, needs: FlowNeeds) -> tuple[float, Floats]:
    """The least time in which all needs can be met (infinite if the solver fails), and lengths that prove it.

    One flow per source: the sinks of source s receive (a common factor x amount) of it, and every arc carries
    at most its rate; the factor is maximised. The lengths are the dual of this linear program.
    """
    count, arcs, nodes = len(needs.sources), len(net.src), net.num_nodes
    fastest, largest = net.rate[net.link >= 0].max(), needs.amounts.max()
    rate = net.rate / fastest
    column = np.arange(count * arcs)
    flow, arc = column // arcs, column % arcs
    limited = np.flatnonzero(np.isfinite(rate))
    limit_row = np.full(arcs, -1)
    limit_row[limited] = count * nodes + np.arange(len(limited))
    row_of_sink = np.repeat(np.arange(count), np.diff(needs.ptr)) * nodes + needs.sinks
    into, out_of = flow * nodes + net.dst[arc], flow * nodes + net.src[arc]
    row = np.concatenate([into, out_of, limit_row[arc], row_of_sink])
    col = np.concatenate([column, column, column, np.full(len(row_of_sink), count * arcs)])
    one = np.ones(len(column))
    value = np.concatenate([one, -one, one, -needs.amounts / largest])
    # The flow balance of a source follows from the balances of all other nodes, so its row is left out.
    used = np.ones(count * nodes + len(limited), np.bool_)
    used[np.arange(count) * nodes + needs.sources] = False
    keep = (row >= 0) & used[row]
    number = np.cumsum(used) - 1
    row, col, value = number[row[keep]], col[keep], value[keep]
    order = np.lexsort((row, col))

    columns, rows = count * arcs + 1, int(used.sum())
    upper = np.zeros(rows)
    upper[rows - len(limited) :] = rate[limited]
    program = LinearProgram(maximize=True, solver="ipm")
    program.load(
        ProgramArrays(
            cost=np.append(np.zeros(columns - 1), 1.0),
            lower=np.zeros(columns),
            upper=np.full(columns, np.inf),
            row_lower=np.where(upper > 0, -np.inf, 0.0),
            row_upper=upper,
            start=np.append(0, np.cumsum(np.bincount(col, minlength=columns))),
            index=row[order],
            value=value[order],
            by_column=True,
        )
    )
    found = program.solve()
    if found.status != "optimal":
        return np.inf, np.zeros(arcs)
    length = np.zeros(arcs)
    length[limited] = np.abs(found.duals[rows - len(limited) :])
    return float(largest / fastest / found.objective), length
