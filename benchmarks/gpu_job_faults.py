# SPDX-License-Identifier: Apache-2.0
"""What happens to an unchanged NCCL job when something ends: its controller, most of a link, one of its ranks.

Two hosts of two ranks in a lab, under the controller of `stretto run`. The first start gets a plan; then its controller
is killed, then the uplink of one host loses most of its rate. Gradients are rounded so that sums are the same in every
order: losses must be those of one process, bit for bit (`loss_off`), and all ranks run the same plan in each iteration.
The second start begins with the plan that the first has left (`seconds` until it is active); then a rank is killed, and
`seconds` are those until the hang is named. `--device cpu` does the same on gloo, to try it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from common import Row, common_options, finish, require_gpu

from stretto.control import inject_folder
from stretto.control.controller_process import ControllerProcess
from stretto.control.messages import JobStatus, Status, StatusRequest, decode, encode
from stretto.control.transport import STATUS, ControllerConnection, read_token
from stretto.errors import StrettoError
from stretto.lab import Lab

RANK = Path(__file__).with_name("enforcer_run_rank.py")
VICTIM = 3
TICK_S, ASK_S = 0.1, 2.0
SETTLED = 30
"""Iterations of which times are read, before and after."""


class Controlled:
    """A controller in a process of its own, as `stretto run` has one, and the job that it looks after."""

    def __init__(self, lab: Lab, folder: Path, plans: Path, args: Any) -> None:
        (folder / "control").mkdir(mode=0o700)
        plans.mkdir(mode=0o700, exist_ok=True)
        self.process = ControllerProcess(folder / "control", args.budget, self._say, plans)
        self._link = ControllerConnection(self.process.address, token=read_token(self.process.token_path))
        self.hangs: list[tuple[float, str]] = []
        path = [str(inject_folder()), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {
            "PYTHONPATH": os.pathsep.join(path), "STRETTO_CONTROLLER": self.process.address, "STRETTO_JOB": "faults",
            "STRETTO_TOKEN_FILE": str(self.process.token_path), "BACKEND": "gloo" if args.device == "cpu" else "nccl",
            "NCCL_SOCKET_IFNAME": "eth", "NCCL_MAX_NCHANNELS": "2", "CUDA_DEVICE_MAX_CONNECTIONS": "8",
        } | ({"STRETTO_CARRIER": "gloo"} if args.device == "cpu" else {})  # fmt: skip
        self._until = time.monotonic() + args.limit
        self.job = lab.start([sys.executable, str(RANK), str(folder)], env=environment, on_line=self._heard)
        self.result: Any = None
        self._reader = threading.Thread(target=self._read, args=(args.limit,))
        self._reader.start()

    def _read(self, limit_s: float) -> None:
        self.result = self.job.wait(limit_s, keep_going=True)

    def _say(self, text: str) -> None:
        print(f"controller: {text}", file=sys.stderr, flush=True)

    def _heard(self, rank: int, stream: str, line: str) -> None:
        print(f"{rank}: {line}", file=sys.stderr, flush=True)
        if "hang:" in line:
            self.hangs.append((time.monotonic(), line.partition("hang:")[2].strip()))

    def status(self) -> JobStatus | None:
        """The job, as the controller sees it now; None while there is none to ask."""
        try:
            said = decode(self._link.call(STATUS, encode(StatusRequest()), timeout_s=ASK_S), Status)
        except StrettoError:
            return None
        return said.jobs[0] if said.jobs else None

    def until(self, what: str, holds: Callable[[JobStatus], bool], limit_s: float = 1e6) -> float | None:
        """The seconds until the job is so far; None where it does not come so far."""
        begun = time.monotonic()
        while time.monotonic() < min(self._until, begun + limit_s) and self.job.running:
            now = self.status()
            if now is not None and holds(now):
                return time.monotonic() - begun
            time.sleep(TICK_S)
        print(f"{what}: did not happen", file=sys.stderr, flush=True)
        return None

    def named(self, begun: float, limit_s: float) -> tuple[float | None, str]:
        """The seconds until a hang was named after a moment, and its words."""
        while time.monotonic() < begun + limit_s:
            for at, text in self.hangs:
                if at > begun:
                    return at - begun, text
            time.sleep(TICK_S)
        return None, ""

    def close(self, limit_s: float = 60.0) -> Any:
        """Wait for the ranks, and end what is left."""
        self._reader.join(limit_s)
        for rank in self.job.running:
            self.job.signal(rank, signal.SIGKILL)
        self._reader.join()
        self._link.close()
        self.process.close()
        return self.result


def iteration(now: JobStatus) -> int:
    """That all ranks have reached."""
    return min((rank.iteration for rank in now.ranks), default=0)


def go_on(run: Controlled, more: int = SETTLED) -> float | None:
    """Let the job run some iterations; the seconds of it."""
    first: list[int] = []

    def there(now: JobStatus) -> bool:
        first.append(iteration(now))
        return first[-1] >= first[0] + more

    return run.until("more iterations", there)


def first_start(lab: Lab, folder: Path, plans: Path, args: Any) -> list[Row]:
    """A plan, then no controller, then a link that is cut."""
    run = Controlled(lab, folder, plans, args)
    rows: list[Row] = []
    try:
        planned = run.until("a plan", lambda now: now.plan.number > 0)
        rows.append({"fault": "none", "what": "a plan is active", "seconds": planned})
        go_on(run)
        before = run.status()
        os.kill(run.process._process.pid, signal.SIGKILL)
        again = run.until("a second controller", lambda now: now.plan.number > 0)
        went_on = go_on(run)
        rows.append({"fault": "controller killed", "what": "the next one knows the plan", "seconds": again})
        number = before.plan.number if before is not None else 0
        lab.reshape("eth", 1, args.cut)
        changed = run.until("another plan", lambda now: now.plan.number > number, args.patience)
        go_on(run)
        now = run.status()
        about = now.about if now is not None else ""
        cut = f"uplink {args.uplink} to {args.cut}"
        rows.append({"fault": cut, "what": f"another plan: {about}", "seconds": changed})
        if went_on is None:
            rows.append({"fault": "controller killed", "what": "training did not go on"})
    finally:
        (folder / "stop").touch()
        done = run.close()
    told = [json.loads(path.read_text()) for path in sorted(folder.glob("rank*.json"))]
    return [*rows, judged(told, done)]


def judged(told: list[dict[str, Any]], done: Any) -> Row:
    """Whether the job ended well, with the right losses, and what its iterations took under each plan."""
    row: Row = {"fault": "both, judged", "what": f"exit codes {done.returncodes}"}
    if len(told) < len(done.returncodes):
        return row
    row["loss_off"] = max(one["loss_off"] for one in told)
    row["same_plans"] = all(one["plans"] == told[0]["plans"] for one in told)
    times = [max(each) for each in zip(*(one["times_us"] for one in told), strict=True)]
    plans = told[0]["plans"]
    for number in sorted(set(plans)):
        row["what"] += f"; plan {number}: {median(t for t, p in zip(times, plans, strict=True) if p == number):.0f} us"
    return row


def second_start(lab: Lab, folder: Path, plans: Path, args: Any) -> list[Row]:
    """The plan of the first start, then a rank is killed."""
    run = Controlled(lab, folder, plans, args)
    try:
        planned = run.until("the kept plan", lambda now: now.plan.number > 0)
        now = run.status()
        kept = "kept" if now is not None and now.recalled else "new"
        rows: list[Row] = [{"fault": "started again", "what": f"a {kept} plan is active", "seconds": planned}]
        go_on(run)
        begun = time.monotonic()
        run.job.signal(VICTIM, signal.SIGKILL)
        named, text = run.named(begun, 15.0)
        rows.append({"fault": f"rank {VICTIM} killed", "what": text, "seconds": named})
    finally:
        run.close(0.0)
    return rows


def main() -> None:
    """Both starts, one after the other."""
    parser = common_options(__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--uplink", default="3gbit")
    parser.add_argument("--cut", default="600mbit", help="the rate of one host's uplink afterwards")
    parser.add_argument("--budget", type=float, default=1.0, help="seconds for the planner")
    parser.add_argument("--limit", type=float, default=90.0, help="seconds for each start")
    parser.add_argument("--patience", type=float, default=25.0, help="seconds for another plan after the cut")
    args = parser.parse_args()
    require_gpu(args.device)
    rows: list[Row] = []
    # A plan is kept for the hosts that it was made on: both starts are in one lab.
    with (
        tempfile.TemporaryDirectory() as name,
        Lab(hosts=2, ranks_per_host=2, uplinks={"eth": args.uplink}) as lab,
    ):
        for number, start in enumerate((first_start, second_start)):
            folder = Path(name) / str(number)
            folder.mkdir()
            lab.reshape("eth", 1, args.uplink)
            rows += start(lab, folder, Path(name) / "plans", args)
    finish(rows, args, title="An unchanged job that is disturbed")


if __name__ == "__main__":
    main()
