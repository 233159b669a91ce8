# SPDX-License-Identifier: Apache-2.0
"""Joins the nodes of one file per rank into ops: collectives by group, sends with their receives, equal compute nodes.

A receive is not an op: a transfer begins when its sender is ready, whether or not the receive has been posted, as in
Chakra's simulators. An op that waits for a receive waits for the transfer and for everything that the receive itself
waits for. So every rank of a ring may send first and receive afterwards.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from graphlib import CycleError
from pathlib import Path

from ..errors import InvalidInput
from .chakra_node import ChakraNode
from .chakra_proto import COLLECTIVE, PART, RECV, SEND
from .dag import COMPUTE, Dep, Op, Why
from .ordering import few, in_order

MAX_DEPS = 4_000_000
"""Limit on the dependencies of all ops together; replacing silent nodes by their own dependencies multiplies them."""
_SILENT = (0, 1)
"""Node types that do nothing: an op that waits for such a node waits for the node's own dependencies instead."""
_STREAMS = {2: "memory", 3: "memory", 8: "storage", 9: "storage", 10: "storage"}


@dataclass(kw_only=True)
class _Merged:
    """One op under construction: its node on each rank, and its place in the files."""

    place: tuple[int, int]
    nodes: dict[int, ChakraNode] = field(default_factory=dict)
    name: str = ""

    @property
    def first(self) -> ChakraNode:
        return next(iter(self.nodes.values()))

    @property
    def has_sender(self) -> bool:
        return any(node.type == SEND for node in self.nodes.values())


_Table = dict[tuple[int, int], _Merged]
"""The op of each (rank, node id)."""


def joined_ops(ranks: list[list[ChakraNode]], files: list[Path], world: int, notes: list[str]) -> tuple[Op, ...]:
    """The ops of a job.

    Args:
        ranks: the nodes of each file, in the order of the file.
        files: the file of each rank, for messages.
        world: the number of ranks; larger than the number of files where one file stands for all ranks.
        notes: a list to which assumptions are appended.

    Returns:
        The ops, each after those that it waits for.

    Raises:
        InvalidInput: a node is there twice, or waits for a node that does not exist or for itself.
    """
    merged = _merge(ranks, files)
    every = list({id(op): op for op in merged.values()}.values())
    after = _dependencies(merged, every)
    loud = sorted((op for op in every if op.first.type not in _SILENT), key=lambda op: op.place)
    if not loud:
        raise InvalidInput("no node computes or communicates")
    order = _sorted({id(op): {key for key, _ in after[id(op)]} for op in loud}, {id(op): op.first for op in every})
    by_id = {id(op): op for op in every}
    taken: Counter[str] = Counter()
    for key in order:
        name = by_id[key].first.name
        taken[name] += 1
        by_id[key].name = name if taken[name] == 1 else f"{name}#{taken[name]}"
    idle = sum(not op.first.duration_us and "num_ops" in op.first.attr for op in loud)
    if idle:
        notes.append(f"{idle} compute nodes give a number of operations but no duration: taken as 0 us")
    out = []
    for key in order:
        deps = tuple(Dep(op=by_id[other].name, why=why) for other, why in after[key])
        out.append(_op(by_id[key], deps, world, len(files)))
    return tuple(out)


def _merge(ranks: list[list[ChakraNode]], files: list[Path]) -> _Table:
    """The op of each (rank, node id): ranks with equal nodes share compute-ops, those of a group share collectives."""
    kinds: dict[object, int] = {}
    classes = []
    for nodes in ranks:
        shape = tuple((node.id, node.name, node.type, tuple(node.data), tuple(node.control)) for node in nodes)
        classes.append(kinds.setdefault(shape, len(kinds)))
    together, by_tag = _apart(ranks, classes), _tagged_alike(ranks)
    found: dict[object, _Merged] = {}
    out: _Table = {}
    for rank, nodes in enumerate(ranks):
        seen: Counter[object] = Counter()
        for at, node in enumerate(nodes):
            if (rank, node.id) in out:
                raise InvalidInput(f"{files[rank]}: node {node.id} is there twice")
            key: object = (classes[rank], node.id)
            if node.kind != COMPUTE and not together.get((classes[rank], node.id)):
                call = (node.kind, node.group, node.tag if node.group in by_tag else 0)
                key = (*call, seen[call])
                seen[call] += 1
            op = found.setdefault(key, _Merged(place=(at, rank)))
            op.nodes[rank] = node
            out[rank, node.id] = op
    for nodes, file in {one: (nodes, file) for one, nodes, file in zip(classes, ranks, files, strict=True)}.values():
        _check_waits(nodes, file)
    return out


def _check_waits(nodes: list[ChakraNode], file: Path) -> None:
    """Raise `InvalidInput` for a node that waits for a node that does not exist, or for itself."""
    by_id = {node.id: node for node in nodes}
    for node in nodes:
        for dep in (*node.data, *node.control):
            if dep not in by_id:
                raise InvalidInput(f"{file}: node {node.id} ({node.name}) waits for node {dep}, which is not there")
    _sorted({node.id: {*node.data, *node.control} for node in nodes}, by_id)


def _apart(ranks: list[list[ChakraNode]], classes: list[int]) -> dict[tuple[int, int], bool]:
    """Which collectives of equal ranks can be one op: their groups are disjoint and have no other ranks."""
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


def _tagged_alike(ranks: list[list[ChakraNode]]) -> set[tuple[int, ...]]:
    """The pairs of ranks whose sends and receives carry the same tags, so that tags can match them."""
    tags: dict[tuple[int, ...], dict[int, Counter[int]]] = defaultdict(lambda: {SEND: Counter(), RECV: Counter()})
    for nodes in ranks:
        for node in nodes:
            if node.type in (SEND, RECV):
                tags[node.group][node.type][node.tag] += 1
    return {pair for pair, sides in tags.items() if sides[SEND] == sides[RECV]}


def _dependencies(merged: _Table, every: list[_Merged]) -> dict[int, dict[tuple[int, Why], None]]:
    """The dependencies of each op as (id of the other op, why), in the order of the files."""
    after: dict[int, dict[tuple[int, Why], None]] = {id(op): {} for op in every}
    known: dict[tuple[int, int], list[_Merged]] = {}
    count = 0
    for (rank, _), op in merged.items():
        node = op.nodes[rank]
        if node.type in _SILENT or (node.type == RECV and op.has_sender):
            continue
        for deps, control in ((node.data, False), (node.control, True)):
            for dep in deps:
                direct = merged[rank, dep]
                for other in _ends_with(direct, merged, rank, known):
                    why: Why = "data" if not control and other is direct else _control(node, other.nodes[rank])
                    after[id(op)][id(other), why] = None
        count += len(after[id(op)])
        if count > MAX_DEPS:
            raise InvalidInput(f"{node.where}: over {MAX_DEPS} dependencies by way of nodes that only wait")
    return after


def _control(node: ChakraNode, other: ChakraNode) -> Why:
    """The meaning of a control dependency in a file that Stretto did not write, guessed from the kinds of the two
    nodes.
    """
    if node.kind != COMPUTE:
        return "submit"
    return "wait" if other.kind != COMPUTE else "data"


def _ends_with(op: _Merged, merged: _Table, rank: int, known: dict[tuple[int, int], list[_Merged]]) -> list[_Merged]:
    """The ops that must have ended for this one to have ended on a rank; `known` caches earlier answers.

    These are: the op itself; for a silent node, the ops that it waits for; for a receive, both.
    """
    todo = [op]
    open_: set[int] = set()
    while todo:
        here = todo[-1]
        node = here.nodes[rank]
        receives = node.type == RECV and here.has_sender
        if (rank, id(here)) in known:
            todo.pop()
        elif node.type not in _SILENT and not receives:
            known[rank, id(here)] = [here]
        else:
            before = [merged[rank, dep] for dep in (*node.data, *node.control)]
            deeper = [each for each in before if (rank, id(each)) not in known and id(each) not in open_]
            if id(here) not in open_ and deeper:
                open_.add(id(here))
                todo += deeper
            else:
                found = {id(each): each for dep in before for each in known.get((rank, id(dep)), [])}
                known[rank, id(here)] = [here, *found.values()] if receives else list(found.values())
    return known[rank, id(op)]


def _sorted(needs: dict[int, set[int]], nodes: dict[int, ChakraNode]) -> list[int]:
    try:
        return in_order(needs)
    except CycleError as error:
        circle = " -> ".join(few([f"{nodes[key].id} ({nodes[key].name})" for key in reversed(error.args[1])]))
        raise InvalidInput(f"nodes wait for each other in a circle: {circle}") from None


def _op(op: _Merged, deps: tuple[Dep, ...], world: int, num_files: int) -> Op:
    node = op.first
    times = [each.duration_us for each in op.nodes.values()]
    if node.kind == COMPUTE:
        return Op(
            name=op.name, after=deps, stream=_stream(node), duration_us=max(times),
            ranks=tuple(op.nodes) if len(op.nodes) < num_files else (),
            durations_us=tuple(times) if len(set(times)) > 1 else (),
        )  # fmt: skip
    groups = tuple(sorted({each.group for each in op.nodes.values()}))
    sizes = {each.nbytes for each in op.nodes.values()}
    whole = groups == (tuple(range(world)),) and node.kind != "send"
    return Op(
        name=op.name, kind=node.kind, after=deps, groups=() if whole else groups,
        nbytes=float(max(*sizes, 1) * (len(groups[0]) if node.kind in PART else 1)),
        at_most=len(sizes) > 1, duration_us=max(times),
    )  # fmt: skip


def _stream(node: ChakraNode) -> str:
    stream = node.attr.get("stream", _STREAMS.get(node.type))
    if stream is None:
        return "host" if node.attr.get("is_cpu_op") is True else COMPUTE
    if not isinstance(stream, int | str):
        raise InvalidInput(f"{node.where}.stream: must be a number or a name, not {stream!r}")
    return str(stream)
