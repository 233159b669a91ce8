"""Many demands at once: the maximum concurrent flow, exactly, or bounded by lengths of links."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import highspy
import numpy as np
from numpy.typing import NDArray

from ... import _native
from .demand import Demand
from .net import Floats, Net, Nodes

MAX_VARIABLES = 60_000
"""Up to here (sources x links) the linear program is solved: some seconds."""
ROUNDS_WORK = 40_000_000
"""Arcs looked at, over all rounds, to find good lengths without the linear program."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Needs:
    """Source i must bring ``amounts[k]`` to ``sinks[k]`` for each k in ``ptr[i]:ptr[i+1]``."""

    sources: Nodes
    ptr: NDArray[np.int64]
    sinks: Nodes
    amounts: Floats

    @classmethod
    def of(cls, demand: Demand) -> Needs:
        """Each bundle (of one part) from its source to one of those who want it: no more than what must move."""
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
            amounts=np.bincount(entry, amount, len(keys)),
        )


def needed(net: Net, needs: Needs, length: Floats) -> float:
    """The sum of amount x shortest path: what any routing uses of ``sum(length x bytes on the link)``."""
    total = 0.0
    rows = max(1, (1 << 23) // net.num_nodes)
    for first in range(0, len(needs.sources), rows):
        last = min(first + rows, len(needs.sources))
        far = net.distances(length, needs.sources[first:last])
        begin, end = needs.ptr[first], needs.ptr[last]
        row = np.repeat(np.arange(last - first), np.diff(needs.ptr[first : last + 1]))
        total += float(needs.amounts[begin:end] @ far[row, needs.sinks[begin:end]])
    return total


def lengths(net: Net, needs: Needs) -> Iterable[Floats]:
    """Lengths of links worth trying: those of congested links after some rounds, and the links of one rate alike."""
    real = net.link >= 0
    rounds = ROUNDS_WORK // (len(needs.sources) * len(net.src) + 1)
    scale = net.rate[real].max()
    yield _native.crowded_lengths(
        net.num_nodes, net.src, net.dst, net.rate / scale, needs.sources, needs.ptr, needs.sinks, needs.amounts,
        int(np.clip(rounds, 1, 200)),
    )  # fmt: skip
    for channel in np.unique(net.channel[real]):
        yield (net.channel == channel).astype(np.float64)


def concurrent_flow(net: Net, needs: Needs) -> tuple[Floats, bool]:
    """Lengths that prove the maximum concurrent flow (the dual of its linear program), and whether it was solved.

    One flow per source: f[s, a] on arc a. The sinks of s receive time x amount, every arc carries at most its rate.
    """
    count, arcs, nodes = len(needs.sources), len(net.src), net.num_nodes
    rate = net.rate / net.rate[net.link >= 0].max()
    column = np.arange(count * arcs)
    flow, arc = column // arcs, column % arcs
    limited = np.flatnonzero(np.isfinite(rate))
    limit_row = np.full(arcs, -1)
    limit_row[limited] = count * nodes + np.arange(len(limited))
    row_of_sink = np.repeat(np.arange(count), np.diff(needs.ptr)) * nodes + needs.sinks
    row = np.concatenate([flow * nodes + net.dst[arc], flow * nodes + net.src[arc], limit_row[arc], row_of_sink])
    col = np.concatenate([column, column, column, np.full(len(row_of_sink), count * arcs)])
    one = np.ones(len(column))
    value = np.concatenate([one, -one, one, -needs.amounts / needs.amounts.max()])
    # A source's own balance follows from all others.
    used = np.ones(count * nodes + len(limited), np.bool_)
    used[np.arange(count) * nodes + needs.sources] = False
    keep = (row >= 0) & used[row]
    number = np.cumsum(used) - 1
    row, col, value = number[row[keep]], col[keep], value[keep]
    order = np.lexsort((row, col))

    lp = highspy.HighsLp()
    lp.num_col_, lp.num_row_ = count * arcs + 1, int(used.sum())
    lp.sense_ = highspy.ObjSense.kMaximize
    lp.col_cost_ = np.append(np.zeros(count * arcs), 1.0)
    lp.col_lower_, lp.col_upper_ = np.zeros(lp.num_col_), np.full(lp.num_col_, highspy.kHighsInf)
    upper = np.zeros(lp.num_row_)
    upper[lp.num_row_ - len(limited) :] = rate[limited]
    lp.row_lower_ = np.where(upper > 0, -highspy.kHighsInf, 0.0)
    lp.row_upper_ = upper
    lp.a_matrix_.format_ = highspy.MatrixFormat.kColwise
    lp.a_matrix_.start_ = np.append(0, np.cumsum(np.bincount(col, minlength=lp.num_col_)))
    lp.a_matrix_.index_, lp.a_matrix_.value_ = row[order], value[order]
    solver = highspy.Highs()
    for option, setting in (("output_flag", False), ("threads", 1), ("solver", "ipm")):
        solver.setOptionValue(option, setting)
    solver.passModel(lp)
    solver.run()
    length = np.zeros(arcs)
    dual = np.asarray(solver.getSolution().row_dual)
    if len(dual):
        length[limited] = np.abs(dual[lp.num_row_ - len(limited) :])
    return length, solver.getModelStatus() == highspy.HighsModelStatus.kOptimal
