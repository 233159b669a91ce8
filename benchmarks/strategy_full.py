# SPDX-License-Identifier: Apache-2.0
"""Strategies with all bytes of full-size models, on real links of the lab.

VGG16 (138 M parameters), ResNet-50 (26 M), ResNet-101 (45 M), BERT with 12 layers (109 M) and NCF (122 M), in 32 bits,
on four hosts with one rank each behind shaped uplinks; two further hosts only serve in the rows `... on servers`. Every
parameter is there, every gradient is sent and every parameter updated; forward and backward passes are pauses, so that
processors do nothing but move bytes: of the zoo's times for a T4 (a roofline), or in the cases `measured ...` of one
measurement of all layers on a processor of this machine, one sample (`strategy_compute.py`); these take the three
strategies of `--quick` alone. Times are medians of five steps (one with `--quick`). A step is right if every
parameter has the sum that all ranks' gradients give (`exact`).

`ratio` is the time of DDP's buckets (`all_reduce`) over a system's; `predicted_us` is `simulate_strategy` on the lab's
links and `error` how far the measured time is from it; `bound_us` what the busiest link or the compute takes at least;
`deviation` is the standard deviation of the steps over their median; `peak_mb` the most memory that a training rank has
had so far, in the order of the rows. Each row is also said on stderr as soon as it is there.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median, pstdev
from typing import Any

from common import Row, announce, run_cases
from strategy_compute import measured

from stretto.cluster import Cluster
from stretto.lab import Lab, unavailable
from stretto.lab.layout import wire_bytes
from stretto.strategy import ModelSpec, build, simulate_strategy, zoo

RANK = Path(__file__).with_name("strategy_full_rank.py")
MODELS = ("vgg16", "resnet50", "resnet101", "bert_12l", "ncf_dense")
TRAINS, SERVES = 4, 2
RATE = "400mbit"
STEPS = 5
SYSTEMS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "all_reduce": ("all_reduce", TRAINS, {}),
    "partitioned_all_reduce": ("partitioned_all_reduce", TRAINS, {}),
    "ps_balanced": ("ps_balanced", TRAINS, {}),
    "partitioned_ps": ("partitioned_ps", TRAINS, {}),
    "zero2": ("zero2", TRAINS, {}),
    "all_reduce, float16": ("all_reduce", TRAINS, {"encoder": "float16"}),
    "partitioned_ps on servers": ("partitioned_ps", TRAINS + SERVES, {}),
}
"""The builder, how many ranks take part (those from the fifth on only serve), and options."""
QUICK = ("all_reduce", "partitioned_ps", "partitioned_ps on servers")


def predicted(spec: ModelSpec, system: str, cluster: Cluster) -> tuple[float, float]:
    """The time of a step in the simulator, and the least that its busiest link or its compute takes; with headers."""
    builder, ranks, options = SYSTEMS[system]
    model = replace(spec, runtime="torch")
    names = list(cluster.node_names[:ranks])
    strategy = build(builder, model, names, serve=names[TRAINS:], **options)
    found = simulate_strategy(strategy, model, cluster)
    share = wire_bytes(1 << 20) / (1 << 20)
    return found.iteration_us * share, found.bound_us * share


def row_of(label: str, line: dict[str, Any], base: float, expected: tuple[float, float]) -> Row:
    """What the table says of a strategy.

    Args:
        label: The model.
        line: What rank 0 has printed.
        base: The time of `all_reduce` in microseconds.
        expected: The predicted time and the bound.

    Returns:
        The row.
    """
    took = median(line["times_us"])
    guess, bound = expected
    return {
        "case": label, "system": line["system"], "exact": line["exact"], "step_us": took,
        "deviation": pstdev(line["times_us"]) / took, "ratio": base / took, "predicted_us": guess,
        "error": took / guess - 1, "bound_us": bound, "over_bound": took / bound - 1,
        "cpu": line["cpu"], "machine_cpu": line["machine_cpu"], "peak_mb": line["peak_mb"],
    }  # fmt: skip


def case(quick: bool, name: str, replayed: bool = False) -> list[Row]:
    """One model under all strategies."""
    if reason := unavailable():
        print(f"{name}: skipped: {reason}", file=sys.stderr)
        return []
    chosen = QUICK if quick or replayed else tuple(SYSTEMS)
    jobs = [
        {"name": system, "builder": SYSTEMS[system][0], "ranks": SYSTEMS[system][1], "options": SYSTEMS[system][2]}
        for system in chosen
    ]
    spec = measured(name) if replayed else zoo.model(name)
    times = {v.name: (v.forward_us, v.backward_us) for v in spec.variables}
    millions = sum(v.elements for v in spec.variables) / 1e6
    label = f"{name}, {millions:.0f} M parameters{', measured' * replayed}"
    rows: list[Row] = []
    expected: dict[str, tuple[float, float]] = {}

    def listen(rank: int, stream: str, text: str) -> None:
        if rank or stream != "stdout" or '"system"' not in text:
            return
        line = json.loads(text)
        base = rows[0]["step_us"] if rows else median(line["times_us"])
        rows.append(row_of(label, line, base, expected[line["system"]]))
        announce(rows[-1])

    for hosts in (TRAINS, TRAINS + SERVES):
        there = [job for job in jobs if job["ranks"] == hosts]
        about = {"model": name, "times": times, "trains": TRAINS, "steps": 1 if quick else STEPS, "jobs": there}
        with Lab(hosts=hosts, ranks_per_host=1, uplinks={"eth": RATE}) as lab:
            cluster = lab.cluster()
            expected |= {str(job["name"]): predicted(spec, str(job["name"]), cluster) for job in there}
            done = lab.run([sys.executable, str(RANK), json.dumps(about)], timeout_s=1500, on_line=listen)
        if done.exit_code:
            sys.exit(f"{name}: {done.why}")
    return rows


PARTS = {name: partial(case, name=name) for name in MODELS}
PARTS |= {f"measured {name}": partial(case, name=name, replayed=True) for name in MODELS}


if __name__ == "__main__":
    run_cases(__file__, __doc__, "strategies, full size", PARTS)
