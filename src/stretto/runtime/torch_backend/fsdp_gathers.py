# SPDX-License-Identifier: Apache-2.0
"""FSDP2's all-gathers, handed over before they are waited for.

`fully_shard` asks for the parameters of a layer ahead of time, and waits for them when the layer runs. It asks with a
call that blocks: on CPUs nothing runs beside it, and an enforcer sees one all-gather at a time; on GPUs a stream of
FSDP2's waits, and each all-gather stands behind the one before. FSDP2 takes collectives of one's own
(`set_custom_all_gather`): ours returns the work, for which FSDP2 waits where it copies the parameters out.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ...errors import InvalidInput, unknown
from .current import CURRENT
from .patches import FSDP_ALL_GATHER, Undo, apply
from .watch import RECORDING

SETTER = "set_custom_all_gather"
OPTION = "STRETTO_EARLY_GATHERS"


def early_gathers(model: torch.nn.Module) -> int:
    """Let FSDP2 wait for the all-gathers of a model where their parameters are used, not where it asks for them.

    Call it after `fully_shard`. With `set_modules_to_forward_prefetch`, and in the backward pass by itself, FSDP2 asks
    for the next layer while one runs; on CPUs that overlaps only so, and a plan may reorder and cut what is under way.
    On GPUs the application's stream waits, where parameters are copied out, and no stream of FSDP2's before.
    Reduce-scatters stay as they are: FSDP2 uses their result at once and ignores the work.

    Args:
        model: A model with modules that `fully_shard` was applied to.

    Returns:
        How many modules gather early.

    Raises:
        InvalidInput: No module is sharded, or this PyTorch takes no collectives of one's own.
    """
    from torch.distributed.fsdp import FSDPModule

    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not sharded:
        raise InvalidInput("model: fully_shard was applied to none of its modules")
    if not hasattr(FSDPModule, SETTER):
        raise InvalidInput(f"torch: {torch.__version__} has no FSDPModule.{SETTER}; 2.9 and later have")
    gather = _all_gather()
    for module in sharded:
        getattr(module, SETTER)(gather)
    return len(sharded)


def _all_gather() -> Any:
    """An object of FSDP2's interface, whose place is known only to versions that have it."""
    from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather

    # Older versions have only the second name, and newer ones warn of it.
    call: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

    class EarlyAllGather(AllGather):
        def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
            return torch.empty(*size, dtype=dtype, device=device)

        def __call__(
            self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool = False
        ) -> dist.Work | None:
            work: dist.Work | None = call(output_tensor, input_tensor, group=group, async_op=True)
            return work

    return EarlyAllGather()


def gather_early_under_plans() -> Undo | None:
    """Let the all-gathers of unchanged FSDP2 scripts be waited for later while a step is recorded or planned.

    Without a plan, and so in the unchanged job that a plan is compared with, they are as ever. All ranks call this at
    the same iteration.

    Returns:
        What ends it; None where STRETTO_EARLY_GATHERS is not on, or the job has no FSDP2.

    Raises:
        InvalidInput: STRETTO_EARLY_GATHERS is neither on nor off.
    """
    asked = os.environ.get(OPTION, "") or "off"
    if asked not in ("on", "off"):
        raise unknown(OPTION, asked, ("on", "off"))
    module, _, name = FSDP_ALL_GATHER.owners[0].partition(":")
    if asked == "off" or not hasattr(sys.modules.get(module), name):
        return None

    def wrap(usual: Callable[..., Any]) -> Callable[..., Any]:
        def gather(
            self: Any, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool = False
        ) -> Any:
            return usual(self, output_tensor, input_tensor, group, async_op or _followed())

        return gather

    return apply(FSDP_ALL_GATHER, wrap)


def _followed() -> bool:
    """Whether somebody follows the calls of this process: a recording, or a plan."""
    enforcer = CURRENT.enforcer
    return RECORDING.current is not None or (enforcer is not None and not enforcer.asleep)
