# SPDX-License-Identifier: Apache-2.0
"""The four training workloads of Themis (section 5.2), on 1024 NPUs with FP16 gradients.

=============== ====================================================================================================
what            is assumed where the paper is silent
=============== ====================================================================================================
compute         FLOPs over the peak FP16 rate of an A100 ("roofline from the total FLOPS"), the backward pass twice the
                forward pass, the update nothing; `compute` scales all of it. Taken at its word this makes compute a
                larger part of the iteration than the paper's Fig. 12 shows.
gradients       one all-reduce after the backward pass ("exposed communication occurs at the end of back-propagation",
                collectives of 100 MB to 1 GB); with `bucket_mb` buckets that leave while the backward pass goes on.
resnet152       32 images of 224 x 224 per NPU, data parallel.
gnmt            128 sentences of 50 words per NPU, data parallel; 8 encoder and 8 decoder LSTM layers of 1024, the first
                encoder layer in both directions, vocabularies of 32,000 words.
dlrm            512 samples per NPU. ASTRA-SIM's public file of the cited model has MLPs 13-512-512-512-16 and
                1040-512-512-512, with 64 tables; at 3 MB they are far below the paper's collectives, so all widths are
                eight times that (202 MB). MLPs data parallel, tables model parallel: their all-to-alls go beside the
                bottom MLP.
transformer1t   128 layers, 25,600 wide, 16 sequences of 2048 words per replica; model parallel over the first 128 NPUs
                (two all-reduces of the activations per layer and pass, which block), ZeRO-2 between the replicas: a
                reduce-scatter of each layer's gradients, an all-gather of all parameters at the end. Activations are
                computed again before each layer's backward pass; as in Fig. 12 this counts as forward.
=============== ====================================================================================================
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from ...errors import InvalidInput, unknown
from ...units import MB
from ..dag import Workload
from ..roofline import accelerator
from .cnn import resnet_blocks
from .common import OpCollector, blocks_of_buckets, buckets, check_count, check_ranks, check_scale, last

HALF = 2
BATCH = {"resnet152": 32, "gnmt": 128, "dlrm": 512, "transformer1t": 16}
UNIT = {"resnet152": "images", "gnmt": "sentences", "dlrm": "samples", "transformer1t": "sequences"}

GNMT_WIDTH = 1024
GNMT_VOCABULARY = 32_000
GNMT_WORDS = 50

DLRM_SCALE = 8
DLRM_TABLES = 64
DLRM_DIM = 16 * DLRM_SCALE
DLRM_BOTTOM = (13, *(512 * DLRM_SCALE,) * 3, DLRM_DIM)
DLRM_TOP = (DLRM_DIM * (DLRM_TABLES + 1), *(512 * DLRM_SCALE,) * 3)

TRANSFORMER_LAYERS = 128
TRANSFORMER_WIDTH = 25_600
TRANSFORMER_WORDS = 2048
MODEL_PARALLEL = 128


@dataclass(frozen=True, kw_only=True)
class ThemisLayer:
    """Parameters that are computed together and whose gradients are ready together."""

    name: str
    params: float
    flops: float
    """Operations of one sample's forward pass."""


def themis(
    variant: str = "resnet152",
    *,
    ranks: int = 1024,
    batch: int | None = None,
    bucket_mb: float = 0.0,
    compute: float = 1.0,
) -> Workload:
    """A workload of the Themis paper.

    >>> themis("gnmt")
    <Workload themis:gnmt: 35 ops (1 of communication) over 1024 ranks, 26.49 ms of compute, 562 MB moved>

    Args:
        variant: "resnet152", "gnmt", "dlrm" or "transformer1t".
        ranks: number of NPUs, 1..16384; for transformer1t a multiple of 128 from 256 on.
        batch: samples per NPU (per replica for transformer1t), 1..2^20; None takes the variant's.
        bucket_mb: size of a gradient bucket in MB, up to 1e6; 0 means one all-reduce at the end of the backward pass.
        compute: factor on all compute times, 0..1e6.

    Returns:
        One training step.

    Raises:
        InvalidInput: an argument is unknown or out of range.
    """
    if variant not in BATCH:
        raise unknown("variant of themis", variant, BATCH)
    check_ranks(ranks)
    size = BATCH[variant] if batch is None else batch
    check_count("batch", size, 1, 1 << 20)
    check_scale("bucket_mb", bucket_mb, 0.0, 1e6)
    check_scale("compute", compute, 0.0, 1e6)
    build = _Build(ranks, size, bucket_mb * MB, compute / (accelerator("themis_npu").tflops["fp16"] * 1e6))
    {"resnet152": _resnet, "gnmt": _gnmt, "dlrm": _dlrm, "transformer1t": _transformer}[variant](build)
    replicas = ranks // MODEL_PARALLEL if variant == "transformer1t" else ranks
    notes = (
        f"Themis, section 5.2; {size} {UNIT[variant]} per {'replica' if replicas < ranks else 'NPU'}, FP16 gradients, "
        f"{'buckets of ' + format(bucket_mb, 'g') + ' MB' if bucket_mb else 'one all-reduce after the backward pass'}",
        f"compute: FLOPs at 312 TFLOP/s, times {compute:g}",
    )
    work = build.steps.workload(f"themis:{variant}", samples=size * replicas, unit=UNIT[variant], notes=notes)
    # The next iteration begins when all gradients are reduced: ops without dependencies get a dependency on them.
    again = tuple(last(name) for name in build.waits if name in work.index)
    return replace(work, ops=tuple(op if op.after else replace(op, after=again) for op in work.ops))


class _Build:
    def __init__(self, ranks: int, batch: int, bucket_bytes: float, us_per_flop: float) -> None:
        self.steps, self.batch, self.bucket_bytes, self.us_per_flop = (
            OpCollector(ranks),
            batch,
            bucket_bytes,
            us_per_flop,
        )
        self.waits: list[str] = []
        """Names of the ops that the next iteration waits for."""

    def forward(self, layers: Sequence[ThemisLayer], after: Sequence[str]) -> list[str]:
        """Add the forward passes of the layers, one after the other; return the names of ops to wait for."""
        waits = list(after)
        for layer in layers:
            waits = [self.steps.compute(f"fwd-{layer.name}", self._us(layer), waits, phase="forward")]
        return waits

    def backward(
        self, layers: Sequence[ThemisLayer], after: Sequence[str], what: str, *, flush: bool = True
    ) -> list[str]:
        """Add the backward passes in reverse order; with `flush` each bucket of gradients is sent as soon as it is
        complete.
        """
        sizes = [layer.params * HALF for layer in layers]
        units = blocks_of_buckets(buckets(sizes, self.bucket_bytes)) if self.bucket_bytes else [range(len(layers))]
        first = {unit[0]: number for number, unit in enumerate(units)}
        waits = list(after)
        for at in reversed(range(len(layers))):
            waits = [self.steps.compute(f"bwd-{layers[at].name}", 2 * self._us(layers[at]), waits, phase="backward")]
            if at in first and flush:
                name = f"ar-{what}.{first[at]}" if len(units) > 1 else f"ar-{what}"
                self.reduce(name, sum(sizes[number] for number in units[first[at]]), waits)
        return waits

    def reduce(self, name: str, nbytes: float, after: Sequence[str]) -> None:
        """Add an all-reduce of gradients among all ranks."""
        self.steps.comm(name, "all_reduce", nbytes, after, phase="backward", encoding="fp16")
        self.waits.append(name)

    def _us(self, layer: ThemisLayer) -> float:
        return self.batch * layer.flops * self.us_per_flop


def _resnet(build: _Build) -> None:
    layers = [ThemisLayer(name=block.name, params=block.params, flops=block.flops) for block in resnet_blocks("152")]
    build.backward(layers, build.forward(layers, []), "gradients")


def _gnmt(build: _Build) -> None:
    layers = gnmt_layers()
    build.backward(layers, build.forward(layers, []), "gradients")


def gnmt_layers() -> list[ThemisLayer]:
    """The LSTM layers and the output layer; the embedding tables belong to the first layer of each side.

    A word costs two operations per parameter that it uses.
    """

    def lstm(name: str, inputs: int, count: int = 1, embedding: int = 0) -> ThemisLayer:
        params = count * 4 * GNMT_WIDTH * (inputs + GNMT_WIDTH)
        return ThemisLayer(name=name, params=params + embedding, flops=2.0 * params * GNMT_WORDS)

    table = GNMT_VOCABULARY * GNMT_WIDTH
    head = table + 2 * GNMT_WIDTH**2  # the projections of the attention are small compared with the table
    return [
        lstm("encoder0", GNMT_WIDTH, 2, embedding=2 * table),
        lstm("encoder1", 2 * GNMT_WIDTH),
        *(lstm(f"encoder{at}", GNMT_WIDTH) for at in range(2, 8)),
        *(lstm(f"decoder{at}", 2 * GNMT_WIDTH) for at in range(8)),
        ThemisLayer(name="softmax", params=head, flops=2.0 * head * GNMT_WORDS),
    ]


def _dlrm(build: _Build) -> None:
    bottom, top = (
        [ThemisLayer(name=f"{what}{at}", params=a * b, flops=2.0 * a * b) for at, (a, b) in enumerate(pairwise(widths))]
        for what, widths in (("bottom", DLRM_BOTTOM), ("top", DLRM_TOP))
    )
    steps = build.steps
    embeddings = float(build.batch * DLRM_TABLES * DLRM_DIM * HALF)
    steps.comm("mp-a2a-fwd", "all_to_all", embeddings, [], phase="forward", encoding="fp16")
    below = build.forward(bottom, [])
    above = build.forward(top, [*below, "mp-a2a-fwd"])
    gradients = build.backward(top, above, "top", flush=bool(build.bucket_bytes))
    steps.comm("mp-a2a-bwd", "all_to_all", embeddings, gradients, phase="backward", encoding="fp16")
    build.waits.append("mp-a2a-bwd")
    end = build.backward(bottom, gradients, "bottom", flush=bool(build.bucket_bytes))
    if not build.bucket_bytes:
        build.reduce("ar-gradients", HALF * sum(layer.params for layer in (*bottom, *top)), end)


def _transformer(build: _Build) -> None:
    ranks = build.steps.num_ranks
    if ranks % MODEL_PARALLEL or ranks < 2 * MODEL_PARALLEL:
        raise InvalidInput(f"ranks: transformer1t takes a multiple of {MODEL_PARALLEL} from 256 on, not {ranks}")
    within = tuple(tuple(range(at, at + MODEL_PARALLEL)) for at in range(0, ranks, MODEL_PARALLEL))
    between = tuple(tuple(range(at, ranks, MODEL_PARALLEL)) for at in range(MODEL_PARALLEL))
    words, width = build.batch * TRANSFORMER_WORDS, TRANSFORMER_WIDTH
    activations = float(HALF * words * width)
    parts = {
        "att": (4 * width**2, 8.0 * width**2 + 4.0 * TRANSFORMER_WORDS * width),
        "mlp": (8 * width**2, 16.0 * width**2),
    }
    steps = build.steps
    params = sum(size for size, _ in parts.values()) / MODEL_PARALLEL
    waits: list[str] = []

    def visit(verb: str, names: Sequence[str], layer: int, passes: int, phase: str) -> None:
        nonlocal waits
        for name in names:
            duration = passes * words * parts[name][1] / MODEL_PARALLEL * build.us_per_flop
            op = steps.compute(f"{verb}-{name}{layer}", duration, waits, phase=phase)
            sync = steps.comm(
                f"mp-{verb}-{name}{layer}", "all_reduce", activations, [op], phase=phase, groups=within,
                encoding="fp16",
            )  # fmt: skip
            waits = [sync]

    for layer in range(TRANSFORMER_LAYERS):
        visit("fwd", ["att", "mlp"], layer, 1, "forward")
    for layer in reversed(range(TRANSFORMER_LAYERS)):
        visit("again", ["att", "mlp"], layer, 1, "forward")
        visit("bwd", ["mlp", "att"], layer, 2, "backward")
        name = f"rs-gradients{layer}"
        steps.comm(name, "reduce_scatter", params * HALF, waits, phase="backward", groups=between, encoding="fp16")
        build.waits.append(name)
    # After the update of the shards, all ranks gather all parameters.
    everything = params * HALF * TRANSFORMER_LAYERS
    steps.comm("ag-params", "all_gather", everything, build.waits, phase="optimizer", groups=between, encoding="fp16")
    build.waits = ["ag-params", *waits]
