# SPDX-License-Identifier: Apache-2.0
"""A folder of MSCCL++ plans with its index, and how a job registers them with MSCCL++.

``stretto synth -b 1K..1G -o FOLDER --format json`` writes the folder. MSCCL++ takes the first plan that fits a call, so
the ranges of sizes of one collective must not overlap; that is checked here before anything is registered.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from ...errors import InvalidInput
from ...files import convert, parse_json, read_text
from . import mscclpp_reader

INDEX = "index.json"
Bytes = Annotated[int, Meta(ge=0)]


class _Row(msgspec.Struct, kw_only=True, frozen=True):
    file: Annotated[str, Meta(min_length=1, max_length=255)]
    min_bytes: Bytes
    max_bytes: Bytes


class _Index(msgspec.Struct, kw_only=True, frozen=True):
    collective: str
    rows: tuple[_Row, ...]


@dataclass(frozen=True, kw_only=True)
class PlanFile:
    """One plan of a folder, and the sizes of calls that it is for (0 for no upper limit)."""

    path: Path
    name: str
    collective: str
    ranks: int
    min_bytes: int
    max_bytes: int


def plans_of(folder: str | Path) -> list[PlanFile]:
    """The plans of a folder by rising size, read and checked for form.

    Args:
        folder: A folder that ``stretto synth`` wrote.

    Returns:
        The plans.

    Raises:
        InvalidInput: The index or a plan is not valid, a plan is for other sizes than the index says, or two overlap.
    """
    folder = Path(folder)
    index = convert(parse_json(read_text(folder / INDEX), where=str(folder / INDEX)), _Index, where=str(folder / INDEX))
    found = []
    for name in dict.fromkeys(row.file for row in index.rows):
        row = next(row for row in index.rows if row.file == name)
        if Path(name).name != name:
            raise InvalidInput(f"{folder / INDEX}: file: must be a name in the folder, not {name!r}")
        plan = mscclpp_reader.loads(read_text(folder / name), where=str(folder / name))
        limit = row.max_bytes or mscclpp_reader.MAX_UINT64
        if (plan.min_message_size, plan.max_message_size) != (row.min_bytes, limit):
            raise InvalidInput(f"{folder / name}: is for other sizes than {INDEX} says")
        found.append(
            PlanFile(
                path=folder / name,
                name=plan.name,
                collective=plan.collective,
                ranks=len(plan.gpus),
                min_bytes=row.min_bytes,
                max_bytes=row.max_bytes,
            )
        )
    found.sort(key=lambda plan: plan.min_bytes)
    for before, behind in pairwise(found):
        if not before.max_bytes or before.max_bytes >= behind.min_bytes:
            raise InvalidInput(f"{behind.path}: its sizes overlap those of {before.path.name}")
    return found


def register_plans(folder: str | Path, rank: int, *, ranks_per_node: int | None = None) -> list[PlanFile]:
    """Register a folder's plans with MSCCL++ (0.9 or later) in this process; call it before a communicator is made.

    Args:
        folder: A folder that ``stretto synth`` wrote.
        rank: The rank of this process.
        ranks_per_node: The ranks of one host; by default all.

    Returns:
        The plans that are registered now.

    Raises:
        InvalidInput: A plan is not valid, the rank is none of its ranks, or MSCCL++ is not installed.
    """
    plans = plans_of(folder)
    try:
        core: Any = importlib.import_module("mscclpp")
        builder: Any = importlib.import_module("mscclpp.ext").AlgorithmCollectionBuilder()
    except (ImportError, AttributeError):
        raise InvalidInput("mscclpp: its Python package (0.9 or later) is not installed here") from None
    for plan in plans:
        if not 0 <= rank < plan.ranks:
            raise InvalidInput(f"rank: must be 0..{plan.ranks - 1} for {plan.path.name}, not {rank}")
        where = core.Algorithm.Constraint(world_size=plan.ranks, n_ranks_per_node=ranks_per_node or plan.ranks)
        loaded = core.ExecutionPlan(str(plan.path), rank)
        builder.add_algorithm_builder(core.Algorithm(id=plan.name, execution_plan=loaded, constraint=where))
    return plans
