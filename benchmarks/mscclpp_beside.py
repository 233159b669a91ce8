# SPDX-License-Identifier: Apache-2.0
"""Run Stretto's MSCCL++ plans beside others on the GPUs of a job, where MSCCL++ is installed; every rank runs this.

torchrun --nproc-per-node 8 benchmarks/mscclpp_beside.py --ours plans/ --own others/ -o times.csv

How to compare what the command chooses with MSCCL++'s own plans, on a machine with a GPU and MSCCL++:

1. anywhere: ``benchmarks/mscclpp_write.py plans/ours`` (twelve folders that ``stretto synth`` writes, proved), and
   ``benchmarks/mscclpp_write.py plans/also --out-of-place`` (the same with separate outputs, without ``--in-place``)
2. on the GPU machine, under MPS, for N of 8, 4 and 2: ``torchrun --nproc-per-node N benchmarks/mscclpp_beside.py
   --ours plans/ours --also plans/also --own others -o beside-N.csv``
3. put the rows of the three files into ``benchmarks/mscclpp_h200_confirmed4.csv`` (one header), and read the table by
   ``benchmarks/mscclpp_plans.py --confirmed 4``

``--ours`` has the folders that ``stretto synth -b 1KiB..256MiB --runtime mscclpp:h200 --format json -o FOLDER`` wrote,
``--also`` more of them, and ``--own`` files NAME_RANKS.json of any other plans, such as those of MSCCL++'s own tests.
Plans for other numbers of ranks are left out. In each case (a collective and a size) ours is the plan whose range has
the size; it runs in turn with each of the others. A row is the median, the least and the most of five CUDA graphs of
many launches, the slowest rank's; before, launches in a row on new data are checked element by element. Others' plans
of packets run up to 1 MiB, with signals from 16 KiB on (those of at most 8 threadblocks at every size).
`mscclpp_plans.py --confirmed` reads the table.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import re
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from stretto.algorithms import collective_kind
from stretto.errors import InvalidInput
from stretto.runtime.probe.mscclpp_ranks import MscclppRanks, join_gpus

SMALL = 4 << 20
PACKETS_TO, SIGNALS_FROM = 1 << 20, 16 << 10
COLUMNS = ("system", "collective", "ranks", "form", "nbytes", "median_us", "least_us", "most_us", "wrong")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A plan's file, and the sizes that it is run at."""

    system: str
    form: str
    kind: str
    in_place: bool
    text: str
    least: int
    most: int

    @classmethod
    def read(cls, path: Path, system: str, form: str, ranks: int) -> Plan | None:
        """The plan of a file; None where it is for another number of ranks."""
        text = path.read_text()
        data = json.loads(text)
        if len(data["gpus"]) != ranks:
            return None
        blocks = len(data["gpus"][0]["threadblocks"])
        packets = data["protocol"] == "LL"
        form = form or f"{data['name']} blocks={blocks} threads={data['num_threads_per_block']}"
        most = int(data["max_message_size"])
        if system == "mscclpp":
            most = PACKETS_TO if packets else most
        fewest = blocks <= 8
        return cls(
            system=system, form=form, kind=collective_kind(data["collective"]), in_place=bool(data["inplace"]),
            text=text, most=most,
            least=int(data["min_message_size"]) if system != "mscclpp" or packets or fewest else SIGNALS_FROM,
        )  # fmt: skip


def plans(ours: Path, also: Path | None, own: Path | None, ranks: int) -> list[Plan]:
    """All plans for so many ranks."""
    found = []
    for folder, system in ((ours, "stretto"), (also, "stretto-other")):
        for index in sorted(folder.glob("**/index.json")) if folder is not None else ():
            rows = json.loads(index.read_text())["rows"]
            forms = {row["file"]: " ".join(filter(None, (row.get("program"), row.get("form")))) for row in rows}
            found += [Plan.read(index.parent / file, system, form, ranks) for file, form in forms.items()]
    for path in sorted(own.glob("*.json")) if own is not None else ():
        found.append(Plan.read(path, "mscclpp", re.sub(r"_\d+$", "", path.stem), ranks))
    return [plan for plan in found if plan is not None]


def main() -> None:
    """Run all plans, and let rank 0 write a row for each as soon as it is measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ours", type=Path, required=True)
    parser.add_argument("--also", type=Path)
    parser.add_argument("--own", type=Path)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--sizes", default=",".join(str(1 << k) for k in range(10, 29, 2)))
    parser.add_argument("--collectives", default="all_reduce,all_gather,reduce_scatter,all_to_all")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no case afterwards")
    args = parser.parse_args()
    start, rank = time.monotonic(), join_gpus()
    ranks = dist.get_world_size()
    cases: dict[str, list[Plan]] = defaultdict(list)
    for plan in plans(args.ours, args.also, args.own, ranks):
        cases[plan.kind].append(plan)
    sizes = [int(size) for size in args.sizes.split(",")]
    out = args.output.open("a") if rank == 0 else None
    table = csv.writer(out) if out is not None else None
    if table is not None and args.output.stat().st_size == 0:
        table.writerow(COLUMNS)
    for group in ([s for s in sizes if s <= SMALL], [s for s in sizes if s > SMALL]):
        if not group:
            continue
        runner = MscclppRanks(max(group))
        for kind in args.collectives.split(","):
            for nbytes in group:
                late = torch.tensor(float(time.monotonic() - start > args.seconds))
                dist.all_reduce(late, dist.ReduceOp.MAX)
                if late.item():
                    if rank == 0:
                        print(f"left out: {kind} of {nbytes} on {ranks}", flush=True)
                    continue
                for plan in cases[kind]:
                    if plan.least <= nbytes <= plan.most:
                        row = measure(runner, plan, nbytes)
                        if table is not None and out is not None:
                            table.writerow((plan.system, kind, ranks, plan.form, nbytes, *row))
                            out.flush()
            runner.forget()
        if rank == 0:
            print(f"{ranks} ranks up to {max(group)} bytes: {time.monotonic() - start:.0f} s", flush=True)
    dist.barrier()
    os._exit(0)  # MSCCL++ takes its time to close what the driver closes anyway.


def measure(runner: MscclppRanks, plan: Plan, nbytes: int) -> tuple[Any, ...]:
    """Median, least and most of the times, and how many elements were wrong."""
    try:
        loaded = runner.plan(plan.text)
        wrong = torch.tensor(runner.wrong(loaded, plan.kind, nbytes, plan.in_place))
        dist.all_reduce(wrong)
        times = runner.times_us(loaded, plan.kind, nbytes, plan.in_place)
    except InvalidInput as error:
        return "", "", "", str(error)
    return f"{times[len(times) // 2]:.2f}", f"{times[0]:.2f}", f"{times[-1]:.2f}", int(wrong)


if __name__ == "__main__":
    main()
