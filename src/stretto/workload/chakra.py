# SPDX-License-Identifier: Apache-2.0
"""Reads Chakra execution traces into a `Workload`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

from ..errors import InvalidInput, unknown
from ..files import exists, is_folder, parse_json, read_text
from . import chakra_own
from .chakra_join import joined_ops
from .chakra_node import ChakraNode, optional_number, required_number, text
from .chakra_proto import COLLECTIVE, COMM_TYPES, GROUPS_FILE, NODE_TYPES, RECV, SEND, attributes, decode
from .chakra_write import write
from .dag import MAX_RANKS, Workload
from .trace_files import rank_files

__all__ = ["read", "write"]


def read(path: str | Path, *, dims: Sequence[int] = ()) -> Workload:
    """A workload from one ``.et`` file, which then stands for every rank, or from a directory with one file per rank.

    Groups come from ``pg_name`` and a `comm_groups.json` beside the traces, or from ``involved_dim`` with `dims`, the
    number of ranks in each dimension; without either, a collective is among all ranks.
    """
    path = Path(path)
    files = rank_files(path, (), (".et", ".et.gz"))
    folder = path if is_folder(path) else path.parent
    named = _named_groups(folder / GROUPS_FILE)
    decoded = [decode(file) for file in files]
    ours = chakra_own.about([about for about, _ in decoded], files)
    world = len(files)
    if len(files) == 1:
        world = max(prod(dims), *(rank + 1 for group in named.values() for rank in group), _talks_to(decoded[0][1]) + 1)
    if any(size < 1 for size in dims) or (dims and prod(dims) != world):
        raise InvalidInput(f"dims: {'x'.join(map(str, dims))} is not {world} ranks")
    if not 1 <= world <= MAX_RANKS:
        raise InvalidInput(f"{path}: must be of 1..{MAX_RANKS} ranks, not {world}")
    groups = {**_inferred_groups([nodes for _, nodes in decoded]), **named}
    ranks = [
        [_node(node, rank, world, groups, dims, f"{files[rank]}: node {node.id}") for node in nodes]
        for rank, (_, nodes) in enumerate(decoded)
    ]
    if world == 1 and any(node.type == COLLECTIVE for node in decoded[0][1]):
        raise InvalidInput(
            f"{path}: one file does not say how many ranks its collectives have; give the directory with the files of "
            f"all ranks, or dims"
        )
    notes = [f"Chakra trace of {len(files)} ranks ({path.name})"]
    if ours is not None:
        return chakra_own.workload(ours, ranks, files, notes)
    if len(files) == 1 and world > 1:
        notes.append("one file: every rank is taken to do the same")
    ops = joined_ops(ranks, files, world, notes)
    name = path.name.removesuffix(".gz").removesuffix(".et")
    return Workload(name=name or "chakra", num_ranks=world, ops=ops, notes=tuple(notes))


def _named_groups(path: Path) -> dict[str, tuple[int, ...]]:
    if not exists(path):
        return {}
    found = parse_json(read_text(path), where=str(path))
    if not isinstance(found, dict):
        raise InvalidInput(f"{path}: must be groups by name, not a {type(found).__name__}")
    for name, ranks in found.items():
        good = isinstance(ranks, list) and all(isinstance(rank, int) and 0 <= rank < MAX_RANKS for rank in ranks)
        if not good or not ranks:
            raise InvalidInput(f"{path}: {name}: must be a list of ranks 0..{MAX_RANKS - 1}")
    return {name: tuple(ranks) for name, ranks in found.items()}


def _inferred_groups(files: Sequence[Sequence[Any]]) -> dict[str, tuple[int, ...]]:
    """Groups that no file describes: the ranks whose nodes use the group's name."""
    users: dict[str, set[int]] = defaultdict(set)
    for rank, nodes in enumerate(files):
        for node in nodes:
            for attr in node.attr:
                if attr.name == "pg_name":
                    users[attr.string_val].add(rank)
    return {name: tuple(sorted(ranks)) for name, ranks in users.items()} if len(files) > 1 else {}


def _talks_to(nodes: Sequence[Any]) -> int:
    """The highest rank that the only file sends to or receives from."""
    peers = (attr for node in nodes for attr in node.attr if attr.name in ("comm_src", "comm_dst"))
    values = (getattr(attr, attr.WhichOneof("value") or "int32_val") for attr in peers)
    return max((value for value in values if isinstance(value, int)), default=0)


def _node(
    message: Any, rank: int, world: int, named: Mapping[str, tuple[int, ...]], dims: Sequence[int], where: str
) -> ChakraNode:
    if message.type not in NODE_TYPES:
        choices = [f"{number} {name}" for number, name in NODE_TYPES.items()]
        raise InvalidInput(f"{where}: {unknown('node type', message.type, choices)}")
    attr = attributes(message)
    node = ChakraNode(
        id=message.id, name=message.name or f"node{message.id}", type=message.type, data=list(message.data_deps),
        control=list(message.ctrl_deps), duration_us=float(message.duration_micros), attr=attr, where=where,
    )  # fmt: skip
    if node.type == COLLECTIVE:
        number = required_number(attr, "comm_type", where)
        if number >= len(COMM_TYPES):
            choices = [f"{at} {name}" for at, name in enumerate(COMM_TYPES)]
            raise InvalidInput(f"{where}: {unknown('comm_type', number, choices)}")
        node.kind = {"barrier": "all_reduce", "reduce_scatter_block": "reduce_scatter"}.get(
            COMM_TYPES[number], COMM_TYPES[number]
        )
        node.group = _group(attr, rank, world, named, dims, where)
        node.nbytes = required_number(attr, "comm_size", where) if COMM_TYPES[number] != "barrier" else 0
    elif node.type in (SEND, RECV):
        node.kind = "send"
        peer = required_number(attr, "comm_dst" if node.type == SEND else "comm_src", where)
        if peer >= world:
            raise InvalidInput(f"{where}: names rank {peer}; there are {world}")
        node.group = (rank, peer) if node.type == SEND else (peer, rank)
        node.nbytes = required_number(attr, "comm_size", where)
        node.tag = optional_number(attr, "comm_tag", where)
    return node


def _group(
    attr: Mapping[str, Any],
    rank: int,
    world: int,
    named: Mapping[str, tuple[int, ...]],
    dims: Sequence[int],
    where: str,
) -> tuple[int, ...]:
    name = text(attr, "pg_name", where)
    if name:
        if name not in named:
            raise InvalidInput(f"{where}.pg_name: {unknown('group', name, named or ['(no ' + GROUPS_FILE + ')'])}")
        if rank not in named[name]:
            raise InvalidInput(f"{where}.pg_name: rank {rank} is not in group {name!r}: {list(named[name])}")
        if bad := [member for member in named[name] if member >= world]:
            raise InvalidInput(f"{where}.pg_name: group {name!r} names rank {bad[0]}; there are {world}")
        return named[name]
    involved = attr.get("involved_dim", [])
    if not isinstance(involved, list):
        raise InvalidInput(f"{where}.involved_dim: must be a list of true and false, not {involved!r}")
    if all(involved):
        return tuple(range(world))
    if not dims:
        raise InvalidInput(f"{where}.involved_dim: {involved} leaves some out; say how many ranks each has (dims)")
    stride, members = 1, [0]
    for at, size in enumerate(dims):
        here = rank // stride % size
        places = range(size) if at < len(involved) and involved[at] else (here,)
        members = [member + place * stride for place in places for member in members]
        stride *= size
    return tuple(sorted(members))
