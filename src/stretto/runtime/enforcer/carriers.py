"""Which carrier an enforcer gets, by name or what the job uses anyway; and what it is not given."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ...errors import InvalidInput, unknown
from ..torch_backend.buffers import CollectiveCall
from ..torch_backend.engine import Engine, channels_of
from ..torch_backend.recording import LEDGER
from .carrier import RESERVED, Carrier, ExecutorCarrier
from .gloo import Explain, GlooCarrier
from .nccl import Hopeless, NcclCarrier
from .sequencer import Sequencer

CARRIERS = ("auto", "executor", "gloo", "nccl")


@dataclass(frozen=True, kw_only=True)
class OwnedCarrier:
    """A carrier, and how to give back what it was given."""

    carrier: Carrier
    undo: Callable[[], object] = lambda: None


def chosen(name: str, engine: Engine) -> str:
    """The carrier that a name stands for: "auto" is NCCL where the job has called it, else the executor, else gloo."""
    if name not in CARRIERS:
        raise unknown("carrier", name, CARRIERS)
    if name != "auto":
        return name
    # All ranks have made the same calls.
    if any(choice.backend == "nccl" for choice in LEDGER.all()):
        return "nccl"
    return "gloo" if engine.job.executor is None else "executor"


def make(
    name: str, engine: Engine, sequencer: Sequencer, *, generation: int, hopeless: Hopeless, explain: Explain
) -> OwnedCarrier:
    """The carrier of a `chosen` name; all ranks make it at the same point.

    Args:
        name: One of `CARRIERS` but "auto".
        engine: The engine of the group of all ranks.
        sequencer: Hears of motifs that have ended.
        generation: How many enforcers this process has made.
        hopeless: Says why a GPU waits for an op in vain.
        explain: Turns an error of gloo's into one that names the rank that is gone.

    Returns:
        The carrier, and how to give back what it was given.

    Raises:
        InvalidInput: There is no executor, or it has no communicators left.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    if name == "nccl":
        return OwnedCarrier(
            carrier=NcclCarrier(
                rank=rank, size=size, timeout_s=engine.timeout_s, hopeless=hopeless, failed=sequencer.fail
            )
        )
    if name == "gloo":
        return OwnedCarrier(
            carrier=GlooCarrier(
                sequencer.ended, rank=rank, size=size, timeout_s=engine.timeout_s, explain=explain
            )
        )  # fmt: skip
    job = engine.job
    if job.executor is None:
        raise InvalidInput(f"carrier: there is no executor ({job.why}); use gloo")
    first = job.max_communicators - RESERVED
    if job.next > first:
        raise InvalidInput(f"enforcer: {job.next} groups leave no communicators for plans; make it earlier")
    # Groups that are made later stay below; all ranks make (and close) the enforcer at the same point.
    job.max_communicators = first
    carrier = ExecutorCarrier(
        job.executor, sequencer.ended, networks=list(channels_of(os.environ)), first=first,
        timeout_s=engine.timeout_s, generation=generation,
    )  # fmt: skip
    return OwnedCarrier(carrier=carrier, undo=lambda: setattr(job, "max_communicators", first + RESERVED))


def refusal(carrier: Carrier, engine: Engine, call: CollectiveCall) -> str:
    """Why a call is left to the wrapped backend; only of what is the same on all ranks."""
    if isinstance(carrier, NcclCarrier):
        return carrier.refusal(call, engine.size)
    if carrier.programs or engine.job.executor is not None:
        return engine.refusal(call)
    if call.device.type != "cpu" or engine.size == 1:
        return "not for gloo's lanes"
    if call.splits is not None:
        # Not whether a tensor is empty: those of other ranks may not be.
        return "sparse tensors" if any(tensor.layout != torch.strided for tensor in call.inputs) else ""
    return "nothing to move" if call.tensor.layout != torch.strided or call.tensor.numel() == 0 else ""
