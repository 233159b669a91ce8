# SPDX-License-Identifier: Apache-2.0
"""The options of a comm-op: motif expressions, each leaf bound to channels and to its fastest algorithm there."""

from __future__ import annotations

import time
from bisect import bisect_right, insort
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product

from ...cluster import Cluster
from ...errors import Infeasible, InvalidInput
from ...workload import Op, Workload
from ..costs.channels import Binding, bindings, bindings_for
from ..costs.costs import (
    Bounding,
    Cost,
    CostModel,
    LinkLoads,
    Motion,
    SimulatedCosts,
    launch_us,
    simulated_costs,
    simulator_of,
)
from ..costs.measured import NCCL, LayeredCosts, MeasuredCosts
from ..placement import placement
from ..schedule.problem import MotifTask, Option, PlanProblem
from ..schedule.shared_links import with_shared_links
from .rewrites import Groups, MotifStage, Rewrite, Steps, rewrites

SLOWEST = 20.0
"""An option that takes more than this many times as long as the fastest is left out."""

NCCL_TREES = ("nccl_tree", "nccl_tree:1", "nccl_tree:64")
STOCK_ALGORITHMS = {
    "all_reduce": ("ring", *NCCL_TREES, "double_binary_tree", "double_binary_tree:1"),
    "all_gather": ("ring",),
    "reduce_scatter": ("ring",),
    "broadcast": ("chain:64", "chain", "chain:1"),
    "reduce": ("chain:64", "chain", "chain:1"),
}
"""The library's equivalents of NCCL's algorithms; its rings broadcast as pipelined chains. Others are direct sends."""


def problem(
    workload: Workload, cluster: Cluster, costs: CostModel | None = None, *, until: float | None = None,
    least_s: float = 0.0, latest: float | None = None, progress: Callable[[float], None] | None = None,
) -> PlanProblem:  # fmt: skip
    """The planning problem: the options of every comm-op of a workload that runs on a cluster's devices.

    Args:
        workload: the training step.
        cluster: the cluster; rank r runs on device r.
        costs: the cost model; None simulates.
        until: the moment (`time.monotonic`) after which no further options are costed; comm-ops that take the longest
            come first, and each has at least its default option. None costs all.
        least_s: seconds of this thread's own time that are spent first, also after `until`.
        latest: the moment after which even these are not; None: there is none.
        progress: called with the share of the comm-ops that have their options.

    Returns:
        The problem; equal comm-ops share their options.

    Raises:
        InvalidInput: the workload has more ranks than the cluster has devices.
        Infeasible: no channels carry one of the comm-ops.
    """
    if workload.num_ranks > cluster.num_devices:
        raise InvalidInput(
            f"{workload.name}: {workload.num_ranks} ranks do not fit on {cluster.num_devices} devices; take a larger "
            f"cluster (more nodes or hosts), or a step of fewer ranks (a model with ranks={cluster.num_devices})"
        )
    model = costs if costs is not None else simulated_costs(cluster)
    menu = Menu(cluster, model)
    alike: dict[tuple[object, ...], list[Op]] = {}
    for op in workload.comm_ops:
        alike.setdefault((op.kind, workload.groups_of(op), op.nbytes, op.root, op.at_most), []).append(op)
    twins = _Twins(workload, cluster, model)
    copies = {ops[0].name: twins.first(ops[0]) for ops in alike.values()}
    turns = [ops for ops in alike.values() if copies[ops[0].name] is ops[0]]
    made: dict[str, tuple[Option, ...]] = {}
    if until is not None:
        made = {ops[0].name: (menu.default(ops[0], workload),) for ops in turns}
        count: dict[str, int] = {}
        for ops in alike.values():
            count[copies[ops[0].name].name] = count.get(copies[ops[0].name].name, 0) + len(ops)
        turns.sort(key=lambda ops: -count[ops[0].name] * made[ops[0].name][0].total_us)
    late, own_until = 0, time.thread_time() + least_s

    def is_late() -> bool:
        now = time.monotonic()
        if until is None or now <= until:
            return False
        return time.thread_time() > own_until or (latest is not None and now > latest)

    for number, (first, *_) in enumerate(turns):
        if is_late():
            late += 1
        else:
            made[first.name] = options(first, workload, cluster, model, menu=menu, is_late=is_late)
        if progress is not None:
            progress((number + 1) / len(turns))
    for name, first in copies.items():
        if name not in made:
            made[name] = twins.options(made[first.name], first, workload.op(name))
    found = {op.name: made[ops[0].name] for ops in alike.values() for op in ops}
    how, notes = _sources([made[first.name] for first, *_ in alike.values()], cluster, model)
    if late:
        notes += (f"costs: {late} of {len(turns)} kinds of comm-ops have their default option only, for want of time",)
    if placed := placement(workload.num_ranks, cluster):
        notes += (f"warning: {placed}",)
    found = with_shared_links(workload, found, partial(_loads, costs=simulator_of(model)))
    return PlanProblem(workload=workload, options=found, costs=how, notes=(*cluster.notes, *notes))


class _Twins:
    """Comm-ops whose groups are images of each other, as in stages of a pipeline: one is costed for all."""

    def __init__(self, workload: Workload, cluster: Cluster, model: CostModel) -> None:
        self._workload, self._cluster = workload, cluster
        self._costs = model if isinstance(model, SimulatedCosts) and model.library_only else None
        self._channels = tuple(dict.fromkeys([cluster.channels, *(b.channels for b in bindings(cluster))]))
        self._first: dict[tuple[object, ...], Op] = {}
        self._rewrites: dict[str, list[Rewrite]] = {}

    def first(self, op: Op) -> Op:
        """The first comm-op of which this one is an image."""
        if self._costs is None:
            return op
        # Groups must be images whatever channels a binding takes.
        groups = self._workload.groups_of(op)
        names = tuple(dict.fromkeys(self._costs.renamed(groups, channels).groups for channels in self._channels))
        return self._first.setdefault((op.kind, names, op.nbytes, op.root, op.at_most), op)

    def options(self, made: tuple[Option, ...], first: Op, op: Op) -> tuple[Option, ...]:
        """The options of a comm-op, from those of the one that it is an image of."""
        wanted = {(option.expression, option.rules) for option in made}
        own: dict[tuple[str, Steps], Rewrite] = {}
        if first.name not in self._rewrites:
            self._rewrites[first.name] = list(self._written(first)) if len(wanted) > 1 else [next(self._written(first))]
        # Rewrites take long to write: where time has allowed no more than the default option, it is the first one.
        for theirs, mine in zip(self._rewrites[first.name], self._written(op), strict=False):
            if (theirs.text, theirs.steps) in wanted:
                own[theirs.text, theirs.steps] = mine
            if len(own) == len(wanted):
                break
        known: dict[tuple[int, int], Motion] = {}

        def moved(task: MotifTask, stage: MotifStage) -> MotifTask:
            if task.motion is None:
                return replace(task, motif=stage.motif)
            # Equal motions are one object: they are long, and tables are asked for them all the time.
            key = (id(task.motion), id(stage.groups))
            if key not in known:
                known[key] = replace(task.motion, groups=stage.groups)
            return replace(task, motif=stage.motif, motion=known[key])

        found = []
        for option in made:
            rewrite = own[option.expression, option.rules]
            tasks = tuple(moved(task, stage) for task, stage in zip(option.tasks, rewrite.stages, strict=True))
            found.append(replace(option, expression=rewrite.text, tasks=tasks))
        return tuple(found)

    def _written(self, op: Op) -> Iterator[Rewrite]:
        return rewrites(op, self._workload.groups_of(op), self._cluster)


def _loads(task: MotifTask, costs: SimulatedCosts) -> LinkLoads | None:
    """The load of a task on links; None if its algorithm is known only by measurements."""
    assert task.motion is not None
    try:
        return costs.link_loads(task.motion, task.nbytes, task.algorithm)
    except InvalidInput:
        return None


def options(
    op: Op, workload: Workload, cluster: Cluster, costs: CostModel, *, menu: Menu | None = None,
    is_late: Callable[[], bool] | None = None,
) -> tuple[Option, ...]:  # fmt: skip
    """The options of a comm-op that are worth trying; the first does what a library would do.

    The first option is the whole op as one motif on its usual links. Rewrites: segments, the patterns of every
    registered rule, and segments of those. Bindings: each stage's own scope (inside hosts, between them, both), and
    segments spread over two disjoint sets of channels. An option is left out if another beats it in every task on no
    more channels, or if its channels cannot carry it.

    A message between two ranks (`send`) has its default option alone: the job's own backend carries it, whole and on
    its own network, whatever a plan says (docs/enforcer.md).

    Args:
        op: the comm-op.
        workload: the workload that it belongs to.
        cluster: the cluster.
        costs: the cost model.
        menu: cache of earlier bindings, shared by the ops of a workload; None makes a new one.
        is_late: whether no further rewrites are to be costed; None costs all.

    Returns:
        The options, at least one.

    Raises:
        Infeasible: no channels of the cluster carry the op.
    """
    menu = menu if menu is not None else Menu(cluster, costs)
    if op.kind == "send":
        return (menu.default(op, workload),)
    every = tuple(rewrites(op, workload.groups_of(op), cluster))
    found: list[Option] = []
    for number, rewrite in enumerate(every):
        if number and is_late is not None and is_late():
            every = every[:number]
            break
        found += menu.bound(rewrite)
    if all(option.rules for option in found):
        raise _not_carried(op, cluster)
    default = menu.stock(every[0])
    fastest = min(option.total_us for option in found)
    kept = [made for rewrite in every if (made := menu.like(default.tasks[0], rewrite))]
    kept = [option for option in kept if option.total_us <= SLOWEST * fastest]
    if op.kind == "all_reduce":
        kept += [made for names in (("ring",), NCCL_TREES) if (made := menu.whole(every[0], names))]
    others = _undominated([*kept, *(option for option in found if option.total_us <= SLOWEST * fastest)], keep=kept)
    unique = {option.name: option for option in reversed([default, *others])}
    return tuple(dict.fromkeys([default, *reversed(unique.values())]))


def _not_carried(op: Op, cluster: Cluster) -> Infeasible:
    more, apart = "", not cluster.devices_forward and cluster.unreachable() is not None
    if apart and replace(cluster, devices_forward=True).unreachable() is None:
        more = "; they do if devices pass traffic on (devices_forward=true, as NCCL's PXN over rails)"
    return Infeasible(f"comm-op {op.name}: no channels of {cluster.name} carry it{more}")


def _sources(found: Sequence[Sequence[Option]], cluster: Cluster, costs: CostModel) -> tuple[str, tuple[str, ...]]:
    """A description of where the costs come from, and a warning if measurements were given and none fits."""
    tasks = {
        (task.motion, task.nbytes, task.algorithm): task.source.partition(":")[0]
        for some in found for option in some for task in option.tasks
    }  # fmt: skip
    how = f"{' and '.join(sorted(set(tasks.values())))} on {cluster.name}"
    if not isinstance(costs, MeasuredCosts | LayeredCosts):
        return how, ()
    files = ", ".join(costs.files)
    known = sum(source == "measured" for source in tasks.values())
    how += f"; {known} of {len(tasks)} motifs measured ({files})"
    if known:
        return how, ()
    motions = [option.tasks[0].motion for option, *_ in found]
    needs = sorted({(motion.kind, len(group)) for motion in motions if motion is not None for group in motion.groups})
    wanted = ", ".join(f"{kind} over {ranks} ranks" for kind, ranks in needs)
    return how, (f"warning: no measurement of {files} fits any motif of this step, which needs {wanted}",)


class Menu:
    """Binds rewrites to channels and algorithms, and caches costs."""

    def __init__(self, cluster: Cluster, costs: CostModel) -> None:
        self._cluster, self._costs = cluster, costs
        self._bindings: dict[Groups, tuple[Binding, ...]] = {}
        self._known: dict[Motion, dict[str, list[tuple[float, float]]]] = {}
        """For each motion and algorithm the sizes that were costed, with their times."""
        self._best: dict[tuple[Motion, float], tuple[str, Cost] | None] = {}

    def bound(self, rewrite: Rewrite) -> Iterator[Option]:
        """The rewrite with every choice of bindings, one binding per scope of its stages."""
        scopes = list(dict.fromkeys(stage.scope for stage in rewrite.stages))
        choices = [self._offered([stage for stage in rewrite.stages if stage.scope == scope]) for scope in scopes]
        for chosen in product(*choices):
            by_scope = dict(zip(scopes, chosen, strict=True))
            made = self._option(rewrite, [by_scope[stage.scope] for stage in rewrite.stages])
            if made is not None:
                yield made
        if rewrite.segments > 1 and len(scopes) == 1:
            yield from self._spread(rewrite, choices[0])

    def default(self, op: Op, workload: Workload) -> Option:
        """The default option of a comm-op; raises `Infeasible` if no channels carry it."""
        whole = next(iter(rewrites(op, workload.groups_of(op), self._cluster)))
        if not self._offered(whole.stages):
            raise _not_carried(op, self._cluster)
        return self.stock(whole)

    def stock(self, rewrite: Rewrite) -> Option:
        """The option that a communication library would take for the whole op: the best of its own algorithms."""
        (stage,) = rewrite.stages
        usual = (NCCL, *STOCK_ALGORITHMS.get(stage.kind, ("direct",)))
        found = self.whole(rewrite, usual) or self.whole(rewrite, None)
        if found is None:
            raise Infeasible(f"{stage.kind} on {self._offered(rewrite.stages)[0].name}: no algorithm moves it")
        return found

    def whole(self, rewrite: Rewrite, names: Sequence[str] | None) -> Option | None:
        """The whole op on its usual links by the fastest of these algorithms (None: of all); None if none can run."""
        (stage,) = rewrite.stages
        binding = self._offered(rewrite.stages)[0]
        known = self._costs.algorithms(self._motion(stage, binding), stage.nbytes)
        made = []
        for name in known if names is None else [name for name in names if name in known]:
            try:
                made.append(self._option(rewrite, [binding], name))
            except Infeasible:
                continue
        return min((option for option in made if option is not None), key=lambda one: one.total_us, default=None)

    def like(self, task: MotifTask, rewrite: Rewrite) -> Option | None:
        """A rewrite that only cuts the payload, with the channels and algorithm of the default option; None for other
        rewrites.
        """
        if len(rewrite.steps) != 1 or rewrite.segments == 1:
            return None
        binding = next(b for b in self._offered(rewrite.stages[:1]) if b.channels == task.channels)
        return self._option(rewrite, [binding] * len(rewrite.stages), task.algorithm)

    def _spread(self, rewrite: Rewrite, offered: Sequence[Binding]) -> Iterator[Option]:
        """Options with segments divided between two bindings without a common channel, so that both end at the same
        time.
        """
        alone = {b.channels: self._option(rewrite, [b] * len(rewrite.stages)) for b in offered}
        for first, second in product(offered, offered):
            one, other = alone[first.channels], alone[second.channels]
            if set(first.channels) & set(second.channels) or one is None or other is None:
                continue
            if one.total_us > other.total_us:
                continue
            even = rewrite.segments * one.total_us / (one.total_us + other.total_us)
            shares = [self._shared(rewrite, first, second, share) for share in {int(even), int(even) + 1} - {0}]
            made = [option for option in shares if option is not None]
            if made:
                yield min(made, key=lambda option: option.total_us)

    def _shared(self, rewrite: Rewrite, first: Binding, second: Binding, share: int) -> Option | None:
        """The option with the last `share` segments on the second binding."""
        last = rewrite.segments - share
        return self._option(rewrite, [second if stage.segment >= last else first for stage in rewrite.stages])

    def _offered(self, stages: Sequence[MotifStage]) -> tuple[Binding, ...]:
        """The bindings that serve all of these stages."""
        found: tuple[Binding, ...] | None = None
        for groups in dict.fromkeys(stage.groups for stage in stages):
            if groups not in self._bindings:
                self._bindings[groups] = bindings_for(self._cluster, groups)
            mine = self._bindings[groups]
            found = mine if found is None else tuple(b for b in found if any(b.channels == c.channels for c in mine))
        return found or ()

    @staticmethod
    def _motion(stage: MotifStage, binding: Binding) -> Motion:
        return Motion(kind=stage.kind, groups=stage.groups, channels=binding.channels, window=stage.window)

    def _option(self, rewrite: Rewrite, held: Sequence[Binding], algorithm: str | None = None) -> Option | None:
        tasks = []
        known: dict[tuple[object, ...], tuple[Motion, str, Cost, float]] = {}
        for stage, binding in zip(rewrite.stages, held, strict=True):
            key = (stage.kind, id(stage.groups), stage.nbytes, stage.window, binding.channels)
            if key not in known:
                motion = self._motion(stage, binding)
                if algorithm is None:
                    best = self._fastest(motion, stage.nbytes)
                    if best is None:
                        return None
                    name, cost = best
                else:
                    name, cost = algorithm, self._costs.cost(motion, stage.nbytes, algorithm)
                known[key] = motion, name, cost, launch_us(binding, cost)
            motion, name, cost, launch = known[key]
            tasks.append(
                MotifTask(
                    motif=stage.motif, algorithm=name, channels=binding.channels, duration_us=launch + cost.us,
                    nbytes=stage.nbytes, launch_us=launch, after=stage.after, source=cost.source, motion=motion,
                )
            )  # fmt: skip
        return Option(name=_name(rewrite, tasks), expression=rewrite.text, tasks=tuple(tasks), rules=rewrite.steps)

    def _fastest(self, motion: Motion, nbytes: float) -> tuple[str, Cost] | None:
        """The fastest algorithm at this size; algorithms that cannot be fastest are not costed."""
        key = (motion, nbytes)
        if key not in self._best:
            known = self._known.setdefault(motion, {})
            names = self._costs.algorithms(motion, nbytes)
            least = {name: self._least_us(motion, nbytes, name, known.get(name, [])) for name in names}
            best: tuple[str, Cost] | None = None
            for name in sorted(least, key=lambda name: least[name]):
                if best is not None and least[name] > best[1].us:
                    break
                try:
                    cost = self._costs.cost(motion, nbytes, name)
                except Infeasible:
                    continue
                insort(known.setdefault(name, []), (nbytes, cost.us))
                if best is None or (cost.us, names.index(name)) < (best[1].us, names.index(best[0])):
                    best = name, cost
            self._best[key] = best
        return self._best[key]

    def _least_us(self, motion: Motion, nbytes: float, name: str, known: list[tuple[float, float]]) -> float:
        """A lower bound on an algorithm's time: more bytes take no less time, and k times the bytes at most k times as
        long.
        """
        least = self._costs.at_least_us(motion, nbytes, name) if isinstance(self._costs, Bounding) else 0.0
        at = bisect_right(known, (nbytes, 0.0))
        for size, us in known[max(at - 1, 0) : at + 1]:
            least = max(least, us * min(1.0, nbytes / size))
        return least


def _name(rewrite: Rewrite, tasks: Sequence[MotifTask]) -> str:
    """A name such as ``ring/4 segments on nvlink+rdma`` or ``hierarchical(ring,direct) on nvlink, rdma``."""
    algorithms = ",".join(dict.fromkeys(task.algorithm for task in tasks))
    patterns = [_pattern(step) for step in rewrite.steps if not step.startswith("segment")]
    pattern = patterns[0] if len(patterns) == 1 else "+".join(patterns)
    text = algorithms if pattern in ("", "spline") else f"{pattern}({algorithms})"
    if rewrite.segments > 1:
        text += f"/{rewrite.segments} segments"
    if pattern == "spline":
        text += f"/{next(s for s in rewrite.steps if s.startswith('spline')).partition('=')[2]} ways"
    counts: dict[str, int] = {}
    for task in tasks:
        held = "+".join(task.channels)
        counts[held] = counts.get(held, 0) + 1
    spread = pattern in ("", "spline") and len(counts) > 1
    return f"{text} on " + ", ".join(f"{count} {held}" if spread else held for held, count in counts.items())


def _pattern(step: str) -> str:
    """A step without its parameters, but for those that tell patterns apart: ``tree:4``, ``ring``."""
    name, _, given = step.partition(":")
    return f"tree:{given.partition('=')[2]}" if name == "tree" else name


def _undominated(found: Sequence[Option], keep: Sequence[Option]) -> list[Option]:
    """Options that no other beats in every task (on the same or fewer channels), and those of `keep`."""
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
