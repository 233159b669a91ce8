# SPDX-License-Identifier: Apache-2.0
"""Synthesis on irregular topologies that a seed draws: how far each program is above the lower bound.

Families: random digraphs, stars with unequal ports, hosts with unequal NICs, tori with missing links, rails with and
without a spine, dragonflies, rings of rings, lines. `--seed` draws others, so that anyone can check cases that nobody
has tuned for. `gap` is time over bound, less one; `before` asks all makers but tree_pairs, for comparison. Cases above
5 % have an `argument`: what a linear program over trees, which shares no code with the bound, says of them. With
`--lower` files are searched: `over_program` is the time of the instruction streams over that of their own program,
`over_fastest` over that of the fastest program of the search.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterable, Iterator

import numpy as np
from common import Row, common_options, cpu_s, finish

import stretto as st
from stretto.cluster.model import Link, Node
from stretto.collectives import COLLECTIVES
from stretto.simulator.bounds.net import ArcNetwork
from stretto.synthesis.tree_pair_packing import pack_tree_pairs
from stretto.units import format_bytes, parse_bytes

Ends = tuple[str, str, float, float]
"""A directed link: from, to, GB/s, microseconds of alpha."""
RATES = (4.0, 5.0, 7.0, 8.0, 10.0, 12.0, 15.0, 20.0, 25.0, 30.0, 40.0, 50.0)
PORTS = (10.0, 12.0, 20.0, 25.0, 40.0, 50.0)
NICS = (10.0, 12.0, 16.0, 25.0, 40.0)


def cluster(
    name: str, devices: Iterable[tuple[str, int]], switches: Iterable[str], links: Iterable[Ends]
) -> st.Cluster:
    """A cluster of devices (name, host), switches and directed links."""
    nodes = [Node(name=device, host=host) for device, host in devices]
    nodes += [Node(name=switch, kind="switch") for switch in switches]
    at = {node.name: k for k, node in enumerate(nodes)}
    made = [Link(src=at[a], dst=at[b], gb_per_s=rate, alpha_us=alpha) for a, b, rate, alpha in links]
    return st.Cluster.build(name, nodes=nodes, links=made)


def both(a: str, b: str, rate: float, alpha: float) -> list[Ends]:
    return [(a, b, rate, alpha), (b, a, rate, alpha)]


def digraph(n: int, draw: random.Random) -> st.Cluster:
    circle = draw.sample(range(n), n)
    pairs = set(zip(circle, [*circle[1:], circle[0]], strict=True))
    while len(pairs) < 3 * n:
        a, b = draw.sample(range(n), 2)
        pairs.add((a, b))
    links = [(f"d{a}", f"d{b}", draw.choice(RATES), round(draw.uniform(0.3, 5), 2)) for a, b in sorted(pairs)]
    return cluster(f"digraph{n}", [(f"d{k}", k) for k in range(n)], [], links)


def star(n: int, draw: random.Random) -> st.Cluster:
    links = [
        link
        for k in range(n)
        for link in ((f"d{k}", "s", draw.choice(PORTS), 0.5), ("s", f"d{k}", draw.choice(PORTS), 0.5))
    ]
    return cluster(f"star{n}", [(f"d{k}", k) for k in range(n)], ["s"], links)


def hosts(count: int, each: int, draw: random.Random) -> st.Cluster:
    links: list[Ends] = []
    for h in range(count):
        for k in range(each):
            links += both(f"h{h}g{k}", f"h{h}nvs", 150.0, 0.2) + both(f"h{h}g{k}", f"h{h}nic", 50.0, 0.4)
        links += both(f"h{h}nic", "core", draw.choice(NICS), 1.25)
    devices = [(f"h{h}g{k}", h) for h in range(count) for k in range(each)]
    switches = [f"h{h}{kind}" for h in range(count) for kind in ("nvs", "nic")]
    return cluster(f"hosts{count}x{each}", devices, [*switches, "core"], links)


def torus(rows: int, columns: int, missing: int, one_way: bool, draw: random.Random) -> st.Cluster:
    pairs = set()
    for x in range(rows):
        for y in range(columns):
            for other in ((x + 1) % rows * columns + y, x * columns + (y + 1) % columns):
                pairs |= {(x * columns + y, other), (other, x * columns + y)}
    for a, b in draw.sample(sorted(pair for pair in pairs if pair[0] < pair[1]), missing):
        pairs -= {(a, b)} if one_way else {(a, b), (b, a)}
    links = [(f"d{a}", f"d{b}", 20.0, 0.6) for a, b in sorted(pairs) if a != b]
    name = f"torus{rows}x{columns}-{missing}{' one way' if one_way else ''}"
    return cluster(name, [(f"d{k}", k) for k in range(rows * columns)], [], links)


def rails(count: int, spine: bool, each: int = 8) -> st.Cluster:
    links: list[Ends] = []
    for h in range(count):
        for k in range(each):
            links += both(f"h{h}g{k}", f"h{h}nvs", 450.0, 0.35) + both(f"h{h}g{k}", f"rail{k}", 50.0, 1.25)
    for k in range(each if spine else 0):
        links += both(f"rail{k}", "spine", 100.0, 0.5)
    switches = [f"h{h}nvs" for h in range(count)] + [f"rail{k}" for k in range(each)] + ["spine"] * spine
    devices = [(f"h{h}g{k}", h) for h in range(count) for k in range(each)]
    return cluster(f"rails{count}x{each}{' spine' if spine else ''}", devices, switches, links)


def dragonfly(groups: int, routers: int, each: int) -> st.Cluster:
    links: list[Ends] = []
    for g in range(groups):
        for r in range(routers):
            for k in range(each):
                links += both(f"g{g}r{r}d{k}", f"g{g}r{r}", 25.0, 0.2)
            for other in range(r + 1, routers):
                links += both(f"g{g}r{r}", f"g{g}r{other}", 40.0, 0.3)
        for other in range(g + 1, groups):
            links += both(f"g{g}r{(other - 1) % routers}", f"g{other}r{g % routers}", 20.0, 0.9)
    devices = [(f"g{g}r{r}d{k}", g) for g in range(groups) for r in range(routers) for k in range(each)]
    return cluster(
        f"dragonfly{groups}x{routers}x{each}",
        devices,
        [f"g{g}r{r}" for g in range(groups) for r in range(routers)],
        links,
    )


def ring_of_rings(count: int, each: int, draw: random.Random) -> st.Cluster:
    links: list[Ends] = []
    for ring in range(count):
        for k in range(each):
            links += both(f"r{ring}d{k}", f"r{ring}d{(k + 1) % each}", 40.0, 0.5)
        links += both(f"r{ring}d0", f"r{(ring + 1) % count}d0", draw.choice(NICS), 1.5)
    return cluster(
        f"rings{count}x{each}", [(f"r{ring}d{k}", ring) for ring in range(count) for k in range(each)], [], links
    )


def line(n: int) -> st.Cluster:
    links = [link for k in range(n - 1) for link in both(f"d{k}", f"d{k + 1}", 30.0, 0.8)]
    return cluster(f"line{n}", [(f"d{k}", k) for k in range(n)], [], links)


def topologies(seed: int) -> Iterator[st.Cluster]:
    """At least 24 clusters; all but the regular ones differ with the seed."""
    draw = random.Random(seed)
    for n in (8, 12, 16, 20, 24):
        yield digraph(n, draw)
    for n in (6, 8, 12, 16):
        yield star(n, draw)
    for count, each in ((2, 4), (3, 4), (4, 4), (4, 8)):
        yield hosts(count, each, draw)
    for rows, columns, missing, one_way in ((4, 4, 1, False), (3, 5, 1, True), (4, 5, 3, False), (5, 5, 4, True)):
        yield torus(rows, columns, missing, one_way, draw)
    yield rails(2, False)
    yield rails(4, True)
    yield dragonfly(4, 3, 2)
    yield dragonfly(3, 2, 3)
    yield ring_of_rings(4, 4, draw)
    yield ring_of_rings(3, 5, draw)
    yield line(8)


def row(kind: str, topology: st.Cluster, nbytes: float, budget_s: float, before: bool, lower: str | bool) -> Row:
    collective = COLLECTIVES[kind](topology.num_devices)
    began, cpu_began = time.perf_counter(), cpu_s()
    found = st.synthesize(collective, topology, nbytes, budget_s=budget_s, cache=False, lower=lower)
    made: Row = {
        "case": topology.name,
        "system": "stretto",
        "collective": kind,
        "nbytes": nbytes,
        "time_us": found.time_us,
        "bound_us": found.certificate.bound_us,
        "gap": found.time_us / found.certificate.bound_us - 1,
        "program": found.certificate.program,
        "bound_reason": found.certificate.bound_reason,
        "synth_s": time.perf_counter() - began,
        "synth_cpu_s": cpu_s() - cpu_began,
    }
    if found.lowering is not None:
        best = min(one.time_us for one in found.candidates if one.time_us is not None)
        made["lowered_us"] = found.lowering.time_us
        made["over_program"] = found.lowering.time_us / found.time_us
        made["over_fastest"] = found.lowering.time_us / best
    if before:
        from stretto.synthesis.makers import makers

        others = [name for name in makers() if name != "tree_pairs"]
        old = st.synthesize(collective, topology, nbytes, budget_s=budget_s, cache=False, makers=others)
        made["before_gap"] = old.time_us / found.certificate.bound_us - 1
    return made


def argument(kind: str, topology: st.Cluster, nbytes: float) -> str:
    """What is known of a gap without the bound's own code: whether trees reach its bytes, and what one byte takes.

    For all-reduce the rate is the dual of a linear program over all pairs of trees, whose columns are priced exactly.
    """
    ranks = tuple(range(topology.num_devices))
    bound = st.lower_bound(COLLECTIVES[kind](topology.num_devices), topology, nbytes)
    if kind != "all_reduce":
        known = "which trees reach" if bound.exact else "not proved tight"
        return f"bytes alone take {bound.bandwidth_us:.4g} us ({known}), alphas alone {bound.latency_us:.4g} us"
    packing = pack_tree_pairs(topology, ranks, until=time.monotonic() + 20.0, close=1e-3)
    limit, reached = (nbytes / rate / 1e3 for rate in (packing.limit_gb_per_s, packing.gb_per_s))
    net = ArcNetwork.of(topology, None)
    far = net.distances(net.alpha_us, np.array(ranks, np.int32))[:, : len(ranks)]
    through = float((far.max(axis=0) + far.max(axis=1)).min())
    in_turn = 100 * ((reached + through) / bound.total_us - 1)
    return (
        f"linear program: the bytes of pairs of trees take {limit:.4g} to {reached:.4g} us (the bound's "
        f"{bound.bandwidth_us:.4g}); a byte takes {through:.4g} us by way of the best root (the bound's latency "
        f"{bound.latency_us:.4g}); one after the other that is {in_turn:.1f} % above the bound, less only as far as "
        f"links work ahead"
    )


def summary(rows: list[Row]) -> list[Row]:
    """The median and the worst gap of each collective and size."""
    groups: dict[tuple[str, float], list[Row]] = {}
    for one in rows:
        groups.setdefault((one["collective"], one["nbytes"]), []).append(one)
    lines = []
    for (kind, nbytes), members in groups.items():
        gaps = [one["gap"] for one in members]
        worst = max(members, key=lambda one: float(one["gap"]))
        lines.append({
            "case": f"all {len(members)}: median, worst {worst['case']}", "system": "stretto", "collective": kind,
            "nbytes": nbytes, "gap": statistics.median(gaps), "worst_gap": max(gaps),
            "above_5_percent": sum(gap > 0.05 for gap in gaps),
        })  # fmt: skip
        for over in ("over_program", "over_fastest"):
            if over in worst:
                lines[-1][over] = max(one[over] for one in members)
    return lines


def main() -> None:
    parser = common_options(__doc__)
    parser.add_argument("--seed", type=int, default=1, help="draws the topologies")
    parser.add_argument("--collectives", default="all_reduce", help="separated by commas")
    parser.add_argument("--bytes", default="256M,1M", help="separated by commas")
    parser.add_argument("--budget", type=float, default=20.0, help="seconds for each search")
    parser.add_argument("--before", action="store_true", help="also without tree_pairs")
    parser.add_argument("--lower", choices=["msccl", "mscclpp"], help="search for files: also the time of the streams")
    parser.add_argument("--cpu", action="store_true", help="the budget counts CPU seconds: for a busy machine")
    parser.add_argument("--only", default="", help="only topologies whose names hold one of these, separated by commas")
    parser.add_argument("--brief", action="store_true", help="of single cases only those above 5 %%")
    given = parser.parse_args()
    if given.cpu:
        # Up to 256 ranks all makers run in this process and look at this clock.
        time.monotonic = time.process_time
    rows = []
    for topology in topologies(given.seed):
        if given.quick and topology.num_devices > 12:
            continue
        if not any(part in topology.name for part in given.only.split(",")):
            continue
        for kind in given.collectives.split(","):
            for size in given.bytes.split(","):
                budget_s = 2.0 if given.quick else given.budget
                rows.append(row(kind, topology, parse_bytes(size), budget_s, given.before, given.lower or False))
                last = rows[-1]
                if last["gap"] > 0.05:
                    last["argument"] = argument(kind, topology, last["nbytes"])
                old = f", before {100 * last['before_gap']:.2f} %" if given.before else ""
                what = f"{topology.name}: {kind} of {format_bytes(last['nbytes'])}"
                print(f"{what}: {100 * last['gap']:.2f} % above the bound{old}", flush=True)
    shown = [one for one in rows if one["gap"] > 0.05] if given.brief else rows
    finish(summary(rows) + shown, given, title="synthesis on irregular topologies")


if __name__ == "__main__":
    main()
