# SPDX-License-Identifier: Apache-2.0
"""Jobs whose controller, agent or rank is killed, stopped or broken while a plan is active.

``kills_job.py FOLDER [--victims VICTIM,...] [--trials N] [--seed FIRST]`` runs so many trials of each victim, writes a
line of JSON per trial to FOLDER/outcomes, and prints how many were wrong by victim and carrier. Seeds count up, and
carriers (the executor, gloo) alternate for each victim. A trial is right when its list `wrong` is empty. Start it with
``setsid -w``: the end of a shell wakes up stopped processes of the groups that the shell leaves behind.

This process forks everything: PyTorch is loaded once, and no process inherits a thread of gRPC's.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import multiprocessing
import os
import random
import signal
import socket
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from enforcer_plans import cluster_of, join, numbers, step_of, variant_plans
from faults_job import wait_for
from toy_job import Ready

import stretto.torch
from stretto import Workload
from stretto.control.agent import Agent, Exchange, exchange_over
from stretto.control.controller import Controller
from stretto.control.messages import RankState, Reply, decode_captured, encode_plan
from stretto.control.transport import ControllerConnection
from stretto.control.worker import TOOK_TOO_LONG, Planning, PlanReply, PlanRequest
from stretto.runtime.enforcer.enforcer import Enforcer
from stretto.runtime.torch_backend import meeting as backend_meet

FORK = multiprocessing.get_context("fork")
TOKEN = "0123456789abcdef0123456789abcdef"
LARGE, SMALL = 4096, 64
"""Elements of the two sums of an iteration."""
MODULUS = 65521
REPLAN_ITERATIONS = 60
"""After so many iterations under a plan the controller gives out another one."""
ITERATION_PAUSE_S = 0.001
"""A rank sleeps for so long after every iteration."""
REALLY = 10
"""Of so many plans a real planner, where there is one, makes one: it takes longer than all iterations between."""
CALL_TIMEOUT_S, STOPPED_TIMEOUT_S = 120.0, 30.0
"""After so long a call with a rank that does not answer fails; sooner where a rank is stopped."""
LIMIT_S = 400.0
"""What a trial may take on a busy machine."""
LOST = 3
"""Exit code of a rank whose call raised."""
AGENT_FAULTS = ("disconnect", "raise", "hang", "end")
CARRIERS = ("executor", "gloo")
VICTIMS = ("controller-kill", "controller-stop", "agent", "rank-kill", "rank-stop")


def step(ranks: int) -> Workload:
    """The communication of an iteration: two sums that are submitted together."""
    return step_of([("all_reduce", 4.0 * LARGE, 0), ("all_reduce", 4.0 * SMALL, 0)], ranks)


def expected_losses(ranks: int, iterations: int) -> list[int]:
    """What `iterate` gives, computed by one process without any communication."""
    loss, losses = 0, []
    large, small = np.arange(LARGE), np.arange(SMALL)
    for iteration in range(iterations):
        total = 0
        for values, salt in ((large, iteration), (small, loss)):
            total += sum(int(((values * 7 + rank * 13 + salt * 31) % 101).sum()) for rank in range(ranks))
        loss = (31 * loss + total) % MODULUS
        losses.append(loss)
    return losses


def iterate(rank: int, iteration: int, loss: int) -> int:
    """One iteration of whole numbers, which depends on all iterations before it; returns its loss."""
    tensors = [numbers(LARGE, rank, iteration), numbers(SMALL, rank, loss)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for work in works:
        assert work is not None
        work.wait()
    return (31 * loss + sum(int(tensor.sum()) for tensor in tensors)) % MODULUS


class Replaced:
    """A planner that really plans, and another plan in the place of the one that it finds."""

    def __init__(self, planning: Planning, answer: PlanReply) -> None:
        self._planning, self._answer = planning, answer
        self.cancel = planning.cancel

    def poll(self) -> PlanReply | None:
        found = self._planning.poll()
        # On a busy machine a planner at a low priority may be given up; which plan it finds does not matter here.
        assert found is None or found.error in ("", TOOK_TOO_LONG), found.error
        return None if found is None else self._answer


class RestlessController(Controller):
    """A controller that replaces every plan after some iterations by another one."""

    def __init__(
        self,
        memory: Path,
        life: int,
        every: int = REPLAN_ITERATIONS,
        worker: Callable[[PlanRequest], Planning] | None = None,
    ) -> None:
        self._every = every
        self._worker = worker
        self._given = life
        self._due = every
        """The iteration from which the active plan may be replaced."""
        self._number = 0
        super().__init__(memory=memory, seed=life, start=self._plan)

    def _plan(self, ask: PlanRequest) -> Planning:
        workload, cluster = decode_captured(ask.captured)
        plans = variant_plans(workload, cluster, 5)
        self._given += 1
        plan = plans[self._given % len(plans)]
        answer = PlanReply(body=encode_plan(plan), hash=plan.hash, iteration_us=100.0, plain_us=200.0, current_us=200.0)
        if self._worker is not None and self._given % REALLY == 0:
            return Replaced(self._worker(ask), answer)
        return Ready(answer)

    def exchange(self, state: RankState) -> Reply:
        reply = super().exchange(state)
        with self._lock:
            job = self._jobs[state.job]
            iteration = state.report.iteration if state.report is not None else 0
            if state.active.number != self._number:
                self._number = state.active.number
                self._activated(iteration)
            # Without a digest that was planned for, the plan that was due before is still to be made.
            if job.job.phase == "active" and job._planned_for and iteration >= self._due:
                self._due += self._every
                job._refuted.clear()
                job._planned_for = ""
        return reply

    def _activated(self, iteration: int) -> None:
        """A plan has become active: it is to run for so many iterations."""
        self._due = iteration + self._every


def control(folder: Path, life: int) -> None:
    """One life of the controller."""
    running = RestlessController(folder / "state.json", life)
    server = running.serve(f"unix:{folder}/socket", token=TOKEN)
    time.sleep(2 * LIMIT_S)
    server.close()


@dataclass
class AgentFaults:
    """Breaks one rank's agent from the moment when the file `begin` exists, which names the fault, until `end` does."""

    begin: Path
    end: Path
    socket_path: str
    agent: Agent | None = None
    active: str = ""

    def around(self, exchange: Exchange) -> Exchange:
        """An exchange that raises or hangs while the fault is active."""

        def call(state: RankState, timeout_s: float) -> Reply:
            if self.active == "raise":
                raise RuntimeError("a fault of this test")
            while self.active == "hang":
                time.sleep(0.01)
            return exchange(state, timeout_s)

        return call

    def watch(self) -> None:
        """Thread: begins and ends the fault."""
        while not self.begin.exists():
            time.sleep(0.005)
        self.active = self.begin.read_text()
        assert self.agent is not None
        while not self.end.exists():
            if self.active == "disconnect":
                self._disconnect()
            thread = self.agent._thread.ident
            if self.active == "end" and thread is not None and self.agent._thread.is_alive():
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(SystemExit))
            time.sleep(0.01)
        self.active = ""

    def _disconnect(self) -> None:
        """Shut down every connection of this process to the controller's socket."""
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                    with socket.socket(fileno=os.dup(int(name))) as found:
                        if found.family == socket.AF_UNIX and self.socket_path in str(found.getpeername()):
                            found.shutdown(socket.SHUT_RDWR)


def train(
    folder: Path, rank: int, ranks: int, carrier: str, timeout_s: float, pause_s: float = ITERATION_PAUSE_S
) -> None:
    """One rank: iterates until the file `stop` exists, and logs the plan and the loss of every iteration."""
    torch.set_num_threads(1)
    # `join` lets ranks believe that they are on two hosts; their processes are on one, where the dead can be seen.
    backend_meet._space = lambda: "one host"
    join(folder, rank, ranks, timeout=timedelta(seconds=timeout_s))
    cluster = cluster_of(ranks // 2)
    enforcer = Enforcer(step(ranks), every=4, cluster=cluster, carrier=carrier)
    faults = AgentFaults(folder / f"fault{rank}", folder / "healed", f"{folder}/socket")
    agent = Agent(
        enforcer,
        faults.around(exchange_over(ControllerConnection(f"unix:{folder}/socket", token=TOKEN))),
        job="kills",
        epoch=1,
        rank=rank,
        size=ranks,
        every_s=0.02,
    )
    faults.agent = agent
    threading.Thread(target=faults.watch, daemon=True).start()
    agent.start()
    agent.captured(step(ranks), cluster)
    log = os.open(folder / f"log{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    loss, iteration, stop, code = 0, 0, torch.zeros(1), 0
    said = ""
    try:
        while not stop.item():
            report = enforcer.report()
            loss = iterate(rank, iteration, loss)
            os.write(log, f"{iteration} {report.number}.{report.hash} {loss}\n".encode())
            stretto.torch.step()
            iteration += 1
            if iteration % 10 == 0:
                stop.fill_(float((folder / "stop").exists()))
                dist.all_reduce(stop, dist.ReduceOp.MAX)
            time.sleep(pause_s)
    except Exception as error:
        said, code = f"{type(error).__name__}: {error}", LOST
    raised_at = time.monotonic()
    agent.stop()
    report = enforcer.report()
    end = {"said": said, "raised_at": raised_at, "fell_back": report.fell_back, "iterations": iteration}
    (folder / f"end{rank}").write_text(json.dumps(end))
    if not code:
        enforcer.close()
        dist.destroy_process_group()
    sys.exit(code)


def read_log(folder: Path, rank: int) -> list[tuple[int, str, int]]:
    """Number, plan and loss of the iterations that a rank has ended."""
    path = folder / f"log{rank}"
    if not path.exists():
        return []
    rows = [line.split() for line in path.read_text().split("\n")[:-1]]
    return [(int(iteration), plan, int(loss)) for iteration, plan, loss in rows]


def judge_iterations(folder: Path, ranks: int) -> tuple[list[str], dict[str, int]]:
    """What was wrong: ranks with different plans in an iteration, losses of another job; and how many of each ran."""
    logs = [read_log(folder, rank) for rank in range(ranks)]
    expected = expected_losses(ranks, max(map(len, logs), default=0))
    plans: dict[int, str] = {}
    wrong = []
    for rank, log in enumerate(logs):
        for number, (iteration, plan, loss) in enumerate(log):
            if number != iteration or loss != expected[number]:
                wrong.append(f"rank {rank}, iteration {number}: loss {loss}, not {expected[number]}")
                break
            if plans.setdefault(iteration, plan) != plan:
                wrong.append(f"iteration {iteration}: rank {rank} ran {plan}, another one {plans[iteration]}")
                break
    return wrong, {"iterations": len(plans), "plans": len(set(plans.values()))}


@dataclass
class Trial:
    """One job and what happens to it."""

    folder: Path
    seed: int
    victim: str
    carrier: str
    wrong: list[str] = field(default_factory=list)
    notes: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.dice = random.Random(f"{self.victim} {self.seed}")
        self.ranks = self.dice.choice((2, 4))
        self.timeout_s = STOPPED_TIMEOUT_S if self.victim == "rank-stop" else CALL_TIMEOUT_S
        self.deadline = time.monotonic() + LIMIT_S
        self.job: list[Any] = []
        self.controllers: list[Any] = []
        self.shared: set[str] = set()

    def run(self) -> dict[str, Any]:
        """The trial; never raises."""
        begin = time.monotonic()
        try:
            self._start()
            getattr(self, f"_{self.victim.replace('-', '_')}")()
        except Exception:
            self.wrong.append(traceback.format_exc())
        finally:
            self._clean_up()
        wrong, counts = judge_iterations(self.folder, self.ranks)
        self.wrong += wrong
        self.notes |= counts
        return {
            "seed": self.seed, "victim": self.victim, "carrier": self.carrier, "ranks": self.ranks, **self.notes,
            "took_s": round(time.monotonic() - begin, 1), "wrong": self.wrong,
        }  # fmt: skip

    def _start(self) -> None:
        self._start_controller()
        self.job = [
            FORK.Process(target=train, args=(self.folder, rank, self.ranks, self.carrier, self.timeout_s))
            for rank in range(self.ranks)
        ]
        for process in self.job:
            process.start()
        self._wait_for_plan(self.dice.choice((1, 1, 2, 3)))
        # Long enough for the next plan to be prepared, committed or switched to by then.
        time.sleep(self.dice.uniform(0, 0.6))
        for process in self.job:
            mapped = Path(f"/proc/{process.pid}/maps").read_text()
            self.shared |= {word for word in mapped.split() if word.startswith("/dev/shm/")}
        at = [self._last(rank) for rank in range(self.ranks)]
        self.notes["at"] = [list(one[:2]) for one in at]
        if not all(plan > 0 for _, plan, _ in at):
            self.wrong.append(f"no plan was active: {at}")

    # What happens.

    def _controller_kill(self) -> None:
        self.controllers[-1].kill()
        self.controllers[-1].join()
        self._train_on(30)
        comes_back = self.dice.random() < 0.6
        self.notes["comes_back"] = comes_back
        if comes_back:
            if self.dice.random() < 0.5:
                (self.folder / "state.json").unlink(missing_ok=True)
            self._start_controller()
            self._wait_for_next_plan()
        self._finish()

    def _controller_stop(self) -> None:
        os.kill(self.controllers[-1].pid, signal.SIGSTOP)
        time.sleep(self.dice.choice((0.1, 0.5, 2.0, 7.0)))
        self._train_on(30)
        wakes = self.dice.random() < 0.7
        self.notes["wakes"] = wakes
        if wakes:
            os.kill(self.controllers[-1].pid, signal.SIGCONT)
            self._wait_for_next_plan()
        self._finish()

    def _agent(self) -> None:
        rank, fault = self.dice.randrange(self.ranks), self.dice.choice(AGENT_FAULTS)
        self.notes |= {"rank": rank, "fault": fault}
        part = self.folder / "fault.part"
        part.write_text(fault)
        part.rename(self.folder / f"fault{rank}")
        time.sleep(self.dice.uniform(0, 1.0))
        self._train_on(30)
        if fault != "end" and self.dice.random() < 0.7:
            (self.folder / "healed").touch()
            self._wait_for_next_plan()
        self._finish()

    def _rank_kill(self) -> None:
        rank = self.dice.randrange(self.ranks)
        self.notes["rank"] = rank
        at = time.monotonic()
        os.kill(self.job[rank].pid, signal.SIGKILL)
        self._survivors_name(rank, at, -signal.SIGKILL)

    def _rank_stop(self) -> None:
        rank, for_good = self.dice.randrange(self.ranks), self.dice.random() < 0.5
        self.notes |= {"rank": rank, "for_good": for_good}
        at = time.monotonic()
        os.kill(self.job[rank].pid, signal.SIGSTOP)
        if for_good:
            self._survivors_name(rank, at, None)
            return
        time.sleep(self.dice.uniform(0.05, 2.0))
        os.kill(self.job[rank].pid, signal.SIGCONT)
        self._train_on(30)
        self._wait_for_next_plan()
        self._finish()

    # What must come of it.

    def _finish(self) -> None:
        """The job ends by itself, with exit code 0 and nothing said."""
        (self.folder / "stop").touch()
        for rank, process in enumerate(self.job):
            process.join(max(self.deadline - time.monotonic(), 0.1))
            if process.exitcode != 0:
                self.wrong.append(f"rank {rank} ended with {process.exitcode}")
        for rank in range(self.ranks):
            said = self._end(rank).get("said", "nothing was written")
            if said:
                self.wrong.append(f"rank {rank}: {said}")

    def _survivors_name(self, lost: int, at: float, code: int | None) -> None:
        """The other ranks end in bounded time with an error that names the lost one."""
        waits, stopped_in = [], self._last(lost)[0]
        for rank, process in enumerate(self.job):
            if rank == lost:
                continue
            process.join(max(self.deadline - time.monotonic(), 0.1))
            end = self._end(rank)
            said = end.get("said", "nothing was written")
            if process.exitcode != LOST:
                self.wrong.append(f"rank {rank} ended with {process.exitcode}: {said}")
            elif not said.startswith("PeerLost: ") or f"rank {lost}" not in said:
                self.wrong.append(f"rank {rank} does not name rank {lost}: {said}")
            waits.append(round(end.get("raised_at", 0.0) - at, 2))
        self.notes["waits"] = waits
        if code is None and self._last(lost)[0] > stopped_in + 1:
            self.wrong.append(f"rank {lost} did not stay stopped: was this started without setsid?")
        if code is not None:
            self.job[lost].join(max(self.deadline - time.monotonic(), 0.1))
            if self.job[lost].exitcode != code:
                self.wrong.append(f"rank {lost}, which was killed, ended with {self.job[lost].exitcode}")

    # The means.

    def _start_controller(self) -> None:
        life = FORK.Process(target=control, args=(self.folder, len(self.controllers)))
        life.start()
        self.controllers.append(life)

    def _last(self, rank: int) -> tuple[int, int, str]:
        """Iteration, plan number and plan of the last iteration that a rank has ended."""
        log = read_log(self.folder, rank)
        return (log[-1][0], int(log[-1][1].partition(".")[0]), log[-1][1]) if log else (-1, 0, "")

    def _end(self, rank: int) -> dict[str, Any]:
        path = self.folder / f"end{rank}"
        found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        return found

    def _wait_for(self, condition: Callable[[], Any], what: str) -> None:
        def checked() -> Any:
            ended = [(rank, process.exitcode) for rank, process in enumerate(self.job) if process.exitcode is not None]
            if ended:
                raise AssertionError(f"{what}: ranks have ended: {ended}: {[self._end(rank) for rank, _ in ended]}")
            return condition()

        wait_for(checked, what, self.deadline)

    def _wait_for_plan(self, least: int) -> None:
        self._wait_for(
            lambda: all(self._last(rank)[1] >= least for rank in range(self.ranks)), f"plan {least} or later runs"
        )

    def _wait_for_next_plan(self) -> None:
        self._wait_for_plan(self._last(0)[1] + 1)

    def _train_on(self, iterations: int) -> None:
        at = [self._last(rank)[0] for rank in range(self.ranks)]
        self._wait_for(
            lambda: all(self._last(rank)[0] >= at[rank] + iterations for rank in range(self.ranks)),
            f"{iterations} more iterations",
        )

    def _clean_up(self) -> None:
        for process in (*self.job, *self.controllers):
            if process.exitcode is None:
                process.kill()
            process.join()
        left = sorted(name for name in self.shared if os.path.exists(name))
        if left:
            self.wrong.append(f"shared memory is left: {left}")


def main(folder: Path, victims: list[str], trials: int, seed: int) -> int:
    """Run so many trials of each victim, one after the other; each has a seed of its own. How many were wrong."""
    counts: Counter[tuple[str, str, bool]] = Counter()
    for number, (trial, (place, victim)) in enumerate(product(range(trials), enumerate(victims)), seed):
        one = folder / f"{number}"
        one.mkdir(parents=True)
        outcome = Trial(folder=one, seed=number, victim=victim, carrier=CARRIERS[(trial + place) % 2]).run()
        counts[victim, outcome["carrier"], bool(outcome["wrong"])] += 1
        with (folder / "outcomes").open("a") as file:
            file.write(json.dumps(outcome) + "\n")
    for victim, carrier in product(victims, CARRIERS):
        right, wrong = (counts[victim, carrier, wrong] for wrong in (False, True))
        print(f"{victim} on {carrier}: {right + wrong} trials, {wrong} wrong", flush=True)
    return sum(number for (_, _, wrong), number in counts.items() if wrong)


def parsed(arguments: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--victims", default=",".join(VICTIMS), help="with commas between them; all without it")
    parser.add_argument("--trials", type=int, default=1, help="of each victim")
    parser.add_argument("--seed", type=int, default=0, help="of the first trial")
    given = parser.parse_args(arguments)
    unknown = [victim for victim in given.victims.split(",") if victim not in VICTIMS]
    if unknown:
        parser.error(f"unknown victim {unknown[0]!r}; choose from: {', '.join(VICTIMS)}")
    return given


if __name__ == "__main__":
    given = parsed(sys.argv[1:])
    sys.exit(1 if main(given.folder, given.victims.split(","), given.trials, given.seed) else 0)
