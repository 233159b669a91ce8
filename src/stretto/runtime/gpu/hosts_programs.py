# SPDX-License-Identifier: Apache-2.0
"""Programs for the GPUs of several hosts: as little as can be between hosts, and as few turns between inside and out.

Where hosts have equally many ranks the library's `hierarchical` is taken. `two_level` does the same for any numbers of
ranks, and for the collectives that `hierarchical` has not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from ...algorithms import algorithm
from ...collectives import COLLECTIVES
from ...errors import unknown
from ...programs.ir import Program

MAX_PIECES = 64
"""More pieces than these, and ranks of hosts of different sizes share the work less evenly instead."""
FEW_HOSTS = 8
"""Up to here each host sends straight to every other one; over more in a ring."""
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce")
Message = tuple[int, int, int, list[int], bool]
"""(step, source, destination, chunks, whether they are added)"""


def program_for(kind: str, hosts: Sequence[object], root: int = 0) -> Program:
    """The program that a group runs where nobody has made another one for it.

    Args:
        kind: The collective.
        hosts: The host of each rank.
        root: The root's rank, where the collective has one.

    Returns:
        A program, not verified yet.

    Raises:
        InvalidInput: There is no such collective on GPU memory.

    >>> program_for("all_reduce", "aabb").name
    'hierarchical(dims=2x2,inside=direct.direct)'
    >>> program_for("all_reduce", "aab").name
    'two_level(2+1)'
    """
    members = _members(hosts)
    sizes = {len(each) for each in members}
    if kind in ("all_reduce", "all_gather", "reduce_scatter") and len(sizes) == 1 and len(members) > 1 < max(sizes):
        order = [rank for each in members for rank in each]
        between = "direct" if len(members) <= FEW_HOSTS else "ring"
        placed: dict[str, Any] = {} if order == sorted(order) else {"order": order}
        dims = (max(sizes), len(members))
        return algorithm("hierarchical", kind, len(hosts), dims=dims, inside=("direct", between), **placed)
    return two_level(kind, hosts, root)


def two_level(kind: str, hosts: Sequence[object], root: int = 0) -> Program:
    """A program in which ranks of one host add up, or spread, what goes between hosts once.

    Args:
        kind: "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast" or "reduce".
        hosts: The host of each rank; any numbers of ranks on each.
        root: The root's rank, where the collective has one.

    Returns:
        A program, not verified yet.

    Raises:
        InvalidInput: It does not know the collective.
    """
    if kind not in KINDS:
        raise unknown("collective on GPUs of several hosts", kind, KINDS)
    members = _members(hosts)
    name = f"two_level({'+'.join(str(len(each)) for each in members)})"
    if kind == "all_to_all":
        return algorithm("direct", kind, len(hosts))
    if kind == "all_reduce":
        pieces = _pieces(members)
        return _program(name, kind, _all_reduce(members, pieces), len(hosts), chunks=pieces * len(members))
    if kind in ("all_gather", "reduce_scatter"):
        return _program(name, kind, (_all_gather if kind == "all_gather" else _reduce_scatter)(members), len(hosts))
    spread = _spread(members, root)
    if kind == "reduce":
        spread = [(-step, dst, src, chunks, True) for step, src, dst, chunks, _ in spread]
    return _program(name, kind, spread, len(hosts), root=root)


def _members(hosts: Sequence[object]) -> list[list[int]]:
    return [[rank for rank, at in enumerate(hosts) if at == host] for host in dict.fromkeys(hosts)]


def _pieces(members: Sequence[Sequence[int]]) -> int:
    even = math.lcm(*(len(each) for each in members))
    return even if even <= MAX_PIECES else max(len(each) for each in members)


def _all_reduce(members: Sequence[Sequence[int]], pieces: int) -> list[Message]:
    count, found = len(members), []
    for piece in range(pieces):
        owner = [each[piece * len(each) // pieces] for each in members]
        chunks = [piece * count + at for at in range(count)]
        for host, each in enumerate(members):
            mine = owner[host]
            others = [rank for rank in each if rank != mine]
            found += [(0, rank, mine, chunks, True) for rank in others]
            far = [at for at in range(count) if at != host]
            found += [(1, mine, owner[at], [chunks[at]], True) for at in far]
            found += [(2, mine, owner[at], [chunks[host]], False) for at in far]
            found += [(3, mine, rank, chunks, False) for rank in others]
    return found


def _gates(members: Sequence[Sequence[int]]) -> list[tuple[int, list[tuple[int, Sequence[int]]]]]:
    """For every rank: in each host the rank that its shard goes through, itself in its own."""
    return [
        (rank, [(rank if each is own else each[at % len(each)], each) for each in members])
        for own in members
        for at, rank in enumerate(own)
    ]


def _all_gather(members: Sequence[Sequence[int]]) -> list[Message]:
    found: list[Message] = []
    for rank, gates in _gates(members):
        found += [(0, rank, gate, [rank], False) for gate, _ in gates if gate != rank]
        found += [(1, gate, other, [rank], False) for gate, each in gates for other in each if other != gate]
    return found


def _reduce_scatter(members: Sequence[Sequence[int]]) -> list[Message]:
    return [(1 - step, dst, src, chunks, True) for step, src, dst, chunks, _ in _all_gather(members)]


def _spread(members: Sequence[Sequence[int]], root: int) -> list[Message]:
    """From the root through one rank of each host, one host behind the other, and inside each to all."""
    own = next(each for each in members if root in each)
    chain = [root] + [each[own.index(root) % len(each)] for each in members if each is not own]
    found: list[Message] = [(at, *pair, [0], False) for at, pair in enumerate(pairwise(chain))]
    for leader in chain:
        each = next(one for one in members if leader in one)
        found += [(len(chain), leader, rank, [0], False) for rank in each if rank != leader]
    return found


def _program(
    name: str, kind: str, messages: Sequence[Message], ranks: int, *, chunks: int = 1, root: int | None = None
) -> Program:
    more = {} if root is None else {"root": root}
    columns = list(zip(*messages, strict=True)) if messages else [()] * 5
    rows = [len(each) for each in columns[3]]
    first = min(columns[0], default=0)
    return Program.from_steps(
        name,
        COLLECTIVES[kind](ranks, chunks=chunks, **more),
        step=[step - first for step in columns[0]],
        src=columns[1],
        dst=columns[2],
        chunk=[chunk for each in columns[3] for chunk in each],
        chunk_ptr=np.concatenate([[0], np.cumsum(rows)]).astype(np.int64),
        reduce=columns[4],
    )
