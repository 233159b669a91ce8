# SPDX-License-Identifier: Apache-2.0
"""The rules of the paper (section 4.2, appendix A.1), for every kind of motif to which they apply.

Sizes, rank counts and parameters need not divide one another: then pieces differ in size, and the last group is
smaller.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, zip_longest
from typing import Any

from ...errors import InvalidInput
from .motif import MAX_LEAVES, SHARDED, Expr, Groups, Motif, par, seq
from .rules import rule
from .spans import Spans, cut, cut_sizes, joined, measure

PARTS = (2, 4, 8, 16)


def _dividing(motif: Motif, hosts: Groups) -> Iterator[dict[str, Any]]:
    yield from ({"parts": parts} for parts in PARTS if parts <= motif.size)


@rule("segment", choices=_dividing)
def segment(motif: Motif, *, parts: int | None = None, size: int | None = None) -> Expr:
    """S: cut the payload into parts, or into segments of a size, each moved by a motif of the same pattern.

    Shards are cut one by one, so that every rank keeps its own.

    Args:
        motif: the motif.
        parts: number of parts, 1..65536; give either this or `size`.
        size: size of a segment in bytes of the motif's payload (of each block, for an all-to-all).

    Returns:
        The segments in parallel.

    Raises:
        InvalidInput: both or none of `parts` and `size` are given, or one is out of range.
    """
    if (parts is None) == (size is None):
        raise InvalidInput("give either parts or size")
    if motif.kind not in SHARDED:
        return par(replace(motif, spans=piece) for piece in _cut(motif.spans, parts, "size", size) if piece)
    width = None if size is None else max(size // len(motif.ranks), min(size, 1))
    columns = [_cut(shard, parts, "size", width) for shard in motif.shards]
    return par(_sharded(motif, row) for row in zip_longest(*columns, fillvalue=()))


@rule("ring", kinds=["AR"])
def ring(motif: Motif) -> Expr:
    """P: an all-reduce as a reduce-scatter followed by an all-gather."""
    return seq([Motif(kind=kind, ranks=motif.ranks, spans=motif.spans) for kind in ("RS", "AG")])


def _branching(motif: Motif, hosts: Groups) -> Iterator[dict[str, Any]]:
    yield from ({"n": n} for n in PARTS if n < len(motif.ranks))


@rule("tree", kinds=["AR", "BC", "RE"], choices=_branching)
def tree(motif: Motif, *, n: int = 2) -> Expr:
    """P: groups of n reduce to their first rank, the first ranks all-reduce, and broadcast back; reduces, broadcasts
    alike.

    Applied again to the motif in the middle, the rule gives a tree of any depth.
    """
    return _through_leaders(motif, _groups_of(motif.ranks, "n", n))


def _on_hosts(motif: Motif, hosts: Groups) -> Iterator[dict[str, Any]]:
    if len(hosts) > 1 and max(len(host) for host in hosts) > 1 and (motif.kind != "AA" or motif.whole):
        yield {"groups": hosts}


@rule("hierarchical", kinds=["AR", "AG", "RS", "AA", "BC", "RE"], choices=_on_hosts)
def hierarchical(motif: Motif, *, local: int | None = None, groups: Sequence[Sequence[int]] | None = None) -> Expr:
    """P: inside groups (hosts) of ranks and across them, with one rail per local position.

    All-reduce: reduce-scatter inside, all-reduces across, all-gather inside. All-gather goes across first,
    reduce-scatter and all-to-all inside first. Broadcast and reduce pass through one leader per group. In a group that
    is smaller than others one rank serves several rails.

    Args:
        motif: the motif.
        local: number of consecutive ranks in a group, >= 1; give either this or `groups`.
        groups: the ranks of each group; together they hold each rank of the motif once.

    Returns:
        The expression.

    Raises:
        InvalidInput: both or none of `local` and `groups` are given, the groups are wrong, or an all-to-all has a
            window.
    """
    if (local is None) == (groups is None):
        raise InvalidInput("give either local or groups")
    hosts = _groups_of(motif.ranks, "local", local) if local is not None else _partition(motif.ranks, groups or ())
    if motif.kind in ("BC", "RE"):
        return _through_leaders(motif, hosts)
    rails = [tuple(host[rail % len(host)] for host in hosts) for rail in range(max(len(host) for host in hosts))]
    if motif.kind == "AA":
        return _two_step(motif, hosts, rails)
    if motif.kind == "AR":
        shares = cut(motif.spans, len(rails))
        around = [_inside(motif, kind, hosts, list(shares)) for kind in ("RS", "AG")]
        across = [
            replace(motif, ranks=rail, spans=share) if share else None
            for rail, share in zip(rails, shares, strict=True)
        ]
        return seq([around[0], _all(across), around[1]])
    own = dict(zip(motif.ranks, motif.shards, strict=True))
    number = {rank: position for host in hosts for position, rank in enumerate(host)}
    by_rail = [{rank: own[rank] if number[rank] == at else () for rank in rail} for at, rail in enumerate(rails)]
    through = [joined(chain.from_iterable(shards.values())) for shards in by_rail]
    across = [_sharded(motif, list(shards.values()), tuple(shards)) for shards in by_rail]
    inside = _inside(motif, motif.kind, hosts, through)
    return seq([_all(across), inside] if motif.kind == "AG" else [inside, _all(across)])


def _patterns(motif: Motif, hosts: Groups) -> Iterator[dict[str, Any]]:
    yield from ({"parts": parts} for parts in PARTS[:2] if parts < len(motif.ranks))


@rule("spline", kinds=["AA", "BC", "RE", "AG", "RS", "GA", "SC"], choices=_patterns)
def spline(motif: Motif, *, n: int | None = None, parts: int | None = None) -> Expr:
    """P: cut the pattern: each motif serves some of the processes with their whole payload.

    All-to-all: n destinations per process, counted from itself. Broadcast, scatter and reduce-scatter: n destinations.
    Reduce, gather and all-gather: n sources; reduces to one root follow one another.

    Args:
        motif: the motif.
        n: number of processes that each motif serves; give either this or `parts`.
        parts: number of motifs, each of which serves an even share of the processes.

    Returns:
        The expression.

    Raises:
        InvalidInput: both or none of `n` and `parts` are given, or one is out of range.
    """
    if (n is None) == (parts is None):
        raise InvalidInput("give either n or parts")
    if motif.kind == "AA":
        first, last = motif.window
        return par(replace(motif, window=(first + a, first + b)) for a, b in _ranges(last - first, n, parts))
    others = [rank for rank in motif.ranks if rank != motif.root]
    if not others:
        return motif
    chosen = [set(others[a:b]) for a, b in _ranges(len(others), n, parts)]
    if motif.kind in ("AG", "RS"):
        rows = [
            [shard if rank in some else () for rank, shard in zip(motif.ranks, motif.shards, strict=True)]
            for some in chosen
        ]
        return par(_sharded(motif, row) for row in rows)
    members = [tuple(rank for rank in motif.ranks if rank in some or rank == motif.root) for some in chosen]
    if motif.kind in ("BC", "RE"):
        return (par if motif.kind == "BC" else seq)(replace(motif, ranks=ranks) for ranks in members)
    own = dict(zip(motif.ranks, motif.shards, strict=True))
    rows = [[own[rank] if rank != motif.root or at == 0 else () for rank in ranks] for at, ranks in enumerate(members)]
    return par(_sharded(motif, row, ranks) for row, ranks in zip(rows, members, strict=True))


@rule("scatter", kinds=["BC", "RE"])
def scatter(motif: Motif) -> Expr:
    """P: a broadcast as a scatter followed by an all-gather; a reduce as a reduce-scatter followed by a gather.

    The root of a broadcast is left out of the all-gather: it already has the data, and others may be reading it.
    """
    if motif.kind == "RE":
        sums = Motif(kind="RS", ranks=motif.ranks, spans=motif.spans)
        return seq([sums, replace(motif, kind="GA")])
    others = tuple(rank for rank in motif.ranks if rank != motif.root)
    if not others:
        return motif
    gathered = Motif(kind="AG", ranks=others, spans=motif.spans)
    own = dict(zip(others, gathered.shards, strict=True))
    return seq([replace(motif, kind="SC", shards=tuple(own.get(rank, ()) for rank in motif.ranks)), gathered])


def _all(motifs: Sequence[Expr | None]) -> Expr | None:
    """The motifs in parallel; None if there are none."""
    return par(motifs) if any(m is not None for m in motifs) else None


def _sharded(motif: Motif, shards: Sequence[Spans], ranks: tuple[int, ...] | None = None) -> Motif | None:
    """The same kind of motif with other shards (and ranks); None if all shards are empty."""
    if not any(shards):
        return None
    return replace(motif, ranks=ranks or motif.ranks, spans=(), shards=tuple(shards))


def _inside(motif: Motif, kind: str, hosts: Groups, through: Sequence[Spans]) -> Expr | None:
    """A reduce-scatter or all-gather in each host, after or before which each rank has the
    data that its rails carry.
    """
    found = []
    for host in hosts:
        shards = tuple(joined(chain.from_iterable(through[position :: len(host)])) for position in range(len(host)))
        found.append(Motif(kind=kind, ranks=host, shards=shards) if any(shards) else None)
    return _all(found)


def _two_step(motif: Motif, hosts: Groups, rails: Sequence[tuple[int, ...]]) -> Expr:
    """An all-to-all inside each host to the rank whose rail leads to the destination, then one across hosts on each
    rail.
    """
    if not motif.whole:
        raise InvalidInput("needs an all-to-all of all ranks with all, not one with a window")
    held, bound = (dict(zip(motif.ranks, side, strict=True)) for side in (motif.held, motif.bound))
    # For each rail the processes that its blocks are for, host by host; empty where a host is too small for the rail.
    ends = [[bound[host[at]] if at < len(host) else () for host in hosts] for at in range(len(rails))]
    for_rail = [tuple(chain.from_iterable(rail)) for rail in ends]
    inside = [
        replace(
            motif,
            ranks=host,
            window=(0, 0),
            held=tuple(held[rank] for rank in host),
            bound=tuple(tuple(chain.from_iterable(for_rail[at :: len(host)])) for at in range(len(host))),
        )
        for host in hosts
    ]
    gathered = tuple(tuple(chain.from_iterable(held[rank] for rank in host)) for host in hosts)
    across = [
        replace(motif, ranks=rail, window=(0, 0), held=gathered, bound=tuple(ends[at])) if for_rail[at] else None
        for at, rail in enumerate(rails)
    ]
    return seq([_all(inside), _all(across)])


def _through_leaders(motif: Motif, groups: Groups) -> Expr:
    """Pass data through the leaders of groups; the leader is the root if it is a member, else the first rank."""
    leaders = tuple(motif.root if motif.root in group else group[0] for group in groups)
    middle = replace(motif, ranks=leaders)

    def each(kind: str) -> Expr | None:
        return _all(
            [replace(motif, kind=kind, ranks=group, root=leader) for group, leader in zip(groups, leaders, strict=True)]
        )

    return seq([each("RE") if motif.kind != "BC" else None, middle, each("BC") if motif.kind != "RE" else None])


def _groups_of(ranks: tuple[int, ...], what: str, count: int) -> Groups:
    if count < 1:
        raise InvalidInput(f"{what}: must be >= 1, not {count}")
    return tuple(ranks[at : at + count] for at in range(0, len(ranks), count))


def _partition(ranks: tuple[int, ...], groups: Sequence[Sequence[int]]) -> Groups:
    hosts = tuple(tuple(group) for group in groups if len(group))
    if sorted(chain.from_iterable(hosts)) != sorted(ranks):
        raise InvalidInput(f"groups: must hold each of the {len(ranks)} ranks once")
    return hosts


def _ranges(total: int, n: int | None, parts: int | None) -> list[tuple[int, int]]:
    """`total` cut into ranges of n, or into that many parts."""
    return [piece[0] for piece in _cut(((0, total),), parts, "n", n) if piece]


def _cut(spans: Spans, parts: int | None, what: str, size: int | None) -> tuple[Spans, ...]:
    """Even parts, or pieces of a size with a smaller last one."""
    if size is None:
        if parts is None or not 1 <= parts <= MAX_LEAVES:
            raise InvalidInput(f"parts: must be 1..{MAX_LEAVES}, not {parts}")
        return cut(spans, parts)
    total = measure(spans)
    if size < 1 or total > MAX_LEAVES * size:
        raise InvalidInput(f"{what}: must be >= {max(1, -(-total // MAX_LEAVES))}, not {size}")
    full, rest = divmod(total, size)
    return cut_sizes(spans, [size] * full + [rest] * (rest > 0))
