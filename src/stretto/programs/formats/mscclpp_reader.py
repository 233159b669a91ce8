# SPDX-License-Identifier: Apache-2.0
"""The reader of MSCCL++ execution plans: it reads them, checks them, runs them on data, and compares the results.

Only the format's own definition is used here, so that a mistake of the exporter cannot hide in its reader.
`loads` accepts the Simple protocol over memory and port channels; packets (LL), switch channels, pipelines
and threadblock groups are refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec
import numpy as np
from msgspec import Meta

from ...collectives import AllGather, AllReduce, AllToAll, Broadcast, Collective, ReduceScatter
from ...errors import InvalidInput, VerificationError, unknown
from ...files import convert, parse_json
from ...units import check_seed
from .mscclpp_machine import Data, End, Image, Machine, ResolvedOp, Rows
from .named import entries_for

MAX_RANKS = 1024
MAX_CHUNKS = 1 << 20
MAX_TOTAL_CHUNKS = 1 << 24
MAX_OPS = 64
MAX_TOTAL_OPS = 1 << 20
MAX_UINT64 = (1 << 64) - 1
COLLECTIVES = ("allgather", "allreduce", "alltoall", "broadcast", "reducescatter")

SHAPES = {
    "copy": ("l", "l"),
    "get": ("r+", "l+"),
    "put": ("l+", "r+"),
    "pws": ("l+", "r+"),
    "pwsf": ("l+", "r+"),
    "re": ("ll+", "l"),
    "res": ("ll+", "lr+"),
    "rre": ("lr+", "l"),
    "rres": ("lr+", "lr+"),
}
"""The sources and destinations of each data operation as patterns: l is this rank's, r a peer's, + one or more."""
PAIRWISE = ("get", "put", "pws", "pwsf")
"""Operations that move each source to its own destination; all other operations need sources of one size."""
CHANNELS = {
    **dict.fromkeys(("signal", "rlxsignal", "wait", "rlxwait", "put"), ("memory", "port")),
    **dict.fromkeys(("pws", "pwsf", "flush"), ("port",)),
    **dict.fromkeys(("get", "res", "rre", "rres"), ("memory",)),
}
"""The types of channel an operation can work over."""
OPERATIONS = (
    "nop",
    "barrier",
    "signal",
    "rlxsignal",
    "wait",
    "rlxwait",
    "flush",
    "sem_acquire",
    "sem_release",
    *SHAPES,
)
ELSEWHERE = {
    "packets (LL)": ("ppkt", "rppkt", "cpkt", "upkt", "repkt", "respkt", "recpkt", "recspkt"),
    "switch channels": ("glre", "glres", "gstore"),
    "pipelines": ("pipeline",),
}

Index = Annotated[int, Meta(ge=0, lt=1 << 31)]
Chunks = Annotated[int, Meta(ge=1, le=MAX_CHUNKS)]
Name = Annotated[str, Meta(max_length=256)]
Kind = Literal["memory", "port"]
Buffer = Literal["i", "o", "s"]


class ChunkRange(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """Consecutive chunks of a buffer of this rank (`type`), or of a peer (`buffer_id`)."""

    index: Index
    size: Annotated[int, Meta(ge=1, le=MAX_CHUNKS)]
    type: Buffer | None = None
    buffer_id: Index | None = None


Parts = Annotated[tuple[ChunkRange, ...], Meta(max_length=10)]


class Operation(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """One operation of a threadblock; channels and peers' buffers are numbered inside the threadblock."""

    name: Name
    src_buff: Parts = ()
    dst_buff: Parts = ()
    channel_ids: Annotated[tuple[Index, ...], Meta(max_length=8)] = ()
    channel_type: Kind | Literal["none", "switch"] = "none"
    semaphore_ids: Annotated[tuple[Index, ...], Meta(max_length=16)] = ()
    barrier_id: Annotated[int, Meta(ge=0, lt=16)] | None = None
    num_threadblocks: Index = 0
    reduce_op: Literal["sum"] = "sum"


class ChannelRefs(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """The channels of one type a threadblock uses, by their number on the rank."""

    channel_type: Kind
    channel_ids: Annotated[tuple[Index, ...], Meta(max_length=16)]


class BufferRefs(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """The peers' buffers a threadblock reaches over one type of channel, by their number on the rank."""

    access_channel_type: Kind
    remote_buffer_ids: Annotated[tuple[Index, ...], Meta(max_length=16)]


class Threadblock(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """A threadblock: one sequence of operations, and the channels and buffers that it uses."""

    id: Index
    ops: Annotated[tuple[Operation, ...], Meta(max_length=MAX_OPS)]
    channels: Annotated[tuple[ChannelRefs, ...], Meta(max_length=16)]
    remote_buffer_refs: Annotated[tuple[BufferRefs, ...], Meta(max_length=16)] = ()


class Channels(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """Channels of one type: the peer each is connected to."""

    channel_type: Kind
    connected_to: Annotated[tuple[Index, ...], Meta(max_length=1 << 16)]


class RemoteBuffer(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """A peer's buffer this rank may reach."""

    rank: Index
    type: Buffer
    access_channel_types: Annotated[tuple[Kind, ...], Meta(max_length=2)]


class Semaphore(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """A counter that the threadblocks of a rank share."""

    init_value: Annotated[int, Meta(ge=0, le=1 << 16)]


class Gpu(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """The part of a plan that one rank executes."""

    id: Index
    input_chunks: Chunks
    output_chunks: Chunks
    scratch_chunks: Annotated[int, Meta(ge=0, le=MAX_CHUNKS)]
    threadblocks: Annotated[tuple[Threadblock, ...], Meta(min_length=1, max_length=1024)]
    channels: Annotated[tuple[Channels, ...], Meta(max_length=64)]
    remote_buffers: Annotated[tuple[RemoteBuffer, ...], Meta(max_length=1 << 16)]
    semaphores: Annotated[tuple[Semaphore, ...], Meta(max_length=1 << 16)] = ()

    def peers(self, kind: str) -> list[int]:
        """The peer of each channel of a type."""
        return [peer for c in self.channels if c.channel_type == kind for peer in c.connected_to]


class ExecutionPlan(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """An execution plan. `root` is Stretto's addition: the format has no place for it, and the executor ignores it."""

    name: str
    collective: Name
    protocol: Name
    inplace: bool
    gpus: Annotated[tuple[Gpu, ...], Meta(min_length=1, max_length=MAX_RANKS)]
    reuse_resources: bool = False
    num_threads_per_block: Annotated[int, Meta(ge=32, le=1024)] = 1024
    use_double_scratch_buffer: bool = False
    buffer_alignment: Annotated[int, Meta(ge=1, le=4096)] = 16
    min_message_size: Annotated[int, Meta(ge=0)] = 0
    max_message_size: Annotated[int, Meta(ge=0)] = MAX_UINT64
    root: Index | None = None

    def __repr__(self) -> str:
        ops = sum(len(tb.ops) for gpu in self.gpus for tb in gpu.threadblocks)
        return f"<Plan {self.name}: {self.collective} over {len(self.gpus)} ranks, {ops} operations>"


def loads(text: str, *, where: str = "plan") -> ExecutionPlan:
    """Read a plan and check everything that can be checked without running it; raises `InvalidInput`."""
    data = parse_json(text, where=where)
    _check_names(data, where)
    plan = convert(data, ExecutionPlan, where=where)
    total = sum(gpu.input_chunks + gpu.output_chunks + gpu.scratch_chunks for gpu in plan.gpus)
    if total > entries_for(text):
        raise InvalidInput(f"{where}: gpus: {total} chunks in all are too many for a plan of this size")
    if plan.protocol != "Simple":
        raise InvalidInput(f"{where}: protocol: only Simple can be run here, not {plan.protocol!r}")
    if plan.use_double_scratch_buffer:
        raise InvalidInput(f"{where}: use_double_scratch_buffer: only packets (LL) use it; must be false")
    if not plan.min_message_size <= plan.max_message_size <= MAX_UINT64:
        raise InvalidInput(f"{where}: min_message_size: must be <= max_message_size, which must be < 2^64")
    if plan.root is not None and plan.collective != "broadcast":
        raise InvalidInput(f"{where}: root: a {plan.collective} has none; only broadcast has")
    try:
        resolve(plan)
    except InvalidInput as error:
        raise InvalidInput(f"{where}: {error}") from None
    return plan


def _check_names(data: object, where: str) -> None:
    """Refuse unsupported operations and fields by name; the schema's message would only call them unexpected."""
    gpus = data.get("gpus") if isinstance(data, dict) else None
    for g, gpu in enumerate(gpus if isinstance(gpus, list) else ()):
        blocks = gpu.get("threadblocks") if isinstance(gpu, dict) else None
        for b, block in enumerate(blocks if isinstance(blocks, list) else ()):
            ops = block.get("ops") if isinstance(block, dict) else None
            for k, op in enumerate(ops if isinstance(ops, list) else ()):
                name = op.get("name") if isinstance(op, dict) else None
                at = f"{where}: gpus[{g}].threadblocks[{b}].ops[{k}]"
                for what, names in ELSEWHERE.items():
                    if name in names:
                        raise InvalidInput(f"{at}: {name!r}: {what} cannot be run here; can: {', '.join(OPERATIONS)}")
                if isinstance(name, str) and name not in OPERATIONS:
                    raise InvalidInput(f"{at}: {unknown('operation', name, OPERATIONS)}")
                if isinstance(op, dict) and "tbg_info" in op:
                    raise InvalidInput(f"{at}.tbg_info: threadblock groups cannot be run here")


def resolve(plan: ExecutionPlan) -> Image:
    """Resolve every channel, buffer and semaphore number of a plan; `InvalidInput` names one that is undefined."""
    ranks = len(plan.gpus)
    for r, gpu in enumerate(plan.gpus):
        if gpu.id != r:
            raise InvalidInput(f"gpus[{r}].id: must be {r}, not {gpu.id}")
        for key, peers in (
            ("channels", gpu.peers("memory") + gpu.peers("port")),
            ("remote_buffers", [b.rank for b in gpu.remote_buffers]),
        ):
            bad = next((p for p in peers if p >= ranks or p == r), None)
            if bad is not None:
                raise InvalidInput(f"gpus[{r}].{key}: must name another rank 0..{ranks - 1}, not {bad}")
    if sum(len(tb.ops) for gpu in plan.gpus for tb in gpu.threadblocks) > MAX_TOTAL_OPS:
        raise InvalidInput(f"gpus: more than {MAX_TOTAL_OPS} operations in all")
    buffers, rows = _lay_out(plan)
    ends, number = _pair(plan)
    first_semaphore = np.cumsum([0, *(len(gpu.semaphores) for gpu in plan.gpus)]).tolist()
    blocks = []
    for r, gpu in enumerate(plan.gpus):
        for b, tb in enumerate(gpu.threadblocks):
            if tb.id != b:
                raise InvalidInput(f"gpus[{r}].threadblocks[{b}].id: must be {b}, not {tb.id}")
            scope = _Scope(plan, r, b, buffers, ends, number, first_semaphore[r])
            blocks.append((r, b, tuple(a for k, op in enumerate(tb.ops) for a in scope.actions(k, op))))
    semaphores = tuple(s.init_value for gpu in plan.gpus for s in gpu.semaphores)
    if sum(semaphores) > MAX_TOTAL_OPS:
        raise InvalidInput(f"gpus: semaphores start at {sum(semaphores)} in all; at most {MAX_TOTAL_OPS}")
    return Image(blocks=tuple(blocks), ends=ends, semaphores=semaphores, rows=rows, buffers=buffers)


def _lay_out(plan: ExecutionPlan) -> tuple[tuple[dict[str, Rows], ...], int]:
    """Rows for every buffer; in place, the smaller of input and output is a part of the other."""
    total = sum(g.input_chunks + g.output_chunks + g.scratch_chunks for g in plan.gpus)
    if total > MAX_TOTAL_CHUNKS:
        raise InvalidInput(f"gpus: {total} chunks in all are more than the limit of {MAX_TOTAL_CHUNKS}")
    at = 0
    buffers = []
    for r, gpu in enumerate(plan.gpus):
        n_in, n_out = gpu.input_chunks, gpu.output_chunks
        i, o, end = at, at + n_in, at + n_in + n_out
        if plan.inplace:
            i = at + r * n_in if n_in < n_out else at
            o = at + r * n_out if n_out < n_in else at
            end = at + max(n_in, n_out)
            if max(i + n_in, o + n_out) > end:
                raise InvalidInput(f"gpus[{r}]: in place, {n_in} input and {n_out} output chunks do not fit together")
        buffers.append(
            {
                "i": Rows(at=i, count=n_in),
                "o": Rows(at=o, count=n_out),
                "s": Rows(at=end, count=gpu.scratch_chunks),
            }
        )
        at = end + gpu.scratch_chunks
    return tuple(buffers), at


def _pair(plan: ExecutionPlan) -> tuple[tuple[End, ...], dict[tuple[int, str, int], int]]:
    """The ends of all channels: the k-th from a to b belongs to the k-th from b to a of the same type."""
    number: dict[tuple[int, str, int], int] = {}
    named: dict[tuple[int, int, str, int], int] = {}
    seen: dict[tuple[int, int, str], int] = {}
    for r, gpu in enumerate(plan.gpus):
        for kind in ("memory", "port"):
            for c, peer in enumerate(gpu.peers(kind)):
                number[r, kind, c] = len(number)
                k = seen.get((r, peer, kind), 0)
                seen[r, peer, kind] = k + 1
                named[r, peer, kind, k] = number[r, kind, c]
    ends = tuple(
        End(rank=r, to=peer, peer=named.get((peer, r, kind, k), -1), port=kind == "port")
        for r, peer, kind, k in sorted(named, key=named.__getitem__)
    )
    return ends, number


@dataclass(frozen=True)
class _Scope:
    """The scope of one threadblock, which resolves the numbers in its operations."""

    plan: ExecutionPlan
    rank: int
    block: int
    buffers: tuple[dict[str, Rows], ...]
    ends: tuple[End, ...]
    number: dict[tuple[int, str, int], int]
    first_semaphore: int

    def actions(self, k: int, op: Operation) -> tuple[ResolvedOp, ...]:
        """The machine's actions for one operation (`pwsf` becomes two)."""
        where = f"gpus[{self.rank}].threadblocks[{self.block}].ops[{k}]"
        gpu = self.plan.gpus[self.rank]
        kinds = CHANNELS.get(op.name, (op.channel_type,))
        if op.channel_type not in kinds:
            raise InvalidInput(f"{where}.channel_type: {op.name} needs {' or '.join(kinds)}, not {op.channel_type}")
        by_port = op.channel_type == "port" and op.name in SHAPES
        ends = self._ends(where, op) if by_port or op.name in CHANNELS.keys() - SHAPES.keys() else ()
        src = tuple(self._rows(f"{where}.src_buff[{j}]", op, part) for j, part in enumerate(op.src_buff))
        dst = tuple(self._rows(f"{where}.dst_buff[{j}]", op, part) for j, part in enumerate(op.dst_buff))
        self._check_shape(where, op)
        if any(a != b and a.at < b.at + b.count and b.at < a.at + a.count for a in src for b in dst):
            raise InvalidInput(f"{where}: source and destination overlap but are not the same")
        if by_port and [self.ends[e].to for e in ends] != [self._peer(op, part) for part in op.dst_buff]:
            raise InvalidInput(f"{where}.channel_ids: must be one channel to the rank of each destination")
        if op.name.startswith("sem_"):
            bad = [s for s in op.semaphore_ids if s >= len(gpu.semaphores)]
            if bad or not op.semaphore_ids:
                raise InvalidInput(f"{where}.semaphore_ids: must be of the {len(gpu.semaphores)} there are, not {bad}")
        if op.name == "barrier" and (op.barrier_id is None or not 1 <= op.num_threadblocks <= len(gpu.threadblocks)):
            raise InvalidInput(f"{where}: barrier needs barrier_id and num_threadblocks 1..{len(gpu.threadblocks)}")
        action = ResolvedOp(
            name="pws" if op.name == "pwsf" else op.name,
            src=src,
            dst=dst,
            ends=ends,
            semaphores=tuple(self.first_semaphore + s for s in op.semaphore_ids),
            barrier=-1 if op.barrier_id is None else op.barrier_id,
            blocks=op.num_threadblocks,
            op=k,
        )
        return (action, ResolvedOp(name="flush", ends=ends, op=k)) if op.name == "pwsf" else (action,)

    def _ends(self, where: str, op: Operation) -> tuple[int, ...]:
        tb = self.plan.gpus[self.rank].threadblocks[self.block]
        mine = [c for refs in tb.channels if refs.channel_type == op.channel_type for c in refs.channel_ids]
        ends = []
        for c in op.channel_ids:
            if c >= len(mine) or (self.rank, op.channel_type, mine[c]) not in self.number:
                raise InvalidInput(f"{where}.channel_ids: {op.channel_type} channel {c} does not exist here")
            ends.append(self.number[self.rank, op.channel_type, mine[c]])
        if not ends or len(set(ends)) < len(ends):
            raise InvalidInput(f"{where}.channel_ids: must be one or more different channels")
        return tuple(ends)

    def _remote(self, op: Operation, part: ChunkRange) -> RemoteBuffer | None:
        gpu = self.plan.gpus[self.rank]
        refs = gpu.threadblocks[self.block].remote_buffer_refs
        mine = [b for r in refs if r.access_channel_type == op.channel_type for b in r.remote_buffer_ids]
        if part.buffer_id is None or part.buffer_id >= len(mine) or mine[part.buffer_id] >= len(gpu.remote_buffers):
            return None
        found = gpu.remote_buffers[mine[part.buffer_id]]
        return found if op.channel_type in found.access_channel_types else None

    def _peer(self, op: Operation, part: ChunkRange) -> int:
        remote = self._remote(op, part)
        return self.rank if remote is None else remote.rank

    def _rows(self, where: str, op: Operation, part: ChunkRange) -> Rows:
        if (part.type is None) == (part.buffer_id is None):
            raise InvalidInput(f"{where}: needs either type or buffer_id")
        rank, buffer = self.rank, part.type
        if buffer is None:
            remote = self._remote(op, part)
            if remote is None:
                raise InvalidInput(
                    f"{where}.buffer_id: {part.buffer_id} is no peer's buffer reached by {op.channel_type}"
                )
            rank, buffer = remote.rank, remote.type
        rows = self.buffers[rank][buffer]
        if part.index + part.size > rows.count:
            raise InvalidInput(
                f"{where}: {buffer}[{part.index}:{part.index + part.size}] of rank {rank} does not exist; "
                f"it has {rows.count} chunks"
            )
        return Rows(at=rows.at + part.index, count=part.size)

    def _check_shape(self, where: str, op: Operation) -> None:
        """Refuse an operation whose sources and destinations are not of the right number, kind and size."""
        shapes = SHAPES.get(op.name, ("", ""))
        for key, parts, shape in zip(("src_buff", "dst_buff"), (op.src_buff, op.dst_buff), shapes, strict=True):
            got = "".join("r" if p.type is None else "l" for p in parts)
            if not re.fullmatch(shape, got):
                raise InvalidInput(
                    f"{where}.{key}: {op.name} takes {shape or 'none'} (l: own, r: a peer's, +: or more), "
                    f"not {got or 'none'}"
                )
        src, dst = [p.size for p in op.src_buff], [p.size for p in op.dst_buff]
        if (src != dst) if op.name in PAIRWISE else len({*src, *dst}) > 1:
            raise InvalidInput(f"{where}: sources and destinations differ in size")
        if op.name in ("put", "pws", "pwsf") and len({p.type for p in op.src_buff}) > 1:
            raise InvalidInput(f"{where}.src_buff: all sources of a {op.name} must lie in one buffer")


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of checking a plan: the interleavings and launches in which it was right."""

    plan: str
    collective: Collective
    operations: int
    interleavings: int
    launches: int

    def __str__(self) -> str:
        runs = f"{self.interleavings} interleaving{'s' * (self.interleavings != 1)}"
        launches = f"{self.launches} launch{'es' * (self.launches != 1)}"
        size = f"{self.operations} operations over {self.collective.num_ranks} ranks"
        return f"{self.plan}: right and free of races in {runs} of {launches} ({size})"


def collective_of(plan: ExecutionPlan) -> Collective:
    """The collective that a plan claims to carry out, from the name and chunk counts in it."""
    if plan.collective not in COLLECTIVES:
        raise unknown("collective", plan.collective, COLLECTIVES)
    ranks = len(plan.gpus)
    counts = {(g.input_chunks, g.output_chunks) for g in plan.gpus}
    n_in, n_out = min(counts)
    fits = {
        "allgather": n_out == ranks * n_in,
        "reducescatter": n_in == ranks * n_out,
        "alltoall": n_in == n_out and n_in % ranks == 0,
    }.get(plan.collective, n_in == n_out)
    if len(counts) > 1 or not fits:
        raise InvalidInput(f"gpus: {n_in} input and {n_out} output chunks are not those of an {plan.collective}")
    if plan.collective == "allgather":
        return AllGather(ranks, chunks=n_in, in_place=plan.inplace)
    if plan.collective == "reducescatter":
        return ReduceScatter(ranks, chunks=n_out, in_place=plan.inplace)
    if plan.collective == "alltoall":
        return AllToAll(ranks, chunks=n_in // ranks, in_place=plan.inplace)
    if plan.collective == "broadcast":
        return Broadcast(ranks, root=plan.root or 0, chunks=n_in, in_place=plan.inplace)
    return AllReduce(ranks, chunks=n_in, in_place=plan.inplace)


def execute(plan: ExecutionPlan, inputs: Sequence[Data], *, seed: int = 0) -> list[Data]:
    """Run a plan once, in one interleaving.

    Args:
        plan: The plan.
        inputs: The input of each rank, as an array (chunks, elements).
        seed: The seed of the interleaving.

    Returns:
        The output of each rank, as an array (chunks, elements).

    Raises:
        VerificationError: A race, a deadlock, or a launch that leaves signals behind.
        InvalidInput: The inputs do not have the plan's shape.
    """
    check_seed(seed)
    if len(inputs) != len(plan.gpus):
        raise InvalidInput(f"inputs: must be one array for each of the {len(plan.gpus)} ranks, not {len(inputs)}")
    elements = inputs[0].shape[-1]
    for r, (gpu, data) in enumerate(zip(plan.gpus, inputs, strict=True)):
        if data.shape != (gpu.input_chunks, elements):
            raise InvalidInput(f"inputs[{r}]: must have the shape {(gpu.input_chunks, elements)}, not {data.shape}")
    return Machine(resolve(plan), elements=elements, seed=seed).run([inputs])[0]


def check(
    plan: ExecutionPlan, collective: Collective, *, seeds: Sequence[int] = (0, 1, 2), launches: int = 2
) -> Outcome:
    """Run a plan on random data and compare with what a collective demands.

    The launches follow each other without the ranks waiting for one another, as in a training loop.

    Args:
        plan: The plan.
        collective: The collective that it is to carry out.
        seeds: One interleaving (and data) per seed.
        launches: How many launches follow one another, >= 1.

    Returns:
        What was run.

    Raises:
        VerificationError: An output is wrong, or there is a race or a deadlock.
        InvalidInput: The collective has another number of ranks.
    """
    if collective.num_ranks != len(plan.gpus):
        raise InvalidInput(f"collective: has {collective.num_ranks} ranks, the plan {len(plan.gpus)}")
    image = resolve(plan)
    for seed in seeds:
        check_seed(seed)
        rng = np.random.default_rng(seed)
        machine = Machine(image, elements=image.widest, seed=seed)
        cases = [_case(plan, collective, image.widest, rng) for _ in range(launches)]
        outputs = machine.run([inputs for inputs, _ in cases])
        for launch, (_, wanted) in enumerate(cases):
            for rank, want in enumerate(wanted):
                wrong = np.flatnonzero(np.any(outputs[launch][rank] != want, axis=1))
                if len(wrong):
                    raise VerificationError(f"o[{wrong[0]}] of rank {rank} is wrong after launch {launch}, seed {seed}")
    operations = sum(len(tb.ops) for gpu in plan.gpus for tb in gpu.threadblocks)
    return Outcome(
        plan=plan.name,
        collective=collective,
        operations=operations,
        interleavings=len(seeds),
        launches=launches,
    )


def check_plan(plan: ExecutionPlan, *, seeds: Sequence[int] = (0, 1, 2), launches: int = 2) -> Outcome:
    """Run a plan and compare with the collective that it names itself.

    Args:
        plan: The plan.
        seeds: One interleaving (and data) per seed.
        launches: How many launches follow one another, >= 1.

    Returns:
        What was run.

    Raises:
        VerificationError: An output is wrong, or there is a race or a deadlock.
    """
    return check(plan, collective_of(plan), seeds=seeds, launches=launches)


def _case(
    plan: ExecutionPlan, collective: Collective, elements: int, rng: np.random.Generator
) -> tuple[list[Data], list[Data]]:
    """Random inputs (whole numbers, so that sums are exact in any order) and the outputs to expect from them."""
    c = collective
    values = rng.integers(1, 1 << 30, (len(c.in_chunk), elements)).astype(np.float64)
    start = dict(zip(zip(c.in_chunk.tolist(), c.in_part.tolist(), strict=True), values, strict=True))
    inputs, wanted = [], []
    for r, gpu in enumerate(plan.gpus):
        mine = np.full((gpu.input_chunks, elements), np.nan)
        mine[: len(c.inputs(r))] = values[c.in_ptr[r] : c.in_ptr[r + 1]]
        inputs.append(mine)
        want = [
            np.sum([start[int(c.out_chunk[k]), part] for part in c.parts_of(k)], axis=0)
            for k in range(int(c.out_ptr[r]), int(c.out_ptr[r + 1]))
        ]
        wanted.append(np.array(want).reshape(len(want), elements))
    return inputs, wanted
