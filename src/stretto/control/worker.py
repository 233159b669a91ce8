# SPDX-License-Identifier: Apache-2.0
"""Planning in a process of its own: ``python -m stretto.control.worker`` reads a question and writes an answer.

It runs at a low priority, as it may share the machine with the training that it is for.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Protocol

import msgspec

from ..children import Child
from ..errors import InvalidInput, StrettoError
from ..files import typed
from ..planner import api
from ..planner.api import SYSTEM, to_plan, to_schedule
from ..planner.costs.costs import CostModel
from ..planner.costs.measured import NCCL
from ..planner.plan import PLAIN, Plan
from ..registry import VARIABLE as PLUGINS
from .messages import MAX_MESSAGE_BYTES, CapturedStep, decode_captured, decode_plan, encode_plan
from .own_costs import MOTIF_US, OwnCosts
from .refine import RefinedCosts
from .spans import ReportSpan, schedule_spans

NICENESS = 10
"""The job comes first. At 19 a planner has a 70th of what a process of the job has, and ends in no useful time where
all processors are busy; at 10 a ninth."""
PARENT_S = 0.5
"""Between two looks whether the controller still lives."""
SPARE_S = 300.0
"""How long beyond its budget a planner may take before it is given up."""
LOOK_S = 0.05
"""A planner looks for so many seconds of its own time how much of a processor it gets."""
TOOK_TOO_LONG = "the planner took too long"


class PlanRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What to plan; with `current` (a plan and its hash) also what that one now takes."""

    captured: CapturedStep
    budget_s: float
    seed: int = 0
    factors: dict[str, float] = {}
    current: tuple[bytes, str] | None = None
    plain: bool = False
    """Whether the order of the application is wanted instead of the best plan."""


class PlanReply(msgspec.Struct, frozen=True, kw_only=True):
    """A plan, and what it promises beside plain order and the current plan (0: not known); or why there is none."""

    body: bytes = b""
    hash: str = ""
    iteration_us: float = 0.0
    plain_us: float = 0.0
    current_us: float = 0.0
    error: str = ""
    plain_spans: tuple[ReportSpan, ...] = ()
    """Plain order as it is predicted."""
    plan_spans: tuple[ReportSpan, ...] = ()
    """The plan as it is predicted."""


class Planning(Protocol):
    """A planner that runs in a process of its own."""

    def poll(self) -> PlanReply | None:
        """The answer, once there is one."""

    def cancel(self) -> None:
        """End the planner: its plan is not wanted any more."""


def costs_of(captured: CapturedStep, factors: dict[str, float]) -> CostModel:
    """What motifs of a captured step cost: by the backend's own times where plans run above it, else simulated."""
    from ..planner.costs.costs import simulated_costs

    _, cluster = decode_captured(captured)
    if not captured.own_times:
        return RefinedCosts(simulated_costs(cluster), factors, captured.motif_us)
    # Measured times have what every call costs in them.
    own_us = MOTIF_US if _above_nccl(captured) else 0.0
    return RefinedCosts(OwnCosts(cluster, captured.own_times), factors, own_us)


def answer(ask: PlanRequest) -> PlanReply:
    """Plan in this process, and return the answer."""
    workload, cluster = decode_captured(ask.captured)
    costs = costs_of(ask.captured, ask.factors)
    made = api.plan(
        workload,
        cluster,
        budget_s=patient_s(ask.budget_s),
        seed=ask.seed,
        costs=costs,
        link_turns=not _above_nccl(ask.captured),
    )
    plan = to_plan(PLAIN, made.plain, made.problem, cluster) if ask.plain else made.plan
    current_us = 0.0
    if ask.current is not None:
        try:
            current_us = to_schedule(decode_plan(*ask.current), made.problem).period_us
        except StrettoError:
            # The options have changed under the current plan; it cannot be compared, only measured.
            current_us = 0.0
    return PlanReply(
        body=encode_plan(plan), hash=plan.hash, iteration_us=plan.iteration_us, plain_us=made.plain.period_us,
        current_us=current_us, plain_spans=schedule_spans(made.plain, made.problem),
        plan_spans=schedule_spans(made.plain if ask.plain else made.schedules[SYSTEM], made.problem),
    )  # fmt: skip


def patient_s(budget_s: float) -> float:
    """The budget in seconds of a processor that a job may have: nobody waits for a plan that is made beside it."""
    wall, own = time.monotonic(), time.thread_time()
    while time.thread_time() - own < LOOK_S:
        pass
    rate = min(LOOK_S / max(time.monotonic() - wall, LOOK_S), 1.0)
    return max(budget_s, min(budget_s / rate, SPARE_S / 2))


def _above_nccl(captured: CapturedStep) -> bool:
    """Whether GPUs carry out the plan, whose streams no rank holds back for another one's."""
    return bool(captured.own_times) and captured.own_times[0].library == NCCL


def plan_of(answer: PlanReply) -> Plan:
    """The plan in an answer."""
    return decode_plan(answer.body, answer.hash)


class Worker:
    """`answer` in another process."""

    def __init__(self, ask: PlanRequest) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="stretto-plan-")
        self._deadline = time.monotonic() + ask.budget_s + SPARE_S
        folder = Path(self._folder.name)
        (folder / "ask").write_bytes(msgspec.msgpack.encode(ask))
        # The planner is no part of the job that it plans for; it knows the same rules, algorithms and presets.
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith("STRETTO_") or name == PLUGINS
        }
        self._process = Child(
            [sys.executable, "-m", __name__, str(folder), str(os.getpid())],
            stderr=(folder / "errors").open("wb"),
            environment=environment,
        )

    def poll(self) -> PlanReply | None:
        """The answer, once there is one."""
        code = self._process.poll()
        if code is None and time.monotonic() < self._deadline:
            return None
        if code is None:
            self.cancel()
            return PlanReply(error=TOOK_TOO_LONG)
        path = Path(self._folder.name) / "answer"
        if code == 0 and path.is_file() and path.stat().st_size <= MAX_MESSAGE_BYTES:
            found = msgspec.msgpack.decode(path.read_bytes(), type=typed(PlanReply))
        else:
            last = (Path(self._folder.name) / "errors").read_bytes()[-300:].decode(errors="replace").splitlines()
            found = PlanReply(error=f"the planner ended with code {code}: {last[-1] if last else ''}")
        self._folder.cleanup()
        return found

    def cancel(self) -> None:
        """End it, and wait for its end elsewhere: one of a low priority takes seconds on a busy machine."""
        self._process.signal_all(signal.SIGKILL)
        threading.Thread(target=self._clear_away, name="stretto-planner-end").start()

    def _clear_away(self) -> None:
        self._process.wait()
        self._folder.cleanup()


def main(folder: Path, controller: int) -> None:
    """What the other process does, as long as the controller with that process id lives."""
    os.nice(NICENESS)
    threading.Thread(target=_end_with, args=(controller, folder), daemon=True).start()
    try:
        ask = msgspec.msgpack.decode((folder / "ask").read_bytes(), type=typed(PlanRequest))
        found = answer(ask)
    except (StrettoError, msgspec.DecodeError) as error:
        found = PlanReply(error=str(error))
    if len(found.body) > MAX_MESSAGE_BYTES:
        found = PlanReply(error=str(InvalidInput(f"the plan has {len(found.body)} bytes, too many to send")))
    part = folder / "part"
    part.write_bytes(msgspec.msgpack.encode(found))
    part.rename(folder / "answer")


def _end_with(controller: int, folder: Path) -> None:
    """Thread: nobody reads the answer to a controller that was killed, and nobody else clears the folder away."""
    while os.getppid() == controller:
        time.sleep(PARENT_S)
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
