# SPDX-License-Identifier: Apache-2.0
"""Text forms line by line: a strict reader, and how numbers and names are written."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import NoReturn

from ...errors import InvalidInput
from .named import entries_for

MAX_INT = (1 << 31) - 1


class LineReader:
    """A reader that goes through the lines of a text once."""

    def __init__(self, text: str, where: str) -> None:
        self.lines = [
            (number, line.rstrip())
            for number, line in enumerate(text.splitlines(), 1)
            if line.strip() and not line.lstrip().startswith("#")
        ]
        self.where, self.next, self.number, self.entries = where, 0, 1, 0
        self.most = entries_for(text)

    def fail(self, message: str) -> NoReturn:
        """Raise `InvalidInput` that names the line."""
        raise InvalidInput(f"{self.where} line {self.number}: {message}") from None

    def peek(self) -> str:
        """The line that comes next, or an empty text at the end."""
        return self.lines[self.next][1] if self.next < len(self.lines) else ""

    def line(self) -> str:
        """The next line."""
        if self.next >= len(self.lines):
            self.fail("the file ends too early")
        self.number, line = self.lines[self.next]
        self.next += 1
        return line

    def keyword(self, word: str) -> str:
        """The rest of the next line, which must begin with a word."""
        line = self.line()
        head, _, rest = line.partition(" ")
        if head != word:
            self.fail(f"expected '{word} ...', not {line[:60]!r}")
        return rest

    def whole(self, text: str, key: str = "number") -> int:
        """Read a whole number; `key` is its name in messages."""
        if not re.fullmatch(r"-?[0-9]{1,10}", text):
            self.fail(f"{key}: expected a whole number, not {text[:40]!r}")
        return int(text)

    def integers(self, text: str, limit: int) -> Iterator[int]:
        """Read numbers such as ``4,7-9``, each below `limit`; they are counted before any list is made."""
        for item in text.split(",") if text else ():
            low, dash, high = item.partition("-")
            first = self.whole(low)
            last = self.whole(high) if dash else first
            if not 0 <= first <= last < limit:
                self.fail(f"{item[:40]!r}: must be within 0..{limit - 1}")
            self.entries += last - first + 1
            if self.entries > self.most:
                self.fail(f"more than {self.most} entries in a program of this size")
            yield from range(first, last + 1)

    def unquote(self, text: str) -> str:
        """Read a text that may be quoted as in JSON."""
        if not text.startswith('"'):
            return text
        try:
            value = json.loads(text)
        except ValueError:
            self.fail(f"not a quoted text: {text[:60]}")
        return str(value)


def quote(text: str) -> str:
    """A text that stays on one line: as it is, or quoted as in JSON."""
    plain = text and text == text.strip() and text.isprintable() and not text.startswith('"')
    return text if plain else json.dumps(text)


def ranges(values: Iterable[int], mark: str = "") -> str:
    """``1,2,4-6``: three or more neighbours in a row become a range.

    >>> ranges([1, 2, 4, 5, 6, 3], "c")
    'c1,c2,c4-6,c3'
    """
    words: list[str] = []
    for _, group in groupby(enumerate(values), lambda pair: pair[1] - pair[0]):
        run = [value for _, value in group]
        words += [f"{mark}{run[0]}-{run[-1]}"] if len(run) > 2 else [f"{mark}{v}" for v in run]
    return ",".join(words)
