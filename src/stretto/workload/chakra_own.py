# SPDX-License-Identifier: Apache-2.0
"""Reads Chakra traces that Stretto itself has written: attributes named ``stretto_*`` give back the same ops."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import InvalidInput
from .chakra_node import ChakraNode, number_or, optional_number, text
from .chakra_proto import OURS, RANKS, SAMPLES, UNIT
from .dag import COMPUTE, WHYS, Dep, Op, Workload


@dataclass(frozen=True, kw_only=True)
class About:
    """The job as the metadata of every one of its files describes it."""

    name: str
    num_ranks: int
    samples: float
    unit: str


def about(metadata: Sequence[dict[str, Any]], files: Sequence[Path]) -> About | None:
    """The job that Stretto wrote these files for; None if another program wrote them.

    Raises:
        InvalidInput: files of a rank are missing, or belong to another job.
    """
    if not any(OURS in each for each in metadata):
        return None
    found = [_about(each, str(file)) for each, file in zip(metadata, files, strict=True)]
    for other, file in zip(found, files, strict=True):
        if other != found[0]:
            raise InvalidInput(f"{file}: not of the same job as {files[0].name}; one directory holds one job")
    if len(files) != found[0].num_ranks:
        held = f"{len(files)} file{'s' if len(files) > 1 else ''} of a job of {found[0].num_ranks} ranks"
        raise InvalidInput(f"{files[0]}: {held}; give the directory with the files of all ranks")
    return found[0]


def _about(attr: dict[str, Any], where: str) -> About:
    if OURS in attr and RANKS not in attr:
        raise InvalidInput(f"{where}: written by an older version of Stretto; write the trace again")
    return About(
        name=text(attr, OURS, where),
        num_ranks=optional_number(attr, RANKS, where),
        samples=number_or(attr, SAMPLES, where),
        unit=text(attr, UNIT, where, "samples"),
    )


def workload(about: About, ranks: Sequence[Sequence[ChakraNode]], files: Sequence[Path], notes: list[str]) -> Workload:
    """The workload that was written.

    Args:
        about: the job as the files describe it.
        ranks: the nodes of each rank.
        files: the file of each rank, for messages.
        notes: notes that the workload gets.

    Returns:
        The workload, equal to the one that was written except for its notes.

    Raises:
        InvalidInput: a node is there twice, or waits for a node that does not exist.
    """
    nodes: dict[int, dict[int, ChakraNode]] = defaultdict(dict)
    for rank, each in enumerate(ranks):
        for node in each:
            if rank in nodes[node.id]:
                raise InvalidInput(f"{files[rank]}: node {node.id} is there twice")
            nodes[node.id][rank] = node
    names = {number: next(iter(nodes[number].values())).name for number in sorted(nodes)}
    ops = tuple(_op(nodes[number], names, about.num_ranks) for number in names)
    return Workload(
        name=about.name or "chakra", num_ranks=about.num_ranks, ops=ops, samples=about.samples, unit=about.unit,
        notes=tuple(notes),
    )  # fmt: skip


def _op(nodes: dict[int, ChakraNode], names: dict[int, str], num_ranks: int) -> Op:
    first = next(iter(nodes.values()))
    attr, where = first.attr, first.where
    same = {
        "name": first.name,
        "kind": first.kind,
        "after": _after(nodes, names),
        "stream": text(attr, "stretto_stream", where, COMPUTE),
        "phase": text(attr, "stretto_phase", where),
        "root": optional_number(attr, "stretto_root", where),
        "encoding": text(attr, "stretto_encoding", where),
        "at_most": attr.get("stretto_at_most") is True,
        "wait_us": number_or(attr, "stretto_wait_us", where),
    }
    times = {rank: number_or(node.attr, "stretto_duration_us", node.where) for rank, node in nodes.items()}
    if first.kind != COMPUTE:
        groups = _groups(nodes)
        order = [rank for group in groups for rank in group] or sorted(nodes)
        sized = all(rank in nodes and "stretto_rank_nbytes" in nodes[rank].attr for rank in order)
        return Op(
            **same,  # type: ignore[arg-type]
            duration_us=max(times.values()),
            nbytes=number_or(attr, "stretto_nbytes", where, -1.0),
            groups=groups,
            rank_nbytes=tuple(
                number_or(nodes[rank].attr, "stretto_rank_nbytes", where) for rank in (order if sized else ())
            ),
        )
    places = {optional_number(node.attr, "stretto_place", node.where, -1): rank for rank, node in nodes.items()}
    named = -1 not in places
    order = [places[place] for place in sorted(places)] if named else sorted(nodes)
    apart = "stretto_op_us" in attr or len(set(times.values())) > 1
    return Op(
        **same,  # type: ignore[arg-type]
        ranks=tuple(order) if named or len(order) < num_ranks else (),
        duration_us=number_or(attr, "stretto_op_us", where, max(times.values())),
        durations_us=tuple(times[rank] for rank in order) if apart else (),
    )


def _groups(nodes: dict[int, ChakraNode]) -> tuple[tuple[int, ...], ...]:
    """The groups in the order in which they were written; an empty tuple stands for one group of all ranks."""
    if not any("stretto_group" in node.attr for node in nodes.values()):
        return ()
    places = {node.group: optional_number(node.attr, "stretto_group", node.where) for node in nodes.values()}
    return tuple(sorted(places, key=lambda group: (places[group], group)))


def _after(nodes: dict[int, ChakraNode], names: dict[int, str]) -> tuple[Dep, ...]:
    """The dependencies of an op; each rank's file has those on ops in which that rank takes part."""
    found: dict[int, Dep] = {}
    for node in nodes.values():
        flat = node.attr.get("stretto_after", [])
        good = isinstance(flat, list) and not len(flat) % 4 and all(isinstance(value, int) for value in flat)
        for at, lag, why, number in zip(*(iter(flat),) * 4, strict=True) if good else ((0, 0, -1, 0),):
            if not 0 <= why < len(WHYS) or number not in names:
                what = "must be numbers in fours: position, iterations before, reason, node"
                raise InvalidInput(f"{node.where}.stretto_after: {what}")
            found[at] = Dep(op=names[number], lag=lag, why=WHYS[why])
    return tuple(found[at] for at in sorted(found))
