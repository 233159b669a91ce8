# SPDX-License-Identifier: Apache-2.0
"""What benchmarks/gpu_jobs_rank.py measures in turns inside of one run: the plan, an identity plan, and recording.

Each of the three alternates with the job's own backend, in blocks of `HALF` iterations; the first `SETTLE` of a block
do not count. All ranks change at the same iteration. Rank 0 decides what there is time for.
"""

from __future__ import annotations

import time
from typing import Any

import torch.distributed as dist

HALF, SETTLE = 8, 2
"""Iterations of a block, and how many of its first do not count."""
LOOK = 16
"""Iterations between two looks at the clock while there is no plan."""
REFERENCE_S, EACH_S = 6.0, 5.0
"""Seconds that are kept for repeating iterations on NCCL itself, and for each part that comes after another."""
IDENTITY = 60_000
"""The number of the identity plan: above those that a controller gives."""
OWN = " own"
PARTS = ("plan", "identity", "hooks")
"""What is measured, in this order; recorded iterations are called after the hooks that record."""


class Alternation:
    """In place of the enforcer's own trial: blocks on the job's own backend between blocks of a plan."""

    def __init__(self, begun: int) -> None:
        self.begun = begun

    def side(self, iteration: int) -> str | None:
        """Who runs an iteration; None: the plan.

        >>> [Alternation(3).side(iteration) for iteration in (3, 10, 11, 18, 19)]
        [None, None, 'own', 'own', None]
        """
        return "own" if (iteration - self.begun) // HALF % 2 else None

    def counts(self, iteration: int) -> bool:
        """Whether what an iteration takes says something of who runs it."""
        return (iteration - self.begun) % HALF >= SETTLE


class Turns:
    """Under `stretto run`: says before each iteration what runs it, and when enough was measured."""

    def __init__(self, pairs: int, deadline_s: float) -> None:
        self._pairs, self._deadline_s = pairs, deadline_s
        self.first = -1
        """The iteration at which the plan became active."""
        self.kept: list[Any] = []
        """Parameters and buffers at that iteration."""
        self.predicted_us = 0.0
        """What the last plan that was active promises."""
        self._part = -1
        """Of `PARTS`; -1: no plan is there yet."""
        self._begun = -1
        """The iteration at which the pairs of this part began."""
        self._looked_s = time.time()
        self._waits = 0
        """Iterations for which the identity plan was waited for."""
        self._trial: Alternation | None = None
        self._hooks: Any = None
        default: Any = dist.distributed_c10d._get_default_store()
        # Another connection: who waits in the job's own keeps everybody else out of it.
        self.store = default.clone() if hasattr(default, "clone") else default
        self.pair_ended = False

    def label(self, step: int) -> str:
        """What runs the iteration that begins; empty: the measurement is over."""
        self.pair_ended = False
        if self._part < 0:
            return self._before(step)
        while self._part < len(PARTS):
            found = self._in_part(step)
            if found:
                return found
            self._next_part(step)
        return ""

    def _before(self, step: int) -> str:
        """Until a plan is active: the job's own backend, ours, or a recording."""
        from stretto.runtime.torch_backend.own_backend import OWN_BACKEND
        from stretto.runtime.torch_backend.watch import RECORDING

        if active_plan():
            self._next_part(step)
            self.first = step
            return self._in_part(step)
        # The rest of the parts can be measured without a plan, too.
        if step and step % LOOK == 0 and self._late(step, (len(PARTS) + 1) * EACH_S):
            self._part += 1
            self._next_part(step)
            return self.label(step)
        if type(RECORDING.current).__name__ == "Hooks":
            return "recording"
        return "own" if OWN_BACKEND.runs else "backend"

    def _in_part(self, step: int) -> str:
        """What runs the iteration in this part; empty: it is over."""
        name = PARTS[self._part]
        at = step - self._begun
        pair, inside = divmod(at, 2 * HALF)
        if at and not inside:
            self.pair_ended = True
            left = len(PARTS) - 1 - self._part
            if pair >= self._pairs or self._late(step, left * EACH_S + time.time() - self._looked_s):
                return ""
        own = inside >= HALF
        if name == "hooks":
            return self._recording(inside)
        enforcer, number = _enforcer(), active_plan()
        if name == "identity" and number != IDENTITY and self._trial is None and self._waits < 3 * HALF:
            # It becomes active where the enforcer's ranks agree next.
            self._begun, self._waits = step + 1, self._waits + 1
            return "change"
        if not number or (name == "identity") != (number == IDENTITY):
            return ""
        if name == "plan":
            self.predicted_us = enforcer._plans.active.plan.iteration_us
        if self._trial is None:
            self._trial = Alternation(enforcer._iteration)
        enforcer._trial = self._trial
        return f"{name}{OWN * own}" if inside % HALF >= SETTLE else "change"

    def _recording(self, inside: int) -> str:
        from stretto.control.autopilot import NCCL
        from stretto.runtime.capture.hooks import Hooks
        from stretto.runtime.torch_backend.own_backend import OWN_BACKEND

        if inside == 0:
            self._hooks = Hooks(only_ours=True, gpu=OWN_BACKEND.asked == NCCL)
            self._hooks.install()
        elif self._hooks is not None:
            self._hooks.cut()
        if inside == HALF:
            self._end_hooks()
        return f"hooks{OWN * (inside >= HALF)}" if inside % HALF >= SETTLE else "change"

    def _end_hooks(self) -> None:
        if self._hooks is not None:
            self._hooks.remove()
        self._hooks = None

    def _next_part(self, step: int) -> None:
        """All ranks are here at the same iteration."""
        self._part += 1
        self._begun, self._trial = step, None
        self._looked_s = time.time()
        name = PARTS[self._part] if self._part < len(PARTS) else ""
        enforcer = _enforcer()
        if name == "identity" and not self._identity():
            self._part += 1
            name = "hooks"
        if name == "hooks" and enforcer is not None:
            enforcer.close()
        if not name:
            self._end_hooks()

    def _identity(self) -> bool:
        """Load a plan that does what the application does, whole ops in its order, by the plan's ways."""
        from stretto.control.autopilot import PILOT

        pilot, enforcer = PILOT.current, _enforcer()
        if pilot is None or enforcer is None or pilot._workload is None or pilot._agent is None:
            return False
        # The controller would have another plan.
        pilot._agent.stop()
        assert pilot._cluster is not None
        plan = identity(pilot._workload, pilot._cluster)
        enforcer.prepare(plan, pilot._workload, IDENTITY)
        enforcer.commit(IDENTITY, plan.hash)
        return True

    def _late(self, step: int, more_s: float) -> bool:
        """Whether so much more would be too long, as rank 0 sees it."""
        if self._deadline_s == float("inf"):
            return False
        if dist.get_rank() == 0:
            now = time.time()
            self.store.set(f"late/{step}", str(int(now + more_s + REFERENCE_S > self._deadline_s)))
        self._looked_s = time.time()
        return bool(self.store.get(f"late/{step}") == b"1")


def identity(workload: Any, cluster: Any) -> Any:
    """Whole ops in the application's order, on the channel that reaches everybody."""
    from stretto.planner.algebra.motif import motif_of
    from stretto.planner.plan import MotifPlan, OpPlan, Plan

    channel = "network" if "network" in cluster.channels else tuple(cluster.channels)[-1]
    ops = []
    for seq, op in enumerate(workload.comm_ops):
        text = str(motif_of(op.kind, workload.groups_of(op)[0], op.nbytes, op.root))
        only = MotifPlan(motif=text, algorithm="direct", channels=(channel,), seq=seq, nbytes=op.nbytes)
        ops.append(OpPlan(op=op.name, kind=op.kind, nbytes=op.nbytes, option="whole", expression=text, motifs=(only,)))
    return Plan(
        name="identity", workload=workload.name, workload_digest=workload.digest, cluster=cluster.name,
        cluster_digest=cluster.digest, iteration_us=1.0, ops=tuple(ops),
    )  # fmt: skip


def active_plan() -> int:
    """The number of the plan that is active; 0: none, or plain order because a plan was given up."""
    from stretto.planner.plan import PLAIN

    enforcer = _enforcer()
    active = enforcer._plans.active if enforcer is not None else None
    return active.number if active is not None and active.plan.name != PLAIN else 0


def recorded_step() -> Any:
    """The workload that `stretto run` has recorded; None where it has not."""
    from stretto.control.autopilot import PILOT

    return PILOT.current._workload if PILOT.current is not None else None


def _enforcer() -> Any:
    from stretto.runtime.torch_backend.current import CURRENT

    return CURRENT.enforcer
