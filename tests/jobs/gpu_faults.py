# SPDX-License-Identifier: Apache-2.0
"""What becomes of an unchanged job under an active plan when something is lost: ``gpu_faults.py FAULT FOLDER``.

FAULT is ``controller`` (killed), ``rank`` (rank 2 killed), ``link`` (an uplink slowed) or ``none`` (the next
start of a job that has left its plan). Two hosts of two ranks in the lab train the GPT of benchmarks/gpu_jobs_rank.py
with BACKEND=nccl, or cpu (gloo on CPUs, to try this). The plan is kept in the folder: a second call begins with it.
Prints one line of JSON: exit code, seconds from the fault to the end, what `stretto run` said, iterations and losses.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from stretto.lab import Lab

ROOT = Path(__file__).parents[2]
RANK = ROOT / "benchmarks" / "gpu_jobs_rank.py"
STEPS, UPLINK, SLOW = int(os.environ.get("STEPS", "240")), os.environ.get("UPLINK", "4gbit"), "1gbit"
LIMIT_S = float(os.environ.get("LIMIT", "60"))
MINE = "FAULTS_JOB"
"""A variable by which the processes of this job are known."""
FAULTS = ("controller", "rank", "link", "none")


def processes(word: str, *variables: str) -> list[int]:
    """Processes of this job with a word in their command, and variables in their environment."""
    wanted = {variable.encode() for variable in (*variables, f"{MINE}={os.environ[MINE]}")}
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            command = (entry / "cmdline").read_bytes().decode(errors="replace").replace("\0", " ")
            environment = set((entry / "environ").read_bytes().split(b"\0"))
        except OSError:
            continue
        if word in command and wanted <= environment:
            found.append(int(entry.name))
    return found


def plan_is_active() -> bool:
    """Asked of the controller of the job around this process."""
    words = [sys.executable, "-m", "stretto", "status", "--json", "-"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    try:
        return any(job["phase"] == "active" for job in json.loads(done.stdout)["jobs"])
    except (ValueError, KeyError, TypeError):
        return False


def drive(fault: str, folder: Path) -> int:
    """Inside of `stretto run`: the lab, its ranks, and the fault once a plan is active."""
    with Lab(hosts=2, ranks_per_host=2, uplinks={"eth": UPLINK}) as lab:

        def disturb() -> None:
            while not plan_is_active():
                time.sleep(1.0)
            time.sleep(2.0)
            (folder / "fault").write_text(str(time.time()))
            if fault == "link":
                lab.reshape("eth", 1, SLOW)
            elif fault != "none":
                found = processes("controller_process") if fault == "controller" else processes(str(RANK), "RANK=2")
                for pid in found:
                    os.kill(pid, signal.SIGKILL)

        threading.Thread(target=disturb, daemon=True).start()
        done = lab.run(
            [sys.executable, str(RANK), "gpt-ddp", str(folder), str(STEPS)], timeout_s=LIMIT_S,
            keep_going=True, on_line=lambda rank, _, line: print(f"[{rank}] {line}", file=sys.stderr),
        )  # fmt: skip
    return done.exit_code


def main() -> None:
    """Start the job under `stretto run`, and judge what became of it."""
    fault, folder = sys.argv[-2], Path(sys.argv[-1])
    if fault not in FAULTS:
        sys.exit(f"FAULT: must be one of {', '.join(FAULTS)}, not {fault}")
    if sys.argv[1] == "--inside":
        sys.exit(drive(fault, folder))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "plans").mkdir(mode=0o700, exist_ok=True)
    for old in [*folder.glob("gpt-ddp-*.json"), folder / "fault"]:
        old.unlink(missing_ok=True)
    shared = {
        "OMP_NUM_THREADS": "1", "NCCL_SOCKET_IFNAME": "eth", "NCCL_MAX_NCHANNELS": "2",
        "CUDA_DEVICE_MAX_CONNECTIONS": "16", MINE: f"{folder.resolve()} {os.getpid()}",
    }  # fmt: skip
    words = [sys.executable, "-m", "stretto", "run", "--budget", "3", "--plans", str(folder / "plans"), "--"]
    begun, log = time.time(), folder / "run.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*words, sys.executable, __file__, "--inside", fault, str(folder)], env=os.environ | shared,
            stdout=out, stderr=out, start_new_session=True,
        )  # fmt: skip
        try:
            code: int | str = process.wait(LIMIT_S + 20.0)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            code = "did not end"
    at = folder / "fault"
    lines = log.read_text(errors="replace").splitlines()
    said = [line for line in lines if "stretto:" in line and "status --address" not in line]
    told: dict[str, Any] = {"fault": fault, "code": code, "whole_s": round(time.time() - begun, 1)}
    told["after_s"] = round(time.time() - float(at.read_text()), 1) if at.exists() else None
    ranks = [json.loads(path.read_text()) for path in sorted(folder.glob("gpt-ddp-*.json"))]
    told["iterations"] = [len(rank["losses"]) for rank in ranks]
    told["last_losses"] = [rank["losses"][-1] for rank in ranks]
    told["said"] = [line[-300:] for line in said][-14:]
    print(json.dumps(told))


if __name__ == "__main__":
    main()
