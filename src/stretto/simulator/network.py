"""The network simulator: a verified program on a cluster, link by link."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from .. import _native
from ..cluster import Cluster
from ..cluster.symmetry import link_orbits
from ..errors import InvalidInput, unknown
from ..programs import Lowered, Program, SymmetricProgram
from ..units import MB, format_bytes
from .messages import Messages
from .timeline import Timeline

CONTENTION = ("fifo", "fair")
ALPHA = ("pipelined", "blocking")


def simulate(
    program: Program | SymmetricProgram | Lowered,
    cluster: Cluster,
    *,
    nbytes: float,
    contention: str | None = None,
    alpha: str = "pipelined",
    channels: Iterable[str] | None = None,
) -> Timeline:
    """Run a program on a cluster and say how long it takes and why.

    `contention`: ``fifo`` (a link serves one transfer at a time) or ``fair`` (max-min sharing); by default fifo,
    but fair where a link caps single flows or loses throughput to incast, which only fair can express.
    `alpha`: ``pipelined`` (latency delays arrival only) or ``blocking`` (the link is taken for it too; with fair
    sharing the flow then starts after it). `channels` restricts routes to links of these channels.
    A `SymmetricProgram` is simulated by rank 0 alone, on a cluster that looks the same from every device; a
    `Lowered` one (an MSCCL file, say) as its threadblocks would run it.

    >>> from stretto import AllReduce, algorithm
    >>> ring = Cluster.preset("ring", nodes=4, gb_per_s=10.0, alpha_us=1.0)
    >>> simulate(algorithm("ring", "all_reduce", 4), ring, nbytes=4 * MB).total_us
    606.0
    """
    if alpha not in ALPHA:
        raise unknown("alpha mode", alpha, ALPHA)
    if not (np.isfinite(nbytes) and nbytes > 0):
        raise InvalidInput(f"nbytes: must be > 0, not {nbytes}")
    special = bool(np.isfinite(cluster.link_flow_gb_per_s).any() or (cluster.link_incast >= 0).any())
    if contention is None:
        contention = "fair" if special else "fifo"
    if contention not in CONTENTION:
        raise unknown("contention mode", contention, CONTENTION)
    program.verify()
    moves = Messages.of(program) if isinstance(program, Lowered) else program
    links = np.arange(cluster.num_links)
    if isinstance(moves, SymmetricProgram):
        orbit, links = link_orbits(cluster, moves.sizes)
        _require_one_route(moves, cluster, channels)
        connection, route_ptr, route_links = _routes(moves.dst, moves.lane, cluster, channels)
        route = connection
        route_links = orbit[route_links].astype(np.int32)
        sender = np.zeros(len(moves.dst), np.int32)
    else:
        connection, route, route_ptr, route_links = routes_of(moves, cluster, channels)
        sender = moves.src
    if special and contention == "fifo":
        _refuse_caps(cluster, links[route_links])
    nbytes_each = moves.transfer_bytes(nbytes)
    curves = cluster.incast_curves
    start, end, critical_path, busy, moved, events = _native.simulate(
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
        alpha_us=cluster.link_alpha_us[links],
        bytes_per_us=cluster.link_gb_per_s[links] * 1e3,
        flow_cap=cluster.link_flow_gb_per_s[links] * 1e3,
        incast=cluster.link_incast[links].astype(np.int32),
        curve_ptr=np.cumsum([0, *(len(c) for c in curves)]).astype(np.int64),
        curve_flows=np.array([flows for c in curves for flows, _ in c], np.int32),
        curve_share=np.array([share for c in curves for _, share in c], np.float64),
        reduce_us_per_byte=cluster.reduce_us_per_mb / MB,
        alpha_blocks=alpha == "blocking",
        fair=contention == "fair",
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
        rank=sender,
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
        facts=tuple(facts.items()),
    )


def routes_of(
    program: Program | Messages, cluster: Cluster, channels: Iterable[str] | None = None
) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int64], NDArray[np.int32]]:
    """Each transfer's connection, and its route as an index into ``(ptr, links)``.

    The route is its own where it names one, else the cluster's.
    """
    c = program.collective
    if max(c.ranks) >= cluster.num_devices:
        raise InvalidInput(
            f"ranks: device {max(c.ranks)} does not exist; {cluster.name} has {cluster.num_devices} devices"
        )
    if isinstance(program, Program) and program.routes and program.routes_digest != cluster.digest:
        raise InvalidInput(f"routes: program {program.name} was routed on another cluster than {cluster.name}")
    device = np.array(c.ranks, np.int32)
    connection, ptr, links = _routes(device[program.dst], program.lane, cluster, channels, src=device[program.src])
    if isinstance(program, Messages) or not program.routes:
        return connection, connection, ptr, links
    _check_routes(program, cluster)
    own = np.array([link for route in program.routes for link in route], np.int32)
    own_ptr = ptr[-1] + np.cumsum([len(route) for route in program.routes])
    named = np.where(program.route >= 0, len(ptr) - 1 + program.route, connection).astype(np.int32)
    return connection, named, np.concatenate([ptr, own_ptr]), np.concatenate([links, own])


def _routes(
    dst: NDArray[np.int32],
    lane: NDArray[np.integer],
    cluster: Cluster,
    channels: Iterable[str] | None,
    *,
    src: NDArray[np.int32] | int = 0,
) -> tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.int32]]:
    """The cluster's route for each (src, dst, lane); equal routes are spread over pairs and lanes."""
    devices, lanes = cluster.num_devices, int(lane.max(initial=0)) + 1
    key = (np.asarray(src, np.int64) * devices + dst) * lanes + lane
    pairs, pair_of = _unique(key, devices * devices * lanes)
    ends, which = np.divmod(pairs, lanes)
    a, b = (end.astype(np.int32) for end in np.divmod(ends, devices))
    ptr, links = cluster.route_table(a, b, a.astype(np.int64) + b + which, channels=channels)
    return pair_of, ptr, links


def _require_one_route(program: SymmetricProgram, cluster: Cluster, channels: Iterable[str] | None) -> None:
    """Where equal routes exist, ranks may take different ones, and rank 0 does not stand for them all."""
    for dst in np.unique(program.dst).tolist():
        if len(cluster.routes(0, dst, channels=channels, limit=2)) > 1:
            raise InvalidInput(
                f"symmetry: {cluster.name} has several equal routes from {cluster.node_names[0]} to "
                f"{cluster.node_names[dst]}, so ranks may differ; simulate the expanded program"
            )


def _check_routes(program: Program, cluster: Cluster) -> None:
    """A named route must lead from the sender's device to the receiver's over links that meet."""
    ends = np.empty((len(program.routes), 2), np.int64)
    for at, route in enumerate(program.routes):
        if not route or min(route) < 0 or max(route) >= cluster.num_links:
            raise InvalidInput(f"routes[{at}]: links must be 0..{cluster.num_links - 1}")
        links = np.array(route)
        if np.any(cluster.link_dst[links[:-1]] != cluster.link_src[links[1:]]):
            raise InvalidInput(f"routes[{at}]: its links do not meet")
        ends[at] = cluster.link_src[links[0]], cluster.link_dst[links[-1]]
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
    """As np.unique with inverse, but without sorting where the keys are small."""
    if limit > 1 << 24:
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


def _names(program: Program | SymmetricProgram | Messages) -> tuple[tuple[str, ...], NDArray[np.int32]]:
    """Names such as ``c3``, ``+c3`` (reduced) and ``c3 and 2 more``."""
    if isinstance(program, Messages):
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
