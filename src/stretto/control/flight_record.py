# SPDX-License-Identifier: Apache-2.0
"""PyTorch's own record of calls (its flight recorder), for groups whose backend is not ours: NCCL as it is, say."""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping, Sequence
from typing import Any

from ..runtime.torch_backend.call_log import KEPT, LIBRARIES, NO_ROOT, place_text
from .hang_messages import GroupPulse, PulseCall

ENTRIES = "2000"
NAMES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
"""How many calls PyTorch keeps; the second name is that of versions before 2.10."""
DUMPS = ("_dump_nccl_trace", "_dump_fr_trace")
BYTES = {"Float": 4, "Double": 8, "Half": 2, "BFloat16": 2, "Int": 4, "Long": 8, "Short": 2}


def record_flights() -> None:
    """Have PyTorch keep its record, unless the job says otherwise; before the first process group is made."""
    import torch

    older = tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 10)
    if not any(os.environ.get(name) for name in NAMES):
        os.environ[NAMES[1] if older else NAMES[0]] = ENTRIES


def flight_groups() -> tuple[GroupPulse, ...]:
    """What PyTorch has recorded of every group; nothing where it records nothing."""
    from torch._C import _distributed_c10d as c10d

    found: tuple[GroupPulse, ...] = ()
    for name in DUMPS:
        dump = getattr(c10d, name, None)
        if dump is None:
            continue
        try:
            # Unpickling is safe here: this process has pickled the record itself.
            found += groups_of(pickle.loads(dump()))
        except Exception:
            # Another version of PyTorch may have another form of record: then less is known.
            continue
    return found


def groups_of(record: Mapping[str, Any]) -> tuple[GroupPulse, ...]:
    """The groups of a record that was dumped.

    Args:
        record: As PyTorch writes it: `entries`, oldest first, and `pg_config`.

    Returns:
        One `GroupPulse` for each group with a call; messages between two ranks are left out.
    """
    config = record.get("pg_config", {})
    by_group: dict[str, list[Mapping[str, Any]]] = {}
    for entry in record.get("entries", ()):
        if not entry.get("is_p2p"):
            by_group.setdefault(str(entry["process_group"][0]), []).append(entry)
    return tuple(
        GroupPulse(
            name=f"{name} of PyTorch's",
            ranks=_ranks(config.get(name) or config.get("") or {}),
            calls=int(entries[-1]["collective_seq_id"]),
            recent=tuple(_call(entry) for entry in entries[-KEPT:]),
        )
        for name, entries in by_group.items()
    )


def _call(entry: Mapping[str, Any]) -> PulseCall:
    sizes, kinds = entry.get("input_sizes") or [[]], entry.get("input_dtypes") or [""]
    elements = 1
    for extent in sizes[0]:
        elements *= int(extent)
    op = str(entry.get("profiling_name", "")).rpartition(":")[2]
    return PulseCall(
        number=int(entry["collective_seq_id"]), op=op, nbytes=elements * BYTES.get(str(kinds[0]), 1), root=NO_ROOT,
        place=_place(entry.get("frames") or []), open=_is_open(entry),
    )  # fmt: skip


def _is_open(entry: Mapping[str, Any]) -> bool:
    return not entry.get("retired") and entry.get("state") != "completed"


def _place(frames: Sequence[Mapping[str, Any]]) -> str:
    for frame in frames:
        file = str(frame.get("filename", ""))
        if file and not file.startswith(LIBRARIES) and "site-packages" not in file and "/torch/" not in file:
            return place_text((file, int(frame.get("line", 0))))[:400]
    return ""


def _ranks(config: Mapping[str, Any]) -> tuple[int, ...]:
    text = str(config.get("ranks", "")).strip("[]")
    return tuple(int(part) for part in text.split(",") if part.strip().isdigit())
