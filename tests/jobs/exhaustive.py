# SPDX-License-Identifier: Apache-2.0
"""The best program of tiny clusters by exhaustive search over all programs of whole pieces, to judge bounds by.

`python tests/jobs/exhaustive.py --cases 2000 --seed 1` draws clusters, and ends with an error where a bound is above
what the search has found.
"""

from __future__ import annotations

import argparse
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import stretto as st

MOST_STATES = 5_000
Ints = tuple[int, ...]
State = tuple[Ints, Ints, Ints, tuple[tuple[int, int, int], ...]]
"""The facts that each device has (as bits), how long each link is still busy, the facts that each wire has passed up,
and the messages under way as (time to go, device, fact)."""


@dataclass(frozen=True, kw_only=True)
class Wire:
    """A way for a message: the links that it takes, its slots on them, and its latencies."""

    src: int
    dst: int
    links: tuple[int, ...]
    begins: tuple[int, ...]
    slots: tuple[int, ...]
    arrives: int


@dataclass(frozen=True, kw_only=True)
class Tiny:
    """A cluster whose times are whole numbers when a piece has 1,000 bytes."""

    devices: int
    cluster: st.Cluster
    wires: tuple[Wire, ...]


def tiny(draw: random.Random, devices: int) -> Tiny:
    """A one-way ring with more links at random, or devices around a switch; slots and latencies of 0 to 3 us."""
    star = draw.random() < 0.4
    ends = [(i, (i + 1) % devices) for i in range(devices)]
    if star:
        ends = [(i, devices) for i in range(devices)] + [(devices, i) for i in range(devices)]
    pairs = [(a, b) for a in range(devices) for b in range(devices) if a != b and (a, b) not in ends]
    ends += draw.sample(pairs, draw.randint(0, min(len(pairs), 5 - devices if star else 6 - devices)))
    slots = [draw.choice((1, 1, 2, 3)) for _ in ends]
    alphas = [draw.choice((0, 1, 1, 2, 3)) for _ in ends]
    nodes = [st.Node(name=f"d{i}", host=i // 2) for i in range(devices)]
    nodes += [st.Node(name="s", kind="switch")] * star
    links = [
        st.Link(src=a, dst=b, alpha_us=float(alpha), gb_per_s=1 / slot)
        for (a, b), slot, alpha in zip(ends, slots, alphas, strict=True)
    ]
    cluster = st.Cluster.build("tiny", nodes=nodes, links=links)
    wires = []
    for at, (a, b) in enumerate(ends):
        if b < devices and a < devices:
            took = alphas[at] + slots[at]
            wires.append(Wire(src=a, dst=b, links=(at,), begins=(0,), slots=(slots[at],), arrives=took))
        for onward, (c, d) in enumerate(ends):
            if b == c == devices and a != d:
                took = alphas[at] + alphas[onward] + max(slots[at], slots[onward])
                begins, busy = (0, alphas[at]), (slots[at], slots[onward])
                wires.append(Wire(src=a, dst=d, links=(at, onward), begins=begins, slots=busy, arrives=took))
    return Tiny(devices=devices, cluster=cluster, wires=tuple(wires))


def closed(facts: int, sums: int) -> int:
    """All sums that can be made of these partial sums (numbered by the set of their parts), which may not overlap."""
    while sums:
        masks = [m for m in range(1, sums) if facts >> m & 1]
        more = facts
        for a in masks:
            for b in masks:
                if not a & b:
                    more |= 1 << (a | b)
        if more == facts:
            return facts
        facts = more
    return facts


def choices(state: State, case: Tiny, facts: int, at: int = 0) -> Iterator[State]:
    """Every way to begin messages now on the wires from number `at` on. A link is booked as one block of time.

    What a free wire is not given now it is given only after another message has passed there, or a new fact has come:
    otherwise that message could as well begin now.
    """
    known, busy, passed, flying = state
    if at == len(case.wires):
        yield state
        return
    wire = case.wires[at]
    if any(busy[link] > begin for link, begin in zip(wire.links, wire.begins, strict=True)):
        yield from choices(state, case, facts, at + 1)
        return
    expected = known[wire.dst] | passed[at]
    for _, device, fact in flying:
        expected |= (device == wire.dst) << fact
    useful = known[wire.src] & ~expected
    skipped = (*passed[:at], passed[at] | useful, *passed[at + 1 :])
    yield from choices((known, busy, skipped, flying), case, facts, at + 1)
    for fact in range(facts):
        if useful >> fact & 1:
            taken = list(busy)
            for link, begin, slot in zip(wire.links, wire.begins, wire.slots, strict=True):
                taken[link] = begin + slot
            again = tuple(
                0 if set(other.links) & set(wire.links) else p for other, p in zip(case.wires, passed, strict=True)
            )
            more = tuple(sorted([*flying, (wire.arrives, wire.dst, fact)]))
            yield from choices((known, tuple(taken), again, more), case, facts, at + 1)


def least_us(case: Tiny, start: list[int], goal: int, facts: int, sums: int) -> int | None:
    """The least time after which every device has the facts of `goal`; None where that has too many states."""
    states: set[State] = {(tuple(start), (0,) * case.cluster.num_links, (0,) * len(case.wires), ())}
    tried = 0
    for now in range(200):
        if any(all(have & goal == goal for have in state[0]) for state in states):
            return now
        following: set[State] = set()
        for state in states:
            for known, busy, passed, flying in choices(state, case, facts):
                have = list(known)
                for left, device, fact in flying:
                    if left == 1:
                        have[device] = closed(have[device] | 1 << fact, sums)
                rest = tuple((left - 1, device, fact) for left, device, fact in flying if left > 1)
                following.add((tuple(have), tuple(max(0, b - 1) for b in busy), passed, rest))
                tried += 1
            if tried > MOST_STATES:
                return None
        states = following
    return None


def reversed_cluster(cluster: st.Cluster) -> st.Cluster:
    nodes = [st.Node(name=name, kind="switch" if name == "s" else "device") for name in cluster.node_names]
    links = [
        st.Link(src=link.dst, dst=link.src, alpha_us=link.alpha_us, gb_per_s=link.gb_per_s) for link in cluster.links()
    ]
    return st.Cluster.build("reversed", nodes=nodes, links=links)


def bounds_and_optima(case: Tiny) -> Iterator[tuple[str, float, float]]:
    """The collective, its bound, and the time of the best program over whole pieces, where that is known."""
    n = case.devices
    best = least_us(case, [1 << i for i in range(n)], 2**n - 1, n, 0)
    if best is not None:
        yield "all_gather", st.lower_bound(st.AllGather(n), case.cluster, n * 1e3).total_us, best
        # Run backwards on reversed links, an all-gather is a reduce-scatter.
        back = reversed_cluster(case.cluster)
        yield "reduce_scatter", st.lower_bound(st.ReduceScatter(n), back, n * 1e3).total_us, best
    whole = 2**n - 1
    best = least_us(case, [1 << (1 << i) for i in range(n)], 1 << whole, whole + 1, whole + 1)
    if best is not None:
        yield "all_reduce", st.lower_bound(st.AllReduce(n), case.cluster, 1e3).total_us, best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=100, help="how many clusters are drawn")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    known, tight, wrong = Counter[str](), Counter[str](), []
    for number in range(given.cases):
        seed = given.seed * 1_000_000 + number
        for kind, bound, best in bounds_and_optima(tiny(random.Random(seed), 3 + seed % 2)):
            known[kind] += 1
            tight[kind] += bound >= best * (1 - 1e-9)
            if bound > best * (1 + 1e-9):
                wrong.append(f"seed {seed}: {kind}: bound {bound}, but {best} is possible")
    for kind in sorted(known):
        print(f"{kind}: {known[kind]} optima known, the bound is tight in {tight[kind]}")
    if wrong:
        raise SystemExit("\n".join(wrong))
    print(f"no bound is above an optimum ({given.cases} clusters)")


if __name__ == "__main__":
    main()
