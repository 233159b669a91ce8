# SPDX-License-Identifier: Apache-2.0
"""Turns motif expressions into programs, to verify rewritings and to cost each motif alone.

`lower` makes one `Program` of a whole expression. Each motif becomes a library algorithm on its ranks and payload; all
payloads are cut wherever any of them is cut; the steps of a sequence follow one another, and those of parallel motifs
run side by side. `check` proves that the program does what the original collective asks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from ...errors import InvalidInput, VerificationError
from ...programs.ir import Program
from ...programs.streams import row_numbers, rows_from_edges
from .motif import Expr, Motif, Par, Path
from .payload import Refinement, moved
from .shapes import Ints, ProgramShape, default_algorithm, shape_of

__all__ = ["Binding", "Leaf", "check", "default_algorithm", "leaf_programs", "lower"]

MAX_NAMED = 200
"""The largest number of characters of a motif in an error."""

Binding = str | Program
"""How a motif is executed: the name of a library algorithm, or a program of the motif's own collective."""
Bindings = Mapping[Any, Binding]
"""Bindings by the number of a motif (from left to right), or by the letters of a kind for all motifs of that kind."""


@dataclass(frozen=True, kw_only=True)
class Leaf:
    """One motif of an expression as a collective of its own."""

    path: Path
    motif: Motif
    program: Program
    after: tuple[int, ...]
    """The numbers of the motifs of the expression that must have ended before this one starts."""

    @property
    def nbytes(self) -> int:
        """The bytes of the motif's own collective."""
        return self.motif.nbytes


def lower(expr: Expr, original: Motif | None = None, *, algorithms: Bindings | None = None) -> Program:
    """The whole expression as one program of the original collective; the program is not yet proved (see `check`).

    >>> from stretto.planner.algebra.motif import motif
    >>> from stretto.planner.algebra.rules import apply
    >>> whole = motif("AR", 4, 1000)
    >>> lower(apply(whole, "ring"), whole)
    <Program motifs: all_reduce over 4 ranks, 24 transfers, 32 dependencies, 1 lane>

    Args:
        expr: the expression.
        original: the motif that the expression carries out; None if the expression is a single motif.
        algorithms: bindings of motifs; motifs without one use rings for AR, RS and AG, direct transfers for the others.

    Returns:
        The program, over the original's ranks.

    Raises:
        InvalidInput: the original is missing, or an algorithm does not fit its motif.
        VerificationError: a motif uses processes or payload that the original does not have.
    """
    return _Lowered.of(expr, _original(expr, original), algorithms).program


def check(expr: Expr, original: Motif | None = None, *, algorithms: Bindings | None = None) -> Program:
    """Prove that an expression does what the original motif does.

    Two properties are proved: no motif touches data that a motif in parallel with it writes, so that any order of
    motifs that the expression allows gives the same result; and the program verifies as the original collective.

    Args:
        expr: the expression.
        original: the motif that the expression carries out; None if the expression is a single motif.
        algorithms: bindings of motifs, as for `lower`.

    Returns:
        The verified program.

    Raises:
        InvalidInput: the original is missing, or an algorithm does not fit its motif.
        VerificationError: the expression is wrong; the text names the motif.
    """
    whole = _original(expr, original)
    built = _Lowered.of(expr, whole, algorithms)
    built.refuse_races(expr)
    try:
        built.program.verify()
    except VerificationError as error:
        built.blame(str(error))
    return built.program


def leaf_programs(expr: Expr, *, algorithms: Bindings | None = None) -> tuple[Leaf, ...]:
    """Each motif alone: its program (on its own ranks) and size, for costing, and the motifs that it waits for.

    >>> from stretto.planner.algebra.motif import motif
    >>> from stretto.planner.algebra.rules import apply
    >>> [(leaf.program.collective.kind, leaf.nbytes, leaf.after) for leaf in leaf_programs(
    ...     apply(motif("AR", 4, 1000), "ring"))]
    [('reduce_scatter', 1000, ()), ('all_gather', 1000, (0,))]
    """
    waits = expr.after
    found = []
    for number, (path, motif) in enumerate(expr.walk()):
        binding = _binding(algorithms, number, motif)
        program = lower(motif, algorithms=None if binding is None else {0: binding})
        found.append(Leaf(path=path, motif=motif, program=program, after=waits[number]))
    return tuple(found)


def _original(expr: Expr, original: Motif | None) -> Motif:
    if original is not None:
        return original
    if not isinstance(expr, Motif):
        raise InvalidInput("original: several motifs do not say by themselves what collective they should be")
    return expr


def _binding(bindings: Bindings | None, number: int, motif: Motif) -> Binding | None:
    given = bindings or {}
    return given.get(number, given.get(motif.kind))


@dataclass(frozen=True, kw_only=True)
class _Lowered:
    program: Program
    leaves: tuple[Motif, ...]
    leaf: Ints
    """The number of the motif that each transfer belongs to."""
    refinement: Refinement

    @classmethod
    def of(cls, expr: Expr, original: Motif, bindings: Bindings | None) -> _Lowered:
        leaves = expr.leaves
        members = set(original.ranks)
        for motif in leaves:
            if (motif.kind == "AA") != (original.kind == "AA"):
                raise VerificationError(f"{motif}: has no place in {original}; only an AA is made of AAs")
            if not members.issuperset(motif.ranks):
                wrong = min(set(motif.ranks) - members)
                raise VerificationError(f"{motif}: process {wrong} takes no part in {original}")
        shapes = [shape_of(motif, _binding(bindings, number, motif)) for number, motif in enumerate(leaves)]
        refinement = Refinement.of(original, leaves, shapes)
        begins: list[int] = []
        _begin(expr, shapes, 0, begins)
        program, leaf = _program(original, leaves, shapes, begins, refinement)
        return cls(program=program, leaves=leaves, leaf=leaf, refinement=refinement)

    def refuse_races(self, expr: Expr) -> None:
        """Raise if a motif reads or writes data that a parallel motif writes, because their order is not defined."""
        p = self.program
        rows = np.diff(p.chunk_ptr)
        leaf = np.repeat(self.leaf, rows)
        chunks = p.collective.num_chunks
        slots = [np.repeat(end, rows).astype(np.int64) * chunks + p.chunk for end in (p.src, p.dst)]
        first = np.argsort(leaf, kind="stable")
        ends = np.searchsorted(leaf[first], np.arange(len(self.leaves) + 1))
        touched = [tuple(np.unique(slot[first[a:b]]) for slot in slots) for a, b in pairwise(ends.tolist())]
        self._races(expr, [*touched], 0)

    def _races(self, expr: Expr, touched: list[tuple[Ints, ...]], number: int) -> tuple[Ints, Ints, int]:
        """The slots that an expression reads and writes, and the number of the motif after it."""
        if isinstance(expr, Motif):
            return touched[number][0], touched[number][1], number + 1
        reads, writes, of_child, begins = [], [], [], [number]
        for at, child in enumerate(expr.children):
            read, write, number = self._races(child, touched, number)
            reads.append(read)
            writes.append(write)
            of_child.append(np.full(len(write), at))
            begins.append(number)
        written, writer = np.concatenate(writes), np.concatenate(of_child)
        if isinstance(expr, Par) and len(written):
            order = np.argsort(written, kind="stable")
            written, writer = written[order], writer[order]
            twice = np.flatnonzero(written[1:] == written[:-1])
            if len(twice):
                self._race(int(written[twice[0]]), begins, int(writer[twice[0]]), int(writer[twice[0] + 1]), "write")
            for at, read in enumerate(reads):
                place = np.minimum(np.searchsorted(written, read), len(written) - 1)
                bad = np.flatnonzero((written[place] == read) & (writer[place] != at))
                if len(bad):
                    self._race(int(read[bad[0]]), begins, int(writer[place[bad[0]]]), at, "read")
        return np.unique(np.concatenate(reads)), np.unique(written), number

    def _race(self, slot: int, begins: Sequence[int], one: int, other: int, verb: str) -> NoReturn:
        """Raise an error that names the two motifs, one in each of two parallel children, that use the same slot."""
        rank, chunk = divmod(slot, self.program.collective.num_chunks)

        def find(child: int, ends: NDArray[np.int32]) -> str:
            hit = (np.repeat(ends, np.diff(self.program.chunk_ptr)) == rank) & (self.program.chunk == chunk)
            owners = np.repeat(self.leaf, np.diff(self.program.chunk_ptr))[hit]
            inside = owners[(owners >= begins[child]) & (owners < begins[child + 1])]
            return self._named(int(inside[0]))

        p = self.program
        process = p.collective.ranks[rank]
        writer, second = find(one, p.dst), find(other, p.src if verb == "read" else p.dst)
        both = (
            f"both write {self._place(chunk)} of P_{process}"
            if verb == "write"
            else (f"the second reads {self._place(chunk)} of P_{process}, which the first writes")
        )
        raise VerificationError(f"{writer} and {second} are in parallel, but {both}")

    def blame(self, message: str) -> NoReturn:
        """Raise the verifier's message in the words of the notation, with the motif that the message is about."""
        p = self.program
        text = message.removeprefix(f"{p.name}: ")
        transfers = [int(number) for number in re.findall(r"transfer (\d+) \(", text)]
        ends = re.match(r"rank (\d+) ends .*chunk (\d+)", text)
        if transfers:
            who = self._named(int(self.leaf[transfers[0]]))
        elif ends:
            hits = (p.chunk == int(ends[2])) & (np.repeat(p.dst, np.diff(p.chunk_ptr)) == int(ends[1]))
            last = np.repeat(self.leaf, np.diff(p.chunk_ptr))[hits]
            who = f"after {self._named(int(last[-1]))}" if len(last) else "no motif writes there"
        else:
            who = str(self.refinement.original)
        text = re.sub(r"transfer (\d+) \([^)]*\)", lambda m: f"a transfer of motif {self.leaf[int(m[1])]}", text)
        text = re.sub(r"\brank (\d+)", lambda m: f"P_{p.collective.ranks[int(m[1])]}", text)
        text = re.sub(r"\bchunk (\d+)", lambda m: self._place(int(m[1])), text)
        raise VerificationError(f"{who}: {text}") from None

    def _named(self, number: int) -> str:
        text = str(self.leaves[number])
        return f"motif {number}, {text if len(text) <= MAX_NAMED else f'{text[:MAX_NAMED]}...'}"

    def _place(self, chunk: int) -> str:
        """A chunk as the notation would write it."""
        r = self.refinement
        pair, at = divmod(chunk, r.per_pair)
        low = int(np.flatnonzero(r.number == at)[0])
        span = f"{r.edges[low]}:{r.edges[low + 1]}"
        if r.original.kind != "AA":
            return f"T[{span}]"
        row, column = (int(index[0]) for index in np.nonzero(r.pairs == pair))
        return f"T_{r.processes[0][row]}[{r.processes[1][column]}, {span}]"


def _begin(expr: Expr, shapes: Sequence[ProgramShape], step: int, begins: list[int]) -> int:
    """Append the step at which each motif begins; return the step after the expression."""
    if isinstance(expr, Motif):
        begins.append(step)
        return step + shapes[len(begins) - 1].num_steps
    end = step
    for child in expr.children:
        end = max(end, _begin(child, shapes, step if isinstance(expr, Par) else end, begins))
    return end


def _program(
    original: Motif,
    leaves: Sequence[Motif],
    shapes: Sequence[ProgramShape],
    begins: Sequence[int],
    refinement: Refinement,
) -> tuple[Program, Ints]:
    position = {rank: at for at, rank in enumerate(original.ranks)}
    columns: dict[str, list[NDArray[Any]]] = {
        key: [] for key in ("src", "dst", "reduce", "lane", "route", "cast", "step", "leaf", "chunk", "width")
    }
    paced: list[tuple[Ints, Ints]] = []
    routes: list[tuple[int, ...]] = []
    digests: set[str] = set()
    count = casts = 0
    for number, (leaf, shape) in enumerate(zip(leaves, shapes, strict=True)):
        program = shape.program
        ptr, chunk, kept = moved(shape, refinement.rows(leaf, shape))
        at = np.array([position[rank] for rank in leaf.ranks], np.int32)
        for key, values in (
            ("src", at[program.src[kept]]),
            ("dst", at[program.dst[kept]]),
            ("reduce", program.reduce[kept]),
            ("lane", program.lane[kept]),
            ("step", shape.step[kept] + begins[number]),
            ("chunk", chunk),
            ("width", np.diff(ptr)),
            ("leaf", np.full(len(kept), number)),
            ("route", np.where(program.route[kept] < 0, -1, program.route[kept] + len(routes))),
            ("cast", np.where(program.cast[kept] < 0, -1, program.cast[kept] + casts)),
        ):
            columns[key].append(values)
        paced.append(_kept_waits(shape, kept, count))
        count += len(kept)
        casts += int(program.cast.max(initial=-1)) + 1
        routes += program.routes
        digests |= {program.routes_digest} - {""}
    if len(digests) > 1:
        raise InvalidInput("algorithms: their routes are of different clusters")
    column = {key: np.concatenate(blocks) for key, blocks in columns.items()}
    order = np.argsort(column["step"], kind="stable")
    place = np.empty(count, np.int64)
    place[order] = np.arange(count)
    built = Program.from_steps(
        "motifs" if len(leaves) > 1 else shapes[0].program.name,
        refinement.collective(),
        chunk_ptr=np.concatenate([[0], np.cumsum(column["width"])]),
        routes=tuple(routes),
        routes_digest=next(iter(digests), ""),
        **{key: column[key] for key in ("src", "dst", "reduce", "lane", "route", "step", "chunk", "cast")},
    )
    waiting = [(place[before], place[behind]) for behind, before in paced if len(before)]
    if waiting:
        after_ptr, after = rows_from_edges(count, [(built.after, row_numbers(built.after_ptr)), *waiting])
        built = built.replace(after_ptr=after_ptr, after=after)
    return built, column["leaf"][order]


def _kept_waits(shape: ProgramShape, kept: Ints, offset: int) -> tuple[Ints, Ints]:
    """The pacing waits between the transfers that are kept.

    A transfer that waited for a dropped transfer waits for the dependencies of the dropped one instead.
    """
    behind, before = shape.paced
    number = np.full(shape.program.num_transfers, -1, np.int64)
    number[kept] = np.arange(len(kept)) + offset
    behind, before = behind[number[behind] >= 0], before[number[behind] >= 0]
    order = np.argsort(shape.paced[0], kind="stable")
    ptr = np.searchsorted(shape.paced[0][order], np.arange(len(number) + 1))
    onward = shape.paced[1][order]
    while len(before) and np.any(number[before] < 0):
        gone = number[before] < 0
        fan = np.diff(ptr)[before[gone]]
        first = np.repeat(ptr[before[gone]] - (np.cumsum(fan) - fan), fan)
        further = np.unique(np.stack([np.repeat(behind[gone], fan), onward[first + np.arange(fan.sum())]]), axis=1)
        behind = np.concatenate([behind[~gone], further[0]])
        before = np.concatenate([before[~gone], further[1]])
    return number[behind], number[before]
