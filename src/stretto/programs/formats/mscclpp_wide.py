# SPDX-License-Identifier: Apache-2.0
"""The writer of MSCCL++ plans made of wide steps: few operations that each do much.

Every stream of steps becomes a group of threadblocks that all run the same operations, each on its slice of every
chunk (`tbg_info`), and talk only to the threadblock with the same slice on other ranks. Protocol Simple reads and
writes peers' user memory directly and signals before and after; LL sends packets through doubled scratch and needs no
signal at all. `docs/mscclpp.md` says what the executor asks for.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from ...errors import InvalidInput, unknown
from ..ir import Program
from ..wide import PACKET, WideProgram, widen
from .mscclpp_json import MAX_LABEL, MAX_OPS, MAX_THREADBLOCKS, NO_LIMIT, check_collective
from .mscclpp_wide_ops import EVERYBODY, BlockWriter, WideOp
from .mscclpp_wide_sync import StreamSync, unheard_packets

PROTOCOLS = ("Simple", "LL")
ALIGNMENT = 16
LEAST_THREADS, MOST_THREADS = 32, 1024


@dataclass(frozen=True, kw_only=True)
class PlanForm:
    """How a plan of wide steps is carried out.

    >>> PlanForm.parse("protocol=LL,streams=8").slices
    1
    """

    protocol: str = "Simple"
    """"Simple", or "LL" for packets: twice the bytes, but nobody waits for a signal."""
    streams: int = 1
    """Into how many streams the chunks are divided, at most; each is a group of threadblocks of its own."""
    slices: int = 1
    """How many threadblocks share the work of each stream, slice by slice."""
    threads: int = MOST_THREADS
    """The threads of a threadblock."""
    loop_bytes: int = 0
    """Let every threadblock loop over so many bytes of its slice at a time; 0: all at once."""
    multicast: int = 0
    """1 lets switches add up and copy what all ranks have in the same place (NVLink SHARP)."""
    apart: int = 0
    """1 lets packets that are sent, taken, and of different peers be streams of their own."""
    halves: int = 0
    """1 lets a threadblock add everything up first and copy the results then, each in a loop of its own."""
    pull: int = 0
    """1 lets every step have one peer: receivers read copies, and parts of sums are put into the receiver's scratch."""
    longest: int = 0
    """The most chunks that are one piece, of those that travel alike; 0: all of them."""

    def __post_init__(self) -> None:
        if self.protocol not in PROTOCOLS:
            raise unknown("protocol", self.protocol, PROTOCOLS)
        for key, most in (("streams", 1024), ("slices", 1024)):
            if not 1 <= getattr(self, key) <= most:
                raise InvalidInput(f"{key}: must be 1..{most}, not {getattr(self, key)}")
        if not LEAST_THREADS <= self.threads <= MOST_THREADS or self.threads % 32:
            raise InvalidInput(f"threads: must be {LEAST_THREADS}..{MOST_THREADS} in steps of 32, not {self.threads}")
        if not 0 <= self.loop_bytes < 1 << 32 or self.loop_bytes % ALIGNMENT:
            raise InvalidInput(f"loop_bytes: must be a multiple of {ALIGNMENT} below 2^32, not {self.loop_bytes}")
        if self.longest < 0:
            raise InvalidInput(f"longest: must be >= 0, not {self.longest}")
        for key in ("multicast", "apart", "halves", "pull"):
            if getattr(self, key) not in (0, 1):
                raise InvalidInput(f"{key}: must be 0 or 1, not {getattr(self, key)}")
        if self.apart and self.protocol != "LL":
            raise InvalidInput("apart: only packets keep their order by themselves; choose protocol LL")
        if self.pull and self.protocol == "LL":
            raise InvalidInput("pull: packets are sent; choose protocol Simple")
        if self.halves and not self.loop_bytes:
            raise InvalidInput("halves: is for loops; give loop_bytes")
        if self.loop_bytes and self.protocol == "LL":
            raise InvalidInput("loop_bytes: packets cannot be sent in a loop; choose protocol Simple")

    @classmethod
    def parse(cls, text: str) -> PlanForm:
        """The form of a text such as ``protocol=LL,streams=8,slices=2``; what it does not say is as by default."""
        found: dict[str, Any] = {}
        for pair in filter(None, text.split(",")):
            key, equals, value = pair.partition("=")
            if key not in cls.__dataclass_fields__:
                raise unknown("part of a form", key, cls.__dataclass_fields__)
            if not equals or (key != "protocol" and not value.isdecimal()):
                raise InvalidInput(f"{key}: must be KEY=VALUE with a whole number, not {pair!r}")
            found[key] = value if key == "protocol" else int(value)
        return cls(**found)

    def __str__(self) -> str:
        default = PlanForm()
        parts = [k for k in self.__dataclass_fields__ if k != "protocol" and getattr(self, k) != getattr(default, k)]
        return ",".join([f"protocol={self.protocol}", *(f"{key}={getattr(self, key)}" for key in parts)])


def widen_in(program: Program, form: PlanForm) -> WideProgram:
    """The wide steps of a program as a form divides them."""
    return widen(
        program,
        packets=form.protocol == "LL",
        streams=form.streams,
        apart=bool(form.apart),
        halves=bool(form.halves),
        pull=bool(form.pull),
        longest=form.longest,
    )


def dumps(
    program: Program,
    *,
    form: PlanForm | None = None,
    max_threadblocks: int = MAX_THREADBLOCKS,
    min_bytes: int = 0,
    max_bytes: int = 0,
) -> str:
    """The JSON execution plan of a program's wide steps.

    The user's buffers must lie at the same offset inside their allocation on every rank (protocol Simple), which the
    executor asks for wherever peers reach into them.

    Args:
        program: The program; it is verified first.
        form: How its steps are carried out; by default in one threadblock, with signals.
        max_threadblocks: How many threadblocks a rank may have.
        min_bytes: The smallest call that the plan is for.
        max_bytes: The largest call; 0 for no limit.

    Returns:
        The text of the plan, whose name is its content's, as of `mscclpp_json.dumps`.

    Raises:
        InvalidInput: An argument is out of range, or the format or the executor cannot hold the program.
        VerificationError: The program does not do what its collective asks.
    """
    if max_threadblocks < 1:
        raise InvalidInput(f"max_threadblocks: must be >= 1, not {max_threadblocks}")
    if not 0 <= min_bytes <= (max_bytes or NO_LIMIT):
        raise InvalidInput(f"min_bytes: must be 0..max_bytes, not {min_bytes}")
    name = check_collective(program.collective)
    form = form or PlanForm()
    wide = widen_in(program, form)
    plan: dict[str, Any] = {
        "collective": name,
        "protocol": form.protocol,
        "inplace": program.collective.in_place,
        "reuse_resources": False,
        "gpus": _PlanWriter(wide, form, max_threadblocks).gpus(),
        "num_threads_per_block": form.threads,
        "use_double_scratch_buffer": form.protocol == "LL",
        "buffer_alignment": ALIGNMENT,
        "min_message_size": min_bytes,
        "max_message_size": max_bytes or NO_LIMIT,
    }
    if program.collective.root >= 0:
        plan["root"] = program.collective.root
    content = json.dumps(plan, sort_keys=True, separators=(",", ":"))
    digest = hashlib.sha256(content.encode()).hexdigest()[:16]
    ranks = program.collective.num_ranks
    label = f"{program.name[:MAX_LABEL]}-{name}-{ranks}ranks-{form.protocol}-{digest}"
    return json.dumps({"name": label, **plan}, indent=1) + "\n"


class _PlanWriter:
    """Renders the streams of all ranks."""

    def __init__(self, wide: WideProgram, form: PlanForm, max_threadblocks: int) -> None:
        self.wide, self.slices = wide, form.slices
        slices, self.loop_bytes = form.slices, form.loop_bytes
        self.multicast = wide.program.collective.num_ranks if form.multicast else 0
        self.ranks = wide.program.collective.num_ranks
        # Packets take two chunks of scratch each, and lie behind what is stored plainly.
        self.packet_base = [(plain + 1) // 2 for plain in wide.scratch]
        self.blocks: list[list[list[list[WideOp]]]] = [[] for _ in range(self.ranks)]
        self.semaphores = [0] * self.ranks
        self.talks: set[tuple[int, int, int]] = set()
        for stream in range(wide.streams):
            self._write_stream(stream)
        # Half of the scratch is used again two launches later: by then the writer has heard from the reader's next.
        for writer, reader in unheard_packets(wide):
            raise InvalidInput(
                f"protocol: rank {writer} sends to rank {reader} and hears nothing from it, so packets of a later "
                "launch could overwrite unread ones; choose Simple"
            )
        for r, mine in enumerate(self.blocks):
            count = slices * sum(len(pieces) for pieces in mine)
            if count > max_threadblocks:
                what = f"{count} threadblocks are more than max_threadblocks {max_threadblocks}"
                raise InvalidInput(f"rank {r}: {what} ({wide.streams} streams of {slices} slices)")

    def _write_stream(self, stream: int) -> None:
        written: list[list[WideOp]] = [[] for _ in range(self.ranks)]
        for number, steps in enumerate(self.wide.phases(stream)):
            sync = StreamSync(steps, self.ranks, packets=any(self.wide.slots))
            counts = {s.count for s in steps}
            if self.loop_bytes and (len(counts) > 1 or min(counts, default=1) % self.slices):
                raise InvalidInput(
                    f"loop_bytes: pieces of {sorted(counts)} chunks in one stream cannot be shared by {self.slices} "
                    "slices in a loop"
                )
            for r in range(self.ranks):
                ops = self._write_phase(r, sync, min(counts, default=1) // self.slices, first=not number)
                written[r] += [WideOp(name="nop"), *ops] if number and ops else ops
        for r, ops in enumerate(written):
            self.talks |= {(min(r, q), max(r, q), stream) for op in ops for q in op.all_peers()}
            self.blocks[r].append(self._cut(r, ops))

    def _write_phase(self, r: int, sync: StreamSync, count: int, *, first: bool) -> list[WideOp]:
        """The operations of a rank for some steps; before the first ones nothing has been written."""
        block = BlockWriter(
            r, in_place=self.wide.program.collective.in_place, once=sync.touched_once, multicast=self.multicast
        )
        block.signal(sync.signals(r, 0), relaxed=first)
        if self.loop_bytes:
            block.wait(sync.first_waits(r), relaxed=first)
            block.meet()
        body = len(block.ops)
        for step, waits, signals in sync.schedule(r):
            if not self.loop_bytes:
                block.wait([q for q, need in waits if need == 0], relaxed=True)
            block.wait([q for q, need in waits if need > 0])
            block.step(step)
            block.signal(signals)
        if self.loop_bytes and len(block.ops) > body:
            block.meet(always=True)  # The next turn begins where this one ends.
        after = len(block.ops)
        block.signal(sync.last_signals(r))
        block.wait(sync.last_waits(r))
        if not self.loop_bytes or after == body:
            return block.ops
        loop = WideOp(name="pipeline", inner=tuple(block.ops[body:after]), count=count)
        return [*block.ops[:body], loop, *block.ops[after:]]

    def _cut(self, rank: int, ops: list[WideOp]) -> list[list[WideOp]]:
        """Cut operations into pieces short enough for a threadblock; a semaphore hands over to the next piece."""
        if not ops:
            return []
        if sum(1 + len(op.inner) for op in ops) <= MAX_OPS:
            return [ops]
        if self.loop_bytes:
            raise InvalidInput(f"loop_bytes: rank {rank} has more than {MAX_OPS} operations in a stream; cut it more")
        pieces: list[list[WideOp]] = []
        rest, meet = ops, WideOp(name="nop")
        while len(rest) > MAX_OPS:
            head, rest = rest[: MAX_OPS - 2], rest[MAX_OPS - 2 :]
            number = self.semaphores[rank]
            self.semaphores[rank] += self.slices
            pieces.append([*head, meet, WideOp(name="sem_release", semaphore=number)])
            rest = [WideOp(name="sem_acquire", semaphore=number), meet, *rest]
        return [*pieces, rest]

    def gpus(self) -> list[dict[str, Any]]:
        """The part of the plan of every rank."""
        return [self._gpu(r) for r in range(self.ranks)]

    def _gpu(self, rank: int) -> dict[str, Any]:
        c = self.wide.program.collective
        remote: dict[tuple[int, str], int] = {}
        switches: dict[str, int] = {}
        for pieces in self.blocks[rank]:
            for op in (op for piece in pieces for outer in piece for op in (outer, *outer.inner)):
                for cell in (*op.src, *op.dst):
                    if cell[0] == EVERYBODY:
                        switches.setdefault(cell[1], len(switches))
                    elif cell[0] != rank:
                        remote.setdefault((cell[0], "s" if cell[1] == PACKET else cell[1]), len(remote))
        # Channels pair up by order: the k-th from a to b with the k-th from b to a, so both ends sort alike.
        channels = [
            (a + b - rank, stream, slice_)
            for a, b, stream in sorted(self.talks)
            if rank in (a, b)
            for slice_ in range(self.slices)
        ]
        number = {key: k for k, key in enumerate(channels)}
        blocks = [
            self._block(rank, ops, (stream, slice_), number, remote, switches)
            for stream, pieces in enumerate(self.blocks[rank])
            for ops in pieces
            for slice_ in range(self.slices)
        ]
        idle = {"ops": [{"name": "nop"}], "channels": [], "remote_buffer_refs": []}
        packets = any(self.wide.slots)
        return {
            "id": rank,
            "input_chunks": c.chunks if c.kind == "broadcast" else len(c.inputs(rank)),
            "output_chunks": len(c.outputs(rank)),
            # Peers address scratch alike, so every rank has as much as the one that needs most.
            "scratch_chunks": max(self.packet_base) + max(self.wide.slots) if packets else max(self.wide.scratch),
            "threadblocks": [{"id": k, **block} for k, block in enumerate(blocks or [idle])],
            "channels": [
                *([{"channel_type": "memory", "connected_to": [peer for peer, _, _ in channels]}] if channels else []),
                *(
                    {
                        "channel_type": "switch",
                        "buffer_type": buffer,
                        "rank_groups": [{"size": 1, "ranks": list(range(self.ranks))}],
                    }
                    for buffer in switches
                ),
            ],
            "remote_buffers": [
                {"rank": peer, "type": buffer, "access_channel_types": ["memory"]} for peer, buffer in remote
            ],
            "semaphores": [{"init_value": 0}] * self.semaphores[rank],
        }

    def _block(
        self,
        rank: int,
        ops: list[WideOp],
        at: tuple[int, int],
        number: dict[tuple[int, int, int], int],
        remote: dict[tuple[int, str], int],
        switches: dict[str, int],
    ) -> dict[str, Any]:
        stream, slice_ = at
        known: dict[str, list[int]] = defaultdict(list)

        def local(kind: str, value: int) -> int:
            if value not in known[kind]:
                known[kind].append(value)
            return known[kind].index(value)

        def place(cell: tuple[int, str, int], count: int) -> dict[str, Any]:
            owner, buffer, at = cell
            index = at + max(self.packet_base) if buffer == PACKET else at
            buffer = "s" if buffer == PACKET else buffer
            if owner == EVERYBODY:
                return {"switch_channel_id": local("switch", switches[buffer]), "index": index, "size": count}
            if owner == rank:
                return {"type": buffer, "index": index, "size": count}
            return {"buffer_id": local("buffer", remote[owner, buffer]), "index": index, "size": count}

        def render(op: WideOp) -> dict[str, Any]:
            out: dict[str, Any] = {"name": op.name}
            if op.src:
                out["src_buff"] = [place(cell, op.count) for cell in op.src]
                out["dst_buff"] = [place(cell, op.count) for cell in op.dst]
                if self.slices > 1:
                    out["tbg_info"] = {"tb_id": slice_, "tbg_size": self.slices}
            if op.peers:
                out["channel_ids"] = [local("channel", number[q, stream, slice_]) for q in op.peers]
            owners = {cell[0] for cell in (*op.src, *op.dst)}
            if op.peers or owners - {rank}:
                out["channel_type"] = "switch" if EVERYBODY in owners else "memory"
            if op.semaphore >= 0:
                out["semaphore_ids"] = [op.semaphore + slice_]
            if op.reduces:
                out["reduce_op"] = "sum"
            if op.inner:
                out["iter_context"] = {"unit_size": self.loop_bytes, "num_chunks": op.count}
                out["ops"] = [render(inner) for inner in op.inner]
            return out

        rendered = [render(op) for op in ops]
        refs, ids = known["buffer"], known["channel"]
        if max(len(refs), len(ids)) > 16:
            raise InvalidInput(f"rank {rank}: a stream reaches {len(refs)} buffers of peers; the executor takes 16")
        return {
            "ops": rendered,
            "channels": [
                {"channel_type": kind, "channel_ids": found}
                for kind, found in (("memory", ids), ("switch", known["switch"]))
                if found
            ],
            "remote_buffer_refs": [{"access_channel_type": "memory", "remote_buffer_ids": refs}] if refs else [],
        }
