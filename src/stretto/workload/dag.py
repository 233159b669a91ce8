# SPDX-License-Identifier: Apache-2.0
"""`Workload`: one training step as a DAG of compute-ops and comm-ops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Literal

from ..errors import InvalidInput, unknown
from ..late import LateFunction
from ..units import counted, format_bytes, format_us
from .ordering import few

MAX_OPS = 200_000
MAX_RANKS = 1 << 20
MAX_LAG = 16
MAX_CELLS = 1 << 25
"""Limit on ops times places, to which the time and memory of every analysis of a workload are proportional."""

COMPUTE = "compute"
COMM_KINDS = (
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "gather", "scatter", "send",
    "collective_permute",
)  # fmt: skip
"""Kinds of a comm-op: the names of collectives, and those of `PAIRWISE`."""
PAIRWISE = ("send", "collective_permute")
"""The kinds that move data from the first to the second rank of each group. In a collective-permute a rank may be the
first of one group and the second of another, as in a ring."""
ROOTED = ("broadcast", "reduce", "gather", "scatter")

Why = Literal["data", "submit", "wait"]
WHYS: tuple[Why, ...] = ("data", "submit", "wait")

LOAD: LateFunction[[str | Path], Workload] = LateFunction("workload.files.load")
SAVE: LateFunction[[Workload, str | Path], None] = LateFunction("workload.files.save")
DIGEST: LateFunction[[Workload], str] = LateFunction("workload.files.digest")


@dataclass(frozen=True, kw_only=True)
class Dep:
    """A dependency: an op must have ended first, the one of the same iteration or of `lag` iterations before.

    `why` is the reason. ``data``: the op reads the other's output. ``submit``: the application submits a comm-op to the
    library only after the other op. ``wait``: the application itself waits there for a comm-op. All three bind; a plan
    is checked against each.
    """

    op: str
    lag: int = 0
    why: Why = "data"


@dataclass(frozen=True, kw_only=True)
class Op:
    """One op of an iteration. The ops of one `stream` of a rank run one after the other, in the order they are listed.

    A compute-op takes `duration_us` on its `ranks` (all when empty), or ``durations_us[i]`` on ``ranks[i]``. A comm-op
    moves `nbytes` (as a `Collective` counts them: the larger of one rank's send and receive buffer) in each of its
    disjoint `groups` at once (one group of all ranks when empty); `root` is a position in the group.

    With `at_most` the size depends on the data: `nbytes` is the largest size seen, and a larger size is no mismatch. An
    all-to-all with splits may have another size on each rank; `rank_nbytes` then holds the largest size of each rank,
    in the order of the groups. Where a trace has these figures, `duration_us` of a comm-op is its measured transfer
    time and `wait_us` the time that it waited for other ranks before.
    """

    name: str
    kind: str = COMPUTE
    after: tuple[Dep, ...] = ()
    stream: str = COMPUTE
    phase: str = ""
    ranks: tuple[int, ...] = ()
    duration_us: float = 0.0
    durations_us: tuple[float, ...] = ()
    nbytes: float = 0.0
    groups: tuple[tuple[int, ...], ...] = ()
    root: int = 0
    encoding: str = ""
    at_most: bool = False
    rank_nbytes: tuple[float, ...] = ()
    wait_us: float = 0.0

    @property
    def is_comm(self) -> bool:
        """Whether the op moves data between ranks."""
        return self.kind != COMPUTE


@dataclass(frozen=True, kw_only=True)
class Place:
    """A class of ranks that take part in the same ops for the same time; in a schedule one rank stands for all."""

    ranks: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One training step, repeated: `ops` in the order in which the application submits them.

    >>> step = Workload(name="toy", num_ranks=4, ops=(
    ...     Op(name="backward", duration_us=100.0, after=(Dep(op="update", lag=1),)),
    ...     Op(name="gradients", kind="all_reduce", nbytes=1e6, after=(Dep(op="backward"),)),
    ...     Op(name="update", duration_us=5.0, after=(Dep(op="gradients"),)),
    ... ))
    >>> step
    <Workload toy: 3 ops (1 of communication) over 4 ranks, 105 us of compute, 1 MB moved>
    """

    name: str
    num_ranks: int
    ops: tuple[Op, ...]
    samples: float = 0.0
    """Samples (or words, or images) of one iteration over all ranks; 0 when not known."""
    unit: str = "samples"
    notes: tuple[str, ...] = field(default=())
    """Sentences about the workload's origin and the assumptions made."""

    def __post_init__(self) -> None:
        _validate(self)

    @classmethod
    def load(cls, source: str | Path) -> Workload:
        """A workload from ``model:variant`` (see ``stretto workload list``) or from a file in one of the forms that are
        read.
        """
        return LOAD(source)

    def save(self, path: str | Path) -> None:
        """Write the versioned file form: JSON if the name ends in ``.json``, else YAML."""
        SAVE(self, path)

    @cached_property
    def digest(self) -> str:
        """A short hash of the ranks and ops, which are all that a plan depends on."""
        return DIGEST(self)

    @cached_property
    def index(self) -> dict[str, int]:
        """The position of each op by its name."""
        return {op.name: at for at, op in enumerate(self.ops)}

    def op(self, name: str) -> Op:
        """The op with this name."""
        if name not in self.index:
            raise unknown("op", name, self.index)
        return self.ops[self.index[name]]

    @cached_property
    def comm_ops(self) -> tuple[Op, ...]:
        """The ops that move data."""
        return tuple(op for op in self.ops if op.is_comm)

    @cached_property
    def compute_us(self) -> float:
        """Microseconds of compute on the busiest stream of the busiest place in one iteration; no plan is faster."""
        totals: dict[tuple[int, str], float] = {}
        for op, places, each_us in zip(self.ops, self.op_places, self.op_durations_us, strict=True):
            for place, us in zip(places, each_us, strict=False):
                totals[place, op.stream] = totals.get((place, op.stream), 0.0) + us
        return max(totals.values(), default=0.0)

    def ranks_of(self, op: Op) -> frozenset[int]:
        """Every rank that takes part in an op."""
        if op.is_comm and op.groups:
            return frozenset(rank for group in op.groups for rank in group)
        return frozenset(op.ranks) if op.ranks and not op.is_comm else frozenset(range(self.num_ranks))

    def groups_of(self, op: Op) -> tuple[tuple[int, ...], ...]:
        """The groups of a comm-op; an op without groups has one group of all ranks."""
        return op.groups or (tuple(range(self.num_ranks)),)

    @cached_property
    def places(self) -> tuple[Place, ...]:
        """The classes of ranks that no op distinguishes; a send distinguishes its sources from its destinations."""
        marks: list[list[tuple[int, float]]] = [[] for _ in range(self.num_ranks)]
        seen: set[tuple[object, ...]] = set()
        for at, op in enumerate(self.ops):
            # Micro-batches and layers repeat groups and ranks, mostly as the same objects: the first of each counts.
            key = (op.kind in PAIRWISE, id(_named(op)), id(op.durations_us))
            if key in seen or not (_named(op) or op.durations_us):
                continue
            seen.add(key)
            if op.kind in PAIRWISE:
                for source, target in op.groups:
                    marks[source].append((at, 0.0))
                    marks[target].append((at, 1.0))
                continue
            ranks = self.ranks_of(op)
            if len(ranks) == self.num_ranks and not op.durations_us:
                continue
            timed = op.ranks or range(self.num_ranks)
            times = dict(zip(timed, op.durations_us, strict=True)) if op.durations_us else {}
            for rank in ranks:
                marks[rank].append((at, times.get(rank, 0.0)))
        classes: dict[tuple[tuple[int, float], ...], list[int]] = {}
        for rank, mark in enumerate(marks):
            classes.setdefault(tuple(mark), []).append(rank)
        return tuple(Place(ranks=tuple(ranks)) for ranks in classes.values())

    @cached_property
    def op_places(self) -> tuple[tuple[int, ...], ...]:
        """For each op, the places (by their position in `places`) that take part in it."""
        place_of = {rank: at for at, place in enumerate(self.places) for rank in place.ranks}
        known: dict[int, tuple[int, ...]] = {}
        alike: dict[tuple[object, ...], tuple[int, ...]] = {(): tuple(range(len(self.places)))}
        for op in self.ops:
            named = _named(op)
            if id(named) not in known:
                if named not in alike:
                    alike[named] = tuple(sorted({place_of[rank] for rank in self.ranks_of(op)}))
                known[id(named)] = alike[named]
        return tuple(known[id(_named(op))] for op in self.ops)

    @cached_property
    def op_durations_us(self) -> tuple[tuple[float, ...], ...]:
        """For each compute-op, its microseconds at each of its `op_places`; an empty tuple for a comm-op."""
        found: list[tuple[float, ...]] = []
        for op, places in zip(self.ops, self.op_places, strict=True):
            if op.durations_us:
                times = dict(zip(op.ranks or range(self.num_ranks), op.durations_us, strict=True))
                found.append(tuple(times[self.places[place].ranks[0]] for place in places))
            else:
                found.append(() if op.is_comm else (op.duration_us,) * len(places))
        return tuple(found)

    def takes_part(self, op: Op, place: Place) -> bool:
        """Whether the ranks of a place take part in an op."""
        return place.ranks[0] in self.ranks_of(op)

    def __repr__(self) -> str:
        moved = sum(op.nbytes for op in self.comm_ops)
        return (
            f"<Workload {self.name}: {len(self.ops)} ops ({len(self.comm_ops)} of communication) over "
            f"{counted(self.num_ranks, 'rank')}, {format_us(self.compute_us)} of compute, "
            f"{format_bytes(moved)} moved>"
        )


def _named(op: Op) -> tuple[object, ...]:
    """The ranks or groups that an op names; an empty tuple means all ranks."""
    return op.groups if op.is_comm else op.ranks


def _validate(workload: Workload) -> None:
    if not 1 <= workload.num_ranks <= MAX_RANKS:
        raise InvalidInput(f"num_ranks: must be 1..{MAX_RANKS}, not {workload.num_ranks}")
    if not 1 <= len(workload.ops) <= MAX_OPS:
        raise InvalidInput(f"ops: must be 1..{MAX_OPS}, not {len(workload.ops)}")
    if not 0 <= workload.samples < 1e18:
        raise InvalidInput(f"samples: must be a number >= 0, not {workload.samples!r}")
    seen: set[str] = set()
    checked: set[tuple[str, int]] = set()
    for at, op in enumerate(workload.ops):
        if not op.name:
            raise InvalidInput(f"ops[{at}].name: must not be empty")
        if op.name in seen:
            raise InvalidInput(f"ops[{at}].name: {op.name!r} is there twice")
        seen.add(op.name)
        _check_op(op, workload.num_ranks, f"ops[{at}] ({op.name})", checked)
    for at, op in enumerate(workload.ops):
        for number, dep in enumerate(op.after):
            where = f"ops[{at}] ({op.name}).after[{number}]"
            if dep.op not in seen:
                raise InvalidInput(f"{where}.op: there is no op {dep.op!r}")
            if not 0 <= dep.lag <= MAX_LAG:
                raise InvalidInput(f"{where}.lag: must be 0..{MAX_LAG} iterations, not {dep.lag}")
            if dep.why not in WHYS:
                raise InvalidInput(f"{where}.why: {unknown('reason', dep.why, WHYS)}")
    _check_order(workload)


def _check_op(op: Op, num_ranks: int, where: str, checked: set[tuple[str, int]]) -> None:
    """Check an op by itself; ranks and groups that are in `checked`, by kind and identity, are known to be right."""
    if op.kind != COMPUTE and op.kind not in COMM_KINDS:
        raise InvalidInput(f"{where}.kind: {unknown('kind', op.kind, (COMPUTE, *COMM_KINDS))}")
    for key in ("duration_us", "nbytes", "wait_us"):
        value = getattr(op, key)
        if not 0 <= value < 1e18:
            raise InvalidInput(f"{where}.{key}: must be a number >= 0, not {value!r}")
    if (COMPUTE, id(op.ranks)) not in checked:
        _check_ranks(op.ranks, num_ranks, f"{where}.ranks")
        checked.add((COMPUTE, id(op.ranks)))
    if not op.is_comm:
        if op.nbytes or op.groups or op.rank_nbytes:
            raise InvalidInput(f"{where}: a compute-op has no nbytes and no groups")
        if op.durations_us and len(op.durations_us) != (len(op.ranks) or num_ranks):
            raise InvalidInput(f"{where}.durations_us: {len(op.durations_us)} for {len(op.ranks) or num_ranks} ranks")
        if any(not 0 <= value < 1e18 for value in op.durations_us):
            raise InvalidInput(f"{where}.durations_us: must be numbers >= 0")
        return
    if op.ranks or op.durations_us:
        raise InvalidInput(f"{where}: a comm-op names its groups, not ranks and durations_us")
    if not op.nbytes > 0:
        raise InvalidInput(f"{where}.nbytes: must be > 0 for a comm-op, not {op.nbytes:g}")
    _check_sizes(op, num_ranks, where)
    if (op.kind, id(op.groups)) not in checked:
        _check_groups(op, num_ranks, where)
        checked.add((op.kind, id(op.groups)))
    if op.kind in ROOTED:
        size = min((len(group) for group in op.groups), default=num_ranks)
        if not 0 <= op.root < size:
            raise InvalidInput(f"{where}.root: must be a position 0..{size - 1} in the group, not {op.root}")
    if not op.groups and (num_ranks < 2 or op.kind in PAIRWISE):
        what = f"a {op.kind}" if op.kind in PAIRWISE else "a comm-op of one rank"
        raise InvalidInput(f"{where}.groups: {what} needs groups")


def _check_groups(op: Op, num_ranks: int, where: str) -> None:
    taken: set[int] = set()
    ends: tuple[set[int], set[int]] = (set(), set())
    for number, group in enumerate(op.groups):
        _check_ranks(group, num_ranks, f"{where}.groups[{number}]")
        if len(group) < 2 or (op.kind in PAIRWISE and len(group) != 2):
            wanted = "exactly 2" if op.kind in PAIRWISE else "at least 2"
            raise InvalidInput(f"{where}.groups[{number}]: {wanted} ranks, not {len(group)}")
        if op.kind == "collective_permute":
            for rank, seen, what in zip(group, ends, ("sends", "receives"), strict=True):
                if rank in seen:
                    raise InvalidInput(f"{where}.groups[{number}]: rank {rank} {what} twice")
                seen.add(rank)
            continue
        if not taken.isdisjoint(group):
            raise InvalidInput(f"{where}.groups[{number}]: rank {min(taken & set(group))} is in two groups")
        taken.update(group)


def _check_sizes(op: Op, num_ranks: int, where: str) -> None:
    if not op.rank_nbytes:
        return
    members = sum(len(group) for group in op.groups) or num_ranks
    if len(op.rank_nbytes) != members or op.kind != "all_to_all" or not op.at_most:
        raise InvalidInput(
            f"{where}.rank_nbytes: one size for each of the {members} ranks of an all_to_all that is at_most"
        )
    if any(not 0 <= value <= op.nbytes for value in op.rank_nbytes):
        raise InvalidInput(f"{where}.rank_nbytes: must be numbers of 0..nbytes ({op.nbytes:g})")


def _check_ranks(ranks: Sequence[int], num_ranks: int, where: str) -> None:
    bad = next((rank for rank in ranks if not 0 <= rank < num_ranks), None)
    if bad is not None:
        raise InvalidInput(f"{where}: rank {bad} does not exist; there are {num_ranks}")
    if len(set(ranks)) != len(ranks):
        raise InvalidInput(f"{where}: a rank is there twice")


def _check_order(workload: Workload) -> None:
    """Raise `InvalidInput` if ops of one iteration wait for each other in a circle, the order of streams included."""
    needs: dict[str, set[str]] = {}
    last: dict[tuple[str, int], str] = {}
    if len(workload.places) * len(workload.ops) > MAX_CELLS:
        raise InvalidInput(
            f"ops: {len(workload.ops)} ops on {len(workload.places)} kinds of ranks are over {MAX_CELLS} together"
        )
    for op, places in zip(workload.ops, workload.op_places, strict=True):
        needs[op.name] = {dep.op for dep in op.after if dep.lag == 0}
        if not op.is_comm:
            for place in places:
                before = last.get((op.stream, place))
                if before is not None:
                    needs[op.name].add(before)
                last[op.stream, place] = op.name
    try:
        TopologicalSorter(needs).prepare()
    except CycleError as error:
        circle = " -> ".join(few(list(reversed(error.args[1]))))
        raise InvalidInput(f"ops: they wait for each other in a circle: {circle}") from None
