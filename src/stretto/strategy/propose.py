# SPDX-License-Identifier: Apache-2.0
"""The strategies among which a search chooses (line 3 of AutoDist's Algorithm 1).

What builders make, strategies of the guided sampler, neighbors of the best so far and strategies between two of them.
A candidate that was not chosen stays one: the best of them are in the next round's choice again.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .builders import build
from .cost import Floats
from .experience import PastSearch
from .features import Features
from .habits import follow
from .representation import Strategy
from .sampler import Recipe, Sampler, by_factors

USUAL = "all_reduce"
BUILT: tuple[tuple[str, dict[str, Any]], ...] = (
    (USUAL, {}),
    (USUAL, {"bucket_mb": 0.25}), (USUAL, {"bucket_mb": 1.0}), (USUAL, {"bucket_mb": 4.0}),
    (USUAL, {"bucket_mb": 100.0}),
    ("partitioned_all_reduce", {}), ("ps", {}), ("ps_balanced", {}), ("ps_balanced", {"servers": "devices"}),
    ("partitioned_ps", {}), ("partitioned_ps", {"two_level": False}), ("uneven_partitioned_ps", {}), ("parallax", {}),
    ("random_axis", {}), ("zero1", {}), ("zero2", {}), ("zero2", {"bucket_mb": 4.0}),
)  # fmt: skip
BY_FACTORS = "by factors"
NEIGHBORS, CROSSED = 0.45, 0.15
"""The shares of candidates that are neighbors of good strategies, and between two of them, once there are trials."""
CLEARLY = 0.01
"""The least logarithm of a speed-up for which a habit is followed."""
PARENTS = 4
"""The number of best strategies whose neighbors are drawn."""


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """A strategy that may be tried: the recipe that it has or comes next to, its origin, and its features."""

    strategy: Strategy
    recipe: Recipe
    origin: str
    vector: Floats

    @property
    def key(self) -> tuple[object, ...]:
        """What two candidates for the same have in common."""
        return tuple(self.strategy.nodes)

    @property
    def family(self) -> str:
        """The builder, whatever its settings."""
        name, _, settings = self.origin.partition(", ")
        return settings if settings == BY_FACTORS else name


class Proposals:
    """The candidates of one search; what was tried is never proposed again."""

    def __init__(self, sampler: Sampler, features: Features, *, rng: random.Random, with_builders: bool) -> None:
        self._sampler = sampler
        self._features = features
        self._rng = rng
        self._tried: set[tuple[object, ...]] = set()
        self._left: list[Proposal] = []
        self._built = list(self._builders()) if with_builders else []

    def usual(self) -> Proposal:
        """All-reduce in the buckets of DDP."""
        return self._candidate(build(USUAL, self._sampler.model, self._sampler.there), None, USUAL)

    def built(self) -> list[Proposal]:
        """What builders make, without what was tried."""
        return self._new(self._built)

    def followed(self, past: Sequence[PastSearch]) -> list[Proposal]:
        """The best strategy of each past search as a habit, if it was clearly better than the usual one."""
        found: list[Proposal] = []
        for search in past:
            best = min(search.trials, key=lambda trial: trial.slower)
            if best.slower < -CLEARLY:
                recipe, strategy = follow(best.habit, self._sampler)
                found += self._new([self._candidate(strategy, recipe, f"as for {search.model}")], found)
        return found

    def drawn(self, count: int, good: Sequence[Recipe]) -> list[Proposal]:
        """Candidates that are new, drawn by the sampler and next to good recipes."""
        found: list[Proposal] = []
        for _ in range(4 * count):
            if len(found) >= count:
                break
            found += self._new([self._candidate(*self._drawn(good), "sampled")], found)
        return found

    def round(self, count: int, good: Sequence[Recipe]) -> list[Proposal]:
        """The candidates of a round: what builders make, what was left of the last round, and new ones."""
        kept = self._new(self._left, self.built())
        known = [*self.built(), *kept]
        return [*known, *self._new(self.drawn(max(count - len(known), count // 2), good), known)]

    def chose(self, chosen: Sequence[Proposal], left: Sequence[Proposal] = ()) -> None:
        """Note what is tried now, and what else of the round was promising."""
        self._tried.update(candidate.key for candidate in chosen)
        self._left = [candidate for candidate in left if candidate.origin == "sampled"]

    def _drawn(self, good: Sequence[Recipe]) -> tuple[Strategy, Recipe]:
        if not good:
            recipe, strategy = self._sampler.sample()
            return strategy, recipe
        what = self._rng.random()
        if what < CROSSED and len(good) > 1:
            recipe, strategy = self._sampler.cross(*self._rng.sample(list(good), 2))
        elif what < CROSSED + NEIGHBORS:
            recipe, strategy = self._sampler.change(self._rng.choice(good))
        else:
            recipe, strategy = self._sampler.sample()
        return strategy, recipe

    def _new(self, some: Iterable[Proposal], beside: Sequence[Proposal] = ()) -> list[Proposal]:
        seen = {candidate.key for candidate in beside} | self._tried
        found = []
        for candidate in some:
            if candidate.key not in seen:
                seen.add(candidate.key)
                found.append(candidate)
        return found

    def _builders(self) -> Iterable[Proposal]:
        model, there = self._sampler.model, self._sampler.there
        for name, options in BUILT:
            label = ", ".join([name, *(f"{key}={value}" for key, value in options.items())])
            yield self._candidate(build(name, model, there, **options), None, label)
        yield self._candidate(self._by_factors(), None, f"{USUAL}, {BY_FACTORS}")

    def _by_factors(self) -> Strategy:
        """The usual strategy, in which linear layers send their factors if these are smaller; nothing is lost."""
        model = self._sampler.model
        usual = build(USUAL, model, self._sampler.there)
        nodes = tuple(
            replace(node, sync=replace(node.sync, encoder="sufficient_factors"))
            if by_factors(model.variable(node.variable)) else node
            for node in usual.nodes
        )  # fmt: skip
        made = replace(usual, nodes=nodes, made_by=f"{usual.made_by}, {BY_FACTORS}")
        made.check(model)
        return made

    def _candidate(self, strategy: Strategy, recipe: Recipe | None, origin: str) -> Proposal:
        near = recipe if recipe is not None else self._sampler.recipe_of(strategy)
        vector = self._features.vector(strategy)
        return Proposal(strategy=strategy, recipe=near, origin=origin, vector=vector)


__all__ = ["BUILT", "PARENTS", "USUAL", "Proposal", "Proposals"]
