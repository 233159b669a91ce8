# SPDX-License-Identifier: Apache-2.0
"""Groups smaller than the cluster: how far programs are above the bound without and with devices outside the group.

Two parts: known cases (one GPU per host, half of the GPUs, GPUs on different rails, a diagonal of a torus), and groups
that `--seed` draws on the irregular topologies of `irregular.py`. The bound lets every device help. `alone_gap` is that
of members only (empty where they do not reach each other), `tree_gap` stands above the rate that no packing of trees
exceeds, which is known for groups of up to nine: where it is small and `gap` is not, it is the bound that is loose.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

from common import Row, common_options, cpu_s, finish
from irregular import rails, topologies

import stretto as st
from stretto.collectives import COLLECTIVES
from stretto.errors import Infeasible
from stretto.synthesis.helpers import resolve
from stretto.synthesis.steiner_packing import pack_shards, shards_of
from stretto.units import format_bytes, parse_bytes

EXACT = 9


def known() -> Iterator[tuple[str, st.Cluster, tuple[int, ...]]]:
    """The groups that jobs have."""
    yield "one GPU of each of 4 hosts", st.Cluster.preset("dgx_h100", nodes=4), (0, 8, 16, 24)
    yield "half of the GPUs of 2 hosts", rails(2, spine=False), (0, 1, 2, 3, 8, 9, 10, 11)
    yield "halves on other rails", rails(2, spine=False), (0, 1, 2, 3, 12, 13, 14, 15)
    yield "two GPUs on two rails", rails(2, spine=False), (0, 9)
    yield "diagonal of a torus", st.Cluster.load("torus:4x4"), (0, 5, 10, 15)
    yield "row of a torus", st.Cluster.load("torus:4x4"), (0, 1, 2, 3)


def drawn(seed: int, most: int) -> Iterator[tuple[str, st.Cluster, tuple[int, ...]]]:
    """A random half of the devices (two at least, nine at most) of each irregular topology."""
    draw = random.Random(seed)
    for cluster in topologies(seed):
        if cluster.num_devices > most:
            continue
        count = min(max(2, cluster.num_devices // 2), EXACT)
        group = tuple(sorted(draw.sample(range(cluster.num_devices), count)))
        yield f"{count} of {cluster.name}", cluster, group


def row(
    case: str,
    cluster: st.Cluster,
    group: tuple[int, ...],
    kind: str,
    nbytes: float,
    budget_s: float,
    makers: list[str] | None,
) -> Row:
    """One group, alone and with help."""
    collective = COLLECTIVES[kind](group)
    began, cpu_began = time.perf_counter(), cpu_s()
    found = st.synthesize(collective, cluster, nbytes, budget_s=budget_s, cache=False, helpers="all", makers=makers)
    took, cpu = time.perf_counter() - began, cpu_s() - cpu_began
    try:
        alone = st.synthesize(
            collective, cluster, nbytes, budget_s=budget_s, cache=False, helpers="none", makers=makers
        )
        alone_gap = alone.certificate.gap
    except Infeasible:
        alone_gap = None
    plain = COLLECTIVES[kind](group, chunks=1)
    shards = shards_of(plain)
    packing = pack_shards(cluster, (*group, *resolve(cluster, group, "all")), shards)
    least_us = float(plain.chunk_share[0]) * nbytes / packing.limit_gb_per_s / 1e3
    return {
        "case": case,
        "system": "stretto",
        "collective": kind,
        "nbytes": nbytes,
        "time_us": found.time_us,
        "bound_us": found.certificate.bound_us,
        "alone_gap": alone_gap,
        "gap": found.certificate.gap,
        "tree_gap": found.time_us / least_us - 1,
        "helpers": len(found.certificate.helpers),
        "synth_s": took,
        "synth_cpu_s": cpu,
    }


def main() -> None:
    parser = common_options(__doc__)
    parser.add_argument("--seed", type=int, default=1, help="draws the irregular topologies and the groups on them")
    parser.add_argument("--collectives", default="all_gather,all_reduce,all_to_all", help="separated by commas")
    parser.add_argument("--bytes", default="256M", help="separated by commas")
    parser.add_argument("--budget", type=float, default=20.0, help="seconds for each search")
    parser.add_argument("--most", type=int, default=24, help="the most devices of an irregular topology")
    parser.add_argument("--makers", help="separated by commas; all when not given")
    parser.add_argument("--part", choices=["known", "drawn", "both"], default="both")
    parser.add_argument("--cpu", action="store_true", help="the budget counts CPU seconds: for a busy machine")
    given = parser.parse_args()
    if given.cpu:
        # Up to 256 ranks all makers run in this process and look at this clock.
        time.monotonic = time.process_time
    cases = [*known()] if given.part != "drawn" else []
    cases += [*drawn(given.seed, 8 if given.quick else given.most)] if given.part != "known" else []
    makers = None if given.makers is None else given.makers.split(",")
    rows = []
    for case, cluster, group in cases:
        for kind in given.collectives.split(","):
            for size in given.bytes.split(","):
                budget_s = 2.0 if given.quick else given.budget
                rows.append(row(case, cluster, group, kind, parse_bytes(size), budget_s, makers))
                last = rows[-1]
                alone = "no program" if last["alone_gap"] is None else f"{100 * last['alone_gap']:.1f} %"
                what = f"{case}: {kind} of {format_bytes(last['nbytes'])}"
                print(f"{what}: {100 * last['gap']:.2f} % above the bound, alone {alone}", flush=True)
    finish(rows, given, title="groups smaller than the cluster")


if __name__ == "__main__":
    main()
