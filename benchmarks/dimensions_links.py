# SPDX-License-Identifier: Apache-2.0
"""Schedules over the dimensions of networks that a seed draws, as programs on every link.

A network has 2 to 4 dimensions, rings, switches and cliques of 2 to 8, with rates between 5 and 200 GB/s and latencies
between 0.1 and 5 us, drawn on a scale of logarithms; an all-reduce on it has 1 MB to 1 GB. `promise_us` is what the
model with single messages says of the program that `fastest_program` takes, `links_us` its run on the links,
`promise_off` the first over the second, less one. The other times are runs on the links of each scheduler's best
program; `over_themis` is ours over the fastest of the three Themis, less one. `bound_us` is of no schedule: it follows
from cuts of the network.
"""

from __future__ import annotations

import math
import random
import sys
import time
from collections.abc import Iterator

from common import Row, common_options, finish

import stretto as st
from stretto.cluster.grid import regular
from stretto.dimensions.link_search import link_programs

MOST_DEVICES = 32
SIZES = {"ring": (2, 3, 4, 5, 6, 7, 8), "fully_connected": (2, 3, 4, 5, 6, 7, 8), "switch": (2, 4, 8)}
"""A switch reduces by halving, for which its size is a power of two."""
THEMIS = ("themis_fifo", "themis_scf", "themis_literal")


def networks(seed: int, count: int) -> Iterator[tuple[str, st.Cluster, float]]:
    """So many networks, each with a size of an all-reduce."""
    draw = random.Random(seed)
    made = 0
    while made < count:
        kinds = [draw.choice(list(SIZES)) for _ in range(draw.randint(2, 4))]
        sizes = [draw.choice(SIZES[kind]) for kind in kinds]
        rates = [_drawn(draw, 5, 200) for _ in kinds]
        latencies = [_drawn(draw, 0.1, 5) for _ in kinds]
        nbytes = _drawn(draw, 1e6, 1e9)
        if math.prod(sizes) > MOST_DEVICES:
            continue
        dims = [
            st.Dimension(kind=kind, size=size, gb_per_s=rate, alpha_us=latency)
            for kind, size, rate, latency in zip(kinds, sizes, rates, latencies, strict=True)
        ]
        letters = {"ring": "R", "fully_connected": "F", "switch": "S"}
        name = "x".join(f"{letters[dim.kind]}{dim.size}@{dim.gb_per_s:.0f}" for dim in dims)
        yield name, regular(name, dims), nbytes
        made += 1


def _drawn(draw: random.Random, low: float, high: float) -> float:
    return float(f"{math.exp(draw.uniform(math.log(low), math.log(high))):.3g}")


def row_of(name: str, cluster: st.Cluster, nbytes: float, chunks: int) -> Row:
    began = time.process_time()
    found = link_programs(cluster, "all_reduce", nbytes, chunks=chunks, units=8 * chunks)
    spent = time.process_time() - began
    best = min(found.values(), key=lambda one: one.total_us)
    bound = st.lower_bound(st.AllReduce(cluster.num_devices), cluster, nbytes).total_us
    themis = min(found[system].total_us for system in THEMIS)
    taken = next(system for system, one in found.items() if one is best)
    return {
        "case": f"{name} {nbytes / 1e6:.3g}MB", "system": taken, "promise_us": best.promise_us,
        "links_us": best.total_us, "promise_off": best.promise_us / best.total_us - 1,
        **{system: found[system].total_us for system in ("baseline", *THEMIS)},
        "over_themis": best.total_us / themis - 1, "bound_us": bound, "over_bound": best.total_us / bound - 1,
        "cpu_s": spent,
    }  # fmt: skip


def main() -> None:
    parser = common_options(__doc__)
    parser.add_argument("--seed", type=int, default=1, help="draws the networks")
    parser.add_argument("--networks", type=int, default=30, help="how many")
    parser.add_argument("--chunks", type=int, default=16, help="pieces that the data is cut into")
    args = parser.parse_args()
    count = min(args.networks, 4) if args.quick else args.networks
    rows = []
    for name, cluster, nbytes in networks(args.seed, count):
        rows.append(row_of(name, cluster, nbytes, args.chunks))
        print(rows[-1]["case"], file=sys.stderr)
    finish(rows, args, title="Dimension schedules on the links of generated networks")


if __name__ == "__main__":
    main()
