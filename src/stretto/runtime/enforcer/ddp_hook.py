# SPDX-License-Identifier: Apache-2.0
"""A communication hook of `DistributedDataParallel`: gradients go through the executor, everything else stays as it is.

For those who keep their backend. The executor joins over the store of the process group that there is, beside it.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch.distributed.constants import default_pg_timeout

from ...cluster import Cluster
from ...errors import InvalidInput, unknown
from ...planner.plan import Plan
from ...process_state import STATE
from ...workload import Workload
from ..torch_backend.backend import CPU, CUDA, StrettoGroup
from ..torch_backend.buffers import CollectiveCall
from ..torch_backend.job_store import job_store
from .carriers import CARRIERS
from .enforcer import Enforcer

Future = torch.futures.Future[torch.Tensor]
WIDE = (torch.float32, torch.float64)
"""In these the sum of all ranks can be taken before it is divided; in half precision it could overflow."""


class DdpHook:
    """What `ddp_hook` needs: a group of our own over the ranks of `group` (default: all). All of them make it together.

    ::

        state = stretto.torch.DdpHook()
        model.register_comm_hook(state, stretto.torch.ddp_hook)

    With a `plan` for a captured `workload`, gradients are cut, ordered and bound to channels as it says; `carrier`
    moves them: our executor, or gloo or (on GPUs) NCCL with one communicator for each channel; "auto" is NCCL where the
    job uses it, else the executor, else gloo. `cluster` is what the plan was made for. Ranks agree on the plan every
    `every` iterations; buckets that it does not know are averaged as usual.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        plan: Plan | None = None,
        workload: Workload | None = None,
        cluster: Cluster | None = None,
        carrier: str = "auto",
        every: int = 8,
    ) -> None:
        if carrier not in CARRIERS:
            raise unknown("carrier", carrier, CARRIERS)
        if not dist.is_initialized():
            raise InvalidInput("DdpHook: call torch.distributed.init_process_group first")
        if (plan is None) != (workload is None):
            raise InvalidInput("DdpHook: plan and workload must be given together")
        whole = group is None or group is dist.group.WORLD
        if plan is not None and not whole:
            raise InvalidInput("DdpHook: a plan is for all ranks, not for some of them")
        self.users: Any = group if group is not None else dist.group.WORLD
        self.made = not isinstance(self.users, StrettoGroup)
        self.ours: Any = self.users
        if self.made:
            self.ours = _beside(tuple(dist.get_process_group_ranks(self.users)))
        self.enforcer: Enforcer | None = None
        if plan is not None and workload is not None:
            if carrier == "auto" and self.made and uses_nccl(self.users):
                carrier = "nccl"
            self.enforcer = Enforcer(workload, every=every, cluster=cluster, carrier=carrier, group=self.ours)
            try:
                self.enforcer.prepare(plan, workload, 1)
                self.enforcer.commit(1, plan.hash)
            except BaseException:
                self.enforcer.close()
                raise

    def reduce(self, gradients: torch.Tensor) -> Future:
        """Begin to average gradients in place."""
        # Tensors on a GPU are not ours, unless a plan above NCCL is: the backend that the user keeps runs them.
        planned = self.enforcer is not None and self.enforcer.device == gradients.device
        group = self.ours if gradients.device.type == "cpu" or planned else self.users
        fused = (
            group is self.ours
            and self.enforcer is None
            and gradients.dtype in WIDE
            and not group.engine.refusal(CollectiveCall.of("all_reduce", [gradients], reduce=dist.ReduceOp.AVG))
        )
        if not fused:
            gradients.div_(group.size())
        options: Any = c10d.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.AVG if fused else dist.ReduceOp.SUM
        options.asyncOp = True
        work = group.allreduce([gradients], options)
        averaged: Future = work.get_future().then(lambda done: done.value()[0])
        return averaged

    def close(self) -> None:
        """Leave what was joined; the model must not run backward any more."""
        if self.enforcer is not None:
            self.enforcer.close()
            self.enforcer = None
        if self.made and self.ours is not None:
            self.ours.shutdown()
            self.ours = None

    def __enter__(self) -> DdpHook:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def uses_nccl(group: Any) -> bool:
    """Whether a group of another backend is NCCL's, or has called it by now: DDP does when it is made.

    All ranks have made the same calls, and answer alike.
    """
    if CUDA not in group._device_types:
        return False
    backend = group._get_backend(CUDA)
    return bool(backend.name() == "nccl" and (CPU not in group._device_types or backend._is_initialized()))


def _beside(ranks: tuple[int, ...]) -> StrettoGroup:
    """A group of our own over some ranks, which make it together; PyTorch does not know of it.

    `torch.distributed.new_group` for members alone names a group by how many each of them has, and members that are in
    different numbers of other groups would wait for each other for ever. How many hooks these ranks have made is the
    same on all of them.
    """
    number = STATE.number(("DDP hook", ranks))
    name = f"stretto/hook/{'.'.join(map(str, ranks))}/{number}"
    return StrettoGroup(
        store=job_store(name), rank=ranks.index(dist.get_rank()),
        size=len(ranks), timeout=default_pg_timeout, name=name, devices=ranks,
    )  # fmt: skip


def ddp_hook(state: DdpHook, bucket: Any) -> Any:
    """Average one bucket of gradients: ``model.register_comm_hook(DdpHook(), ddp_hook)``."""
    return state.reduce(bucket.buffer())


# PyTorch compares annotations with types, and those of this file are text.
ddp_hook.__annotations__ = {"bucket": c10d.GradBucket, "return": Future}
