# SPDX-License-Identifier: Apache-2.0
"""Runs our pipeline schedules on PyTorch's own pipeline runtime."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..errors import InvalidInput, StrettoError
from . import Schedule, check, with_comms
from .simulation import STYLE_OF

MAX_MESSAGE = 2000


def pipeline(
    schedule: Schedule, stages: Sequence[Any], *, loss_fn: Callable[..., Any] | None = None, blocking: bool = False
) -> Any:
    """PyTorch's ``_PipelineScheduleRuntime`` for this rank's stages, with the given schedule checked and loaded.

    Every rank of the pipeline's process group calls this with the same schedule. The call is collective: the ranks
    first compare their schedules, so that a difference is an error on every rank and not a hang. Then call
    ``.step(inputs)`` on the rank of the first stage and ``.step(target=..., losses=[...])`` on that of the last.

    Args:
        schedule: the schedule of all ranks. Without communication, sends and receives are added: in one order per pair
            of ranks for NCCL, with receives posted ahead for other backends.
        stages: this rank's ``PipelineStage`` objects, at least one, those that the schedule gives to the rank.
        loss_fn: loss of the last stage, called with its output and the target.
        blocking: whether every send and receive is waited for where it is issued, as in systems without overlap; for
            comparisons.

    Returns:
        The runtime object.

    Raises:
        InvalidInput: on all ranks, if a schedule deadlocks, differs, or does not fit a rank's stages or the group.
    """
    import torch.distributed as dist

    from ..runtime.torch_backend.torch_versions import pipeline_actions, pipeline_runtime

    if not stages:
        raise InvalidInput("stages: at least one stage must be given")
    transport = "blocking" if blocking else "pair" if dist.get_backend(stages[0].group) == "nccl" else "async"
    error = ""
    written = schedule
    try:
        if not schedule.has_comms:
            check(schedule)
            written = with_comms(schedule, STYLE_OF[transport])
        if len(written.ranks) > 1:
            check(written, transport=transport)
        _check_stages(written, stages)
    except StrettoError as problem:
        error = str(problem)
    _agree(written, stages[0].group, error)
    kind = _blocking_runtime() if blocking else pipeline_runtime()
    made = kind(list(stages), written.num_microbatches, loss_fn=loss_fn)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "schedule.csv")
        rows = pipeline_actions([list(map(str, row)) for row in written.ranks])
        path.write_text("".join(",".join(row) + "\n" for row in rows))
        made._load_csv(str(path), format="compute_comms")
    return made


def _check_stages(schedule: Schedule, stages: Sequence[Any]) -> None:
    rank = stages[0].group_rank
    if stages[0].group_size != len(schedule.ranks):
        raise InvalidInput(f"{schedule.name}: is for {len(schedule.ranks)} ranks, the group has {stages[0].group_size}")
    if stages[0].num_stages != schedule.num_stages:
        raise InvalidInput(f"{schedule.name}: has {schedule.num_stages} stages, the model {stages[0].num_stages}")
    mine = sorted(stage.stage_index for stage in stages)
    wanted = [stage for stage, home in enumerate(schedule.stage_rank) if home == rank]
    if mine != wanted:
        raise InvalidInput(f"stages: rank {rank} has {mine}, the schedule gives it {wanted}")


def _agree(schedule: Schedule, group: Any, error: str) -> None:
    """Compare schedules in one collective; all ranks raise if a rank has an error or another schedule than rank 0."""
    import hashlib

    import torch.distributed as dist

    digest = hashlib.sha256(schedule.to_csv().encode()).hexdigest()
    said: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(said, (error[:MAX_MESSAGE], digest, schedule.name), group=group)
    for rank, (problem, _, _) in enumerate(said):
        if problem:
            raise InvalidInput(f"rank {rank}: {problem}")
    for rank, (_, other, name) in enumerate(said):
        if other != said[0][1]:
            raise InvalidInput(f"rank {rank} has another schedule ({name}) than rank 0 ({said[0][2]})")


def _blocking_runtime() -> Any:
    from ..runtime.torch_backend.patches import BATCH_P2P, applied
    from ..runtime.torch_backend.torch_versions import pipeline_runtime

    usual = pipeline_runtime()

    def waiting(issue: Callable[..., Any]) -> Callable[..., Any]:
        def and_wait(ops: Any, desc: str | None = None) -> Any:
            for work in issue(ops, desc):
                work.wait()
            return []

        return and_wait

    class BlockingRuntime(usual):  # type: ignore[misc, valid-type]
        """Waits for every transfer where it is issued."""

        def _step_microbatches(self, *args: Any, **kwargs: Any) -> None:
            with applied(BATCH_P2P, waiting):
                super()._step_microbatches(*args, **kwargs)

    return BlockingRuntime
