# SPDX-License-Identifier: Apache-2.0
"""Reads the notation of motif expressions (see `notation`): any text gives an expression or an error of one line."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar, cast

from ...errors import InvalidInput
from .motif import KINDS, MAX_LEAVES, MAX_RANK, MAX_SIZE, ROOTED, SHARDED, Expr, Groups, Motif, Par, Seq
from .spans import Span, Spans

VARIABLES = "stuvwxyz"
"""Names of running variables of repetitions, from the innermost outwards."""
MAX_TEXT = 1 << 22
MAX_DEPTH = 40
MAX_STEPS = 1 << 20
"""Limit on the tokens read; a repeated part counts once per repetition."""
MAX_ENTRIES = 1 << 22
"""Limit on the ranks and processes of all motifs together."""

_TOKEN = re.compile(r"\s*(?:(\d+)|([A-Za-z]+)|(\|\||->|∥|→|[()\[\]{}_^=+*%:,|-])|(\S))")
_SAME = {"∥": "||", "→": "->"}
_END = "the end"

T = TypeVar("T")
Entry = tuple[int, ...]
"""One entry of a list: a number, or the two or three numbers of a slice."""


def parse(text: str) -> Expr:
    """The expression that a text describes.

    >>> parse("AR(T[0:512], PG[0:8]) || AR(T[512:1024], PG[0:8])").leaves[1].spans
    ((512, 1024),)
    >>> parse("AR(T[0:512] PG[0:8])")
    Traceback (most recent call last):
    stretto.errors.InvalidInput: motif text, column 13: expected ',', not 'PG'
    """
    reader = _Reader(text)
    expr = reader.sequence()
    reader.expect(_END)
    return expr


class _Reader:
    """Reads tokens from left to right; a repeated part is read once for each value of its variable."""

    def __init__(self, text: str) -> None:
        if len(text) > MAX_TEXT:
            raise InvalidInput(f"motif text: at most {MAX_TEXT} characters, not {len(text)}")
        self.tokens: list[str] = []
        self.columns: list[int] = []
        self.at = self.depth = self.steps = self.entries = self.motifs = 0
        self.values: dict[str, int] = {}
        for match in _TOKEN.finditer(text):
            token = match[1] or match[2] or match[3] or match[4]
            self.tokens.append(_SAME.get(token, token))
            self.columns.append(match.start(match.lastindex or 0) + 1)
            if match[4]:
                self.at = len(self.tokens) - 1
                self.fail(f"{token!r} has no meaning here")
        self.tokens.append(_END)
        self.columns.append(len(text) + 1)

    def fail(self, message: str) -> NoReturn:
        raise InvalidInput(f"motif text, column {self.columns[self.at]}: {message}") from None

    @property
    def token(self) -> str:
        return self.tokens[self.at]

    def described(self) -> str:
        return self.token if self.token == _END else repr(self.token[:20])

    def take(self) -> str:
        token = self.tokens[self.at]
        self.steps += 1
        if self.steps > MAX_STEPS:
            self.fail(f"the text stands for over {MAX_STEPS} words")
        if token != _END:
            self.at += 1
        return token

    def expect(self, *tokens: str) -> None:
        for token in tokens:
            if self.token != token:
                self.fail(f"expected {token if token == _END else repr(token)}, not {self.described()}")
            self.take()

    def accept(self, token: str) -> bool:
        if self.token != token:
            return False
        self.take()
        return True

    def sequence(self) -> Expr:
        parts = self.several("->", self.parallel)
        return Seq(tuple(parts)) if len(parts) > 1 else parts[0]

    def parallel(self) -> Expr:
        parts = self.several("||", self.atom)
        return Par(tuple(parts)) if len(parts) > 1 else parts[0]

    def several(self, joint: str, one: Callable[[], T]) -> list[T]:
        """Parts with a joint between them; ``joint_{s=0}^{3} part`` anywhere in the list stands for four parts."""
        found: list[T] = []
        while not found or self.token == joint:
            if self.token == joint and self.tokens[self.at + 1] == "_":
                found += self.repeated(joint, one)
                continue
            if found:
                self.take()
            found.append(one())
        return found

    def repeated(self, joint: str, one: Callable[[], T]) -> list[T]:
        self.expect(joint, "_", "{")
        variable = self.token
        if len(variable) != 1 or variable not in VARIABLES or variable in self.values:
            self.fail(f"expected a free variable of {', '.join(VARIABLES)}, not {self.described()}")
        self.take()
        self.expect("=")
        first = self.number()
        self.expect("}", "^", "{")
        last = self.number()
        self.expect("}")
        if last < first:
            self.fail(f"{variable} runs from {first} to {last}: nothing")
        if last - first >= MAX_LEAVES:
            self.fail(f"{variable} runs over {last - first + 1} values; at most {MAX_LEAVES}")
        start, found = self.at, []
        self.nest()
        for value in range(first, last + 1):
            self.at = start
            self.values[variable] = value
            found.append(self.body(joint, one))
        self.depth -= 1
        del self.values[variable]
        return found

    def body(self, joint: str, one: Callable[[], T]) -> T:
        """The repeated part, whose end is clear: one motif, one entry, or text in brackets."""
        if joint == "|":
            self.expect("{")
            part = one()
            self.expect("}")
            return part
        return cast("T", self.atom()) if joint == "->" else one()

    def nest(self) -> None:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            self.fail(f"nested more than {MAX_DEPTH} deep")

    def atom(self) -> Expr:
        if self.accept("("):
            self.nest()
            expr = self.sequence()
            self.depth -= 1
            self.expect(")")
            return expr
        return self.motif()

    def motif(self) -> Motif:
        begin = self.at
        kind = self.token
        if kind not in KINDS:
            self.fail(f"expected a motif ({', '.join(KINDS)}) or '(', not {self.described()}")
        self.take()
        self.motifs += 1
        if self.motifs > MAX_LEAVES:
            self.fail(f"the text stands for over {MAX_LEAVES} motifs")
        root = self.root(kind)
        self.expect("(", "T")
        held: list[list[Entry]] = []
        if self.accept("_") and not self.accept("i"):
            self.expect("{")
            held = self.members()
            self.expect("}")
        self.expect("[")
        window = self.window() if kind == "AA" and self.token == "(" and self.tokens[self.at + 1] == "i" else None
        targets: list[list[Entry]] = []
        if window is None or self.accept("of"):
            targets = self.members()
            if kind == "AA" and self.accept(","):
                targets[-1].append(self.entry())
        else:
            self.expect(",")
            targets = [[self.entry()]]
        self.expect("]", ",", "PG", "[")
        ranks = self.ids(self.listed())
        self.expect("]", ")")
        end, self.at = self.at, begin
        motif = self.build(kind, ranks, root, held, targets, window)
        self.at = end
        return motif

    def build(
        self,
        kind: str,
        ranks: tuple[int, ...],
        root: int,
        held: list[list[Entry]],
        targets: list[list[Entry]],
        window: tuple[int, int, int] | None,
    ) -> Motif:
        fields: dict[str, Any]
        if kind == "AA":
            fields = {"spans": self.spans([targets[-1].pop()]), "window": window[:2] if window else (0, 0)}
            if window is not None and window[2] != len(ranks):
                self.fail(f"AA: its window counts modulo {window[2]}, but it has {len(ranks)} ranks")
            fields |= {"held": self.groups(held, ranks), "bound": self.groups(targets, ranks)}
        elif held:
            self.fail(f"{kind}: only AA holds blocks of other processes")
        elif kind in SHARDED and len(targets) > 1:
            fields = {"root": root, "shards": tuple(self.spans(t) for t in targets)}
        elif len(targets) > 1:
            self.fail(f"{kind}: has no shards; those with shards are {', '.join(SHARDED)}")
        else:
            fields = {"root": root, "spans": self.spans(targets[0])}
        try:
            return Motif(kind=kind, ranks=ranks, **fields)
        except InvalidInput as error:
            self.fail(str(error))

    def root(self, kind: str) -> int:
        if kind not in ROOTED:
            return -1
        self.expect("_")
        if self.accept("{"):
            root = self.number()
            self.expect("}")
            return root
        if not (self.token.isascii() and self.token.isdigit()):
            self.fail(f"expected the root of {kind}, not {self.described()}")
        return self.factor()

    def window(self) -> tuple[int, int, int]:
        self.expect("(", "i", "+")
        first = self.number()
        self.expect(")", "%")
        count = self.factor()
        self.expect(":", "(", "i", "+")
        last = self.number()
        self.expect(")", "%")
        if self.factor() != count:
            self.fail("a window counts modulo one number")
        return first, last, count

    def members(self) -> list[list[Entry]]:
        """Lists of entries, one per process, with ``|`` between them."""
        return self.several("|", self.listed)

    def listed(self) -> list[Entry]:
        """One list of entries; ``-`` is the empty list."""
        if self.accept("-"):
            return [self.entry()] if self.accept(",") else []
        return self.several(",", self.entry)

    def entry(self) -> Entry:
        numbers = [self.number()]
        while len(numbers) < 3 and self.accept(":"):
            numbers.append(self.number())
        return tuple(numbers)

    def number(self) -> int:
        value = self.product()
        while self.token in ("+", "-"):
            sign = 1 if self.take() == "+" else -1
            value += sign * self.product()
        if not 0 <= value <= MAX_SIZE:
            self.fail(f"numbers must be 0..{MAX_SIZE}")
        return value

    def product(self) -> int:
        value = self.factor()
        while self.accept("*"):
            value *= self.factor()
            if value > MAX_SIZE:
                self.fail(f"numbers must be 0..{MAX_SIZE}")
        return value

    def factor(self) -> int:
        if self.token in self.values:
            return self.values[self.take()]
        if self.accept("("):
            self.nest()
            value = self.number()
            self.depth -= 1
            self.expect(")")
            return value
        if not self.token.isdecimal() or not self.token.isascii():
            self.fail(f"expected a number, not {self.described()}")
        if len(self.token) > 19:
            self.fail(f"numbers must be 0..{MAX_SIZE}")
        return int(self.take())

    def spans(self, entries: list[Entry]) -> Spans:
        found: list[Span] = []
        for entry in entries:
            if len(entry) != 2 or entry[0] >= entry[1]:
                self.fail(f"a payload is first:last with first < last, not {':'.join(map(str, entry))}")
            found.append((entry[0], entry[1]))
        return tuple(found)

    def ids(self, entries: list[Entry]) -> tuple[int, ...]:
        found: list[int] = []
        for entry in entries:
            run = range(entry[0], entry[0] + 1)
            if len(entry) > 1:
                if len(entry) > 2 and entry[2] < 1:
                    self.fail("a step must be >= 1")
                run = range(*entry)
            if entry[0] >= MAX_RANK or (run and run[-1] >= MAX_RANK):
                self.fail(f"processes must be 0..{MAX_RANK - 1}")
            self.entries += len(run)
            if self.entries > MAX_ENTRIES:
                self.fail(f"the text stands for over {MAX_ENTRIES} processes")
            found.extend(run)
        return tuple(found)

    def groups(self, members: list[list[Entry]], ranks: tuple[int, ...]) -> Groups:
        """One set of processes per rank; a single list gives each rank one process."""
        if not members or (len(members) == 1 and not members[0]):
            return ()
        if len(members) == 1 and len(ranks) > 1:
            dealt = self.ids(members[0])
            if len(dealt) != len(ranks):
                self.fail(f"AA: {len(dealt)} processes for {len(ranks)} ranks; a set for each has '|' between")
            return tuple((process,) for process in dealt)
        return tuple(self.ids(entries) for entries in members)
