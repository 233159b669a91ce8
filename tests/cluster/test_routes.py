# SPDX-License-Identifier: Apache-2.0
"""Routes by time: against every simple path of random networks, and against the rule of fewest links."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import numpy as np
import pytest

import stretto as st
from stretto import InvalidInput, Program
from stretto.cluster.model import DEVICE, LARGE_MESSAGE, Cluster, Link, Node
from stretto.simulator.network import routes_of

SIZES = (0.0, 1.0, 500.0, 1e4, 1e6, math.inf)
CHANNELS = ("red", "blue")


def random_network(rng: random.Random, *, least_us: float) -> Cluster:
    devices = rng.randint(2, 4)
    kinds = ["device"] * devices + ["switch"] * rng.randint(0, 3)
    nodes = [Node(name=f"{kind}{at}", kind=kind) for at, kind in enumerate(kinds)]
    links = []
    for _ in range(rng.randint(3, 14)):
        src, dst = rng.sample(range(len(kinds)), 2)
        alpha = rng.choice([least_us, 0.1, 0.2, 0.3, 2.0])
        rate = rng.choice([1.0, 2.0, 4.0, 25.0])
        links.append(Link(src=src, dst=dst, alpha_us=alpha, gb_per_s=rate, channel=rng.choice(CHANNELS)))
    return Cluster.build("random", nodes=nodes, links=links, devices_forward=rng.random() < 0.5)


@dataclass(frozen=True)
class Path:
    links: tuple[int, ...]
    picoseconds: int
    gb_per_s: float

    @property
    def hops(self) -> int:
        return len(self.links)

    def us(self, nbytes: float) -> float:
        return self.picoseconds / 1e6 + nbytes / (self.gb_per_s * 1e3)


def all_paths(cluster: Cluster, src: int, dst: int, allowed: set[int]) -> list[Path]:
    """Every path without a repeated node; a link without latency counts as the shortest latency of any link."""
    latency = [round(us * 1e6) for us in cluster.link_alpha_us.tolist()]
    least = min((latency[at] for at in allowed if latency[at]), default=0)
    found: list[Path] = []

    def extend(node: int, links: tuple[int, ...], seen: frozenset[int]) -> None:
        if node == dst:
            ps = sum(max(latency[at], least) for at in links)
            found.append(Path(links, ps, min(cluster.link(at).gb_per_s for at in links)))
            return
        if node != src and cluster.node_kind[node] == DEVICE and not cluster.devices_forward:
            return
        for at in sorted(allowed):
            if cluster.link_src[at] == node and (after := int(cluster.link_dst[at])) not in seen:
                extend(after, (*links, at), seen | {after})

    extend(src, (), frozenset({src}))
    return found


@pytest.mark.parametrize("block", range(20))
def test_routes_are_the_fastest_of_all_simple_paths(block: int) -> None:
    for seed in range(100):
        rng = random.Random(1000 * block + seed)
        cluster = random_network(rng, least_us=0.0)
        channels = rng.choice([None, None, {"red"} & set(cluster.channels)])
        allowed = {at for at, link in enumerate(cluster.links()) if channels is None or link.channel in channels}
        for src, dst in ((0, 1), (1, 0)):
            paths = all_paths(cluster, src, dst, allowed)
            for nbytes in SIZES:
                routes = cluster.routes(src, dst, nbytes=nbytes, channels=channels, limit=1000)
                if not paths:
                    assert routes == []
                    continue
                assert len(set(routes)) == len(routes)
                if nbytes == math.inf:
                    best = min(paths, key=lambda p: (-p.gb_per_s, p.picoseconds, p.hops))
                else:
                    best = min(paths, key=lambda p: (p.us(nbytes), p.hops, -p.gb_per_s))
                key = (best.picoseconds, best.hops, best.gb_per_s)
                assert set(routes) == {p.links for p in paths if (p.picoseconds, p.hops, p.gb_per_s) == key}


@pytest.mark.parametrize("block", range(10))
def test_a_message_alone_is_never_slower_than_on_the_route_of_fewest_links(block: int) -> None:
    for seed in range(100):
        cluster = random_network(random.Random(77_000 + 1000 * block + seed), least_us=0.05)
        paths = all_paths(cluster, 0, 1, set(range(cluster.num_links)))
        if not paths:
            continue
        usual = min(paths, key=lambda p: (p.hops, -p.gb_per_s))
        send = Program.from_steps("send", st.Broadcast(2), src=[0], dst=[1], chunk=[0], step=[0])
        for nbytes in SIZES[1:-1]:
            assert st.simulate(send, cluster, nbytes=nbytes).total_us <= usual.us(nbytes) * (1 + 1e-9)


def leaf_spine() -> Cluster:
    """Two hosts on leaves of their own: 5 links of InfiniBand between them, or 4 of slow Ethernet."""
    names = ["gpu0", "gpu1", "nic0", "nic1", "leaf0", "leaf1", "spine", "eth0", "eth1", "lan"]
    kinds = ["device"] * 2 + ["nic"] * 2 + ["switch"] * 3 + ["nic"] * 2 + ["switch"]
    ways = {
        ("infiniband", 2.0, 25.0): ["gpu0 nic0", "nic0 leaf0", "leaf0 spine", "spine leaf1", "leaf1 nic1", "nic1 gpu1"],
        ("ethernet", 1.0, 6.0): ["gpu0 eth0", "eth0 lan", "lan eth1", "eth1 gpu1"],
    }
    links = [
        Link(src=names.index(a), dst=names.index(b), alpha_us=alpha, gb_per_s=rate, channel=channel)
        for (channel, alpha, rate), pairs in ways.items()
        for a, b in (pair.split() for pair in pairs)
    ]
    links += [Link(**{**vars(link), "src": link.dst, "dst": link.src}) for link in links]
    nodes = [Node(name=name, kind=kind) for name, kind in zip(names, kinds, strict=True)]
    return Cluster.build("leaf-spine", nodes=nodes, links=links)


def test_large_messages_take_the_wide_network_and_small_ones_the_near_one() -> None:
    cluster = leaf_spine()

    def channel(nbytes: float) -> str:
        return cluster.link(cluster.routes(0, 1, nbytes=nbytes)[0][0]).channel

    # 12 us + b / 25 GB/s against 4 us + b / 6 GB/s: equal at 63,158 bytes.
    assert [channel(nbytes) for nbytes in (1e3, 63_000, 63_200, LARGE_MESSAGE)] == [
        "ethernet", "ethernet", "infiniband", "infiniband",
    ]  # fmt: skip
    both = np.array([0, 0], np.int32), np.array([1, 1], np.int32)
    assert cluster.route_classes(*both).tolist() == [2, 2]
    assert cluster.route_classes(*both, np.array([1e3, 1e6])).tolist() == [0, 1]
    with pytest.raises(InvalidInput, match="nbytes: must be >= 0"):
        cluster.routes(0, 1, nbytes=-1.0)


def test_messages_of_one_connection_take_the_route_of_their_size() -> None:
    cluster = leaf_spine()
    # Chunks 0 to 2 travel as one message, chunk 3 as another; each takes the network that is faster for it.
    program = Program.from_steps(
        "two sizes", st.Broadcast(2, chunks=4), src=[0, 0], dst=[1, 1], chunk=[0, 1, 2, 3], chunk_ptr=[0, 3, 4],
        step=[0, 1],
    )  # fmt: skip
    connection, route, ptr, links = routes_of(program, cluster, nbytes=100e3)
    assert connection.tolist() == [0, 0]
    first = [cluster.link(int(links[ptr[r]])).channel for r in route]
    assert first == ["infiniband", "ethernet"]
    run = st.simulate(program, cluster, nbytes=100e3)
    assert run.end_us[0] == pytest.approx(12 + 75e3 / 25e3)
    # It arrives sooner, but messages of a connection are received in order.
    assert run.end_us[1] == pytest.approx(run.end_us[0])
    apart = st.simulate(program.replace(lane=np.array([0, 1], np.int16)), cluster, nbytes=100e3)
    assert apart.end_us[1] == pytest.approx(4 + 25e3 / 6e3)
