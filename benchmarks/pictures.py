# SPDX-License-Identifier: Apache-2.0
"""The page behind docs/images/all-reduce-dgx2.webp: library and synthesised all-reduces on two DGX-2 nodes.

``python benchmarks/pictures.py sweep.html``. Every algorithm of the library is run with one chunk and with 8; each size
shows the better of the two. `stretto synth` is the program that the search finds for that very size in 30 s. `ring` is
one ring through all devices, which uses one NIC of each host; NCCL runs a ring for each NIC.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import stretto as st
from stretto.report import html
from stretto.report.sweep import Sweep, parse_sizes

NAMES = ("ring", "double_binary_tree", "recursive_doubling", "direct", "halving_doubling", "hierarchical")
BUDGET_S = 30.0


def sweep(cluster: st.Cluster, sizes: tuple[int, ...]) -> Sweep:
    """The best time of each algorithm at each size, and of a synthesised program."""
    collective = st.AllReduce(cluster.num_devices)
    times: dict[str, tuple[float, ...]] = {}
    for name in NAMES:
        ranks = cluster.num_devices
        programs = [st.algorithm(name, "all_reduce", ranks, cluster=cluster, chunks=chunks) for chunks in (None, 8)]
        times[f"{name}, 1 or 8 chunks"] = tuple(
            min(st.simulate(program, cluster, nbytes=size).total_us for program in programs) for size in sizes
        )
    found = [st.synthesize(collective, cluster, size, budget_s=BUDGET_S, cache=False).time_us for size in sizes]
    bounds = tuple(st.lower_bound(collective, cluster, size).total_us for size in sizes)
    for size, time_us, bound_us in zip(sizes, found, bounds, strict=True):
        print(f"{size} bytes: synthesised {time_us:.1f} us, {time_us / bound_us:.3f} of the bound", flush=True)
    return Sweep(
        cluster=cluster.name, collective="all_reduce", sizes=sizes, bound_us=bounds,
        time_us={**times, "stretto synth": tuple(found)}, facts=(("alpha", "pipelined"),),
    )  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path, help="the page to write")
    page = parser.parse_args().file
    made = sweep(st.Cluster.load("dgx2:2"), parse_sizes("1K..1G", factor=8.0))
    html.write_html(page, title="all_reduce on dgx2:2", sections=[html.sweep_section(made)])
