"""Chakra execution traces written from a `Workload`, for those who simulate with ASTRA-sim."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..errors import InvalidInput
from .chakra_proto import COLLECTIVE, COMM_TYPES, COMP, GROUPS_FILE, OURS, PART, RECV, SEND, encode
from .dag import ROOTED, Op, Workload
from .trace_files import MAX_RANK_FILES


def write(workload: Workload, directory: str | Path) -> list[Path]:
    """Write ``NAME.RANK.et`` for every rank and the groups beside them; returns the files.

    Chakra describes one iteration: what waits for the iteration before is kept as an attribute that only we read.
    Durations are whole us there (ours are kept beside them), and the order of a stream becomes control dependencies.
    """
    if workload.num_ranks > MAX_RANK_FILES:
        raise InvalidInput(f"num_ranks: at most {MAX_RANK_FILES} files are written, not {workload.num_ranks}")
    for op in workload.ops:
        for number, dep in enumerate(op.after):
            if workload.ranks_of(op).isdisjoint(workload.ranks_of(workload.op(dep.op))):
                what = f"{dep.op!r} is on other ranks; in Chakra only communication joins ranks"
                raise InvalidInput(f"op {op.name}.after[{number}]: {what}")
    folder = Path(directory)
    names = {
        group: str(number)
        for number, group in enumerate(dict.fromkeys(g for op in workload.comm_ops for g in op.groups), start=1)
    }
    stem = "".join(c if c.isalnum() or c in "-_" else "_" for c in workload.name) or "workload"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        out = []
        for rank in range(workload.num_ranks):
            file = folder / f"{stem}.{rank}.et"
            file.write_bytes(encode({OURS: workload.name}, _rank_nodes(workload, rank, names)))
            out.append(file)
        if names:
            groups = {name: list(group) for group, name in names.items()}
            (folder / GROUPS_FILE).write_text(json.dumps(groups, indent=1) + "\n")
    except OSError as error:
        raise InvalidInput(f"{folder}: {error.strerror or error}") from None
    return out


def _rank_nodes(workload: Workload, rank: int, names: dict[tuple[int, ...], str]) -> list[dict[str, Any]]:
    here = {op.name for op in workload.ops if rank in workload.ranks_of(op)}
    last: dict[str, int] = {}
    out = []
    for at, op in enumerate(workload.ops):
        if op.name not in here:
            continue
        deps = [(workload.index[dep.op], dep) for dep in op.after if dep.op in here]
        data = [number for number, dep in deps if dep.why == "data" and not dep.lag]
        control = [number for number, dep in deps if dep.why != "data" and not dep.lag]
        place = op.ranks.index(rank) if op.ranks else rank
        taken = op.durations_us[place] if op.durations_us else op.duration_us
        attr: dict[str, Any] = {"is_cpu_op": False, "stretto_duration_us": float(taken), "stretto_stream": op.stream}
        attr["stretto_wait_deps"] = [number for number, dep in deps if dep.why == "wait" and not dep.lag]
        attr["stretto_lag_deps"] = [f"{dep.lag}:{dep.why}:{number}" for number, dep in deps if dep.lag]
        if not op.is_comm:
            if op.stream in last and last[op.stream] not in (*data, *control):
                control.append(last[op.stream])
                attr["stretto_order_deps"] = [last[op.stream]]
            last[op.stream] = at
        attr |= _comm_attr(workload, op, rank, names) if op.is_comm else {}
        if op.phase:
            attr["stretto_phase"] = op.phase
        kind = COMP if not op.is_comm else COLLECTIVE if op.kind != "send" else SEND if "comm_dst" in attr else RECV
        out.append({
            "id": at, "name": op.name, "type": kind, "ctrl_deps": control, "data_deps": data,
            "duration_micros": max(1, round(taken)) if taken else 0, "attr": attr,
        })  # fmt: skip
    return out


def _comm_attr(workload: Workload, op: Op, rank: int, names: dict[tuple[int, ...], str]) -> dict[str, Any]:
    group = next(group for group in workload.groups_of(op) if rank in group)
    attr: dict[str, Any] = {"stretto_nbytes": float(op.nbytes), "stretto_wait_us": float(op.wait_us)}
    attr["comm_size"] = max(1, round(op.nbytes / (len(group) if op.kind in PART else 1)))
    if op.at_most:
        attr["stretto_at_most"] = True
    if op.encoding:
        attr["stretto_encoding"] = op.encoding
    if op.kind == "send":
        attr["comm_tag"] = workload.index[op.name]
        attr |= {"comm_dst": group[1]} if rank == group[0] else {"comm_src": group[0]}
        return attr
    attr["comm_type"] = COMM_TYPES.index(op.kind)
    if op.kind in ROOTED:
        attr["stretto_root"] = op.root
    if op.groups:
        attr["pg_name"] = names[group]
    return attr
