# SPDX-License-Identifier: Apache-2.0
"""DDP's buckets and FSDP2's buffers in symmetric memory, so that programs on GPU memory use them where they lie."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

import torch
import torch.distributed as dist

from ...errors import InvalidInput
from ...units import format_bytes
from .gpu_engine import GpuEngine
from .patches import DDP_REDUCER, apply
from .symmetric_pool import SymmetricPool

LOGGER = logging.getLogger("stretto.torch")
SMALL_BYTES, SPARE_BYTES = 8 << 20, 96 << 20
"""What PyTorch's allocator may waste in its segments: of small buckets alone, and in general."""
NO_OTHER_POOL = "DDP_DISABLE_COMM_MEM"
"""PyTorch's own variable: whether DDP leaves out the memory that a backend offers."""
_distributed: Any = dist
PlainReducer: Any = _distributed.Reducer


def bucket_bytes(parameters: Sequence[torch.Tensor]) -> int:
    """The memory that DDP's buckets need at most: new ones are made while views of the first ones may be alive.

    >>> bucket_bytes([torch.zeros(100)]) >> 20
    8
    """
    total = sum(one.numel() * one.element_size() for one in parameters)
    return 2 * total + total // 4 + (SMALL_BYTES if total < 1 << 20 else SPARE_BYTES)


def pool_for(group: Any, parameters: Sequence[torch.Tensor]) -> SymmetricPool | None:
    """A pool for the buckets of some parameters; None where programs do not run on their memory. Collective."""
    engine = getattr(group, "gpu", None)
    devices = {one.device for one in parameters}
    if not isinstance(engine, GpuEngine) or len(devices) != 1 or next(iter(devices)).type != "cuda":
        return None
    if os.environ.get(NO_OTHER_POOL) == "1":
        return None
    made = engine.make_pool(bucket_bytes(parameters), next(iter(devices)))
    if isinstance(made, str):
        LOGGER.info("DDP's buckets are not in symmetric memory: %s", made)
        return None
    LOGGER.info("DDP's buckets are in symmetric memory (%s)", format_bytes(made.memory.nbytes))
    return made


def _group_of(rest: Sequence[Any], named: Mapping[str, Any]) -> Any:
    """The group is the fourth argument of the reducer of all versions."""
    return rest[2] if len(rest) > 2 else named.get("process_group")


class SymmetricReducer(PlainReducer):  # type: ignore[misc]
    """DDP's reducer, whose buckets are in symmetric memory where programs on GPU memory run.

    DDP makes buckets when it is made, and anew in the order of gradients before its second iteration; both from Python.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], *rest: Any, **named: Any) -> None:
        self._group = _group_of(rest, named)
        self._symmetric = pool_for(self._group, parameters)
        self._rebuilt = False
        with self._in_pool():
            super().__init__(parameters, *rest, **named)
        if self._symmetric is not None:
            self._group.gpu.agree_pool(self._symmetric)

    @contextlib.contextmanager
    def _in_pool(self) -> Iterator[None]:
        if self._symmetric is None or self._rebuilt:
            yield
            return
        # Without this setting DDP might ask the wrapped NCCL for memory of its own.
        before = os.environ.get(NO_OTHER_POOL)
        os.environ[NO_OTHER_POOL] = "1"
        try:
            with self._symmetric.use():
                yield
        finally:
            os.environ.pop(NO_OTHER_POOL)
            if before is not None:
                os.environ[NO_OTHER_POOL] = before

    def _rebuild_buckets(self) -> bool:
        with self._in_pool():
            rebuilt = bool(super()._rebuild_buckets())
        if rebuilt and self._symmetric is not None:
            self._rebuilt = True  # DDP rebuilds its buckets once.
            self._group.gpu.agree_pool(self._symmetric)
        return rebuilt


def install_reducer() -> None:
    """From now on DDP makes its reducers so."""
    apply(DDP_REDUCER, lambda _: SymmetricReducer)


def symmetric_buffers(model: torch.nn.Module, nbytes: int) -> int:
    """Put the buffers of FSDP2's all-gathers and reduce-scatters into symmetric memory; call it after `fully_shard`.

    All ranks call it at the same point. DDP needs no call: its buckets are there with STRETTO_GPU_POOL=on.

    Args:
        model: A model with modules that `fully_shard` was applied to, on a mesh of one dimension.
        nbytes: The memory for these buffers. FSDP2 takes them in four streams, each of which has a quarter; a quarter
            should hold the unsharded parameters of four layers, or what does not fit lies elsewhere and is copied.

    Returns:
        How many modules use it; 0 where no program runs on their memory.

    Raises:
        InvalidInput: No module is sharded, or this PyTorch takes no collectives of one's own.
    """
    from torch.distributed.fsdp import FSDPModule

    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not sharded:
        raise InvalidInput("model: fully_shard was applied to none of its modules")
    if not hasattr(FSDPModule, "set_custom_reduce_scatter"):
        raise InvalidInput(f"torch: {torch.__version__} has no FSDPModule.set_custom_reduce_scatter")
    parameter: Any = next(model.parameters())
    group = parameter.device_mesh.get_group() if parameter.device_mesh.ndim == 1 else None
    engine = getattr(group, "gpu", None)
    if not isinstance(engine, GpuEngine) or parameter.device.type != "cuda":
        LOGGER.info("FSDP2's buffers are not in symmetric memory: no group of GPUs of one host on the backend stretto")
        return 0
    made = engine.make_pool(nbytes, parameter.device)
    if isinstance(made, str):
        LOGGER.info("FSDP2's buffers are not in symmetric memory: %s", made)
        return 0
    engine.agree_pool(made)
    gather, scatter = _collectives(made)
    for module in sharded:
        any_module: Any = module
        any_module.set_custom_all_gather(gather)
        any_module.set_custom_reduce_scatter(scatter)
    return len(sharded)


def _collectives(pool: SymmetricPool) -> tuple[Any, Any]:
    """Objects of FSDP2's interfaces, whose place is known only to versions that have them."""
    from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

    # Older versions have only the second names, and newer ones warn of them.
    gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

    class Allocated:
        def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
            shape = tuple(int(one) for one in size)
            nbytes = prod(shape) * dtype.itemsize
            return (
                pool.piece(nbytes).view(dtype).view(shape) if nbytes else torch.empty(shape, dtype=dtype, device=device)
            )

    class SymmetricAllGather(Allocated, AllGather):
        def __call__(
            self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool = False
        ) -> dist.Work | None:
            work: dist.Work | None = gather(output_tensor, input_tensor, group=group, async_op=async_op)
            return work

    class SymmetricReduceScatter(Allocated, ReduceScatter):
        def __call__(
            self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, async_op: bool = False
        ) -> dist.Work | None:
            work: dist.Work | None = scatter(output_tensor, input_tensor, op, group=group, async_op=async_op)
            return work

    return SymmetricAllGather(), SymmetricReduceScatter()
