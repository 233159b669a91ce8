# SPDX-License-Identifier: Apache-2.0
"""The cross-mesh paper's models on two p3.8xlarge: stage times from a roofline, transfers from the resharding planner.

Each stage has one host of four GPUs. A stage's time is the roofline's (`workload.roofline`), of which kernels reach one
share, `EFFICIENCY`; the devices of a stage exchange data over NVLink at its rate. A layer is recomputed only where the
stage would not fit into 16 GB with eager-1F1B's micro-batches in flight. That choice is the same for all systems, so
that systems differ only in communication and order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from ..cluster import Cluster
from ..errors import InvalidInput, unknown
from ..workload.catalog.cross_mesh import ModelLayer, balanced_cut, crossing, gpt_layers, skip_connections, unet_layers
from ..workload.roofline import Accelerator, accelerator
from .makers import eager_1f1b, eager_warmup, one_f_one_b
from .memory import LayerMemory, StageMemory, peak_bytes, recomputed
from .pipeline_model import PipelineLayer, PipelineModel
from .schedule import Schedule
from .search import search
from .simulation import PipelineRun, StageCosts, lower_bound_us, simulate

EFFICIENCY = 0.7
"""The share of either roof that kernels reach, for both models and all layers: the only constant that was chosen with
the paper's figures in sight. ``docs/pipeline.md`` shows what others give."""
NVLINK_GB_PER_S = 25.0
GPU_BYTES = 16e9
RESERVED_BYTES = 1e9
"""Bytes of a GPU's memory that the driver, library buffers and fragmentation take."""
GPUS = 4
STAGES = 2


@dataclass(frozen=True, kw_only=True)
class PaperCase:
    """One row of the paper's Table 3."""

    name: str
    layers: tuple[ModelLayer, ...]
    dtype: str
    dtype_bytes: int
    batch: int
    microbatches: int
    data: int
    """Data-parallel degree in a stage: the number of devices that the batch is split over."""
    tensor: int
    """Operator-parallel degree in a stage: the number of devices that each layer is split over."""
    sharded_weights: bool = False
    """Whether the data-parallel devices also shard the weights, and gather for each layer weights or activations."""

    @property
    def microbatch(self) -> int:
        """The number of samples in one micro-batch."""
        return self.batch // self.microbatches

    @cached_property
    def cut(self) -> int:
        """The number of layers on the first stage."""
        return balanced_cut(list(self.layers))

    @cached_property
    def stages(self) -> tuple[tuple[ModelLayer, ...], ...]:
        """The layers of both stages."""
        return self.layers[: self.cut], self.layers[self.cut :]

    @property
    def forward_flops(self) -> float:
        """Operations of one sample's forward pass."""
        return sum(layer.flops for layer in self.layers)

    def with_batches(self, microbatches: int) -> PaperCase:
        """This case with another number of micro-batches of the same size."""
        return replace(self, batch=self.microbatch * microbatches, microbatches=microbatches)


CASES: dict[str, PaperCase] = {
    case.name: case
    for case in (
        PaperCase(
            name="gpt_222", layers=tuple(gpt_layers()), dtype="fp16", dtype_bytes=2, batch=1024, microbatches=64,
            data=2, tensor=2,
        ),
        PaperCase(
            name="gpt_412", layers=tuple(gpt_layers()), dtype="fp16", dtype_bytes=2, batch=1024, microbatches=64,
            data=4, tensor=1,
        ),
        PaperCase(
            name="utrans", layers=tuple(unet_layers()), dtype="fp32", dtype_bytes=4, batch=2048, microbatches=32,
            data=4, tensor=1, sharded_weights=True,
        ),
    )
}  # fmt: skip


def case(name: str) -> PaperCase:
    """One of the paper's cases by name."""
    if name not in CASES:
        raise unknown("model", name, CASES)
    return CASES[name]


@dataclass(frozen=True, kw_only=True)
class TimedCase:
    """A case with its stages timed and fitted into memory; the strategy of its transfers is still to be chosen."""

    case: PaperCase
    costs: StageCosts
    """The stages' times, with transfers between stages that take no time."""
    memory: tuple[StageMemory, ...]
    recomputed: tuple[tuple[str, ...], ...]
    """The layers of each stage that are recomputed."""


def build(what: PaperCase, *, efficiency: float = EFFICIENCY, in_flight: Sequence[int] | None = None) -> TimedCase:
    """Time the stages of a case and choose the layers that are recomputed.

    Args:
        what: the case.
        efficiency: share of the roofline that kernels reach, over 0 and at most 1.
        in_flight: micro-batches in flight at each stage; None takes eager-1F1B's.

    Returns:
        The case with its stage times and memory.

    Raises:
        Infeasible: a stage does not fit into its GPUs even with every layer recomputed.
    """
    device = accelerator("v100_hgx2", efficiency=efficiency)
    flight = [min(count, what.microbatches) for count in in_flight or eager_warmup(STAGES)]
    samples = what.microbatch / what.data
    forward, inputs, weights, reduce, memories, names = [], [], [], [], [], []
    received = sum(_elements(shape) for shape in crossing(list(what.layers), what.cut)) * samples * what.dtype_bytes
    for stage, layers in enumerate(what.stages):
        memory, again = recomputed(
            [_layer_memory(layer, what, samples) for layer in layers],
            fixed_bytes=_fixed_bytes(layers, what),
            in_flight=flight[stage],
            cap_bytes=GPU_BYTES - RESERVED_BYTES,
            received_bytes=received * stage,
        )
        memories.append(memory)
        names.append(tuple(layer.name for layer, chosen in zip(layers, again, strict=True) if chosen))
        each = [_layer_us(layer, what, samples, device) for layer in layers]
        forward.append(sum(ahead for ahead, _, _ in each))
        repeated = sum(ahead for (ahead, _, _), chosen in zip(each, again, strict=True) if chosen)
        inputs.append(repeated + sum(back for _, back, _ in each))
        weights.append(sum(late for _, _, late in each))
        reduce.append(_reduce_us(layers, what))
    costs = StageCosts(
        forward_us=tuple(forward), input_us=tuple(inputs), weight_us=tuple(weights), reduce_us=tuple(reduce)
    )
    return TimedCase(case=what, costs=costs, memory=tuple(memories), recomputed=tuple(names))


def _elements(shape: Sequence[int]) -> float:
    size = 1.0
    for number in shape:
        size *= number
    return size


def _layer_us(layer: ModelLayer, what: PaperCase, samples: float, device: Accelerator) -> tuple[float, float, float]:
    """Microseconds of a layer's forward, input gradient and weight gradient on one device."""
    part = samples / what.tensor
    product_us = device.compute_us(layer.flops * part, 0.0, what.dtype, kernels=layer.kernels // 2)
    moved = layer.traffic_elements * part * what.dtype_bytes
    other_us = device.compute_us(0.0, moved, what.dtype, kernels=layer.kernels - layer.kernels // 2)
    summed = 2 * (what.tensor - 1) / what.tensor * layer.shared * samples * what.dtype_bytes
    gathered = _gathered_elements(layer, what) * what.dtype_bytes / what.data if what.sharded_weights else 0.0
    sum_us, gather_us = summed / (NVLINK_GB_PER_S * 1e3), gathered / (NVLINK_GB_PER_S * 1e3)
    ahead = product_us + other_us + sum_us + gather_us
    return ahead, product_us + 2 * other_us + sum_us + gather_us, product_us + gather_us


def _gathered_elements(layer: ModelLayer, what: PaperCase) -> float:
    """Elements that the devices of a stage gather for a layer with sharded weights: the weights, or if fewer the
    activations.

    Gathering activations is operator parallelism; the paper leaves the choice to Alpa, which takes the cheaper one per
    layer.
    """
    return min(layer.parameters, (layer.input_elements + _elements(layer.output)) * what.microbatch)


def _layer_memory(layer: ModelLayer, what: PaperCase, samples: float) -> LayerMemory:
    saved = layer.saved_elements * samples * what.dtype_bytes / what.tensor
    kept = layer.input_elements * samples * what.dtype_bytes
    return LayerMemory(all_bytes=max(saved, kept), input_bytes=kept)


def _fixed_bytes(layers: Sequence[ModelLayer], what: PaperCase) -> float:
    """Table 1's 14 bytes per parameter in 16 bit (2 and Adam's 12), 12 in 32 bit (4 and Adam's 8), and the gradient.

    Adam's state is sharded over the data-parallel devices, as in Alpa; with sharded weights everything is.
    """
    parameters = sum(layer.parameters for layer in layers) / what.tensor
    state = 12.0 if what.dtype_bytes == 2 else 8.0
    rest = 2.0 * what.dtype_bytes
    return parameters * (state / what.data + rest / (what.data if what.sharded_weights else 1))


def _reduce_us(layers: Sequence[ModelLayer], what: PaperCase) -> float:
    """Microseconds to sum the gradients over the data-parallel devices once.

    With sharded weights the time is 0, because every backward has already summed them.
    """
    if what.sharded_weights or what.data == 1:
        return 0.0
    nbytes = sum(layer.parameters for layer in layers) / what.tensor * what.dtype_bytes
    return 2 * (what.data - 1) / what.data * nbytes / (NVLINK_GB_PER_S * 1e3)


@lru_cache(maxsize=64)
def transfer_us(name: str, strategy: str) -> tuple[float, float]:
    """Microseconds to move one micro-batch's activations to the next stage, and their gradients back, by a resharding
    strategy.

    Tensors are split over the data-parallel devices and copied on the operator-parallel ones, on both sides.
    """
    from ..resharding import Layout, Mesh, Spec, Tensor, plan_tensors

    what = case(name)
    cluster = Cluster.preset("p3_8xlarge", nodes=2)
    times = []
    for first, second in ((0, GPUS), (GPUS, 0)):
        tensors = []
        for shape in crossing(list(what.layers), what.cut):
            sides = [
                Layout(
                    mesh=Mesh(shape=(what.data, what.tensor), devices=tuple(range(base, base + GPUS))),
                    spec=Spec.parse("S0" + "R" * len(shape)),
                )
                for base in (first, second)
            ]
            tensors.append(
                Tensor(shape=(what.microbatch, *shape), dtype_bytes=what.dtype_bytes, src=sides[0], dst=sides[1])
            )
        times.append(plan_tensors(tensors, cluster, strategy=strategy).time_us)
    return times[0], times[1]


STRATEGY = {
    "send_recv": "send_recv",
    "alpa": "local_allgather",
    "broadcast": "broadcast",
    "overlap": "broadcast",
    "eager_1f1b": "broadcast",
    "stretto": "stretto",
}
SYSTEMS = (*STRATEGY, "upper_bound")


@dataclass(frozen=True, kw_only=True)
class CaseResult:
    """The outcome of one system on one case."""

    case: str
    system: str
    run: PipelineRun
    iteration_us: float
    tflops: float
    """Throughput of all GPUs together; recomputation does not count."""
    peak_gb: tuple[float, ...]
    bound_us: float
    """A lower bound on the time of any order of this work with this system's transfers."""


def evaluate(built: TimedCase, system: str) -> CaseResult:
    """Simulate one iteration under one of `SYSTEMS`."""
    if system not in SYSTEMS:
        raise unknown("system", system, SYSTEMS)
    what = built.case
    if what.microbatches < 1 or what.batch % what.microbatches:
        raise InvalidInput(f"microbatches: {what.batch} samples are not a multiple of {what.microbatches}")
    costs, transport = built.costs, "async"
    schedule: Schedule = one_f_one_b(STAGES, what.microbatches)
    if system != "upper_bound":
        there, back = transfer_us(what.name, STRATEGY[system])
        costs = replace(costs, activation_us=(there,), gradient_us=(back,))
    if system in ("send_recv", "alpa", "broadcast"):
        transport = "blocking"
    elif system == "eager_1f1b":
        schedule = eager_1f1b(STAGES, what.microbatches)
    elif system == "stretto":
        found = search(costs, what.microbatches, memory=built.memory, cap_bytes=GPU_BYTES - RESERVED_BYTES)
        schedule = found.schedule
    elif system == "upper_bound":
        schedule = min(
            (schedule, eager_1f1b(STAGES, what.microbatches)), key=lambda order: simulate(order, costs).total_us
        )
    run = simulate(schedule, costs, transport=transport)
    flops = 3 * what.forward_flops * what.batch
    return CaseResult(
        case=what.name,
        system=system,
        run=run,
        iteration_us=run.total_us,
        tflops=flops / run.total_us / 1e6,
        peak_gb=tuple(value / 1e9 for value in peak_bytes(schedule, built.memory)),
        bound_us=lower_bound_us(costs, what.microbatches),
    )


PAPER_MODELS = {"gpt": "gpt_222", "utrans": "utrans"}
"""The paper's models, and the case that has the micro-batch of each."""


def paper_model(name: str, *, efficiency: float = EFFICIENCY) -> PipelineModel:
    """One of the paper's models for a search of layouts, with the times of one V100 and no layer recomputed."""
    if name not in PAPER_MODELS:
        raise unknown("model", name, PAPER_MODELS)
    what = replace(case(PAPER_MODELS[name]), data=1, tensor=1, sharded_weights=False)
    device = accelerator("v100_hgx2", efficiency=efficiency)
    taken = skip_connections(list(what.layers))
    layers = []
    for at, layer in enumerate(what.layers):
        ahead, back, late = (us / what.microbatch for us in _layer_us(layer, what, what.microbatch, device))
        layers.append(
            PipelineLayer(
                name=layer.name, forward_us=ahead, backward_us=back + late, output=layer.output,
                parameters=layer.parameters, saved_elements=layer.saved_elements, shared_elements=layer.shared,
                needs=tuple(what.layers[source].name for source, user in taken if user == at),
            )
        )  # fmt: skip
    return PipelineModel(name=name, layers=tuple(layers), samples=what.microbatch, dtype_bytes=what.dtype_bytes)
