# SPDX-License-Identifier: Apache-2.0
"""A network that can be probed without processes: flows on a known cluster, shared fairly, with noise on top."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from stretto import Cluster
from stretto.cluster import Link, Node
from stretto.runtime.probe.meter import ProbeFlow
from stretto.simulator.network import simulate_transfers

Floats = NDArray[np.float64]


class SimulatedMeter:
    """Measures a cluster instead of a job.

    Noise makes flows slower, as a busy machine does that lets processes wait: up to `noise_us`, every tenth time up to
    five times that. A shaper lets `burst_us` of its rate through at once.
    """

    def __init__(self, cluster: Cluster, *, noise_us: float = 0.0, burst_us: float = 0.0, seed: int = 0) -> None:
        self.cluster, self.noise_us, self.burst_us = cluster, noise_us, burst_us
        place = cluster.node_host[: cluster.num_devices].tolist()
        names = list(dict.fromkeys(place))
        self.hosts = tuple(names.index(host) for host in place)
        self.channels = tuple(name for name in cluster.channels if name != "shm") if len(names) > 1 else ()
        self.runs = 0
        self._draw = np.random.default_rng(seed)

    def flows(self, flows: Sequence[ProbeFlow], times: int) -> Floats:
        """All at once, `times` times."""
        self.runs += 1
        assert not {f.src for f in flows} & {f.dst for f in flows}
        ptr, links = [0], []
        for flow in flows:
            src, dst = np.array([flow.src], np.int32), np.array([flow.dst], np.int32)
            _, found = self.cluster.route_table(src, dst, np.zeros(1, np.int64), channels=[flow.channel])
            links += found.tolist()
            ptr.append(len(links))
        count = len(flows)
        end_us = simulate_transfers(
            self.cluster, routes=(np.array(ptr), np.array(links, np.int32)), route=np.arange(count, dtype=np.int32),
            connection=np.arange(count, dtype=np.int32), nbytes=np.array([f.nbytes for f in flows], float),
            after=(np.zeros(count + 1, np.int64), np.zeros(0, np.int32)), contention="fair",
        ).end_us  # fmt: skip
        shaped = np.array([0.0 if flow.channel == "shm" else self.burst_us for flow in flows])
        end_us = np.maximum(end_us - shaped, 1.0)
        for ends_of in ("src", "dst"):
            end = np.array([getattr(f, ends_of) for f in flows])
            end_us = np.array([end_us[end == e].max() for e in end])
        return end_us + self._noise_us((times, count))

    def bounce(self, pairs: Sequence[tuple[int, int]], channel: str, hops: int, times: int) -> Floats:
        """The latencies of the routes, and 30 us to start."""
        alpha = [sum(self.cluster.link(i).alpha_us for i in self.cluster.routes(*p, channels=[channel])[0])
                 for p in pairs]  # fmt: skip
        return 30.0 + hops * np.array(alpha) + self._noise_us((times, len(pairs))) / 100

    def _noise_us(self, shape: tuple[int, int]) -> Floats:
        wait = self.noise_us * self._draw.random(shape)
        return np.asarray(wait * np.where(self._draw.random(shape) < 0.1, 5.0, 1.0), np.float64)


def network(
    hosts: Sequence[Sequence[int]],
    *,
    uplinks: Mapping[str, Sequence[float]],
    ports: int = 1,
    racks: Sequence[Sequence[int]] = (),
    rack_gb_per_s: float = 0.0,
    flow_gb_per_s: float = np.inf,
) -> Cluster:
    """Ranks on hosts; each channel gives every host `ports` uplinks, ranks dealt out in turn, maybe behind racks."""
    place = {rank: host for host, ranks in enumerate(hosts) for rank in ranks}
    nodes = [Node(name=f"r{rank}", host=place[rank]) for rank in sorted(place)]
    links: list[Link] = []

    def node(name: str, kind: str, host: int = -1) -> int:
        nodes.append(Node(name=name, kind=kind, host=host))
        return len(nodes) - 1

    def cable(a: int, b: int, rate: float, alpha: float, channel: str, cap: float = np.inf) -> None:
        links.append(Link(src=a, dst=b, alpha_us=alpha, gb_per_s=rate, channel=channel, flow_gb_per_s=cap))
        links.append(Link(src=b, dst=a, alpha_us=0.0, gb_per_s=rate, channel=channel, flow_gb_per_s=cap))

    for host, ranks in enumerate(hosts):
        memory = node(f"h{host}.mem", "switch", host)
        for rank in ranks:
            cable(rank, memory, 4.0, 2.0, "shm")
    for channel, rates in uplinks.items():
        core = node(channel, "switch")
        above = dict.fromkeys(range(len(hosts)), core)
        for at, rack in enumerate(racks):
            switch = node(f"{channel}.rack{at}", "switch")
            cable(switch, core, rack_gb_per_s, 0.0, channel)
            above.update(dict.fromkeys(rack, switch))
        for host, ranks in enumerate(hosts):
            for port in range(ports):
                nic = node(f"h{host}.{channel}.nic{port}", "nic", host)
                cable(nic, above[host], rates[host], 10.0, channel, flow_gb_per_s)
                for rank in ranks[port::ports]:
                    cable(rank, nic, 3.9, 0.0, channel)
    return Cluster.build("world", nodes=nodes, links=links)
