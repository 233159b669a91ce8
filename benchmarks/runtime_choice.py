# SPDX-License-Identifier: Apache-2.0
"""Programs chosen by the price list of a runtime beside those chosen by the links alone, on boxes of several kinds.

`links_us` is the fastest program that is found for the links alone, which no instruction slows down (from 1 GB on also
packed trees in very many pieces, those of an all-reduce also as two halves). On the runtime, `as_streams_us` is that
program as instruction streams, `as_plan_us` the same as wide steps in its best form (empty where it is too long for
that), and `time_us` what is chosen with the runtime's prices. At 1 GB that should be hardly more than `links_us`
(`over_links`), and for small sizes less than the two before it. Two optima stand beside it: `bound_us` is what no
program beats on the links (`over_bound`), `paths_us` what no program beats whose messages go from rank to rank by the
route that the memory of a GPU takes (`over_paths`): a program for the links alone may also send by other routes, a plan
cannot. `in_reach` says whether any plan at all can be within 5 % of `links_us`: "no" where `paths_us` is more than that
above it.
"""

from __future__ import annotations

import time
from dataclasses import replace

from common import Row, common_options, finish

from stretto import AllGather, AllReduce, AllToAll, Cluster, Collective, ReduceScatter, synthesize
from stretto.errors import StrettoError
from stretto.programs import Program
from stretto.programs.formats.mscclpp_json import MAX_THREADBLOCKS
from stretto.programs.formats.mscclpp_wide import PlanForm, dumps, widen_in
from stretto.programs.wide import WideProgram
from stretto.simulator import Runtime, lower_bound, simulate
from stretto.simulator.priced_wide import wide_time_us
from stretto.synthesis import forest
from stretto.synthesis.path_bound import path_bound
from stretto.synthesis.plan_search import forms_for, loop_forms
from stretto.synthesis.problem import MAX_WIDE

CLUSTERS = ("ndv2", "dgx2", "dgx_a100", "dgx_h100")
COLLECTIVES = {
    "all_reduce": AllReduce, "all_gather": AllGather, "reduce_scatter": ReduceScatter, "all_to_all": AllToAll,
}  # fmt: skip
SIZES = (65536, 262144, 2**20, 10**9)
SMALL = 2**20
"""Up to here, latencies count, which `paths_us` knows nothing of."""
LARGE = 10**9
RUNTIME = "mscclpp:h200"
MOST_LOST = 1.05
FINEST_K, FINEST_TRANSFERS = 24, 1_000_000
"""Packed trees for the links alone at large sizes: no file of a runtime takes so many pieces."""


def wanted_of(kind: str, ranks: int) -> Collective:
    """A collective, in place where it can be."""
    return COLLECTIVES[kind](ranks, in_place=kind != "all_to_all")


def links_alone_us(wanted: Collective, cluster: Cluster, nbytes: int, found_us: float) -> float:
    """The time of the fastest program for the links alone that is known.

    An all-reduce may also be a reduce-scatter with an all-gather behind it, of the best packed trees each.
    """
    if nbytes < LARGE or wanted.kind == "all_to_all":
        return found_us

    def packed_us(kind: str) -> float:
        collective = wanted_of(kind, cluster.num_devices)
        finest = forest.synthesize(
            collective, cluster, nbytes=nbytes, budget_s=60.0, max_k=FINEST_K, max_transfers=FINEST_TRANSFERS
        )
        return simulate(finest, cluster, nbytes=nbytes).total_us

    halves = [packed_us("reduce_scatter") + packed_us("all_gather")] if wanted.kind == "all_reduce" else []
    return min(found_us, packed_us(wanted.kind), *halves)


def as_plan_us(program: Program, cluster: Cluster, nbytes: int) -> float | None:
    """The time of a program as wide steps on the runtime, in the best of all forms that are tried; None: in none."""
    if len(program.chunk) > MAX_WIDE:
        return None
    prices = Runtime.load(RUNTIME)
    steps: dict[PlanForm, WideProgram] = {}

    def took_us(form: PlanForm) -> float:
        alike = replace(form, slices=1, threads=1024, loop_bytes=16 * form.halves)
        try:
            if alike not in steps:
                steps[alike] = widen_in(program, form)
            return wide_time_us(steps[alike], cluster, nbytes=nbytes, form=form, runtime=prices)
        except StrettoError:
            return float("inf")

    def is_written(form: PlanForm) -> bool:
        try:
            return bool(dumps(program, form=form, max_threadblocks=most))
        except StrettoError:
            return False

    most = prices.blocks_on(cluster) or MAX_THREADBLOCKS
    forms = {*forms_for(program, nbytes, prices, cluster), *loop_forms(program, nbytes, most)}
    times = {form: took_us(form) for form in forms}
    # Not every form can be written as a plan: the executor has limits.
    fastest = (form for form in sorted(times, key=times.__getitem__) if times[form] < float("inf"))
    return next((times[form] for form in fastest if is_written(form)), None)


def main() -> None:
    """Print one row for each cluster, collective and size."""
    parser = common_options(__doc__)
    parser.add_argument("--clusters", default=",".join(CLUSTERS), help="only these")
    parser.add_argument("--collectives", default=",".join(COLLECTIVES), help="only these")
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)), help="only these, in bytes")
    parser.add_argument("--budget", type=float, default=10.0, help="seconds of each search")
    parser.add_argument("--cpu", action="store_true", help="the budget counts CPU seconds: for a busy machine")
    args = parser.parse_args()
    if args.cpu:
        # All makers run in this process and look at this clock.
        time.monotonic = time.process_time
    rows: list[Row] = []
    for name in args.clusters.split(",")[: 1 if args.quick else None]:
        cluster = Cluster.preset(name)
        for kind in args.collectives.split(",")[: 1 if args.quick else None]:
            for nbytes in [int(size) for size in args.sizes.split(",")][: 1 if args.quick else None]:
                wanted = wanted_of(kind, cluster.num_devices)
                links = synthesize(wanted, cluster, nbytes, budget_s=args.budget, cache=False)
                found = synthesize(wanted, cluster, nbytes, runtime=RUNTIME, budget_s=2 * args.budget, cache=False)
                links_us = links_alone_us(wanted, cluster, nbytes, links.time_us)
                bound_us = lower_bound(wanted, cluster, nbytes).total_us
                paths_us = path_bound(wanted, cluster, nbytes).total_us if nbytes > SMALL else None
                took = found.certificate.lowered_us or 0.0
                row: Row = {
                    "case": f"{name} {wanted.kind}", "nbytes": nbytes, "links_us": links_us,
                    "as_streams_us": "", "as_plan_us": as_plan_us(links.plain, cluster, nbytes) or "",
                    "time_us": took, "program": found.program.name,
                    "form": found.certificate.form, "over_links": took / links_us,
                    "bound_us": bound_us, "over_bound": took / bound_us,
                    "paths_us": paths_us or "", "over_paths": took / paths_us if paths_us else "",
                    "in_reach": ("no" if paths_us > MOST_LOST * links_us else "yes") if paths_us else "",
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
