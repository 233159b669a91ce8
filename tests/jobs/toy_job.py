# SPDX-License-Identifier: Apache-2.0
"""What the fault tests share: a tiny training step, its plans, a data plane that really communicates, a noisy line."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

from stretto.cluster import Cluster
from stretto.control.agent import Exchange
from stretto.control.messages import PLAIN, PlanId, RankState, Reply, decode_captured, encode_plan
from stretto.control.worker import PlanReply, PlanRequest
from stretto.errors import PeerLost, PlanMismatch
from stretto.planner.plan import MotifPlan, OpPlan, Plan
from stretto.runtime.enforcer.report import EnforcerReport
from stretto.workload import Workload
from stretto.workload.dag import Dep, Op


def toy_workload(ranks: int, nbytes: float = 4096.0) -> Workload:
    """A backward pass, and the all-reduce of its gradients."""
    return Workload(
        name="toy", num_ranks=ranks,
        ops=(
            Op(name="backward", duration_us=100.0, after=(Dep(op="update", lag=1),)),
            Op(name="gradients", kind="all_reduce", nbytes=nbytes, after=(Dep(op="backward"),)),
            Op(name="update", duration_us=10.0, after=(Dep(op="gradients"),)),
        ),
    )  # fmt: skip


def toy_cluster(ranks: int) -> Cluster:
    """A ring of the job's size."""
    return Cluster.preset("ring", nodes=ranks, gb_per_s=1.0, alpha_us=1.0)


def toy_plan(name: str, workload: Workload, cluster: Cluster, *, duration_us: float = 10.0) -> Plan:
    """One motif; plans of different names have different hashes."""
    motif = MotifPlan(motif="all_reduce", algorithm="ring", channels=("net",), seq=0, duration_us=duration_us)
    op = OpPlan(op="gradients", kind="all_reduce", nbytes=4096.0, option="whole", expression="whole", motifs=(motif,))
    return Plan(
        name=name, workload=workload.name, workload_digest=workload.digest, cluster=cluster.name,
        cluster_digest=cluster.digest, iteration_us=100.0, ops=(op,),
    )  # fmt: skip


class Ready:
    """A plan that is made at once, or never."""

    def __init__(self, answer: PlanReply | None) -> None:
        self._answer = answer

    def poll(self) -> PlanReply | None:
        return self._answer

    def cancel(self) -> None:
        pass


def planner(name: str, *, other_model: bool = False) -> Callable[[PlanRequest], Ready]:
    """Answers every question with a plan of that name; if asked to, one that was made for another step."""

    def start(ask: PlanRequest) -> Ready:
        workload, cluster = decode_captured(ask.captured)
        if other_model:
            workload = toy_workload(workload.num_ranks, nbytes=1.0)
        plan = toy_plan(f"{name}.{ask.seed}", workload, cluster)
        return Ready(PlanReply(body=encode_plan(plan), hash=plan.hash, iteration_us=100.0, plain_us=200.0))

    return start


class ToyPlane:
    """Keeps plans, and switches between them in band as the enforcer does, on whatever `maximum` is given.

    `maximum` takes the largest of each value over all ranks. The plan of every iteration is kept in `ran`.
    """

    def __init__(self, maximum: Callable[[list[int]], list[int]]) -> None:
        self._maximum = maximum
        self._lock = threading.Lock()
        self._held: dict[int, str] = {}
        self._committed = self._active = PLAIN
        self.fell_back = ""
        self.ran: list[int] = []

    def prepare(self, plan: Plan, workload: Workload, number: int) -> None:
        plan.check(workload)
        with self._lock:
            self._held[number] = plan.hash

    def commit(self, number: int, hash: str) -> None:
        with self._lock:
            if self._held.get(number) != hash:
                raise PlanMismatch(f"plan {number} is not held")
            self._committed = PlanId(number, hash)

    def discard(self, number: int) -> None:
        with self._lock:
            assert number != self._active.number
            self._held.pop(number, None)

    def report(self) -> EnforcerReport:
        with self._lock:
            return EnforcerReport(
                number=self._active.number, hash=self._active.hash, committed=self._committed.number,
                iteration=len(self.ran), iteration_us=100.0 if self._active.number else 200.0, plain_us=200.0,
                fell_back=self.fell_back,
            )  # fmt: skip

    def iteration(self) -> None:
        """One step of training; all ranks must run the same plan in it."""
        with self._lock:
            offer = self._committed
        code = int(offer.hash[:13] or "0", 16)
        mine = self._active.number
        found = self._maximum([offer.number, -offer.number, code, -code, mine, -mine])
        assert found[4] == -found[5], f"two plans in iteration {len(self.ran)}: {-found[5]} and {found[4]}"
        self.ran.append(mine)
        if found[0] == -found[1] and found[2] == -found[3] and offer.number > mine:
            with self._lock:
                assert offer.number in self._held
                self._active = offer


def noisy(exchange: Exchange, seed: int, log: dict[str, int]) -> Exchange:
    """Loses requests and replies, sends twice, and answers with replies of long ago; which, the seed says."""
    dice = random.Random(seed)
    old: list[Reply] = []

    def call(state: RankState, timeout_s: float) -> Reply:
        fate = dice.choice(("well", "well", "well", "lost", "unanswered", "twice", "late"))
        log[fate] = log.get(fate, 0) + 1
        if fate == "lost":
            raise PeerLost("lost on the way")
        reply = exchange(state, timeout_s)
        old.append(reply)
        if fate == "twice":
            reply = exchange(state, timeout_s)
        if fate == "unanswered":
            raise PeerLost("the reply was lost")
        return dice.choice(old[-8:]) if fate == "late" else reply

    return call


def maximum_over(dist: Any, torch: Any) -> Callable[[list[int]], list[int]]:
    """By an all-reduce of the job."""

    def maximum(values: list[int]) -> list[int]:
        tensor = torch.tensor(values, dtype=torch.int64)
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
        found: list[int] = tensor.tolist()
        return found

    return maximum
