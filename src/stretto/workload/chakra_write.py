# SPDX-License-Identifier: Apache-2.0
"""Writes a `Workload` as Chakra execution traces, for simulations with ASTRA-sim."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import InvalidInput
from ..files import usable_path, write_file
from .chakra_proto import (
    COLLECTIVE,
    COMM_TYPES,
    COMP,
    GROUPS_FILE,
    OURS,
    PART,
    RANKS,
    RECV,
    SAMPLES,
    SEND,
    UNIT,
    encode,
)  # fmt: skip
from .dag import COMPUTE, WHYS, Op, Workload
from .trace_files import MAX_RANK_FILES


def write(workload: Workload, directory: str | Path) -> list[Path]:
    """Write ``NAME.RANK.et`` for every rank and a file with the groups; return the files.

    Chakra describes one iteration without streams, in whole us; the order of a stream becomes control dependencies.
    Properties that Chakra has no field for are kept in attributes named ``stretto_*``, from which `read` restores the
    ops.
    """
    if workload.num_ranks > MAX_RANK_FILES:
        raise InvalidInput(f"num_ranks: at most {MAX_RANK_FILES} files are written, not {workload.num_ranks}")
    _refuse_permutes(workload)
    for op in workload.ops:
        for number, dep in enumerate(op.after):
            if workload.ranks_of(op).isdisjoint(workload.ranks_of(workload.op(dep.op))):
                what = f"{dep.op!r} is on other ranks; in Chakra only communication joins ranks"
                raise InvalidInput(f"op {op.name}.after[{number}]: {what}")
    folder = usable_path(directory)
    names = {group: str(number) for number, group in enumerate(dict.fromkeys(_communicators(workload)), start=1)}
    about = {OURS: workload.name, RANKS: workload.num_ranks, SAMPLES: float(workload.samples), UNIT: workload.unit}
    stem = "".join(c if c.isalnum() or c in "-_" else "_" for c in workload.name) or "workload"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        out = []
        for rank in range(workload.num_ranks):
            file = folder / f"{stem}.{rank}.et"
            write_file(file, encode(about, _rank_nodes(workload, rank, names)))
            out.append(file)
        if names:
            groups = {name: list(group) for group, name in names.items()}
            write_file(folder / GROUPS_FILE, json.dumps(groups, indent=1) + "\n")
    except OSError as error:
        raise InvalidInput(f"{folder}: {error.strerror or error}") from None
    return out


def _communicators(workload: Workload) -> Iterator[tuple[int, ...]]:
    """The groups of collectives; a send names its two ranks itself and needs no group."""
    return (group for op in workload.comm_ops if op.kind != "send" for group in op.groups)


def _rank_nodes(workload: Workload, rank: int, names: dict[tuple[int, ...], str]) -> list[dict[str, Any]]:
    here = {op.name for op in workload.ops if rank in workload.ranks_of(op)}
    last: dict[str, int] = {}
    out = []
    for at, op in enumerate(workload.ops):
        if op.name not in here:
            continue
        deps = [(number, workload.index[dep.op], dep) for number, dep in enumerate(op.after) if dep.op in here]
        data = [node for _, node, dep in deps if dep.why == "data" and not dep.lag]
        control = [node for _, node, dep in deps if dep.why != "data" and not dep.lag]
        if not op.is_comm:
            if op.stream in last and last[op.stream] not in (*data, *control):
                control.append(last[op.stream])
            last[op.stream] = at
        place = op.ranks.index(rank) if op.ranks else rank
        taken = op.durations_us[place] if op.durations_us else op.duration_us
        attr: dict[str, Any] = {"is_cpu_op": False, "stretto_duration_us": float(taken), **_own_attr(op, place)}
        if deps:
            # Each rank sees only a part of the dependencies, so their positions are stored to restore the order.
            quads = ((number, dep.lag, WHYS.index(dep.why), node) for number, node, dep in deps)
            attr["stretto_after"] = [value for quad in quads for value in quad]
        attr |= _comm_attr(workload, op, rank, names) if op.is_comm else {}
        out.append({
            "id": at, "name": op.name, "type": _node_type(op, attr, rank), "ctrl_deps": control, "data_deps": data,
            "duration_micros": max(1, round(taken)) if taken else 0, "attr": attr,
        })  # fmt: skip
    return out


def _node_type(op: Op, attr: dict[str, Any], rank: int) -> int:
    if op.kind == "send":
        return SEND if attr["comm_src"] == rank else RECV
    return COLLECTIVE if op.is_comm else COMP


def _own_attr(op: Op, place: int) -> dict[str, Any]:
    """Attributes for the properties of an op that Chakra has no field for; defaults are left out."""
    kept = {
        "stretto_stream": (op.stream, op.stream != COMPUTE),
        "stretto_phase": (op.phase, op.phase),
        "stretto_place": (place, op.ranks),
        "stretto_op_us": (float(op.duration_us), op.durations_us),
        "stretto_wait_us": (float(op.wait_us), op.wait_us),
        "stretto_root": (op.root, op.root),
        "stretto_at_most": (True, op.at_most),
        "stretto_encoding": (op.encoding, op.encoding),
    }
    return {key: value for key, (value, wanted) in kept.items() if wanted}


def _refuse_permutes(workload: Workload) -> None:
    permute = next((op.name for op in workload.comm_ops if op.kind == "collective_permute"), None)
    if permute is not None:
        raise InvalidInput(f"{permute}: Chakra has no collective_permute; write it as sends")


def _comm_attr(workload: Workload, op: Op, rank: int, names: dict[tuple[int, ...], str]) -> dict[str, Any]:
    number, group = next((at, group) for at, group in enumerate(workload.groups_of(op)) if rank in group)
    attr: dict[str, Any] = {"stretto_nbytes": float(op.nbytes)}
    attr["comm_size"] = max(1, round(op.nbytes / (len(group) if op.kind in PART else 1)))
    if op.groups:
        attr["stretto_group"] = number
    if op.rank_nbytes:
        members = [each for some in workload.groups_of(op) for each in some]
        attr["stretto_rank_nbytes"] = float(op.rank_nbytes[members.index(rank)])
    if op.kind == "send":
        return attr | {"comm_src": group[0], "comm_dst": group[1], "comm_tag": workload.index[op.name]}
    attr["comm_type"] = COMM_TYPES.index(op.kind)
    if op.groups:
        attr["pg_name"] = names[group]
    return attr
