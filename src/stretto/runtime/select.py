"""Which program runs for which call: a pure function of what all ranks know, so that all ranks choose the same.

Three sources, the first that has an answer: a folder of programs made for this job (STRETTO_TABLE, as `stretto synth`
writes it), a cluster (STRETTO_CLUSTER) on which the library's algorithms are simulated, and else the hosts of the
ranks: inside one host straight through shared memory, between hosts dimension by dimension.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated

import msgspec

from ..algorithms import algorithm
from ..algorithms.registry import defined_for
from ..cluster import Cluster, Link, Node
from ..collectives import ROOTED
from ..errors import InvalidInput, StrettoError
from ..files import convert, parse_json, read_text
from ..programs import Lowered, Program
from ..programs.formats import load_program
from ..simulator import simulate
from ..units import format_us

SMALLEST_BYTES = 256
"""Up to this size all calls are alike."""
MAX_SIMULATED = 64
"""Over more ranks, simulating the library would hold up the first call for too long."""
FAR = {
    "all_reduce": ("hierarchical", "ring"),
    "all_gather": ("hierarchical", "ring"),
    "reduce_scatter": ("hierarchical", "ring"),
    "all_to_all": ("pairwise", "direct"),
    "broadcast": ("chain", "binomial"),
    "reduce": ("chain", "binomial"),
}
"""Between hosts, without a cluster to simulate on: the first that is defined for the ranks."""
SHORT = {"broadcast": ("binomial",), "reduce": ("binomial",)}
"""The same for what is so small that only the number of steps counts."""
SHORT_BYTES = 64 << 10
SHARED_GB_PER_S, UPLINK_GB_PER_S = 5.0, 0.1
"""Only their order matters: memory before network."""


@dataclass(frozen=True, kw_only=True)
class Pick:
    """A program for a kind of call, why it was taken, and why each other one was not."""

    program: Program | Lowered
    why: str
    rejected: tuple[tuple[str, str], ...] = ()


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
        self._picks: dict[tuple[str, int, int, bool], Pick] = {}

    @property
    def num_hosts(self) -> int:
        """On how many hosts the ranks are."""
        return len(set(self.hosts))

    def pick(self, kind: str, nbytes: int, *, root: int = 0, in_place: bool = False) -> Pick:
        """The program for a call; the same object for all sizes between two powers of two."""
        scale = max(int(nbytes) - 1, SMALLEST_BYTES - 1).bit_length()
        key = (kind, scale, root if kind in ROOTED else 0, in_place)
        if key not in self._picks:
            self._picks[key] = self._find(kind, 1 << scale, key[2], in_place)
        return self._picks[key]

    def _find(self, kind: str, nbytes: int, root: int, in_place: bool) -> Pick:
        rejected: list[tuple[str, str]] = []
        made = self._from_table(kind, nbytes, root, in_place, rejected)
        if made is not None:
            return Pick(program=made, why="made for this job (STRETTO_TABLE)", rejected=tuple(rejected))
        if self.cluster is not None and len(self.devices) <= MAX_SIMULATED:
            return self._simulated(self.cluster, kind, nbytes, root, in_place, rejected)
        return self._by_hosts(kind, nbytes, root, in_place, rejected)

    def _from_table(
        self, kind: str, nbytes: int, root: int, in_place: bool, rejected: list[tuple[str, str]]
    ) -> Program | Lowered | None:
        for path, low, high in self._table.get(kind, ()):
            if not low <= nbytes or (high and nbytes > high):
                continue
            program = load_program(path)
            if not isinstance(program, Program | Lowered):
                rejected.append((path.name, "is an MSCCL++ plan, which is for GPUs"))
                continue
            made_for = program.collective
            if made_for.num_ranks != len(self.devices):
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
        self, cluster: Cluster, kind: str, nbytes: int, root: int, in_place: bool, rejected: list[tuple[str, str]]
    ) -> Pick:
        times: list[tuple[float, Program]] = []
        for name in defined_for(kind, len(self.devices)):
            try:
                program = self._build(name, kind, cluster, root, in_place)
                times.append((simulate(program, cluster, nbytes=nbytes).total_us, program))
            except StrettoError as error:
                rejected.append((name, str(error)))
        if not times:
            raise InvalidInput(f"no algorithm of the library does {kind} over {len(self.devices)} ranks: {rejected}")
        times.sort(key=lambda pair: pair[0])
        (best_us, best), *others = times
        rejected += [(program.name, f"predicted {format_us(time_us)}") for time_us, program in others]
        return Pick(
            program=best, why=f"predicted {format_us(best_us)} on {cluster.name}, the least", rejected=tuple(rejected)
        )

    def _by_hosts(
        self, kind: str, nbytes: int, root: int, in_place: bool, rejected: list[tuple[str, str]]
    ) -> Pick:
        one_host = self.num_hosts == 1
        far = (SHORT if nbytes <= SHORT_BYTES and kind in SHORT else FAR).get(kind, ())
        names = ("direct",) if one_host else (*far, "direct")
        where = "all ranks on one host" if one_host else f"{len(self.devices)} ranks on {self.num_hosts} hosts"
        defined = defined_for(kind, len(self.devices))
        for name in names:
            if name not in defined:
                rejected.append((name, f"is not defined for {len(self.devices)} ranks"))
                continue
            if name == "hierarchical" and len({self.hosts.count(host) for host in self.hosts}) > 1:
                rejected.append((name, "needs as many ranks on every host"))
                continue
            if name == "hierarchical" and self.num_hosts == len(self.devices):
                rejected.append((name, "needs several ranks on each host"))
                continue
            program = self._build(name, kind, None if one_host else self._assumed, root, in_place)
            return Pick(program=program, why=where, rejected=tuple(rejected))
        raise InvalidInput(f"no algorithm of the library does {kind} over {len(self.devices)} ranks")

    def _build(self, name: str, kind: str, cluster: Cluster | None, root: int, in_place: bool) -> Program:
        ranks = self.devices if cluster is not None and cluster is self.cluster else range(len(self.devices))
        program = algorithm(
            name, kind, tuple(ranks), cluster=cluster, root=root if kind in ROOTED else None, in_place=in_place
        )
        program.verify()
        return program

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
        pairs = [(rank, count + at, SHARED_GB_PER_S) for rank, at in enumerate(host)]
        pairs += [(count + at, top, UPLINK_GB_PER_S) for at in range(len(names))]
        links = [
            Link(src=src, dst=dst, alpha_us=1.0, gb_per_s=rate)
            for one, two, rate in pairs
            for src, dst in ((one, two), (two, one))
        ]
        return Cluster.build("hosts", nodes=nodes, links=links)


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What the environment says about choosing; `text` is compared between ranks."""

    cluster: Cluster | None
    table: Path | None
    text: str


def rules(environment: Mapping[str, str] = os.environ) -> Rules:
    """Read STRETTO_CLUSTER (a file or a preset) and STRETTO_TABLE (a folder); raises `InvalidInput`."""
    from .. import __version__

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
    return Rules(cluster=cluster, table=table, text=", ".join(parts))


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
        found[index.collective] = tuple((path.parent / file, low, high) for file, low, high in rows)
    return found
