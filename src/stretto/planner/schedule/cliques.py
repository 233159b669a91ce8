# SPDX-License-Identifier: Apache-2.0
"""Communication of which no two motifs can run at once, though they have no end of a channel in common.

Gradients of a pipeline's stage hold a channel both inward and outward, its messages one way each. A message out and a
message in may overlap, unless the second has to wait for the first: the backward pass of the last micro-batch goes out,
and what comes in next is the first of the following iteration. Then no two of the three run at once, and all of them
have to fit between what they wait for and what waits for them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..algebra.nodes import Nodes
from .problem import PlanProblem
from .resources import IN, OUT, op_ends

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]

MAX_NODES = 400
"""The largest step in which cliques are looked for."""
MAX_PIVOTS, MAX_THRESHOLDS = 16, 8
"""The number of messages around which cliques are made, and of times before and after; fewer only weaken the bound."""


@dataclass(frozen=True, kw_only=True, eq=False)
class CliqueWindows:
    """Windows of one period, each with comm-ops that take one channel in turns inside of it."""

    around_us: Floats
    """For each window the time before and after."""
    counts: Floats
    """For each window and comm-op how often the op runs inside."""
    channel: NDArray[np.int64]
    channel_us: list[Floats]
    """For each comm-op the time of each option on each channel."""


NO_CLIQUES = CliqueWindows(around_us=np.zeros(0), counts=np.zeros((0, 0)), channel=np.zeros(0, np.int64), channel_us=[])


class CliqueFinder:
    """Cliques of a step, place by place.

    Args:
        problem: the problem.
        nodes: its nodes.
        needs: for each node the nodes that it waits for, with lags of 0 and 1.
        order: the nodes so that those that a node waits for in its own iteration come first.
    """

    def __init__(
        self, problem: PlanProblem, nodes: Nodes, needs: list[list[tuple[int, int]]], order: list[int]
    ) -> None:
        comm = [node for node, place in enumerate(nodes.place) if place < 0]
        ends = op_ends(problem.workload)
        held = [set(ends[nodes.op[node]]) for node in comm]
        self._sides: list[tuple[Flags, Flags, Flags]] = []
        """For each place its comm-ops that hold both ends, the outward end alone, and the inward end alone."""
        for place in range(len(problem.workload.places)):
            out = np.array([2 * place + OUT in each for each in held], bool)
            inward = np.array([2 * place + IN in each for each in held], bool)
            sides = out & inward, out & ~inward, inward & ~out
            if len(comm) and len(nodes.op) <= MAX_NODES and all(side.any() for side in sides):
                self._sides.append(sides)
        self._precedes = _precedence(needs, order, comm) if self._sides else np.zeros((0, 0), bool)
        self._rows: dict[tuple[float, bytes], None] = {}
        self._count = len(comm)

    def add(self, heads: Floats, tails: Floats) -> None:
        """Adds the cliques inside a window.

        Args:
            heads: for each comm-op of two iterations the least time from the window's beginning to its start; negative
                infinity where it need not be inside.
            tails: the least time from its end to the window's end.
        """
        inside = (heads > -np.inf) & (tails > -np.inf)
        for both, out, inward in self._sides:
            twice = [np.tile(side, 2) & inside for side in (both, out, inward)]
            if not all(side.any() for side in twice):
                continue
            for first, second in self._chains(twice[1], twice[2]):
                members = twice[0] | first | second
                for head in np.unique(heads[members])[:MAX_THRESHOLDS]:
                    late = members & (heads >= head)
                    for tail in np.unique(tails[late])[:MAX_THRESHOLDS]:
                        some = late & (tails >= tail)
                        if (some & twice[1]).any() and (some & twice[2]).any() and (some & twice[0]).any():
                            us = float(heads[some].min() + tails[some].min())
                            self._rows[us, some.reshape(2, -1).sum(axis=0).astype(np.float64).tobytes()] = None

    def _chains(self, out: Flags, inward: Flags) -> Iterator[tuple[Flags, Flags]]:
        """Messages of one direction, and messages of the other that all wait for all of the first."""
        for one, other in ((out, inward), (inward, out)):
            for pivot in np.flatnonzero(one)[::-1][:MAX_PIVOTS]:
                after = other & self._precedes[pivot]
                if after.any():
                    before = one & self._precedes[:, pivot]
                    before[pivot] = True
                    yield before, after

    def windows(self, problem: PlanProblem) -> CliqueWindows:
        """All cliques, once for every channel."""
        ops = problem.workload.comm_ops
        tasks = [task for op in ops for option in problem.options[op.name] for task in option.tasks]
        channels = {c: at for at, c in enumerate(sorted({c for task in tasks for c in task.channels}))}
        known: dict[int, Floats] = {}
        for op in ops if self._rows else ():
            options = problem.options[op.name]
            if id(options) not in known:
                known[id(options)] = np.zeros((len(options), len(channels)))
                for row, option in zip(known[id(options)], options, strict=True):
                    for task in option.tasks:
                        row[[channels[c] for c in set(task.channels)]] += task.duration_us
        counts = [np.frombuffer(each, np.float64) for _, each in self._rows]
        times = len(channels) if self._rows else 0
        return CliqueWindows(
            around_us=np.repeat(np.array([us for us, _ in self._rows]), times),
            counts=np.repeat(np.array(counts).reshape(-1, self._count), times, axis=0),
            channel=np.tile(np.arange(times), len(self._rows)),
            channel_us=[known[id(problem.options[op.name])] for op in ops] if self._rows else [],
        )  # fmt: skip


def _precedence(needs: list[list[tuple[int, int]]], order: list[int], comm: list[int]) -> Flags:
    """Which comm-op of two iterations has ended before which other one starts, whatever the order."""
    count = len(needs)
    same, earlier = np.zeros((count, count), bool), np.zeros((count, count), bool)
    for v in order:
        for u, lag in needs[v]:
            if lag == 0:
                same[v] |= same[u]
                same[v, u] = True
    for v in order:
        for u, lag in needs[v]:
            if lag == 0:
                earlier[v] |= earlier[u]
            else:
                earlier[v] |= same[u]
                earlier[v, u] = True
    inner, across = same[np.ix_(comm, comm)].T, earlier[np.ix_(comm, comm)].T
    return np.block([[inner, across], [np.zeros_like(inner), inner]])
