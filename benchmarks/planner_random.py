# SPDX-License-Identifier: Apache-2.0
"""The planner on clusters and steps that are drawn at random: what the search says, and what the links do.

Hosts of equal or different sizes behind NICs of random rates, on one switch or on two with a link between them, with or
without a slow network beside; pipelines whose stages are hosts or are strided over hosts, tensor and data parallelism,
steps with groups of several sizes. `in turns` is the share by which re-timing exceeds the first search, in which motifs
take turns on shared links; `differs` the same for the plan that is returned; `over bound` its distance to the bound.
Every baseline is re-timed with its own waits.
"""

from __future__ import annotations

import random
import re
from dataclasses import replace

import numpy as np
from common import Row, common_options, finish
from planner_steps import _hosts, _Wiring, pipeline

import stretto as st
from stretto.planner import api
from stretto.planner.baselines import STOCK, as_submitted
from stretto.planner.schedule.retime import retime
from stretto.workload import Dep, Op, Workload


def drawn_cluster(rng: random.Random) -> st.Cluster:
    """Two to four hosts behind NICs."""
    wiring = _Wiring()
    size = rng.choice((2, 4))
    sizes = [size] * rng.choice((2, 3, 4)) if rng.random() < 0.7 else rng.sample((2, 4, 8), 2)
    hosts = _hosts(wiring, sizes)
    switches = [wiring.node(f"leaf{k}", "switch") for k in range(rng.choice((1, 2)))]
    if len(switches) > 1:
        wiring.join(switches[0], switches[1], "ib", rng.choice((10.0, 25.0, 40.0)), 0.5)
    slow = wiring.node("ethernet", "switch") if rng.random() < 0.3 else None
    for h, devices in enumerate(hosts):
        ways = [("ib", rng.choice((6.0, 12.5, 25.0)), switches[h % len(switches)])]
        ways += [("eth", 3.0, slow)] if slow is not None else []
        for channel, rate, to in ways:
            nic = wiring.node(f"h{h}.{channel}", "nic", h)
            wiring.join(nic, to, channel, rate, rng.choice((0.5, 1.0, 5.0)))
            for device in devices:
                wiring.join(device, nic, channel, 50.0, 0.3)
    return st.Cluster.build("drawn", nodes=wiring.nodes, links=wiring.links)


def drawn_step(rng: random.Random, ranks: int) -> Workload:
    """A pipeline or a step of data-parallel layers over some of the groups that fit."""
    kinds = [count for count in (2, 4) if ranks % count == 0 and ranks // count >= 2]
    if kinds and rng.random() < 0.7:
        count = rng.choice(kinds)
        width = ranks // count
        strided = rng.random() < 0.6
        stages = [range(k, ranks, count) if strided else range(k * width, (k + 1) * width) for k in range(count)]
        made = pipeline(
            "drawn", stages, batches=rng.choice((2, 4, 6)), sent=rng.choice((1e6, 6e6, 12e6)),
            grads=rng.choice((5e6, 30e6, 90e6)), tensor=rng.choice((1, 2)) if width % 4 == 0 else 1,
        )  # fmt: skip
        return Workload(name="drawn", num_ranks=ranks, ops=made.ops)
    half = ranks // 2
    groups = rng.choice(
        ((), (tuple(range(half)), tuple(range(half, ranks))), tuple((k, k + half) for k in range(half)))
    )
    ops: list[Op] = []
    layers = rng.choice((2, 4))
    for k in range(layers):
        ops.append(Op(name=f"b{k}", duration_us=rng.choice((200.0, 1000.0)), after=(Dep(op=f"g{k}", lag=1),)))
        kind = rng.choice(("all_reduce", "all_to_all", "reduce_scatter"))
        ops.append(Op(name=f"g{k}", kind=kind, nbytes=rng.choice((2e6, 20e6)), after=(Dep(op=f"b{k}"),), groups=groups))
    return Workload(name="drawn", num_ranks=ranks, ops=tuple(ops))


def one(seed: int) -> Row:
    """One cluster and one step."""
    rng = random.Random(seed)
    cluster = drawn_cluster(rng)
    step = drawn_step(rng, cluster.num_devices)
    found = api.plan(step, cluster, steps=150, seed=seed)
    plan = found.plan
    said = re.compile(r"\(([+-][\d.]+) %\); it was searched again")
    told = [float(match[1]) / 100 for note in plan.notes if (match := said.search(note))]
    differs = plan.retimed_us / plan.iteration_us - 1
    stock = replace(found.problem, workload=as_submitted(found.problem.workload))
    others = [
        retime(schedule, stock if name in STOCK else found.problem, cluster).period_us
        for name, schedule in found.schedules.items()
        if name != "stretto"
    ]
    return {
        "in turns": told[0] if told else differs,
        "differs": differs,
        "over bound": plan.retimed_us / plan.bound_us - 1,
        "over best baseline": plan.retimed_us / min(others) - 1,
    }


def main() -> None:
    parser = common_options(__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=60)
    args = parser.parse_args()
    rows = [one(seed) for seed in range(args.seed, args.seed + (5 if args.quick else args.count))]
    table: list[Row] = []
    for what in rows[0]:
        values = np.array([row[what] for row in rows])
        table.append(
            {
                "case": what, "steps": len(rows), "least": float(values.min()), "median": float(np.median(values)),
                "90 %": float(np.quantile(values, 0.9)), "most": float(values.max()),
                "above 3 %": int((np.abs(values) > 0.03).sum()), "worst seed": args.seed + int(np.abs(values).argmax()),
            }
        )  # fmt: skip
    finish(table, args, title="drawn clusters and steps")


if __name__ == "__main__":
    main()
