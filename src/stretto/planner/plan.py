# SPDX-License-Identifier: Apache-2.0
"""`Plan`: the planner's decision. For each comm-op its motifs, the channels and algorithm of each, and their order."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from ..cluster import Cluster
from ..errors import InvalidInput, PlanMismatch, unknown
from ..files import convert, parse_json, read_text, write_file
from ..workload import Workload

FORM = "plan"
SYSTEM = "stretto"
"""The name of the plans of the search."""
PLAIN = "plain"
"""The name of a plan that keeps the application's own order."""
VERSION = 1
MAX_MOTIFS = 1_000_000
MAX_AHEAD = 64
MAX_PROGRAM_CHARS = 16 << 20
LATER_FIELDS = {"link_turns": b',"link_turns":[]', "workload_spec": b',"workload_spec":""'}
"""Fields that plans of 0.1 did not have, with the JSON text of their empty values; no string holds such a text, since
quotes in strings are escaped. Empty fields are left out of files and of the hash: older plans keep their hashes."""
MAX_SPEC_CHARS = 4096
LIMIT = 1e18
"""Upper limit of times and sizes."""


@dataclass(frozen=True, kw_only=True)
class MotifPlan:
    """One motif of a comm-op, bound and ordered.

    Motifs run in the order of `seq` on each of their channels; motifs with equal numbers start together. `ahead` is the
    number of iterations by which the motif runs early (1: in the iteration before its own, as a prefetch; -1: in the
    one after). `after` are positions of motifs of the same op that must have ended.
    """

    motif: str
    algorithm: str
    channels: tuple[str, ...]
    seq: int
    ahead: int = 0
    after: tuple[int, ...] = ()
    nbytes: float = 0.0
    duration_us: float = 0.0
    launch_us: float = 0.0
    start_us: float = 0.0
    """Predicted start in the steady-state iteration, counted from the iteration's first compute-op."""
    source: str = ""


@dataclass(frozen=True, kw_only=True)
class OpPlan:
    """The decision for one comm-op, and the reason for it."""

    op: str
    kind: str
    nbytes: float
    option: str
    expression: str
    motifs: tuple[MotifPlan, ...]
    reason: str = ""

    @property
    def channels(self) -> tuple[str, ...]:
        """Every channel that one of the motifs holds."""
        return tuple(dict.fromkeys(channel for motif in self.motifs for channel in motif.channels))


@dataclass(frozen=True, kw_only=True)
class ProgramPlan:
    """A program without a library name (a synthesized one, say), as text over positions 0..n-1 of each of `groups`."""

    algorithm: str
    kind: str
    channels: tuple[str, ...]
    groups: tuple[tuple[int, ...], ...]
    text: str


@dataclass(frozen=True, kw_only=True)
class TurnPlan:
    """A motif has its turn on the links of its hosts when another group's motif has ended there.

    Motif number `motif` of comm-op `op` waits, in each iteration, until motif number `behind_motif` of `behind`, of
    `lag` iterations before, has ended on the ranks of its hosts. That is for speed: nothing is wrong where it starts
    earlier.
    """

    op: str
    motif: int
    behind: str
    behind_motif: int
    lag: int = 0


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything that an enforcer needs, and the predictions for it."""

    name: str
    workload: str
    workload_digest: str
    cluster: str
    cluster_digest: str
    iteration_us: float
    """Predicted steady-state iteration time, from the cost of each motif alone."""
    retimed_us: float = 0.0
    """Iteration time by the link-level simulator, with all motifs contending for links; 0 if not simulated."""
    bound_us: float = 0.0
    """Lower bound on the iteration time of every plan over these options."""
    bound_by: str = ""
    baselines_us: dict[str, float] = field(default_factory=dict)
    serial: bool = False
    """Whether one motif runs at a time, whatever its channels, as in a communication library with one stream."""
    made_by: str = ""
    seed: int = 0
    costs: str = ""
    notes: tuple[str, ...] = field(default=())
    """Sentences that users of the plan should know."""
    ops: tuple[OpPlan, ...]
    programs: tuple[ProgramPlan, ...] = ()
    """Programs of the motifs whose algorithms are not in the library."""
    link_turns: tuple[TurnPlan, ...] = ()
    """Turns of motifs of different groups on links that they share."""
    workload_spec: str = ""
    """The model with its options, as ``dlrm:A2,ranks=16``; empty where `workload` alone names the model, or a file."""

    def __post_init__(self) -> None:
        _validate(self)

    @cached_property
    def hash(self) -> str:
        """A hash of the content in 16 hexadecimal digits: ranks with equal hashes hold the same plan."""
        text = msgspec.json.encode(self, order="deterministic")
        for empty in LATER_FIELDS.values():
            text = text.replace(empty, b"")
        return hashlib.sha256(text).hexdigest()[:16]

    def op(self, name: str) -> OpPlan:
        """The decision for the comm-op with this name."""
        for op in self.ops:
            if op.op == name:
                return op
        raise unknown("comm-op", name, [op.op for op in self.ops])

    @property
    def num_motifs(self) -> int:
        """The number of motifs that are issued in an iteration."""
        return sum(len(op.motifs) for op in self.ops)

    @property
    def by_turn(self) -> tuple[OpPlan, ...]:
        """The comm-ops in the order of their first motifs."""
        return tuple(sorted(self.ops, key=lambda op: (min(motif.seq for motif in op.motifs), op.op)))

    @property
    def gap(self) -> float:
        """The relative distance of the iteration time to the lower bound; 0 without a bound."""
        return max(self.iteration_us / self.bound_us - 1, 0.0) if self.bound_us else 0.0

    def check(self, workload: Workload, cluster: Cluster | None = None) -> None:
        """Raise `PlanMismatch` unless the plan was made for this workload (and this cluster)."""
        if workload.digest != self.workload_digest:
            raise PlanMismatch(
                f"plan {self.name} was made for workload {self.workload} ({self.workload_digest}), "
                f"not for {workload.name} ({workload.digest})"
            )
        if cluster is not None and cluster.digest != self.cluster_digest:
            raise PlanMismatch(
                f"plan {self.name} was made for cluster {self.cluster} ({self.cluster_digest}), "
                f"not for {cluster.name} ({cluster.digest})"
            )

    def save(self, path: str | Path) -> None:
        """Write the versioned JSON form, with its hash."""
        head = {"stretto": FORM, "version": VERSION, "hash": self.hash}
        fields = msgspec.to_builtins(self)
        for name in LATER_FIELDS:
            if not getattr(self, name):
                fields.pop(name, None)
        text = msgspec.json.encode({**head, **fields})
        write_file(path, msgspec.json.format(text, indent=2) + b"\n")

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan; a file that was truncated or changed by hand raises `InvalidInput`."""
        value = parse_json(read_text(path), where=str(path))
        if not isinstance(value, dict) or value.get("stretto") != FORM:
            raise InvalidInput(f"{path}: not a plan (no field stretto: {FORM})")
        head = {key: value.pop(key, None) for key in ("stretto", "version", "hash")}
        if head["version"] != VERSION:
            raise InvalidInput(f"{path}: version: must be {VERSION}, not {head['version']!r}")
        try:
            plan = convert(value, cls, where="")
        except InvalidInput as error:
            raise InvalidInput(f"{path}: {str(error).removeprefix(': ')}") from None
        _refuse_unknown_fields(value, str(path))
        if head["hash"] != plan.hash:
            raise InvalidInput(f"{path}: hash: {head['hash']!r} does not fit the content ({plan.hash}); it was changed")
        return plan

    def __repr__(self) -> str:
        from ..units import format_us

        return (
            f"<Plan {self.name} for {self.workload} on {self.cluster}: {len(self.ops)} comm-ops in {self.num_motifs} "
            f"motifs, {format_us(self.iteration_us)} per iteration, hash {self.hash}>"
        )


def _refuse_unknown_fields(value: Mapping[str, Any], where: str) -> None:
    """Raise `InvalidInput` for a field that no class has, at any level, because the hash would not cover it."""
    rows: list[tuple[str, Mapping[str, Any], type[Plan | OpPlan | MotifPlan | ProgramPlan | TurnPlan]]]
    rows = [("", value, Plan)]
    rows += [(f"link_turns[{at}].", turn, TurnPlan) for at, turn in enumerate(value.get("link_turns", ()))]
    rows += [(f"programs[{at}].", program, ProgramPlan) for at, program in enumerate(value.get("programs", ()))]
    for at, op in enumerate(value["ops"]):
        rows.append((f"ops[{at}].", op, OpPlan))
        rows += [(f"ops[{at}].motifs[{number}].", motif, MotifPlan) for number, motif in enumerate(op["motifs"])]
    for path, row, kind in rows:
        known = [one.name for one in fields(kind)]
        extra = row.keys() - known
        if extra:
            raise InvalidInput(f"{where}: {path}{min(extra)}: {unknown('field', min(extra), known)}")


def _validate(plan: Plan) -> None:
    if plan.num_motifs > MAX_MOTIFS:
        raise InvalidInput(f"ops: at most {MAX_MOTIFS} motifs, not {plan.num_motifs}")
    size = sum(len(program.text) for program in plan.programs)
    if size > MAX_PROGRAM_CHARS:
        raise InvalidInput(f"programs: at most {MAX_PROGRAM_CHARS} characters, not {size}")
    if len(plan.workload_spec) > MAX_SPEC_CHARS:
        raise InvalidInput(f"workload_spec: at most {MAX_SPEC_CHARS} characters, not {len(plan.workload_spec)}")
    _check_amounts(plan, ("iteration_us", "retimed_us", "bound_us"), "")
    for name, value in plan.baselines_us.items():
        _check_amount(value, f"baselines_us[{name!r}]")
    seen: set[str] = set()
    for at, op in enumerate(plan.ops):
        where = f"ops[{at}] ({op.op})"
        if op.op in seen:
            raise InvalidInput(f"{where}.op: is there twice")
        seen.add(op.op)
        _check_amounts(op, ("nbytes",), f"{where}.")
        if not op.motifs:
            raise InvalidInput(f"{where}.motifs: must not be empty")
        for number, motif in enumerate(op.motifs):
            _check_motif(motif, number, f"{where}.motifs[{number}].")
    motifs = {op.op: op.motifs for op in plan.ops}
    for at, turn in enumerate(plan.link_turns):
        _check_turn(turn, motifs, f"link_turns[{at}].")


def _check_turn(turn: TurnPlan, motifs: Mapping[str, tuple[MotifPlan, ...]], where: str) -> None:
    """Raise `InvalidInput` unless both motifs are there, and the one that waits comes later in the plan's order."""
    for key, name, number in (("op", turn.op, turn.motif), ("behind", turn.behind, turn.behind_motif)):
        if name not in motifs:
            raise InvalidInput(f"{where}{key}: {unknown('comm-op', name, list(motifs))}")
        if not 0 <= number < len(motifs[name]):
            raise InvalidInput(f"{where}{key}: {name} has motifs 0..{len(motifs[name]) - 1}, not {number}")
    waits, first = motifs[turn.op][turn.motif], motifs[turn.behind][turn.behind_motif]
    windows = waits.ahead - first.ahead - turn.lag
    if turn.op == turn.behind or (windows, first.seq) >= (0, waits.seq):
        raise InvalidInput(f"{where}op: {turn.op} must come later in the order than what it waits for, {turn.behind}")


def _check_motif(motif: MotifPlan, number: int, where: str) -> None:
    if not motif.channels:
        raise InvalidInput(f"{where}channels: must not be empty")
    if not 0 <= motif.seq < MAX_MOTIFS:
        raise InvalidInput(f"{where}seq: must be 0..{MAX_MOTIFS - 1}, not {motif.seq}")
    if abs(motif.ahead) > MAX_AHEAD:
        raise InvalidInput(f"{where}ahead: must be within {MAX_AHEAD} iterations, not {motif.ahead}")
    if any(not 0 <= before < number for before in motif.after):
        raise InvalidInput(f"{where}after: must name earlier motifs of the op")
    _check_amounts(motif, ("nbytes", "duration_us", "launch_us", "start_us"), where)


def _check_amounts(of: object, keys: tuple[str, ...], where: str) -> None:
    for key in keys:
        _check_amount(getattr(of, key), f"{where}{key}")


def _check_amount(value: float, where: str) -> None:
    if not 0 <= value < LIMIT:
        raise InvalidInput(f"{where}: must be a number >= 0, not {value!r}")
