# SPDX-License-Identifier: Apache-2.0
"""The paper's notation for motif expressions: printed, and read back as exactly the same expression.

::

    AR(T[0:1024], PG[0:8])                              all-reduce of a whole tensor over 8 processes
    RS(T[0:512], PG[0:8]) -> AG(T[0:512], PG[0:8])      one after the other
    AR(T[0:512], PG[0:8]) || AR(T[512:1024], PG[0:8])   at the same time; || binds closer than ->
    ||_{s=0}^{3} AR(T[256*s:256*s+256], PG[0:8])        the same for s = 0, 1, 2, 3
    RE_4(T[0:64], PG[0:16:4])                           a reduce with root P_4 over P_0, P_4, P_8, P_12
    AA(T[(i+0)%8:(i+4)%8, 0:64], PG[0:8])               from the process at position i to four others
    RS(T[0:8|16:24|32:36], PG[2:5])                     the shard of each process, where it is not an even piece
    AA(T_{0:2|2:4}[0,2, 0:64], PG[0,2])                 blocks held for others: of P_0 and P_1 by P_0, ...

``∥``, ``→`` and ``T_i`` are read as well. ``|_{s=0}^{3} {8*s:8*s+4}`` repeats a shard and ``,_{s=0}^{3} 8*s:8*s+4`` an
entry of a list; ``-`` is an empty shard. A repetition may stand anywhere in a list, and adds its parts to that list.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .motif import SHARDED, Expr, Motif, Par
from .notation_read import VARIABLES, parse
from .spans import Spans, cut

__all__ = ["parse", "show"]

RUN = {"||": 3, "->": 3, "|": 4, ",": 4}
"""The least number of evenly growing parts that are written as one repetition, for each joint."""
JOINTS = {"||": " || ", "->": " -> ", "|": "|", ",": ","}


@dataclass(frozen=True)
class _Number:
    """A number in the text: a constant plus multiples of running variables."""

    value: int
    slopes: tuple[tuple[str, int], ...] = ()
    root: bool = False

    def plus(self, variable: str, slope: int) -> _Number:
        return _Number(self.value, ((variable, slope), *self.slopes), self.root) if slope else self

    def __str__(self) -> str:
        text = ""
        for variable, slope in self.slopes:
            size = variable if abs(slope) == 1 else f"{abs(slope)}*{variable}"
            if not text and slope < 0:
                text = f"{self.value}-{size}"
            else:
                text += f"{'-' if slope < 0 else '+' if text else ''}{size}"
        if not self.slopes or (self.value and self.slopes[0][1] > 0):
            text += f"{'-' if self.value < 0 else '+' if text else ''}{abs(self.value)}"
        return f"{{{text}}}" if self.root and self.slopes else text


Item = str | _Number
Items = list[Item]


def show(expr: Expr, *, expand: bool = False, unicode: bool = False) -> str:
    """The text of an expression, which `parse` reads back.

    >>> text = "||_{s=0}^{3} AR(T[256*s:256*s+256], PG[0:8])"
    >>> show(parse(text)) == text
    True
    >>> show(parse(text), unicode=True)
    '∥_{s=0}^{3} AR(T[256*s:256*s+256], PG[0:8])'

    Args:
        expr: the expression.
        expand: whether every motif is written out, without repetitions.
        unicode: whether ``∥`` and ``→`` are used instead of ``||`` and ``->``.

    Returns:
        The text.
    """
    text = "".join(str(item) for item in _Writer(expand=expand).expression(expr))
    return text.replace("||", "∥").replace("->", "→") if unicode else text


@dataclass(frozen=True)
class _Writer:
    expand: bool

    def expression(self, expr: Expr) -> Items:
        if isinstance(expr, Motif):
            return self.motif(expr)
        tight = isinstance(expr, Par)
        parts = []
        for child in expr.children:
            text = self.expression(child)
            bare = isinstance(child, Motif) or (not tight and isinstance(child, Par))
            parts.append(text if bare else ["(", *text, ")"])
        atoms = [tight or not isinstance(child, Par) for child in expr.children]
        return self.join(parts, "||" if tight else "->", atoms)

    def join(self, parts: Sequence[Items], joint: str, atoms: Sequence[bool] = ()) -> Items:
        """Parts with the joint between them; runs of evenly growing parts are written once.

        Parts that are no `atoms` need brackets when they are repeated.
        """
        height = 1 + max((_height(item) for part in parts for item in part), default=-1)
        found: list[Items] = []
        at = 0
        while at < len(parts):
            length, slopes = (1, []) if self.expand or height >= len(VARIABLES) else _run(parts, at)
            if length >= RUN[joint]:
                variable = VARIABLES[height]
                body = [
                    item.plus(variable, slope) if isinstance(item, _Number) else item
                    for item, slope in zip(parts[at], slopes, strict=True)
                ]
                if joint == "|":
                    body = ["{", *body, "}"]
                elif atoms and not atoms[at]:
                    body = ["(", *body, ")"]
                found.append([joint, f"_{{{variable}=0}}^{{{length - 1}}} ", *body])
                at += length
            else:
                found.append(parts[at])
                at += 1
        items: Items = []
        for number, part in enumerate(found):
            between = JOINTS[joint] if part[0] != joint else JOINTS[joint].removesuffix(f"{joint} ").removesuffix(joint)
            items += [between, *part] if number else part
        return items

    def motif(self, m: Motif) -> Items:
        root: Items = ["_", _Number(m.root, root=True)] if m.root >= 0 else []
        return [m.kind, *root, "(T", *self.payload(m), ", PG[", *self.numbers(m.ranks), "])"]

    def payload(self, m: Motif) -> Items:
        if m.kind == "AA":
            return self.blocks(m)
        if m.kind in SHARDED and m.shards != cut(m.spans, len(m.ranks)):
            return ["[", *self.join([self.spans(shard) for shard in m.shards], "|"), "]"]
        return ["[", *self.spans(m.spans), "]"]

    def blocks(self, m: Motif) -> Items:
        alone = tuple((rank,) for rank in m.ranks)
        count, (first, last) = len(m.ranks), m.window
        holders: Items = [] if m.held == alone else ["_{", *self.groups(m.held), "}"]
        targets = self.numbers(m.ranks) if m.bound == alone else self.groups(m.bound)
        if not m.whole:
            window: Items = ["(i+", _Number(first), ")%", _Number(count), ":(i+", _Number(last), ")%", _Number(count)]
            targets = window if m.bound == alone else [*window, " of ", *targets]
        return [*holders, "[", *targets, ", ", *self.spans(m.spans), "]"]

    def groups(self, groups: Sequence[Sequence[int]]) -> Items:
        return self.join([self.numbers(group) for group in groups], "|")

    def spans(self, spans: Spans) -> Items:
        return self.join([[_Number(lo), ":", _Number(hi)] for lo, hi in spans], ",") or ["-"]

    def numbers(self, values: Sequence[int]) -> Items:
        """Numbers in their order; evenly growing ones are written as ``first:last+step:step``."""
        parts: list[Items] = []
        at = 0
        while at < len(values):
            step = values[at + 1] - values[at] if at + 1 < len(values) else 0
            end = at + 1
            while step > 0 and end < len(values) and values[end] - values[end - 1] == step:
                end += 1
            if end - at >= (2 if step == 1 else 3):
                stop = values[at] + (end - at) * step
                tail: Items = [] if step == 1 else [":", _Number(step)]
                parts.append([_Number(values[at]), ":", _Number(stop), *tail])
                at = end
            else:
                parts.append([_Number(values[at])])
                at += 1
        return self.join(parts, ",") or ["-"]


def _height(item: Item) -> int:
    """The index in `VARIABLES` of the running variable that a repetition introduces, or -1."""
    return VARIABLES.index(item[2]) if isinstance(item, str) and item.startswith("_{") and len(item) > 2 else -1


def _run(parts: Sequence[Items], at: int) -> tuple[int, list[int]]:
    """The number of parts from here on that differ only in evenly growing numbers, and the growth of each number."""
    if at + 1 >= len(parts):
        return 1, []
    slopes = _growth(parts[at], parts[at + 1])
    if slopes is None:
        return 1, []
    end = at + 2
    while end < len(parts) and _growth(parts[end - 1], parts[end]) == slopes:
        end += 1
    return end - at, slopes


def _growth(one: Items, other: Items) -> list[int] | None:
    """The difference of each pair of numbers, or None if the two texts differ in anything else."""
    if len(one) != len(other):
        return None
    slopes = []
    for a, b in zip(one, other, strict=True):
        if isinstance(a, _Number) and isinstance(b, _Number):
            if a.slopes != b.slopes:
                return None
            slopes.append(b.value - a.value)
        elif a != b:
            return None
        else:
            slopes.append(0)
    return slopes
