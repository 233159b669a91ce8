# SPDX-License-Identifier: Apache-2.0
"""What one rank does in a staged program: where it reads and writes in each stage, and how a call is cut into slices.

Sizes are in units of one chunk of a slice. Loads no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from ...programs.stages import INPUT, Leg, Source, Staged

ALIGN = 256
"""Every region of staging memory begins at a multiple of this many bytes."""
VECTOR_BYTES = 16


class Run(NamedTuple):
    """Chunks that lie side by side: in the output of a stage, or (`INPUT`) in the input of the call."""

    stage: int
    start: int
    length: int


class SliceRange(NamedTuple):
    """The elements of every shard that one slice takes, and the elements of its chunks, which may have padding."""

    begin: int
    end: int
    chunk: int


@dataclass(frozen=True, kw_only=True, eq=False)
class HostsStep:
    """One rank's part in a stage."""

    number: int
    """The stage."""
    network: bool
    leg: Leg
    me: int
    """This rank's position among the ranks of `leg`."""
    reads: tuple[Run, ...]
    inputs: int
    outputs: int


@dataclass(frozen=True, kw_only=True, eq=False)
class HostsPlan:
    """One rank's part in every stage of a staged program, and where its results end up."""

    staged: Staged
    rank: int
    steps: tuple[HostsStep, ...]
    results: tuple[Run, ...]
    """The chunks that make up the rank's output, in the output's order."""

    @property
    def inputs(self) -> int:
        """The number of chunks in the rank's input."""
        return len(self.staged.collective.inputs(self.rank))

    @property
    def outputs(self) -> int:
        """The number of chunks in the rank's output."""
        return len(self.staged.collective.outputs(self.rank))

    @cached_property
    def written(self) -> int | None:
        """The stage whose output is the rank's whole output, so that it can write there; None where there is none."""
        if len(self.results) != 1 or self.results[0].stage == INPUT:
            return None
        run = self.results[0]
        step = next(step for step in self.steps if step.number == run.stage)
        read_later = any(read.stage == run.stage for other in self.steps for read in other.reads)
        return run.stage if run.start == 0 and run.length == step.outputs and not read_later else None

    @cached_property
    def shards(self) -> tuple[int, int]:
        """Into how many shards the caller's input and output are cut, each of which is `chunks` chunks."""
        return self.inputs // self.staged.collective.chunks, self.outputs // self.staged.collective.chunks


def plan_for(staged: Staged, rank: int) -> HostsPlan:
    """One rank's part of a staged program."""
    steps = []
    for number, stage in enumerate(staged.stages):
        found = stage.leg_of(rank)
        if found is None:
            continue
        leg, me = found
        inputs, outputs = leg.sizes(me)
        if stage.network or inputs or outputs:
            steps.append(
                HostsStep(
                    number=number, network=stage.network, leg=leg, me=me, reads=runs(leg.reads[me]), inputs=inputs,
                    outputs=outputs,
                )
            )  # fmt: skip
    return HostsPlan(staged=staged, rank=rank, steps=tuple(steps), results=runs(staged.results[rank]))


def runs(sources: Sequence[Source]) -> tuple[Run, ...]:
    """Sources in runs: those that lie side by side in one buffer become one `Run`.

    >>> runs([Source(0, 1), Source(0, 2), Source(-1, 3)])
    (Run(stage=0, start=1, length=2), Run(stage=-1, start=3, length=1))
    """
    found: list[Run] = []
    for stage, position in sources:
        last = found[-1] if found else None
        if last is not None and last.stage == stage and last.start + last.length == position:
            found[-1] = Run(stage, last.start, last.length + 1)
        else:
            found.append(Run(stage, position, 1))
    return tuple(found)


Region = tuple[str, int]
"""("in", -1), ("pack", stage), ("out", stage) or ("result", -1)"""


def device_regions(plan: HostsPlan) -> dict[Region, int]:
    """The staging memory of a slice on the GPU, in chunks."""
    found: dict[Region, int] = {("in", INPUT): plan.inputs}
    for step in plan.steps:
        if not step.network:
            found["pack", step.number] = step.inputs
        found["out", step.number] = step.outputs
    found["result", INPUT] = plan.outputs
    return found


def pinned_regions(plan: HostsPlan) -> dict[Region, int]:
    """The staging memory of a slice on the host, in chunks."""
    found: dict[Region, int] = {}
    for step in plan.steps:
        if step.network:
            found["pack", step.number] = step.inputs
            found["out", step.number] = step.outputs
    return found


def laid_out(regions: dict[Region, int], chunk_bytes: int) -> tuple[dict[Region, int], int]:
    """Where each region begins, in bytes, and how many bytes all of them take."""
    at, places = 0, {}
    for region, units in regions.items():
        places[region] = at
        at += -(-units * chunk_bytes // ALIGN) * ALIGN
    return places, at


def slices_of(plans: Sequence[HostsPlan], shard: int, element: int, *, slice_bytes: int, room: int) -> list[SliceRange]:
    """Cut a call into slices, the same on all ranks.

    Args:
        plans: The plans of all ranks.
        shard: The elements of a shard of the call.
        element: The bytes of an element.
        slice_bytes: About how many bytes the largest buffer of a slice has.
        room: The bytes of staging memory for one slice, on the GPU and on the host.

    Returns:
        The slices; all but the last have chunks of the same size.
    """
    pieces = plans[0].staged.collective.chunks
    units = max(1, *(max(plan.inputs, plan.outputs) for plan in plans))
    staged = max(sum(found(plan).values()) for plan in plans for found in (device_regions, pinned_regions))
    regions = max(len(device_regions(plan)) for plan in plans)
    lane = VECTOR_BYTES // element
    most = min(slice_bytes // units, (room - ALIGN * regions) // max(staged, 1)) // element // lane * lane
    whole = -(-shard // (pieces * lane)) * lane
    chunk = max(lane, min(most, whole))
    found = []
    for begin in range(0, shard, pieces * chunk):
        end = min(begin + pieces * chunk, shard)
        found.append(SliceRange(begin, end, -(-(end - begin) // (pieces * lane)) * lane))
    return found
