# SPDX-License-Identifier: Apache-2.0
"""A plan as one rank carries it out: which motif of which comm-op it takes part in, with whom, and in which order.

A plan's expression is written for the first group of each sort; here every group gets its own motifs back. All ranks
read the same plan, so all give the same communicators to the same ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ...errors import Infeasible, InvalidInput, PlanMismatch, VerificationError
from ...planner.algebra.motif import ROOTED, Expr, Motif, Seq, motif_of
from ...planner.algebra.notation import parse
from ...planner.algebra.rewrites import beside
from ...planner.plan import MotifPlan, OpPlan, Plan, ProgramPlan
from ...planner.schedule.schedule import check_sequence
from ...programs import Program
from ...programs.formats.text import loads
from ...workload import Op, Workload

SERIAL = "serial"
"""A channel that every motif of a serial plan holds."""

BRIEF_US = 500.0
OUTWARD, INWARD = ">", "<"
"""The two directions of a channel at one rank."""


@dataclass(frozen=True, kw_only=True)
class LinkTurnOf:
    """What a motif waits for at this rank before its turn on a link: a motif of other ranks of the host."""

    op: int
    motif: int
    lag: int
    peers: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class RankMotif:
    """One motif of a comm-op on one rank: its leaf of the expression, and who runs it how.

    `lane` numbers what must run in one order on all its ranks: a motif's channels and its ranks. Overlapping lanes have
    different numbers, so that each can be a communicator of its own.
    """

    number: int
    leaf: Motif
    algorithm: str
    channels: tuple[str, ...]
    lane: int
    after: tuple[int, ...]
    """Motifs of the op that must have ended here, as far as this rank takes part in them."""
    program: Program | None = None
    """What the plan brings along where the algorithm is not the library's; over positions in the leaf's ranks."""
    brief: bool
    """Whether the motif ends so soon that the next one need not wait: a channel would lie idle between the two."""
    lines: tuple[str, ...] = ()
    """The lines in which it stands: its channels, or single directions of them where messages stand there, too."""
    link_turns: tuple[LinkTurnOf, ...] = ()
    tells: tuple[int, ...] = ()
    """Other ranks of this host that have their turn on a link when it has ended here."""

    def __post_init__(self) -> None:
        if not self.lines:
            object.__setattr__(self, "lines", self.channels)


@dataclass(frozen=True, kw_only=True)
class RankOp:
    """One comm-op on one rank. `whole` is the op's own motif, over the group that this rank is in."""

    number: int
    op: Op
    whole: Motif
    motifs: tuple[RankMotif, ...]
    option: str


@dataclass(frozen=True, kw_only=True)
class Turn:
    """When a motif runs: in every iteration in the order of the list, for the op of `ahead` iterations later."""

    op: int
    motif: int
    ahead: int


@dataclass(frozen=True, kw_only=True)
class RankPlan:
    """One rank's share of a plan."""

    ops: Mapping[int, RankOp]
    """By their position in the workload."""
    turns: tuple[Turn, ...]
    num_lanes: int
    messages: Mapping[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)
    """The messages of this rank by source and destination, in the application's order; in `ops` are those in line."""

    @property
    def tells(self) -> frozenset[int]:
        """The ranks of this host that wait for turns on links behind motifs of this rank."""
        return frozenset(peer for one in self.ops.values() for motif in one.motifs for peer in motif.tells)

    @property
    def takes_turns(self) -> bool:
        """Whether motifs of this rank wait for turns on links, or others for them."""
        return any(motif.link_turns or motif.tells for one in self.ops.values() for motif in one.motifs)

    @property
    def most_ahead(self) -> int:
        """How many iterations before its own a motif runs, at most."""
        return max((turn.ahead for turn in self.turns), default=0)

    @property
    def most_behind(self) -> int:
        """How many iterations after its own a motif runs, at most."""
        return max((-turn.ahead for turn in self.turns), default=0)


def share_of(
    plan: Plan, workload: Workload, rank: int, hosts: Sequence[str], *, messages: bool = False, link_turns: bool = False
) -> RankPlan:
    """What a rank does in a plan.

    Args:
        plan: The plan.
        workload: The step that it is for.
        rank: The rank.
        hosts: Every rank's host: groups that lie on hosts in the same way share an expression.
        messages: Whether messages between two ranks stand in line, too.
        link_turns: Whether motifs of different groups take turns on links, where the plan has such turns.

    Returns:
        The rank's share.

    Raises:
        PlanMismatch: The plan does not fit the workload.
    """
    plan.check(workload)
    names = {op.op for op in plan.ops}
    missing = next((op.name for op in workload.comm_ops if op.name not in names), None)
    extra = next((name for name in sorted(names) if name not in workload.index), None)
    if missing or extra:
        what = f"has nothing for comm-op {missing}" if missing else f"names {extra}, which is not in the workload"
        raise PlanMismatch(f"plan {plan.name} {what}")
    order = sorted(
        (motif.seq, workload.index[op.op], at, motif.ahead) for op in plan.ops for at, motif in enumerate(op.motifs)
    )
    try:
        check_sequence(workload, [(op, at) for _, op, at, _ in order], [ahead for *_, ahead in order])
    except Infeasible as error:
        raise PlanMismatch(f"plan {plan.name}: {error}") from None
    ops: dict[int, RankOp] = {}
    sent: dict[tuple[int, int], list[int]] = {}
    lanes = _Lanes()
    programs = _Programs(plan)
    taking_part: dict[tuple[int, int], set[int]] = {}
    for made in plan.ops:
        number = workload.index[made.op]
        op = workload.ops[number]
        if op.kind == "collective_permute":
            raise PlanMismatch(f"plan {plan.name}: {op.name} is a collective_permute, for which PyTorch has no call")
        if op.kind == "send":
            for pair in (pair for pair in workload.groups_of(op) if rank in pair):
                sent.setdefault((pair[0], pair[1]), []).append(number)
                if messages and len(made.motifs) == 1 and made.motifs[0].duration_us >= BRIEF_US:
                    ops[number] = _message(made, number, op, pair, rank)
            continue
        for group, batches in _by_group(made, op, workload, hosts):
            rank_op = _planned(plan, made, number, op, group, batches, lanes, rank, programs)
            for at, leaves in enumerate(batches):
                taking_part.setdefault((number, at), set()).update(one for leaf in leaves for one in leaf.ranks)
            if rank in group:
                ops[number] = rank_op
    if link_turns:
        _add_link_turns(ops, plan, workload, rank, hosts, taking_part)
    mine = {(number, rank_motif.number) for number, rank_op in ops.items() for rank_motif in rank_op.motifs}
    turns = tuple(Turn(op=op, motif=at, ahead=ahead) for _, op, at, ahead in order if (op, at) in mine)
    return RankPlan(
        ops=_in_directions(ops), turns=turns, num_lanes=lanes.count,
        messages={pair: tuple(sorted(numbers)) for pair, numbers in sent.items()},
    )  # fmt: skip


def _add_link_turns(
    ops: dict[int, RankOp], plan: Plan, workload: Workload, rank: int, hosts: Sequence[str],
    taking_part: Mapping[tuple[int, int], set[int]],
) -> None:  # fmt: skip
    """Write down for this rank's motifs what they wait for on this host, and which ranks of it wait for them."""
    waits: dict[tuple[int, int], list[LinkTurnOf]] = {}
    tells: dict[tuple[int, int], set[int]] = {}
    for turn in plan.link_turns:
        late, early = (workload.index[turn.op], turn.motif), (workload.index[turn.behind], turn.behind_motif)
        first = {one for one in taking_part.get(early, ()) if hosts[one] == hosts[rank]}
        then = {one for one in taking_part.get(late, ()) if hosts[one] == hosts[rank]}
        # A rank of both has them in line already.
        if rank in then and rank not in first and first:
            found = LinkTurnOf(op=early[0], motif=early[1], lag=turn.lag, peers=tuple(sorted(first)))
            waits.setdefault(late, []).append(found)
        if rank in first:
            tells.setdefault(early, set()).update(then - first)
    for number, one in ops.items():
        motifs = tuple(
            replace(
                motif,
                link_turns=tuple(waits.get((number, motif.number), ())),
                tells=tuple(sorted(tells.get((number, motif.number), ()))),
            )
            for motif in one.motifs
        )
        if motifs != one.motifs:
            ops[number] = replace(one, motifs=motifs)


def _message(made: OpPlan, number: int, op: Op, pair: tuple[int, ...], rank: int) -> RankOp:
    """A message as one of its ends sees it: outward, or inward."""
    (motif,) = made.motifs
    way = OUTWARD if rank == pair[0] else INWARD
    whole = motif_of(op.kind, pair, op.nbytes)
    rank_motif = RankMotif(
        number=0, leaf=whole, algorithm=motif.algorithm, channels=motif.channels, lane=-1, after=(), brief=False,
        lines=tuple(channel + way for channel in motif.channels),
    )  # fmt: skip
    return RankOp(number=number, op=op, whole=whole, motifs=(rank_motif,), option=made.option)


def _in_directions(ops: Mapping[int, RankOp]) -> dict[int, RankOp]:
    """The ops with a line for each direction of the channels that have messages; a collective holds both directions."""
    parted = {channel for one in ops.values() if one.op.kind == "send" for channel in one.motifs[0].channels}

    def lines(rank_motif: RankMotif) -> tuple[str, ...]:
        ways = (
            (channel + OUTWARD, channel + INWARD) if channel in parted else (channel,)
            for channel in rank_motif.channels
        )
        return tuple(line for pair in ways for line in pair)

    return {
        number: one
        if one.op.kind == "send" or not parted
        else replace(one, motifs=tuple(replace(rank_motif, lines=lines(rank_motif)) for rank_motif in one.motifs))
        for number, one in ops.items()
    }


def _planned(
    plan: Plan, made: OpPlan, number: int, op: Op, group: tuple[int, ...], batches: Sequence[Sequence[Motif]],
    lanes: _Lanes, rank: int, programs: _Programs,
) -> RankOp:  # fmt: skip
    motifs: list[RankMotif] = []
    for at, (motif, leaves) in enumerate(zip(made.motifs, batches, strict=True)):
        held = (*motif.channels, SERIAL) if plan.serial else motif.channels
        for leaf in leaves:
            lane = lanes.number(held, leaf.ranks)
            if rank in leaf.ranks:
                here = {rank_motif.number for rank_motif in motifs}
                motifs.append(
                    RankMotif(
                        number=at, leaf=leaf, algorithm=motif.algorithm, channels=held, lane=lane,
                        after=tuple(before for before in motif.after if before in here),
                        program=programs.find(motif, leaf), brief=motif.duration_us < BRIEF_US,
                    )
                )  # fmt: skip
    whole = motif_of(op.kind, group, op.nbytes, op.root)
    return RankOp(number=number, op=op, whole=whole, motifs=tuple(motifs), option=made.option)


class _Programs:
    """What a plan brings along, read when it is needed."""

    def __init__(self, plan: Plan) -> None:
        self._given: dict[tuple[str, str, tuple[str, ...]], list[ProgramPlan]] = {}
        for one in plan.programs:
            self._given.setdefault((one.algorithm, one.kind, one.channels), []).append(one)
        self._read: dict[int, Program] = {}

    def find(self, motif: MotifPlan, leaf: Motif) -> Program | None:
        """The program of a motif: its ranks' own, or else that of a group of as many."""
        given = self._given.get((motif.algorithm, leaf.collective_kind, motif.channels), ())
        alike = [one for one in given if any(len(group) == len(leaf.ranks) for group in one.groups)]
        found = next((one for one in alike if leaf.ranks in one.groups), alike[0] if alike else None)
        if found is None:
            return None
        if id(found) not in self._read:
            try:
                program = loads(found.text, where=f"program {found.algorithm} of {found.kind}")
                program.verify()
            except (InvalidInput, VerificationError) as error:
                raise PlanMismatch(str(error)) from None
            self._read[id(found)] = program
        return self._read[id(found)]


class _Lanes:
    """Numbers for (channels, ranks), such that those with a rank in common have different ones."""

    def __init__(self) -> None:
        self._known: dict[tuple[tuple[str, ...], tuple[int, ...]], int] = {}
        self._taken: list[set[int]] = []

    @property
    def count(self) -> int:
        return len(self._taken)

    def number(self, channels: tuple[str, ...], ranks: tuple[int, ...]) -> int:
        key = (channels, ranks)
        if key not in self._known:
            free = (at for at, taken in enumerate(self._taken) if taken.isdisjoint(ranks))
            at = next(free, len(self._taken))
            if at == len(self._taken):
                self._taken.append(set())
            self._taken[at].update(ranks)
            self._known[key] = at
        return self._known[key]


def _by_group(
    made: OpPlan, op: Op, workload: Workload, hosts: Sequence[str]
) -> Iterator[tuple[tuple[int, ...], list[tuple[Motif, ...]]]]:
    """Each group of a comm-op with its motifs: for each of the plan's those that run at once on different ranks."""
    where = f"comm-op {made.op}"
    if (made.kind, made.nbytes) != (op.kind, op.nbytes):
        wanted, found = (f"{one.kind} of {one.nbytes:g} bytes" for one in (made, op))
        raise PlanMismatch(f"{where}: the plan is for {wanted}, not {found}")
    try:
        expr = parse(made.expression)
    except InvalidInput as error:
        raise PlanMismatch(f"{where}: {error}") from None
    groups = workload.groups_of(op)
    written = _written(expr, groups)
    if not written:
        raise PlanMismatch(f"{where}: no group has the ranks of {made.expression[:80]}")
    for group in groups:
        first = _like(group, written, hosts)
        if first is None:
            raise PlanMismatch(f"{where}: the plan does not say what ranks {', '.join(map(str, group))} do")
        to = dict(zip(first, group, strict=True))
        batches = [tuple(_moved(leaf, to) for leaf in batch) for batch in batches_of(written[first])]
        if len(batches) != len(made.motifs):
            raise PlanMismatch(f"{where}: {len(made.motifs)} motifs do not fit {made.expression[:80]}")
        yield group, batches


def _written(expr: Expr, groups: Sequence[tuple[int, ...]]) -> dict[tuple[int, ...], Expr]:
    """The expressions of the first groups of all sorts: one, or one beside the other."""
    by_ranks = {frozenset(group): group for group in groups}
    whole = by_ranks.get(_ranks(expr))
    if whole is not None:
        return {whole: expr}
    each = [(by_ranks.get(_ranks(child)), child) for child in expr.children]
    return {group: child for group, child in each if group is not None} if all(group for group, _ in each) else {}


def _like(
    group: tuple[int, ...], written: Mapping[tuple[int, ...], Expr], hosts: Sequence[str]
) -> tuple[int, ...] | None:
    """The first group of this one's sort."""
    alike = [first for first in written if len(first) == len(group)]
    if group in alike or len(alike) == 1:
        return group if group in alike else alike[0]

    def rows(ranks: tuple[int, ...]) -> tuple[int, ...]:
        names = [hosts[rank] for rank in ranks]
        return tuple(names.index(name) for name in names)

    return next((first for first in alike if rows(first) == rows(group)), None)


def _ranks(expr: Expr) -> frozenset[int]:
    return frozenset(rank for leaf in expr.leaves for rank in leaf.ranks)


def batches_of(expr: Expr) -> list[tuple[Motif, ...]]:
    """The motifs of an expression as the planner counts them: those of one form on different ranks are one.

    >>> [[str(leaf) for leaf in batch] for batch in batches_of(parse(
    ...     "RS(T[0:8], PG[0:2]) || RS(T[0:8], PG[2:4]) -> AR(T[0:4], PG[0,2]) || AR(T[4:8], PG[1,3])"))]
    [['RS(T[0:8], PG[0:2])', 'RS(T[0:8], PG[2:4])'], ['AR(T[0:4], PG[0,2])', 'AR(T[4:8], PG[1,3])']]
    """
    found: list[tuple[Motif, ...]] = []

    def add(batch: Sequence[Expr]) -> None:
        first = batch[0]
        if isinstance(first, Motif):
            found.append(tuple(leaf for leaf in batch if isinstance(leaf, Motif)))
        elif isinstance(first, Seq):
            for number in range(len(first.children)):
                add([one.children[number] for one in batch])
        else:
            for side in beside(first):
                add([one.children[at] for one in batch for at in side])

    add([expr])
    return found


def _moved(leaf: Motif, to: Mapping[int, int]) -> Motif:
    """The same motif on the ranks of another group."""
    if all(rank == there for rank, there in to.items()):
        return leaf

    def moved(groups: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(to[rank] for rank in group) for group in groups)

    return Motif(
        kind=leaf.kind, ranks=tuple(to[rank] for rank in leaf.ranks), spans=leaf.spans, shards=leaf.shards,
        root=to[leaf.root] if leaf.kind in ROOTED else -1, window=leaf.window, held=moved(leaf.held),
        bound=moved(leaf.bound),
    )  # fmt: skip
