# SPDX-License-Identifier: Apache-2.0
"""How fast programs are built, verified and simulated, and how much memory that takes.

Each case runs in a process of its own. `cpu_s` is what building, proving and simulating take together; the start of
Python is not in it. benchmarks/astra_sim.py measures whole jobs beside those of ASTRA-sim.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from math import prod

from common import Row, cpu_s, run_cases

import stretto as st
from stretto.algorithms.symmetric import symmetric_hierarchical
from stretto.cluster.grid import regular
from stretto.programs import Program, SymmetricProgram

Either = Program | SymmetricProgram


def measure(
    case: str,
    build: Callable[[], Either],
    cluster: st.Cluster,
    nbytes: float,
    contention: str | None = None,
) -> Row:
    times, cpu_began = [time.perf_counter()], cpu_s()
    program = build()
    times.append(time.perf_counter())
    depth = program.verify().fifo_depth
    times.append(time.perf_counter())
    timeline = st.simulate(program, cluster, nbytes=nbytes, contention=contention)
    times.append(time.perf_counter())
    spent_cpu_s = cpu_s() - cpu_began
    build_s, verify_s, simulate_s = (b - a for a, b in pairwise(times))
    events = int(dict(timeline.facts)["events"])
    row: Row = {
        "case": case,
        "system": "stretto",
        "transfers": program.num_transfers,
        "build_s": build_s,
        "verify_s": verify_s,
        "simulate_s": simulate_s,
        "cpu_s": spent_cpu_s,
        "events_per_s": events / simulate_s,
        "transfers_per_s": program.num_transfers / simulate_s,
        "peak_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
        "fifo_depth": depth,
        "time_us": timeline.total_us,
    }
    row["bound_us"] = st.lower_bound(program.collective, cluster, nbytes=nbytes).total_us
    return row


def ring_1024(quick: bool) -> list[Row]:
    cluster = st.Cluster.preset("ring", nodes=1024)
    size = 1024 * st.MB
    return [measure("ring all-reduce, 1024 ranks", lambda: st.algorithm("ring", "all_reduce", 1024), cluster, size)]


def both_ways_1024(quick: bool) -> list[Row]:
    cluster = st.Cluster.preset("ring", nodes=1024)
    return [
        measure(
            "ring all-reduce, 1024 ranks, both directions",
            lambda: st.algorithm("ring", "all_reduce", 1024, directions=2),
            cluster,
            1024 * st.MB,
        )
    ]


def hierarchical_4096(quick: bool) -> list[Row]:
    dims = (16, 16, 16)
    rates = (200.0, 100.0, 50.0)
    cluster = regular("16x16x16", [st.Dimension(kind="switch", size=16, gb_per_s=g, alpha_us=0.7) for g in rates])
    case = "hierarchical all-reduce, 4096 ranks, 64 chunks (one rank stands for all)"
    return [measure(case, lambda: symmetric_hierarchical("all_reduce", dims, chunks=64), cluster, 1024 * st.MB)]


def representative_against_full(quick: bool) -> list[Row]:
    dims = (8, 8, 4)
    rates = (200.0, 100.0, 50.0)
    cluster = regular(
        "8x8x4",
        [st.Dimension(kind="switch", size=n, gb_per_s=g, alpha_us=0.7) for n, g in zip(dims, rates, strict=True)],
    )
    one = partial(symmetric_hierarchical, "all_reduce", dims, chunks=16)
    rows = [
        measure(f"hierarchical all-reduce, {prod(dims)} ranks, 16 chunks, {what}", build, cluster, 256 * st.MB)
        for what, build in (("one rank for all", one), ("in full", lambda: one().expand()))
    ]
    rows[1]["ratio"] = rows[1]["simulate_s"] / rows[0]["simulate_s"]
    assert abs(rows[0]["time_us"] / rows[1]["time_us"] - 1) < 1e-9
    return rows


def full_1024(quick: bool) -> list[Row]:
    cluster = st.Cluster.preset("themis_3d_sw_sw_sw_hetero")
    case = "hierarchical all-reduce, Themis 16x8x8, 2 chunks, in full with link contention"
    return [
        measure(
            case,
            lambda: st.algorithm("hierarchical", "all_reduce", 1024, cluster=cluster, chunks=2),
            cluster,
            1024 * st.MB,
        )
    ]


def all_to_all(quick: bool) -> list[Row]:
    cluster = st.Cluster.preset("fat_tree", nodes=256)
    return [
        measure(
            "pairwise all-to-all, 256 ranks, fat tree, fifo",
            lambda: st.algorithm("pairwise", "all_to_all", 256),
            cluster,
            64 * st.MB,
        )
    ]


def fair(quick: bool) -> list[Row]:
    cluster = st.Cluster.preset("dgx2", nodes=4)
    return [
        measure(
            f"{name} all-reduce, 64 ranks, 4 DGX-2, {contention}",
            partial(st.algorithm, name, "all_reduce", 64),
            cluster,
            64 * st.MB,
            contention=contention,
        )
        for name in ("ring", "halving_doubling")
        for contention in ("fifo", "fair")
    ]


CASES: dict[str, Callable[[bool], list[Row]]] = {
    "ring_1024": ring_1024,
    "both_ways_1024": both_ways_1024,
    "hierarchical_4096": hierarchical_4096,
    "full_1024": full_1024,
    "representative": representative_against_full,
    "all_to_all": all_to_all,
    "fair": fair,
}

if __name__ == "__main__":
    run_cases(__file__, __doc__, "The simulator", CASES)
