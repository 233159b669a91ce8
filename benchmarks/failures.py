# SPDX-License-Identifier: Apache-2.0
"""Synthesis after a failure: from scratch, and from the program of the cluster as it was (`base`).

On each of the irregular topologies of `irregular.py` that `--seed` draws, something random happens: a cable goes down
(both directions), or runs at half its rate; never so that devices are cut off. CPU seconds and gaps of both searches;
`worse` is the time of the program from the old one over that from scratch, less one.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from common import Row, common_options, cpu_s, finish
from irregular import topologies

import stretto as st
from stretto.collectives import COLLECTIVES
from stretto.synthesis.helpers import reach_each_other
from stretto.units import parse_bytes


def damaged(cluster: st.Cluster, draw: random.Random) -> st.Cluster:
    """The cluster with a random cable down or at half its rate."""
    while True:
        link = draw.randrange(cluster.num_links)
        ends = {int(cluster.link_src[link]), int(cluster.link_dst[link])}
        pairs = zip(cluster.link_src.tolist(), cluster.link_dst.tolist(), strict=True)
        cable = np.array([{a, b} == ends for a, b in pairs])
        where = cluster.link_name(link)
        if draw.random() < 0.5:
            rate = np.where(cable, cluster.link_gb_per_s / 2, cluster.link_gb_per_s)
            return replace(cluster, name=f"{cluster.name}, {where} slow", link_gb_per_s=rate)
        columns = {
            key: getattr(cluster, key)[~cable] for key in cluster.__dataclass_fields__ if key.startswith("link_")
        }
        broken = replace(cluster, name=f"{cluster.name}, {where} down", **columns)
        if reach_each_other(broken, range(broken.num_devices)):
            return broken


def rows_of(
    cluster: st.Cluster, kinds: list[str], nbytes: float, budget_s: float, draw: random.Random
) -> Iterator[Row]:
    """One failure, and each collective from scratch and from the old program."""
    broken = damaged(cluster, draw)
    for kind in kinds:
        collective = COLLECTIVES[kind](cluster.num_devices)
        old = st.synthesize(collective, cluster, nbytes, budget_s=budget_s, cache=False)
        began = cpu_s()
        scratch = st.synthesize(collective, broken, nbytes, budget_s=budget_s, cache=False)
        between = cpu_s()
        found = st.synthesize(collective, broken, nbytes, budget_s=budget_s, cache=False, base=old)
        yield {
            "case": broken.name,
            "system": "stretto",
            "collective": kind,
            "nbytes": nbytes,
            "scratch_gap": scratch.certificate.gap,
            "gap": found.certificate.gap,
            "worse": found.time_us / scratch.time_us - 1,
            "scratch_cpu_s": between - began,
            "synth_cpu_s": cpu_s() - between,
        }


def main() -> None:
    parser = common_options(__doc__)
    parser.add_argument("--seed", type=int, default=1, help="draws the topologies and the failures")
    parser.add_argument("--collectives", default="all_gather,all_reduce,all_to_all", help="separated by commas")
    parser.add_argument("--bytes", default="256M")
    parser.add_argument("--budget", type=float, default=30.0, help="seconds for each search from scratch")
    parser.add_argument("--most", type=int, default=24, help="the most devices of a topology")
    parser.add_argument("--cpu", action="store_true", help="the budget counts CPU seconds: for a busy machine")
    given = parser.parse_args()
    if given.cpu:
        # Up to 256 ranks all makers run in this process and look at this clock.
        time.monotonic = time.process_time
    draw = random.Random(given.seed)
    rows: list[Row] = []
    for cluster in topologies(given.seed):
        if cluster.num_devices > (8 if given.quick else given.most):
            continue
        budget_s = 5.0 if given.quick else given.budget
        for row in rows_of(cluster, given.collectives.split(","), parse_bytes(given.bytes), budget_s, draw):
            rows.append(row)
            gaps = f"{100 * row['scratch_gap']:.2f} % from scratch, {100 * row['gap']:.2f} % from the old program"
            cpu = f"{row['scratch_cpu_s']:.1f} and {row['synth_cpu_s']:.1f} CPU s"
            print(f"{row['case']}: {row['collective']}: {gaps}; {cpu}", flush=True)
    total = {key: sum(row[key] for row in rows) for key in ("scratch_cpu_s", "synth_cpu_s")}
    rows.append({
        "case": f"all {len(rows)}: sums, worst", "system": "stretto", "nbytes": parse_bytes(given.bytes),
        "worse": max(row["worse"] for row in rows), **total,
    })  # fmt: skip
    finish(rows, given, title="synthesis after a failure")


if __name__ == "__main__":
    main()
