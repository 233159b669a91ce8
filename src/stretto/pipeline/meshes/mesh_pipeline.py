# SPDX-License-Identifier: Apache-2.0
"""`stretto.torch.MeshPipeline`: trains a model in stages, each on a device mesh of its own shape."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ...errors import InvalidInput, StrettoError
from ...resharding.tensors.carrier import agreement
from ...resharding.tensors.describe import local_of
from ...runtime.torch_backend.patches import BATCH_P2P, applied
from ...runtime.torch_backend.torch_versions import pipeline_actions, pipeline_runtime
from .. import Schedule, check, with_comms
from ..simulation import STYLE_OF
from .lane import Lane, SentTensor
from .stage import RuntimeStage, gradient_placements, placed_here

Batch = Sequence[Any]
"""One entry for each micro-batch: a tensor, or a tuple of tensors."""


@dataclass(frozen=True, kw_only=True, eq=False)
class StageMesh:
    """Where a stage runs, and how it wants its inputs.

    `mesh` is a ``DeviceMesh`` over some ranks of the job. `inputs` has one ``Shard`` or ``Replicate`` per axis of it,
    for all tensors that come in; or a sequence of such placements for each of them.
    """

    mesh: Any
    inputs: Sequence[Any]

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of the mesh in row-major order."""
        return tuple(int(rank) for rank in self.mesh.mesh.flatten().tolist())

    def placements(self, count: int) -> list[Sequence[Any]]:
        """The placements of each of so many inputs."""
        nested = bool(self.inputs) and isinstance(self.inputs[0], (list, tuple))
        if nested and len(self.inputs) != count:
            raise InvalidInput(f"inputs: placements of {len(self.inputs)} tensors, but {count} come in")
        return list(self.inputs) if nested else [self.inputs] * count


@dataclass(frozen=True, kw_only=True)
class EdgeTransfer:
    """What one micro-batch moves between two stages in one direction, as planned."""

    src_stage: int
    dst_stage: int
    nbytes: int
    predicted_us: float
    bound_us: float


class MeshPipeline:
    """A pipeline whose stages are device meshes, under PyTorch's pipeline runtime.

    ::

        stages = [StageMesh(mesh=a, inputs=[Shard(0), Replicate()]), StageMesh(mesh=b, inputs=[Shard(0)])]
        pipe = stretto.torch.MeshPipeline(module, stages, eager_1f1b(2, 8), loss_fn=loss)
        losses = pipe.step(inputs, targets)

    Inside a stage DTensor does what placements say (data parallel, tensor parallel, both). Between stages each tensor
    goes from the layout in which its stage leaves it to the layout in which the next one wants it by one program, which
    is planned once and runs while other micro-batches are computed; gradients go back the same way, and sums that are
    pending in them are done on the way. At the end of a step gradients lie as their parameters do.

    Every rank of the meshes constructs it, with the same arguments but its own stage's module; ranks compare these
    first, so that a difference is an error on all of them.

    Args:
        module: this rank's stage; its parameters are DTensors on the stage's mesh, or plain ones if that is one device.
        stages: mesh and input layouts of every stage, first to last. No rank is in two of them.
        schedule: a schedule with one stage per row.
        loss_fn: loss of the last stage for a micro-batch, a mean; called with its output, made whole on each rank of
            the stage, and the target. To keep the output cut, compute the loss in the module, and return it here.
        blocking: whether every transfer is waited for where it is issued, as in systems without overlap; for
            comparisons.

    Raises:
        InvalidInput: on all ranks, if an argument is wrong or differs between ranks.
        PeerLost: a rank has died or does not come.
    """

    lane_type: type[Lane] = Lane
    """What carries tensors between two stages; comparisons have others."""

    def __init__(
        self,
        module: torch.nn.Module,
        stages: Sequence[StageMesh],
        schedule: Schedule,
        *,
        loss_fn: Callable[..., Any],
        blocking: bool = False,
    ) -> None:
        agreed = agreement()
        self.stages = tuple(stages)
        ranks = _ranks(self.stages, agreed.rank)
        label = f"pipeline over {len(ranks)} ranks"
        error, written = "", schedule
        try:
            _check_meshes(self.stages)
            written = _written(schedule, len(self.stages), "blocking" if blocking else "async")
        except StrettoError as problem:
            error = str(problem)
        text = _description(self.stages, written, blocking)
        for rank, other in zip(ranks, agreed.gather(ranks, label, text, error), strict=True):
            if other != text:
                raise InvalidInput(f"rank {rank} has another pipeline ({other}) than rank {agreed.rank} ({text})")
        self.schedule, self._blocking = written, blocking
        self.index = next(at for at, stage in enumerate(self.stages) if agreed.rank in stage.ranks)
        splits = any(action.kind == "I" for row in written.ranks for action in row)
        whole = not any(isinstance(parameter, DTensor) for parameter in module.parameters())
        self._plain = whole and len(self.stages[self.index].ranks) == 1
        self._stage = RuntimeStage(module, self.index, len(self.stages), splits=splits, plain=self._plain)
        self._lanes = self._connect()
        self._runtime = _runtime(self._stage, written, _on_whole(loss_fn))

    def step(self, inputs: Batch = (), targets: Batch = ()) -> list[torch.Tensor]:
        """Train on one batch: all micro-batches forward and backward, then gradients are complete. All ranks call it.

        Args:
            inputs: on the first stage's ranks the micro-batches. A DTensor is taken as it is; a plain tensor is the
                whole micro-batch, the same on all ranks of the stage, each of which takes its part.
            targets: on the last stage's ranks the whole targets.

        Returns:
            On the last stage's ranks the loss of every micro-batch; an empty list elsewhere.

        Raises:
            InvalidInput: there is not one entry for each micro-batch, or a stage's tensors do not fit.
            PeerLost: a rank has died while it was waited for.
        """
        first, last = self._stage.is_first, self._stage.is_last
        given = [self._inputs(batch) for batch in self._checked("inputs", inputs)] if first else None
        wanted = list(self._checked("targets", targets)) if last else None
        losses: list[torch.Tensor] = []
        wait = self._blocking

        def started(_: Any) -> Callable[..., Any]:
            # Our stage's operations are transfers that have begun already; PyTorch would send and receive them.
            def works(ops: list[Any], desc: str | None = None) -> list[Any]:
                for work in ops if wait else ():
                    work.wait()
                return list(ops)

            return works

        try:
            with applied(BATCH_P2P, started):
                self._runtime._step_microbatches(given, None, wanted, losses)
        finally:
            self._stage.clear_runtime_states()
        return [loss.detach() for loss in losses]

    @property
    def edges(self) -> list[EdgeTransfer]:
        """What this rank's stage exchanges with its neighbors for each micro-batch; empty before the first step."""
        return [
            EdgeTransfer(
                src_stage=src, dst_stage=dst, nbytes=lane.nbytes,
                predicted_us=lane.predicted_us, bound_us=lane.bound_us,
            )
            for (src, dst), lane in self._lanes.items()
            if lane.transfer is not None
        ]  # fmt: skip

    def close(self) -> None:
        """End the groups between stages; a second call does nothing."""
        for lane in self._lanes.values():
            lane.close()

    def _connect(self) -> dict[tuple[int, int], Lane]:
        """The lanes of this rank's stage; edges in order, so that no two stages wait for each other."""
        lanes: dict[tuple[int, int], Lane] = {}
        for at in range(len(self.stages) - 1):
            if self.index not in (at, at + 1):
                continue
            before, behind = self.stages[at], self.stages[at + 1]

            def inputs(sent: Sequence[SentTensor], behind: StageMesh = behind) -> list[Sequence[Any]]:
                return behind.placements(len(sent))

            ahead = self.lane_type(f"activations {at} to {at + 1}", before.mesh, behind.mesh, inputs)

            def back(_: Sequence[SentTensor], ahead: Lane = ahead) -> list[Sequence[Any]]:
                return list(gradient_placements(ahead.sent))

            gradients = self.lane_type(f"gradients {at + 1} to {at}", behind.mesh, before.mesh, back)
            lanes[at, at + 1], lanes[at + 1, at] = ahead, gradients
            if self.index == at:
                self._stage.outgoing = ahead, gradients
            else:
                self._stage.incoming = ahead, gradients
        return lanes

    def _checked(self, name: str, batch: Batch) -> Batch:
        want = self.schedule.num_microbatches
        if isinstance(batch, torch.Tensor) or len(batch) != want:
            what = "a tensor" if isinstance(batch, torch.Tensor) else f"{len(batch)} entries"
            raise InvalidInput(f"{name}: must be a sequence of {want} micro-batches, not {what}")
        return batch

    def _inputs(self, batch: Any) -> tuple[Any, ...]:
        many = tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)
        layouts = self.stages[0].placements(len(many))
        return tuple(self._here(f"inputs[{at}]", t, layouts[at]) for at, t in enumerate(many))

    def _here(self, what: str, tensor: Any, placements: Sequence[Any]) -> Any:
        if not isinstance(tensor, torch.Tensor) or isinstance(tensor, DTensor):
            return local_of(tensor) if self._plain and isinstance(tensor, DTensor) else tensor
        return tensor if self._plain else placed_here(what, tensor, self.stages[self.index].mesh, placements)


def _on_whole(loss_fn: Callable[..., Any]) -> Callable[..., Any]:
    """The loss of whole tensors: means over shards have wrong gradients in DTensor, and wrong values if uneven."""

    def whole(given: Any) -> Any:
        if isinstance(given, (tuple, list)):
            return tuple(whole(one) for one in given)
        # A copy, since PyTorch detaches what the loss is made of in place, which a view does not allow.
        return given.full_tensor().clone() if isinstance(given, DTensor) else given

    return lambda *given: loss_fn(*map(whole, given))


def _ranks(stages: Sequence[StageMesh], me: int) -> list[int]:
    ranks = sorted({rank for stage in stages for rank in stage.ranks})
    if me not in ranks:
        raise InvalidInput(f"stages: rank {me} is in no stage's mesh; only ranks of the meshes take part")
    return ranks


def _check_meshes(stages: Sequence[StageMesh]) -> None:
    seen: dict[int, int] = {}
    for at, stage in enumerate(stages):
        layouts = stage.inputs if stage.inputs and isinstance(stage.inputs[0], (list, tuple)) else [stage.inputs]
        for placements in layouts:
            if len(placements) != stage.mesh.ndim:
                raise InvalidInput(
                    f"stages[{at}].inputs: must be one placement for each of the mesh's {stage.mesh.ndim} axes, "
                    f"not {list(placements)}"
                )
            if any(str(placement).startswith("P") for placement in placements):
                raise InvalidInput(
                    f"stages[{at}].inputs: nothing can come in as a pending sum; choose Shard, Replicate"
                )
        for rank in stage.ranks:
            if seen.setdefault(rank, at) != at:
                raise InvalidInput(f"stages[{at}].mesh: rank {rank} is in stage {seen[rank]} already")


def _written(schedule: Schedule, stages: int, transport: str) -> Schedule:
    if len(schedule.ranks) != schedule.num_stages or schedule.num_stages != stages:
        have = f"{schedule.num_stages} stages in {len(schedule.ranks)} rows"
        raise InvalidInput(f"schedule: {schedule.name} has {have}; must be {stages}, one for each mesh")
    written = schedule
    if not schedule.has_comms:
        check(schedule)
        written = with_comms(schedule, STYLE_OF[transport])
    if stages > 1:
        check(written, transport=transport)
    return written


def _description(stages: Sequence[StageMesh], schedule: Schedule, blocking: bool) -> str:
    meshes = ", ".join(f"{stage.mesh.mesh.tolist()} {stage.inputs}" for stage in stages)
    digest = hashlib.sha256(schedule.to_csv().encode()).hexdigest()[:12]
    return f"{schedule.name} {digest}{' blocking' if blocking else ''} over {meshes}"


def _runtime(stage: RuntimeStage, schedule: Schedule, loss_fn: Callable[..., Any]) -> Any:
    usual = pipeline_runtime()

    class MeshRuntime(usual):  # type: ignore[misc, valid-type]
        """Leaves it to our stage to find out what is sent, at the first micro-batch."""

        def _initialize_stages(self, *_: Any, **__: Any) -> None:
            return

    made = MeshRuntime([stage], schedule.num_microbatches, loss_fn=loss_fn)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "schedule.csv")
        rows = pipeline_actions([list(map(str, row)) for row in schedule.ranks])
        path.write_text("".join(",".join(row) + "\n" for row in rows))
        made._load_csv(str(path), format="compute_comms")
    return made
