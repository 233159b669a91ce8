# SPDX-License-Identifier: Apache-2.0
"""Stretto's plans of wide steps beside MSCCL++'s own, as measured on one H200, and what the price list says of them.

`mscclpp_h200.csv` holds the times: MSCCL++ 0.9 built from its public source, 2, 4 and 8 ranks on one H200 under MPS,
CUDA graphs, median (least, most) of five; eight launches in a row on new data (three from 64 MB on) were checked
element by element. Own plans are those of its DSL's tests for one host, any number of ranks and several numbers
of threadblocks, and a reduce-scatter in the manner of its all-reduce. All but our all-to-all are in place. `chosen` is
the form that the price list ``mscclpp:h200`` picks among those that were measured; `ratio` is its measured time over
that of the best own plan, `best_of_ours` that of the fastest form. Prices are fitted to the times of 2 and 8 ranks at
every other size; the others are the judges. ``--every`` prints each time of ours beside the predicted one, ``--fit``
fits the prices anew. ``--confirmed N`` is about later runs (`mscclpp_h200_confirmedN.csv`): there `chosen` was picked
by the price list, as it was then, before the run, `spread` is the least and the most of five, and `predicted_us` is
what the price list of today says. Runs 2 and 3 are from `mscclpp_beside.py`, with all-gathers of its DSL in the manner
of its all-reduce as own plans, which are faster than those of the runs before.
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
from stretto.simulator.runtime_fit import WIDE_STEP_PRICES, RuntimeRow, fit_runtime

DATA = Path(__file__).parent / "mscclpp_h200.csv"
CONFIRMED = {path.stem.removeprefix("mscclpp_h200_confirmed"): path for path in DATA.parent.glob("*_confirmed*.csv")}
FITTED_SIZES = (1 << 10, 1 << 14, 1 << 18, 1 << 22, 1 << 26)
Key = tuple[str, int, int]


class Prices:
    """Predicted times of measured forms."""

    def __init__(self) -> None:
        # One GPU runs up to 128 threadblocks of a rank when two share it, more than the preset allows for one of many.
        self.runtime = replace(Runtime.load("mscclpp:h200"), max_blocks=0, gpu_blocks=0)
        self._steps: dict[tuple[str, int, str, int, int], WideProgram] = {}

    def row(self, key: Key, form: PlanForm, took: float) -> RuntimeRow:
        """A measurement as it is fitted."""
        kind, ranks, nbytes = key
        at = kind, ranks, form.protocol, form.streams, form.apart
        if at not in self._steps:
            self._steps[at] = widen_in(algorithm("direct", kind, ranks, in_place=kind != "all_to_all"), form)
        cluster = Cluster.preset("shared_gpu", nodes=ranks)
        return RuntimeRow(lowered=self._steps[at], cluster=cluster, nbytes=nbytes, time_us=took, form=form)

    def time_us(self, row: RuntimeRow) -> float:
        """The predicted time of one."""
        assert isinstance(row.lowered, WideProgram)
        return wide_time_us(row.lowered, row.cluster, nbytes=row.nbytes, form=row.form, runtime=self.runtime)


def fitted(ranks: int, nbytes: int) -> bool:
    """Whether a time is among those that the prices are fitted to: 2 and 8 ranks, every other size."""
    return ranks != 4 and nbytes in FITTED_SIZES


def choices(own: dict[Key, float], ours: dict[Key, dict[PlanForm, tuple[float, float]]]) -> list[Row]:
    """The form that is predicted to be fastest in each case, beside the best own plan and the best form."""
    rows: list[Row] = []
    ratios = []
    for key in sorted(ours):
        if key not in own:
            continue
        chosen, (_, took) = min(ours[key].items(), key=lambda item: item[1][0])
        best = min(took for _, took in ours[key].values())
        ratios.append(took / own[key])
        rows.append(
            {
                "case": f"{key[0]} on {key[1]}", "nbytes": key[2], "own_us": own[key], "time_us": took,
                "ratio": ratios[-1], "best_of_ours": best / own[key], "chosen": str(chosen),
            }
        )  # fmt: skip
    over = sum(ratio > 1.1 for ratio in ratios)
    rows.append({"case": f"mean; {over} of {len(ratios)} above 1.1", "ratio": sum(ratios) / len(ratios)})
    return rows


def confirmed(run: str) -> list[Row]:
    """A run whose plans were chosen beforehand: each beside the best own plan of the same run."""
    own: dict[Key, float] = {}
    chosen: dict[Key, Row] = {}
    prices, off = Prices(), list[float]()
    with CONFIRMED[run].open() as file:
        for line in csv.DictReader(file):
            if not line["median_us"]:
                continue  # A plan that the executor refused; its reason stands in the last column.
            key, took = (line["collective"], int(line["ranks"]), int(line["nbytes"])), float(line["median_us"])
            if line["system"] == "mscclpp":
                own[key] = min(own.get(key, took), took)
                continue
            if line["system"] == "stretto-other" and line["form"].startswith("direct "):
                continue  # Plans with separate outputs, for which this table has no prices.
            form = PlanForm.parse(line["form"].removeprefix("direct ").replace(" ", ","))
            said = prices.time_us(prices.row(key, form, took))
            off.append(abs(said / took - 1))
            if line["system"] == "stretto":
                chosen[key] = {
                    "case": f"{key[0]} on {key[1]}", "nbytes": key[2], "own_us": 0.0, "time_us": took,
                    "spread": f"{line['least_us']}..{line['most_us']}", "ratio": 0.0, "predicted_us": said,
                    "chosen": str(form),
                }  # fmt: skip
    ratios = []
    for key, row in sorted(chosen.items()):
        ratios.append(float(str(row["time_us"])) / own[key])
        row["own_us"], row["ratio"] = own[key], ratios[-1]
    over = sum(ratio > 1.1 for ratio in ratios)
    return [
        *(row for _, row in sorted(chosen.items())),
        {"case": f"mean; {over} of {len(ratios)} above 1.1", "ratio": sum(ratios) / len(ratios)},
        {"case": f"mean deviation of {len(off)} times, none of them fitted", "ratio": 1 + sum(off) / len(off)},
    ]


def main() -> None:
    """Print the ratios, and how far the predictions are off."""
    parser = common_options(__doc__)
    parser.add_argument("--every", action="store_true", help="print every time of ours beside the predicted one")
    parser.add_argument("--fit", action="store_true", help="fit the prices anew")
    parser.add_argument(
        "--confirmed", choices=sorted(CONFIRMED), help="a later run, whose plans were chosen beforehand"
    )
    args = parser.parse_args()
    if args.confirmed:
        finish(confirmed(args.confirmed), args, title="plans of wide steps over MSCCL++'s own, chosen before the run")
        return
    own: dict[Key, float] = {}
    ours: dict[Key, dict[PlanForm, tuple[float, float]]] = defaultdict(dict)
    off: dict[bool, list[float]] = {True: [], False: []}
    prices, every = Prices(), list[tuple[Key, PlanForm, RuntimeRow]]()
    with DATA.open() as file:
        for row in csv.DictReader(file):
            key = row["collective"], int(row["ranks"]), int(row["nbytes"])
            took = float(row["median_us"])
            if row["system"] == "mscclpp":
                own[key] = min(own.get(key, took), took)
                continue
            form = PlanForm.parse(row["form"].replace(" ", ","))
            every.append((key, form, prices.row(key, form, took)))
    if args.fit:
        seen = [one for key, _, one in every if fitted(*key[1:])]
        prices.runtime = fit_runtime(seen, prices.runtime, free=WIDE_STEP_PRICES, report=print).runtime
        print(prices.runtime)
    rows: list[Row] = []
    for key, form, one in every:
        said, took = prices.time_us(one), one.time_us
        ours[key][form] = said, took
        off[fitted(*key[1:])].append(abs(said / took - 1))
        if args.every:
            rows.append(
                {
                    "case": f"{key[0]} on {key[1]} {form}", "nbytes": key[2], "time_us": took, "predicted_us": said,
                    "ratio": said / took, "fitted": "yes" if fitted(*key[1:]) else "no",
                }
            )  # fmt: skip
    rows += [] if args.every else choices(own, ours)
    for which, label in ((True, "fitted"), (False, "not fitted")):
        if off[which]:
            deviation = sum(off[which]) / len(off[which])
            rows.append({"case": f"mean deviation of {len(off[which])} times, {label}", "ratio": 1 + deviation})
    finish(rows, args, title="plans of wide steps over MSCCL++'s own, one H200")


if __name__ == "__main__":
    main()
