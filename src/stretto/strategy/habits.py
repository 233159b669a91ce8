# SPDX-License-Identifier: Apache-2.0
"""What a strategy does with each class of variables, without names: a habit can be followed on any model and cluster.

A habit has the choice of most bytes in each class of the sampler (small, large and sparse variables), and what servers
are in relation to hosts.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta

from .representation import Strategy
from .sampler import CLASSES, DENSE_KINDS, LOSSY, SPARSE_KINDS, Recipe, Sampler, VariableChoice

Servers = Literal["hosts", "devices", "fast", "one"]
ClassName = Literal["small", "large", "sparse"]
Count = Annotated[int, Meta(ge=1, le=1 << 16)]


@dataclass(frozen=True, kw_only=True)
class ClassHabit:
    """The choice for one class; `parts` are for each of `of`: once, or for every host or device."""

    name: ClassName
    kind: str
    parts: Count
    of: Literal["whole", "hosts", "devices"]
    encoder: str


@dataclass(frozen=True, kw_only=True)
class Habit:
    """Choices by class, and the settings that hold for all variables."""

    classes: tuple[ClassHabit, ...]
    servers: Servers
    groups: Count
    server_groups: Count
    two_level: bool
    by_rate: bool
    by_host: bool
    apart: bool


def habit_of(recipe: Recipe, sampler: Sampler) -> Habit:
    """The habit of a recipe."""
    classes = []
    for name in CLASSES:
        weight: Counter[VariableChoice] = Counter()
        for at in sampler.members[name]:
            weight[recipe.choices[at]] += max(sampler.model.variables[at].gradient_bytes, 1)
        if weight:
            most = weight.most_common(1)[0][0]
            parts, of = _parts(most.parts, sampler)
            classes.append(ClassHabit(name=name, kind=most.kind, parts=parts, of=of, encoder=most.encoder))
    there = sampler.there
    return Habit(
        classes=tuple(classes), servers=_servers(recipe, sampler), groups=max(recipe.groups, 1),
        server_groups=max(recipe.server_groups, 1), two_level=recipe.two_level, by_rate=recipe.by_rate,
        by_host=recipe.by_host and len(there.devices) > 1, apart=recipe.apart,
    )  # fmt: skip


def follow(habit: Habit, sampler: Sampler) -> tuple[Recipe, Strategy]:
    """The recipe and the strategy of a habit on the sampler's model and devices, as far as these allow it."""
    there = sampler.there
    counts = {"whole": 1, "hosts": len(there.by_host), "devices": len(there.devices)}
    choices = [VariableChoice()] * len(sampler.model.variables)
    known = {each.name: each for each in habit.classes}
    for name in CLASSES:
        allowed = SPARSE_KINDS if name == "sparse" else DENSE_KINDS
        said = known.get(name, known.get("large"))
        common = VariableChoice(kind=allowed[0])
        if said is not None and said.kind in allowed:
            lost = said.encoder in LOSSY and not sampler.lossy
            common = VariableChoice(
                kind=said.kind, parts=said.parts * counts[said.of], axis=-1, encoder="none" if lost else said.encoder
            )
        for at in sampler.members[name]:
            choices[at] = sampler.fitting(common, sampler.model.variables[at])
    several = any(len(ranks) > 1 for ranks in there.by_host)
    servers = {"hosts": there.firsts, "devices": there.devices, "fast": sampler.fast, "one": sampler.fast[:1]}
    recipe = Recipe(
        choices=tuple(choices), servers=servers[habit.servers], groups=habit.groups, server_groups=habit.server_groups,
        two_level=habit.two_level and several, by_rate=habit.by_rate, by_host=habit.by_host and sampler.interleaved,
        apart=habit.apart,
    )  # fmt: skip
    return recipe, sampler.compose(recipe)


def _parts(parts: int, sampler: Sampler) -> tuple[int, Literal["whole", "hosts", "devices"]]:
    hosts, devices = len(sampler.there.by_host), len(sampler.there.devices)
    if parts > 1 and parts % devices == 0:
        return parts // devices, "devices"
    if parts > 1 and parts % hosts == 0 and hosts > 1:
        return parts // hosts, "hosts"
    return parts, "whole"


def _servers(recipe: Recipe, sampler: Sampler) -> Servers:
    count = len(recipe.servers)
    if count == 1:
        return "one"
    if count == len(sampler.there.devices):
        return "devices"
    return "hosts" if count >= len(sampler.there.by_host) else "fast"


__all__ = ["ClassHabit", "Habit", "follow", "habit_of"]
