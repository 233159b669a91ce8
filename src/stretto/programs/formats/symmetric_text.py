# SPDX-License-Identifier: Apache-2.0
"""The text form of a symmetric program: what one group of ranks sends, for all groups.

::

    stretto-symmetric-program 1
    name ring
    collective all_gather torus 4 local 1 pieces 1
    0: 0>1 c0
    1: 0>1 c3 after 0
    2: 0>1 c2 after 1

One line per orbit, written as in the text form of a plain program, for the group at point 0 of the torus: ranks and
chunks are numbered as in the whole program, in which rank r of group g is ``r + local * g``. ``gate 3`` waits for orbit
3 to have written to the destination, ``reads 4`` for orbit 4 to have read from it. All is exact: the whole program has
the same transfers for every group, translated.
"""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...collectives.conditions import MAX_RANKS
from ...errors import InvalidInput
from ..symmetry import SymmetricProgram, check_torus
from ..symmetry_views import chunk_numbers, chunk_places, translate
from .lines import LineReader, quote, ranges

HEADER = "stretto-symmetric-program"
RANK_HEADER = "stretto-rank-program"
VERSION = 1

_COLLECTIVE = re.compile(
    r"(?P<kind>\w{1,40}) torus (?P<sizes>\d{1,6}(?:x\d{1,6}){0,31}) local (?P<local>\d{1,6}) pieces (?P<pieces>\d{1,8})"
)
_ORBIT = re.compile(
    r"(?P<t>\d{1,9}): (?P<src>\d{1,9})>(?P<dst>\d{1,9}) (?P<add>\+?)(?P<chunks>c[c\d,-]*)"
    r"(?: after (?P<after>[\d,-]+))?(?: gate (?P<gate>[\d,-]+))?(?: reads (?P<reads>[\d,-]+))?"
    r"(?: lane (?P<lane>\d{1,5}))?"
)


def dumps(program: SymmetricProgram) -> str:
    """The text of a symmetric program; `loads` gives back the same orbits with the same dependencies."""
    p = program
    sizes = "x".join(map(str, p.sizes))
    lines = [
        f"{HEADER} {VERSION}", f"name {quote(p.name)}",
        f"collective {p.kind} torus {sizes} local {p.local} pieces {p.pieces}",
    ]  # fmt: skip
    written = ~p.gate_reads
    rows = [
        _rows(p.chunk_ptr, p.chunk),
        _rows(p.after_ptr, p.after),
        *(_rows(_counted(p.gate_ptr, kept), p.gate[kept]) for kept in (written, p.gate_reads)),
    ]
    ends = (a.tolist() for a in (p.src, p.dst, p.reduce, p.lane))
    for t, (src, dst, add, lane, chunks, *waits) in enumerate(zip(*ends, *rows, strict=True)):
        line = f"{t}: {src}>{dst} {'+' if add else ''}{ranges(chunks, 'c')}"
        for word, others in zip(("after", "gate", "reads"), waits, strict=True):
            if others:
                line += f" {word} {ranges(others)}"
        lines.append(line + (f" lane {lane}" if lane else ""))
    return "\n".join(lines) + "\n"


def dumps_rank(program: SymmetricProgram, rank: int) -> str:
    """One rank's part of the whole program: what it sends and receives, and what each of these waits for on this rank.

    Transfers have the numbers of ``program.expand()``, which is not made. A send names what must have arrived before,
    a receive what must be done with its place.

    Args:
        program: The program.
        rank: The rank, 0..num_ranks-1.

    Returns:
        The text, one line per transfer.

    Raises:
        InvalidInput: There is no such rank.
    """
    p = program
    if not 0 <= rank < p.num_ranks:
        raise InvalidInput(f"rank: must be 0..{p.num_ranks - 1}, not {rank}")
    number, group = rank % p.local, rank // p.local
    to = p.dst.astype(np.int64) // p.local
    cut = p.pieces // p.num_ranks if p.kind == "all_to_all" else p.pieces
    sends, receives = np.flatnonzero(p.src == number), np.flatnonzero(p.dst % p.local == number)
    lines = [
        f"{RANK_HEADER} {VERSION}", f"name {quote(p.name)}",
        f"collective {p.kind} ranks {p.num_ranks} chunks {cut}", f"rank {rank}",
    ]  # fmt: skip
    after, gate = _rows(p.after_ptr, p.after), _rows(p.gate_ptr, p.gate)
    reads = _rows(p.gate_ptr, p.gate_reads)

    def delivering(orbit: int) -> int:
        """The member of an orbit that delivers to the rank."""
        return orbit * p.copies + int(translate(group, to[orbit], p.sizes, sign=-1))

    found = {}
    for t, mine in [*((t, True) for t in sends.tolist()), *((t, False) for t in receives.tolist())]:
        at = group if mine else int(translate(group, to[t], p.sizes, sign=-1))
        ends = [int(translate(end, at, p.sizes, local=p.local)) for end in (p.src[t], p.dst[t])]
        homes, pieces = (side[p.chunk_ptr[t] : p.chunk_ptr[t + 1]] for side in (p.home, p.piece))
        moved = chunk_numbers(p, translate(homes, at, p.sizes, local=p.local), pieces).tolist()
        waits = [delivering(a) for a in after[t]]
        word = "after"
        if not mine:
            word = "gate"
            waits = [g * p.copies + group if read else delivering(g) for g, read in zip(gate[t], reads[t], strict=True)]
        line = f"{t * p.copies + at}: {ends[0]}>{ends[1]} {'+' if p.reduce[t] else ''}{ranges(moved, 'c')}"
        line += f" {word} {ranges(sorted(waits))}" if waits else ""
        found[t * p.copies + at] = line + (f" lane {p.lane[t]}" if p.lane[t] else "")
    return "\n".join([*lines, *(found[key] for key in sorted(found))]) + "\n"


def _rows(ptr: NDArray[np.int64], values: NDArray[Any]) -> list[list[int]]:
    flat = values.tolist()
    return [flat[a:b] for a, b in pairwise(ptr.tolist())]


def _counted(ptr: NDArray[np.int64], kept: NDArray[np.bool_]) -> NDArray[np.int64]:
    """The pointers of a table of which only some entries are kept."""
    return np.concatenate([[0], np.cumsum(kept)])[ptr]


def loads(text: str, *, where: str = "program") -> SymmetricProgram:
    """Read the text form; errors name the line."""
    reader = LineReader(text, where)
    version = reader.keyword(HEADER)
    if version != str(VERSION):
        reader.fail(f"version {version[:20]!r} is not known; this reads version {VERSION}")
    name = reader.unquote(reader.keyword("name"))
    head = _COLLECTIVE.fullmatch(reader.keyword("collective"))
    if head is None:
        reader.fail("expected 'collective KIND torus AxB local L pieces P'")
    sizes, local, pieces = tuple(map(int, head["sizes"].split("x"))), int(head["local"]), int(head["pieces"])
    chunks_in_all = min(int(np.prod([float(n) for n in (*sizes, local, pieces)])), MAX_RANKS << 12)
    columns: dict[str, list[int]] = {key: [] for key in ("src", "dst", "add", "lane")}
    lists: dict[str, tuple[list[int], list[int]]] = {k: ([0], []) for k in ("chunks", "after", "gate", "reads")}
    while reader.next < len(reader.lines):
        match = _ORBIT.fullmatch(reader.line())
        if match is None or int(match["t"]) != len(columns["src"]):
            what = f"'{len(columns['src'])}: SRC>DST [+]cCHUNKS [after N,..] [gate N,..] [reads N,..] [lane L]'"
            reader.fail(f"expected {what}, not {reader.lines[reader.next - 1][1][:60]!r}")
        for key in ("src", "dst", "lane"):
            columns[key].append(int(match[key] or 0))
        columns["add"].append(bool(match["add"]))
        for key, (ptr, values) in lists.items():
            limit = chunks_in_all if key == "chunks" else len(reader.lines)
            values.extend(reader.integers((match[key] or "").replace("c", ""), limit))
            ptr.append(len(values))
    if max(columns["lane"], default=0) >= 1 << 15:
        reader.fail(f"lane: must be 0..{(1 << 15) - 1}")
    gate_ptr, gate, reads = _merged(lists["gate"], lists["reads"])
    try:
        check_torus(head["kind"], sizes, local, pieces)
        home, piece = chunk_places(head["kind"], sizes, local, pieces, np.array(lists["chunks"][1], np.int64))
        return SymmetricProgram(
            name=name, kind=head["kind"], sizes=sizes, local=local, pieces=pieces,
            src=np.array(columns["src"], np.int32), dst=np.array(columns["dst"], np.int32),
            reduce=np.array(columns["add"], np.bool_), chunk_ptr=np.array(lists["chunks"][0], np.int64),
            home=home.astype(np.int32), piece=piece.astype(np.int32),
            after_ptr=np.array(lists["after"][0], np.int64), after=np.array(lists["after"][1], np.int32),
            gate_ptr=gate_ptr, gate=gate, gate_reads=reads, lane=np.array(columns["lane"], np.int16),
        )  # fmt: skip
    except InvalidInput as error:
        raise InvalidInput(f"{where}: {error}") from None


def _merged(
    written: tuple[list[int], list[int]], read: tuple[list[int], list[int]]
) -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.bool_]]:
    """One table of gates from those of writers and of readers."""
    tables = [(np.array(ptr, np.int64), np.array(values, np.int32)) for ptr, values in (written, read)]
    owner = np.concatenate([np.repeat(np.arange(len(ptr) - 1), np.diff(ptr)) for ptr, _ in tables])
    order = np.argsort(owner, kind="stable")
    reads = np.repeat([False, True], [len(values) for _, values in tables])
    gate = np.concatenate([values for _, values in tables])
    return tables[0][0] + tables[1][0], gate[order], reads[order]
