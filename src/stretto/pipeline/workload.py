# SPDX-License-Identifier: Apache-2.0
"""Turns a pipeline schedule into a training step for the planner."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import InvalidInput
from ..workload import Workload
from ..workload.dag import Dep, Op
from .actions import (
    BACKWARD,
    COMPUTE,
    FORWARD,
    INPUT,
    RECEIVES,
    REDUCE_GRAD,
    SENDS,
    Action,
    receive_of,
    receiver_of,
    send_of,
)
from .lowering import producer_of
from .schedule import Schedule
from .simulation import StageCosts, simulate


def to_workload(
    schedule: Schedule,
    costs: StageCosts,
    *,
    activation_bytes: Sequence[float],
    gradient_bytes: Sequence[float] | None = None,
    meshes: Sequence[Sequence[int]] | None = None,
    name: str = "",
) -> Workload:
    """The step as a `Workload`: one compute-op per compute action, one ``send`` per transfer.

    Ops are listed in the order in which the simulated schedule begins them.

    >>> from stretto.pipeline import StageCosts, one_f_one_b
    >>> to_workload(one_f_one_b(2, 4), StageCosts.even(2, forward_us=50.0), activation_bytes=[1e6])
    <Workload 1f1b: 24 ops (8 of communication) over 2 ranks, 600 us of compute, 8 MB moved>

    Args:
        schedule: the schedule, with or without communication.
        costs: times of as many stages as the schedule has.
        activation_bytes: bytes of one micro-batch from stage s to s + 1, for each s but the last.
        gradient_bytes: bytes back from stage s + 1 to s; None: as many as forward.
        meshes: the devices of each rank of the schedule; None: one device per rank. The i-th device of one mesh
            exchanges its share with the i-th of the next.
        name: name of the workload; empty takes the schedule's.

    Returns:
        The workload of one training step.

    Raises:
        InvalidInput: there is not one number per pair of stages, or not one mesh with devices per rank.
    """
    edges = schedule.num_stages - 1
    there = tuple(activation_bytes)
    back = tuple(gradient_bytes) if gradient_bytes is not None else there
    if len(there) != edges or len(back) != edges:
        raise InvalidInput(f"activation_bytes: {schedule.num_stages} stages need {edges} numbers, not {len(there)}")
    groups = (
        tuple(tuple(mesh) for mesh in meshes)
        if meshes is not None
        else tuple((rank,) for rank in range(len(schedule.ranks)))
    )
    if len(groups) != len(schedule.ranks) or not all(groups):
        raise InvalidInput(f"meshes: {len(schedule.ranks)} ranks need as many meshes, each with devices")
    run = simulate(schedule, costs)
    first: dict[int, Action] = {}
    last: dict[int, Action] = {}
    for row in run.schedule.ranks:
        for action in row:
            if action.kind in COMPUTE or (action.kind == REDUCE_GRAD and costs.reduce_us[action.stage] > 0):
                first.setdefault(action.stage, action)
                last[action.stage] = action
    received = {a for row in run.schedule.ranks for a in row if a.kind in RECEIVES}
    split = {(a.stage, a.microbatch) for row in run.schedule.ranks for a in row if a.kind == INPUT}
    ops = []
    # The sort is stable: actions that begin at the same time stay in their rank's order.
    for span in sorted(run.spans, key=lambda span: span.start_us):
        action = span.action
        home = schedule.stage_rank[action.stage]
        if action.kind in SENDS:
            producer = producer_of(action, (action.stage, action.microbatch) in split)
            into = schedule.stage_rank[receiver_of(action).stage]
            pairs = tuple(zip(groups[home], groups[into], strict=False))
            size = there[action.stage] if action.kind == "SEND_F" else back[action.stage - 1]
            after = (Dep(op=str(producer)),)
            ops.append(Op(name=str(action), kind="send", after=after, nbytes=size / len(pairs), groups=pairs))
        elif action.kind in COMPUTE or span.end_us > span.start_us:
            needs = []
            if action.kind in (FORWARD, INPUT, BACKWARD) and receive_of(action) in received:
                needs.append(Dep(op=str(send_of(receive_of(action)))))
            if action == first[action.stage]:
                needs.append(Dep(op=str(last[action.stage]), lag=1))
            phase = "forward" if action.kind == FORWARD else "backward"
            ops.append(
                Op(
                    name=str(action), after=tuple(needs), phase=phase, ranks=groups[home],
                    duration_us=span.end_us - span.start_us,
                )
            )  # fmt: skip
    return Workload(
        name=name or schedule.name,
        num_ranks=1 + max(rank for mesh in groups for rank in mesh),
        ops=tuple(ops),
        notes=(f"from the pipeline schedule {schedule.name} of {schedule.num_microbatches} micro-batches",),
    )
