# SPDX-License-Identifier: Apache-2.0
"""A job of real ranks under a real controller that is killed again and again: ``faults_job.py FOLDER RANKS``.

This process forks everything, so that PyTorch is loaded once and no process inherits a thread of gRPC's.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from toy_job import ToyPlane, maximum_over, noisy, planner, toy_cluster, toy_workload

from stretto.control.agent import Agent, exchange_over
from stretto.control.controller import Controller
from stretto.control.messages import Commit, Prepare, RankState, Reply
from stretto.control.transport import ControllerConnection
from stretto.errors import StrettoError

FORK = multiprocessing.get_context("fork")
TOKEN = "0123456789abcdef0123456789abcdef"
EVERY_S = 0.02
LIMIT_S = 600.0

KILLS: list[tuple[str, bool]] = [
    ("first message", True), ("gathered", True), ("prepare 1", True), ("prepare 2", False), ("vote 1", True),
    ("all voted", False), ("commit 1", True), ("commit 2", False), ("active", True), ("", True),
]  # fmt: skip
"""When the controller kills itself, and whether the next one finds its number file; the last one lives."""


class Mortal(Controller):
    """A controller that dies of SIGKILL when something happens for the n-th time, before its reply is sent."""

    def __init__(self, dies: str, **more: Any) -> None:
        super().__init__(**more)
        self.dies = dies
        self.counts: dict[str, int] = {}

    def exchange(self, state: RankState) -> Reply:
        self._see("first message")
        reply = super().exchange(state)
        job = self._jobs[state.job].job
        if job.complete:
            self._see("gathered")
        if isinstance(reply.order, Prepare):
            self._see("prepare")
        if isinstance(reply.order, Commit):
            self._see("commit")
        voted = [view.ballot for view in job.heard if view.ballot is not None and view.ballot.plan == job.proposal]
        # Votes on plans that this controller gave out itself.
        if voted and self._jobs[state.job].body_of(voted[0].plan.hash):
            self._see("vote")
            if len(voted) == len(job.ranks):
                self._see("all voted")
        if job.phase == "active":
            self._see("active")
        return reply

    def _see(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1
        if self.dies in (what, f"{what} {self.counts[what]}"):
            os.kill(os.getpid(), signal.SIGKILL)


def control(folder: Path, name: str, dies: str, other_model: bool = False) -> None:
    """One life of a controller."""
    running = Mortal(dies, memory=folder / "state.json", start=planner(name, other_model=other_model))
    server = running.serve(f"unix:{folder}/socket", token=TOKEN)
    time.sleep(LIMIT_S)
    server.close()


def train(folder: Path, rank: int, ranks: int, epoch: int, seed: int, dies_at: int) -> None:
    """One rank: trains until all are told to stop, whatever happens to the controller."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet{epoch}", rank=rank, world_size=ranks)
    plane = ToyPlane(maximum_over(dist, torch))
    log: dict[str, int] = {}
    link = exchange_over(ControllerConnection(f"unix:{folder}/socket", token=TOKEN))
    agent = Agent(
        plane, noisy(link, seed + rank, log) if seed else link, job="toy", epoch=epoch, rank=rank, size=ranks,
        every_s=EVERY_S,
    )  # fmt: skip
    agent.start()
    agent.captured(toy_workload(ranks), toy_cluster(ranks))
    gradients, stop = torch.ones(1024), torch.zeros(1)
    lost = ""
    try:
        while not stop.item():
            gradients.fill_(1.0)
            dist.all_reduce(gradients)
            assert gradients[0].item() == ranks
            plane.iteration()
            time.sleep(0.001)
            stop.fill_(float((folder / f"stop{epoch}").exists()))
            dist.all_reduce(stop)
            if len(plane.ran) == dies_at:
                os.kill(os.getpid(), signal.SIGKILL)
            report = {
                "ran": plane.ran[-1], "iterations": len(plane.ran), "voted": agent.side.ballot is not None,
            }  # fmt: skip
            if len(plane.ran) % 50 == 0 or stop.item():
                write(folder / f"now{epoch}.{rank}", report)
    except RuntimeError as error:
        lost = str(error)
    agent.stop()
    ballot = agent.side.ballot
    write(
        folder / f"end{epoch}.{rank}",
        {
            "plans": sorted(set(plane.ran)), "ran": plane.ran, "iterations": len(plane.ran), "lost": lost, "noise": log,
            "vote": [ballot.plan.number, ballot.yes, ballot.why] if ballot is not None else None,
        },
    )  # fmt: skip
    os._exit(0)


def write(path: Path, value: object) -> None:
    part = path.with_name(f"{path.name}.part")
    part.write_text(json.dumps(value))
    part.rename(path)


def read(path: Path) -> Any:
    return json.loads(path.read_text()) if path.exists() else None


def wait_for(condition: Callable[[], Any], what: str, deadline: float) -> Any:
    while not (found := condition()):
        if time.monotonic() > deadline:
            raise StrettoError(f"never: {what}")
        time.sleep(0.01)
    return found


def start_ranks(folder: Path, ranks: int, epoch: int, seed: int, dies_at: int = 0) -> list[Any]:
    processes = [
        FORK.Process(target=train, args=(folder, rank, ranks, epoch, seed, dies_at if rank == ranks - 1 else 0))
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    return processes


def main(folder: Path, ranks: int) -> None:
    """Three jobs: a controller killed in every state on a noisy line; a rank killed; plans for another model."""
    deadline = time.monotonic() + LIMIT_S
    alive: list[Any] = []
    try:
        # 1. The controller dies in every state of the protocol, half of the times without its number file.
        alive += (job := start_ranks(folder, ranks, 1, seed=7))
        killed = []
        for number, (dies, remembers) in enumerate(KILLS):
            if not remembers:
                (folder / "state.json").unlink(missing_ok=True)
            life = FORK.Process(target=control, args=(folder, f"life{number}", dies))
            life.start()
            alive.append(life)
            if dies:
                life.join(max(deadline - time.monotonic(), 0.1))
                killed.append([dies, life.exitcode])
        before = {rank: read(folder / f"now1.{rank}") for rank in range(ranks)}
        wait_for(lambda: (now := read(folder / "now1.0")) and now["ran"], "a plan runs", deadline)
        # 2. Without any controller training goes on, and ends.
        life.kill()
        life.join()
        at = read(folder / "now1.0")["iterations"]
        wait_for(lambda: read(folder / "now1.0")["iterations"] > at + 100, "goes on", deadline)
        (folder / "stop1").touch()
        for process in job:
            process.join(max(deadline - time.monotonic(), 0.1))
        first = [read(folder / f"end1.{rank}") for rank in range(ranks)]
        # 3. A rank dies: the others end in bounded time; all are started again under the same controller.
        life = FORK.Process(target=control, args=(folder, "again", ""))
        life.start()
        alive.append(life)
        alive += (job := start_ranks(folder, ranks, 2, seed=0, dies_at=200))
        for process in job:
            process.join(max(deadline - time.monotonic(), 0.1))
        second = [read(folder / f"end2.{rank}") for rank in range(ranks)]
        alive += (job := start_ranks(folder, ranks, 3, seed=0))
        wait_for(lambda: (now := read(folder / "now3.0")) and now["ran"], "a plan runs again", deadline)
        (folder / "stop3").touch()
        for process in job:
            process.join(max(deadline - time.monotonic(), 0.1))
        third = [read(folder / f"end3.{rank}") for rank in range(ranks)]
        # 4. Plans for another model.
        life.kill()
        life.join()
        life = FORK.Process(target=control, args=(folder, "wrong", "", True))
        life.start()
        alive.append(life)
        alive += (job := start_ranks(folder, ranks, 4, seed=0))
        now4 = [folder / f"now4.{rank}" for rank in range(ranks)]
        wait_for(lambda: all((now := read(path)) and now["voted"] for path in now4), "votes", deadline)
        at = read(folder / "now4.0")["iterations"]
        wait_for(lambda: read(folder / "now4.0")["iterations"] > at + 300, "trains on", deadline)
        (folder / "stop4").touch()
        for process in job:
            process.join(max(deadline - time.monotonic(), 0.1))
        fourth = [read(folder / f"end4.{rank}") for rank in range(ranks)]
        report = {"killed": killed, "before": before, "first": first, "second": second, "third": third}
        write(folder / "report", {**report, "fourth": fourth})
    finally:
        for process in alive:
            if process.exitcode is None:
                process.kill()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
