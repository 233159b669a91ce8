# SPDX-License-Identifier: Apache-2.0
"""The folders of MSCCL++ plans that ``stretto synth`` writes for one GPU that 2, 4 and 8 ranks share, proved.

Each folder is what ``stretto synth KIND -c shared_gpu:N -b 1KiB..256MiB --in-place --format json --runtime mscclpp:h200
-o FOLDER`` writes (all-to-all without ``--in-place``; ``--out-of-place`` leaves it out everywhere). Every plan is read,
run by the interpreter with its race detector in two orders, and compared with what its collective asks for. `cpu_s` is
the command's, `cut` how many sizes a longer search might have changed (0: every candidate was tried), `as_run_3` how
many of the plans are those that were chosen beforehand for the H200 run of ``mscclpp_plans.py --confirmed 3``.
``mscclpp_beside.py`` runs the folders on GPUs.
"""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path

from common import Row, common_options, cpu_s, finish

from stretto.programs.formats.mscclpp_folder import plans_of
from stretto.programs.formats.mscclpp_reader import check_plan, loads

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
RANKS = (2, 4, 8)
RUN_3 = Path(__file__).parent / "mscclpp_h200_confirmed3.csv"


def forms_of_run() -> dict[tuple[str, int, int], str]:
    """The plan of each case in the last run on the H200."""
    with RUN_3.open() as file:
        rows = [row for row in csv.DictReader(file) if row["system"] == "stretto"]
    return {(row["collective"], int(row["ranks"]), int(row["nbytes"])): row["form"] for row in rows}


def write(kind: str, ranks: int, folder: Path, *, in_place: bool, budget: float) -> Row:
    """Write and prove one folder; return its row."""
    began = cpu_s()
    command = [sys.executable, "-m", "stretto", "synth", kind, "-c", f"shared_gpu:{ranks}", "-b", "1KiB..256MiB"]
    command += ["--in-place"] * in_place + ["--format", "json", "--runtime", "mscclpp:h200", "--no-cache"]
    subprocess.run([*command, "--budget", f"{budget:g}", "-o", str(folder)], check=True, stdout=subprocess.DEVNULL)
    took = cpu_s() - began
    plans = plans_of(folder)
    for plan in plans:
        check_plan(loads(plan.path.read_text()), seeds=[0, 1])
    rows = json.loads((folder / "index.json").read_text())["rows"]
    before = forms_of_run()
    same = [f"{row['program']} {row['form']}" == before[kind, ranks, row["nbytes"]] for row in rows]
    return {
        "case": f"{kind} on {ranks}", "sizes": len(rows), "plans": len(plans), "cpu_s": took,
        "cut": sum(bool(row["cut"]) for row in rows), "as_run_3": sum(same),
    }  # fmt: skip


def main() -> None:
    """Write the twelve folders."""
    parser = common_options(__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out-of-place", action="store_true", help="separate outputs for all collectives")
    parser.add_argument("--budget", type=float, default=600.0, help="seconds of the search for each size")
    args = parser.parse_args()
    rows: list[Row] = []
    for kind in KINDS[: 1 if args.quick else None]:
        for ranks in RANKS[: 1 if args.quick else None]:
            in_place = kind != "all_to_all" and not args.out_of_place
            rows.append(write(kind, ranks, args.folder / f"{kind}-{ranks}", in_place=in_place, budget=args.budget))
            print(rows[-1], file=sys.stderr, flush=True)
    finish(rows, args, title="MSCCL++ plans that stretto synth writes by the prices of mscclpp:h200")


if __name__ == "__main__":
    main()
