# SPDX-License-Identifier: Apache-2.0
"""The transformation rules: what a motif may be rewritten into, and how rules are registered and applied.

Segmentation cuts the payload, splining cuts the pattern (Syndicate, section 4.2 and appendix A.1). A rule only claims
that its result is equivalent; `lowering.check` proves it for the motif at hand, whoever wrote the rule.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ...algorithms.options import checked
from ...errors import InvalidInput, unknown
from ...registry import Registry
from .motif import KINDS, Expr, Motif, Path

Groups = tuple[tuple[int, ...], ...]
Choices = Callable[[Motif, Groups], Iterable[Mapping[str, Any]]]


@dataclass(frozen=True, kw_only=True)
class RewriteRule:
    """One rule: the kinds of motif that it rewrites, and the function that rewrites them."""

    name: str
    kinds: tuple[str, ...]
    summary: str
    build: Callable[..., Expr]
    choices: Choices
    """``choices(motif, hosts)`` gives the parameters worth trying for a motif whose ranks lie on these hosts."""

    @cached_property
    def parameters(self) -> dict[str, Any]:
        """The rule's parameters with their defaults, in order."""
        keywords = inspect.signature(self.build).parameters.values()
        return {p.name: p.default for p in keywords if p.kind is inspect.Parameter.KEYWORD_ONLY}

    @cached_property
    def _typed(self) -> frozenset[str]:
        """The parameters that are annotated as whole numbers, or lists of them."""
        hints = inspect.signature(self.build).parameters.items()
        return frozenset(name for name, p in hints if re.search(r"\bint\b", str(p.annotation)))

    def __call__(self, motif: Motif, **parameters: Any) -> Expr:
        """Rewrite one motif."""
        if motif.kind not in self.kinds:
            raise InvalidInput(f"{self.name} does not rewrite {motif.kind}; it rewrites {', '.join(self.kinds)}")
        for key in parameters:
            if key not in self.parameters:
                raise unknown(f"parameter of {self.name}", key, self.parameters)
        typed = {key: value for key, value in parameters.items() if key in self._typed}
        try:
            return self.build(motif, **(parameters | checked(self.build, typed)))
        except InvalidInput as error:
            raise InvalidInput(f"{self.name}: {error}") from None


_RULES = Registry[RewriteRule]("rule")


def rule(
    name: str,
    *,
    kinds: Iterable[str] = tuple(KINDS),
    choices: Choices = lambda motif, hosts: ({},),
    replace: bool = False,
) -> Callable[[Callable[..., Expr]], Callable[..., Expr]]:
    """Register a rule ``build(motif, *, parameters...) -> Expr``; the first line of its docstring describes it.

    The planner calls `choices` and then `build` in the planning process, once for each motif and parameter choice.
    `build` gets a motif of one of `kinds`, must not change it, and returns an expression over the same ranks and
    payload (the motif itself means that the rule does not apply); it raises `InvalidInput` for parameters out of range.
    Equal arguments must give equal results. Parameters are keyword-only, annotated with int or lists of int, so that a
    step can be written as text.

    >>> from stretto.planner.algebra.motif import motif, seq
    >>> @rule("in_two_steps", kinds=["RE"])
    ... def in_two_steps(motif):
    ...     '''Half of the payload, then the other half.'''
    ...     lo, hi = motif.spans[0]
    ...     return seq([replace(motif, spans=((lo, hi // 2),)), replace(motif, spans=((hi // 2, hi),))])
    >>> from dataclasses import replace
    >>> print(apply(motif("RE", 4, 10), "in_two_steps"))
    RE_0(T[0:5], PG[0:4]) -> RE_0(T[5:10], PG[0:4])
    >>> unregister("in_two_steps")

    Args:
        name: name of the rule: lower-case letters, digits and _.
        kinds: letters of the motifs that it rewrites; all by default.
        choices: called with a motif and the ranks of each host; returns keyword arguments worth trying.
        replace: whether a rule that has the name gives way.

    Returns:
        A decorator that registers the function and returns it unchanged; it raises `InvalidInput` for a name that is
        taken.

    Raises:
        InvalidInput: a kind is unknown, or the name is invalid.
    """
    served = tuple(kinds)
    for kind in served:
        if kind not in KINDS:
            raise unknown("motif", kind, KINDS)
    if not re.fullmatch("[a-z][a-z0-9_]*", name):
        raise InvalidInput(f"rule {name!r}: a name is lower-case letters, digits and _")

    def register(build: Callable[..., Expr]) -> Callable[..., Expr]:
        summary = (inspect.getdoc(build) or "").split("\n")[0]
        made = RewriteRule(name=name, kinds=served, summary=summary, build=build, choices=choices)
        _RULES.register(name, made, replace=replace)
        return build

    return register


def unregister(name: str) -> None:
    """Remove a rule from the registry."""
    entry(name)
    _RULES.forget(name)


def rules(kind: str | None = None) -> list[RewriteRule]:
    """All rules, or those that rewrite a kind of motif.

    >>> [rule.name for rule in rules("BC")]
    ['segment', 'tree', 'hierarchical', 'spline', 'scatter']
    """
    if kind is not None and kind not in KINDS:
        raise unknown("motif", kind, KINDS)
    return [found for found in _RULES.values() if kind is None or kind in found.kinds]


def entry(name: str) -> RewriteRule:
    """The rule with this name."""
    known = {found.name: found for found in rules()}
    if name not in known:
        raise unknown("rule", name, known)
    return known[name]


def apply(expr: Expr, name: str, *, at: Sequence[int] = (), **parameters: Any) -> Expr:
    """Rewrite the motif at a path by a rule.

    >>> from stretto.planner.algebra.motif import motif
    >>> step = apply(motif("AR", 8, 1024), "tree", n=4)
    >>> print(apply(step, "ring", at=(1,)))  # doctest: +NORMALIZE_WHITESPACE
    RE_0(T[0:1024], PG[0:4]) || RE_4(T[0:1024], PG[4:8]) ->
    (RS(T[0:1024], PG[0,4]) -> AG(T[0:1024], PG[0,4])) ->
    BC_0(T[0:1024], PG[0:4]) || BC_4(T[0:1024], PG[4:8])

    Args:
        expr: the expression.
        name: name of the rule.
        at: path of the motif; empty for an expression that is a motif itself.
        **parameters: parameters of the rule.

    Returns:
        The expression with the motif rewritten.

    Raises:
        InvalidInput: rule, path or parameter are unknown or invalid, or the rule does not rewrite this kind.
    """
    found = entry(name)

    def change(here: Expr) -> Expr:
        if not isinstance(here, Motif):
            where = f"path {'.'.join(map(str, at))}" if at else "the top"
            raise InvalidInput(
                f"{name}: at {where} is no single motif but {len(here.children)}; go on to one of its children"
            )
        return found(here, **parameters)

    return expr.map(change, at)


def rewrite_all(expr: Expr, name: str, **parameters: Any) -> Expr:
    """Rewrite every motif of a kind that the rule serves.

    Args:
        expr: the expression.
        name: name of the rule.
        **parameters: parameters of the rule.

    Returns:
        The expression with these motifs rewritten.

    Raises:
        InvalidInput: rule or parameter are unknown or invalid, or the rule rewrites no motif of the expression.
    """
    found = entry(name)
    paths = [path for path, motif in expr.walk() if motif.kind in found.kinds]
    if not paths:
        kinds = sorted({motif.kind for motif in expr.leaves})
        raise InvalidInput(f"{name} does not rewrite {', '.join(kinds)}; it rewrites {', '.join(found.kinds)}")
    return _everywhere(expr, found, parameters)


def _everywhere(expr: Expr, found: RewriteRule, parameters: Mapping[str, Any]) -> Expr:
    if isinstance(expr, Motif):
        return found(expr, **parameters) if expr.kind in found.kinds else expr
    return type(expr)(tuple(_everywhere(child, found, parameters) for child in expr.children))  # type: ignore[call-arg]


@dataclass(frozen=True, kw_only=True)
class RewriteStep:
    """One rewriting as text on a command line: ``tree:4@1``, or ``segment:size=256`` for all motifs."""

    rule: str
    parameters: dict[str, Any]
    at: Path | None = None

    def __call__(self, expr: Expr) -> Expr:
        """Apply the step to an expression."""
        if self.at is None:
            return rewrite_all(expr, self.rule, **self.parameters)
        return apply(expr, self.rule, at=self.at, **self.parameters)


def parse_step(text: str) -> RewriteStep:
    """A step from ``rule``, ``rule:value,key=value`` and an optional ``@path`` such as ``@0.1`` (``@`` is the top).

    >>> parse_step("segment:4@0.1")
    RewriteStep(rule='segment', parameters={'parts': 4}, at=(0, 1))
    >>> parse_step("hierarchical:groups=0 1 2;3 4").parameters
    {'groups': [[0, 1, 2], [3, 4]]}
    """
    body, at, path = text.partition("@")
    name, _, given = body.partition(":")
    found = entry(name)
    names = list(found.parameters)
    parameters: dict[str, Any] = {}
    for number, part in enumerate(given.split(",") if given else []):
        key, equals, value = part.partition("=")
        if not equals:
            if number >= len(names):
                raise InvalidInput(f"step {text!r}: {name} has the parameters {', '.join(names) or 'none'}")
            key, value = names[number], part
        if key in parameters:
            raise InvalidInput(f"step {text!r}: {key} is given twice")
        parameters[key] = _value(text, value)
    if at and not re.fullmatch(r"(\d{1,6}(\.\d{1,6}){0,99})?", path, re.ASCII):
        raise InvalidInput(f"step {text!r}: a path is positions such as @0.1, not {path!r}")
    where = tuple(int(position) for position in path.split(".")) if path else ()
    return RewriteStep(rule=name, parameters=parameters, at=where if at else None)


def variants(
    motif: Motif, hosts: Sequence[Sequence[int]] = (), only: Iterable[str] | None = None
) -> Iterator[tuple[str, Expr]]:
    """Every registered rule with each of its parameters worth trying: the step as text, and the rewritten expression.

    Results that leave the motif unchanged are not listed.

    Args:
        motif: the motif.
        hosts: the ranks of each host.
        only: names of the rules that are tried; None tries all.

    Returns:
        Pairs of a step and an expression.
    """
    members = set(motif.ranks)
    local = tuple(tuple(rank for rank in host if rank in members) for host in hosts)
    local = tuple(group for group in local if group)
    for found in rules(motif.kind):
        if only is not None and found.name not in only:
            continue
        for parameters in found.choices(motif, local):
            changed = found(motif, **parameters)
            if changed != motif:
                given = ",".join(f"{key}={_shown(value)}" for key, value in parameters.items())
                yield f"{found.name}:{given}" if given else found.name, changed


def _value(text: str, value: str) -> Any:
    if re.fullmatch(r"\d{1,18}", value, re.ASCII):
        return int(value)
    if re.fullmatch(r"[\d ;]{1,100000}", value, re.ASCII):
        return [[int(number) for number in group.split()] for group in value.split(";")]
    raise InvalidInput(f"step {text!r}: expected a number, or groups such as 0 1;2 3, not {value!r}")


def _shown(value: Any) -> str:
    return str(value) if isinstance(value, int) else ";".join(" ".join(map(str, group)) for group in value)
