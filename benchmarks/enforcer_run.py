# SPDX-License-Identifier: Apache-2.0
"""The cases of benchmarks/enforcer.py in which a controller looks after the job, as under `stretto run`."""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from common import Row

from stretto.control import inject_folder
from stretto.control.controller import Controller
from stretto.control.messages import JobStatus
from stretto.control.transport import make_token
from stretto.lab import Lab

HERE = Path(__file__).parent
UNCHANGED = HERE.parent / "examples" / "train_unchanged.py"
LIMIT_S = 280.0
SETTLED = 40
"""Iterations after a change of plans until its times count: the window of a report is 32."""
CUT_SETTLED = 3
"""Iterations after the cut of a link until times count."""


@contextmanager
def controlled(folder: Path) -> Iterator[tuple[Controller, dict[str, str]]]:
    """A controller, and what makes a job find it."""
    token = make_token(folder / "token")
    controller = Controller(memory=folder / "state.json", budget_s=5.0)
    try:
        server = controller.serve(f"unix:{folder}/socket", token=token)
        try:
            yield (
                controller,
                {
                    "PYTHONPATH": os.pathsep.join(
                        [str(inject_folder()), *filter(None, [os.environ.get("PYTHONPATH")])]
                    ),
                    "STRETTO_CONTROLLER": server.address,
                    "STRETTO_TOKEN_FILE": str(folder / "token"),
                    "STRETTO_JOB": "bench",
                },
            )
        finally:
            server.close()
    finally:
        controller.close()


class Phases:
    """When the controller came how far with the plan after this one, in seconds from now on."""

    def __init__(self, plan: int) -> None:
        self._plan, self._begin = plan, time.monotonic()
        self.seconds: dict[str, float] = {}

    def see(self, now: JobStatus) -> None:
        """Look at a status."""
        voting = max((rank.ballot.plan.number for rank in now.ranks if rank.ballot is not None), default=0)
        held = min((rank.committed.number for rank in now.ranks), default=0)
        reached = {
            "noticed": "planning again" in now.about or "being prepared" in now.about or voting > self._plan,
            "planned": "being prepared" in now.about or voting > self._plan,
            "committed": held > self._plan,
            "active": now.plan.number > self._plan,
        }
        # What was too short to be seen was reached when the next was.
        last = max((at for at, holds in enumerate(reached.values()) if holds), default=-1)
        for name in list(reached)[: last + 1]:
            self.seconds.setdefault(name, time.monotonic() - self._begin)


def until(
    controller: Controller, what: str, holds: Callable[[JobStatus], bool], running: Callable[[], bool],
    phases: Phases | None = None,
) -> None:  # fmt: skip
    """Wait until the job is so far."""
    deadline = time.monotonic() + LIMIT_S
    last = ""
    while time.monotonic() < deadline and running():
        jobs = controller.status().jobs
        last = f"{jobs[0].phase}, {jobs[0].about}, {jobs[0].iteration_us:.0f} us an iteration" if jobs else ""
        if jobs and phases is not None:
            phases.see(jobs[0])
        if jobs and holds(jobs[0]):
            return
        time.sleep(0.03)
    sys.exit(f"{what}: did not happen ({last})")


def unchanged(quick: bool) -> list[Row]:
    """A script that knows nothing of us: on its own gloo, on our backend, and under a plan, all inside one job.

    `alone_us` is the same script in a job of its own without anything of ours, all its iterations and their begin
    included: what `gloo_us` would be if standing in for gloo cost nothing.
    """
    steps = 250 if quick else 400
    with (
        tempfile.TemporaryDirectory() as name,
        Lab(hosts=2, ranks_per_host=2, uplinks={"rdma": "100mbit", "eth": "50mbit"}) as lab,
    ):
        own = [sys.executable, str(UNCHANGED), "--steps"]
        alone = lab.run([*own, "30"], timeout_s=LIMIT_S)
        each_ms = re.search(r"([\d.]+) ms each", alone.outputs[0])
        if each_ms is None:
            sys.exit(f"unchanged: {alone.errors}")
        with controlled(Path(name)) as (controller, environment):
            done = lab.run([*own, str(steps)], env=environment, timeout_s=LIMIT_S)
            if done.failed is not None or done.timed_out:
                sys.exit(f"unchanged: {done.why}")
            job = controller.status().jobs[0]
    return [split_row(job, alone_us=1e3 * float(each_ms[1]))]


def split_row(job: JobStatus, *, alone_us: float) -> Row:
    """What was gained over the unchanged job, with our backend's share and the plan's apart."""
    split = job.split
    row: Row = {"case": "unchanged", "kept": split.kept, "alone_us": alone_us}
    for name, timing in (("gloo", split.unchanged), ("backend", split.backend), ("plan", split.plan)):
        row[f"{name}_us"] = timing.median_us if timing is not None else None
        row[f"{name}_low_us"] = timing.low_us if timing is not None else None
        row[f"{name}_high_us"] = timing.high_us if timing is not None else None
        row[f"{name}_iterations"] = timing.iterations if timing is not None else 0
    return row | {
        "backend_share": split.backend_share, "plan_share": split.plan_share, "gain": split.gain,
        "predicted_backend_us": split.predicted_backend_us, "predicted_plan_us": split.predicted_plan_us,
    }  # fmt: skip


def cut(quick: bool) -> list[Row]:
    """The faster uplink of one host loses four fifths of its rate while training goes on."""
    with (
        tempfile.TemporaryDirectory() as name,
        Lab(hosts=2, ranks_per_host=2, uplinks={"rdma": "50mbit", "eth": "25mbit"}) as lab,
    ):
        folder = Path(name)
        with controlled(folder) as (controller, environment):
            job = lab.start([sys.executable, str(HERE / "enforcer_run_rank.py"), name], env=environment)
            begun = time.monotonic()

            def running() -> bool:
                return time.monotonic() - begun < LIMIT_S

            def settled_from(plan: int) -> Callable[[JobStatus], bool]:
                return lambda now: now.plan.number >= plan and min(r.iteration for r in now.ranks) > SETTLED + plan_at

            plan_at = 0
            until(controller, "the first plan", lambda now: now.plan.number > 0, running)
            plan_at = controller.status().jobs[0].ranks[0].iteration
            until(controller, "the first plan's times", settled_from(1), running)
            first = controller.status().jobs[0]
            phases = Phases(first.plan.number)
            lab.reshape("rdma", 1, "10mbit")
            until(controller, "a new plan", lambda now: now.plan.number > first.plan.number, running, phases)
            newest = first.plan.number
            while (now := controller.status().jobs[0]).plan.number > newest:
                # Until no better one comes for so many iterations.
                newest, plan_at = now.plan.number, now.ranks[0].iteration
                until(controller, "the new plan's times", settled_from(newest), running)
            (folder / "stop").touch()
            done = job.wait(LIMIT_S)
            if done.failed is not None or done.timed_out:
                sys.exit(f"cut: {done.why}")
        told = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(4)]
    return cut_rows(told, first.plan.number, plan_cut=first.ranks[0].iteration, seconds=phases.seconds)


def cut_rows(told: list[dict[str, Any]], plan: int, *, plan_cut: int, seconds: dict[str, float]) -> list[Row]:
    """What iterations took before the cut, after it, and under each new plan; and whether all was well."""
    off = max(one["loss_off"] for one in told)
    if off:
        sys.exit(f"cut: losses are off by {off:g}, and sums were exact")
    plans: list[list[int]] = [one["plans"] for one in told]
    if any(seen != plans[0] for seen in plans) or any(one["own"] != told[0]["own"] for one in told):
        sys.exit("cut: ranks ran different plans in the same iteration")
    times = [max(each) for each in zip(*(one["times_us"] for one in told), strict=True)]
    at = {number: [i for i, seen in enumerate(plans[0]) if seen == number] for number in sorted(set(plans[0]))}
    later = [number for number in at if number > plan]
    phases = {
        "gloo": [i for i in at[0][5:] if told[0]["own"][i]],
        "backend": [i for i in at[0][5:] if not told[0]["own"][i]],
        "stretto": [i for i in at[plan] if i < plan_cut + told[0]["offset"]],
        "stretto, cut": [i for i in at[plan] if i > plan_cut + told[0]["offset"] + CUT_SETTLED],
        **{f"stretto, plan {number}": at[number] for number in later},
    }
    rows: list[Row] = []
    for system, iterations in phases.items():
        us = median(times[i] for i in iterations) if iterations else float("nan")
        first = bool(later) and system == f"stretto, plan {later[0]}"
        rows.append(
            {
                "case": "cut", "system": system, "iteration_us": us, "iterations": len(iterations),
                "plan": plans[0][iterations[-1]] if iterations else None,
                "loss_off": off,
                **{f"{name}_s": round(s, 1) if first else None for name, s in seconds.items()},
            }
        )  # fmt: skip
    return rows


CASES = {"unchanged": unchanged, "cut": cut}
