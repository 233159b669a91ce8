# SPDX-License-Identifier: Apache-2.0
"""Which program runs for which call: a pure function of what all ranks know, so that all ranks choose the same.

The first source that has an answer: a folder of programs made for this job (STRETTO_TABLE, as `stretto synth` writes
it); inside one host the straight way through shared memory; between hosts the library's programs, simulated as the
executor would run them, on the cluster (STRETTO_CLUSTER) or on what the hosts of the ranks suggest.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

import msgspec
import numpy as np

from ...algorithms import algorithm
from ...algorithms.registry import FOR_COMPARISON, defined_for
from ...cluster import Cluster, Link, Node
from ...collectives import ROOTED
from ...errors import InvalidInput, StrettoError
from ...files import convert, parse_json, read_text
from ...programs import Lowered, Program, SymmetricProgram
from ...programs.formats import expanded, load_program
from ...programs.lower import lower
from ...simulator import simulate
from ...simulator.priced import slices_of
from ...units import format_us
from ..executor.executor import far_bytes
from .prediction import predict

SMALLEST_BYTES = 256
"""Up to this size all calls are alike."""
MAX_SIMULATED = 64
"""Over more ranks, simulating the library would hold up the first call for too long."""
SHORTLIST = 5
"""How many candidates are simulated in full: those that are best when every chunk is one message."""
MAX_SLICES = 16
"""More slices than these behave alike."""
STRAIGHT = "direct"
"""The algorithm in which every piece goes straight to its rank."""
AS_FAST = 1.02
"""Predictions this close are equal: what decides then is how little the ranks get into each other's way."""
VARIANTS: dict[str, tuple[Mapping[str, Any], ...]] = {
    "hierarchical": ({}, {"inside": ("direct", "ring")}, {"inside": ("direct", "direct")}),
}
"""Options to try beside those that the cluster suggests. A ring between hosts has one flow into each at a time."""
MANY = {
    "all_reduce": ("hierarchical", "ring"),
    "all_gather": ("hierarchical", "ring"),
    "reduce_scatter": ("hierarchical", "ring"),
    "all_to_all": ("pairwise",),
    "broadcast": ("chain",),
    "reduce": ("chain",),
}
"""Between hosts, over so many ranks that nothing is simulated: the first that is defined for them, else direct."""
SHARED_GB_PER_S, SHARED_ALPHA_US = 5.0, 2.0
UPLINK_GB_PER_S, UPLINK_ALPHA_US = 0.1, 20.0
"""Assumed where no cluster says better; only their order matters: memory before network."""


@dataclass(frozen=True, kw_only=True)
class ProgramPick:
    """A program for a kind of call, why it was taken, and why each other one was not."""

    program: Program | Lowered
    why: str
    rejected: tuple[tuple[str, str], ...] = ()
    from_table: bool = False


@dataclass(frozen=True, kw_only=True)
class _Timed:
    """A program's prediction, and what it asks for: bytes moved, connections between hosts, flows on them at a time."""

    program: Program
    total_us: float
    burden: tuple[int, int, int, float]


class _Row(msgspec.Struct, frozen=True):
    file: str
    min_bytes: Annotated[int, msgspec.Meta(ge=0)]
    max_bytes: Annotated[int, msgspec.Meta(ge=0)]


class _Index(msgspec.Struct, frozen=True):
    collective: str
    rows: Annotated[list[_Row], msgspec.Meta(max_length=4096)]


class Selector:
    """The choices of one communicator; `devices` are its ranks' numbers in the whole job."""

    def __init__(
        self,
        devices: Sequence[int],
        hosts: Sequence[str],
        *,
        cluster: Cluster | None = None,
        table: str | Path | None = None,
    ) -> None:
        self.devices = tuple(devices)
        self.hosts = tuple(hosts)
        self.cluster = cluster
        if cluster is not None and max(self.devices) >= cluster.num_devices:
            size, rank = cluster.num_devices, max(self.devices)
            raise InvalidInput(f"STRETTO_CLUSTER: {cluster.name} has {size} devices, too few for rank {rank}")
        self._table = _read_table(Path(table)) if table is not None else {}
        self._picks: dict[tuple[str, int, int, bool], ProgramPick] = {}

    @property
    def num_hosts(self) -> int:
        """On how many hosts the ranks are."""
        return len(set(self.hosts))

    @property
    def network(self) -> Cluster:
        """What programs are simulated on: the cluster, or what the hosts of the ranks suggest."""
        return self.cluster or self._assumed

    def pick(self, kind: str, nbytes: int, *, root: int = 0, in_place: bool = False) -> ProgramPick:
        """The program for a call; the same object for all sizes between two powers of two.

        Args:
            kind: The collective.
            nbytes: Its size.
            root: Its root, if it has one.
            in_place: Whether input and output are one buffer.

        Returns:
            The program and why.
        """
        scale = max(int(nbytes) - 1, SMALLEST_BYTES - 1).bit_length()
        key = (kind, scale, root if kind in ROOTED else 0, in_place)
        if key not in self._picks:
            self._picks[key] = self._find(kind, 1 << scale, key[2], in_place)
        return self._picks[key]

    def pick_exchange(self, nbytes: int) -> ProgramPick | None:
        """The choice for an all-to-all of equal pieces, where pieces of any sizes take the same program; else None.

        A rank that gives no splits does not know whether another rank gives some, so both should run the same.
        """
        pick = self.pick("all_to_all", nbytes)
        return pick if pick.program.name == STRAIGHT and not pick.from_table else None

    def build(self, name: str, kind: str, *, root: int = 0, in_place: bool = False) -> Program:
        """A verified program of the library for these ranks, on the cluster where there is one.

        Args:
            name: The algorithm.
            kind: The collective.
            root: Its root, where it has one.
            in_place: Whether input and output share memory.

        Returns:
            The program.

        Raises:
            StrettoError: The algorithm is not defined for these ranks.
        """
        return self._build(name, kind, self.cluster, root, in_place)

    def _find(self, kind: str, nbytes: int, root: int, in_place: bool) -> ProgramPick:
        if kind == "all_to_all_v":
            why = "pieces of any sizes, of which a rank knows only its own: each goes straight to its rank"
            return ProgramPick(program=self._build(STRAIGHT, kind, None, root, in_place), why=why)
        made, rejected = self.from_table(kind, nbytes, root=root, in_place=in_place)
        if made is not None:
            return made
        if self._together:
            program = self._build(STRAIGHT, kind, None, root, in_place)
            return ProgramPick(program=program, why="all ranks on one host", rejected=tuple(rejected))
        if len(self.devices) <= MAX_SIMULATED:
            return self._simulated(kind, nbytes, root, in_place, rejected)
        return self._by_rule(kind, root, in_place, rejected)

    def from_table(
        self, kind: str, nbytes: int, *, root: int = 0, in_place: bool = False
    ) -> tuple[ProgramPick | None, list[tuple[str, str]]]:
        """The program that was made for a call (STRETTO_TABLE), and why others of the table are not for it.

        Args:
            kind: The collective.
            nbytes: Its bytes.
            root: Its root, where it has one.
            in_place: Whether input and output share memory.

        Returns:
            The pick, or None; and (name, reason) of those that do not fit.
        """
        rejected: list[tuple[str, str]] = []
        made = self._from_table(kind, nbytes, root, in_place, rejected)
        if made is None:
            return None, rejected
        why = "made for this job (STRETTO_TABLE)"
        return ProgramPick(program=made, why=why, rejected=tuple(rejected), from_table=True), rejected

    def _from_table(
        self, kind: str, nbytes: int, root: int, in_place: bool, rejected: list[tuple[str, str]]
    ) -> Program | Lowered | None:
        for path, low, high in self._table.get(kind, ()):
            if not low <= nbytes or (high and nbytes > high):
                continue
            program = load_program(path)
            if isinstance(program, SymmetricProgram):
                program = expanded(program, path)
            if not isinstance(program, Program | Lowered):
                rejected.append((path.name, "is an MSCCL++ plan, which is for GPUs"))
                continue
            made_for = program.collective
            if made_for.helpers:
                needs = f"needs {made_for.helpers} helpers outside the group, which take no part in its calls"
                rejected.append((program.name, needs))
            elif made_for.num_ranks != len(self.devices):
                rejected.append((program.name, f"is for {made_for.num_ranks} ranks, not {len(self.devices)}"))
            elif kind in ROOTED and made_for.root != root:
                rejected.append((program.name, f"is for root {made_for.root}, not {root}"))
            elif made_for.in_place != in_place:
                rejected.append((program.name, f"is {'' if made_for.in_place else 'not '}in place"))
            else:
                program.verify()
                return program
        return None

    def _simulated(
        self, kind: str, nbytes: int, root: int, in_place: bool, rejected: list[tuple[str, str]]
    ) -> ProgramPick:
        cluster = self.network
        rough: list[tuple[float, Program]] = []
        for name in (one for one in defined_for(kind, len(self.devices)) if one not in FOR_COMPARISON):
            for at, options in enumerate(VARIANTS.get(name, ({},))):
                try:
                    program = self._build(name, kind, cluster, root, in_place, options)
                    rough.append((simulate(program, cluster, nbytes=nbytes).total_us, program))
                except StrettoError as error:
                    # A variant asks for hosts that are alike; the algorithm itself may do without.
                    if at == 0:
                        rejected.append((name, str(error)))
        if not rough:
            raise InvalidInput(f"no algorithm of the library does {kind} over {len(self.devices)} ranks: {rejected}")
        rough.sort(key=lambda pair: pair[0])
        fine = [self._timed(program, cluster, nbytes) for _, program in rough[:SHORTLIST]]
        least_us = min(each.total_us for each in fine)
        as_fast = [each for each in fine if each.total_us <= AS_FAST * least_us]
        best = min(as_fast, key=lambda each: each.burden)
        if kind == "all_to_all":
            # Other ranks may give splits, and then only this program fits theirs (`pick_exchange`).
            best = next((each for each in as_fast if each.program.name == STRAIGHT), best)
        for each in fine:
            if each is not best:
                close = ", but asks more of the links" if each.total_us <= AS_FAST * least_us else ""
                rejected.append((each.program.name, f"predicted {format_us(each.total_us)}{close}"))
        rejected += [(program.name, f"predicted {format_us(us)}, in one piece") for us, program in rough[SHORTLIST:]]
        assumed = "" if self.cluster else f"{len(self.devices)} ranks on {self.num_hosts} hosts: "
        why = f"{assumed}predicted {format_us(best.total_us)} on {cluster.name}"
        return ProgramPick(program=best.program, why=why, rejected=tuple(rejected))

    def _timed(self, program: Program, cluster: Cluster, nbytes: int) -> _Timed:
        lowered = lower(program)
        length = far_bytes(lowered) * -(-slices_of(lowered, nbytes, far_bytes(lowered)) // MAX_SLICES)
        prediction = predict(lowered, cluster, nbytes=nbytes, message_bytes=length)
        host = cluster.node_host[list(program.collective.ranks)]
        src, dst = prediction.src, prediction.dst
        far = host[src] != host[dst]
        connections = len(np.unique(src[far].astype(np.int64) * len(host) + dst[far]))
        took = prediction.message_end_us - prediction.message_start_us
        flows = float(took[far].sum()) / prediction.total_us
        return _Timed(
            program=program,
            total_us=prediction.total_us,
            burden=(round(float(prediction.nbytes.sum())), connections, round(flows), prediction.total_us),
        )

    def _by_rule(self, kind: str, root: int, in_place: bool, rejected: list[tuple[str, str]]) -> ProgramPick:
        defined = defined_for(kind, len(self.devices))
        for name in (*MANY.get(kind, ()), STRAIGHT):
            if name not in defined:
                rejected.append((name, f"is not defined for {len(self.devices)} ranks"))
                continue
            if name == "hierarchical" and len({self.hosts.count(host) for host in self.hosts}) > 1:
                rejected.append((name, "needs as many ranks on every host"))
                continue
            if name == "hierarchical" and self.num_hosts == len(self.devices):
                rejected.append((name, "needs several ranks on each host"))
                continue
            program = self._build(name, kind, self.network, root, in_place)
            why = f"{len(self.devices)} ranks on {self.num_hosts} hosts, too many to simulate"
            return ProgramPick(program=program, why=why, rejected=tuple(rejected))
        raise InvalidInput(f"no algorithm of the library does {kind} over {len(self.devices)} ranks")

    def _build(
        self,
        name: str,
        kind: str,
        cluster: Cluster | None,
        root: int,
        in_place: bool,
        options: Mapping[str, Any] = MappingProxyType({}),
    ) -> Program:
        ranks = self.devices if cluster is not None and cluster is self.cluster else range(len(self.devices))
        given = dict(options) | ({"root": root} if kind in ROOTED else {})
        program = algorithm(name, kind, tuple(ranks), cluster=cluster, in_place=in_place, **given)
        program.verify()
        return program

    @cached_property
    def _together(self) -> bool:
        """Whether all ranks share a host's memory, and no cluster says otherwise."""
        if self.num_hosts > 1 or self.cluster is None:
            return self.num_hosts == 1
        hosts = self.cluster.node_host[list(self.devices)]
        return bool(hosts[0] >= 0 and np.all(hosts == hosts[0]))

    @cached_property
    def _assumed(self) -> Cluster:
        """Ranks behind a switch in each host, hosts behind one switch: enough to know who is near."""
        names = list(dict.fromkeys(self.hosts))
        host = [names.index(name) for name in self.hosts]
        count = len(host)
        top = count + len(names)
        nodes = [Node(name=f"r{rank}", host=at) for rank, at in enumerate(host)]
        nodes += [Node(name=f"h{at}", kind="switch", host=at) for at in range(len(names))]
        nodes.append(Node(name="net", kind="switch"))
        pairs = [(rank, count + at, SHARED_GB_PER_S, SHARED_ALPHA_US) for rank, at in enumerate(host)]
        pairs += [(count + at, top, UPLINK_GB_PER_S, UPLINK_ALPHA_US) for at in range(len(names))]
        links = [
            Link(src=src, dst=dst, alpha_us=alpha_us / 2, gb_per_s=rate)
            for one, two, rate, alpha_us in pairs
            for src, dst in ((one, two), (two, one))
        ]
        return Cluster.build("assumed rates", nodes=nodes, links=links)


@dataclass(frozen=True, kw_only=True)
class SelectionRules:
    """What the environment says about choosing; `text` is compared between ranks."""

    cluster: Cluster | None
    table: Path | None
    text: str


def rules(environment: Mapping[str, str] = os.environ) -> SelectionRules:
    """Read STRETTO_CLUSTER (a file or a preset) and STRETTO_TABLE (a folder); raises `InvalidInput`."""
    from ... import __version__

    named = environment.get("STRETTO_CLUSTER", "")
    cluster = Cluster.load(named) if named else None
    folder = environment.get("STRETTO_TABLE", "")
    table = Path(folder) if folder else None
    parts = [f"stretto {__version__}"]
    if cluster is not None:
        parts.append(f"cluster {cluster.name} {cluster.digest}")
    if table is not None:
        state = hashlib.sha256()
        for paths in sorted(_read_table(table).items()):
            for path, low, high in paths[1]:
                state.update(f"{path.name} {low} {high} {read_text(path)}".encode())
        parts.append(f"table {state.hexdigest()[:16]}")
    return SelectionRules(cluster=cluster, table=table, text=", ".join(parts))


def _read_table(folder: Path) -> dict[str, tuple[tuple[Path, int, int], ...]]:
    """(file, least bytes, most bytes) by collective, from the index of one folder or of each folder in it."""
    found: dict[str, tuple[tuple[Path, int, int], ...]] = {}
    indices = sorted([*folder.glob("index.json"), *folder.glob("*/index.json")])
    if not indices:
        raise InvalidInput(f"STRETTO_TABLE: {folder} has no index.json (write one with `stretto synth`)")
    for path in indices:
        index = convert(parse_json(read_text(path), where=str(path)), _Index, where=str(path))
        rows = {(row.file, row.min_bytes, row.max_bytes): None for row in index.rows}
        for file, *_ in rows:
            if Path(file).name != file:
                raise InvalidInput(f"{path}: file {file!r} must be a name in the same folder")
        found[index.collective] = tuple((_to_run(path.parent / file), low, high) for file, low, high in rows)
    return found


def _to_run(path: Path) -> Path:
    """The file that this backend reads: beside a plan for MSCCL++ stands the program that it was made of."""
    program = path.with_suffix(".txt")
    return program if path.suffix == ".json" and program.exists() else path
