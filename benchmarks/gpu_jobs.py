# SPDX-License-Identifier: Apache-2.0
"""Unchanged training scripts on GPUs behind shaped uplinks: with NCCL, with gloo, and under `stretto run`.

Every case runs in a lab (two hosts; all ranks may share one GPU, under MPS). `nccl_ms` and `gloo_ms` are the script by
itself, `own_ms` is the same NCCL inside of `stretto run`, measured in turns with `plan_ms`: `gain` is the median over
the pairs of blocks, `low` and `high` bound it with 95 % confidence (bootstrap). `identity_percent` is what a plan that
does what the application does costs over NCCL, `recording_percent` what recording does, both in turns like the plan.
`losses_off` compares, relatively, the first iterations from the begin of the plan on with the same ones, from the same
parameters, on NCCL itself. `least_ms` is what no way can be
below: the compute of the recorded step, or its bytes that must cross an uplink; `allows` is `own_ms` over that.

The scripts by themselves are run in one start of the ranks; under `stretto run` every case has a start of its own, so
that one that fails takes none with it. The next one is started, and waits, when the one before has measured. What was
measured is in the folder of `--keep` as soon as it is, and `--show` makes the table of it.
`--device cpu` runs the same on gloo and CPUs, to try the benchmark. `--cases`, `--ranks`, `--uplink` choose.
"""

from __future__ import annotations

import atexit
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
from common import Row, common_options, finish, require_gpu
from gpu_jobs_rank import MODELS
from gpu_jobs_turns import OWN, PARTS

RANK = Path(__file__).with_name("gpu_jobs_rank.py")
STEPS, ALONE = 2000, 40
"""Iterations: under `stretto run` at most, and of the script alone."""
WARM = 8
END_S = 4.0
"""A run ends so long before its limit, if it can."""
DRAWS = 2000
EARLY = "-early"
"""Ends the name of the script whose all-gathers a plan sees before they are waited for; by itself it is as any."""
TICK_S = 0.1
CONNECTIONS = 64
"""Of all ranks to the GPU that they share: eight ranks with 16 each ran out of memory at their start."""


def lab(args: Any) -> list[str]:
    """Runs what follows on every rank."""
    return [sys.executable, "-m", "stretto", "lab", "run", "--hosts", "2", "--ranks", str(args.ranks), "--uplink",
            args.uplink, "--"]  # fmt: skip


def connections(ranks: int) -> int:
    """Queues of the GPU that each of two hosts' ranks asks for: MPS has 64 for all, and started none for 128.

    >>> connections(2), connections(4), connections(16)
    (16, 8, 2)
    """
    return max(2, min(16, CONNECTIONS // (2 * ranks)))


class Run:
    """A command in a session of its own, whose ranks wait until it is released."""

    def __init__(self, command: list[str], where: Path, name: str, ranks: int, **environment: str) -> None:
        self._log, self._hold = where / f"{name}.log", where / f"{name}.go"
        self._hold.unlink(missing_ok=True)
        # A client of MPS has few queues of the GPU unless it asks for more: kernels of a backward pass would stand
        # behind a sum that waits for the one before it. Compiled code is not shared by runs.
        shared = {
            "OMP_NUM_THREADS": "1", "NCCL_SOCKET_IFNAME": "eth", "NCCL_MAX_NCHANNELS": "2",
            "CUDA_DEVICE_MAX_CONNECTIONS": str(connections(ranks)), "TORCHINDUCTOR_COMPILE_THREADS": "4",
            "TORCHINDUCTOR_CACHE_DIR": str(where / f"compiled-{name}"), "HOLD": str(self._hold),
        }  # fmt: skip
        with self._log.open("wb") as out:
            self._process = subprocess.Popen(
                command, env=os.environ | shared | environment, stdout=out, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip
        self._until = 0.0
        # What was started ends with this process.
        atexit.register(self.end)

    def release(self, limit_s: float) -> None:
        """Let the ranks begin, and end in time."""
        self._until = time.time() + limit_s
        part = self._hold.with_suffix(".part")
        part.write_text(str(self._until - END_S))
        part.rename(self._hold)

    def over(self) -> bool:
        """Whether it has ended, or must."""
        return self._process.poll() is not None or time.time() > self._until

    def end(self) -> str:
        """What went wrong, if anything; nothing of it runs afterwards."""
        code = self._process.poll()
        if code is None:
            os.killpg(self._process.pid, signal.SIGTERM)
            try:
                self._process.wait(3.0)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
            return "timed out"
        if code == 0:
            return ""
        lines = [line for line in self._log.read_text(errors="replace").splitlines() if "rror:" in line]
        return (lines[-1:] or [f"exit code {code}"])[0][-200:]


def told(folder: Path, model: str) -> list[dict[str, Any]]:
    """What each rank has written."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob(f"{model}-[0-9].json"))]


def run_alone(args: Any, where: Path) -> None:
    """All scripts by themselves, with NCCL and with gloo."""
    backends = "cpu" if args.device == "cpu" else "nccl,gloo"
    (where / "alone").mkdir(parents=True, exist_ok=True)
    models = ",".join(dict.fromkeys(model.removesuffix(EARLY) for model in args.cases.split(",")))
    command = [*lab(args), sys.executable, str(RANK), models, str(where / "alone"), str(ALONE)]
    run = Run(command, where, "alone", args.ranks, BACKEND=backends, **({"TRACES": "1"} if args.traces else {}))
    run.release(args.limit_alone)
    while not run.over():
        time.sleep(TICK_S)
    print(f"alone: {run.end() or 'done'}", file=sys.stderr, flush=True)


def started(model: str, args: Any, where: Path) -> Run:
    """A case under `stretto run`, whose ranks wait."""
    folder = where / model
    (folder / "plans").mkdir(parents=True, mode=0o700, exist_ok=True)
    for old in (*folder.glob("*.json"), *folder.glob("*.yaml"), *folder.glob("plans/*.json")):
        old.unlink()
    command = [sys.executable, "-m", "stretto", "run", "--budget", str(args.budget), "--json", str(folder / "run.json")]
    command += ["--", *lab(args), sys.executable, str(RANK), model, str(folder), str(STEPS)]
    more = {"STRETTO_CARRIER": "gloo"} if args.device == "cpu" else {}
    more |= {"STRETTO_EARLY_GATHERS": "on"} if model.endswith(EARLY) else {}
    return Run(
        command, where, model, args.ranks, BACKEND="cpu" if args.device == "cpu" else "nccl", PAIRS=str(args.pairs),
        STRETTO_PLANS=str(folder / "plans"), **more,
    )  # fmt: skip


def measured(folder: Path, model: str) -> bool:
    """Whether a case has nothing left but to repeat iterations on NCCL."""
    ranks = told(folder, model)
    return bool(ranks) and "trained_s" in ranks[0]


def run_cases(args: Any, where: Path) -> list[Row]:
    """Every case in a start of its own, the next one started while the last repeats iterations."""
    models, rows = args.cases.split(","), []
    until = time.time() + args.total
    following: Run | None = None
    for at, model in enumerate(models):
        run, following = following or started(model, args, where), None
        begun = time.time()
        run.release(min(args.limit, until - time.time()))
        while not run.over():
            time.sleep(TICK_S)
            if following is None and at + 1 < len(models) and until - time.time() > END_S:
                following = started(models[at + 1], args, where) if measured(where / model, model) else None
        print(f"{model}: {run.end() or 'done'}, {time.time() - begun:.0f} s", file=sys.stderr, flush=True)
        rows.append(case(model, where, args))
        with (where / "rows.jsonl").open("a") as file:
            print(json.dumps(rows[-1]), file=file)
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    return rows


def recorded(folder: Path, model: str) -> Any:
    """The step as `stretto run` has recorded it; None where it has not."""
    from stretto.control.kept_plans import KeptPlan
    from stretto.control.messages import decode_captured
    from stretto.workload import Workload

    if (folder / f"{model}.step.yaml").exists():
        return Workload.load(folder / f"{model}.step.yaml")
    # A run that was cut off has left its plan alone.
    for path in sorted(folder.glob("plans/*.plan.json")):
        return decode_captured(msgspec.json.decode(path.read_bytes(), type=KeptPlan).captured)[0]
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


def medians_ms(ranks: list[dict[str, Any]], label: str = "") -> float | None:
    """The median over iterations of the slowest rank's time, of iterations that ran so."""
    slowest = by_iteration(ranks)
    runs = ranks[0]["runs"] if ranks else []
    times = [ms for at, ms in enumerate(slowest) if at >= WARM and (not label or runs[at] == label)]
    return median(times) if times else None


def by_iteration(ranks: list[dict[str, Any]]) -> list[float]:
    return [max(each) for each in zip(*(rank["times_ms"] for rank in ranks), strict=False)]


def pairs_of(ranks: list[dict[str, Any]], part: str) -> list[tuple[float, float]]:
    """The median times of each pair of blocks: of what is measured, and of the job's own backend behind it."""
    blocks: list[tuple[str, list[float]]] = []
    before = ""
    for ms, label in zip(by_iteration(ranks), ranks[0]["runs"] if ranks else [], strict=False):
        if label in (part, part + OWN):
            if label != before:
                blocks.append((label, []))
            blocks[-1][1].append(ms)
        before = label
    turns = zip(blocks[::2], blocks[1::2], strict=False)
    return [(median(some), median(others)) for (name, some), (own, others) in turns if name == part and own != part]


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
    row: Row = {"case": f"{model} 2x{args.ranks} {args.uplink}"}
    backend = "nccl" if args.device == "cuda" else "cpu"
    same = model.removesuffix(EARLY)
    row["nccl_ms"] = medians_ms(told(where / "alone" / backend, same) or told(where / "alone", same))
    row["gloo_ms"] = medians_ms(told(where / "alone" / "gloo", same))
    ran = told(where / model, model)
    step = recorded(where / model, model)
    found, identity, hooked = (pairs_of(ran, part) for part in PARTS)
    row["own_ms"] = median(own for _, own in found) if found else medians_ms(ran, "own")
    row["plan_ms"] = median(plan for plan, _ in found) if found else None
    row["predicted_ms"] = ran[0].get("predicted_us", 0.0) / 1e3 or None if ran else None
    row["pairs"] = len(found)
    row["gain"] = median(own / plan for plan, own in found) if found else None
    row["low"], row["high"] = interval([own / plan for plan, own in found]) if found else (None, None)
    row["least_ms"] = least = least_ms(step, args.ranks, args.uplink) if step is not None else None
    row["allows"] = row["own_ms"] / least if least and row["own_ms"] else None
    for name, pairs in (("identity", identity), ("recording", hooked)):
        ratios = [100 * (some / own - 1) for some, own in pairs]
        row[f"{name}_percent"] = median(ratios) if ratios else None
        row[f"{name}_low"], row[f"{name}_high"] = interval(ratios) if ratios else (None, None)
    row["losses_off"] = losses_off(ran)
    return row | (traced(step, where / "alone", same) if args.traces and step is not None else {})


def traced(step: Any, alone: Path, model: str) -> Row:
    """What a recording and a trace of PyTorch's profiler say of the same step: compute, bytes and times of calls."""
    from stretto.workload import kineto

    folders = [path for path in alone.glob(f"**/{model}.traces") if any(path.iterdir())]
    if not folders:
        return {}
    row: Row = {}
    for name, seen in (("recorded", step), ("traced", kineto.read(folders[0]))):
        compute_us = [0.0] * seen.num_ranks
        for op in seen.ops:
            for at, rank in enumerate(op.ranks or range(seen.num_ranks) if not op.is_comm else ()):
                compute_us[rank] += op.durations_us[at] if op.durations_us else op.duration_us
        row[f"{name}_calls"] = len(seen.comm_ops)
        row[f"{name}_mb"] = sum(op.nbytes for op in seen.comm_ops) / 1e6
        row[f"{name}_compute_ms"] = max(compute_us) / 1e3
        row[f"{name}_calls_ms"] = sum(op.duration_us for op in seen.comm_ops) / 1e3
    return row


def main() -> None:
    """All cases that were asked for."""
    parser = common_options(__doc__)
    parser.add_argument("--cases", default=",".join(MODELS), help="models, separated by commas")
    parser.add_argument("--ranks", type=int, default=2, help="of each host")
    parser.add_argument("--uplink", default="3gbit")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--budget", type=float, default=1.0, help="seconds for the planner")
    parser.add_argument("--limit", type=float, default=75.0, help="seconds for each case")
    parser.add_argument("--limit-alone", type=float, default=100.0, help="seconds for the scripts by themselves")
    parser.add_argument("--total", type=float, default=1e6, help="seconds for all cases under `stretto run`")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", choices=("alone", "run"), help="the scripts by themselves, or not those")
    parser.add_argument("--traces", action="store_true", help="record with PyTorch's profiler, too, and compare")
    parser.add_argument("--show", action="store_true", help="run nothing, make the table of what is in --keep")
    parser.add_argument("--keep", type=Path, help="leave logs and times there")
    args = parser.parse_args()
    if not args.show:
        require_gpu(args.device)
    args.pairs = 1 if args.quick else args.pairs
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with tempfile.TemporaryDirectory() as name:
        where = (args.keep or Path(name)).resolve() / f"2x{args.ranks}"
        where.mkdir(parents=True, exist_ok=True)
        if args.only != "run" and not args.show:
            run_alone(args, where)
        if args.show or args.only == "alone":
            rows = [case(model, where, args) for model in args.cases.split(",")]
        else:
            rows = run_cases(args, where)
    finish(rows, args, title="Unchanged jobs on GPUs")


if __name__ == "__main__":
    main()
