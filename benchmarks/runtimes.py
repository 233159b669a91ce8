# SPDX-License-Identifier: Apache-2.0
"""What a runtime's price list says beside what was measured, on rows that the fit has not seen.

The times are of an outside run (November 2026): Stretto's exported plans on the executor of MSCCL++ 0.10, 8 ranks on
one H200 under MPS. They were published as ratios to MSCCL++'s own plans with two digits, so each is known to about 5 %.
Which of the runs were in place is not known: all but all-to-all are taken to have been.
"""

from __future__ import annotations

from common import Row, common_options, finish

from stretto import Cluster
from stretto.algorithms import algorithm
from stretto.programs.lower import lower
from stretto.simulator import Runtime
from stretto.simulator.runtime_fit import RuntimeRow, fit_runtime

SIZES = (1 << 10, 1 << 16, 1 << 20, 1 << 24, 1 << 26)
OWN_US = {
    "all_reduce": (7.8, 7.5, 12.1, 87, 301),
    "all_gather": (10.3, 10.3, 11.5, 70, 326),
    "reduce_scatter": (9.2, 9.3, 10.2, 57, 181),
    "all_to_all": (9.7, 9.9, 13.6, 141, 525),
}
"""MSCCL++'s own plans at these sizes."""
PLANS = (
    ("all_to_all", "direct", 1, False, (1.2, 1.2, 1.3, 1.3, 1.3), True),
    ("all_gather", "ring", 8, True, (3.0, 3.1, 2.9, 1.3, 1.1), True),
    ("reduce_scatter", "direct", 1, False, (4.3, 4.2, 6.9, 12, 15), True),
    ("all_reduce", "ring", 4, True, (7.9, 8.2, 6.0, 4.3, 4.7), True),
    ("all_gather", "direct", 1, True, (0.83, 0.84, 1.0, 1.2, 0.93), False),
    ("all_reduce", "direct", 1, True, (5.0, 5.2, 6.2, 9.1, 10), False),
)
"""Collective, algorithm, instances, zero copy, time over MSCCL++'s own plan, and whether it is fitted or judged."""
FREE = ("launch_us", "instruction_us", "signal_us", "handover_us", "put", "reduce", "copy", "receive")


def measured() -> list[tuple[str, bool, RuntimeRow]]:
    """Every measurement: its program, whether it is fitted, and the row."""
    cluster = Cluster.preset("shared_gpu", nodes=8)
    found = []
    for kind, name, instances, zero_copy, ratios, fitted in PLANS:
        program = algorithm(name, kind, 8, in_place=kind != "all_to_all")
        streams = lower(program, instances=instances, fifo_depth=2)
        streams.verify()
        for nbytes, ratio, own_us in zip(SIZES, ratios, OWN_US[kind], strict=True):
            row = RuntimeRow(
                lowered=streams, cluster=cluster, nbytes=nbytes, time_us=ratio * own_us, zero_copy=zero_copy
            )
            found.append((f"{kind} {name} x{instances}", fitted, row))
    return found


def main() -> None:
    """Print measured and predicted times, fitted rows first."""
    parser = common_options(__doc__)
    parser.add_argument("--fit", action="store_true", help="fit the prices anew, instead of those of the preset")
    args = parser.parse_args()
    data = measured()
    fitted, judged = ([row for _, seen, row in data if seen is which] for which in (True, False))
    start = Runtime.load("mscclpp:h200")
    found = fit_runtime(fitted, start, free=FREE if args.fit else (), judge=judged)
    ratios = {id(row): ratio for row, ratio in zip([*fitted, *judged], [*found.fitted, *found.judged], strict=True)}
    rows: list[Row] = [
        {
            "case": name, "system": "mscclpp:h200", "nbytes": row.nbytes, "measured_us": row.time_us,
            "time_us": ratios[id(row)] * row.time_us, "ratio": ratios[id(row)], "fitted": "yes" if seen else "no",
        }
        for name, seen, row in data
    ]  # fmt: skip
    for label, values in (("fitted", found.fitted), ("not fitted", found.judged)):
        deviation = sum(abs(v - 1) for v in values) / len(values)
        rows.append({"case": f"mean deviation, {label}", "system": "mscclpp:h200", "ratio": 1 + deviation})
    if args.fit:
        print(found.runtime)
    finish(rows, args, title="predicted over measured, MSCCL++ on an H200")


if __name__ == "__main__":
    main()
