# SPDX-License-Identifier: Apache-2.0
"""The network simulator: a verified program on a cluster, link by link."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from .. import _native
from ..cluster import Cluster
from ..cluster.symmetry import link_orbits
from ..errors import InvalidInput, unknown
from ..late import LateFunction
from ..programs import Lowered, Program, SymmetricProgram
from ..programs.ir import check_table
from ..units import MB, check_bytes, format_bytes
from .messages import MessageGraph
from .timeline import Timeline

if TYPE_CHECKING:
    from pathlib import Path

    from .runtimes import Runtime

CONTENTION = ("fifo", "fair")
ALPHA = ("pipelined", "blocking")
MAX_CONNECTIONS = 1 << 28
MAX_LOADS = 1 << 26
"""The most numbers of a record of the links' load."""
SIMULATE_PRICED: LateFunction[
    [
        Program | SymmetricProgram | Lowered,
        Cluster,
        float,
        Runtime | str | Path,
        str | None,
        str,
        Iterable[str] | None,
        int,
    ],
    Timeline,
] = LateFunction("simulator.priced.simulate_priced")

Rows = tuple[NDArray[np.int64], NDArray[np.int32]]
"""Rows of variable length: row i is ``values[ptr[i]:ptr[i+1]]``."""
Routing = tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int64], NDArray[np.int32]]
"""The connection and the route of each transfer, and the links of the routes as rows; see `routes_of`."""


def simulate(
    program: Program | SymmetricProgram | Lowered,
    cluster: Cluster,
    *,
    nbytes: float,
    contention: str | None = None,
    alpha: str = "pipelined",
    channels: Iterable[str] | None = None,
    runtime: Runtime | str | Path | None = None,
    load_slots: int = 0,
) -> Timeline:
    """Run a program on a cluster link by link, and say how long it takes and why.

    The program is verified first. A `SymmetricProgram` is simulated by one group of ranks alone, on a cluster that
    looks the same from every group; a `Lowered` program (an MSCCL file, for example) as its threadblocks would run it.
    The members of a multicast travel as one message up to the switch where they part, which has to multicast.

    Args:
        program: The program.
        cluster: The cluster; rank r runs on device ``collective.ranks[r]``.
        nbytes: The larger of one rank's send and receive buffer in bytes, > 0.
        contention: "fifo" (a link serves one transfer at a time) or "fair" (connections share a link max-min, and the
            messages of each connection follow one another). By default fifo, but fair where a link caps single flows or
            loses throughput to incast, which only fair can express.
        alpha: "pipelined" (latency delays arrival only) or "blocking" (the link is taken for the latency too; with fair
            sharing the flow then starts after it).
        channels: The channels whose links routes may use; all when not given.
        runtime: The price list of the runtime that is to run it, or its name or file: a program is then lowered, and
            its spans are instructions. By default links alone are charged.
        load_slots: In how many equal slots of the time the load of each link is recorded, which takes as long again
            (``Timeline.link_load``); not at all by default.

    Returns:
        The timeline, with the load of each link and the critical path.

    Raises:
        VerificationError: The program is wrong.
        InvalidInput: The cluster has too few devices or no route, or cannot do what the program or the options ask.

    >>> from stretto import AllReduce, algorithm
    >>> ring = Cluster.preset("ring", nodes=4, gb_per_s=10.0, alpha_us=1.0)
    >>> simulate(algorithm("ring", "all_reduce", 4), ring, nbytes=4 * MB).total_us
    606.0
    """
    nbytes = check_bytes(nbytes)
    if runtime is not None:
        return SIMULATE_PRICED(program, cluster, nbytes, runtime, contention, alpha, channels, load_slots)
    contention = _physics(cluster, contention, alpha)
    program.verify()
    moves = MessageGraph.of(program) if isinstance(program, Lowered) else program
    links = np.arange(cluster.num_links)
    nbytes_each = moves.transfer_bytes(nbytes)
    if isinstance(moves, SymmetricProgram):
        links, (connection, route, route_ptr, route_links) = _orbit_routes(moves, cluster, channels, nbytes_each)
    else:
        connection, route, route_ptr, route_links = routes_of(moves, cluster, channels, nbytes=nbytes)
    cast = moves.cast if isinstance(moves, Program) and moves.multicasts else None
    if cast is not None:
        _check_casts(cluster, cast, route, route_ptr, route_links)
    if contention == "fifo":
        _refuse_caps(cluster, links[route_links])
    start, end, critical_path, busy, moved, events, load = _native.simulate(
        reduce=moves.reduce,
        bytes=nbytes_each,
        after_ptr=moves.after_ptr,
        after=moves.after,
        gate_ptr=moves.gate_ptr,
        gate=moves.gate,
        gate_reads=moves.gate_reads,
        connection=connection,
        route=route,
        route_ptr=route_ptr,
        route_links=route_links,
        cast=cast,
        load_slots=_check_slots(load_slots, len(links)),
        **_network(cluster, links, contention, alpha),
    )
    facts = {
        "program": moves.name,
        "cluster": cluster.name,
        "bytes": format_bytes(nbytes),
        "contention": contention,
        "alpha": alpha,
        "events": str(events),
    }
    if channels is not None:
        facts["channels"] = "+".join(sorted(channels))
    if isinstance(moves, SymmetricProgram):
        facts["stands for"] = f"{moves.num_ranks} ranks"
    streams, stream = _streams(moves.dst, moves.lane)
    names, name = _names(moves)
    return Timeline(
        total_us=float(end.max(initial=0.0)),
        rank=moves.src,
        stream=stream,
        name=name,
        start_us=start,
        end_us=end,
        nbytes=nbytes_each,
        streams=streams,
        names=names,
        link_names=tuple(cluster.link_name(i) for i in links.tolist()),
        link_busy_us=busy,
        link_bytes=moved,
        critical_path=critical_path,
        link_load=load.reshape(len(links), load.size // max(len(links), 1)),
        facts=tuple(facts.items()),
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class Times:
    """The start and end of each transfer, and the load of each link of the cluster."""

    start_us: NDArray[np.float64]
    end_us: NDArray[np.float64]
    link_busy_us: NDArray[np.float64]
    link_bytes: NDArray[np.float64]
    critical_path: NDArray[np.int32]
    """The transfers that lead up to the one that ends last, each delayed by the one before it."""
    link_load: NDArray[np.float64]
    """Links x slots of time, where the load was asked for: the share of each slot in which each link was busy."""


def simulate_transfers(
    cluster: Cluster,
    *,
    routes: Rows,
    route: NDArray[np.int32],
    connection: NDArray[np.int32],
    nbytes: NDArray[np.float64],
    after: Rows,
    reduce: NDArray[np.bool_] | None = None,
    gate: Rows | None = None,
    gate_reads: NDArray[np.bool_] | None = None,
    delay_us: NDArray[np.float64] | None = None,
    cast: NDArray[np.int32] | None = None,
    contention: str | None = None,
    alpha: str = "pipelined",
    load_slots: int = 0,
) -> Times:
    """Simulate any transfers, such as those of many programs and the computation between them.

    Tables are ``(ptr, values)``: row i is ``values[ptr[i]:ptr[i+1]]``. Only the form is checked here, so the programs
    that the transfers come from must have been verified.

    Args:
        cluster: The cluster.
        routes: A table of routes, as link indices. A transfer with an empty route ends after its delay: computation.
        route: The row of `routes` that each transfer takes.
        connection: The connection of each transfer; on one connection transfers start, and end, in order.
        nbytes: The bytes of each transfer, >= 0.
        after: A table of the transfers that must have ended before each transfer starts.
        reduce: Whether the receiver adds each transfer to its own data, which takes time there; none by default.
        gate: A table as in `Program`: each transfer ends once these are done with its destination; empty by default.
        gate_reads: For each entry of `gate`, whether it has to have started rather than ended; False when not given.
        delay_us: The time that each transfer waits, once it may start, before it asks for its first link; 0 by default.
        cast: As in `Program`: transfers with the same number >= 0 are one multicast; none when not given.
        contention: "fifo" or "fair", as in `simulate`.
        alpha: "pipelined" or "blocking", as in `simulate`.
        load_slots: As in `simulate`.

    Returns:
        The times of all transfers and the load of all links.

    Raises:
        InvalidInput: The arrays do not fit together, or a transfer waits for itself and so never starts.

    >>> ring = Cluster.preset("ring", nodes=4, gb_per_s=10.0, alpha_us=1.0)
    >>> times = simulate_transfers(
    ...     ring, routes=(np.array([0, 0, 1]), np.array([0], np.int32)), route=np.array([0, 1], np.int32),
    ...     connection=np.array([0, 1], np.int32), nbytes=np.array([0.0, 1e6]), delay_us=np.array([50.0, 0.0]),
    ...     after=(np.array([0, 0, 1]), np.array([0], np.int32)),
    ... )
    >>> times.start_us.tolist(), times.end_us.tolist()
    ([0.0, 50.0], [50.0, 151.0])
    """
    contention = _physics(cluster, contention, alpha)
    count = len(nbytes)
    nothing = np.zeros(count + 1, np.int64), np.zeros(0, np.int32)
    gates = nothing if gate is None else gate
    reads = np.zeros(len(gates[1]), np.bool_) if gate_reads is None else gate_reads
    added = np.zeros(count, np.bool_) if reduce is None else reduce
    columns = {
        "route": (route, count), "connection": (connection, count), "reduce": (added, count),
        "delay_us": (delay_us, count), "cast": (cast, count), "gate_reads": (reads, len(gates[1])),
    }  # fmt: skip
    for key, (values, size) in columns.items():
        if values is not None and len(values) != size:
            raise InvalidInput(f"{key}: has {len(values)} entries, not {size}")
    check_table("after", *after, count)
    check_table("gate", *gates, count)
    ptr, links = routes
    _within("routes", links, cluster.num_links)
    _within("route", route, len(ptr) - 1)
    _within("connection", connection, MAX_CONNECTIONS)
    if len(ptr) == 0 or ptr[0] != 0 or ptr[-1] != len(links) or np.any(np.diff(ptr) < 0):
        raise InvalidInput("routes: pointers do not match the list")
    for key, amounts in (("nbytes", nbytes), ("delay_us", delay_us)):
        if amounts is not None and not np.all(np.isfinite(amounts) & (amounts >= 0)):
            raise InvalidInput(f"{key}: must be >= 0 and finite")
    if cast is not None:
        _check_casts(cluster, cast, route, ptr, links)
    if contention == "fifo":
        _refuse_caps(cluster, links)
    start, end, critical_path, busy, moved, _, load = _native.simulate(
        reduce=added,
        bytes=nbytes,
        after_ptr=after[0],
        after=after[1],
        gate_ptr=gates[0],
        gate=gates[1],
        gate_reads=reads,
        connection=connection,
        route=route,
        route_ptr=ptr,
        route_links=links,
        delay_us=delay_us,
        cast=cast,
        load_slots=_check_slots(load_slots, cluster.num_links),
        **_network(cluster, np.arange(cluster.num_links), contention, alpha),
    )
    stuck = np.flatnonzero(end < 0)
    if len(stuck):
        raise InvalidInput(f"after: transfer {stuck[0]} waits for itself ({len(stuck)} never end)")
    return Times(
        start_us=start, end_us=end, link_busy_us=busy, link_bytes=moved, critical_path=critical_path,
        link_load=load.reshape(cluster.num_links, load.size // max(cluster.num_links, 1)),
    )  # fmt: skip


def _check_slots(slots: int, links: int) -> int:
    if not 0 <= slots * max(links, 1) <= MAX_LOADS:
        raise InvalidInput(f"load_slots: must be 0..{MAX_LOADS // max(links, 1)} for {links} links, not {slots}")
    return slots


def _within(name: str, values: NDArray[np.integer], limit: int) -> None:
    bad = np.flatnonzero((values < 0) | (values >= limit))
    if len(bad):
        raise InvalidInput(f"{name}[{bad[0]}]: must be 0..{limit - 1}, not {values[bad[0]]}")


def _physics(cluster: Cluster, contention: str | None, alpha: str) -> str:
    """The contention mode: the one asked for, or the one that the links need."""
    if alpha not in ALPHA:
        raise unknown("alpha mode", alpha, ALPHA)
    if contention is None:
        return default_contention(cluster)
    if contention not in CONTENTION:
        raise unknown("contention mode", contention, CONTENTION)
    return contention


def default_contention(cluster: Cluster, links: NDArray[np.integer] | None = None) -> str:
    """The contention mode that links (by default all) need: "fair" for flow caps and incast curves, else "fifo"."""
    which = slice(None) if links is None else links
    special = np.isfinite(cluster.link_flow_gb_per_s[which]) | (cluster.link_incast[which] >= 0)
    return "fair" if special.any() else "fifo"


def _network(cluster: Cluster, links: NDArray[np.integer], contention: str, alpha: str) -> dict[str, Any]:
    """The arguments of the native simulator for these links of a cluster and these modes."""
    curves = cluster.incast_curves
    return {
        "alpha_us": cluster.link_alpha_us[links],
        "bytes_per_us": cluster.link_gb_per_s[links] * 1e3,
        "flow_cap": cluster.link_flow_gb_per_s[links] * 1e3,
        "incast": cluster.link_incast[links].astype(np.int32),
        "curve_ptr": np.cumsum([0, *(len(c) for c in curves)]).astype(np.int64),
        "curve_flows": np.array([flows for c in curves for flows, _ in c], np.int32),
        "curve_share": np.array([share for c in curves for _, share in c], np.float64),
        "reduce_us_per_byte": cluster.reduce_us_per_mb / MB,
        "alpha_blocks": alpha == "blocking",
        "fair": contention == "fair",
    }


def _check_casts(
    cluster: Cluster,
    cast: NDArray[np.int32],
    route: NDArray[np.int32],
    route_ptr: NDArray[np.int64],
    route_links: NDArray[np.int32],
) -> None:
    """Refuse a multicast whose members part at a node that does not multicast."""
    fork = _native.cast_forks(cast, route, route_ptr, route_links)
    parts = np.flatnonzero(fork != -1)
    if not len(parts):
        return
    where = np.where(fork[parts] >= 0, cluster.link_dst[fork[parts]], -1)
    bad = np.flatnonzero((where < 0) | ~cluster.node_multicast[where])
    if len(bad):
        t, node = int(parts[bad[0]]), int(where[bad[0]])
        place = "at its source" if node < 0 else f"at {cluster.node_names[node]}, which does not multicast"
        raise InvalidInput(f"transfers[{t}].cast: parts from the others of cast {cast[t]} {place}")


def routes_of(
    program: Program | MessageGraph, cluster: Cluster, channels: Iterable[str] | None = None, *, nbytes: float
) -> Routing:
    """Find each transfer's connection and route: its own route where the program names one, else the cluster's.

    The cluster's route is the fastest for the size of the transfer, so that transfers of one connection may take
    different ones.

    Args:
        program: The program, or the messages of a lowered one.
        cluster: The cluster.
        channels: The channels whose links the cluster's routes may use; all when not given.
        nbytes: The bytes that the collective moves, > 0.

    Returns:
        ``(connection, route, ptr, links)``: transfer t takes links ``links[ptr[i]:ptr[i+1]]`` with ``i = route[t]``.

    Raises:
        InvalidInput: A device does not exist, there is no route, or a named route does not fit.
    """
    c = program.collective
    if max(c.ranks) >= cluster.num_devices:
        raise InvalidInput(
            f"ranks: device {max(c.ranks)} does not exist; {cluster.name} has {cluster.num_devices} devices"
        )
    if isinstance(program, Program) and program.routes and program.routes_digest != cluster.digest:
        raise InvalidInput(f"routes: program {program.name} was routed on another cluster than {cluster.name}")
    device = np.array(c.ranks, np.int32)
    connection, route, ptr, links = _routes(
        device[program.dst], program.lane, program.transfer_bytes(nbytes), cluster, channels, src=device[program.src]
    )
    if isinstance(program, MessageGraph) or not program.routes:
        return connection, route, ptr, links
    own_ptr, own = _flat(program.routes)
    _check_routes(program, cluster, own_ptr, own)
    named = np.where(program.route >= 0, len(ptr) - 1 + program.route, route).astype(np.int32)
    return connection, named, np.concatenate([ptr, ptr[-1] + own_ptr[1:]]), np.concatenate([links, own])


def routes_between(
    src: NDArray[np.int32], dst: NDArray[np.int32], nbytes: NDArray[np.float64], cluster: Cluster
) -> Routing:
    """The cluster's routes of messages between devices.

    Args:
        src: The device that each message comes from.
        dst: The device that it goes to.
        nbytes: Its bytes.
        cluster: The cluster.

    Returns:
        As of `routes_of`.
    """
    return _routes(dst, np.zeros(len(dst), np.int16), nbytes, cluster, None, src=src)


def routes_vary(program: Program, cluster: Cluster, channels: Iterable[str] | None = None) -> bool:
    """Whether the cluster's routes of a program's transfers depend on their sizes.

    Args:
        program: The program.
        cluster: The cluster.
        channels: The channels whose links routes may use; all when not given.

    Returns:
        True if some transfer has several routes, each the fastest for some size.
    """
    device = np.array(program.collective.ranks, np.int64)
    pairs = np.unique(device[program.src] * cluster.num_devices + device[program.dst])
    src, dst = (end.astype(np.int32) for end in np.divmod(pairs, cluster.num_devices))
    return bool(cluster.route_classes(src, dst, channels=channels).max(initial=0) > 1)


def _routes(
    dst: NDArray[np.int32],
    lane: NDArray[np.integer],
    nbytes: NDArray[np.float64],
    cluster: Cluster,
    channels: Iterable[str] | None,
    *,
    src: NDArray[np.int32] | int = 0,
) -> Routing:
    """The connection (src, dst, lane) and the route of each transfer; equal routes are spread over pairs and lanes."""
    devices, lanes = cluster.num_devices, int(lane.max(initial=0)) + 1
    key = (np.asarray(src, np.int64) * devices + dst) * lanes + lane
    pairs, connection = _unique(key, devices * devices * lanes)
    ends, which = np.divmod(pairs, lanes)
    a, b = (end.astype(np.int32) for end in np.divmod(ends, devices))
    # Where the fastest route depends on the size, each class of sizes gets a route of its own.
    classes = int((several := cluster.route_classes(a, b, channels=channels)).max(initial=1))
    if classes <= 1:
        ptr, links = cluster.route_table(a, b, a.astype(np.int64) + b + which, channels=channels)
        return connection, connection, ptr, links
    chosen = np.zeros(len(dst), np.int64)
    rows = np.flatnonzero(several[connection] > 1)
    at = connection[rows]
    chosen[rows] = cluster.route_classes(a[at], b[at], np.ascontiguousarray(nbytes[rows]), channels=channels)
    used, route = _unique(connection * np.int64(classes) + chosen, len(pairs) * classes)
    size = np.zeros(len(used))
    size[route] = nbytes
    pair = used // classes
    ptr, links = cluster.route_table(
        a[pair], b[pair], a[pair].astype(np.int64) + b[pair] + which[pair], nbytes=size, channels=channels
    )
    return connection, route, ptr, links


def _orbit_routes(
    program: SymmetricProgram, cluster: Cluster, channels: Iterable[str] | None, nbytes: NDArray[np.float64]
) -> tuple[NDArray[np.int64], Routing]:
    """The first link of each orbit of links, and the routes of one group's transfers over these orbits.

    Refused are routes over a link that several groups share, and pairs with several equal routes: groups may take
    different ones then, and one does not stand for all.
    """
    found = link_orbits(cluster, program.sizes, local=program.local)
    src, dst = program.src, program.dst
    pairs = src.astype(np.int64) * cluster.num_devices + dst
    # Not by np.unique, which imports all of NumPy's masked arrays.
    for size in sorted(set(nbytes.tolist())):
        for pair in sorted(set(pairs[nbytes == size].tolist())):
            a, b = divmod(pair, cluster.num_devices)
            if cluster.num_routes(a, b, nbytes=size, channels=channels) > 1:
                raise InvalidInput(
                    f"symmetry: {cluster.name} has several equal routes from {cluster.node_names[a]} to "
                    f"{cluster.node_names[b]}, so ranks may differ; simulate the expanded program"
                )
    connection, route, ptr, links = _routes(dst, program.lane, nbytes, cluster, channels, src=src)
    shared = links[found.shared[found.orbit[links]]]
    if len(shared):
        raise InvalidInput(
            f"symmetry: link {cluster.link_name(int(shared[0]))} of {cluster.name} is shared by several ranks; "
            f"simulate the expanded program"
        )
    return found.first, (connection, route, ptr, found.orbit[links].astype(np.int32))


def _flat(routes: tuple[tuple[int, ...], ...]) -> Rows:
    """Routes as rows; links that no array of links can hold become -1."""
    ptr = np.zeros(len(routes) + 1, np.int64)
    np.cumsum(np.fromiter(map(len, routes), np.int64, len(routes)), out=ptr[1:])
    links = np.fromiter(chain.from_iterable(routes), np.int64, int(ptr[-1]))
    return ptr, np.where(links > np.iinfo(np.int32).max, -1, links).astype(np.int32)


def _check_routes(program: Program, cluster: Cluster, ptr: NDArray[np.int64], links: NDArray[np.int32]) -> None:
    """Refuse a named route that does not lead from the sender's device to the receiver's over connected links."""
    owner = np.repeat(np.arange(len(ptr) - 1), np.diff(ptr))
    wrong = np.concatenate([np.flatnonzero(np.diff(ptr) == 0), owner[(links < 0) | (links >= cluster.num_links)]])
    if len(wrong):
        raise InvalidInput(f"routes[{wrong.min()}]: links must be 0..{cluster.num_links - 1}")
    apart = (cluster.link_dst[links[:-1]] != cluster.link_src[links[1:]]) & (owner[:-1] == owner[1:])
    if apart.any():
        raise InvalidInput(f"routes[{owner[:-1][apart][0]}]: its links do not meet")
    ends = np.stack([cluster.link_src[links[ptr[:-1]]], cluster.link_dst[links[ptr[1:] - 1]]], axis=1)
    named = np.flatnonzero(program.route >= 0)
    device = np.array(program.collective.ranks)
    wanted = np.stack([device[program.src[named]], device[program.dst[named]]], axis=1)
    astray = named[np.any(ends[program.route[named]] != wanted, axis=1)]
    if len(astray):
        t = int(astray[0])
        raise InvalidInput(
            f"transfers[{t}].route: routes[{program.route[t]}] does not lead from its source to its destination"
        )


def _refuse_caps(cluster: Cluster, links: NDArray[np.integer]) -> None:
    special = links[np.isfinite(cluster.link_flow_gb_per_s[links]) | (cluster.link_incast[links] >= 0)]
    if len(special):
        raise InvalidInput(
            f"contention: fifo cannot express the flow cap or incast of link "
            f"{cluster.link_name(int(special[0]))}; use fair"
        )


def _unique(key: NDArray[np.int64], limit: int) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """The distinct keys and the index of each key among them, as of `np.unique`; not sorted if `limit` is small."""
    if limit > 1 << 24 or limit > 64 * len(key) + 4096:
        values, inverse = np.unique(key, return_inverse=True)
        return values, inverse.astype(np.int32)
    used = np.zeros(limit, np.bool_)
    used[key] = True
    values = np.flatnonzero(used)
    number = np.zeros(limit, np.int32)
    number[values] = np.arange(len(values))
    return values, number[key]


def _streams(dst: NDArray[np.int32], lane: NDArray[np.integer]) -> tuple[tuple[str, ...], NDArray[np.int32]]:
    lanes = int(lane.max(initial=0)) + 1
    values, stream = _unique(dst.astype(np.int64) * lanes + lane, (int(dst.max(initial=0)) + 1) * lanes)
    return tuple(f"to {v // lanes}" + (f" lane {v % lanes}" if lanes > 1 else "") for v in values), stream


def _names(program: Program | SymmetricProgram | MessageGraph) -> tuple[tuple[str, ...], NDArray[np.int32]]:
    """Names such as ``c3``, ``+c3`` (reduced) and ``c3 and 2 more``."""
    if isinstance(program, MessageGraph):
        number = {label: i for i, label in enumerate(dict.fromkeys(program.labels))}
        return tuple(number), np.array([number[label] for label in program.labels], np.int32)
    more = np.diff(program.chunk_ptr) - 1
    most = int(more.max(initial=0)) + 1
    first = program.chunk[program.chunk_ptr[:-1]].astype(np.int64)
    key = (first * most + more) * 2 + program.reduce
    values, name = _unique(key, (int(first.max(initial=0)) + 1) * most * 2)
    chunks, extra, signs = values // 2 // most, values // 2 % most, values % 2
    listed = zip(chunks.tolist(), extra.tolist(), signs.tolist(), strict=True)
    return tuple("+" * s + f"c{c}" + (f" and {m} more" if m else "") for c, m, s in listed), name
