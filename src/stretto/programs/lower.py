# SPDX-License-Identifier: Apache-2.0
"""`lower`: from a program to the instruction streams of each rank.

The passes, each in its own module: a linear order of all events that is safe with bounded FIFOs
(`lower_order`), which connections share a threadblock and what is fused (`lower_blocks`), where every chunk
lives (`lower_memory`), and the instructions with the fewest dependencies (`lower_emit`).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..errors import Infeasible, InvalidInput
from .ir import Program
from .lower_blocks import assign_blocks, slot_history
from .lower_emit import (
    Instruction,
    add_copies,
    instructions,
    message_order,
    split_messages,
    wait_for_each_other,
)
from .lower_memory import BUFFER, BufferLayout, assign_memory
from .lower_order import event_order
from .lowered import NOP, SCRATCH, Lowered

MAX_INSTANCES = 256


def lower(
    program: Program,
    *,
    instances: int = 1,
    reuse_scratch: bool = True,
    fuse: bool = True,
    fifo_depth: int = 1,
    protocol: str = "Simple",
) -> Lowered:
    """Make per-rank instruction streams that do what a program does; the program is verified first.

    The streams cannot deadlock with FIFOs of `fifo_depth` messages if the program allows that, else with 2. (A ring
    in which every rank forwards in one fused instruction needs 2: ask for 2 to have all of them fused.) Order that no
    data needs is kept where a send waits for an arrival on its own rank, else only inside a threadblock.

    Args:
        program: The program.
        instances: 1..256 copies of the program that run beside each other on channels of their own, each on its part
            of every chunk.
        reuse_scratch: Whether scratch memory is used again once its content is dead.
        fuse: Whether a receive and the send that forwards its data may become one instruction.
        fifo_depth: 1 or 2, the FIFO depth to aim for.
        protocol: The MSCCL protocol to write into the result; it does not change the streams.

    Returns:
        The instruction streams.

    Raises:
        VerificationError: The program is wrong.
        Infeasible: Its messages cannot be ordered with FIFOs of depth 2.
        InvalidInput: An argument is out of range.

    >>> from stretto import AllGather
    >>> p = Program.from_steps("pair", AllGather(2), src=[0, 1], dst=[1, 0], chunk=[0, 1], step=[0, 0])
    >>> lower(p)
    <Lowered pair: all_gather over 2 ranks, 4 threadblocks, 6 instructions, 1 channels>
    """
    if not 1 <= instances <= MAX_INSTANCES:
        raise InvalidInput(f"instances: must be 1..{MAX_INSTANCES}, not {instances}")
    if fifo_depth not in (1, 2):
        raise InvalidInput(f"fifo_depth: must be 1 or 2, not {fifo_depth}")
    program.verify()
    program = _sorted_chunks(program)
    layout = BufferLayout(collective=program.collective, instances=instances)
    # A transfer whose places are not contiguous is cut into messages, and these may wait for each other in a circle.
    # Each further try gives up one freedom (reuse of scratch, fusing, depth 1) until there is no circle.
    tries = dict.fromkeys([(fuse, reuse_scratch, False), (fuse, False, False), (False, False, False)])
    ladder = [(depth, *rung) for depth in range(fifo_depth, 3) for rung in tries]
    for depth, fuses, reuses, staged in [*ladder, (2, fuse, False, True), (2, False, False, True)]:
        lowered = _attempt(program, layout, depth=depth, fuse=fuses, reuse=reuses, staged=staged, protocol=protocol)
        if lowered is not None:
            return lowered
    raise Infeasible(f"{program.name}: its messages cannot be ordered with FIFOs of depth 2")


def _attempt(
    program: Program, layout: BufferLayout, *, depth: int, fuse: bool, reuse: bool, staged: bool, protocol: str
) -> Lowered | None:
    """Lower with one choice of options; None where the events wait for each other in a circle."""
    position = event_order(program, depth)
    if position is None:
        return None
    history = slot_history(program, position)
    blocks = assign_blocks(program, position, history, depth=depth, fuse=fuse)
    memory = assign_memory(program, position, history, blocks, layout, reuse=reuse, staged=staged)
    messages = split_messages(program, blocks, memory)
    if len(messages.transfer) > program.num_transfers:
        order = message_order(program, blocks, memory, messages, position, depth)
        if order is None:
            return None
        position = order
    moves = instructions(program, blocks, memory, messages, position)
    steps, ranks = add_copies(moves, memory.copies, blocks.rank.tolist())
    streams = wait_for_each_other(program, steps, len(ranks))
    local = [-1] * (len(ranks) - len(blocks.rank))
    return _arrays(
        program.name,
        layout,
        memory.scratch,
        rank=np.array(ranks, np.int64),
        send=np.array(blocks.send.tolist() + local, np.int64),
        recv=np.array(blocks.recv.tolist() + local, np.int64),
        channel=np.array(blocks.channel.tolist() + [0] * len(local), np.int64),
        streams=streams,
        protocol=protocol,
    )


def _sorted_chunks(program: Program) -> Program:
    """Sort the chunks of each transfer: two ranks that exchange many chunks then cut them into equal messages."""
    owner = np.repeat(np.arange(program.num_transfers), np.diff(program.chunk_ptr))
    order = np.lexsort((program.chunk, owner))
    return program.replace(chunk=program.chunk[order])


def _numbered(
    streams: list[list[Instruction]], number: list[int], local: list[int]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The steps of all streams as rows of one table, and where each stream begins.

    The threadblock that `Instruction.waits` calls b is stream ``number[b]``, and its rank's ``local[b]``-th.
    """
    steps_of: list[list[int]] = []
    for stream in streams:
        at, numbers = -1, []
        for step in stream:
            at += max(1, len(step.waits))
            numbers.append(at)
        steps_of.append(numbers)
    rows: list[tuple[int, ...]] = []
    ends = [0]
    for stream in streams:
        for step in stream:
            waits = [(local[b], steps_of[number[b]][i]) for b, i in step.waits] or [(-1, -1)]
            rows += [(NOP, -1, -1, 0, 0, 0, *wait) for wait in waits[:-1]]
            rows.append((step.op, step.src, step.dst, step.src_rank, step.dst_rank, step.count, *waits[-1]))
        ends.append(len(rows))
    return np.array(rows, np.int64).reshape(-1, 8), np.array(ends, np.int64)


def _arrays(
    name: str,
    layout: BufferLayout,
    scratch: NDArray[np.int64],
    *,
    rank: NDArray[np.int64],
    send: NDArray[np.int64],
    recv: NDArray[np.int64],
    channel: NDArray[np.int64],
    streams: list[list[Instruction]],
    protocol: str,
) -> Lowered:
    """Number the steps (extra dependencies become nops before the step) and repeat all for each instance."""
    order = np.argsort(rank, kind="stable")
    streams = [streams[b] for b in order.tolist()]
    rank, send, recv, channel = rank[order], send[order], recv[order], channel[order]
    number = np.empty(len(order), np.int64)
    number[order] = np.arange(len(order))
    per_rank = np.bincount(rank, minlength=layout.collective.num_ranks)
    first = np.concatenate([[0], np.cumsum(per_rank)])
    table, ptr = _numbered(streams, number.tolist(), (number - first[rank[number]]).tolist())

    # Threadblocks of a rank: those of instance 0, then those of instance 1, and so on.
    copies = layout.instances
    blocks, instance = [], []
    for r in range(layout.collective.num_ranks):
        mine = np.arange(first[r], first[r + 1])
        blocks.append(np.tile(mine, copies))
        instance.append(np.repeat(np.arange(copies), len(mine)))
    block, which = np.concatenate(blocks), np.concatenate(instance)
    length = np.diff(ptr)[block]
    tb_ptr = np.concatenate([[0], np.cumsum(length)])
    row = np.repeat(ptr[block] - tb_ptr[:-1], length) + np.arange(tb_ptr[-1])
    of = np.repeat(which, length)
    op, src, dst, src_rank, dst_rank, count, dep_block, dep_step = table[row].T

    def placed(place: NDArray[np.int64], owner: NDArray[np.int64]) -> tuple[NDArray[np.int8], NDArray[np.int32]]:
        real = op != NOP
        buffer = np.where(real, place // BUFFER, 0)
        shift = np.where(buffer == SCRATCH, scratch[owner], layout.block) * of
        return buffer.astype(np.int8), np.where(real, place % BUFFER + shift, -1).astype(np.int32)

    src_buf, src_off = placed(src, src_rank)
    dst_buf, dst_off = placed(dst, dst_rank)
    channels = int(channel.max(initial=0)) + 1
    own_rank = np.repeat(rank[block], length)
    return Lowered(
        name=name,
        collective=layout.finer(),
        scratch=(scratch * copies).astype(np.int32),
        tb_rank=rank[block].astype(np.int32),
        tb_send=send[block].astype(np.int32),
        tb_recv=recv[block].astype(np.int32),
        tb_channel=(channel[block] + which * channels).astype(np.int32),
        tb_ptr=tb_ptr,
        op=op.astype(np.uint8),
        src_buf=src_buf,
        src_off=src_off,
        dst_buf=dst_buf,
        dst_off=dst_off,
        count=count.astype(np.int32),
        dep_tb=np.where(dep_block >= 0, dep_block + of * per_rank[own_rank], -1).astype(np.int32),
        dep_step=dep_step.astype(np.int32),
        protocol=protocol,
        instances=copies,
    )
