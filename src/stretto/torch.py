"""Stretto as a backend of `torch.distributed`; importing this registers it.

::

    import stretto.torch
    torch.distributed.init_process_group("stretto")

`choices` says which program ran for which calls, and why no other did; `record` gives a measured `Timeline`; `enforce`
carries out a plan.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

from .errors import InvalidInput

try:
    import torch.distributed as _dist
except ImportError:
    raise InvalidInput("stretto.torch needs PyTorch: pip install 'stretto[torch]'") from None

from .cluster import Cluster
from .planner.plan import Plan
from .runtime.enforcer.ddp_hook import DdpHook, ddp_hook
from .runtime.enforcer.enforcer import Enforcer
from .runtime.torch_backend.backend import StrettoGroup, register
from .runtime.torch_backend.recording import LEDGER, Choice, Recording
from .runtime.torch_backend.recording import record as _record
from .workload import Workload

__all__ = [
    "Choice", "DdpHook", "Enforcer", "Recording", "StrettoGroup", "choices", "ddp_hook", "enforce", "last_choice",
    "record",
]  # fmt: skip

register()


def last_choice() -> Choice | None:
    """What was chosen for the latest call of this process; None before the first."""
    return LEDGER.last()


def choices() -> list[Choice]:
    """What was chosen for every kind of call so far, oldest first."""
    return LEDGER.all()


def record() -> AbstractContextManager[Recording]:
    """Note when every call inside the block ran on this rank; then read ``timeline``.

    ::

        with stretto.torch.record() as recording:
            train_step()
        from stretto.report import write_perfetto
        write_perfetto(recording.timeline, "step.pftrace")
    """
    return _record(_dist.get_rank)


def enforce(
    plan: Plan, workload: Workload, *, every: int = 8, cluster: Cluster | None = None, carrier: str = "auto"
) -> Enforcer:
    """Carry out a plan for the captured step from one of the next iterations on; all ranks call it at the same point.

    ::

        with stretto.torch.enforce(plan, recorder.workload) as enforcer:
            for batch in loader:
                train_step(batch)
                stretto.step()
        print(enforcer.report())

    `carrier` moves the data: "executor" (ours), "gloo", or "nccl" (on GPUs); "auto" takes what the job uses.
    """
    made = Enforcer(workload, every=every, cluster=cluster, carrier=carrier)
    try:
        made.prepare(plan, workload, 1)
        made.commit(1, plan.hash)
    except BaseException:
        made.close()
        raise
    return made
