# SPDX-License-Identifier: Apache-2.0
"""Real ranks, a real controller and a plan that is slower than plain order: ``slower_job.py FOLDER``.

The planner promises that many small pieces are fast. What the enforcer measures says otherwise: the controller has to
bring the application's own order back, for all ranks at once.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from enforcer_plans import cluster_of, join, op_plan, plan_of, step_of
from faults_job import read, write
from toy_job import Ready

import stretto.torch
from stretto.control.agent import Agent, exchange_over
from stretto.control.controller import Controller
from stretto.control.messages import encode_plan
from stretto.control.transport import ControllerConnection
from stretto.control.worker import PlanReply, PlanRequest
from stretto.planner.algebra.rewrites import rewrites
from stretto.planner.plan import PLAIN, Plan
from stretto.runtime.enforcer.enforcer import Enforcer
from stretto.runtime.enforcer.report import EnforcerReport

FORK = multiprocessing.get_context("fork")
TOKEN = "0123456789abcdef0123456789abcdef"
COUNT = 1 << 14
SLOWER = 1.5
"""How many times longer than the longest plain iteration each iteration of the slow plan pauses."""
RANKS = 2
STEP = step_of([("all_reduce", 4.0 * COUNT, 0)], RANKS)
CLUSTER = cluster_of(1)
LIMIT_S = 500.0
LONG = 150
"""Iterations in which nothing may change any more."""


def plan(pieces: int, name: str) -> Plan:
    """The sum in so many pieces, one after the other."""
    (op,) = STEP.comm_ops
    ways = {len(way.stages): way for way in rewrites(op, STEP.groups_of(op), CLUSTER) if "ring" not in way.steps}
    made = op_plan(op, ways[pieces], seqs=range(pieces), channels=[("rdma",)])
    return plan_of(STEP, CLUSTER, [made], name=name)


class Planner:
    """Always the same two answers; counts what it was asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def start(self, ask: PlanRequest) -> Ready:
        """Plain order where that is asked for, else the slow plan, with a false promise."""
        self.asked.append("plain" if ask.plain else "again" if ask.current is not None else "first")
        found = plan(1, PLAIN) if ask.plain else plan(16, "false")
        promise = PlanReply(body=encode_plan(found), hash=found.hash, iteration_us=100.0, plain_us=200.0)
        # Asked again, it has nothing better than what runs.
        return Ready(promise if ask.current is None or ask.plain else PlanReply(
            body=promise.body, hash=promise.hash, iteration_us=100.0, plain_us=200.0, current_us=100.0
        ))  # fmt: skip


class UntimedMotifs:
    """A rank's enforcer that reports no times of single motifs.

    On a busy machine these vary so much that the controller asks for other costs, not for the application's order.
    """

    def __init__(self, enforcer: Enforcer) -> None:
        self.prepare, self.commit, self.discard = enforcer.prepare, enforcer.commit, enforcer.discard
        self._enforcer = enforcer

    def report(self) -> EnforcerReport:
        """The enforcer's report without motifs."""
        return replace(self._enforcer.report(), motifs=())


def train(folder: Path, rank: int) -> None:
    """One rank: sums of whole numbers until the file `stop` is there; tells the plan of every iteration.

    Under the slow plan every iteration pauses for longer than any plain one took: whatever else the machine does, its
    median is above the plain one.
    """
    torch.set_num_threads(1)
    join(folder, rank, RANKS)
    enforcer = Enforcer(STEP, every=4, cluster=CLUSTER)
    agent = Agent(
        UntimedMotifs(enforcer),
        exchange_over(ControllerConnection(f"unix:{folder}/socket", token=TOKEN)),
        job="slow",
        epoch=1,
        rank=rank,
        size=RANKS,
        every_s=0.02,
    )
    agent.start()
    ran: list[int] = []
    stop = torch.zeros(1)
    wrong = 0
    begin = last = time.monotonic()
    longest_s = 0.0
    while not stop.item():
        if len(ran) == 60:
            # Plain order is measured first.
            agent.captured(STEP, CLUSTER)
        ran.append(enforcer.report().number)
        if ran[-1] == 1:
            time.sleep(SLOWER * longest_s)
        gradients = torch.full((COUNT,), float(rank + len(ran)))
        dist.all_reduce(gradients)
        wrong += int(gradients[-1].item() != 2 * len(ran) + 1)
        stretto.torch.step()
        if not ran[-1]:
            longest_s, last = max(longest_s, time.monotonic() - last), time.monotonic()
        if len(ran) % 10 == 0:
            # Between two iterations, and no part of the step. No rank leaves alone: the others would wait for it.
            stop.fill_(float((folder / "stop").exists() or time.monotonic() - begin > LIMIT_S))
            dist.all_reduce(stop, dist.ReduceOp.MAX)
            write(folder / f"now{rank}", len(ran))
    report = enforcer.report()
    agent.stop()
    (folder / f"end{rank}.json").write_text(
        json.dumps({"ran": ran, "wrong": wrong, "number": report.number, "fell_back": report.fell_back})
    )
    dist.barrier()
    os._exit(0)


def main(folder: Path) -> None:
    """Wait until the application's own order is back, let it run on, and ask for the status as a user would."""
    ranks = [FORK.Process(target=train, args=(folder, rank)) for rank in range(RANKS)]
    for process in ranks:
        process.start()
    planner = Planner()
    controller = Controller(start=planner.start)
    (folder / "token").write_text(TOKEN)
    (folder / "token").chmod(0o600)
    server = controller.serve(f"unix:{folder}/socket", token=TOKEN)
    told: dict[str, Any] = {"seen": []}
    try:
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline:
            jobs = controller.status().jobs
            about = jobs[0].about if jobs else ""
            if about and (not told["seen"] or told["seen"][-1] != about):
                told["seen"].append(about)
            if "own order" in about:
                break
            time.sleep(0.02)
        at = read(folder / "now0") or 0
        while (read(folder / "now0") or 0) < at + LONG and time.monotonic() < deadline:
            time.sleep(0.02)
        status = controller.status().jobs[0]
        told |= {
            "asked": planner.asked, "plan": status.plan.number, "name": status.plan_name, "phase": status.phase,
            "said": subprocess.run(
                [sys.executable, "-m", "stretto", "status", "--address", f"unix:{folder}/socket", "--token-file",
                 str(folder / "token")],
                capture_output=True, text=True, timeout=300, check=False,
            ).stdout,
        }  # fmt: skip
        (folder / "stop").touch()
        for rank, process in enumerate(ranks):
            process.join(LIMIT_S)
            assert process.exitcode == 0, f"rank {rank} ended with {process.exitcode}; the controller said {told}"
        told["ranks"] = [json.loads((folder / f"end{rank}.json").read_text()) for rank in range(RANKS)]
        (folder / "report").write_text(json.dumps(told))
    finally:
        for process in ranks:
            if process.exitcode is None:
                process.kill()
        server.close()
        controller.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
