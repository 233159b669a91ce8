# SPDX-License-Identifier: Apache-2.0
"""Library algorithms in the form that motifs use: a program over positions 0..n-1, its
synchronous steps, its shares.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ...algorithms import algorithm, defined_for
from ...collectives import Collective
from ...errors import InvalidInput
from ...programs.ir import Program
from ...programs.streams import row_numbers
from .motif import KINDS, ROOTED, SHARDED, Motif

DEFAULTS = {
    "AR": "ring", "AG": "ring", "RS": "ring", "AA": "direct", "BC": "direct", "RE": "direct", "GA": "direct",
    "SC": "direct", "SD": "direct",
}  # fmt: skip
"""Default algorithms, as the paper describes them: rings, and direct patterns to or from the root."""

Ints = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class ProgramShape:
    """A program with the properties that composing programs needs."""

    program: Program
    step: Ints
    """The synchronous step of each transfer."""
    num_steps: int
    share_of: Ints
    """The share of the payload that each chunk is cut from: a rank's shard, a pair (src * n + dst), or 0."""
    paced: tuple[Ints, Ints]
    """Waits (transfer that waits, transfer that it waits for) that pace the program and do not follow from the data."""


def default_algorithm(motif: Motif) -> str:
    """The algorithm of a motif without a binding: the one in `DEFAULTS`, or the first one
    defined for that many ranks.
    """
    kind = "permute" if motif.kind == "SD" else KINDS[motif.kind]
    known = defined_for(kind, len(motif.ranks))
    return DEFAULTS[motif.kind] if DEFAULTS[motif.kind] in known else known[0]


def shape_of(motif: Motif, binding: str | Program | None) -> ProgramShape:
    """The shape of a motif's algorithm: the default one, one by name, or a program of the motif's own collective."""
    count = len(motif.ranks)
    root = motif.ranks.index(motif.root) if motif.kind in ROOTED else None
    if not isinstance(binding, Program):
        return _named(binding or default_algorithm(motif), motif.kind, count, root)
    kind = "permute" if motif.kind == "SD" else KINDS[motif.kind]
    c = binding.collective
    if c.kind != kind or c.num_ranks != count or (root is not None and c.root != root):
        raise InvalidInput(
            f"{motif}: program {binding.name} is of {c.kind} over {c.num_ranks} ranks"
            + (f" with root {c.root}" if root is not None else "")
        )
    return _shape(motif.kind, binding)


@lru_cache(maxsize=512)
def _named(name: str, code: str, count: int, root: int | None) -> ProgramShape:
    if code == "SD":
        return _shape(code, algorithm(name, "permute", 2, pairs=[(0, 1)]))
    return _shape(code, algorithm(name, KINDS[code], count, root=root))


def _shape(code: str, program: Program) -> ProgramShape:
    step = _steps(program)
    again = Program.from_steps(
        program.name,
        program.collective,
        src=program.src,
        dst=program.dst,
        chunk=program.chunk,
        chunk_ptr=program.chunk_ptr,
        step=step,
        reduce=program.reduce,
    )
    # Sorting by step moves a transfer only if the program's own order is not sorted by steps.
    place = np.empty(len(step), np.int64)
    place[np.argsort(step, kind="stable")] = np.arange(len(step))
    count = max(program.num_transfers, 1)
    waits = place[row_numbers(program.after_ptr)] * count + place[program.after]
    derived = row_numbers(again.after_ptr).astype(np.int64) * count + again.after
    extra = np.flatnonzero(~np.isin(waits, derived))
    return ProgramShape(
        program=program,
        step=step,
        num_steps=int(step.max(initial=-1)) + 1,
        share_of=_shares(code, program.collective),
        paced=(row_numbers(program.after_ptr)[extra].astype(np.int64), program.after[extra].astype(np.int64)),
    )


def _steps(program: Program) -> Ints:
    """The fewest synchronous steps that keep every wait; the reads of a step come before its writes.

    One pass in program order settles all waits for earlier transfers; the remaining waits are exchanges, in which each
    of two transfers waits for the other's read.
    """
    p = program
    count = p.num_transfers
    reads = p.gate_reads
    gated = row_numbers(p.gate_ptr).astype(np.int64)
    connection = (p.src.astype(np.int64) * p.collective.num_ranks + p.dst) * p.num_lanes + p.lane
    order = np.argsort(connection, kind="stable")
    neighbors = np.flatnonzero(np.diff(connection[order]) == 0)
    before = np.concatenate([p.after, p.gate[~reads], p.gate[reads], order[neighbors]]).astype(np.int64)
    behind = np.concatenate([row_numbers(p.after_ptr), gated[~reads], gated[reads], order[neighbors + 1]])
    wait = np.ones(len(before), np.int64)
    wait[len(p.after) + int(np.count_nonzero(~reads)) :] = 0
    if not len(before):
        return np.zeros(count, np.int64)
    by_behind = np.argsort(behind, kind="stable")
    level = [0] * count
    edges = (array[by_behind].tolist() for array in (before, behind, wait))
    for u, t, w in zip(*edges, strict=True):
        if level[u] + w > level[t]:
            level[t] = level[u] + w
    step = np.array(level, np.int64)
    for _ in range(count + 1):
        least = step[before] + wait
        late = np.flatnonzero(least > step[behind])
        if not len(late):
            return step
        np.maximum.at(step, behind[late], least[late])
    raise InvalidInput(f"program {program.name}: its transfers wait for one another in a circle")


def _shares(code: str, c: Collective) -> Ints:
    found = np.zeros(c.num_chunks, np.int64)
    if code in SHARDED:
        ptr, chunk = (c.in_ptr, c.in_chunk) if code in ("AG", "GA") else (c.out_ptr, c.out_chunk)
        found[chunk] = row_numbers(ptr)
    elif code == "AA":
        found[c.in_chunk] = row_numbers(c.in_ptr).astype(np.int64) * c.num_ranks
        found[c.out_chunk] += row_numbers(c.out_ptr)
    return found
