# SPDX-License-Identifier: Apache-2.0
"""The best library algorithm on each cluster, and how far it is from the lower bound.

Nothing here is synthesised: the gaps are what the library leaves open. One row per cluster, collective and size,
with the algorithm that the simulator found fastest (contention fifo, alpha pipelined).
"""

from __future__ import annotations

import time
from functools import partial

from common import Row, run_cases

import stretto as st
from stretto.algorithms import algorithms

CLUSTERS = ("ndv2:2", "dgx2:2", "dgx_a100:2", "mi250", "torus:8x8", "p3_8xlarge:4")
KINDS = ("all_gather", "all_reduce", "all_to_all")
SIZES = (st.KB, st.MB, st.GB)


def best_of(source: str, quick: bool) -> list[Row]:
    cluster = st.Cluster.load(source)
    rows = []
    for kind in KINDS[: 2 if quick else 3]:
        began = time.perf_counter()
        programs = []
        for entry in algorithms(kind):
            for chunks in (None, 8) if kind != "all_to_all" else (None,):
                try:
                    programs.append(st.algorithm(entry.name, kind, cluster.num_devices, cluster=cluster, chunks=chunks))
                except st.InvalidInput:
                    continue  # not defined for this rank count
        for nbytes in SIZES:
            times = {p.name: st.simulate(p, cluster, nbytes=nbytes).total_us for p in programs}
            name = min(times, key=lambda n: times[n])
            bound = st.lower_bound(programs[0].collective, cluster, nbytes=nbytes)
            rows.append(
                {
                    "case": f"{kind} on {source}",
                    "system": name,
                    "cluster": source,
                    "collective": kind,
                    "nbytes": nbytes,
                    "time_us": times[name],
                    "bound_us": bound.total_us,
                    "ratio": times[name] / bound.total_us,
                    "algorithms": len(programs),
                }
            )
        rows[-1]["seconds"] = time.perf_counter() - began
    return rows


if __name__ == "__main__":
    run_cases(
        __file__, __doc__, "The library against the bound", {source: partial(best_of, source) for source in CLUSTERS}
    )
