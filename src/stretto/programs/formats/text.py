# SPDX-License-Identifier: Apache-2.0
"""The text form of a program: short, reversible, made to be read and compared.

::

    stretto-program 1
    name pair
    collective all_gather ranks 2 chunks 1
    0: 0>1 c0
    1: 1>0 c1

One line per transfer: ``7: 2>3 +c1,c4-6 after 4,5 gate 3 lane 1 via 0`` is transfer 7 from rank 2 to 3, which
adds (``+``) chunks 1, 4, 5 and 6, starts after 4 and 5 have finished, writes once 3 is done with rank 3, and
takes lane 1 and route 0. Lines that end in the same ``cast N`` are one multicast message. Lines that begin with # are
comments.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from itertools import groupby, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...collectives import ALL_PARTS, Collective
from ...collectives.conditions import MAX_RANKS
from ...errors import InvalidInput, unknown
from ..ir import Program
from .lines import MAX_INT, LineReader, quote, ranges
from .named import NamedCollective, name_of

HEADER = "stretto-program"
VERSION = 1

_OPTIONS = ("ranks", "devices", "chunks", "num_chunks", "root", "in-place", "pairs", "counts", "helpers")
_TRANSFER = re.compile(
    r"(?P<t>\d{1,9}): (?P<src>\d{1,9})>(?P<dst>\d{1,9}) (?P<add>\+?)(?P<chunks>c[c\d,-]*)"
    r"(?: after (?P<after>[\d,-]+))?(?: gate (?P<gate>[\d,-]+))?(?: lane (?P<lane>\d{1,5}))?"
    r"(?: via (?P<via>\d{1,9}))?(?: cast (?P<cast>\d{1,9}))?"
)


def dumps(program: Program) -> str:
    """The text of a program; `loads` gives back an equal one.

    >>> from stretto import Broadcast
    >>> p = Program.from_steps("b", Broadcast(3), src=[0, 1], dst=[1, 2], chunk=[0, 0], step=[0, 1])
    >>> print(dumps(p), end="")
    stretto-program 1
    name b
    collective broadcast ranks 3 chunks 1 root 0
    0: 0>1 c0
    1: 1>2 c0 after 0
    """
    p = program
    lines = [f"{HEADER} {VERSION}", f"name {quote(p.name)}", *_collective_lines(p.collective)]
    if p.routes_digest:
        lines.append(f"routes {quote(p.routes_digest)}")
    lines += [f"route {i}: {ranges(route)}".rstrip() for i, route in enumerate(p.routes)]
    src, dst, add, lane, via, cast = (a.tolist() for a in (p.src, p.dst, p.reduce, p.lane, p.route, p.cast))
    chunks, after, gate = (
        [values[a:b] for a, b in pairwise(ptr.tolist())]
        for ptr, values in (
            (p.chunk_ptr, p.chunk.tolist()),
            (p.after_ptr, p.after.tolist()),
            (p.gate_ptr, p.gate.tolist()),
        )
    )
    for t in range(p.num_transfers):
        line = f"{t}: {src[t]}>{dst[t]} {'+' if add[t] else ''}{ranges(chunks[t], 'c')}"
        if after[t]:
            line += f" after {ranges(after[t])}"
        if gate[t]:
            line += f" gate {ranges(gate[t])}"
        if lane[t]:
            line += f" lane {lane[t]}"
        if via[t] >= 0:
            line += f" via {via[t]}"
        if cast[t] >= 0:
            line += f" cast {cast[t]}"
        lines.append(line)
    return "\n".join(lines) + "\n"


def loads(text: str, *, where: str = "program") -> Program:
    """Read the text form; errors name the line."""
    return _Reader(text, where).program()


class _Reader(LineReader):
    """A reader of the lines of a plain program."""

    def program(self) -> Program:
        version = self.keyword(HEADER)
        if version != str(VERSION):
            self.fail(f"version {version[:20]!r} is not known; this reads version {VERSION}")
        name = self.unquote(self.keyword("name"))
        collective = self.collective()
        digest = self.unquote(self.keyword("routes")) if self.peek().startswith("routes ") else ""
        routes: list[tuple[int, ...]] = []
        while self.peek().startswith("route "):
            number, _, links = self.keyword("route").partition(":")
            if number != str(len(routes)):
                self.fail(f"expected route {len(routes)}, not {number[:20]!r}")
            routes.append(tuple(self.integers(links.strip(), MAX_INT)))
        columns: dict[str, list[int]] = {key: [] for key in ("src", "dst", "add", "lane", "via", "cast")}
        lists: dict[str, tuple[list[int], list[int]]]
        lists = {key: ([0], []) for key in ("chunks", "after", "gate")}
        limits = {"chunks": collective.num_chunks, "after": len(self.lines), "gate": len(self.lines)}
        while self.next < len(self.lines):
            match = _TRANSFER.fullmatch(self.line())
            if match is None:
                self.fail(
                    "expected 'N: SRC>DST [+]cCHUNKS [after N,..] [gate N,..] [lane L] [via R] [cast C]', "
                    f"not {self.lines[self.next - 1][1][:60]!r}"
                )
            if int(match["t"]) != len(columns["src"]):
                self.fail(f"expected transfer {len(columns['src'])}, not {match['t']}")
            for key, default in (("src", 0), ("dst", 0), ("lane", 0), ("via", -1), ("cast", -1)):
                columns[key].append(default if match[key] is None else int(match[key]))
            columns["add"].append(bool(match["add"]))
            if columns["lane"][-1] >= 1 << 15:
                self.fail(f"lane: must be 0..{(1 << 15) - 1}, not {columns['lane'][-1]}")
            for key, (ptr, values) in lists.items():
                values.extend(self.integers((match[key] or "").replace("c", ""), limits[key]))
                ptr.append(len(values))

        def table(key: str) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
            return np.array(lists[key][0], np.int64), np.array(lists[key][1], np.int32)

        (chunk_ptr, chunk), (after_ptr, after), (gate_ptr, gate) = (table(key) for key in lists)
        try:
            return Program(
                name=name,
                collective=collective,
                src=np.array(columns["src"], np.int32),
                dst=np.array(columns["dst"], np.int32),
                reduce=np.array(columns["add"], np.bool_),
                chunk_ptr=chunk_ptr,
                chunk=chunk,
                after_ptr=after_ptr,
                after=after,
                gate_ptr=gate_ptr,
                gate=gate,
                lane=np.array(columns["lane"], np.int16),
                route=np.array(columns["via"], np.int32),
                routes=tuple(routes),
                routes_digest=digest,
                cast=np.array(columns["cast"], np.int32),
            )
        except InvalidInput as error:
            raise InvalidInput(f"{self.where}: {error}") from None

    def collective(self) -> Collective:
        words = self.keyword("collective")
        if words.startswith("explicit "):
            build = self.explicit(words.removeprefix("explicit "))
        else:
            kind, _, rest = words.partition(" ")
            options = self.options(rest)
            named = NamedCollective(
                kind=kind,
                ranks=self.ranks(options),
                chunks=self.integer(options, "chunks"),
                root=self.integer(options, "root", -1),
                in_place="in-place" in options,
                pairs=tuple(self.pair(pair) for pair in options.get("pairs", "").split(",") if pair),
                counts=tuple(self.numbers(row) for row in options.get("counts", "").split(";") if row),
                helpers=tuple(self.integers(options.get("helpers", ""), MAX_INT)),
            )
            build = partial(named.build, self.most)
        try:
            return build()
        except InvalidInput as error:
            self.fail(f"collective: {error}")

    def explicit(self, words: str) -> Callable[[], Collective]:
        """The builder of a collective that has no name, with its conditions written out."""
        kind, _, rest = words.rpartition('" ') if words.startswith('"') else words.partition(" ")
        options = self.options(rest)
        ranks = self.ranks(options)
        num_chunks = self.integer(options, "num_chunks")
        if not 1 <= num_chunks <= self.most:
            self.fail(f"num_chunks: must be 1..{self.most} in a program of this size, not {num_chunks}")
        share = self.repeated(self.keyword("share"), num_chunks)
        place = [int(x) for x in self.repeated(self.keyword("place"), len(ranks))]
        sets: list[tuple[int, ...]] = []
        while self.peek().startswith("set "):
            sets.append(tuple(self.integers(self.row("set", len(sets)), MAX_INT)))
        tables: dict[str, tuple[list[int], list[int], list[int]]] = {}
        for side, mark, default in (("input", ".", 0), ("output", ":", ALL_PARTS)):
            ptr, chunks, extra = [0], [], []
            for rank in range(len(ranks)):
                for item in self.row(side, rank).split():
                    span, _, tag = item.partition(mark)
                    more = list(self.integers(span.replace("c", ""), num_chunks))
                    chunks += more
                    extra += [self.whole(tag) if tag else default] * len(more)
                ptr.append(len(chunks))
            tables[side] = ptr, chunks, extra
        collective = partial(
            Collective,
            kind=self.unquote(kind + '"' if words.startswith('"') else kind),
            ranks=ranks,
            num_chunks=num_chunks,
            chunks=self.integer(options, "chunks"),
            in_ptr=np.array(tables["input"][0], np.int64),
            in_chunk=np.array(tables["input"][1], np.int32),
            in_part=np.array(tables["input"][2], np.int32),
            out_ptr=np.array(tables["output"][0], np.int64),
            out_chunk=np.array(tables["output"][1], np.int32),
            out_set=np.array(tables["output"][2], np.int32),
            chunk_share=np.array(share, np.float64),
            place=np.array(place, np.int64),
            part_sets=tuple(sets),
            in_place="in-place" in options,
            root=self.integer(options, "root", -1),
        )
        helpers = tuple(self.integers(options.get("helpers", ""), MAX_INT))
        return (lambda: collective().with_helpers(helpers)) if helpers else collective

    def row(self, word: str, number: int) -> str:
        head, _, rest = self.keyword(word).partition(":")
        if head != str(number):
            self.fail(f"expected {word} {number}, not {head[:20]!r}")
        return rest.strip()

    def options(self, text: str) -> dict[str, str]:
        """Read options as pairs of words (key, value); ``in-place`` has no value."""
        words = iter(text.split())
        options = {word: "" if word == "in-place" else next(words, "") for word in words}
        for word in options:
            if word not in _OPTIONS:
                self.fail(f"collective: {unknown('word', word[:40], _OPTIONS)}")
        return options

    def ranks(self, options: dict[str, str]) -> tuple[int, ...]:
        if "devices" in options:
            return tuple(self.integers(options["devices"], MAX_INT))
        count = self.integer(options, "ranks")
        if not 1 <= count <= MAX_RANKS:
            self.fail(f"ranks: must be 1..{MAX_RANKS}, not {count}")
        return tuple(range(count))

    def integer(self, options: dict[str, str], key: str, default: int | None = None) -> int:
        if key not in options and default is not None:
            return default
        return self.whole(options.get(key, ""), key)

    def numbers(self, text: str) -> tuple[float, ...]:
        try:
            return tuple(float(x) for x in text.split(","))
        except ValueError:
            self.fail(f"expected numbers, not {text[:40]!r}")

    def pair(self, text: str) -> tuple[int, int]:
        a, _, b = text.partition(">")
        return self.whole(a, "pairs"), self.whole(b, "pairs")

    def repeated(self, text: str, count: int) -> list[float]:
        """Read numbers such as ``0.25*4 0.5``; there must be `count` of them."""
        values: list[float] = []
        for word in text.split():
            value, _, times = word.partition("*")
            repeat = self.whole(times) if times else 1
            if not 0 <= repeat <= count - len(values):
                self.fail(f"expected {count} numbers, not more")
            values += [*self.numbers(value)] * repeat
        if len(values) != count:
            self.fail(f"expected {count} numbers, not {len(values)}")
        return values


def _collective_lines(collective: Collective) -> list[str]:
    c = collective.without_helpers()
    counted = c.ranks == tuple(range(c.num_ranks))
    ranks = f"ranks {c.num_ranks}" if counted else f"devices {ranges(c.ranks)}"
    named = name_of(c)
    tail = f" helpers {ranges(collective.ranks[c.num_ranks :])}" if collective.helpers else ""
    tail += (f" root {c.root}" if c.root >= 0 else "") + (" in-place" if c.in_place else "")
    if named is not None:
        if named.pairs:
            tail += " pairs " + ",".join(f"{a}>{b}" for a, b in named.pairs)
        if named.counts:
            tail += " counts " + ";".join(",".join(map(_number, row)) for row in named.counts)
        return [f"collective {c.kind} {ranks} chunks {c.chunks}{tail}"]
    kind = json.dumps(c.kind)
    lines = [f"collective explicit {kind} {ranks} num_chunks {c.num_chunks} chunks {c.chunks}{tail}"]
    lines.append(f"share {_repeats(c.chunk_share)}")
    lines.append(f"place {_repeats(c.place)}")
    lines += [f"set {i}: {ranges(parts)}".rstrip() for i, parts in enumerate(c.part_sets)]
    for rank, (a, b) in enumerate(pairwise(c.in_ptr.tolist())):
        lines.append(f"input {rank}: {_tagged(c.in_chunk[a:b], c.in_part[a:b], '.', None)}".rstrip())
    for rank, (a, b) in enumerate(pairwise(c.out_ptr.tolist())):
        lines.append(f"output {rank}: {_tagged(c.out_chunk[a:b], c.out_set[a:b], ':', ALL_PARTS)}".rstrip())
    return lines


def _tagged(chunks: NDArray[np.int32], tags: NDArray[np.int32], mark: str, implied: int | None) -> str:
    """Write chunks with the part (or set) of each, such as ``c0-3.1``."""
    words = []
    for tag, group in groupby(zip(chunks.tolist(), tags.tolist(), strict=True), lambda pair: pair[1]):
        suffix = "" if tag == implied else f"{mark}{tag}"
        words += [word + suffix for word in ranges((chunk for chunk, _ in group), "c").split(",")]
    return " ".join(words)


def _repeats(values: NDArray[Any]) -> str:
    """Write numbers, with equal neighbours as ``value*times``."""
    words = []
    for value, group in groupby(values.tolist()):
        times = sum(1 for _ in group)
        words.append(f"{_number(value)}*{times}" if times > 1 else _number(value))
    return " ".join(words)


def _number(value: float) -> str:
    """The shortest text that reads back as the same number."""
    return str(int(value)) if value == int(value) else repr(float(value))
