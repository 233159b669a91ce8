# SPDX-License-Identifier: Apache-2.0
"""`Lowered`: a program as the instruction streams of each rank (what MSCCL calls an algorithm file)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..collectives import Collective
from ..collectives.conditions import MAX_ENTRIES
from ..errors import InvalidInput
from ..late import LateFunction

if TYPE_CHECKING:
    from .verify import VerificationReport

VERIFY_LOWERED: LateFunction[[Lowered], VerificationReport] = LateFunction("programs.verify.verify_lowered")

OPS = ("nop", "s", "r", "rcs", "rrs", "rrc", "rrcs", "cpy", "re")
NOP, SEND, RECV, RECV_COPY_SEND, RECV_REDUCE_SEND, RECV_REDUCE_COPY, RECV_REDUCE_COPY_SEND, COPY, REDUCE = range(9)
BUFFERS = ("i", "o", "s")
INPUT, OUTPUT, SCRATCH = range(3)
MAX_CHANNELS = 1 << 20
MAX_BYTES = (1 << 63) - 1
"""The largest size of a call that all file formats can write down."""

RECEIVES = np.array([False, False, True, True, True, True, True, False, False])
SENDS = np.array([False, True, False, True, True, False, True, False, False])
READS_SRC = np.array([False, True, False, False, True, True, True, True, True])
WRITES_DST = np.array([False, False, True, True, False, True, True, True, True])


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Lowered:
    """Threadblocks and their instructions, in arrays.

    Threadblock b belongs to rank ``tb_rank[b]`` and runs instructions ``tb_ptr[b]:tb_ptr[b+1]`` in order; it may
    own the connection to ``tb_send[b]`` and the one from ``tb_recv[b]`` (-1: none) on channel ``tb_channel[b]``.
    Threadblocks are sorted by rank; the j-th one of a rank has local id j. A connection (from, to, channel) is a
    FIFO; its j-th send meets its j-th receive. Instruction k does ``OPS[op[k]]`` on ``count[k]`` chunks; `OPS`
    is nop, s, r, rcs, rrs, rrc, rrcs, cpy, re, in this order:

    ====  ======================================================
    s     send src
    r     dst := received
    rcs   dst := received, and send it on
    rrs   send (received + src), store nothing
    rrc   dst := received + src
    rrcs  dst := received + src, and send that
    cpy   dst := src
    re    dst := dst + src
    nop   only waits
    ====  ======================================================

    Instruction k first waits until threadblock ``dep_tb[k]`` (local id, -1: none) of its rank has done ``dep_step[k]``.
    Offsets count chunks of buffers i (input), o (output), s (scratch). In place, input position j of rank r is
    output position ``j + collective.place[r]``: both names mean one piece of memory.

    `instances` copies of the program run beside each other, each on a part of every chunk. The streams are meant for
    calls of `min_bytes` to `max_bytes` (0: no limit), counted as the larger of one rank's send and receive buffer.
    """

    name: str
    collective: Collective
    scratch: NDArray[np.int32]
    tb_rank: NDArray[np.int32]
    tb_send: NDArray[np.int32]
    tb_recv: NDArray[np.int32]
    tb_channel: NDArray[np.int32]
    tb_ptr: NDArray[np.int64]
    op: NDArray[np.uint8]
    src_buf: NDArray[np.int8]
    src_off: NDArray[np.int32]
    dst_buf: NDArray[np.int8]
    dst_off: NDArray[np.int32]
    count: NDArray[np.int32]
    dep_tb: NDArray[np.int32]
    dep_step: NDArray[np.int32]
    protocol: str = "Simple"
    instances: int = 1
    min_bytes: int = 0
    max_bytes: int = 0

    def __post_init__(self) -> None:
        for array in vars(self).values():
            if isinstance(array, np.ndarray):
                array.setflags(write=False)
        _validate(self)

    @property
    def num_instructions(self) -> int:
        """The number of instructions over all ranks, nops included."""
        return len(self.op)

    @property
    def num_channels(self) -> int:
        """One more than the largest channel: channels are numbered 0..num_channels-1."""
        return int(self.tb_channel.max(initial=0)) + 1

    @property
    def max_chunks(self) -> int:
        """The most chunks that one message carries."""
        return int(self.count[self.op != NOP].max(initial=1))

    def verify(self) -> VerificationReport:
        """Prove that the streams do what the collective asks; raises `VerificationError` if not."""
        return self._report

    @cached_property
    def _report(self) -> VerificationReport:
        return VERIFY_LOWERED(self)

    def __repr__(self) -> str:
        return (
            f"<Lowered {self.name}: {self.collective.kind} over {self.collective.num_ranks} ranks, "
            f"{len(self.tb_rank)} threadblocks, {self.num_instructions} instructions, {self.num_channels} channels>"
        )


def check_size_range(min_bytes: int, max_bytes: int) -> None:
    """Refuse a range of sizes that no call can be in; a `max_bytes` of 0 means no limit."""
    if min_bytes < 0 or max_bytes < 0 or 0 < max_bytes < min_bytes or max(min_bytes, max_bytes) > MAX_BYTES:
        raise InvalidInput(
            f"min_bytes {min_bytes}, max_bytes {max_bytes}: must be 0..{MAX_BYTES} and in order (max_bytes 0: no limit)"
        )


def _validate(x: Lowered) -> None:
    """Check the shape of the arrays and the range of every number; `verify` checks that the streams are right."""
    ranks, blocks, count = x.collective.num_ranks, len(x.tb_rank), x.num_instructions
    if x.instances < 1:
        raise InvalidInput(f"instances: must be >= 1, not {x.instances}")
    check_size_range(x.min_bytes, x.max_bytes)
    of_block = ("tb_send", "tb_recv", "tb_channel")
    of_instruction = ("src_buf", "src_off", "dst_buf", "dst_off", "count", "dep_tb", "dep_step")
    sizes = {"scratch": ranks, "tb_ptr": blocks + 1} | dict.fromkeys(of_block, blocks)
    for key, size in (sizes | dict.fromkeys(of_instruction, count)).items():
        if len(getattr(x, key)) != size:
            raise InvalidInput(f"{key}: has {len(getattr(x, key))} entries, not {size}")
    if x.tb_ptr[0] != 0 or x.tb_ptr[-1] != count or np.any(np.diff(x.tb_ptr) < 0):
        raise InvalidInput(f"tb_ptr: must rise from 0 to {count}, the number of instructions")
    _each("tb_rank", x.tb_rank, (x.tb_rank >= 0) & (x.tb_rank < ranks), f"must be a rank 0..{ranks - 1}")
    _each("tb_rank", x.tb_rank[1:], np.diff(x.tb_rank) >= 0, "threadblocks must be sorted by rank", first=1)
    for key, peer in (("tb_send", x.tb_send), ("tb_recv", x.tb_recv)):
        _each(key, peer, (peer >= -1) & (peer < ranks), f"must be a rank 0..{ranks - 1}, or -1 for none")
        _each(key, peer, peer != x.tb_rank, "a rank cannot be its own peer")
    channel = (x.tb_channel >= 0) & (x.tb_channel < MAX_CHANNELS)
    _each("tb_channel", x.tb_channel, channel, f"must be 0..{MAX_CHANNELS - 1}")
    _each("op", x.op, x.op < len(OPS), f"must be 0..{len(OPS) - 1}")
    for key, buffer in (("src_buf", x.src_buf), ("dst_buf", x.dst_buf)):
        _each(key, buffer, (buffer >= 0) & (buffer < len(BUFFERS)), f"must be 0..{len(BUFFERS) - 1}")
    _each("count", x.count, (x.count >= 1) | (x.op == NOP), "must be >= 1")
    _each("dep_tb", x.dep_tb, x.dep_tb >= -1, "must be a threadblock of the rank, or -1 for none")
    _each("scratch", x.scratch, x.scratch >= 0, "must be >= 0")
    for key, total in (("scratch", x.scratch.sum(dtype=np.int64)), ("count", x.count[x.op != NOP].sum(dtype=np.int64))):
        if total > MAX_ENTRIES:
            raise InvalidInput(f"{key}: {total} chunks in all are more than {MAX_ENTRIES}")


def _each(key: str, values: NDArray[Any], good: NDArray[np.bool_], rule: str, *, first: int = 0) -> None:
    bad = np.flatnonzero(~good)
    if len(bad):
        raise InvalidInput(f"{key}[{bad[0] + first}]: {rule}, not {values[bad[0]]}")
