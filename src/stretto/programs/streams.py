# SPDX-License-Identifier: Apache-2.0
"""Relations between instruction streams: which send meets which receive, what waits for what, where memory lies."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import VerificationError
from .lowered import BUFFERS, OPS, RECEIVES, SENDS, Lowered

Ints = NDArray[np.int64]
Edges = tuple[NDArray[Any], NDArray[Any]]


@dataclass(frozen=True, kw_only=True)
class InstructionStreams:
    """Per instruction: its threadblock (global number), rank and step, and what it receives, sends and waits for."""

    tb: Ints
    rank: NDArray[np.int32]
    step: Ints
    pop: NDArray[np.int32]
    """The message that each instruction receives, or -1. Messages are numbered connection by connection, in order."""
    push: NDArray[np.int32]
    senders: NDArray[np.int32]
    """The instruction that sends each message."""
    receivers: NDArray[np.int32]
    connection_ptr: Ints
    waits_for: Ints
    """The instruction of another threadblock that must be done first, or -1."""
    event: Callable[[int], str]

    @classmethod
    def of(cls, x: Lowered) -> InstructionStreams:
        """Match the sends and receives of lowered streams.

        Raises `VerificationError` where sends and receives do not match or a dependency names no instruction.
        """
        sizes = np.diff(x.tb_ptr)
        tb = np.repeat(np.arange(len(x.tb_rank)), sizes)
        rank = x.tb_rank[tb]
        first_tb = np.searchsorted(x.tb_rank, np.arange(x.collective.num_ranks + 1))
        step = np.arange(x.num_instructions) - np.repeat(x.tb_ptr[:-1], sizes)

        def event(e: int) -> str:
            return f"rank {rank[e]} tb {tb[e] - first_tb[rank[e]]} step {step[e]} ({OPS[x.op[e]]})"

        senders, sent = _ends(x, tb, event, sending=True)
        receivers, received = _ends(x, tb, event, sending=False)
        _match(x, event, senders, sent, receivers, received)
        pop = np.full(x.num_instructions, -1, np.int32)
        push = pop.copy()
        push[senders] = np.arange(len(senders))
        pop[receivers] = np.arange(len(receivers))
        return cls(
            tb=tb,
            rank=rank,
            step=step,
            pop=pop,
            push=push,
            senders=senders.astype(np.int32),
            receivers=receivers.astype(np.int32),
            connection_ptr=group_ends(sent),
            waits_for=_dependencies(x, rank, first_tb, sizes, event),
            event=event,
        )

    def local_edges(self) -> list[Edges]:
        """Pairs (before, after) of instructions of one rank, from program order and from dependencies."""
        inner, waiting = np.flatnonzero(self.step > 0), np.flatnonzero(self.waits_for >= 0)
        return [(inner - 1, inner), (self.waits_for[waiting], waiting)]

    def order(self) -> list[int]:
        """The instructions of all ranks, each behind what it waits for (streams that are proved have no circles)."""
        received = np.flatnonzero(self.pop >= 0)
        edges = [*self.local_edges(), (self.senders[self.pop[received]], received)]
        followers: dict[int, list[int]] = defaultdict(list)
        left = [0] * len(self.tb)
        for before, after in edges:
            for a, b in zip(before.tolist(), after.tolist(), strict=True):
                followers[a].append(b)
                left[b] += 1
        ready = [k for k, n in enumerate(left) if n == 0]
        for k in ready:
            for b in followers[k]:
                left[b] -= 1
                if not left[b]:
                    ready.append(b)
        return ready


@dataclass(frozen=True, kw_only=True)
class BufferMap:
    """The locations of all buffers of a lowered program; in place, input and output share one region."""

    base: NDArray[np.int64]  # [rank, buffer] -> location of offset 0
    begin: NDArray[np.int64]  # [rank, buffer] -> first valid location
    end: NDArray[np.int64]

    @classmethod
    def of(cls, x: Lowered) -> BufferMap:
        """The memory map of all ranks of a lowered program."""
        c = x.collective
        inputs, outputs = np.diff(c.in_ptr), np.diff(c.out_ptr)
        if c.in_place:
            front = np.maximum(0, -c.place)
            shared = np.maximum(outputs, inputs + c.place) + front
            start = np.concatenate([[0], np.cumsum(shared + x.scratch)])
            first = start[:-1]
            base = np.stack([first + front + c.place, first + front, first + shared], axis=1)
            begin = np.stack([first, first, first + shared], axis=1)
            end = np.stack([first + shared, first + shared, start[1:]], axis=1)
        else:
            start = np.concatenate([[0], np.cumsum(inputs + outputs + x.scratch)])
            first = start[:-1]
            base = np.stack([first, first + inputs, first + inputs + outputs], axis=1)
            begin = base
            end = np.stack([base[:, 1], base[:, 2], start[1:]], axis=1)
        return cls(base=base, begin=begin, end=end)

    @property
    def size(self) -> int:
        """The number of locations: they are numbered 0..size-1."""
        return int(self.end.max(initial=0))

    def locate(self, rank: NDArray[Any], buf: NDArray[Any], off: NDArray[Any]) -> NDArray[np.int64]:
        """The location of each offset in a buffer; the arguments broadcast.

        Args:
            rank: The rank that has the buffer.
            buf: INPUT, OUTPUT or SCRATCH.
            off: The offset in chunks.

        Returns:
            The location 0..size-1, where the offset is inside its buffer.
        """
        located: NDArray[np.int64] = self.base[rank, buf] + off
        return located

    def inside(
        self, rank: NDArray[Any], buf: NDArray[Any], off: NDArray[Any], count: NDArray[Any]
    ) -> NDArray[np.bool_]:
        """Whether a whole run of offsets lies in its buffer; the arguments broadcast.

        Args:
            rank: The rank that has the buffer.
            buf: INPUT, OUTPUT or SCRATCH.
            off: The first offset of the run.
            count: How many chunks the run has.

        Returns:
            One truth value per run.
        """
        good: NDArray[np.bool_] = (off >= 0) & (self.locate(rank, buf, off) + count <= self.end[rank, buf])
        return good

    def describe(self, location: int) -> tuple[int, str]:
        """The rank and the name of a location, such as ``o[3]``."""
        for buffer in (1, 0, 2):
            rank = np.flatnonzero((self.begin[:, buffer] <= location) & (location < self.end[:, buffer]))
            if len(rank):
                return int(rank[0]), f"{BUFFERS[buffer]}[{location - self.base[rank[0], buffer]}]"
        return -1, "?"


def row_numbers(ptr: Ints) -> NDArray[np.int32]:
    """The row of each entry of a CSR table."""
    return np.repeat(np.arange(len(ptr) - 1, dtype=np.int32), np.diff(ptr))


def group_ends(sorted_key: NDArray[Any]) -> Ints:
    """The index at which each run of equal keys begins, and the end.

    >>> group_ends(np.array([3, 3, 5])).tolist(), group_ends(np.array([], int)).tolist()
    ([0, 2, 3], [0])
    """
    new = np.ones(len(sorted_key), np.bool_)
    new[1:] = sorted_key[1:] != sorted_key[:-1]
    return np.append(np.flatnonzero(new), len(sorted_key)).astype(np.int64)


def rows_from_edges(count: int, edges: Sequence[Edges]) -> tuple[Ints, NDArray[np.int32]]:
    """The predecessors of each event as a CSR table."""
    sources = np.concatenate([a for a, _ in edges])
    targets = np.concatenate([b for _, b in edges])
    order = np.argsort(targets, kind="stable")
    ptr = np.searchsorted(targets[order], np.arange(count + 1))
    return ptr.astype(np.int64), sources[order].astype(np.int32)


def _ends(x: Lowered, tb: Ints, event: Callable[[int], str], *, sending: bool) -> tuple[Ints, Ints]:
    """The instructions at one end of connections, connection by connection, and their connections."""
    ranks = x.collective.num_ranks
    who = np.flatnonzero((SENDS if sending else RECEIVES)[x.op])
    peer = (x.tb_send if sending else x.tb_recv)[tb[who]].astype(np.int64)
    if np.any(peer < 0):
        e = int(who[np.flatnonzero(peer < 0)[0]])
        raise VerificationError(
            f"{x.name}: {event(e)}: its threadblock has no peer to {'send to' if sending else 'receive from'}"
        )
    here = x.tb_rank[tb[who]].astype(np.int64)
    pair = here * ranks + peer if sending else peer * ranks + here
    key = pair * x.num_channels + x.tb_channel[tb[who]]
    order = np.argsort(key, kind="stable")
    who, key = who[order], key[order]
    split = np.flatnonzero((key[1:] == key[:-1]) & (tb[who[1:]] != tb[who[:-1]]))
    if len(split):
        a, b = (event(int(who[split[0] + i])) for i in (0, 1))
        raise VerificationError(f"{x.name}: {a} and {b} are in two threadblocks that own one connection")
    return who, key


def _match(x: Lowered, event: Callable[[int], str], senders: Ints, sent: Ints, receivers: Ints, received: Ints) -> None:
    length = min(len(sent), len(received))
    differ = np.flatnonzero(sent[:length] != received[:length])
    if len(differ) or len(sent) != len(received):
        at = int(differ[0]) if len(differ) else length
        lone_send = at < len(sent) and (at >= len(received) or sent[at] < received[at])
        e = int(senders[at] if lone_send else receivers[at])
        other = "receive" if lone_send else "send"
        raise VerificationError(f"{x.name}: {event(e)} has no matching {other} on its connection")
    differ = np.flatnonzero(x.count[senders] != x.count[receivers])
    if len(differ):
        a, b = int(senders[differ[0]]), int(receivers[differ[0]])
        raise VerificationError(f"{x.name}: {event(a)} sends {x.count[a]} chunks but {event(b)} receives {x.count[b]}")


def _dependencies(x: Lowered, rank: NDArray[Any], first_tb: Ints, sizes: Ints, event: Callable[[int], str]) -> Ints:
    has = x.dep_tb >= 0
    target = first_tb[rank] + x.dep_tb
    inside = target < first_tb[rank + 1]
    length = sizes[np.where(inside, target, 0)] if len(sizes) else np.zeros(0, np.int64)
    bad = np.flatnonzero(has & (~inside | (x.dep_step < 0) | (x.dep_step >= length)))
    if len(bad):
        e = int(bad[0])
        raise VerificationError(
            f"{x.name}: {event(e)} waits for tb {x.dep_tb[e]} step {x.dep_step[e]}, which does not exist"
        )
    found: Ints = np.where(has, x.tb_ptr[np.where(inside, target, 0)] + x.dep_step, -1)
    return found
