# SPDX-License-Identifier: Apache-2.0
"""Unchanged training scripts on GPUs behind shaped uplinks: with NCCL, with gloo, and under `stretto run`.

Every case runs in a lab (two hosts; all ranks may share one GPU, under MPS). `nccl_ms` and `gloo_ms` are the script by
itself, `own_ms` is the same NCCL inside of `stretto run`, measured in turns with `plan_ms`: `gain` is the median over
the pairs of blocks, `low` and `high` bound it with 95 % confidence (bootstrap).
`losses_off` compares, relatively, the first iterations from the begin of the plan on with the same ones, from the same
parameters, on NCCL itself. `least_ms` is what no way can be
below: the compute of the recorded step, or its bytes that must cross an uplink; `allows` is `own_ms` over that.
Scripts are run one after the other in one start of the ranks; with little time only the first ones.
`--device cpu` runs the same on gloo and CPUs, to try the benchmark. `--cases`, `--ranks`, `--uplink` choose.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
from common import Row, common_options, finish
from gpu_jobs_rank import BLOCK, MODELS, TRIAL

RANK = Path(__file__).with_name("gpu_jobs_rank.py")
STEPS, ALONE, GLOO = 420, 60, 12
"""Iterations: under `stretto run` at most, of the script alone, and with gloo."""
WARM = 5
LEAST_S, END_S = 5.0, 6.0
"""A run with less time than this is not begun; a run under `stretto run` ends so long before its limit, if it can."""
DRAWS = 2000
CALLS = {
    "resnet-ddp": {"all_reduce", "broadcast"}, "gpt-fsdp2": {"all_gather", "reduce_scatter"},
    "dlrm": {"all_reduce", "all_to_all"},
}  # fmt: skip
"""The collectives of models that do more than sum gradients."""


def lab(ranks: int, uplink: str) -> list[str]:
    """Runs what follows on every rank."""
    return [sys.executable, "-m", "stretto", "lab", "run", "--hosts", "2", "--ranks", str(ranks), "--uplink", uplink,
            "--"]  # fmt: skip


def run(command: list[str], args: Any, log: Path, **environment: str) -> str:
    """Run a command in a session of its own; what went wrong, if anything.

    A client of MPS has few queues of the GPU unless it asks for more: kernels of a backward pass would stand behind a
    sum that waits for the one before it.
    """
    limit_s = min(args.limit, args.until - time.monotonic())
    if limit_s < LEAST_S:
        return "no time left"
    shared = {
        "OMP_NUM_THREADS": "1", "NCCL_SOCKET_IFNAME": "eth", "NCCL_MAX_NCHANNELS": "2",
        "CUDA_DEVICE_MAX_CONNECTIONS": "16",
    }  # fmt: skip
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, env=os.environ | shared | environment, stdout=out, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGTERM)
            time.sleep(2.0)
            code = -1
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    if code == 0:
        return ""
    lines = [line for line in log.read_text(errors="replace").splitlines() if "Error" in line or "rror:" in line]
    return f"timed out after {limit_s:.0f} s" if code == -1 else (lines[-1:] or [f"exit code {code}"])[0][-200:]


def told(folder: Path, model: str) -> list[dict[str, Any]]:
    """What each rank has written."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob(f"{model}-[0-9].json"))]


def alone(backend: str, steps: int, args: Any, where: Path) -> str:
    """All scripts by themselves; what went wrong, if anything."""
    folder = where / backend
    folder.mkdir(parents=True, exist_ok=True)
    command = [*lab(args.ranks, args.uplink), sys.executable, str(RANK), args.cases, str(folder), str(steps)]
    return run(command, args, where / f"{backend}.log", BACKEND=backend)


def under(backend: str, args: Any, where: Path) -> str:
    """All scripts under `stretto run`; what went wrong, if anything."""
    folder = where / "run"
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "stretto", "run", "--budget", str(args.budget), "--json", str(where / "run.json")]
    command += ["--", *lab(args.ranks, args.uplink), sys.executable, str(RANK), args.cases, str(folder), str(STEPS)]
    more = {"STRETTO_CARRIER": "gloo"} if backend == "cpu" else {}
    (where / "plans").mkdir(mode=0o700, exist_ok=True)
    more["STRETTO_PLANS"] = str(where / "plans")
    limit_s = min(args.limit, args.until - time.monotonic())
    more["DEADLINE"] = str(time.time() + limit_s - END_S)
    return run(command, args, where / "run.log", BACKEND=backend, PAIRS=str(args.pairs), **more)


def kept_plan(where: Path, model: str) -> Any:
    """The plan that a model has left, known by its collectives; None where it has left none."""
    from stretto.control.kept_plans import KeptPlan
    from stretto.control.messages import decode_captured

    for path in sorted((where / "plans").glob("*.plan.json")):
        kept = msgspec.json.decode(path.read_bytes(), type=KeptPlan)
        workload, _ = decode_captured(kept.captured)
        if {op.kind for op in workload.comm_ops} == CALLS.get(model, {"all_reduce"}):
            return kept, workload
    return None


def least_ms(workload: Any, ranks: int, uplink: str) -> float:
    """What an iteration takes at least: its compute, or the bytes that must leave each host."""
    number, unit = re.fullmatch(r"([0-9.]+)([gm])bit", uplink).groups()  # type: ignore[union-attr]
    bytes_per_ms = float(number) * {"g": 1e9, "m": 1e6}[unit] / 8e3
    # Of two equal hosts, each must have the other's half of what is gathered or scattered; sums are both, and of an
    # all-to-all each rank sends half. Where ranks differ, all receive at least what the smallest has.
    shares = {"all_reduce": 1.0, "all_to_all": ranks / 2}
    crossing = sum(min(op.rank_nbytes, default=op.nbytes) * shares.get(op.kind, 0.5) for op in workload.comm_ops)
    compute_us = sum(max(op.durations_us, default=op.duration_us) for op in workload.ops if not op.is_comm)
    return float(max(crossing / bytes_per_ms, compute_us / 1e3))


def medians_ms(ranks: list[dict[str, Any]], begins: str = "") -> float | None:
    """The median over iterations of the slowest rank's time, of iterations that ran so."""
    slowest = by_iteration(ranks)
    runs = ranks[0]["runs"] if ranks else []
    times = [ms for at, ms in enumerate(slowest) if at >= WARM and (not begins or runs[at].startswith(begins))]
    return median(times) if times else None


def by_iteration(ranks: list[dict[str, Any]]) -> list[float]:
    return [max(each) for each in zip(*(rank["times_ms"] for rank in ranks), strict=False)]


def pairs_of(ranks: list[dict[str, Any]]) -> list[tuple[float, float, float]]:
    """For each trial the median times of the plan around it, of the job's own backend in it, and of ours in it."""
    slowest, runs = by_iteration(ranks), ranks[0]["runs"]
    first = next((at for at, ran in enumerate(runs) if ran.startswith(("plan", "trial"))), len(runs))
    found = []
    for begin in range(first, len(slowest), BLOCK + TRIAL):
        block = range(begin, min(begin + BLOCK + TRIAL, len(slowest)))
        # The first iterations under the plan after a change do not count.
        times = [
            [slowest[at] for at in block if runs[at].startswith(kind) and (kind != "plan" or at - begin >= 2)]
            for kind in ("plan", "trial own", "trial ours")
        ]
        if all(len(each) >= 4 for each in times):
            plan, own, ours = (median(each) for each in times)
            found.append((plan, own, ours))
    return found


def interval(ratios: list[float]) -> tuple[float, float]:
    """The median of ratios with 95 % confidence, by drawing them again."""
    draw = random.Random(0)
    drawn = sorted(median(draw.choices(ratios, k=len(ratios))) for _ in range(DRAWS))
    return drawn[int(0.025 * DRAWS)], drawn[int(0.975 * DRAWS)]


def losses_off(ranks: list[dict[str, Any]]) -> float | None:
    """The largest relative difference of a loss under the plan from what NCCL itself makes of the same iteration."""
    pairs = [
        (mine, other) for rank in ranks if "reference" in rank
        for mine, other in zip(rank["losses"][rank["first"] :], rank["reference"], strict=False)
    ]  # fmt: skip
    return max((abs(a - b) / max(abs(b), 1e-9) for a, b in pairs), default=None)


def case(model: str, where: Path, args: Any) -> Row:
    """What was measured of a script under `stretto run`, and alone."""
    backend = "nccl" if args.device == "cuda" else "cpu"
    row: Row = {"case": f"{model} 2x{args.ranks} {args.uplink}"}
    plain, with_gloo = told(where / backend, model), told(where / "gloo", model)
    row["nccl_ms"], row["gloo_ms"] = medians_ms(plain), medians_ms(with_gloo)
    if args.alone:
        return row
    ran = told(where / "run", model)
    found = pairs_of(ran) if ran and ran[0]["runs"] else []
    kept = kept_plan(where, model)
    row["own_ms"] = median(own for _, own, _ in found) if found else medians_ms(ran, "own") if ran else None
    row["plan_ms"] = median(plan for plan, _, _ in found) if found else None
    row["predicted_ms"] = kept[0].answer.iteration_us / 1e3 if kept is not None else None
    row["pairs"] = len(found)
    if found:
        row["gain"] = median(own / plan for plan, own, _ in found)
        row["low"], row["high"] = interval([own / plan for plan, own, _ in found])
        row["backend_percent"] = 100 * (median(ours / own for _, own, ours in found) - 1)
    row["least_ms"] = least = least_ms(kept[1], args.ranks, args.uplink) if kept is not None else None
    own_ms = row["own_ms"]
    row["allows"] = own_ms / least if least and isinstance(own_ms, float) else None
    before = medians_ms(ran, "own") if ran and ran[0]["runs"] else None
    recorded = medians_ms(ran, "recording") if before else None
    row["recording_percent"] = 100 * (recorded / before - 1) if recorded and before else None
    row["losses_off"] = losses_off(ran)
    return row


def main() -> None:
    """All cases that were asked for."""
    parser = common_options(__doc__)
    parser.add_argument("--cases", default=",".join(MODELS), help="models, separated by commas")
    parser.add_argument("--ranks", type=int, default=2, help="of each host")
    parser.add_argument("--uplink", default="2gbit")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--budget", type=float, default=4.0, help="seconds for the planner")
    parser.add_argument("--limit", type=float, default=100.0, help="seconds for each run")
    parser.add_argument("--total", type=float, default=1e6, help="seconds for all runs together")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--gloo", action="store_true", help="with gloo, too")
    parser.add_argument("--alone", action="store_true", help="the scripts by themselves, and nothing else")
    parser.add_argument("--only-run", action="store_true", help="not the scripts by themselves; see --keep")
    parser.add_argument("--keep", type=Path, help="leave logs and times there, and take what is there")
    args = parser.parse_args()
    args.pairs = 1 if args.quick else args.pairs
    args.until = time.monotonic() + args.total
    # What was started ends with this.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with tempfile.TemporaryDirectory() as name:
        where = (args.keep or Path(name)) / f"2x{args.ranks}"
        where.mkdir(parents=True, exist_ok=True)
        backends = [] if args.only_run else ["nccl" if args.device == "cuda" else "cpu"]
        backends += ["gloo"] if args.gloo and args.device == "cuda" else []
        for backend in backends:
            wrong = alone(backend, GLOO if backend == "gloo" else ALONE, args, where)
            print(f"{backend} alone: {wrong or 'done'}", file=sys.stderr, flush=True)
        if not args.alone:
            wrong = under("nccl" if args.device == "cuda" else "cpu", args, where)
            print(f"under stretto run: {wrong or 'done'}", file=sys.stderr, flush=True)
        rows = []
        for model in args.cases.split(","):
            rows.append(case(model, where, args))
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    finish(rows, args, title="Unchanged jobs on GPUs")


if __name__ == "__main__":
    main()
