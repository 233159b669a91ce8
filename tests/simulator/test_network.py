# SPDX-License-Identifier: Apache-2.0
"""The network simulator: its physics on cases one can do by hand, and against a slow reference."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest

from stretto import (
    MB,
    AllGather,
    AllReduce,
    Broadcast,
    Cluster,
    Gather,
    InvalidInput,
    Link,
    Node,
    Permute,
    Program,
    Reduce,
    Timeline,
    simulate,
)
from stretto.simulator.network import routes_of

Make = Callable[[int], Program]


def line(*rates: float, alpha_us: float = 1.0, **link: object) -> Cluster:
    """Device 0 and device 1 at the ends of a chain of switches."""
    nodes = [Node(name="a"), Node(name="b")] + [Node(name=f"s{i}", kind="switch") for i in range(len(rates) - 1)]
    path = [0, *range(2, 1 + len(rates)), 1]
    links = [
        Link(src=u, dst=v, alpha_us=alpha_us, gb_per_s=rate, **link)  # type: ignore[arg-type]
        for rate, (u, v) in zip(rates, pairwise(path), strict=True)
    ]
    back = [Link(src=v, dst=u, alpha_us=alpha_us, gb_per_s=r) for r, (u, v) in zip(rates, pairwise(path), strict=True)]
    return Cluster.build("line", nodes=nodes, links=links + back)


def star(count: int, gb_per_s: float = 1.0, alpha_us: float = 0.0, **down: object) -> Cluster:
    """Devices around one switch."""
    nodes = [Node(name=f"d{i}") for i in range(count)] + [Node(name="sw", kind="switch")]
    links = [Link(src=i, dst=count, alpha_us=alpha_us, gb_per_s=gb_per_s) for i in range(count)]
    links += [
        Link(src=count, dst=i, alpha_us=0, gb_per_s=gb_per_s, **down)  # type: ignore[arg-type]
        for i in range(count)
    ]
    return Cluster.build("star", nodes=nodes, links=links)


def send(chunks: int = 1) -> Program:
    c = Permute(2, [(0, 1)], chunks=chunks)
    return Program.from_steps("send", c, src=[0] * chunks, dst=[1] * chunks, chunk=range(chunks), step=[0] * chunks)


def incast(count: int) -> Program:
    c = Reduce(count)
    n = count - 1
    return Program.from_steps("in", c, src=range(1, count), dst=[0] * n, chunk=[0] * n, step=[0] * n, reduce=True)


@pytest.mark.parametrize("alpha", ["pipelined", "blocking"])
@pytest.mark.parametrize("contention", ["fifo", "fair"])
@pytest.mark.parametrize(
    "rates", [(1.0,), (1.0, 2.0), (2.0, 1.0), (4.0, 1.0, 2.0), (1.0, 4.0, 1.0), (2.0, 9.0, 1.0, 5.0)]
)
def test_a_lone_transfer_pays_every_alpha_and_the_slowest_link(
    rates: tuple[float, ...], contention: str, alpha: str
) -> None:
    t = simulate(send(), line(*rates), nbytes=MB, contention=contention, alpha=alpha)
    assert t.total_us == pytest.approx(len(rates) + 1e6 / (min(rates) * 1e3), rel=1e-12)


def test_blocking_alpha_takes_the_link_and_pipelined_does_not() -> None:
    cluster = line(1.0, alpha_us=5.0)
    assert simulate(send(4), cluster, nbytes=4000).total_us == pytest.approx(5 + 4)
    assert simulate(send(4), cluster, nbytes=4000, alpha="blocking").total_us == pytest.approx(4 * (5 + 1))


def test_chunks_pipeline_over_hops_because_a_link_is_held_only_for_its_own_time() -> None:
    # Each link is busy 1 us per chunk; the second link follows one alpha behind.
    t = simulate(send(3), line(1.0, 1.0), nbytes=3000)
    assert t.total_us == pytest.approx(3 + 2)
    assert t.link_busy_us[:2].tolist() == pytest.approx([3, 3])
    assert t.link_utilization[:2].tolist() == pytest.approx([0.6, 0.6])


def test_a_slow_uplink_does_not_hold_a_fast_downlink() -> None:
    # Two senders at 1 GB/s into a port of 4 GB/s: there is room for both, so they arrive as if alone.
    nodes = [Node(name=f"d{i}") for i in range(3)] + [Node(name="sw", kind="switch")]
    rate = [4.0, 1.0, 1.0]
    links = [Link(src=i, dst=3, alpha_us=0, gb_per_s=rate[i]) for i in range(3)]
    links += [Link(src=3, dst=i, alpha_us=0, gb_per_s=rate[i]) for i in range(3)]
    t = simulate(incast(3), Cluster.build("uneven", nodes=nodes, links=links), nbytes=4000)
    assert t.end_us.tolist() == pytest.approx([4, 4])
    assert t.link_busy_us[3] == pytest.approx(2)


def test_fifo_serves_one_after_the_other_and_fair_shares() -> None:
    c = Permute(3, [(0, 1)], chunks=2)
    p = Program.from_steps("two", c, src=[0, 0], dst=[1, 1], chunk=[0, 1], step=[0, 0], lane=[0, 1])
    fifo = simulate(p, star(3), nbytes=2000, contention="fifo")
    fair = simulate(p, star(3), nbytes=2000, contention="fair")
    assert fifo.end_us.tolist() == pytest.approx([1, 2])
    assert fair.end_us.tolist() == pytest.approx([2, 2])


def test_fair_sharing_is_max_min() -> None:
    # 0>1 and 0>2 share the uplink of 0; 3>1 shares the downlink of 1 and takes what is left of it.
    c = Permute(4, [(0, 1), (3, 2)], chunks=1)
    p = Program.from_steps("mm", c, src=[0, 3], dst=[1, 2], chunk=[0, 1], step=[0, 0])
    assert simulate(p, star(4), nbytes=1000, contention="fair").end_us.tolist() == pytest.approx([1, 1])
    t = simulate(incast(4), star(4, gb_per_s=3.0), nbytes=3000, contention="fair")
    assert t.end_us.tolist() == pytest.approx([3, 3, 3])


def test_a_flow_cap_holds_one_flow_but_not_their_sum() -> None:
    cluster = line(2.0, alpha_us=0.0, flow_gb_per_s=1.0)
    assert simulate(send(), cluster, nbytes=2000).total_us == pytest.approx(2)
    p = Program.from_steps(
        "lanes", Permute(2, [(0, 1)], chunks=2), src=[0, 0], dst=[1, 1], chunk=[0, 1], step=[0, 0], lane=[0, 1]
    )
    t = simulate(p, cluster, nbytes=2000)
    assert t.total_us == pytest.approx(1) and ("contention", "fair") in t.facts
    with pytest.raises(
        InvalidInput, match="contention: fifo cannot express the flow cap or incast of link a>b; use fair"
    ):
        simulate(p, cluster, nbytes=2000, contention="fifo")


def test_incast_loses_throughput_when_many_flows_meet() -> None:
    lossy = star(5, incast=((2, 0.5),))
    assert simulate(incast(2), star(2), nbytes=1000, contention="fair").total_us == pytest.approx(1)
    assert (
        simulate(incast(5), lossy, nbytes=1000).total_us
        > simulate(incast(5), star(5), nbytes=1000, contention="fair").total_us
    )
    # Three flows at half rate, then as flows end the last one runs at full rate again.
    t = simulate(incast(4), star(4, incast=((2, 0.5),)), nbytes=1000)
    assert t.end_us.max() == pytest.approx(6)


def test_a_reduction_costs_gamma_at_the_receiver() -> None:
    base = star(2)
    slow = Cluster.build("gamma", nodes=base.nodes(), links=base.links(), reduce_us_per_mb=7.0)
    assert simulate(incast(2), slow, nbytes=MB).total_us == pytest.approx(1000 + 7)


def test_a_connection_keeps_its_order_even_if_a_later_message_is_ready_first() -> None:
    # 1>2 c0 waits for a slow link; 1>2 c1 is there at once, but stands behind it on the same lane.
    nodes = [Node(name=n) for n in "abc"]
    links = [Link(src=0, dst=1, alpha_us=0, gb_per_s=0.001), Link(src=1, dst=2, alpha_us=0, gb_per_s=1.0)]
    cluster = Cluster.build("slow", nodes=nodes, links=links)

    def ends(lane: list[int]) -> list[float]:
        c = Permute(3, [(0, 2), (1, 0)])
        c = dataclasses.replace(c, out_ptr=np.array([0, 0, 0, 2]), out_chunk=np.array([0, 1], np.int32))
        p = Program.from_steps("o", c, src=[0, 1, 1], dst=[1, 2, 2], chunk=[0, 0, 1], step=[0, 1, 1], lane=lane)
        return [float(us) for us in simulate(p, cluster, nbytes=1000).end_us]

    assert ends([0, 0, 0]) == pytest.approx([1000, 1001, 1002])
    assert ends([0, 0, 1]) == pytest.approx([1000, 1001, 1])


def test_a_gate_holds_the_write_until_the_old_value_has_been_read() -> None:
    # Rank 1 forwards its own part slowly; what comes in for the same slot waits until that has left.
    nodes = [Node(name=n) for n in "abc"]
    links = [Link(src=0, dst=1, alpha_us=0, gb_per_s=10.0), Link(src=1, dst=2, alpha_us=0, gb_per_s=1.0),
             Link(src=2, dst=0, alpha_us=0, gb_per_s=1.0)]  # fmt: skip
    p = Program.from_steps(
        "gate", AllReduce(3, chunks=1), src=[1, 0, 2, 0, 1], dst=[2, 1, 0, 1, 2], chunk=[0] * 5, step=[0, 0, 1, 2, 3],
        reduce=[True, False, True, False, False],
    )  # fmt: skip
    t = simulate(p, Cluster.build("c", nodes=nodes, links=links), nbytes=1000)
    assert t.start_us[1] == 0 and t.end_us[1] == pytest.approx(1.0)  # arrived at 0.1, written at 1.0
    assert t.critical_path.tolist()[0] == 0


def test_ties_go_to_the_earlier_transfer_and_runs_repeat_exactly() -> None:
    runs = [simulate(incast(9), star(9), nbytes=9999) for _ in range(3)]
    assert runs[0].end_us.tolist() == sorted(runs[0].end_us.tolist())
    for run in runs[1:]:
        assert np.array_equal(run.end_us, runs[0].end_us)


def test_the_critical_path_explains_the_total() -> None:
    n = 6
    c = Broadcast(n)
    p = Program.from_steps("chain", c, src=range(n - 1), dst=range(1, n), chunk=[0] * (n - 1), step=range(n - 1))
    t = simulate(p, star(n, alpha_us=2.0), nbytes=1000)
    assert t.critical_path.tolist() == list(range(n - 1))
    assert t.total_us == pytest.approx(sum(t.end_us[x] - t.start_us[x] for x in t.critical_path))


def test_channels_choose_the_links() -> None:
    nodes = [Node(name="a"), Node(name="b")]
    links = [Link(src=0, dst=1, alpha_us=0, gb_per_s=10.0, channel="nvlink"),
             Link(src=0, dst=1, alpha_us=0, gb_per_s=1.0, channel="pcie")]  # fmt: skip
    cluster = Cluster.build("two", nodes=nodes, links=links)
    assert simulate(send(), cluster, nbytes=1000).total_us == pytest.approx(0.1)
    assert simulate(send(), cluster, nbytes=1000, channels=["pcie"]).total_us == pytest.approx(1)
    with pytest.raises(InvalidInput, match="unknown channel 'ib'; choose from: nvlink, pcie"):
        simulate(send(), cluster, nbytes=1000, channels=["ib"])


def test_a_program_may_name_its_own_routes() -> None:
    nodes = [Node(name="a"), Node(name="b"), Node(name="s", kind="switch")]
    links = [Link(src=0, dst=1, alpha_us=0, gb_per_s=10.0), Link(src=0, dst=2, alpha_us=0, gb_per_s=1.0),
             Link(src=2, dst=1, alpha_us=0, gb_per_s=1.0)]  # fmt: skip
    cluster = Cluster.build("detour", nodes=nodes, links=links)

    def routed(route: tuple[int, ...], digest: str = cluster.digest) -> Timeline:
        p = Program.from_steps(
            "r",
            Permute(2, [(0, 1)]),
            src=[0],
            dst=[1],
            chunk=[0],
            step=[0],
            route=[0],
            routes=[route],
            routes_digest=digest,
        )
        return simulate(p, cluster, nbytes=1000)

    assert routed((1, 2)).total_us == pytest.approx(1)
    for route, why in (
        ((2, 1), "do not meet"),
        ((1,), "does not lead"),
        ((9,), "links must be 0..2"),
        ((), "links must"),
    ):
        with pytest.raises(InvalidInput, match=why):
            routed(route)
    with pytest.raises(InvalidInput, match="routed on another cluster"):
        routed((0,), digest="elsewhere")


def test_bad_arguments_say_what_is_valid() -> None:
    with pytest.raises(InvalidInput, match="unknown contention mode 'x'; choose from: fifo, fair"):
        simulate(send(), star(2), nbytes=1, contention="x")
    with pytest.raises(InvalidInput, match="unknown alpha mode 'x'; choose from: pipelined, blocking"):
        simulate(send(), star(2), nbytes=1, alpha="x")
    for nbytes in (0, -1, float("nan"), float("inf")):
        with pytest.raises(InvalidInput, match="nbytes: must be finite and > 0"):
            simulate(send(), star(2), nbytes=nbytes)
    with pytest.raises(InvalidInput, match="ranks: device 1 does not exist; star has 1 devices"):
        simulate(send(), star(1), nbytes=1)


def test_a_wrong_program_is_never_timed() -> None:
    from stretto import VerificationError

    wrong = Program.from_steps("w", AllGather(2), src=[0], dst=[1], chunk=[0], step=[0])
    with pytest.raises(VerificationError):
        simulate(wrong, star(2), nbytes=1)


def reference(
    program: Program, cluster: Cluster, nbytes: float, contention: str, alpha: str
) -> tuple[list[float], list[float]]:
    """When transfers start and finish, by definition: moment by moment, all looked up anew. Slow and plain."""
    _, route, ptr, links = routes_of(program, cluster, nbytes=nbytes)
    every = range(program.num_transfers)
    paths = [links[ptr[r] : ptr[r + 1]].tolist() for r in route]
    size, alphas = program.transfer_bytes(nbytes).tolist(), cluster.link_alpha_us.tolist()
    rates = (cluster.link_gb_per_s * 1e3).tolist()
    pipes = list(zip(program.src.tolist(), program.dst.tolist(), program.lane.tolist(), strict=True))
    ahead = [[u for u in range(t) if pipes[u] == pipes[t]] for t in every]
    gamma = [float(cluster.reduce_us_per_mb / MB * size[t] * program.reduce[t]) for t in every]
    latency = [sum(alphas[link] for link in path) for path in paths]
    blocking = alpha == "blocking"
    never = float("inf")
    begun: set[int] = set()
    start, read, arrival, end = ([never for _ in every] for _ in range(4))
    asks: dict[int, tuple[float, int]] = {}  # fifo: when a message is at which hop; fair: it waits for its connection
    free, tail = [0.0] * cluster.num_links, [0.0 for _ in every]
    joins: dict[int, float] = {}  # fair: when a flow begins, and what is left of it
    left: dict[int, float] = {}
    now, eps = 0.0, 1e-9
    while True:
        progress = True
        while progress:
            progress = False
            for t in every:
                gates = [read[g] if program.src[g] == program.dst[t] else end[g] for g in program.gate_of(t)]
                if end[t] == never and max([arrival[t], *gates, *(end[u] for u in ahead[t])]) <= now + eps:
                    end[t], progress = now + gamma[t], True
                ready = max([0, *(end[a] for a in program.after_of(t))]) <= now + eps
                if t not in begun and ready and begun.issuperset(ahead[t]):
                    begun.add(t)
                    asks[t], progress = (now, 0), True
        if contention == "fifo":
            for t in sorted(t for t, (at, _) in asks.items() if at <= now + eps):
                hop = asks.pop(t)[1]
                link = paths[t][hop]
                begin, busy = max(now, free[link]), size[t] / rates[link]
                free[link] = begin + busy + alphas[link] * blocking
                tail[t] = max(tail[t], begin + busy) + alphas[link]
                if hop == 0:
                    start[t], read[t] = begin, free[link]
                if hop + 1 < len(paths[t]):
                    asks[t] = begin + alphas[link], hop + 1
                else:
                    arrival[t] = tail[t]
            if any(at <= now + eps for at, _ in asks.values()):
                continue
        else:
            for t in [t for t in asks if all(read[u] <= now + eps for u in ahead[t])]:
                del asks[t]
                start[t], joins[t] = now, now + latency[t] * blocking
            for t in [t for t, at in joins.items() if at <= now + eps]:
                del joins[t]
                left[t] = size[t]
        if max(end) <= now + eps:
            return start, end
        speed = max_min(cluster, {t: paths[t] for t in left})
        times = [at for at, _ in asks.values()] + [now + left[t] / speed[t] for t in left] + list(joins.values())
        before, now = now, min(at for at in (*times, *read, *arrival, *end) if at > now + eps)
        for t in list(left):
            left[t] -= speed[t] * (now - before)
            if left[t] <= 1e-9 * size[t]:
                del left[t]
                read[t], arrival[t] = now, now + latency[t] * (not blocking)


def max_min(cluster: Cluster, paths: dict[int, list[int]]) -> dict[int, float]:
    """Raise all rates together; who meets a full link or a cap stays behind."""
    flows = Counter(link for path in paths.values() for link in path)
    room = {}
    for link, count in flows.items():
        curve = cluster.link(link).incast
        room[link] = cluster.link(link).gb_per_s * 1e3 * ([1.0] + [share for at, share in curve if at <= count])[-1]
    rate: dict[int, float] = {}
    while len(rate) < len(paths):
        open_flows = {t: path for t, path in paths.items() if t not in rate}
        crowd = Counter(link for path in open_flows.values() for link in path)
        limit = {
            t: min(min(room[link] / crowd[link], cluster.link(link).flow_gb_per_s * 1e3) for link in path)
            for t, path in open_flows.items()
        }
        level = min(limit.values())
        for t in [t for t in open_flows if limit[t] <= level * (1 + 1e-12)]:
            rate[t] = level
            for link in paths[t]:
                room[link] -= level
    return rate


def random_cluster(rng: random.Random, devices: int) -> Cluster:
    nodes = [Node(name=f"d{i}") for i in range(devices)] + [
        Node(name="s0", kind="switch"),
        Node(name="s1", kind="switch"),
    ]
    links = []
    for i in range(devices):
        for s in (devices, devices + 1) if rng.random() < 0.5 else (devices,):
            links.append(Link(src=i, dst=s, alpha_us=rng.choice([0, 0.5, 1.0]), gb_per_s=rng.choice([1.0, 2.0, 5.0])))
            links.append(Link(src=s, dst=i, alpha_us=rng.choice([0, 0.5]), gb_per_s=rng.choice([1.0, 2.0])))
    for _ in range(devices):
        a, b = rng.sample(range(devices), 2)
        links.append(Link(src=a, dst=b, alpha_us=0.3, gb_per_s=rng.choice([3.0, 7.0])))
    return Cluster.build("random", nodes=nodes, links=links)


def random_tree(rng: random.Random, devices: int) -> Cluster:
    """Devices under a random tree of switches, so that routes have up to five links, slow and fast ones mixed."""
    switches = rng.randint(1, 4)
    nodes = [Node(name=f"d{i}") for i in range(devices)]
    nodes += [Node(name=f"s{i}", kind="switch") for i in range(switches)]
    pairs = [(i, devices + rng.randrange(switches)) for i in range(devices)]
    pairs += [(devices + s, devices + rng.randrange(s)) for s in range(1, switches)]
    links = [
        Link(src=u, dst=v, alpha_us=rng.choice([0, 0.5, 1.0, rng.random()]),
             gb_per_s=rng.choice([0.5, 1.0, 2.0, 5.0, 0.1 + rng.random()]))
        for a, b in pairs for u, v in ((a, b), (b, a))
    ]  # fmt: skip
    return Cluster.build("tree", nodes=nodes, links=links, reduce_us_per_mb=rng.choice([0.0, 300.0, 3000.0]))


@pytest.mark.parametrize("contention", ["fifo", "fair"])
@pytest.mark.parametrize("seed", range(60))
def test_both_models_agree_with_the_reference_on_random_programs(
    make_random_program: Make, make_wide_program: Make, seed: int, contention: str
) -> None:
    program = (make_random_program, make_wide_program)[seed % 2](seed)
    cluster = (random_cluster, random_tree)[seed // 2 % 2](random.Random(seed), program.collective.num_ranks)
    for alpha in ("pipelined", "blocking"):
        t = simulate(program, cluster, nbytes=12345.0, contention=contention, alpha=alpha)
        start, end = reference(program, cluster, 12345.0, contention, alpha)
        assert t.start_us.tolist() == pytest.approx(start, rel=1e-6)
        assert t.end_us.tolist() == pytest.approx(end, rel=1e-6)


@pytest.mark.parametrize("seed", range(20))
def test_caps_and_incast_agree_with_the_reference(make_random_program: Make, seed: int) -> None:
    rng, program = random.Random(seed), make_random_program(seed)
    plain = random_tree(rng, program.collective.num_ranks)
    curves = [(), ((2, 0.5),), ((2, 0.9), (3, 0.6))]
    links = [
        dataclasses.replace(link, flow_gb_per_s=rng.choice([0.3, 0.8, float("inf")]), incast=rng.choice(curves))
        for link in plain.links()
    ]
    cluster = Cluster.build("capped", nodes=plain.nodes(), links=links)
    t = simulate(program, cluster, nbytes=12345.0)
    assert t.end_us.tolist() == pytest.approx(reference(program, cluster, 12345.0, "fair", "pipelined")[1], rel=1e-6)


def test_messages_of_a_connection_follow_one_another_and_those_of_two_share() -> None:
    # The small second message flows only once the large one has drained; on a lane of its own it shares with it.
    c = dataclasses.replace(Permute(2, [(0, 1)], chunks=2), chunk_share=np.array([0.9, 0.1]))
    p = Program.from_steps("order", c, src=[0, 0], dst=[1, 1], chunk=[0, 1], step=[0, 0])
    t = simulate(p, line(1.0, alpha_us=0.0), nbytes=1000, contention="fair")
    assert t.start_us.tolist() == pytest.approx([0, 0.9]) and t.end_us.tolist() == pytest.approx([0.9, 1])
    assert t.critical_path.tolist() == [0, 1]
    t = simulate(p.replace(lane=np.array([0, 1], np.int16)), line(1.0, alpha_us=0.0), nbytes=1000, contention="fair")
    assert t.start_us.tolist() == [0, 0] and t.end_us.tolist() == pytest.approx([1, 0.2])


@pytest.mark.parametrize(
    ("alpha", "starts", "ends"), [("pipelined", [0, 1, 2], [11, 12, 13]), ("blocking", [0, 11, 22], [11, 22, 33])]
)
def test_latency_opens_no_gap_between_the_messages_of_a_connection_unless_it_blocks(
    alpha: str, starts: list[float], ends: list[float]
) -> None:
    # Two links of 5 us each: a message drains 1 us after it begins to flow, and arrives, or has begun, 10 us later.
    t = simulate(send(3), line(1.0, 2.0, alpha_us=5.0), nbytes=3000, contention="fair", alpha=alpha)
    assert t.start_us.tolist() == pytest.approx(starts) and t.end_us.tolist() == pytest.approx(ends)


@pytest.mark.parametrize("contention", ["fifo", "fair"])
@pytest.mark.parametrize(("ranks", "pieces"), [(2, 5), (5, 1), (5, 8), (9, 3)])
def test_a_pipelined_chain_takes_one_piece_per_hop_and_then_one_after_the_other(
    contention: str, ranks: int, pieces: int
) -> None:
    hops, cluster = ranks - 1, star(ranks, gb_per_s=1.0, alpha_us=3.0)
    steps = [(hop, piece) for hop in range(hops) for piece in range(pieces)]
    p = Program.from_steps(
        "chain", Broadcast(ranks, chunks=pieces), src=[h for h, _ in steps], dst=[h + 1 for h, _ in steps],
        chunk=[c for _, c in steps], step=[h + c for h, c in steps],
    )  # fmt: skip
    t = simulate(p, cluster, nbytes=1000.0 * pieces, contention=contention)
    assert t.total_us == pytest.approx(hops * (3 + 1) + (pieces - 1) * 1)


def test_incast_and_flow_caps_count_connections_and_not_their_messages() -> None:
    # Two senders of three messages each into a port that halves from three flows on: two flows, so nothing is lost.
    c = Gather(3, chunks=3)
    src, chunk = [1, 1, 1, 2, 2, 2], [3, 4, 5, 6, 7, 8]
    p = Program.from_steps("g", c, src=src, dst=[0] * 6, chunk=chunk, step=[0] * 6)
    t = simulate(p, star(3, incast=((3, 0.5),)), nbytes=9000)
    assert t.end_us.tolist() == pytest.approx([2, 4, 6, 2, 4, 6])
    t = simulate(p.replace(lane=np.array([0, 1, 2] * 2, np.int16)), star(3, incast=((3, 0.5),)), nbytes=9000)
    assert t.end_us.tolist() == pytest.approx([12] * 6)
    t = simulate(send(4), line(4.0, alpha_us=0.0, flow_gb_per_s=1.0), nbytes=4000)
    assert t.end_us.tolist() == pytest.approx([1, 2, 3, 4])


def test_messages_of_a_connection_are_received_in_order_on_routes_of_different_latency() -> None:
    nodes = [Node(name="a"), Node(name="b"), Node(name="s", kind="switch")]
    links = [Link(src=0, dst=1, alpha_us=0, gb_per_s=1.0), Link(src=0, dst=2, alpha_us=50, gb_per_s=1.0),
             Link(src=2, dst=1, alpha_us=0, gb_per_s=1.0)]  # fmt: skip
    cluster = Cluster.build("detour", nodes=nodes, links=links)
    p = Program.from_steps(
        "pass", Permute(2, [(0, 1)], chunks=2), src=[0, 0], dst=[1, 1], chunk=[0, 1], step=0,
        route=[0, -1], routes=[(1, 2)], routes_digest=cluster.digest,
    )  # fmt: skip
    t = simulate(p, cluster, nbytes=2000, contention="fair")
    assert t.start_us.tolist() == pytest.approx([0, 1])
    assert t.end_us.tolist() == pytest.approx([51, 51])  # the second has arrived at 2


@pytest.mark.parametrize("contention", ["fifo", "fair"])
def test_many_messages_may_stand_behind_one_that_is_late(contention: str) -> None:
    count = 100_000
    nodes = [Node(name="a"), Node(name="b"), Node(name="s", kind="switch")]
    links = [Link(src=0, dst=1, alpha_us=0, gb_per_s=100.0), Link(src=0, dst=2, alpha_us=1e6, gb_per_s=1.0),
             Link(src=2, dst=1, alpha_us=0, gb_per_s=1.0)]  # fmt: skip
    cluster = Cluster.build("detour", nodes=nodes, links=links)
    p = Program.from_steps(
        "pile", Permute(2, [(0, 1)], chunks=count), src=[0] * count, dst=[1] * count, chunk=range(count), step=0,
        route=[0] + [-1] * (count - 1), routes=[(1, 2)], routes_digest=cluster.digest,
    )  # fmt: skip
    end = simulate(p, cluster, nbytes=1e6, contention=contention).end_us
    assert end.min() == end.max() > 1e6


def test_at_one_moment_the_earlier_transfer_is_served_first_whichever_hop_it_is_at() -> None:
    # At 2 us the head of 0>2 reaches the link 1>2, and what rank 1 got from rank 0 is ready to be sent over it.
    nodes = [Node(name=n) for n in "abc"]
    links = [Link(src=0, dst=1, alpha_us=1, gb_per_s=1.0), Link(src=1, dst=2, alpha_us=1, gb_per_s=1.0)]
    cluster = Cluster.build("tie", nodes=nodes, links=links, devices_forward=True)
    p = Program.from_steps(
        "tie", Permute(3, [(0, 2)], chunks=2), src=[0, 0, 1], dst=[1, 2, 2], chunk=[0, 1, 0], step=[0, 0, 1]
    )
    assert simulate(p, cluster, nbytes=2000).end_us.tolist() == pytest.approx([2, 4, 5])
    order = [2, 0, 1]
    columns = {key: getattr(p, key)[order] for key in ("src", "dst", "chunk")}
    first = p.replace(**columns, after_ptr=np.array([0, 1, 1, 1]), after=np.array([1], np.int32))
    assert simulate(first, cluster, nbytes=2000).end_us.tolist() == pytest.approx([4, 2, 5])


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("alpha", ["pipelined", "blocking"])
def test_fifo_never_serves_two_at_once_and_respects_every_dependency(
    make_random_program: Make, seed: int, alpha: str
) -> None:
    program = make_random_program(seed)
    cluster = random_cluster(random.Random(seed), program.collective.num_ranks)
    t = simulate(program, cluster, nbytes=777.0, contention="fifo", alpha=alpha)
    connection, route, ptr, links = routes_of(program, cluster, nbytes=777.0)
    for c in set(connection.tolist()):
        assert np.all(np.diff(t.start_us[connection == c]) >= 0)  # messages of a connection start in order
    size = program.transfer_bytes(777.0)
    first: dict[int, list[tuple[float, float]]] = {}
    for x in range(program.num_transfers):
        path = links[ptr[route[x]] : ptr[route[x] + 1]]
        lone = cluster.link_alpha_us[path].sum() + size[x] / (cluster.link_gb_per_s[path].min() * 1e3)
        assert t.end_us[x] - t.start_us[x] >= lone * (1 - 1e-12)
        for d in program.after_of(x):
            assert t.start_us[x] >= t.end_us[d] - 1e-9
        busy = size[x] / (cluster.link_gb_per_s[path[0]] * 1e3) + (
            cluster.link_alpha_us[path[0]] if alpha == "blocking" else 0
        )
        first.setdefault(int(path[0]), []).append((float(t.start_us[x]), float(t.start_us[x] + busy)))
    # On links that only first hops use, services must not overlap.
    later = {int(link) for r in set(route.tolist()) for link in links[ptr[r] + 1 : ptr[r + 1]]}
    for link, spans in first.items():
        if link not in later:
            spans.sort()
            assert all(b[0] >= a[1] - 1e-9 for a, b in pairwise(spans))
    carried = np.zeros(cluster.num_links)
    np.add.at(
        carried,
        links[np.concatenate([np.arange(ptr[r], ptr[r + 1]) for r in route])],
        np.repeat(size, np.diff(ptr)[route]),
    )
    assert t.link_bytes.tolist() == pytest.approx(carried.tolist())
