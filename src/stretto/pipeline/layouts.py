# SPDX-License-Identifier: Apache-2.0
"""A search for pipelines over meshes: which layers and devices each stage gets, in which mesh, and with which schedule.

Stages take the cluster's devices in order, whole hosts or parts of one; a stage of n devices is a mesh of d x t, over
which samples (d) and layers (t) are split. For each layout compute scales with the devices, and what is moved is
planned: tensors between stages, sums of layers over t, and gradients over d, all as resharding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise, product

from ..cluster import Cluster
from ..errors import Infeasible, InvalidInput
from ..resharding import Layout, Mesh, Spec, Tensor, plan_tensors
from ..resharding.placing import host_of
from .memory import StageMemory
from .pipeline_model import PipelineModel
from .schedule import check_counts
from .search import PipelineResult, search
from .simulation import StageCosts, lower_bound_us

MOST_STAGES, MOST_LAYOUTS = 16, 1 << 16
LAYOUTS, EVALUATIONS = 24, 120


@dataclass(frozen=True, kw_only=True)
class StageLayout:
    """The layers and the devices of one stage, as a mesh of data-parallel by tensor-parallel devices."""

    first: int
    last: int
    """The layers from `first` on, before `last`."""
    shape: tuple[int, int]
    devices: tuple[int, ...]

    @property
    def data(self) -> int:
        """The number of devices that samples are split over."""
        return self.shape[0]

    @property
    def tensor(self) -> int:
        """The number of devices that each layer is split over."""
        return self.shape[1]

    @cached_property
    def mesh(self) -> Mesh:
        """The devices as a mesh."""
        return Mesh(shape=self.shape, devices=self.devices)


@dataclass(frozen=True, kw_only=True)
class PipelineLayout:
    """A layout of a model's stages over a cluster, with its best schedule and what was predicted for it."""

    stages: tuple[StageLayout, ...]
    costs: StageCosts
    memory: tuple[StageMemory, ...]
    result: PipelineResult

    @property
    def total_us(self) -> float:
        """The predicted time of a step."""
        return self.result.total_us


@dataclass(frozen=True, kw_only=True)
class LayoutResult:
    """The layouts that were tried, fastest first, and how many there are."""

    layouts: tuple[PipelineLayout, ...]
    considered: int
    """Layouts that fit into memory."""
    exhaustive: bool
    """Whether every layout that was not tried has a lower bound above the best time."""

    @property
    def best(self) -> PipelineLayout:
        """The fastest layout."""
        return self.layouts[0]


class LayoutCosts:
    """Times and memory of stages of a model on a cluster; what was planned once is kept."""

    def __init__(self, model: PipelineModel, cluster: Cluster) -> None:
        self.model, self.cluster = model, cluster
        self._planned: dict[tuple[Tensor, ...], float] = {}

    def compute_us(self, stage: StageLayout) -> tuple[float, float]:
        """Forward and backward of a micro-batch without communication."""
        layers = self.model.layers[stage.first : stage.last]
        share = self.model.samples / math.prod(stage.shape)
        return sum(each.forward_us for each in layers) * share, sum(each.back_us for each in layers) * share

    def memory(self, stage: StageLayout) -> StageMemory:
        """Bytes of one device."""
        layers, model = self.model.layers[stage.first : stage.last], self.model
        saved = sum(each.kept_elements for each in layers) * model.samples * model.dtype_bytes
        parameters = sum(each.parameters for each in layers) / stage.tensor
        return StageMemory(
            fixed_bytes=parameters * model.bytes_per_parameter, activation_bytes=saved / math.prod(stage.shape)
        )

    def sums_us(self, stage: StageLayout) -> float:
        """The sums of a micro-batch's layers over the tensor-parallel devices, of all data-parallel ones at once."""
        shared = sum(each.shared_elements for each in self.model.layers[stage.first : stage.last])
        if stage.tensor == 1 or not shared:
            return 0.0
        sides = [Layout(mesh=stage.mesh, spec=Spec.parse(text)) for text in ("S0RP1", "S0R")]
        return self._planned_us([self._tensor((self.model.samples, math.ceil(shared)), sides[0], sides[1])])

    def reduce_us(self, stage: StageLayout) -> float:
        """The sum of gradients over the data-parallel devices, once per step."""
        count = sum(each.parameters for each in self.model.layers[stage.first : stage.last])
        if stage.data == 1 or not count:
            return 0.0
        sides = [Layout(mesh=stage.mesh, spec=Spec.parse(text)) for text in ("S1P0", "S1")]
        return self._planned_us([self._tensor((math.ceil(count),), sides[0], sides[1])])

    def transfer_us(self, src: StageLayout, dst: StageLayout, cut: int) -> float:
        """What crosses a cut between two stages, for one micro-batch.

        Args:
            src: the sending stage.
            dst: the receiving stage.
            cut: the number of layers before the cut.

        Returns:
            Microseconds.
        """
        tensors = []
        for shape in self.model.crossing(cut):
            spec = Spec.parse("S0" + "R" * len(shape))
            sides = [Layout(mesh=side.mesh, spec=spec) for side in (src, dst)]
            tensors.append(self._tensor((self.model.samples, *shape), sides[0], sides[1]))
        return self._planned_us(tensors)

    def costs(self, stages: Sequence[StageLayout], *, communication: bool = True) -> StageCosts:
        """The costs of all stages; without communication those of compute alone."""
        times = [self.compute_us(stage) for stage in stages]
        sums = [self.sums_us(stage) if communication else 0.0 for stage in stages]
        there = back = (0.0,) * (len(stages) - 1)
        if communication:
            pairs = list(pairwise(stages))
            there = tuple(self.transfer_us(a, b, a.last) for a, b in pairs)
            back = tuple(self.transfer_us(b, a, a.last) for a, b in pairs)
        return StageCosts(
            forward_us=tuple(ahead + extra for (ahead, _), extra in zip(times, sums, strict=True)),
            input_us=tuple(behind / 2 + extra for (_, behind), extra in zip(times, sums, strict=True)),
            weight_us=tuple(behind / 2 for _, behind in times),
            activation_us=there,
            gradient_us=back,
            reduce_us=tuple(self.reduce_us(stage) if communication else 0.0 for stage in stages),
        )

    def _tensor(self, shape: tuple[int, ...], src: Layout, dst: Layout) -> Tensor:
        return Tensor(shape=shape, dtype_bytes=self.model.dtype_bytes, src=src, dst=dst)

    def _planned_us(self, tensors: Sequence[Tensor]) -> float:
        key = tuple(tensors)
        if key not in self._planned:
            self._planned[key] = plan_tensors(tensors, self.cluster).time_us
        return self._planned[key]


def search_layouts(
    model: PipelineModel,
    cluster: Cluster,
    microbatches: int,
    *,
    stages: int | None = None,
    cap_bytes: float = float("inf"),
    transport: str = "async",
    layouts: int = LAYOUTS,
    on_step: Callable[[int], None] | None = None,
) -> LayoutResult:
    """Choose stages, meshes, warm-ups and delays for the least predicted time of a step on all devices of a cluster.

    Layouts are tried in the order of a lower bound for their compute; the first whose bound is above the best time ends
    the search.

    Args:
        model: the layers.
        cluster: the cluster; all of its devices are used.
        microbatches: micro-batches of a step.
        stages: number of stages; None tries up to 16.
        cap_bytes: memory of a device.
        transport: one of `TRANSPORTS`.
        layouts: most layouts for which transfers are planned and schedules searched, >= 1.
        on_step: called with the number of layouts tried so far.

    Returns:
        The layouts that were tried, fastest first.

    Raises:
        InvalidInput: an argument is out of range.
        Infeasible: no layout fits under the cap.
    """
    if layouts < 1:
        raise InvalidInput(f"layouts: must be >= 1, not {layouts}")
    most = min(MOST_STAGES, len(model.layers), cluster.num_devices)
    if stages is not None and not 1 <= stages <= most:
        raise InvalidInput(f"stages: must be 1..{most} for {len(model.layers)} layers, not {stages}")
    check_counts(stages or 1, microbatches)
    costs = LayoutCosts(model, cluster)
    found: list[tuple[float, int, tuple[StageLayout, ...]]] = []
    for count in range(1, most + 1) if stages is None else (stages,):
        for layout in every_layout(model, cluster, count):
            if all(costs.memory(stage).room(cap_bytes, 1) for stage in layout):
                bound = lower_bound_us(costs.costs(layout, communication=False), microbatches)
                found.append((bound, len(found), layout))
    if not found:
        raise Infeasible(f"cap_bytes: no layout of {model.name} fits into {cap_bytes / 1e9:.3g} GB on each device")
    found.sort()
    tried: list[PipelineLayout] = []
    best = float("inf")
    for bound, _, layout in found:
        if bound >= best or len(tried) >= layouts:
            break
        times = costs.costs(layout)
        memory = tuple(costs.memory(stage) for stage in layout)
        result = search(
            times, microbatches, memory=memory, cap_bytes=cap_bytes, transport=transport, evaluations=EVALUATIONS
        )
        tried.append(PipelineLayout(stages=layout, costs=times, memory=memory, result=result))
        best = min(best, result.total_us)
        if on_step is not None:
            on_step(len(tried))
    rest = found[len(tried) :]
    tried.sort(key=lambda each: each.total_us)
    return LayoutResult(layouts=tuple(tried), considered=len(found), exhaustive=not rest or rest[0][0] >= best)


def every_layout(model: PipelineModel, cluster: Cluster, count: int) -> Iterator[tuple[StageLayout, ...]]:
    """All layouts of so many stages: sizes of stages, balanced cuts of the layers, and shapes of meshes.

    Args:
        model: the layers.
        cluster: the cluster, whose hosts have equally many devices.
        count: number of stages.

    Returns:
        An iterator over the stages of each layout.

    Raises:
        InvalidInput: hosts have different numbers of devices, or there are too many layouts.
    """
    host = host_of(cluster)
    sizes = {host.count(number) for number in host}
    if len(sizes) != 1:
        raise InvalidInput(f"cluster: hosts have {sorted(sizes)} devices; layouts need equally many on each")
    width = sizes.pop()
    made = 0
    for parts in _sizes(cluster.num_devices, count, width, 0):
        cuts = model.balanced_cuts(parts)
        shapes = [[s for s in _shapes(size, width) if model.samples % s[0] == 0] for size in parts]
        begins = [sum(parts[:at]) for at in range(count)]
        for chosen in product(*shapes):
            made += 1
            if made > MOST_LAYOUTS:
                raise InvalidInput(f"stages: more than {MOST_LAYOUTS} layouts of {count} stages; give fewer stages")
            yield tuple(
                StageLayout(
                    first=cuts[at], last=cuts[at + 1], shape=chosen[at],
                    devices=tuple(range(begins[at], begins[at] + parts[at])),
                )
                for at in range(count)
            )  # fmt: skip


def _sizes(devices: int, count: int, width: int, begin: int) -> Iterator[tuple[int, ...]]:
    """Numbers of devices of the stages: whole hosts, or parts of one host that divide it."""
    left = devices - begin
    if count == 0:
        if left == 0:
            yield ()
        return
    whole = [size for size in range(width, left + 1, width)] if begin % width == 0 else []
    parts = [size for size in range(1, min(width, left + 1)) if width % size == 0 and begin % size == 0]
    for size in parts + whole:
        if left - size >= count - 1:
            for rest in _sizes(devices, count - 1, width, begin + size):
                yield (size, *rest)


def _shapes(size: int, width: int) -> list[tuple[int, int]]:
    """Meshes of so many devices whose tensor-parallel groups lie inside a host."""
    inside = min(size, width)
    return [(size // tensor, tensor) for tensor in range(1, inside + 1) if inside % tensor == 0]
