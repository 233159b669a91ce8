# SPDX-License-Identifier: Apache-2.0
"""The guided sampler: random strategies from promising regions. AutoDist's section 2.4 with its three constraints.

1. Small variables are never cut, large ones always.
2. Parameter servers get their variables last of all, each as much as its host's uplink allows.
3. Collectives are merged into groups of similar size.

Within these constraints everything is drawn: a `Recipe` holds what was drawn, and `compose` makes the strategy from it.
A changed recipe (`Sampler.change`) gives a neighboring strategy.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal

from ..errors import InvalidInput
from ..units import check_seed
from .builders.common import cut_along, longest_axis, stations
from .model import ModelSpec, Variable
from .representation import MAX_STALENESS, STALE_ENCODERS, NodeConfig, Strategy, Sync
from .resources import Where, resources

LOSSY = ("float16", "bfloat16", "powersgd:2", "topk:0.01", "onebit")
"""Encoders that are drawn if the search may change the training's results."""
SMALL_SHARE, SMALL_BYTES = 0.002, 16_384
LARGE_SHARE, LARGE_BYTES = 0.25, 64_000_000
"""A variable is small below the first share of the model's gradient, large above the second; bytes limit both."""
DENSE_KINDS = ("all_reduce", "parameter_server", "sharded")
SPARSE_KINDS = ("sparse_all_gather", "parameter_server", "all_reduce")
STRAYS = (0.0, 0.0, 0.1, 0.3)
"""Shares of variables that differ from the others of their class, of which one is drawn."""
GROUPS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
CLASSES: tuple[Literal["small", "large", "sparse"], ...] = ("small", "large", "sparse")


@dataclass(frozen=True, kw_only=True)
class VariableChoice:
    """The draw for one variable: its synchronizer, its number of parts and their axis, and its encoder."""

    kind: str = "all_reduce"
    parts: int = 1
    axis: int = 0
    encoder: str = "none"


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The draw for a strategy: a choice per variable, and the settings that hold for all."""

    choices: tuple[VariableChoice, ...]
    servers: tuple[str, ...]
    groups: int
    server_groups: int
    two_level: bool = False
    by_rate: bool = True
    by_host: bool = False
    apart: bool = False
    """Whether parts of a cut variable are reduced in parallel instead of being merged."""
    staleness: int = 0


class Sampler:
    """Draws strategies for a model on devices; the same seed gives the same strategies.

    Without `lossy` and `staleness` all of them train as synchronous training with whole gradients does.

    >>> from stretto.strategy import ModelSpec, Variable
    >>> model = ModelSpec(name="two", variables=(Variable(name="w", shape=(4096, 64)), Variable(name="b", shape=(64,))))
    >>> recipe, strategy = Sampler(model, 4, seed=1).sample()
    >>> strategy.is_lossless, len(strategy.nodes)
    (True, 2)
    """

    def __init__(
        self, model: ModelSpec, where: Where, *, lossy: bool = False, staleness: int = 0, seed: int = 0
    ) -> None:
        if not 0 <= staleness <= MAX_STALENESS:
            raise InvalidInput(f"staleness: must be 0..{MAX_STALENESS}, not {staleness}")
        self.model = model
        self.there = resources(where)
        self.lossy = lossy
        self._staleness = staleness
        self._rng = random.Random(check_seed(seed))
        total = sum(v.gradient_bytes for v in model.variables)
        self._small = max(SMALL_BYTES, SMALL_SHARE * total)
        self._large = min(LARGE_BYTES, max(LARGE_SHARE * total, 2 * self._small))
        self.members = {c: [at for at, v in enumerate(model.variables) if self._class(v) == c] for c in CLASSES}

    def sample(self) -> tuple[Recipe, Strategy]:
        """Draw one strategy.

        Variables of a class (small, large, sparse) mostly get equal choices: independent draws for hundreds of
        variables would always give the same mixture.
        """
        rng = self._rng
        choices: list[VariableChoice] = [VariableChoice()] * len(self.model.variables)
        for members in self.members.values():
            stray = rng.choice(STRAYS)
            common: VariableChoice | None = None
            for at in members:
                variable = self.model.variables[at]
                if common is None:
                    common = self._choice(variable)
                choices[at] = self._choice(variable) if rng.random() < stray else self.fitting(common, variable)
        several = any(len(ranks) > 1 for ranks in self.there.by_host)
        recipe = Recipe(
            choices=tuple(choices), servers=self._servers(), groups=rng.choice(GROUPS),
            server_groups=rng.choice(GROUPS[:6]), two_level=several and rng.random() < 0.6,
            by_rate=rng.random() < 0.7, by_host=self.interleaved and rng.random() < 0.6, apart=rng.random() < 0.5,
            staleness=rng.randint(0, self._staleness) if self._staleness else 0,
        )  # fmt: skip
        return recipe, self.compose(recipe)

    def change(self, recipe: Recipe) -> tuple[Recipe, Strategy]:
        """A neighbor of a recipe: one to three of its draws are repeated."""
        made = recipe
        for _ in range(self._rng.choice((1, 1, 2, 3))):
            made = self._changed(made)
        return made, self.compose(made)

    def cross(self, one: Recipe, other: Recipe) -> tuple[Recipe, Strategy]:
        """A recipe between two: the choices of each class, and each setting for all, are those of either."""
        rng = self._rng
        choices = list(one.choices)
        for members in self.members.values():
            if rng.random() < 0.5:
                for at in members:
                    choices[at] = other.choices[at]
        settings = {f.name: getattr(rng.choice((one, other)), f.name) for f in fields(Recipe) if f.name != "choices"}
        made = Recipe(choices=tuple(choices), **settings)
        return made, self.compose(made)

    def recipe_of(self, strategy: Strategy) -> Recipe:
        """The recipe that comes next to a strategy of any origin, so that neighbors of it can be drawn.

        Composed, it is that strategy up to the constraints: cuts along one axis, groups of about the same bytes.
        """
        choices, servers, messages, pieces = [], {}, set(), []
        for variable in self.model.variables:
            node = strategy.node(variable.name)
            counts = [cut if isinstance(cut, int) else len(cut) for cut in node.partition]
            axis = counts.index(max(counts)) if counts else 0
            found = [sync for _, sync in node.syncs(variable)]
            drawn = VariableChoice(kind=found[0].kind, parts=len(found), axis=axis, encoder=found[0].encoder)
            choices.append(self.fitting(drawn, variable))
            for at, sync in enumerate(found):
                servers.update(dict.fromkeys(sync.placement))
                alone = (variable.name, at) if sync.group < 0 else ()
                messages.add((sync.kind == "parameter_server", sync.group, sync.placement, alone))
                pieces.append((sync, len(found)))
        served = sum(is_served for is_served, *_ in messages)
        return Recipe(
            choices=tuple(choices), servers=tuple(servers) or self.there.firsts,
            groups=max(len(messages) - served, 1), server_groups=max(round(served / max(len(servers), 1)), 1),
            two_level=any(sync.transfer for sync, _ in pieces), by_host=any(sync.sequence for sync, _ in pieces),
            apart=any(count > 1 and sync.group < 0 for sync, count in pieces),
            staleness=max(max(sync.staleness, 0) for sync, _ in pieces),
        )  # fmt: skip

    def _changed(self, recipe: Recipe) -> Recipe:
        rng = self._rng
        what = rng.choice(("class", "class", "one", "servers", "groups", "server_groups", "level", "apart", "order"))
        if what in ("class", "one"):
            members = rng.choice([m for m in self.members.values() if m])
            members = members if what == "class" else [rng.choice(members)]
            common = self._choice(self.model.variables[members[0]])
            choices = list(recipe.choices)
            for at in members:
                choices[at] = self.fitting(common, self.model.variables[at])
            return replace(recipe, choices=tuple(choices))
        if what == "servers":
            return replace(recipe, servers=self._servers(), by_rate=rng.random() < 0.7)
        if what == "groups":
            return replace(recipe, groups=rng.choice(GROUPS))
        if what == "server_groups":
            return replace(recipe, server_groups=rng.choice(GROUPS[:6]))
        if what == "apart":
            return replace(recipe, apart=not recipe.apart)
        if what == "level":
            several = any(len(ranks) > 1 for ranks in self.there.by_host)
            return replace(recipe, two_level=several and not recipe.two_level)
        late = rng.randint(0, self._staleness) if self._staleness else 0
        return replace(recipe, by_host=self.interleaved and not recipe.by_host, staleness=late)

    def compose(self, recipe: Recipe) -> Strategy:
        """The strategy of a recipe: variables are cut, then collectives are grouped and servers assigned."""
        cuts: list[tuple[int | tuple[int, ...], ...]] = []
        syncs: list[list[Sync]] = []
        served: list[tuple[float, int, int]] = []
        merged: dict[object, list[tuple[float, int, int]]] = {}
        # The last variable's gradient is ready first, and groups follow that order.
        for at in reversed(range(len(self.model.variables))):
            variable, choice = self.model.variables[at], recipe.choices[at]
            cut = cut_along(variable, choice.axis, choice.parts) if choice.parts > 1 else ()
            parts = NodeConfig(variable=variable.name, partition=cut).cut(variable)
            cuts.append(cut)
            syncs.append([self._sync(choice, recipe) for _ in parts])
            for part in parts:
                piece = (variable.gradient_bytes * part.elements / variable.elements, at, part.index)
                if choice.kind == "parameter_server":
                    served.append(piece)
                elif choice.kind != "sparse_all_gather" and not (recipe.apart and len(parts) > 1):
                    key = (choice.kind, variable.dtype, variable.sparse, choice.encoder)
                    merged.setdefault(key, []).append(piece)
        cuts.reverse()
        syncs.reverse()
        self._place(served, recipe, syncs)
        self._group(list(merged.values()), recipe.groups, syncs)
        nodes = tuple(
            NodeConfig(variable=v.name, partition=cut, sync=found[0], parts=tuple(found) if len(found) > 1 else ())
            for v, cut, found in zip(self.model.variables, cuts, syncs, strict=True)
        )
        made = Strategy(
            name="sampled", model=self.model.name, model_digest=self.model.digest, devices=self.there.devices,
            nodes=nodes, made_by="guided sampler",
        )  # fmt: skip
        made.check(self.model)
        return made

    def _sync(self, choice: VariableChoice, recipe: Recipe) -> Sync:
        """The synchronization of a piece before it is placed or grouped."""
        if choice.kind == "parameter_server":
            first = recipe.servers[:1]
            late = recipe.staleness if choice.encoder in STALE_ENCODERS else 0
            return Sync(kind=choice.kind, placement=first, encoder=choice.encoder, staleness=late)
        transfer: tuple[str, ...] = ()
        if recipe.two_level and choice.kind == "all_reduce":
            transfer = tuple(self.there.devices[ranks[0]] for ranks in self.there.by_host if len(ranks) > 1)
        sequence: tuple[str, ...] = ()
        if recipe.by_host and choice.kind == "all_reduce" and not transfer:
            sequence = tuple(self.there.devices[rank] for ranks in self.there.by_host for rank in ranks)
        return Sync(kind=choice.kind, transfer=transfer, sequence=sequence, encoder=choice.encoder)

    def _place(self, pieces: Sequence[tuple[float, int, int]], recipe: Recipe, syncs: Sequence[list[Sync]]) -> None:
        """Constraint 2: the largest piece first, each to the server that is then done soonest; merged per server."""
        host_of = dict(zip(self.there.devices, self.there.hosts, strict=True))
        first_hosts = [self.there.hosts[ranks[0]] for ranks in self.there.by_host]
        rate_of = dict(zip(first_hosts, self.there.rates, strict=True))
        load = dict.fromkeys(recipe.servers, 0.0)
        sharing = [host_of[name] for name in recipe.servers]
        rate = {
            name: (rate_of[host_of[name]] if recipe.by_rate else 1.0) / sharing.count(host_of[name]) for name in load
        }
        mine: dict[object, list[tuple[float, int, int]]] = {}
        for piece in sorted(pieces, key=lambda piece: (-piece[0], piece[1:])):
            nbytes, at, index = piece
            server = min(load, key=lambda name: (load[name] + nbytes) / rate[name])
            load[server] += nbytes
            direct = not recipe.two_level or syncs[at][index].staleness
            transfer = () if direct else stations(self.there, server)
            syncs[at][index] = replace(syncs[at][index], placement=(server,), transfer=transfer)
            variable = self.model.variables[at]
            key = (server, variable.dtype, variable.sparse, syncs[at][index].encoder)
            mine.setdefault(key, []).append(piece)
        ordered = [sorted(group, key=lambda piece: (-piece[1], piece[2])) for _, group in sorted(mine.items(), key=str)]
        self._group(ordered, recipe.server_groups, syncs, first=1 << 20)

    @staticmethod
    def _group(
        lists: Sequence[Sequence[tuple[float, int, int]]], count: int, syncs: Sequence[list[Sync]], first: int = 0
    ) -> None:
        """Constraint 3: neighbors in the order of readiness, each group with about the same bytes."""
        number = first
        for pieces in lists:
            share = sum(nbytes for nbytes, _, _ in pieces) / count
            held = 0.0
            for nbytes, at, index in pieces:
                if held and held + nbytes / 2 > share:
                    number, held = number + 1, 0.0
                held += nbytes
                syncs[at][index] = replace(syncs[at][index], group=number)
            number += 1

    def _class(self, variable: Variable) -> str:
        if variable.sparse:
            return "sparse"
        return "small" if variable.gradient_bytes < self._small or not variable.shape else "large"

    def _choice(self, variable: Variable) -> VariableChoice:
        rng = self._rng
        kind = rng.choice(SPARSE_KINDS if variable.sparse else DENSE_KINDS)
        count = rng.choice((1, 1, 2, len(self.there.by_host), len(self.there.devices), 2 * len(self.there.by_host)))
        axis = rng.randrange(len(variable.shape)) if variable.shape and rng.random() < 0.2 else -1
        encoder = "none"
        if not variable.sparse and kind != "sharded":
            exact = ("none", "sufficient_factors") if by_factors(variable) else ("none",)
            encoder = rng.choice((*exact, *LOSSY) if self.lossy else exact)
        return self.fitting(VariableChoice(kind=kind, parts=count, axis=axis, encoder=encoder), variable)

    def fitting(self, choice: VariableChoice, variable: Variable) -> VariableChoice:
        """Constraint 1, and the part of a choice that the variable's shape and gradient allow."""
        nbytes = variable.gradient_bytes
        parts, axis, encoder = choice.parts, choice.axis, choice.encoder
        # A variable that every rank gathers whole, or that is cut into shares anyway, is not cut before.
        cuttable = choice.kind in ("all_reduce", "parameter_server") and encoder != "sufficient_factors"
        if nbytes < self._small or not variable.shape or not cuttable:
            parts = 1
        elif nbytes > self._large:
            parts = max(parts, 2)
        if parts > 1:
            axis = 0 if variable.sparse else axis if 0 <= axis < len(variable.shape) else longest_axis(variable)
            parts = min(parts, variable.shape[axis])
        if encoder == "sufficient_factors" and not by_factors(variable):
            encoder = "none"
        return replace(choice, parts=max(parts, 1), axis=max(axis, 0), encoder=encoder)

    def _servers(self) -> tuple[str, ...]:
        """The possible servers: a device of every host, all devices, only the fastest hosts, some
        hosts, or one device.
        """
        rng, there = self._rng, self.there
        fast = self.fast
        some = tuple(name for name in there.firsts if rng.random() < 0.5) or there.firsts[:1]
        return rng.choice((there.firsts, there.devices, fast, some, (rng.choice(fast),)))

    @property
    def fast(self) -> tuple[str, ...]:
        """The first device of each host with one of the fastest uplinks."""
        best = max(self.there.rates)
        return tuple(
            name for name, rate in zip(self.there.firsts, self.there.rates, strict=True) if rate >= 0.75 * best
        )

    @property
    def interleaved(self) -> bool:
        """Whether the ranks of a host are not in a row."""
        return any(ranks != tuple(range(ranks[0], ranks[0] + len(ranks))) for ranks in self.there.by_host)


def by_factors(variable: Variable) -> bool:
    """Whether the two factors of a linear layer's gradient are smaller than the gradient."""
    if variable.factors < 1 or len(variable.shape) != 2 or variable.sparse:
        return False
    return variable.factors * sum(variable.shape) < variable.elements


__all__ = ["LOSSY", "VariableChoice", "Recipe", "Sampler"]
