# SPDX-License-Identifier: Apache-2.0
"""The reader of MSCCL++ execution plans: it reads them, checks them, runs them on data, and compares the results.

Only the format's own definition is used here, so that a mistake of the exporter cannot hide in its reader.
`loads` accepts memory, port and switch channels, packets (LL), loops (`pipeline`) and threadblock groups; what else the
format has is refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil
from typing import Annotated, Literal

import msgspec
import numpy as np
from msgspec import Meta

from ...collectives import AllGather, AllReduce, AllToAll, Broadcast, Collective, ReduceScatter
from ...errors import InvalidInput, VerificationError, unknown
from ...files import convert, parse_json
from ...units import check_seed
from .mscclpp_machine import PACKETS, Data, End, Image, Machine, ResolvedOp, Rows
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
    "res": ("l+", "lr+"),
    "rre": ("lr+", "l"),
    "rres": ("lr+", "lr+"),
    "ppkt": ("l+", "r+"),
    "rppkt": ("l", "r+"),
    "cpkt": ("l", "l"),
    "upkt": ("l", "l"),
    "repkt": ("ll+", "l"),
    "respkt": ("ll+", "lr+"),
    "recpkt": ("ll+", "ll"),
    "recspkt": ("ll+", "llr+"),
    "glres": ("m", "m"),
    "gstore": ("l", "m"),
}
"""The sources and destinations of each data operation as patterns: l is this rank's, r a peer's, m all ranks' of a
switch channel, + one or more."""
PAIRWISE = ("get", "put", "pws", "pwsf", "ppkt")
"""Operations that move each source to its own destination; all other operations need sources of one size."""
CHANNELS = {
    **dict.fromkeys(("signal", "rlxsignal", "wait", "rlxwait", "put"), ("memory", "port")),
    **dict.fromkeys(("pws", "pwsf", "flush"), ("port",)),
    **dict.fromkeys(("get", "res", "rre", "rres", "ppkt", "rppkt", "respkt", "recspkt"), ("memory",)),
    **dict.fromkeys(("glres", "gstore"), ("switch",)),
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
    "pipeline",
    *SHAPES,
)
ELSEWHERE = {"packets over switch channels": ("gstorepkt",), "unfused reductions in a switch": ("glre",)}
TURNS, MOST_TURNS = 3, 24
"""How many turns the shortest loop of a plan has here, and the longest one at most; how many they have on a GPU depends
on the size of a call, but always in this proportion."""

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
    switch_channel_id: Index | None = None


class Group(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """The slice of its work that one threadblock of a group does."""

    tb_id: Index
    tbg_size: Annotated[int, Meta(ge=1, le=1024)]


class Loop(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """A loop runs over `num_chunks` chunks, `unit_size` bytes at a time."""

    unit_size: Annotated[int, Meta(ge=1, lt=1 << 32)]
    num_chunks: Annotated[int, Meta(ge=1, le=MAX_CHUNKS)]


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
    tbg_info: Group | None = None
    iter_context: Loop | None = None
    ops: Annotated[tuple[Operation, ...], Meta(max_length=MAX_OPS)] = ()


class ChannelRefs(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """The channels of one type a threadblock uses, by their number on the rank."""

    channel_type: Kind | Literal["switch"]
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


class RankGroup(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """The ranks that a switch channel connects."""

    size: Index
    ranks: Annotated[tuple[Index, ...], Meta(max_length=1024)]


class Channels(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """Channels of one type: the peer each is connected to, or the ranks and the buffer of each switch channel."""

    channel_type: Kind | Literal["switch"]
    connected_to: Annotated[tuple[Index, ...], Meta(max_length=1 << 16)] = ()
    buffer_type: Buffer | None = None
    rank_groups: Annotated[tuple[RankGroup, ...], Meta(max_length=16)] = ()


class RemoteBuffer(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """A peer's buffer this rank may reach."""

    rank: Index
    type: Buffer
    access_channel_types: Annotated[tuple[Kind, ...], Meta(max_length=2)]


class Semaphore(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """A counter that the threadblocks of a rank share."""

    init_value: Annotated[int, Meta(ge=0, le=1 << 16)]


class GpuInstructions(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
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

    def switches(self) -> list[tuple[Buffer, tuple[int, ...]]]:
        """The buffer and the ranks of each switch channel."""
        found = [c for c in self.channels if c.channel_type == "switch" and c.buffer_type is not None]
        return [(c.buffer_type, group.ranks) for c in found for group in c.rank_groups if c.buffer_type is not None]


class ExecutionPlan(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """An execution plan. `root` is Stretto's addition: the format has no place for it, and the executor ignores it."""

    name: str
    collective: Name
    protocol: Name
    inplace: bool
    gpus: Annotated[tuple[GpuInstructions, ...], Meta(min_length=1, max_length=MAX_RANKS)]
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
    if plan.protocol not in ("Simple", "LL"):
        raise InvalidInput(f"{where}: {unknown('protocol', plan.protocol, ('Simple', 'LL'))}")
    if plan.use_double_scratch_buffer and plan.protocol != "LL":
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
    turns = _turns(plan)
    total = sum(
        1 + len(op.ops) * (turns[op.iter_context] if op.iter_context else 1)
        for g in plan.gpus for tb in g.threadblocks for op in tb.ops
    )  # fmt: skip
    if total > MAX_TOTAL_OPS:
        raise InvalidInput(f"gpus: more than {MAX_TOTAL_OPS} operations in all")
    buffers, rows = _lay_out(plan)
    ends, number = _pair(plan)
    first_semaphore = np.cumsum([0, *(len(gpu.semaphores) for gpu in plan.gpus)]).tolist()
    blocks = []
    for r, gpu in enumerate(plan.gpus):
        for b, tb in enumerate(gpu.threadblocks):
            if tb.id != b:
                raise InvalidInput(f"gpus[{r}].threadblocks[{b}].id: must be {b}, not {tb.id}")
            scope = _Scope(plan, r, b, buffers, ends, number, first_semaphore[r], turns)
            blocks.append((r, b, tuple(a for k, op in enumerate(tb.ops) for a in scope.operation(k, op))))
    semaphores = tuple(s.init_value for gpu in plan.gpus for s in gpu.semaphores)
    if sum(semaphores) > MAX_TOTAL_OPS:
        raise InvalidInput(f"gpus: semaphores start at {sum(semaphores)} in all; at most {MAX_TOTAL_OPS}")
    half = 2 * max(gpu.scratch_chunks for gpu in plan.gpus) if plan.use_double_scratch_buffer else 0
    return Image(blocks=tuple(blocks), ends=ends, semaphores=semaphores, rows=rows, buffers=buffers, double=half)


def _turns(plan: ExecutionPlan) -> dict[Loop, int]:
    """How many turns each loop has here."""
    loops = {op.iter_context for gpu in plan.gpus for tb in gpu.threadblocks for op in tb.ops if op.iter_context}
    length = {loop: Fraction(loop.num_chunks, loop.unit_size) for loop in loops}
    if not length:
        return {}
    chunk_bytes = min(TURNS / min(length.values()), MOST_TURNS / max(length.values()))
    return {loop: ceil(chunk_bytes * length[loop]) for loop in loops}


def _lay_out(plan: ExecutionPlan) -> tuple[tuple[dict[str, Rows], ...], int]:
    """Rows for every buffer; in place, the smaller of input and output is a part of the other."""
    total = sum(g.input_chunks + g.output_chunks + 4 * g.scratch_chunks for g in plan.gpus)
    if plan.use_double_scratch_buffer and len({g.scratch_chunks for g in plan.gpus}) > 1:
        raise InvalidInput("gpus: double scratch must be of one size on all ranks, which find its halves alike")
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
        # A packet takes twice its data, and double scratch twice that.
        scratch = gpu.scratch_chunks * (2 if plan.protocol == "LL" else 1)
        buffers.append(
            {
                "i": Rows(at=i, count=n_in),
                "o": Rows(at=o, count=n_out),
                "s": Rows(at=end, count=scratch, scratch=True),
            }
        )
        at = end + scratch * (2 if plan.use_double_scratch_buffer else 1)
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
    turns: dict[Loop, int]

    def operation(self, k: int, op: Operation) -> tuple[ResolvedOp, ...]:
        """The machine's actions for one operation; a loop becomes those of a few turns."""
        where = f"gpus[{self.rank}].threadblocks[{self.block}].ops[{k}]"
        if op.name != "pipeline":
            if op.ops or op.iter_context:
                raise InvalidInput(f"{where}: {op.name} has no operations of its own; only a pipeline has")
            return self.actions(k, where, op)
        if op.iter_context is None:
            raise InvalidInput(f"{where}.iter_context: a pipeline must say what it runs over")
        for j, inner in enumerate(op.ops):
            parts = inner.tbg_info.tbg_size if inner.tbg_info else 1
            if inner.name == "pipeline" or inner.name in PACKETS:
                raise InvalidInput(f"{where}.ops[{j}]: a pipeline cannot hold a {inner.name}")
            if any(p.size != op.iter_context.num_chunks * parts for p in (*inner.src_buff, *inner.dst_buff)):
                raise InvalidInput(f"{where}.ops[{j}]: must move the {op.iter_context.num_chunks} chunks of its loop")
        turns = self.turns[op.iter_context]
        return tuple(
            action
            for turn in range(turns)
            for j, inner in enumerate(op.ops)
            for action in self.actions(k, f"{where}.ops[{j}]", inner, (turn, turns))
        )

    def actions(self, k: int, where: str, op: Operation, turn: tuple[int, int] = (0, 1)) -> tuple[ResolvedOp, ...]:
        """The machine's actions for one operation (`pwsf` becomes two), in one turn of so many if it is in a loop."""
        gpu = self.plan.gpus[self.rank]
        kinds = CHANNELS.get(op.name, (op.channel_type,))
        if op.channel_type not in kinds:
            raise InvalidInput(f"{where}.channel_type: {op.name} needs {' or '.join(kinds)}, not {op.channel_type}")
        by_port = op.channel_type == "port" and op.name in SHAPES
        ends = self._ends(where, op) if by_port or op.name in CHANNELS.keys() - SHAPES.keys() else ()
        self._check_shape(where, op)
        src, dst = (
            tuple(
                self._cut(where, op, rows, turn, packet=_is_packet(op.name, side, j))
                for j, part in enumerate(parts)
                for rows in self._rows(f"{where}.{key}[{j}]", op, part, packet=_is_packet(op.name, side, j))
            )
            for side, (key, parts) in enumerate((("src_buff", op.src_buff), ("dst_buff", op.dst_buff)))
        )
        plain = [[(r.at, r.count) for r in rows if not r.packet] for rows in (src, dst)]
        if any(a != b and a[0] < b[0] + b[1] and b[0] < a[0] + a[1] for a in plain[0] for b in plain[1]):
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

    def _cut(self, where: str, op: Operation, rows: Rows, turn: tuple[int, int], *, packet: bool) -> Rows:
        """The slice of a threadblock group, and the turn of a loop."""
        group = op.tbg_info or Group(tb_id=0, tbg_size=1)
        if group.tb_id >= group.tbg_size:
            raise InvalidInput(f"{where}.tbg_info: tb_id must be below tbg_size {group.tbg_size}, not {group.tb_id}")
        return Rows(
            at=rows.at,
            count=rows.count,
            part=group.tb_id,
            parts=group.tbg_size,
            turn=turn[0],
            turns=turn[1],
            packet=packet,
            scratch=rows.scratch,
        )

    def _rows(self, where: str, op: Operation, part: ChunkRange, *, packet: bool) -> list[Rows]:
        """The rows of one source or destination; those of a switch channel are of all its ranks."""
        if sum(x is not None for x in (part.type, part.buffer_id, part.switch_channel_id)) != 1:
            raise InvalidInput(f"{where}: needs either type or buffer_id or switch_channel_id")
        if part.switch_channel_id is not None:
            tb = self.plan.gpus[self.rank].threadblocks[self.block]
            mine = [c for refs in tb.channels if refs.channel_type == "switch" for c in refs.channel_ids]
            known = self.plan.gpus[self.rank].switches()
            if part.switch_channel_id >= len(mine) or mine[part.switch_channel_id] >= len(known):
                raise InvalidInput(f"{where}.switch_channel_id: {part.switch_channel_id} does not exist here")
            kind, group = known[mine[part.switch_channel_id]]
            if self.rank not in group or any(r >= len(self.plan.gpus) for r in group):
                raise InvalidInput(f"{where}.switch_channel_id: its ranks must exist, and have rank {self.rank}")
            return [self._place(where, r, kind, part, packet=False) for r in group]
        rank, buffer = self.rank, part.type
        if buffer is None:
            remote = self._remote(op, part)
            if remote is None:
                raise InvalidInput(
                    f"{where}.buffer_id: {part.buffer_id} is no peer's buffer reached by {op.channel_type}"
                )
            rank, buffer = remote.rank, remote.type
            if self.plan.use_double_scratch_buffer and buffer == "s" and not packet:
                raise InvalidInput(f"{where}: only packets find the right half of a peer's double scratch")
        if packet and (buffer != "s" or self.plan.protocol != "LL"):
            raise InvalidInput(f"{where}: packets must lie in scratch, and the protocol must be LL")
        return [self._place(where, rank, buffer, part, packet=packet)]

    def _place(self, where: str, rank: int, buffer: Buffer, part: ChunkRange, *, packet: bool) -> Rows:
        rows, room = self.buffers[rank][buffer], 2 if packet else 1
        if (part.index + part.size) * room > rows.count:
            raise InvalidInput(
                f"{where}: {buffer}[{part.index}:{part.index + part.size}] of rank {rank} does not exist; "
                f"it has {rows.count // room} chunks"
            )
        return Rows(at=rows.at + part.index * room, count=part.size, scratch=rows.scratch)

    def _check_shape(self, where: str, op: Operation) -> None:
        """Refuse an operation whose sources and destinations are not of the right number, kind and size."""
        shapes = SHAPES.get(op.name, ("", ""))
        for key, parts, shape in zip(("src_buff", "dst_buff"), (op.src_buff, op.dst_buff), shapes, strict=True):
            got = "".join("m" if p.switch_channel_id is not None else "r" if p.type is None else "l" for p in parts)
            if not re.fullmatch(shape, got):
                raise InvalidInput(
                    f"{where}.{key}: {op.name} takes {shape or 'none'} (l: own, r: a peer's, m: a switch, +: or more), "
                    f"not {got or 'none'}"
                )
        src, dst = [p.size for p in op.src_buff], [p.size for p in op.dst_buff]
        if (src != dst) if op.name in PAIRWISE else len({*src, *dst}) > 1:
            raise InvalidInput(f"{where}: sources and destinations differ in size")
        if op.name in ("put", "pws", "pwsf", "ppkt") and len({p.type for p in op.src_buff}) > 1:
            raise InvalidInput(f"{where}.src_buff: all sources of a {op.name} must lie in one buffer")


def _is_packet(name: str, side: int, at: int) -> bool:
    """Whether a source (side 0) or destination (1) of an operation is a packet."""
    shape = PACKETS.get(name, ("l", "l"))[side]
    return bool(shape.rstrip("+")[min(at, len(shape.rstrip("+")) - 1)] == "k")


@dataclass(frozen=True, kw_only=True)
class ExecutionPlanCheck:
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
    plan: ExecutionPlan, collective: Collective, *, seeds: Sequence[int] = (0, 1, 2), launches: int | None = None
) -> ExecutionPlanCheck:
    """Run a plan on random data and compare with what a collective demands.

    The launches follow each other without the ranks waiting for one another, as in a training loop.

    Args:
        plan: The plan.
        collective: The collective that it is to carry out.
        seeds: One interleaving (and data) per seed.
        launches: How many launches follow one another, >= 1; by default 2, or 4 where scratch is double.

    Returns:
        What was run.

    Raises:
        VerificationError: An output is wrong, or there is a race or a deadlock.
        InvalidInput: The collective has another number of ranks.
    """
    launches = (4 if plan.use_double_scratch_buffer else 2) if launches is None else launches
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
    return ExecutionPlanCheck(
        plan=plan.name,
        collective=collective,
        operations=operations,
        interleavings=len(seeds),
        launches=launches,
    )


def check_plan(
    plan: ExecutionPlan, *, seeds: Sequence[int] = (0, 1, 2), launches: int | None = None
) -> ExecutionPlanCheck:
    """Run a plan and compare with the collective that it names itself.

    Args:
        plan: The plan.
        seeds: One interleaving (and data) per seed.
        launches: How many launches follow one another, >= 1; by default 2, or 4 where scratch is double.

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
