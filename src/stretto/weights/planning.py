# SPDX-License-Identifier: Apache-2.0
"""`plan_weights`: how the weights of a model get from trainers to servers, with the time and the bound."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from ..cluster import Cluster
from ..errors import InvalidInput, unknown
from ..resharding import Layout, ReshardPlan, Spec, Tensor, plan_tensors
from ..resharding.plan import OURS
from ..units import format_bytes, format_us
from .models import ModelShapes, ModelTensor, model_shapes
from .parallel import ParallelDegrees

DTYPES = ("bf16", "fp8")
SCALE_BLOCK = 128
"""Weights in fp8 have one float32 scale for each square of this many rows and columns, as DeepSeek-V3's have."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class WeightPlan:
    """A planned weight update: the model, both sides, and the resharding of all tensors together.

    Tensors that are alike in shape and layouts (those of many layers) are one tensor of `reshard`, with the layers as
    its first dimension.
    """

    model: ModelShapes
    trainer: ParallelDegrees
    server: ParallelDegrees
    dtype: str
    reshard: ReshardPlan
    names: tuple[tuple[str, ...], ...]
    """The names of the model's tensors in each tensor of `reshard`."""
    cpu_s: float
    """Processor seconds that the plan took."""

    @property
    def nbytes(self) -> int:
        """The bytes of the model as it is sent."""
        return sum(t.nbytes for t in self.reshard.tensors)

    @property
    def time_us(self) -> float:
        """The simulated time with fairly shared links: a NIC sends the messages of its connections in turn."""
        return self.times_us["fair"]

    @cached_property
    def times_us(self) -> dict[str, float]:
        """The simulated time with fair and, where the cluster can express it, with fifo links."""
        found = {}
        for contention in ("fair", "fifo"):
            try:
                timeline = self.reshard.simulate(contention)
            except InvalidInput:
                continue
            found[contention] = timeline.total_us if timeline is not None else 0.0
        return found

    @property
    def ratio(self) -> float:
        """The time as a multiple of the lower bound."""
        return self.time_us / self.reshard.bound_us if self.reshard.bound_us > 0 else 1.0

    def __repr__(self) -> str:
        return (
            f"<WeightPlan {self.model.name} {self.trainer} to {self.server}: {format_bytes(self.nbytes)}, "
            f"{format_us(self.time_us)}, {self.ratio:.3f}x the bound>"
        )


def plan_weights(
    model: ModelShapes | str,
    *,
    trainer: ParallelDegrees | str,
    server: ParallelDegrees | str,
    cluster: Cluster,
    dtype: str = "bf16",
    strategy: str = OURS,
    order: str | None = None,
) -> WeightPlan:
    """Plan how the weights of a model get from trainers to servers.

    >>> boxes = Cluster.preset("dgx_h100", nodes=2)
    >>> plan = plan_weights("llama-3-70b", trainer="fsdp=8", server="tp=8", cluster=boxes)
    >>> plan.nbytes, plan.ratio < 1.05
    (141107412992, True)

    Args:
        model: a model, or one of `MODELS`.
        trainer: degrees of the trainers, or as text such as ``pp=4,dp=32,ep=16`` or ``fsdp=64@0-63``.
        server: degrees of the servers, of the same form.
        cluster: the cluster; sides without devices take the next free ones, trainers first.
        dtype: what is sent, one of `DTYPES`; with ``fp8`` matrices have scales, and the rest stays in bf16.
        strategy: one of `stretto.resharding.SYSTEMS`.
        order: the order of a baseline.

    Returns:
        The plan.

    Raises:
        InvalidInput: an argument is invalid, or there are too few devices.
    """
    began = time.process_time()
    shapes = model_shapes(model) if isinstance(model, str) else model
    if dtype not in DTYPES:
        raise unknown("dtype", dtype, DTYPES)
    sides = _placed(trainer, server, cluster)
    stacked = _stacked(shapes, *sides, dtype)
    reshard = plan_tensors([tensor for tensor, _ in stacked], cluster, strategy=strategy, order=order)
    return WeightPlan(
        model=shapes, trainer=sides[0], server=sides[1], dtype=dtype, reshard=reshard,
        names=tuple(names for _, names in stacked), cpu_s=time.process_time() - began,
    )  # fmt: skip


def _placed(
    trainer: ParallelDegrees | str, server: ParallelDegrees | str, cluster: Cluster
) -> tuple[ParallelDegrees, ParallelDegrees]:
    found: list[ParallelDegrees] = []
    used: set[int] = set()
    for name, side in (("trainer", trainer), ("server", server)):
        try:
            one = ParallelDegrees.parse(side) if isinstance(side, str) else side
        except InvalidInput as error:
            raise InvalidInput(f"{name}: {error}") from None
        if not one.devices:
            free = [d for d in range(cluster.num_devices) if d not in used]
            if len(free) < one.size:
                left = f"{cluster.name} has {cluster.num_devices} devices, {len(free)} of them free"
                raise InvalidInput(f"{name}: {one} takes {one.size} devices; {left}")
            one = replace(one, devices=tuple(free[: one.size]))
        used |= set(one.devices)
        found.append(one)
    return found[0], found[1]


def _stacked(
    model: ModelShapes, trainer: ParallelDegrees, server: ParallelDegrees, dtype: str
) -> list[tuple[Tensor, tuple[str, ...]]]:
    """Tensors for the planner, with the names of the model's tensors that each stands for."""
    layouts: dict[tuple[object, ...], Layout] = {}
    alike: dict[tuple[tuple[int, ...], int, Layout, Layout], list[str]] = defaultdict(list)
    for tensor in model.tensors:
        sides = []
        for at, side in enumerate((trainer, server)):
            stage = side.stage_of(tensor, model)
            key = (at, tensor.role, len(tensor.shape), tensor.heads, stage)
            if key not in layouts:
                layouts[key] = side.layout(tensor, stage)
            sides.append(layouts[key])
        for name, shape, dtype_bytes in _sent(tensor, dtype):
            alike[shape, dtype_bytes, sides[0], sides[1]].append(name)
    return [
        (
            Tensor(
                name=names[0], shape=(len(names), *shape), dtype_bytes=dtype_bytes, src=_deeper(src), dst=_deeper(dst)
            ),
            tuple(names),
        )
        for (shape, dtype_bytes, src, dst), names in alike.items()
    ]


def _sent(tensor: ModelTensor, dtype: str) -> Iterator[tuple[str, tuple[int, ...], int]]:
    """Name, shape and element size of what is sent for a tensor: itself, and in fp8 its scales."""
    plain = dtype == "bf16" or len(tensor.shape) < 2 or tensor.role == "vocab" or ".gate." in tensor.name
    yield tensor.name, tensor.shape, 2 if plain else 1
    if not plain:
        *outer, rows, columns = tensor.shape
        yield f"{tensor.name}_scale_inv", (*outer, -(-rows // SCALE_BLOCK), -(-columns // SCALE_BLOCK)), 4


def _deeper(side: Layout) -> Layout:
    """The layout of several such tensors behind each other, in a new first dimension."""
    return replace(side, spec=Spec(axes=((), *side.spec.axes)))
