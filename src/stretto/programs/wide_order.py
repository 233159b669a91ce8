# SPDX-License-Identifier: Apache-2.0
"""The order of a program's messages, chunk by chunk: in which round each is read, and in which it is written."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .ir import Program


@dataclass(frozen=True, kw_only=True, order=True)
class Atom:
    """One chunk of one message: read in round `read`, written in round `write`.

    In a round everything is read before anything is written.
    """

    read: int
    write: int
    src: int
    dst: int
    reduce: bool


def atoms_of(program: Program) -> list[list[Atom]]:
    """The messages of each chunk, with rounds that are counted for that chunk alone."""
    read, write = _rounds(program)
    rows: dict[int, list[int]] = defaultdict(list)
    owner = np.repeat(np.arange(program.num_transfers), np.diff(program.chunk_ptr))
    for transfer, chunk in zip(owner.tolist(), program.chunk.tolist(), strict=True):
        rows[chunk].append(transfer)
    return [_atoms(program, rows.get(chunk, []), read, write) for chunk in range(program.collective.num_chunks)]


def _atoms(p: Program, transfers: list[int], read: NDArray[np.int64], write: NDArray[np.int64]) -> list[Atom]:
    """The messages of one chunk, each read as late as its source allows; rounds without any message are left out."""
    rows = [(int(read[t]), int(write[t]), int(p.src[t]), int(p.dst[t]), bool(p.reduce[t])) for t in transfers]
    writes = [(end, dst) for _, end, _, dst, _ in rows]
    for k, (begin, end, src, dst, reduce) in enumerate(rows):
        if not any(to == src and begin <= at < end for at, to in writes):
            rows[k] = (end, end, src, dst, reduce)
    number = {level: k for k, level in enumerate(sorted({level for row in rows for level in row[:2]}))}
    return sorted(
        Atom(read=number[begin], write=number[end], src=src, dst=dst, reduce=reduce)
        for begin, end, src, dst, reduce in rows
    )


def _rounds(p: Program) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The first rounds in which every transfer can be read and written."""
    count = p.num_transfers
    read, write = np.zeros(count, np.int64), np.zeros(count, np.int64)
    # Event 2t is the read of transfer t, event 2t+1 its write. An edge says how many rounds lie between at least.
    edges: list[list[tuple[int, int]]] = [[] for _ in range(2 * count)]
    waits = np.zeros(2 * count, np.int64)

    def edge(a: int, b: int, rounds: int) -> None:
        edges[a].append((b, rounds))
        waits[b] += 1

    sends = p.gate_reads
    for t in range(count):
        edge(2 * t, 2 * t + 1, 0)
        for a in p.after_of(t).tolist():
            edge(2 * a + 1, 2 * t, 1)
        for k in range(int(p.gate_ptr[t]), int(p.gate_ptr[t + 1])):
            g = int(p.gate[k])
            if sends[k]:
                edge(2 * g, 2 * t + 1, 0)
            else:
                edge(2 * g + 1, 2 * t + 1, 0 if p.reduce[g] and p.reduce[t] else 1)
    level = [0] * (2 * count)
    free = [e for e in range(2 * count) if waits[e] == 0]
    while free:
        event = free.pop()
        for other, rounds in edges[event]:
            level[other] = max(level[other], level[event] + rounds)
            waits[other] -= 1
            if waits[other] == 0:
                free.append(other)
    read[:], write[:] = level[0::2], level[1::2]
    return read, write
