"""The ways to execute a comm-op: motif expressions, each leaf bound to channels and to its fastest algorithm there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product

from ..cluster import Cluster
from ..errors import Infeasible, InvalidInput
from ..workload import Op, Workload
from .channels import Binding, Scope, bindings_for, hosts_of, scope_of
from .costs import Cost, CostModel, Motion, launch_us, simulated_costs
from .motif import ROOTED, Expr, Motif, Seq, motif_of
from .problem import Option, Problem, Task
from .rules import parse_step

SEGMENTS = (2, 4, 8, 16)
WAYS = (2, 4, 8)
BRANCHES = (2, 4)
MAX_TASKS = 64
SLOWEST = 20.0
"""An option that takes this many times as long as the fastest is left out: nothing hides it."""

STOCK_ALGORITHMS = {"all_to_all": "direct"}
"""What libraries run though it may not be the fastest: an all-to-all is a group of sends to everybody at once."""

Groups = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Leaves of an expression that run at the same time on different ranks: one task. `after` are earlier stages."""

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
    """A comm-op as an expression over its first group: the steps that led there, and its stages over all groups."""

    steps: tuple[str, ...]
    expr: Expr
    stages: tuple[Stage, ...]
    segments: int = 1
    ways: int = 1

    @cached_property
    def text(self) -> str:
        """The expression in the paper's notation."""
        return str(self.expr)


def problem(workload: Workload, cluster: Cluster, costs: CostModel | None = None) -> Problem:
    """What there is to decide: the options of every comm-op of a workload that runs on a cluster's devices."""
    if workload.num_ranks > cluster.num_devices:
        raise InvalidInput(f"{workload.name}: {workload.num_ranks} ranks do not fit on {cluster.num_devices} devices")
    model = costs if costs is not None else simulated_costs(cluster)
    made: dict[tuple[object, ...], tuple[Option, ...]] = {}
    found = {}
    for op in workload.comm_ops:
        key = (op.kind, workload.groups_of(op), op.nbytes, op.root)
        if key not in made:
            made[key] = options(op, workload, cluster, model)
        found[op.name] = made[key]
    sources = {task.source.partition(":")[0] for some in found.values() for option in some for task in option.tasks}
    how = f"{' and '.join(sorted(sources))} on {cluster.name}"
    return Problem(workload=workload, options=found, costs=how, notes=cluster.notes)


def options(op: Op, workload: Workload, cluster: Cluster, costs: CostModel) -> tuple[Option, ...]:
    """Every way worth trying; the first is what a library would do: the whole op in one motif, as fast as it goes.

    Rewrites: segments, ring, tree, hierarchical and splined patterns, and segments of those. Bindings: each part's own
    scope (inside hosts, between them, both), and segments spread over two disjoint sets of channels. An option that
    another one beats in every task, on no more channels, is left out; so is what the channels cannot carry.
    """
    menu = _Menu(cluster, costs)
    groups = workload.groups_of(op)
    rewrites = tuple(_rewrites(op, groups, cluster))
    found: list[Option] = []
    for rewrite in rewrites:
        found += menu.bound(rewrite)
    whole = [option for option in found if not option.rules]
    if not whole:
        raise Infeasible(f"comm-op {op.name}: no channels of {cluster.name} carry it")
    default = menu.stock(rewrites[0], whole)
    pieces = [made for rewrite in rewrites if (made := menu.like(default.tasks[0], rewrite))]
    fastest = min(option.total_us for option in found)
    others = _undominated([option for option in [*pieces, *found] if option.total_us <= SLOWEST * fastest], keep=pieces)
    unique = {option.name: option for option in reversed([default, *others])}
    return tuple(dict.fromkeys([default, *reversed(unique.values())]))


def _rewrites(op: Op, groups: Groups, cluster: Cluster) -> Iterator[Rewrite]:
    whole = motif_of(op.kind, groups[0], op.nbytes, op.root)
    seen: set[Expr] = set()
    for steps in _steps(whole, groups, cluster):
        expr: Expr = whole
        try:
            for step in steps:
                expr = parse_step(step)(expr)
        except InvalidInput:
            continue
        if expr in seen:
            continue
        seen.add(expr)
        number = {step.partition(":")[0]: int(step.rpartition("=")[2]) for step in steps if "=" in step}
        segments = number.get("segment", 1)
        stages = tuple(_stages(expr.children if segments > 1 else (expr,), groups, cluster))
        if len(stages) <= MAX_TASKS:
            yield Rewrite(steps=steps, expr=expr, stages=stages, segments=segments, ways=number.get("spline", 1))


def _steps(whole: Motif, groups: Groups, cluster: Cluster) -> Iterator[tuple[str, ...]]:
    """Sequences of rules to apply, each as `parse_step` reads it."""
    patterns: list[str] = []
    count = len(whole.ranks)
    if all(len(group) == count for group in groups):
        local = _local(cluster, groups)
        if whole.kind in ("AR", "AG", "RS", "AA", "BC", "RE") and local:
            patterns.append(f"hierarchical:local={local}")
        if whole.kind == "AR":
            patterns.append("ring")
        if whole.kind in ("AR", "BC", "RE"):
            # A reduce or broadcast through hosts is what hierarchical makes of it.
            sizes = [n for n in BRANCHES if n < count] if not local else [local] * (whole.kind == "AR")
            patterns += [f"tree:n={n}" for n in sizes]
        if whole.kind == "AA":
            patterns += [f"spline:parts={ways}" for ways in WAYS if ways <= count]
    cuts = [f"segment:parts={parts}" for parts in SEGMENTS if parts <= whole.size]
    yield ()
    yield from ((step,) for step in [*cuts, *patterns])
    yield from ((cut, pattern) for cut in cuts for pattern in patterns)


def _local(cluster: Cluster, groups: Groups) -> int:
    """How many neighbouring ranks of each group share a host, where that is the same everywhere; else 0."""
    found = set()
    for group in groups:
        host = hosts_of(cluster, group).tolist()
        local = host.count(host[0])
        rows = [host[at : at + local] for at in range(0, len(host), local)]
        if len(rows) < 2 or len(rows) != len(set(host)) or any(len(set(row)) > 1 or len(row) != local for row in rows):
            return 0
        found.add(local)
    return found.pop() if len(found) == 1 and max(found) > 1 else 0


def _stages(segments: Sequence[Expr], groups: Groups, cluster: Cluster) -> list[Stage]:
    place = {rank: at for at, rank in enumerate(groups[0])}
    made: list[Stage] = []
    scopes: dict[Groups, Scope] = {}

    def add(batch: Sequence[Expr], before: tuple[int, ...], segment: int) -> tuple[int, ...]:
        """Expressions of one form on different ranks, one beside the other; returns the stages that end last."""
        first = batch[0]
        if isinstance(first, Motif):
            leaves = [leaf for leaf in batch if isinstance(leaf, Motif)]
            members = tuple(
                tuple(group[place[rank]] for rank in _root_first(leaf)) for group in groups for leaf in leaves
            )
            if members not in scopes:
                scopes[members] = scope_of(cluster, members)
            more = f" (and {len(leaves) - 1} like it)" if len(leaves) > 1 else ""
            window = (first.window[0], first.window[1] - first.window[0]) if first.kind == "AA" else None
            made.append(
                Stage(
                    motif=f"{first}{more}", kind=first.collective_kind, groups=members,
                    nbytes=float(max(leaf.nbytes for leaf in leaves)), after=before,
                    window=None if first.kind != "AA" or first.whole else window, scope=scopes[members],
                    segment=segment,
                )
            )  # fmt: skip
            return (len(made) - 1,)
        if isinstance(first, Seq):
            for number in range(len(first.children)):
                before = add([one.children[number] for one in batch], before, segment)
            return before
        ends: tuple[int, ...] = ()
        for side in _beside(first):
            ends += add([one.children[at] for one in batch for at in side], before, segment)
        return ends

    for number, expr in enumerate(segments):
        add([expr], (), number)
    return made


def _beside(expr: Expr) -> list[list[int]]:
    """The children of a ``||`` in sets of one form whose ranks are all different."""
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


class _Menu:
    """Binds rewrites to channels and algorithms, and remembers what was asked before."""

    def __init__(self, cluster: Cluster, costs: CostModel) -> None:
        self._cluster, self._costs = cluster, costs
        self._bindings: dict[Groups, tuple[Binding, ...]] = {}
        self._known: dict[Motion, dict[float, dict[str, Cost]]] = {}

    def bound(self, rewrite: Rewrite) -> Iterator[Option]:
        """The rewrite on every choice of bindings, one per scope of its stages."""
        scopes = list(dict.fromkeys(stage.scope for stage in rewrite.stages))
        choices = [self._offered([stage for stage in rewrite.stages if stage.scope == scope]) for scope in scopes]
        for chosen in product(*choices):
            by_scope = dict(zip(scopes, chosen, strict=True))
            made = self._option(rewrite, [by_scope[stage.scope] for stage in rewrite.stages])
            if made is not None:
                yield made
        if rewrite.segments > 1 and len(scopes) == 1:
            yield from self._spread(rewrite, choices[0])

    def stock(self, rewrite: Rewrite, whole: Sequence[Option]) -> Option:
        """What a communication library does with the whole op by itself."""
        fastest = min(whole, key=lambda option: option.total_us)
        name = STOCK_ALGORITHMS.get(rewrite.stages[0].kind)
        if name is None or fastest.tasks[0].algorithm == name:
            return fastest
        binding = next(b for b in self._offered(rewrite.stages) if b.channels == fastest.tasks[0].channels)
        try:
            return self._option(rewrite, [binding], name) or fastest
        except Infeasible:
            return fastest

    def like(self, task: Task, rewrite: Rewrite) -> Option | None:
        """A rewrite that only cuts the payload, moved just as the default option moves the whole."""
        if len(rewrite.steps) != 1 or rewrite.segments == 1:
            return None
        binding = next(b for b in self._offered(rewrite.stages[:1]) if b.channels == task.channels)
        return self._option(rewrite, [binding] * len(rewrite.stages), task.algorithm)

    def _spread(self, rewrite: Rewrite, offered: Sequence[Binding]) -> Iterator[Option]:
        """Segments shared out between two bindings that have no channel in common, so that both end together."""
        for first in offered:
            for second in offered:
                if set(first.channels) & set(second.channels):
                    continue
                one, other = (self._option(rewrite, [b] * len(rewrite.stages)) for b in (first, second))
                if one is None or other is None or one.total_us > other.total_us:
                    continue
                even = rewrite.segments * one.total_us / (one.total_us + other.total_us)
                shares = [self._shared(rewrite, first, second, share) for share in {int(even), int(even) + 1} - {0}]
                made = [option for option in shares if option is not None]
                if made:
                    yield min(made, key=lambda option: option.total_us)

    def _shared(self, rewrite: Rewrite, first: Binding, second: Binding, share: int) -> Option | None:
        """The last `share` segments on the second binding."""
        last = rewrite.segments - share
        return self._option(rewrite, [second if stage.segment >= last else first for stage in rewrite.stages])

    def _offered(self, stages: Sequence[Stage]) -> tuple[Binding, ...]:
        """The bindings that serve each of some stages."""
        found: tuple[Binding, ...] | None = None
        for groups in dict.fromkeys(stage.groups for stage in stages):
            if groups not in self._bindings:
                self._bindings[groups] = bindings_for(self._cluster, groups)
            mine = self._bindings[groups]
            found = mine if found is None else tuple(b for b in found if any(b.channels == c.channels for c in mine))
        return found or ()

    def _option(self, rewrite: Rewrite, held: Sequence[Binding], algorithm: str | None = None) -> Option | None:
        tasks = []
        for stage, binding in zip(rewrite.stages, held, strict=True):
            motion = Motion(kind=stage.kind, groups=stage.groups, channels=binding.channels, window=stage.window)
            if algorithm is None:
                best = self._fastest(motion, stage.nbytes)
                if best is None:
                    return None
                name, cost = best
            else:
                name, cost = algorithm, self._costs.cost(motion, stage.nbytes, algorithm)
            launch = launch_us(binding)
            tasks.append(
                Task(
                    motif=stage.motif, algorithm=name, channels=binding.channels, duration_us=launch + cost.us,
                    nbytes=stage.nbytes, launch_us=launch, after=stage.after, source=cost.source, motion=motion,
                )
            )  # fmt: skip
        return Option(name=_name(rewrite, tasks), expression=rewrite.text, tasks=tuple(tasks), rules=rewrite.steps)

    def _fastest(self, motion: Motion, nbytes: float) -> tuple[str, Cost] | None:
        """The algorithm that is fastest at this size; those that cannot be are not costed."""
        known = self._known.setdefault(motion, {})
        if nbytes not in known:
            known[nbytes] = {}
            for name in self._costs.algorithms(motion, nbytes):
                if not self._hopeless(known, nbytes, name):
                    try:
                        known[nbytes][name] = self._costs.cost(motion, nbytes, name)
                    except Infeasible:
                        continue
        costed = known[nbytes]
        return min(costed.items(), key=lambda pair: pair[1].us, default=None)

    @staticmethod
    def _hopeless(known: dict[float, dict[str, Cost]], nbytes: float, name: str) -> bool:
        """Whether it lost at another size by more than the two sizes differ.

        k times the size takes at least as long and at most k times as long, so the order cannot have turned round.
        """
        for size, costed in known.items():
            if name in costed and costed[name].us > max(size / nbytes, nbytes / size) * min(
                cost.us for cost in costed.values()
            ):
                return True
        return False


def _name(rewrite: Rewrite, tasks: Sequence[Task]) -> str:
    """Such as ``ring/4 segments on nvlink+rdma`` or ``hierarchical(ring,direct) on nvlink, rdma``."""
    algorithms = ",".join(dict.fromkeys(task.algorithm for task in tasks))
    pattern = next((step.partition(":")[0] for step in rewrite.steps if not step.startswith("segment")), "")
    if pattern == "tree":
        pattern = f"tree:{next(s for s in rewrite.steps if s.startswith('tree')).partition('=')[2]}"
    text = algorithms if pattern in ("", "spline") else f"{pattern}({algorithms})"
    if rewrite.segments > 1:
        text += f"/{rewrite.segments} segments"
    if rewrite.ways > 1:
        text += f"/{rewrite.ways} ways"
    counts: dict[str, int] = {}
    for task in tasks:
        held = "+".join(task.channels)
        counts[held] = counts.get(held, 0) + 1
    spread = pattern in ("", "spline") and len(counts) > 1
    return f"{text} on " + ", ".join(f"{count} {held}" if spread else held for held, count in counts.items())


def _undominated(found: Sequence[Option], keep: Sequence[Option]) -> list[Option]:
    """Options that no other beats in every task (on the same or fewer channels), and those to be kept anyway."""
    by_shape: dict[tuple[tuple[int, ...], ...], list[Option]] = {}
    for option in found:
        by_shape.setdefault(tuple(task.after for task in option.tasks), []).append(option)
    kept = {id(option) for option in keep}
    for alike in by_shape.values():
        alike.sort(key=lambda option: option.total_us)
        best: list[Option] = []
        for option in alike:
            if not any(_beats(other, option) for other in best):
                best.append(option)
        kept |= {id(option) for option in best}
    return [option for option in found if id(option) in kept]


def _beats(a: Option, b: Option) -> bool:
    return all(
        set(x.channels) <= set(y.channels) and x.duration_us <= y.duration_us
        for x, y in zip(a.tasks, b.tasks, strict=True)
    )
