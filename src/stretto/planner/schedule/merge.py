# SPDX-License-Identifier: Apache-2.0
"""Merges the programs of many motifs, and the work between them, into one set of transfers for the simulator."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ...cluster import Cluster
from ...errors import InvalidInput
from ...simulator.network import default_contention, routes_of, simulate_transfers
from ...units import MB
from ..costs.costs import Motion, SimulatedCosts

Ints = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False)
class Transfers:
    """The transfers of one motif over all its groups, numbered from 0; columns as `simulate_transfers` takes them."""

    after_ptr: Ints
    after: Ints
    gate_ptr: Ints
    gate: Ints
    gate_reads: NDArray[np.bool_]
    reduce: NDArray[np.bool_]
    cast: Ints
    nbytes: NDArray[np.float64]
    delay_us: NDArray[np.float64]
    connection: Ints
    route: Ints
    route_ptr: Ints
    route_links: NDArray[np.int32]
    last: Ints
    """The transfers that no other transfer of the motif waits for."""
    settle_us: float
    """Microseconds of the last reductions beyond the rate that the simulation assumes."""

    @property
    def count(self) -> int:
        """The number of transfers."""
        return len(self.nbytes)

    @cached_property
    def first(self) -> NDArray[np.bool_]:
        """For each transfer whether it waits for no other of the motif."""
        alone: NDArray[np.bool_] = np.diff(self.after_ptr) == 0
        return alone

    @cached_property
    def links(self) -> frozenset[int]:
        """Every link that the transfers use."""
        return frozenset(np.unique(self.route_links).tolist())


def transfers_of(
    motion: Motion, nbytes: float, algorithm: str, cluster: Cluster, costs: SimulatedCosts
) -> Transfers | None:
    """The transfers of a motif on the links of the whole cluster.

    Args:
        motion: the motif, its groups and its channels.
        nbytes: bytes as the group's `Collective` counts them.
        algorithm: name of the algorithm.
        cluster: the cluster.
        costs: the cost model that knows the programs.

    Returns:
        The transfers of all groups; None if the algorithm is known only by measurements.
    """
    try:
        programs = [costs.program(motion, nbytes, algorithm, at) for at in range(len(motion.groups))]
    except InvalidInput:
        return None
    columns: dict[str, list[NDArray[np.generic]]] = {}
    first = connections = casts = routes = 0
    for program in programs:
        connection, route, route_ptr, route_links = routes_of(program, cluster, motion.channels, nbytes=nbytes)
        for name, values in {
            "after_ptr": np.diff(program.after_ptr), "after": program.after.astype(np.int64) + first,
            "gate_ptr": np.diff(program.gate_ptr), "gate": program.gate.astype(np.int64) + first,
            "gate_reads": program.gate_reads, "reduce": program.reduce, "cast": _numbered(program.cast, casts),
            "nbytes": program.transfer_bytes(nbytes), "connection": _numbered(connection, connections),
            "route": _numbered(route, routes), "route_ptr": np.diff(route_ptr), "route_links": route_links,
        }.items():  # fmt: skip
            columns.setdefault(name, []).append(values)
        first += program.num_transfers
        connections += int(connection.max(initial=-1)) + 1
        casts += int(program.cast.max(initial=-1)) + 1
        routes += len(route_ptr) - 1
    joined = {name: np.concatenate(values) for name, values in columns.items()}
    for name in ("after_ptr", "gate_ptr", "route_ptr"):
        joined[name] = np.concatenate([[0], np.cumsum(joined[name])]).astype(np.int64)
    # Host code reduces more slowly than the cluster's devices: transfers that wait for a sum are delayed by that.
    slower = max(costs.part(motion).reduce_us_per_mb - cluster.reduce_us_per_mb, 0.0)
    added = np.where(joined["reduce"], joined["nbytes"], 0.0) * slower / MB
    delay_us = np.zeros(first)
    np.maximum.at(delay_us, np.repeat(np.arange(first), np.diff(joined["after_ptr"])), added[joined["after"]])
    waited = np.zeros(first, np.bool_)
    waited[joined["after"]] = True
    last = np.flatnonzero(~waited)
    return Transfers(**joined, delay_us=delay_us, last=last, settle_us=float(added[last].max(initial=0.0)))


def contention_on(cluster: Cluster, moves: Iterable[Transfers]) -> str:
    """The contention model for these transfers: fair if a link that they use caps flows or suffers from incast."""
    return default_contention(cluster, np.array(sorted({link for one in moves for link in one.links}), np.int64))


class Merge:
    """Transfers and work, added one after the other with their waits, then simulated together."""

    def __init__(self, cluster: Cluster, contention: str) -> None:
        self._cluster, self._contention = cluster, contention
        self.count = 0
        self._work: list[tuple[int, list[int], float]] = []
        self._moves: list[tuple[int, Transfers, int]] = []

    def work(self, needs: list[int], us: float) -> int:
        """Add work that takes no link and begins when all of `needs` have ended; return its number."""
        self._work.append((self.count, needs, us))
        self.count += 1
        return self.count - 1

    def move(self, moves: Transfers, start: int) -> int:
        """Add a motif that starts when number `start` has ended; return the number of its end."""
        begin = self.count
        self._moves.append((begin, moves, start))
        self.count += moves.count
        return self.work((moves.last + begin).tolist(), moves.settle_us)

    def end_us(self) -> NDArray[np.float64]:
        """The time at which each number ends."""
        count = self.count
        numbers = np.array([number for number, _, _ in self._work], np.int64)
        waits, gates = np.zeros(count, np.int64), np.zeros(count, np.int64)
        waits[numbers] = [len(needs) for _, needs, _ in self._work]
        nbytes, delay_us, reduce = np.zeros(count), np.zeros(count), np.zeros(count, np.bool_)
        delay_us[numbers] = [us for _, _, us in self._work]
        route, connection, cast = (np.full(count, fill, np.int32) for fill in (0, 0, -1))
        connection[numbers] = np.arange(len(numbers))
        # Route 0 is the empty route of all work; the routes of every motif are listed once.
        routes = _Routes()
        connections, casts = len(numbers), 0
        for begin, moves, _ in self._moves:
            rows = slice(begin, begin + moves.count)
            waits[rows] = np.diff(moves.after_ptr) + moves.first
            gates[rows] = np.diff(moves.gate_ptr)
            nbytes[rows], delay_us[rows], reduce[rows] = moves.nbytes, moves.delay_us, moves.reduce
            route[rows] = moves.route + routes.first(moves)
            connection[rows], cast[rows] = moves.connection + connections, _numbered(moves.cast, casts)
            connections += int(moves.connection.max(initial=-1)) + 1
            casts += int(moves.cast.max(initial=-1)) + 1
        ptr = np.concatenate([[0], np.cumsum(waits)])
        after = np.zeros(ptr[-1], np.int32)
        for number, needs, _ in self._work:
            after[ptr[number] : ptr[number + 1]] = needs
        for begin, moves, start in self._moves:
            rows = slice(ptr[begin], ptr[begin + moves.count])
            # Transfers that wait for no other transfer of the motif wait for its start instead.
            after[ptr[begin : begin + moves.count][moves.first]] = start
            inner = np.repeat(~moves.first, waits[begin : begin + moves.count])
            after[rows][inner] = moves.after + begin
        gate = [moves.gate + begin for begin, moves, _ in self._moves]
        return simulate_transfers(
            self._cluster, routes=routes.table(), route=route, connection=connection, nbytes=nbytes, after=(ptr, after),
            reduce=reduce, gate=(np.concatenate([[0], np.cumsum(gates)]), np.concatenate(gate).astype(np.int32)),
            gate_reads=np.concatenate([moves.gate_reads for _, moves, _ in self._moves]), delay_us=delay_us,
            cast=cast if casts else None, contention=self._contention,
        ).end_us  # fmt: skip


class _Routes:
    def __init__(self) -> None:
        self._first: dict[int, int] = {}
        self._ptr: list[Ints] = [np.zeros(2, np.int64)]
        self._links: list[NDArray[np.int32]] = []

    def first(self, moves: Transfers) -> int:
        """The number of a motif's first route."""
        if id(moves) not in self._first:
            self._first[id(moves)] = sum(map(len, self._ptr)) - 1
            self._ptr.append(moves.route_ptr[1:] + self._ptr[-1][-1])
            self._links.append(moves.route_links)
        return self._first[id(moves)]

    def table(self) -> tuple[Ints, NDArray[np.int32]]:
        return np.concatenate(self._ptr), np.concatenate(self._links)


def _numbered(values: NDArray[np.integer], first: int) -> Ints:
    return np.where(values >= 0, values.astype(np.int64) + first, -1)
