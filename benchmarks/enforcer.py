# SPDX-License-Identifier: Apache-2.0
"""Plans carried out, in the lab, side by side in one run: every system is measured in turn, round after round.

`iteration_us` is the median over all rounds of the slowest rank's time; `gain` is how many times faster than the first
system of the case; both are medians of five runs (`--runs`), each in a lab of its own, and `deviation` is the relative
standard deviation of `iteration_us` over them; `ceiling` is what the links allow at most; `predicted_off_percent`
compares a plan's promise with what was measured. The cases that train models are in enforcer_models.py, those under a
controller in enforcer_run.py, pipelines with replicas on two hosts in enforcer_strided.py, and those that need no lab
in enforcer_call.py (the cost of a call) and enforcer_nccl.py (on a GPU).
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import enforcer_call
import enforcer_models
import enforcer_nccl
import enforcer_run
import enforcer_strided
from common import Row, finish, in_own_process, medians, options

from stretto.lab import Lab, unavailable

RANK = Path(__file__).with_name("enforcer_rank.py")
LIMIT_S = 240.0
RUNS = 5
"""How often a case is run, each time in a lab of its own."""


def in_lab(asked: dict[str, Any], *, hosts: int, ranks: int, uplinks: dict[str, str]) -> dict[str, Any]:
    """What the first rank has found."""
    why = unavailable()
    if why:
        sys.exit(f"no lab here: {why}")
    with tempfile.TemporaryDirectory() as name, Lab(hosts=hosts, ranks_per_host=ranks, uplinks=uplinks) as lab:
        folder = Path(name)
        lab.cluster().save(folder / "truth.yaml")
        (folder / "asked.json").write_text(json.dumps(asked))
        done = lab.run([sys.executable, str(RANK), name], timeout_s=LIMIT_S)
        if done.failed is not None or done.timed_out:
            sys.exit(f"{asked['case']}: {done.why}")
        found: dict[str, Any] = json.loads((folder / "found.json").read_text())
        return found


def rows_of(case: str, found: dict[str, Any], **more: Any) -> list[Row]:
    first = next(iter(found["times"].values()))
    predicted = found.get("predicted_us", {})
    return [
        {
            "case": case,
            "system": system,
            "iteration_us": us,
            "gain": first / us,
            "predicted_us": predicted.get(system),
            "predicted_off_percent": 100 * (predicted[system] / us - 1) if predicted.get(system) else None,
            **more,
        }
        for system, us in found["times"].items()
    ]


def channels(quick: bool) -> list[Row]:
    """All-to-all beside all-reduce on two channels, against one after the other on the faster one."""
    rows = []
    for ratio, slow, ceiling in (("2:1", "50mbit", 1.5), ("4:1", "25mbit", 1.25)):
        asked = {"case": "channels", "nbytes": 1 << 20, "budget_s": 5.0, "rounds": 1 if quick else 3, "times": 4}
        found = in_lab(asked, hosts=2, ranks=2, uplinks={"rdma": "100mbit", "eth": slow})
        made = rows_of(f"channels {ratio}", found, ceiling=ceiling)
        # Both use the faster channel alone; against the slower of them the ceiling would seem to be passed.
        base = min(found["times"]["one channel"], found["times"]["backend"])
        rows += [row | {"gain": base / row["iteration_us"]} for row in made]
    return rows


def overhead(quick: bool) -> list[Row]:
    """The plan that does what the application does, against no plan."""
    rows = []
    shared, wired = ("shm", 1 << 20), ("rdma", 1 << 18)
    for hosts, each, (channel, nbytes) in ((1, 2, shared), (2, 1, wired)) if quick else (
        (1, 2, shared), (1, 4, shared), (2, 1, wired),
    ):  # fmt: skip
        asked = {
            "case": "overhead", "nbytes": nbytes, "buckets": 8, "work": 384, "rounds": 4 if quick else 16, "times": 8,
            "channel": channel,
        }  # fmt: skip
        found = in_lab(asked, hosts=hosts, ranks=each, uplinks={"rdma": "400mbit"})
        name, percent = f"overhead {hosts}x{each}", 100 * (found["ratio"] - 1)
        # Turns that follow each other are compared, and the median of that is taken: the machine drifts by more.
        rows += [
            row | {"overhead_percent": percent if row["system"] == "identity" else 0.0} for row in rows_of(name, found)
        ]
        print(f"{name}: {percent:.1f} % of the iteration", file=sys.stderr)
    return rows


def duplex(quick: bool) -> list[Row]:
    """Two messages of neighboring stages in opposite directions, against one of them."""
    asked = {"case": "duplex", "nbytes": 1 << 21, "budget_s": 2.0, "times": 4 if quick else 12}
    return rows_of("duplex", in_lab(asked, hosts=2, ranks=1, uplinks={"rdma": "100mbit"}))


CASES: dict[str, Callable[[bool], list[Row]]] = {
    "channels": channels, "overhead": overhead, "duplex": duplex, **enforcer_call.CASES, **enforcer_models.CASES,
    **enforcer_run.CASES, **enforcer_nccl.CASES, **enforcer_strided.CASES,
}  # fmt: skip


def main() -> None:
    args = options(__doc__, only=tuple(CASES), runs=RUNS)
    if args.case:
        print(json.dumps(CASES[args.case](args.quick)))
        return
    # What waits for a controller to notice takes longer than a quick look may.
    cases = [args.only] if args.only else [case for case in CASES if not (args.quick and case in enforcer_run.CASES)]
    why = enforcer_nccl.missing() if "nccl" in cases else ""
    if why:
        print(f"without the case nccl: {why}", file=sys.stderr)
        if args.only:
            sys.exit(2)
        cases.remove("nccl")
    rows: list[Row] = []
    for case in cases:
        runs = [in_own_process(__file__, case, args.quick) for _ in range(1 if args.quick else max(args.runs, 1))]
        rows += medians(runs, "iteration_us")
    finish(rows, args, title="Plans, enforced")


if __name__ == "__main__":
    main()
