# SPDX-License-Identifier: Apache-2.0
"""Mapping files: how the tensors of servers are made of those of trainers where names or layouts differ."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

import msgspec

from ..errors import InvalidInput
from ..files import convert, parse_yaml, read_text

MAX_STACKED = 1 << 14
SCALED = ("float8_e4m3fn", "float8_e5m2")
"""The element types that a tensor may be cast to with scales."""


class _RuleForm(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    to: str
    source: str | list[str] = msgspec.field(name="from")
    concat: int | None = None
    sizes: list[int] = []
    stack: bool = False
    transpose: bool = False
    rows: int | None = None
    scale: str = ""
    block: int = 128


class _MappingForm(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    version: Literal[1]
    kind: Literal["weight_mapping"]
    rules: list[_RuleForm] = []
    ignore: list[str] = []
    same: bool = True


@dataclass(frozen=True, kw_only=True)
class MappingRule:
    """How one tensor of a server (or one of each layer, with ``{n}`` in names) is made.

    Steps are taken in this order: pieces are transposed, joined (`concat`, then `stack`), padded, cast.
    """

    to: str
    sources: tuple[str, ...]
    concat: int | None = None
    """The dimension in which pieces are laid one behind the other; where it is sharded, each rank has its part of each
    piece. In a stack the dimension of one tensor of it."""
    sizes: tuple[int, ...] = ()
    """The sizes of pieces in dimension `concat`, or their ratios."""
    stack: bool = False
    """Whether all tensors of a source name, with ``{e}`` from 0, become one with a new first dimension; those of
    several source names are joined first."""
    transpose: bool = False
    """Whether each piece is transposed."""
    rows: int | None = None
    """The rows of the source, where those of the server are more: the rest is zero."""
    scale: str = ""
    """The server's tensor of scales, where its weights are in an 8-bit type: one for each `block` rows and columns."""
    block: int = 128

    def __post_init__(self) -> None:
        where = f"rules: {self.to!r}"
        if not self.sources or not self.to:
            raise InvalidInput(f"{where}: to, from: must be names")
        if (len(self.sources) > 1) != (self.concat is not None):
            raise InvalidInput(f"{where}: concat: several sources need a dimension, and one source none")
        if self.concat is not None and (len(self.sizes) != len(self.sources) or min(self.sizes) < 1):
            raise InvalidInput(
                f"{where}: sizes: must be one size or ratio >= 1 for each of {len(self.sources)} sources"
            )
        if self.sizes and self.concat is None:
            raise InvalidInput(f"{where}: sizes: are of pieces that `concat` joins")
        if any(self.stack != ("{e}" in source) for source in self.sources):
            raise InvalidInput(f"{where}: stack: needs sources with {{e}} in their names, and others must not have it")
        if self.rows is not None and (self.rows < 1 or self.stack or self.concat is not None or self.transpose):
            raise InvalidInput(f"{where}: rows: must be >= 1, of one source that is not transposed")
        if self.block < 1 or any("{e}" in name for name in (self.to, self.scale)):
            raise InvalidInput(f"{where}: block must be >= 1, and {{e}} stands in sources alone")


@dataclass(frozen=True, kw_only=True)
class MappedTensor:
    """One tensor of a server with the names that it is made of."""

    rule: MappingRule
    to: str
    sources: tuple[str, ...]
    scale: str = ""


@dataclass(frozen=True, kw_only=True)
class WeightMapping:
    """The rules of a mapping file.

    >>> rule = MappingRule(to="l.{n}.qkv", sources=("l.{n}.q", "l.{n}.kv"), concat=0, sizes=(2, 1))
    >>> made = WeightMapping(rules=(rule,)).resolve({"l.3.qkv": (96, 8), "norm": (8,)})
    >>> [(one.to, one.sources) for one in made]
    [('l.3.qkv', ('l.3.q', 'l.3.kv')), ('norm', ('norm',))]
    """

    rules: tuple[MappingRule, ...] = ()
    ignore: tuple[str, ...] = ()
    """Names of trainers (with ``*``) that no server wants."""
    same: bool = True
    """Whether tensors of servers that no rule names are those of the same name."""

    @classmethod
    def load(cls, path: str | Path) -> WeightMapping:
        """Read a mapping file (YAML or JSON)."""
        return cls.parse(parse_yaml(read_text(path), where=str(path)), where=str(path))

    @classmethod
    def parse(cls, data: Any, where: str = "mapping") -> WeightMapping:
        """The mapping of plain data, as a parser of YAML or JSON returns it."""
        form = convert(data, _MappingForm, where=where)
        try:
            rules = tuple(
                MappingRule(
                    to=r.to, sources=(r.source,) if isinstance(r.source, str) else tuple(r.source), concat=r.concat,
                    sizes=tuple(r.sizes), stack=r.stack, transpose=r.transpose, rows=r.rows, scale=r.scale,
                    block=r.block,
                )
                for r in form.rules
            )  # fmt: skip
        except InvalidInput as error:
            raise InvalidInput(f"{where}: {error}") from None
        return cls(rules=rules, ignore=tuple(form.ignore), same=form.same)

    def wanted(self, names: Iterable[str]) -> list[str]:
        """The names of trainers that are not ignored."""
        return [name for name in names if not any(fnmatchcase(name, pattern) for pattern in self.ignore)]

    def resolve(self, targets: Mapping[str, tuple[int, ...]]) -> list[MappedTensor]:
        """What each tensor of a server is made of.

        Args:
            targets: the shapes of the server's tensors, by name.

        Returns:
            One entry for each tensor but scales, which belong to the entry of their weights.

        Raises:
            InvalidInput: two rules name a tensor, none does, or a tensor of scales is missing.
        """
        found: list[MappedTensor] = []
        scales: set[str] = set()
        for name, shape in targets.items():
            hits = [(rule, match) for rule in self.rules if (match := _pattern(rule.to).fullmatch(name))]
            if len(hits) > 1:
                raise InvalidInput(f"{name!r}: two rules make it: {hits[0][0].to!r} and {hits[1][0].to!r}")
            for rule, match in hits:
                found.append(_made(rule, name, shape, match.groupdict()))
                scales.add(found[-1].scale)
        for scale in sorted(scales - {""}):
            if scale not in targets:
                raise InvalidInput(f"{scale!r}: is the scale of a rule, and the server has no such tensor")
        made = {one.to for one in found} | scales
        for name in targets:
            if name not in made:
                if not self.same:
                    raise InvalidInput(f"{name!r}: no rule makes it")
                found.append(MappedTensor(rule=MappingRule(to=name, sources=(name,)), to=name, sources=(name,)))
        return found


def _made(rule: MappingRule, name: str, shape: tuple[int, ...], values: dict[str, str]) -> MappedTensor:
    sources = tuple(_filled(source, values) for source in rule.sources)
    if rule.stack:
        if not 1 <= (shape[0] if shape else 0) <= MAX_STACKED:
            raise InvalidInput(f"{name!r}: has shape {shape}; a stack has 1..{MAX_STACKED} tensors")
        sources = tuple(source.replace("{e}", str(e)) for e in range(shape[0]) for source in sources)
    least = 2 if rule.transpose or rule.scale else 1 if rule.rows else 0
    if len(shape) - rule.stack < least:
        raise InvalidInput(f"{name!r}: has shape {shape}, which the rule {rule.to!r} cannot make")
    return MappedTensor(rule=rule, to=name, sources=sources, scale=_filled(rule.scale, values))


def _pattern(template: str) -> re.Pattern[str]:
    """The names of a template, in which ``{n}`` is a number, the same wherever it stands."""
    seen: set[str] = set()

    def group(found: re.Match[str]) -> str:
        again = found[1] in seen
        seen.add(found[1])
        return f"(?P={found[1]})" if again else f"(?P<{found[1]}>[0-9]{{1,6}})"

    return re.compile(re.sub(r"\\\{([a-z]+)\\\}", group, re.escape(template)))


def _filled(template: str, values: Mapping[str, str]) -> str:
    unknown = set(re.findall(r"\{([a-z]+)\}", template)) - set(values) - {"e"}
    if unknown:
        raise InvalidInput(f"{template!r}: {{{sorted(unknown)[0]}}} does not stand in the server's name")
    return re.sub(r"\{([a-z]+)\}", lambda m: values.get(m[1], m[0]), template)
