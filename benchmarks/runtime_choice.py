# SPDX-License-Identifier: Apache-2.0
"""Programs chosen by the price list of a runtime beside those chosen by the links alone, on boxes of several kinds.

`links_us` is the fastest program that is found for the links alone, which no instruction slows down; `as_streams_us`
is that program on the runtime; `time_us` is what is chosen with the runtime's prices, on the runtime. At 1 GB that
should be hardly more than `links_us` (`over_links`), and for small sizes far less than `as_streams_us`. `over_bound` is
over what no program beats on the links: the best program that is found in the budget may be far from it. `over_paths`
is over what no trees beat (for an all-reduce: a reduce-scatter, then an all-gather) whose messages go from rank to rank
by the route that the memory of a GPU takes: a program for the links alone may also send by other routes, a plan cannot.
"""

from __future__ import annotations

from common import Row, common_options, finish

from stretto import AllGather, AllReduce, Cluster, synthesize
from stretto.errors import StrettoError
from stretto.simulator import lower_bound, simulate
from stretto.synthesis.loop_packing import path_bound_ns

CLUSTERS = ("ndv2", "dgx2", "dgx_a100", "dgx_h100")
SIZES = (65536, 262144, 2**20, 10**9)
SMALL = 2**20
"""Up to here, latencies count, which `over_paths` knows nothing of."""
RUNTIME = "mscclpp:h200"


def main() -> None:
    """Print one row for each cluster, collective and size."""
    parser = common_options(__doc__)
    parser.add_argument("--clusters", default=",".join(CLUSTERS), help="only these")
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)), help="only these, in bytes")
    parser.add_argument("--budget", type=float, default=10.0, help="seconds of each search")
    args = parser.parse_args()
    rows: list[Row] = []
    for name in args.clusters.split(",")[: 1 if args.quick else None]:
        cluster = Cluster.preset(name)
        for make in (AllReduce, AllGather):
            for nbytes in [int(size) for size in args.sizes.split(",")][: 1 if args.quick else None]:
                wanted = make(cluster.num_devices, in_place=True)
                links = synthesize(wanted, cluster, nbytes, budget_s=args.budget, cache=False)
                found = synthesize(wanted, cluster, nbytes, runtime=RUNTIME, budget_s=2 * args.budget, cache=False)
                paths_us = nbytes / cluster.num_devices / 1e3 * sum(
                    path_bound_ns(cluster, wanted.ranks, reverse=reverse)
                    for reverse in ((True, False) if make is AllReduce else (False,))
                )  # fmt: skip
                row: Row = {
                    "case": f"{name} {wanted.kind}", "nbytes": nbytes, "links_us": links.time_us,
                    "as_streams_us": "",
                    "time_us": found.certificate.lowered_us, "program": found.program.name,
                    "form": found.certificate.form, "over_links": (found.certificate.lowered_us or 0) / links.time_us,
                    "over_bound": (found.certificate.lowered_us or 0) / lower_bound(wanted, cluster, nbytes).total_us,
                    "over_paths": (found.certificate.lowered_us or 0) / paths_us if nbytes > SMALL else "",
                }  # fmt: skip
                try:
                    streams = links.plain.lower(fifo_depth=2)
                    row["as_streams_us"] = simulate(streams, cluster, nbytes=nbytes, runtime=RUNTIME).total_us
                except StrettoError as error:
                    row["as_streams_us"] = str(error).partition(": ")[2] or str(error)
                rows.append(row)
    finish(rows, args, title="chosen by a runtime's prices, and by the links alone")


if __name__ == "__main__":
    main()
