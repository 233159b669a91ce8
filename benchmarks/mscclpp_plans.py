# SPDX-License-Identifier: Apache-2.0
"""Stretto's plans of wide steps beside MSCCL++'s own, as measured on one H200, and what the price list says of them.

`mscclpp_h200.csv` holds the times: MSCCL++ 0.9 built from its public source, 2, 4 and 8 ranks on one H200 under MPS,
CUDA graphs, median (least, most) of five; eight launches in a row on new data (three from 64 MB on) were checked
element by element. Own plans are those of its DSL's tests for one host, any number of ranks and several numbers
of threadblocks, and a reduce-scatter in the manner of its all-reduce. All but our all-to-all are in place. `chosen` is
the form that the price list ``mscclpp:h200`` picks among those that were measured; `ratio` is its measured time over
that of the best own plan, `best_of_ours` that of the fastest form. Prices were fitted to 148 of the times (2 and 8
ranks, four sizes, 1024 threads, no reduce-scatter); the others are the judges.
"""

from __future__ import annotations

import csv
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

from common import Row, common_options, finish

from stretto import Cluster
from stretto.algorithms import algorithm
from stretto.programs.formats.mscclpp_wide import PlanForm, widen_in
from stretto.programs.wide import WideProgram
from stretto.simulator import Runtime
from stretto.simulator.priced_wide import wide_time_us

DATA = Path(__file__).parent / "mscclpp_h200.csv"
FITTED_SIZES = (1 << 10, 1 << 14, 1 << 18, 1 << 22, 1 << 26)
Key = tuple[str, int, int]


class Prices:
    """Predicted times of measured forms."""

    def __init__(self) -> None:
        self.runtime = Runtime.load("mscclpp:h200")
        self._steps: dict[tuple[str, int, str, int, int], WideProgram] = {}

    def time_us(self, kind: str, ranks: int, nbytes: int, form: PlanForm) -> float:
        """The predicted time of one form."""
        key = kind, ranks, form.protocol, form.streams, form.apart
        if key not in self._steps:
            program = algorithm("direct", kind, ranks, in_place=kind != "all_to_all")
            self._steps[key] = widen_in(program, form)
        cluster = Cluster.preset("shared_gpu", nodes=ranks)
        # One GPU runs up to 128 threadblocks of a rank when two share it, more than the preset allows for one of many.
        runtime = self.runtime if form.slices * form.streams <= self.runtime.max_blocks else _unlimited(self.runtime)
        return wide_time_us(self._steps[key], cluster, nbytes=nbytes, form=form, runtime=runtime)


def _unlimited(runtime: Runtime) -> Runtime:
    return replace(runtime, max_blocks=0)


def fitted(ranks: int, nbytes: int) -> bool:
    """Whether a time is among those that the prices are fitted to: 2 and 8 ranks, every other size."""
    return ranks != 4 and nbytes in FITTED_SIZES


def main() -> None:
    """Print the ratios, and how far the predictions are off."""
    args = common_options(__doc__).parse_args()
    own: dict[Key, float] = {}
    ours: dict[Key, dict[PlanForm, tuple[float, float]]] = defaultdict(dict)
    off: dict[bool, list[float]] = {True: [], False: []}
    prices = Prices()
    with DATA.open() as file:
        for row in csv.DictReader(file):
            key = row["collective"], int(row["ranks"]), int(row["nbytes"])
            took = float(row["median_us"])
            if row["system"] == "mscclpp":
                own[key] = min(own.get(key, took), took)
                continue
            form = PlanForm.parse(row["form"].replace(" ", ","))
            said = prices.time_us(*key, form)
            ours[key][form] = said, took
            off[fitted(*key[1:])].append(abs(said / took - 1))
    rows: list[Row] = []
    ratios = []
    for key in sorted(ours, key=lambda key: key):
        if key not in own:
            continue
        chosen, (_, took) = min(ours[key].items(), key=lambda item: item[1][0])
        best = min(took for _, took in ours[key].values())
        ratios.append(took / own[key])
        rows.append(
            {
                "case": f"{key[0]} on {key[1]}",
                "nbytes": key[2],
                "own_us": own[key],
                "time_us": took,
                "ratio": ratios[-1],
                "best_of_ours": best / own[key],
                "chosen": str(chosen),
            }
        )
    over = sum(ratio > 1.1 for ratio in ratios)
    rows.append({"case": f"mean; {over} of {len(ratios)} above 1.1", "ratio": sum(ratios) / len(ratios)})
    for which, label in ((True, "fitted"), (False, "not fitted")):
        if off[which]:
            deviation = sum(off[which]) / len(off[which])
            rows.append({"case": f"mean deviation of {len(off[which])} times, {label}", "ratio": 1 + deviation})
    finish(rows, args, title="plans of wide steps over MSCCL++'s own, one H200")


if __name__ == "__main__":
    main()
