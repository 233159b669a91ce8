# SPDX-License-Identifier: Apache-2.0
"""Which all-reduce is best on two DGX-2 nodes, and how far is it from the lower bound?

python examples/compare_algorithms.py
"""

from __future__ import annotations

import stretto as st
from stretto.algorithms import algorithm, defined_for
from stretto.units import format_bytes, format_us


def main() -> None:
    """Print the best algorithm at three sizes."""
    cluster = st.Cluster.load("dgx2:2")
    programs = {
        name: algorithm(name, "all_reduce", cluster.num_devices, cluster=cluster)
        for name in defined_for("all_reduce", cluster.num_devices)
    }
    for nbytes in (16 * st.KB, 1 * st.MB, 256 * st.MB):
        times = {name: st.simulate(p, cluster, nbytes=nbytes).total_us for name, p in programs.items()}
        best = min(times, key=lambda name: times[name])
        bound = st.lower_bound(programs[best].collective, cluster, nbytes=nbytes)
        gap = times[best] / bound.total_us
        print(f"{format_bytes(nbytes):>6}  {best:<18} {format_us(times[best]):>9}  {gap:.2f}x the bound")


if __name__ == "__main__":
    main()
