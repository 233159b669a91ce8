# SPDX-License-Identifier: Apache-2.0
"""The file form of reshard plans: what is moved between which layouts, on which cluster, by which program."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from ..cluster import files as cluster_files
from ..cluster import yaml_form
from ..collectives.reshard import Reshard, largest_buffer
from ..errors import InvalidInput
from ..files import convert, parse_json, plain, read_text, write_file
from ..programs.formats import text as program_text
from .bundles import Bundle, bundles_of
from .placing import Side
from .plan import ReshardPlan
from .spec import Layout, Mesh
from .tasks import Tensor, UnitTask, decompose

MAX_FILE_BYTES = 256 << 20


class _TensorForm(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    name: str
    shape: list[int]
    dtype_bytes: int
    src: str
    dst: str
    src_rounding: str = "chunk"
    dst_rounding: str = "chunk"


class _PlanForm(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    version: Literal[1]
    kind: Literal["reshard_plan"]
    cluster: str
    strategy: str
    order: str
    tensors: list[_TensorForm]
    chunks: list[int]
    """The number of chunks of each bundle."""
    merged: bool = True
    """Whether a bundle holds all unit tasks between the same devices, or one task."""
    devices: list[int] = []
    model_us: float | None = None
    bound_us: float
    bound_reason: str
    program: str = ""


def save_plan(plan: ReshardPlan, path: str | Path) -> None:
    """Write a plan as JSON; `load_plan` gives back one that moves the same bytes by the same program.

    Args:
        plan: the plan, of all unit tasks of its tensors.
        path: file to write.

    Raises:
        InvalidInput: the plan is a part of a larger one, or the file cannot be written.
    """
    if plan.tasks != decompose(plan.tensors):
        raise InvalidInput("plan: only plans of whole tensors have a file form")
    form = _PlanForm(
        version=1, kind="reshard_plan", cluster=yaml_form.dumps(plan.cluster, json=True), strategy=plan.strategy,
        order=plan.order, tensors=[_tensor_form(t) for t in plan.tensors], chunks=[b.chunks for b in plan.bundles],
        merged=_merged(plan), devices=list(plan.devices), model_us=plan.model_us, bound_us=plan.bound_us,
        bound_reason=plan.bound_reason, program=program_text.dumps(plan.program) if plan.program is not None else "",
    )  # fmt: skip
    write_file(path, msgspec.json.format(msgspec.json.encode(plain(form)), indent=1))


def load_plan(path: str | Path) -> ReshardPlan:
    """Read a plan that `save_plan` wrote; its program is verified to move what its tensors say.

    Args:
        path: the file.

    Returns:
        The plan.

    Raises:
        InvalidInput: a field is wrong, or program and tensors do not fit together.
    """
    where = str(path)
    form = convert(parse_json(read_text(path, max_bytes=MAX_FILE_BYTES), where=where), _PlanForm, where=where)
    cluster = cluster_files.loads(form.cluster, where=f"{where}: cluster")
    try:
        tensors = tuple(_tensor(each) for each in form.tensors)
        tasks = decompose(tensors)
        bundles = _bundles(tasks, form)
    except InvalidInput as error:
        raise InvalidInput(f"{where}: {error}") from None
    devices = tuple(form.devices)
    used = {d for t in tensors for side in (t.src, t.dst) for d in side.mesh.devices}
    if not used <= set(devices) or list(devices) != sorted(set(devices)) or devices[-1] >= cluster.num_devices:
        raise InvalidInput(f"{where}: devices: must be those of all meshes, in order, of the cluster")
    rank = {device: at for at, device in enumerate(devices)}
    pieces = [b.piece(rank) for b in bundles]
    program = program_text.loads(form.program, where=f"{where}: program") if form.program else None
    if program is not None and program.collective != Reshard(devices, pieces):
        raise InvalidInput(f"{where}: program: does not move what the tensors say")
    if program is None and any(b.missing for b in bundles):
        raise InvalidInput(f"{where}: program: is needed, since something has to move")
    if program is not None:
        program.verify()
    return ReshardPlan(
        tensors=tensors, cluster=cluster, strategy=form.strategy, order=form.order, tasks=tasks, bundles=bundles,
        devices=devices, model_us=form.model_us, program=program, bound_us=form.bound_us,
        bound_reason=form.bound_reason, nbytes=largest_buffer(len(devices), pieces),
    )  # fmt: skip


def _merged(plan: ReshardPlan) -> bool:
    return [b.tasks for b in plan.bundles] == [b.tasks for b in bundles_of(plan.tasks, merge=True)]


def _bundles(tasks: tuple[UnitTask, ...], form: _PlanForm) -> tuple[Bundle, ...]:
    found = bundles_of(tasks, merge=form.merged)
    if len(found) != len(form.chunks):
        raise InvalidInput(f"chunks: must be one number for each of {len(found)} bundles, not {len(form.chunks)}")
    cut = tuple(b.cut(chunks) for b, chunks in zip(found, form.chunks, strict=True))
    wrong = next((at for at, b in enumerate(cut) if b.chunks != form.chunks[at]), None)
    if wrong is not None:
        raise InvalidInput(f"chunks[{wrong}]: {form.chunks[wrong]} is out of range")
    return cut


def _tensor_form(tensor: Tensor) -> _TensorForm:
    return _TensorForm(
        name=tensor.name, shape=list(tensor.shape), dtype_bytes=tensor.dtype_bytes, src=str(tensor.src),
        dst=str(tensor.dst), src_rounding=tensor.src.rounding, dst_rounding=tensor.dst.rounding,
    )  # fmt: skip


def _tensor(form: _TensorForm) -> Tensor:
    sides = []
    for text, rounding in ((form.src, form.src_rounding), (form.dst, form.dst_rounding)):
        side = Side.parse(text)
        if side.devices is None:
            raise InvalidInput(f"{form.name[:80]}: {text[:80]!r}: must name its devices, as (2,2)@0-3 S0R does")
        sides.append(Layout(mesh=Mesh(shape=side.shape, devices=side.devices), spec=side.spec, rounding=rounding))
    return Tensor(name=form.name, shape=tuple(form.shape), dtype_bytes=form.dtype_bytes, src=sides[0], dst=sides[1])
