# SPDX-License-Identifier: Apache-2.0
"""`bench`: times motifs on a job's own ranks, alone and in overlapping pairs, as the planner's table of costs.

As PARAM does, the real collectives of the real job are timed, not a model of them: each way to move a motif (a
collective over some groups of ranks, on some channels) that the simulator finds worth trying, at several sizes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from ...cluster import Cluster
from ...errors import InvalidInput, StrettoError, unknown
from ...planner.costs.channels import bindings_for
from ...planner.costs.costs import Motion, SimulatedCosts
from ...planner.costs.measured import Measurement, OverlapPartner
from ...programs.lower import lower
from ...units import KB, MB, format_bytes
from ..executor.executor import Executor, LoadedProgram, ProgramWork
from .meter import COMMUNICATOR, MEMORY, TIMEOUT_S, JobMeter

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")
PAIR = ("all_reduce", "all_to_all")
"""What is also timed side by side, on two channels: the pair of a DLRM step (SYNDICATE, figure 18)."""
SIZES = (64 * KB, 512 * KB, 4 * MB)
BEST = 3
"""How many algorithms of each motif and size are timed: the best by simulation."""
TIMES = 5
LONG_US = 200_000.0
"""What takes longer than this is timed twice only."""
BUDGET_S = 60.0
MAX_BYTES = 1 << 30
MAX_GROUPS = 200
"""Each group of ranks needs a communicator of its own; with more of them only all ranks together are timed."""

Groups = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, kw_only=True)
class BenchCase:
    """One motif to be timed; `network` is the channel that carries it between hosts (None: it stays inside them)."""

    kind: str
    algorithm: str
    groups: Groups
    network: str | None
    nbytes: int

    @property
    def label(self) -> str:
        """For a progress bar."""
        where = self.network or MEMORY
        return f"{self.kind} {self.algorithm} on {where}, {format_bytes(self.nbytes)}"


@dataclass(frozen=True, kw_only=True)
class BenchResult:
    """The table, and what did not fit into the time."""

    measurements: tuple[Measurement, ...]
    left_out: tuple[BenchCase, ...]
    seconds: float


def layouts(cluster: Cluster) -> list[Groups]:
    """The groups to time: all ranks; those of each host; and one rank of each host, alone and all at once."""
    count = cluster.num_devices
    hosts: dict[int, list[int]] = {}
    for rank in range(count):
        hosts.setdefault(int(cluster.node_host[rank]), []).append(rank)
    members = [tuple(ranks) for ranks in hosts.values()]
    found: list[Groups] = [(tuple(range(count)),)]
    even = len({len(ranks) for ranks in members}) == 1
    if len(members) > 1 and even and len(members[0]) > 1 and len(members) + len(members[0]) < MAX_GROUPS:
        across: Groups = tuple(zip(*members, strict=True))
        found += [tuple(members), across[:1], across]
    return found


def runs(
    cluster: Cluster,
    *,
    channels: Sequence[str],
    kinds: Iterable[str] = KINDS,
    sizes: Iterable[int] = SIZES,
    best: int = BEST,
) -> list[tuple[BenchCase, ...]]:
    """What to time, size by size: of each motif the algorithms that the simulator thinks best; then pairs of those.

    `channels` are the networks of the job. The same on every rank.

    Args:
        cluster: The job's cluster.
        channels: The networks of the job.
        kinds: Collectives.
        sizes: Bytes.
        best: How many algorithms of each motif.

    Returns:
        Groups of cases, in the order in which they are timed; the same on every rank.

    Raises:
        InvalidInput: A collective or a size is out of range.
    """
    costs = SimulatedCosts(cluster)
    kinds, wanted = tuple(kinds), tuple(int(size) for size in sizes)
    for kind in kinds:
        if kind not in KINDS:
            raise unknown("collective", kind, KINDS)
    if not wanted or min(wanted) < 4 or max(wanted) > MAX_BYTES:
        raise InvalidInput(f"bytes: must be 4..{MAX_BYTES}, not {list(wanted)}")
    todo: list[tuple[BenchCase, ...]] = []
    for nbytes in wanted:
        found: list[BenchCase] = []
        for groups in layouts(cluster):
            inside = all(len({int(cluster.node_host[r]) for r in group}) == 1 for group in groups)
            for network in (None,) if inside else tuple(channels):
                for kind in kinds:
                    found += best_cases(costs, kind, groups, network, nbytes, best)
        todo += [(case,) for case in found]
        todo += _pairs(cluster, found)
    if not todo:
        has = f"{', '.join((MEMORY, *channels))}; {cluster.name} has {', '.join(cluster.channels)}"
        raise InvalidInput(f"cluster: nothing to time: the job's channels are {has} (give what 'stretto probe' wrote)")
    return todo


def best_cases(
    costs: SimulatedCosts, kind: str, groups: Groups, network: str | None, nbytes: int, best: int
) -> list[BenchCase]:
    """The algorithms of one motif that the simulator thinks best.

    Args:
        costs: The simulator.
        kind: The collective.
        groups: The groups of ranks that run it at once.
        network: The channel between hosts; None: it stays inside them.
        nbytes: The size.
        best: How many.

    Returns:
        At most so many cases, fastest first; none where no channel fits.
    """
    held = _held(costs.cluster, groups, network)
    if not held:
        return []
    motion = Motion(kind=kind, groups=groups, channels=held[0])
    times: list[tuple[float, str]] = []
    for name in costs.algorithms(motion, nbytes):
        try:
            times.append((costs.cost(motion, nbytes, name).us, name))
        except StrettoError:
            continue
    times.sort(key=lambda pair: pair[0])
    return [
        BenchCase(kind=kind, algorithm=name, groups=groups, network=network, nbytes=nbytes) for _, name in times[:best]
    ]


def _held(cluster: Cluster, groups: Groups, network: str | None) -> list[tuple[str, ...]]:
    """The sets of channels that one run stands for.

    Between ranks of a host the executor takes memory, whatever a motif is bound to; so a binding that has no other
    network than this one runs alike with and without the host's memory in it. The one with it comes first.
    """
    found = [binding.channels for binding in bindings_for(cluster, groups)]
    alike = [held for held in found if set(held) - {MEMORY} == ({network} if network else set())]
    if network is None:
        alike = [held for held in found if held == (MEMORY,)]
    return sorted(alike, key=lambda held: MEMORY not in held)


def bench(
    executor: Executor,
    cluster: Cluster,
    todo: Sequence[Sequence[BenchCase]],
    *,
    budget_s: float = BUDGET_S,
    timeout_s: float = TIMEOUT_S,
    advance: Callable[[str], None] = lambda label: None,
) -> BenchResult:
    """Time what `runs` lists on all ranks of a job; a collective call with one result.

    `cluster` is the job's, as `probe` finds it: device r is rank r. When `budget_s` are over, the rest is left out.

    Args:
        executor: The job's executor.
        cluster: The job's cluster: device r is rank r.
        todo: What `runs` lists.
        budget_s: After which the rest is left out.
        timeout_s: After which one run fails.
        advance: Called with the name of each group that is done.

    Returns:
        The measurements, the same on every rank.

    Raises:
        InvalidInput: The cluster is for another number of ranks.
        PeerLost: A rank is gone.
    """
    if cluster.num_devices != executor.world_size:
        raise InvalidInput(
            f"cluster: {cluster.name} has {cluster.num_devices} devices, the job {executor.world_size} ranks"
        )
    meter = JobMeter(executor, timeout_s=timeout_s)
    timer = _Timer(executor, cluster, meter, timeout_s)
    begun = time.monotonic()
    rows: list[Measurement] = []
    left: list[BenchCase] = []
    for group in todo:
        advance(group[0].label)
        # One clock decides for all ranks.
        if float(meter.agree([time.monotonic() - begun])[0, 0]) > budget_s:
            left += group
        else:
            rows += timer.rows(group)
    return BenchResult(measurements=tuple(rows), left_out=tuple(left), seconds=time.monotonic() - begun)


def _pairs(cluster: Cluster, todo: Sequence[BenchCase]) -> list[tuple[BenchCase, ...]]:
    """For every two networks the two collectives of `PAIR` side by side, of cases of one size."""
    everyone = (tuple(range(cluster.num_devices)),)
    top: dict[tuple[str, str], BenchCase] = {}
    for case in todo:
        if case.groups == everyone and case.network is not None:
            # The first of a kind is the fastest.
            top.setdefault((case.kind, case.network), case)
    networks = list(dict.fromkeys(network for _, network in top))
    return [
        (top[PAIR[0], a], top[PAIR[1], b])
        for one, two in combinations(networks, 2)
        for a, b in ((one, two), (two, one))
        if (PAIR[0], a) in top and (PAIR[1], b) in top
    ]


class _Timer:
    """Runs cases; all ranks call it alike."""

    def __init__(self, executor: Executor, cluster: Cluster, meter: JobMeter, timeout_s: float) -> None:
        self._executor, self._cluster, self._meter, self._timeout_s = executor, cluster, meter, timeout_s
        self._costs = SimulatedCosts(cluster)
        self._numbers: dict[tuple[tuple[int, ...], int], int] = {}
        self._memory: dict[int, tuple[np.ndarray[tuple[int], np.dtype[np.float32]], ...]] = {}

    def rows(self, group: Sequence[BenchCase]) -> list[Measurement]:
        """The measurements of cases that run at the same time."""
        ready = [self._ready(case, lane) for lane, case in enumerate(group)]
        least = np.full(len(group), np.inf)
        for run in range(TIMES):
            if run >= 2 and least.max() > LONG_US:
                break
            self._meter.agree([0.0])
            works = [self._start(handle, count, lane) for lane, (handle, count, _) in enumerate(ready)]
            for work in works:
                if work is not None:
                    work.wait()
            mine = [0.0 if work is None else work.elapsed_us for work in works]
            # The first run touches memory and opens connections.
            taken = self._meter.agree(mine).max(axis=0)
            least = np.minimum(least, taken) if run else least
        return [
            self._row(case, held, nbytes, float(least[at]), group, ready)
            for at, (case, (_, _, nbytes)) in enumerate(zip(group, ready, strict=True))
            for held in _held(self._cluster, case.groups, case.network)[: None if len(group) == 1 else 1]
        ]

    def _row(
        self, case: BenchCase, held: tuple[str, ...], nbytes: int, time_us: float, group: Sequence[BenchCase],
        ready: Sequence[tuple[LoadedProgram | None, int, int]],
    ) -> Measurement:  # fmt: skip
        beside = None
        for other, (_, _, other_bytes) in zip(group, ready, strict=True):
            if other is not case:
                channels = _held(self._cluster, other.groups, other.network)[0]
                beside = OverlapPartner(
                    collective=other.kind, algorithm=other.algorithm, channels=channels, nbytes=other_bytes
                )
        return Measurement(
            collective=case.kind, algorithm=case.algorithm, channels=held, nranks=len(case.groups[0]), nbytes=nbytes,
            time_us=time_us, groups=len(case.groups), beside=beside,
        )  # fmt: skip

    def _ready(self, case: BenchCase, lane: int) -> tuple[LoadedProgram | None, int, int]:
        """This rank's program (None: it has no part in it), its elements, and the bytes that are really moved."""
        held = _held(self._cluster, case.groups, case.network)[0]
        motion = Motion(kind=case.kind, groups=case.groups, channels=held)
        first = self._costs.program(motion, case.nbytes, case.algorithm)
        chunks = first.collective.num_chunks
        count = -(-case.nbytes // 4 // chunks) * chunks
        # Every rank counts all groups, also those that it is not in, so that all give them the same numbers.
        for group in case.groups:
            self._numbers.setdefault((group, lane), COMMUNICATOR - 1 - len(self._numbers))
        mine = next((at for at, group in enumerate(case.groups) if self._executor.rank in group), None)
        if mine is None:
            return None, count, 4 * count
        program = self._costs.program(motion, case.nbytes, case.algorithm, mine)
        handle = self._executor.load(
            lower(program), ranks=case.groups[mine], communicator=self._numbers[case.groups[mine], lane],
            channels=[case.network] if case.network is not None else None,
        )  # fmt: skip
        return handle, count, 4 * count

    def _start(self, handle: LoadedProgram | None, count: int, lane: int) -> ProgramWork | None:
        if handle is None:
            return None
        inputs, outputs = handle.buffer_elements(count)
        held = self._memory.get(lane)
        if held is None or len(held[0]) < inputs or len(held[1]) < outputs:
            held = np.ones(max(inputs, 1), np.float32), np.ones(max(outputs, 1), np.float32)
            self._memory[lane] = held
        x, y = held
        return self._executor.start(
            handle, x.ctypes.data, y.ctypes.data, count, "float32", timeout_s=self._timeout_s, keep=held
        )
