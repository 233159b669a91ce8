# SPDX-License-Identifier: Apache-2.0
"""Deep learning recommendation models: SYNDICATE's A1 to A4 (its Table 2 and Figure 13).

What the paper leaves open
==========================

Nothing below is in the paper. Most of it was fixed before anything was planned, from the paper's own statements;
precision was not: FP16 products were tried first and dropped, because ByteScheduler+ could not idle 44.9 % on A2 with
them at a plausible efficiency. ``docs/calibration.md`` lists what was chosen after seeing a target of the paper,
``docs/workloads.md`` repeats the table for readers.

=================== ================================================================================================
batch size          per GPU. As a global batch, A2 would exchange 9 MB of embeddings per GPU, not the paper's O(GB).
tables              within the decade that Table 2 gives ("~100s", "~1000s"), the number with one digit for which an
                    all-to-all is nearest to 1 GB per GPU ("O(GB) message size"): 3000, 2000, 1000 for A2, A3, A4.
                    A1 cannot reach that; 300, the geometric middle, for which the share of the all-to-alls in an
                    iteration grows from A1 to A3 as section 6.5 says.
precision           FP32 in memory, in matrix products and on the wire. A2's 793 G parameters are then 3.2 TB of the
                    4.1 TB of 16 nodes; with FP16 products the MLPs would take less time than the lookups, and there
                    would be little compute for an all-to-all to hide behind, unlike in Figures 2 and 15.
MLP layers          square, ``share`` of them in the top MLP, ``width`` times the average wide, the bottom layers so
                    wide that Table 2's average holds. This gives A2 993 MB of gradients below ("O(100's of MB)") and
                    9 MB above ("O(MB)").
MFLOPS per sample   one forward pass; the bare MLPs of Table 2 explain 49 to 71 % of it, three passes could not. The
                    interaction takes what the MLPs leave. A backward pass costs twice a forward pass.
lookups             pooling x tables x batch rows per GPU (each GPU looks up its tables for everybody's samples);
                    backward and row-wise Adagrad are fused and read and write each row once more.
input ids           64 bits each, and a 64-bit length per table and sample, in the all-to-all of data-prep.
buckets             256 MB, so that A2's gradients travel in "O(100's of MB)" collectives.
A4                  the bottom MLP in FSDP units of 25 MiB; the narrow top MLP stays replicated, because section 6.5
                    counts all-reduce among A4's collectives.
number of GPUs      weak scaling: batch per GPU and number of tables stay, the rows per table grow with the GPUs that
                    hold them. Lookups, all-to-all buffers and compute per GPU stay what they are.
=================== ================================================================================================
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...errors import unknown
from ...units import MB, MIB
from ..dag import Dep, Workload
from ..roofline import Accelerator, accelerator
from .common import OpCollector, blocks_of_buckets, buckets, check_ranks, check_scale, last, numbered
from .parallel import Replicas

TOP_SHARE = 0.15
TOP_WIDTH = 0.25
TABLE_BYTES = 4
WIRE_BYTES = 4
GEMM = "fp32"
GEMM_BYTES = 4
ID_BYTES = 8
BUCKET_BYTES = 256 * MB
FSDP_UNIT_BYTES = 25 * MIB
ADAGRAD_BYTES = 20
"""Bytes that the update of one parameter moves: read parameter, gradient and state, write parameter and state."""


@dataclass(frozen=True, kw_only=True)
class Dlrm:
    """One column of SYNDICATE's Table 2, with a number of tables, which the paper leaves open."""

    mflops: float
    tables: int
    dim: int
    pooling: int
    layers: int
    width: int
    batch: int
    fsdp: bool = False

    @property
    def top_layers(self) -> int:
        """The number of MLP layers above the interaction."""
        return round(self.layers * TOP_SHARE)

    @property
    def top_width(self) -> float:
        """The width of the layers above the interaction."""
        return self.width * TOP_WIDTH

    @property
    def bottom_layers(self) -> int:
        """The number of MLP layers below the interaction."""
        return self.layers - self.top_layers

    @property
    def bottom_width(self) -> float:
        """The width of the layers below the interaction, chosen so that the average over all is that of Table 2."""
        return (self.layers * self.width - self.top_layers * self.top_width) / self.bottom_layers

    @property
    def interaction_flops(self) -> float:
        """Operations of the interaction in one sample's forward pass: Table 2's figure minus those of the MLPs."""
        mlp = self.bottom_layers * self.bottom_width**2 + self.top_layers * self.top_width**2
        return self.mflops * 1e6 - 2 * mlp


MODELS = {
    "A1": Dlrm(mflops=89, tables=300, dim=68, pooling=27, layers=26, width=914, batch=512),
    "A2": Dlrm(mflops=638, tables=3000, dim=93, pooling=15, layers=20, width=3375, batch=1024),
    "A3": Dlrm(mflops=784, tables=2000, dim=231, pooling=17, layers=26, width=3210, batch=512),
    "A4": Dlrm(mflops=60, tables=1000, dim=72, pooling=49, layers=43, width=682, batch=4096, fsdp=True),
}


def dlrm(
    variant: str = "A2",
    *,
    ranks: int = 128,
    tables: float = 1.0,
    efficiency: float | None = None,
    device: str = "v100_hgx2",
    prefetch: bool = True,
) -> Workload:
    """A recommendation model of SYNDICATE's Table 2.

    >>> dlrm("A2", efficiency=1.0)
    <Workload dlrm:A2: 27 ops (8 of communication) over 128 ranks, 196.3 ms of compute, 3.68 GB moved>

    Args:
        variant: "A1" to "A4".
        ranks: number of ranks, 1..16384.
        tables: factor on the number of embedding tables, 0.001..1000.
        efficiency: share of the roofline that kernels reach, over 0 and at most 1; None takes the device's.
        device: one of `ACCELERATORS`.
        prefetch: whether the ids of the next batch are sent ahead; without, the trainer submits them only after the
            backward pass of this batch, as a stock input pipeline does.

    Returns:
        One training step.

    Raises:
        InvalidInput: an argument is unknown or out of range.
    """
    if variant not in MODELS:
        raise unknown("variant of dlrm", variant, MODELS)
    check_ranks(ranks)
    check_scale("tables", tables, 0.001, 1000)
    return _Build(MODELS[variant], tables, ranks, accelerator(device, efficiency=efficiency)).workload(
        variant, prefetch=prefetch
    )


class _Build:
    def __init__(self, model: Dlrm, scale: float, ranks: int, device: Accelerator) -> None:
        self.model, self.device, self.steps = model, device, OpCollector(ranks)
        self.tables = max(1, round(model.tables * scale))
        self.embedding_bytes = float(self.tables * model.dim * model.batch * WIRE_BYTES)
        self.lookup_bytes = float(self.tables * model.pooling * model.dim * model.batch * TABLE_BYTES)
        self.bottom = _Mlp(self, "bottom-mlp", model.bottom_layers, model.bottom_width, fsdp=model.fsdp)
        self.top = _Mlp(self, "top-mlp", model.top_layers, model.top_width, fsdp=False)

    def workload(self, variant: str, *, prefetch: bool) -> Workload:
        model, steps = self.model, self.steps
        # There are two buffers for ids: iteration i-2 must have used its ids before those of iteration i may arrive.
        ahead = [last("a2a-data-prep"), last("bwd-emb", lag=2)]
        if not prefetch:
            ahead = [last("bwd-emb", why="submit")]
        ids = self.tables * model.batch * (model.pooling + 1) * ID_BYTES
        steps.comm("a2a-data-prep", "all_to_all", ids, ahead, phase="data", encoding="int64")
        self._embedding("fwd-emb", ["a2a-data-prep", last("bwd-emb")], 1, "forward")
        steps.comm("a2a-emb-fwd", "all_to_all", self.embedding_bytes, ["fwd-emb"], phase="forward", encoding="fp32")
        below = self.bottom.forward([])
        self._interaction("interaction", ["a2a-emb-fwd", below], 1, "forward")
        above = self.top.forward(["interaction"])
        gradients = self.top.backward([above])
        self._interaction("bwd-interaction", [gradients], 2, "backward")
        steps.comm(
            "a2a-emb-bwd", "all_to_all", self.embedding_bytes, ["bwd-interaction"], phase="backward", encoding="fp32"
        )
        self.bottom.backward(["bwd-interaction"])
        self._embedding("bwd-emb", ["a2a-emb-bwd", "fwd-emb"], 2, "backward")
        notes = (
            f"DLRM {variant} of SYNDICATE, Table 2; the paper leaves the number of tables open: {self.tables} assumed",
            f"{model.batch} samples per GPU; FP32 on the wire; compute: {self.device.name} at "
            f"{self.device.efficiency:.3g} of its roofline",
        )
        return steps.workload(f"dlrm:{variant}", samples=model.batch * steps.num_ranks, unit="queries", notes=notes)

    def _embedding(self, name: str, after: Sequence[str | Dep], passes: int, phase: str) -> None:
        nbytes = passes * self.lookup_bytes + self.embedding_bytes
        self.steps.compute(name, self.device.compute_us(0.0, nbytes, GEMM), after, phase=phase)

    def _interaction(self, name: str, after: Sequence[str | Dep], passes: int, phase: str) -> None:
        flops, nbytes = passes * self.model.interaction_flops * self.model.batch, passes * self.embedding_bytes
        self.steps.compute(name, self.device.compute_us(flops, nbytes, GEMM, kernels=passes), after, phase=phase)


class _Mlp:
    """The layers of one MLP, in blocks whose gradients are sent together."""

    def __init__(self, build: _Build, what: str, layers: int, width: float, *, fsdp: bool) -> None:
        self.build, self.width = build, width
        cap = FSDP_UNIT_BYTES if fsdp else BUCKET_BYTES
        self.blocks = blocks_of_buckets(buckets([width**2 * WIRE_BYTES] * layers, cap))
        self.fwd, self.bwd = (numbered(f"{verb}-{what}", len(self.blocks)) for verb in ("fwd", "bwd"))
        self.replicas = Replicas(
            build.steps,
            build.device,
            what=what,
            params=[len(block) * width**2 for block in self.blocks],
            units=[[at] for at in range(len(self.blocks))],
            mode="zero3" if fsdp else "ddp",
            members=build.steps.num_ranks,
            param_bytes=WIRE_BYTES,
            grad_bytes=WIRE_BYTES,
            optimizer_bytes=ADAGRAD_BYTES,
        )

    def forward(self, after: list[str]) -> str:
        for at, name in enumerate(self.fwd):
            needs = [*after, *self.replicas.enter_forward(at)]
            after = [self.build.steps.compute(name, self._duration_us(at, 1), needs, phase="forward")]
            self.replicas.leave_forward(at, name)
        return self.fwd[-1]

    def backward(self, after: list[str]) -> str:
        for at in reversed(range(len(self.bwd))):
            name = self.bwd[at]
            needs = [*after, *self.replicas.enter_backward(at)]
            after = [self.build.steps.compute(name, self._duration_us(at, 2), needs, phase="backward")]
            self.replicas.leave_backward(at, name)
        return self.bwd[0]

    def _duration_us(self, at: int, passes: int) -> float:
        kernels, batch = passes * len(self.blocks[at]), self.build.model.batch
        flops = 2 * self.width**2 * batch
        nbytes = GEMM_BYTES * (self.width**2 + 2 * self.width * batch)
        return self.build.device.compute_us(kernels * flops, kernels * nbytes, GEMM, kernels=kernels)
