# SPDX-License-Identifier: Apache-2.0
"""The rewrites of a comm-op: every registered rule, and segments of its results, applied to all groups at once.

Groups need not be equal. Groups of one length that lie on their hosts in the same way are of one *sort*; every sort is
rewritten by itself, and a rewrite is valid if it gives all sorts the same stages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from ...cluster import Cluster
from ...errors import InvalidInput
from ...workload import Op
from ..costs.channels import Scope, scope_of
from .motif import ROOTED, SHARDED, Expr, Motif, Seq, motif_of, par
from .rules import apply, parse_step, variants
from .spans import measure

CHOICES = 2
"""The number of parameters that are tried of each rule; those that keep stages inside hosts or between come first."""
MAX_PATTERNS = 8
MAX_NESTED = 4
"""The number of patterns whose all-reduces are rewritten once more."""
NESTED_CUTS = 2
"""The number of cuts into segments that are tried with them."""
NESTED = ("ring", "tree")
"""The rules for all-reduces inside a pattern."""
MAX_TASKS = 64
EVEN = 1.5
"""A rewrite is left out if its largest share is more than this many times the even share, which costs are based on."""

Groups = tuple[tuple[int, ...], ...]
Steps = tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class MotifStage:
    """Leaves of an expression that run at the same time on different ranks, as one task; `after` are earlier stages."""

    motif: str
    kind: str
    groups: Groups
    nbytes: float
    after: tuple[int, ...]
    window: tuple[int, int] | None
    scope: Scope
    segment: int


@dataclass(frozen=True, kw_only=True)
class Rewrite:
    """A rewritten comm-op: the steps that led to it, one expression for each sort of group, and the stages over all
    groups.
    """

    steps: Steps
    exprs: tuple[Expr, ...]
    stages: tuple[MotifStage, ...]
    segments: int = 1

    @cached_property
    def text(self) -> str:
        """The expressions in the paper's notation, in parallel."""
        return str(par(self.exprs))


@dataclass(frozen=True, kw_only=True)
class _Sort:
    """Groups with one expression: that of the first group, with the other groups' ranks in the same positions."""

    whole: Motif
    hosts: Groups
    members: Groups
    splits: bool
    """Whether this is an all-to-all whose pieces may differ: a rank then knows only its own sizes and cannot relay."""


def rewrites(op: Op, groups: Groups, cluster: Cluster) -> Iterator[Rewrite]:
    """The op as it is, cut into segments, in every pattern that a rule makes of it, patterns inside patterns, and
    segments of those.

    Args:
        op: the comm-op.
        groups: its groups.
        cluster: the cluster, for the hosts of the ranks.

    Returns:
        The rewrites; the first is the op as it is.
    """
    sorts = _sorts(op, groups, cluster)
    scopes: dict[Groups, Scope] = {}

    def made(steps: Steps, exprs: Sequence[Expr], segments: int = 1) -> Rewrite | None:
        each = [_stages(expr, segments, sort, cluster, scopes) for expr, sort in zip(exprs, sorts, strict=True)]
        stages = _merged(each, cluster, scopes)
        if stages is None or len(stages) > MAX_TASKS:
            return None
        return Rewrite(steps=steps, exprs=tuple(exprs), stages=stages, segments=segments)

    whole = made((), [sort.whole for sort in sorts])
    assert whole is not None
    yield whole
    tables = [_named(sort) for sort in sorts]
    shared = [name for name in tables[0] if all(name in table for table in tables)]
    cuts = [name for name in shared if name.startswith("segment")]
    patterns = _chosen([
        rewrite
        for name in shared
        if name not in cuts and (rewrite := made((name,), [table[name][1] for table in tables]))
    ])  # fmt: skip
    for cut in cuts:
        exprs = [table[cut][1] for table in tables]
        if rewrite := made((cut,), exprs, segments=len(exprs[0].children)):
            yield rewrite
    yield from patterns
    nested = _chosen_nested([
        rewrite
        for pattern in patterns
        for second in _inner_steps(pattern.exprs)
        if (rewrite := made((*pattern.steps, second), [_nested(expr, second) for expr in pattern.exprs]))
    ])  # fmt: skip
    yield from nested
    for cut in cuts[:NESTED_CUTS]:
        for first, second in (rewrite.steps for rewrite in nested):
            try:
                exprs = [_nested(parse_step(table[first][0])(table[cut][1]), second) for table in tables]
            except InvalidInput:
                continue
            if rewrite := made((cut, first, second), exprs, segments=len(exprs[0].children)):
                yield rewrite
    for cut in cuts:
        for (name,) in (pattern.steps for pattern in patterns):
            try:
                exprs = [parse_step(table[name][0])(table[cut][1]) for table in tables]
            except InvalidInput:
                continue
            if rewrite := made((cut, name), exprs, segments=len(exprs[0].children)):
                yield rewrite


def _inner_steps(exprs: Sequence[Expr]) -> list[str]:
    """Rules that fit the all-reduces which a pattern keeps for what goes across: trees of trees, and rings."""
    found: list[list[str]] = []
    for expr in exprs:
        inner = [leaf for leaf in expr.leaves if leaf.kind == "AR"]
        widest = max(inner, key=lambda leaf: len(leaf.ranks), default=None)
        found.append([step for step, _ in variants(widest, only=NESTED)] if widest is not None else [])
    return [step for step in found[0] if all(step in other for other in found)]


def _nested(expr: Expr, step: str) -> Expr:
    """The expression with the step applied to its all-reduces."""
    parsed = parse_step(step)
    for path, leaf in list(expr.walk()):
        if leaf.kind == "AR":
            expr = apply(expr, parsed.rule, at=path, **parsed.parameters)
    return expr


def _chosen_nested(rewrites: Sequence[Rewrite]) -> list[Rewrite]:
    """The rewrites that differ from one another; only those that use one fabric at a time, if any does."""
    by_exprs = {rewrite.exprs: rewrite for rewrite in reversed(rewrites)}
    found = list(reversed(by_exprs.values()))
    pure = [rewrite for rewrite in found if all(stage.scope != "mixed" for stage in rewrite.stages)]
    return (pure or found)[:MAX_NESTED]


def _sorts(op: Op, groups: Groups, cluster: Cluster) -> list[_Sort]:
    found: dict[tuple[int, Groups], list[tuple[int, ...]]] = {}
    for group in groups:
        host = cluster.hosts_of(group).tolist()
        rows = tuple(tuple(at for at, h in enumerate(host) if h == one) for one in dict.fromkeys(host))
        found.setdefault((len(group), rows), []).append(group)
    return [
        _Sort(
            whole=motif_of(op.kind, members[0], op.nbytes, op.root),
            hosts=tuple(tuple(members[0][at] for at in row) for row in rows),
            members=tuple(members),
            splits=op.kind == "all_to_all" and op.at_most,
        )
        for (_, rows), members in found.items()
    ]


def _named(sort: _Sort) -> dict[str, tuple[str, Expr]]:
    """The results of the rules for a sort's motif, with the step that gives each, under names that do not mention
    ranks.
    """
    local = {len(host) for host in sort.hosts}
    in_rows = [rank for host in sort.hosts for rank in host] == list(sort.whole.ranks)
    hosts = f"local={max(local)}" if len(local) == 1 and in_rows else "hosts"
    found: dict[str, tuple[str, Expr]] = {}
    for step, expr in variants(sort.whole, sort.hosts):
        if sort.splits and any(leaf.relays for leaf in expr.leaves):
            continue
        rule, _, given = step.partition(":")
        found.setdefault(f"{rule}:{hosts}" if ";" in given else step, (step, expr))
    return found


def _chosen(patterns: Sequence[Rewrite]) -> list[Rewrite]:
    """The first few choices of each rule that use one fabric at a time; if none does, the first few choices."""
    by_rule: dict[str, list[Rewrite]] = {}
    seen: set[tuple[Expr, ...]] = set()
    for rewrite in patterns:
        if rewrite.exprs not in seen:
            seen.add(rewrite.exprs)
            by_rule.setdefault(rewrite.steps[0].partition(":")[0], []).append(rewrite)
    found: list[Rewrite] = []
    for each in by_rule.values():
        pure = [rewrite for rewrite in each if all(stage.scope != "mixed" for stage in rewrite.stages)]
        found += (pure or each)[:CHOICES]
    return found[:MAX_PATTERNS]


def _merged(
    each: Sequence[list[MotifStage] | None], cluster: Cluster, scopes: dict[Groups, Scope]
) -> tuple[MotifStage, ...] | None:
    """The stages of all sorts merged; None if they differ in more than their ranks."""
    first = each[0]
    if first is None or len(each) == 1:
        return None if first is None else tuple(first)
    found = []
    for at, stage in enumerate(first):
        alike = [other[at] for other in each if other is not None and len(other) == len(first)]
        forms = {(one.kind, one.after, one.window, one.segment) for one in alike}
        sizes = [one.nbytes for one in alike]
        if len(alike) < len(each) or len(forms) > 1 or max(sizes) > EVEN * min(sizes):
            return None
        groups = tuple(group for one in alike for group in one.groups)
        texts = " || ".join(one.motif for one in alike)
        scope = _scope(groups, cluster, scopes)
        found.append(replace(stage, motif=texts, groups=groups, nbytes=max(sizes), scope=scope))
    return tuple(found)


def _stages(
    expr: Expr, segments: int, sort: _Sort, cluster: Cluster, scopes: dict[Groups, Scope]
) -> list[MotifStage] | None:
    """The stages of one sort; None if shares are so uneven that no cost would be right."""
    if any(_uneven(leaf) for leaf in expr.leaves):
        return None
    place = {rank: at for at, rank in enumerate(sort.whole.ranks)}
    known: dict[Groups, Groups] = {}
    made: list[MotifStage] = []

    def members(leaves: Sequence[Motif]) -> Groups:
        """The ranks of every group at the positions of these leaves' ranks; equal leaves give the same object."""
        ranks = tuple(map(_root_first, leaves))
        if ranks not in known:
            rows = [[place[rank] for rank in row] for row in ranks]
            known[ranks] = tuple(tuple(group[at] for at in row) for group in sort.members for row in rows)
        return known[ranks]

    def add(batch: Sequence[Expr], before: tuple[int, ...], segment: int) -> tuple[int, ...]:
        """Add stages for expressions of one form on different ranks; return the stages that end last."""
        first = batch[0]
        if isinstance(first, Motif):
            leaves = [leaf for leaf in batch if isinstance(leaf, Motif)]
            groups = members(leaves)
            more = f" (and {len(leaves) - 1} like it)" if len(leaves) > 1 else ""
            window = (first.window[0], first.window[1] - first.window[0]) if first.kind == "AA" else None
            made.append(
                MotifStage(
                    motif=f"{first}{more}", kind=first.collective_kind, groups=groups,
                    nbytes=float(max(leaf.nbytes for leaf in leaves)), after=before,
                    window=None if first.kind != "AA" or (first.whole and not sort.splits) else window,
                    scope=_scope(groups, cluster, scopes), segment=segment,
                )
            )  # fmt: skip
            return (len(made) - 1,)
        if isinstance(first, Seq):
            for number in range(len(first.children)):
                before = add([one.children[number] for one in batch], before, segment)
            return before
        ends: tuple[int, ...] = ()
        for side in beside(first):
            ends += add([one.children[at] for one in batch for at in side], before, segment)
        return ends

    for number, child in enumerate(expr.children if segments > 1 else (expr,)):
        add([child], (), number)
    per = len(made) // segments
    if segments > 1 and all(stage.segment == at // per for at, stage in enumerate(made)):
        # Segments differ by at most a few bytes, so all of them get the cost of the largest.
        sizes = [max(stage.nbytes for stage in made[at::per]) for at in range(per)]
        made = [replace(stage, nbytes=sizes[at % per]) for at, stage in enumerate(made)]
    return made


def _scope(groups: Groups, cluster: Cluster, scopes: dict[Groups, Scope]) -> Scope:
    if groups not in scopes:
        scopes[groups] = scope_of(cluster, groups)
    return scopes[groups]


def _uneven(leaf: Motif) -> bool:
    if leaf.kind not in SHARDED or leaf.size < 2 * len(leaf.ranks):
        return False
    return max(map(measure, leaf.shards)) * len(leaf.ranks) > EVEN * leaf.size


def beside(expr: Expr) -> list[list[int]]:
    """The children of a ``||`` divided into sets of equal form whose ranks are all different."""
    sides: list[tuple[object, set[int], list[int]]] = []
    for at, child in enumerate(expr.children):
        form, ranks = _form(child), {rank for leaf in child.leaves for rank in leaf.ranks}
        side = next((side for side in sides if side[0] == form and side[1].isdisjoint(ranks)), None)
        if side is None:
            sides.append((form, ranks, [at]))
        else:
            side[1].update(ranks)
            side[2].append(at)
    return [members for _, _, members in sides]


def _form(expr: Expr) -> object:
    return expr.kind if isinstance(expr, Motif) else (type(expr).__name__, *map(_form, expr.children))


def _root_first(leaf: Motif) -> tuple[int, ...]:
    if leaf.kind not in ROOTED:
        return leaf.ranks
    return (leaf.root, *(rank for rank in leaf.ranks if rank != leaf.root))
