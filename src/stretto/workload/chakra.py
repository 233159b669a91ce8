"""Chakra execution traces read into a `Workload`."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from graphlib import CycleError
from math import prod
from pathlib import Path
from typing import Any

from ..errors import InvalidInput, unknown
from ..files import parse_json, read_text
from .chakra_proto import COLLECTIVE, COMM_TYPES, GROUPS_FILE, NODE_TYPES, OURS, PART, RECV, SEND, attributes, decode
from .chakra_write import write
from .dag import COMPUTE, MAX_RANKS, Dep, Op, Why, Workload
from .ordering import few, in_order
from .trace_files import rank_files

__all__ = ["read", "write"]

_SILENT = (0, 1)
"""Node types that do nothing: what waits for them waits for what they wait for."""
_LAGGED = re.compile(r"(\d{1,4}):(data|submit|wait):(\d{1,18})")
_WHYS: dict[str, Why] = {"data": "data", "submit": "submit", "wait": "wait"}
_STREAMS = {2: "memory", 3: "memory", 8: "storage", 9: "storage", 10: "storage"}


@dataclass(kw_only=True)
class _Node:
    id: int
    name: str
    type: int
    data: list[int]
    control: list[int]
    duration_us: float
    attr: dict[str, Any]
    kind: str = COMPUTE
    group: tuple[int, ...] = ()


@dataclass(kw_only=True)
class _Merged:
    """One op to be: the nodes that are it on each rank, and its place in the files."""

    place: tuple[int, int]
    nodes: dict[int, _Node] = field(default_factory=dict)
    name: str = ""


def read(path: str | Path, *, dims: Sequence[int] = ()) -> Workload:
    """A workload from one ``.et`` file (every rank does the same), or from a directory with one per rank.

    Groups come from ``pg_name`` and a `comm_groups.json` beside the traces, or from ``involved_dim`` with `dims`, the
    number of ranks in each dimension; without either a collective is of all ranks.
    """
    path = Path(path)
    files = rank_files(path, (), (".et", ".et.gz"))
    folder = path if path.is_dir() else path.parent
    named = _named_groups(folder / GROUPS_FILE)
    decoded = [decode(file) for file in files]
    world = len(files)
    if len(files) == 1:
        world = max(prod(dims), *(rank + 1 for group in named.values() for rank in group), _talks_to(decoded[0][1]) + 1)
    if any(size < 1 for size in dims) or (dims and prod(dims) != world):
        raise InvalidInput(f"dims: {'x'.join(map(str, dims))} is not {world} ranks")
    if not 1 <= world <= MAX_RANKS:
        raise InvalidInput(f"{path}: must be of 1..{MAX_RANKS} ranks, not {world}")
    users: dict[str, set[int]] = defaultdict(set)
    for rank, (_, nodes) in enumerate(decoded):
        for node in nodes:
            for attr in node.attr:
                if attr.name == "pg_name":
                    users[attr.string_val].add(rank)
    inferred = {name: tuple(sorted(ranks)) for name, ranks in users.items()} if len(files) > 1 else {}
    groups = {**inferred, **named}
    ranks = [
        [_node(node, rank, world, groups, dims, f"{files[rank]}: node {node.id}") for node in nodes]
        for rank, (_, nodes) in enumerate(decoded)
    ]
    shared = all(OURS in about for about, _ in decoded)
    name = str(decoded[0][0].get(OURS, "")) if shared else path.name.removesuffix(".gz").removesuffix(".et")
    notes = [f"Chakra trace of {len(files)} ranks ({path.name})"]
    if len(files) == 1 and world > 1:
        notes.append("one file: every rank is taken to do the same")
    merged = _merge(ranks, files, shared=shared)
    ops = _ops(merged, world, len(files), notes)
    return Workload(name=name or "chakra", num_ranks=world, ops=ops, notes=tuple(notes))


def _named_groups(path: Path) -> dict[str, tuple[int, ...]]:
    if not path.exists():
        return {}
    found = parse_json(read_text(path), where=str(path))
    if not isinstance(found, dict):
        raise InvalidInput(f"{path}: must be groups by name, not a {type(found).__name__}")
    for name, ranks in found.items():
        good = isinstance(ranks, list) and all(isinstance(rank, int) and 0 <= rank < MAX_RANKS for rank in ranks)
        if not good or not ranks:
            raise InvalidInput(f"{path}: {name}: must be a list of ranks 0..{MAX_RANKS - 1}")
    return {name: tuple(ranks) for name, ranks in found.items()}


def _talks_to(nodes: Sequence[Any]) -> int:
    """The highest rank that a lone file sends to or receives from."""
    peers = (attr for node in nodes for attr in node.attr if attr.name in ("comm_src", "comm_dst"))
    values = (getattr(attr, attr.WhichOneof("value") or "int64_val") for attr in peers)
    return max((value for value in values if isinstance(value, int)), default=0)


def _node(
    message: Any, rank: int, world: int, named: Mapping[str, tuple[int, ...]], dims: Sequence[int], where: str
) -> _Node:
    if message.type not in NODE_TYPES:
        choices = [f"{number} {name}" for number, name in NODE_TYPES.items()]
        raise InvalidInput(f"{where}: {unknown('node type', message.type, choices)}")
    attr = attributes(message)
    node = _Node(
        id=message.id, name=message.name or f"node{message.id}", type=message.type, data=list(message.data_deps),
        control=list(message.ctrl_deps), duration_us=float(message.duration_micros), attr=attr,
    )  # fmt: skip
    exact = attr.get("stretto_duration_us")
    if isinstance(exact, float):
        node.duration_us = exact
    if node.type == COLLECTIVE:
        number = _number(attr, "comm_type", where)
        if number >= len(COMM_TYPES):
            choices = [f"{at} {name}" for at, name in enumerate(COMM_TYPES)]
            raise InvalidInput(f"{where}: {unknown('comm_type', number, choices)}")
        node.kind = {"barrier": "all_reduce", "reduce_scatter_block": "reduce_scatter"}.get(
            COMM_TYPES[number], COMM_TYPES[number]
        )
        node.group = _group(attr, rank, world, named, dims, where)
        if COMM_TYPES[number] != "barrier":
            _number(attr, "comm_size", where)
    elif node.type in (SEND, RECV):
        node.kind = "send"
        peer = _number(attr, "comm_dst" if node.type == SEND else "comm_src", where)
        if peer >= world:
            raise InvalidInput(f"{where}: names rank {peer}; there are {world}")
        node.group = (rank, peer) if node.type == SEND else (peer, rank)
        _number(attr, "comm_size", where)
    return node


def _number(attr: Mapping[str, Any], key: str, where: str) -> int:
    value = attr.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 59:
        raise InvalidInput(f"{where}.{key}: must be a whole number >= 0, not {value!r}")
    return value


def _group(
    attr: Mapping[str, Any],
    rank: int,
    world: int,
    named: Mapping[str, tuple[int, ...]],
    dims: Sequence[int],
    where: str,
) -> tuple[int, ...]:
    name = attr.get("pg_name")
    if name:
        if name not in named:
            raise InvalidInput(f"{where}.pg_name: {unknown('group', name, named or ['(no ' + GROUPS_FILE + ')'])}")
        if rank not in named[name]:
            raise InvalidInput(f"{where}.pg_name: rank {rank} is not in group {name!r}: {list(named[name])}")
        if bad := [member for member in named[name] if member >= world]:
            raise InvalidInput(f"{where}.pg_name: group {name!r} names rank {bad[0]}; there are {world}")
        return named[name]
    involved = attr.get("involved_dim")
    if not isinstance(involved, list) or all(involved):
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


def _merge(ranks: list[list[_Node]], files: list[Path], *, shared: bool) -> dict[tuple[int, int], _Merged]:
    """For each (rank, node id) its op: ranks with the same nodes share compute, groups share collectives."""
    kinds: dict[object, int] = {}
    classes = []
    for nodes in ranks:
        shape = tuple((node.id, node.name, node.type, tuple(node.data), tuple(node.control)) for node in nodes)
        classes.append(0 if shared else kinds.setdefault(shape, len(kinds)))
    together = _apart(ranks, classes)
    found: dict[object, _Merged] = {}
    out: dict[tuple[int, int], _Merged] = {}
    for rank, nodes in enumerate(ranks):
        seen: Counter[tuple[str, tuple[int, ...]]] = Counter()
        for at, node in enumerate(nodes):
            if (rank, node.id) in out:
                raise InvalidInput(f"{files[rank]}: node {node.id} is there twice")
            key: object = (classes[rank], node.id)
            if node.kind != COMPUTE and not (shared or together.get((classes[rank], node.id))):
                key = (node.kind, node.group, seen[node.kind, node.group])
            seen[node.kind, node.group] += 1
            op = found.setdefault(key, _Merged(place=(node.id if shared else at, rank)))
            op.nodes[rank] = node
            out[rank, node.id] = op
    for rank, nodes in enumerate(ranks):
        for node in nodes:
            missing = [dep for dep in (*node.data, *node.control) if (rank, dep) not in out]
            if missing:
                what = f"node {node.id} ({node.name}) waits for node {missing[0]}, which is not there"
                raise InvalidInput(f"{files[rank]}: {what}")
    return out


def _apart(ranks: list[list[_Node]], classes: list[int]) -> dict[tuple[int, int], bool]:
    """Which collectives of ranks that do the same can be one op: their groups are apart, and of those ranks alone."""
    groups: dict[tuple[int, int], set[tuple[int, ...]]] = defaultdict(set)
    for rank, nodes in enumerate(ranks):
        for node in nodes:
            if node.type == COLLECTIVE:
                groups[classes[rank], node.id].add(node.group)
    out = {}
    for key, these in groups.items():
        members = [rank for group in these for rank in group if rank < len(classes)]
        out[key] = len(set(members)) == len(members) and all(classes[rank] == key[0] for rank in members)
    return out


def _ops(merged: dict[tuple[int, int], _Merged], world: int, num_files: int, notes: list[str]) -> tuple[Op, ...]:
    every = list({id(op): op for op in merged.values()}.values())
    after: dict[int, dict[tuple[int, int, Why], None]] = {id(op): {} for op in every}
    loud_of: dict[tuple[int, int], list[_Merged]] = {}
    for (rank, _), op in merged.items():
        node = op.nodes[rank]
        if node.type in _SILENT:
            continue
        for dep, lag, why in _deps(node, merged, rank):
            for real in _loud(merged[rank, dep], merged, rank, loud_of):
                after[id(op)][id(real), lag, why or _control(node, real.nodes[rank])] = None
    loud = sorted((op for op in every if _first(op).type not in _SILENT), key=lambda op: op.place)
    if not loud:
        raise InvalidInput("no node computes or communicates")
    needs = {id(op): {key for key, lag, _ in after[id(op)] if not lag} for op in loud}
    order = _sorted(needs, {id(op): _first(op) for op in every})
    by_id = {id(op): op for op in every}
    taken: Counter[str] = Counter()
    for key in order:
        name = _first(by_id[key]).name
        taken[name] += 1
        by_id[key].name = name if taken[name] == 1 else f"{name}#{taken[name]}"
    idle = sum(not node.duration_us and "num_ops" in node.attr for op in loud for node in list(op.nodes.values())[:1])
    if idle:
        notes.append(f"{idle} compute nodes give a number of operations but no duration: taken as 0 us")
    out = []
    for key in order:
        deps = tuple(Dep(op=by_id[other].name, lag=lag, why=why) for other, lag, why in after[key])
        out.append(_op(by_id[key], deps, world, num_files))
    return tuple(out)


def _float(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else -1.0


def _first(op: _Merged) -> _Node:
    return next(iter(op.nodes.values()))


def _control(node: _Node, other: _Node) -> Why:
    """What a control dependency of a foreign file means, which tells no more than that there is one."""
    if node.kind != COMPUTE:
        return "submit"
    return "wait" if other.kind != COMPUTE else "data"


def _deps(node: _Node, merged: dict[tuple[int, int], _Merged], rank: int) -> list[tuple[int, int, Why | None]]:
    """What a node waits for, how many iterations before, and why, as far as the file says."""
    order = _list(node, "stretto_order_deps")
    waits = _list(node, "stretto_wait_deps") if "stretto_wait_deps" in node.attr else None
    out: list[tuple[int, int, Why | None]] = [(dep, 0, "data") for dep in node.data]
    for dep in node.control:
        if dep not in order:
            out.append((dep, 0, None if waits is None else "wait" if dep in waits else "submit"))
    for text in _list(node, "stretto_lag_deps"):
        found = _LAGGED.fullmatch(str(text))
        if not found or (rank, int(found[3])) not in merged:
            raise InvalidInput(f"node {node.id}.stretto_lag_deps: must be iterations:reason:node, not {text!r}")
        out.append((int(found[3]), int(found[1]), _WHYS[found[2]]))
    return out


def _list(node: _Node, key: str) -> list[Any]:
    value = node.attr.get(key, [])
    if not isinstance(value, list):
        raise InvalidInput(f"node {node.id}.{key}: must be a list, not {value!r}")
    return value


def _loud(
    op: _Merged, merged: dict[tuple[int, int], _Merged], rank: int, known: dict[tuple[int, int], list[_Merged]]
) -> list[_Merged]:
    """The op itself, or, where it does nothing, the nearest ones that it waits for; `known` holds earlier answers."""
    todo = [op]
    open_: set[int] = set()
    while todo:
        here = todo[-1]
        node = here.nodes[rank]
        if (rank, id(here)) in known:
            todo.pop()
        elif node.type not in _SILENT:
            known[rank, id(here)] = [here]
        else:
            before = [merged[rank, dep] for dep in (*node.data, *node.control)]
            deeper = [each for each in before if (rank, id(each)) not in known and id(each) not in open_]
            if id(here) not in open_ and deeper:
                open_.add(id(here))
                todo += deeper
            else:
                found = {id(each): each for dep in before for each in known.get((rank, id(dep)), [])}
                known[rank, id(here)] = list(found.values())
    return known[rank, id(op)]


def _sorted(needs: dict[int, set[int]], nodes: dict[int, _Node]) -> list[int]:
    try:
        return in_order(needs)
    except CycleError as error:
        circle = " -> ".join(few([f"{nodes[key].id} ({nodes[key].name})" for key in reversed(error.args[1])]))
        raise InvalidInput(f"nodes wait for each other in a circle: {circle}") from None


def _op(op: _Merged, deps: tuple[Dep, ...], world: int, num_files: int) -> Op:
    node = _first(op)
    attr = node.attr
    phase = str(attr.get("stretto_phase", ""))
    if node.kind == COMPUTE:
        stream = attr.get("stretto_stream", attr.get("stream", _STREAMS.get(node.type)))
        if stream is None:
            stream = "host" if attr.get("is_cpu_op") is True else COMPUTE
        ranks = tuple(op.nodes) if len(op.nodes) < num_files else ()
        times = [each.duration_us for each in op.nodes.values()]
        apart = len(set(times)) > 1
        return Op(
            name=op.name, after=deps, stream=str(stream), phase=phase, ranks=ranks, duration_us=max(times),
            durations_us=tuple(times) if apart else (),
        )  # fmt: skip
    groups = tuple(sorted({each.group for each in op.nodes.values()}))
    sizes = [size for each in op.nodes.values() if isinstance(size := each.attr.get("comm_size"), int)]
    size = attr.get("stretto_nbytes", max([*sizes, 1]) * (len(groups[0]) if node.kind in PART else 1))
    root = attr.get("stretto_root", 0)
    whole = groups == (tuple(range(world)),) and node.kind != "send"
    return Op(
        name=op.name, kind=node.kind, after=deps, phase=phase, nbytes=_float(size), groups=() if whole else groups,
        stream=str(attr.get("stretto_stream", COMPUTE)), root=root if isinstance(root, int) else 0,
        at_most=attr.get("stretto_at_most") is True or len(set(sizes)) > 1,
        encoding=str(attr.get("stretto_encoding", "")), wait_us=_float(attr.get("stretto_wait_us", 0.0)),
        duration_us=max(each.duration_us for each in op.nodes.values()),
    )  # fmt: skip
