# SPDX-License-Identifier: Apache-2.0
"""Random strategies for the generated test of `stretto.torch.distribute`, each drawn from a number alone.

A case starts from what a builder makes with random options, and changes one aspect of it on most variables; other
aspects change here and there. Most draws fit together; some are left as they fall, so that refusals are tested too.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from inspect import signature
from typing import Any

from stretto.errors import InvalidInput
from stretto.strategy import ModelSpec, NodeConfig, Strategy, Sync, Variable
from stretto.strategy.builders import BUILDERS, build
from stretto.strategy.representation import ALONE, ENCODERS, STALE_ENCODERS, SYNCHRONIZERS

AMOUNTS = {"powersgd": ("1", "2"), "topk": ("0.3", "0.05", "1")}
FITTING = 0.85
"""How often a draw is made to fit; otherwise it is left as it falls."""
OPTIONS: dict[str, tuple[Any, ...]] = {
    "chunk": (0, 1, 3), "bucket_mb": (0.0, 0.0002, 26.0), "first_mb": (0.0, 0.0001), "parts": (0, 2, 3),
    "part_mb": (0.0, 0.0001), "seed": (0, 7), "device": ("", "last"), "servers": ("hosts", "devices"),
    "two_level": (False, True),
}  # fmt: skip
"""Values of the builders' options; the small sizes cut and split even these small models."""
LABELS = {"name", "model", "model_digest", "made_by", "notes", "variable", "servers"}
"""Fields of a strategy that say nothing about training; `served` draws ranks that only serve."""
OPTIMIZERS = {
    "sgd": "any", "momentum": "any", "adagrad": "any", "sparse_adam": "tables", "nesterov": "dense", "adam": "dense",
    "amsgrad": "dense", "adamw": "dense", "adadelta": "dense", "adamax": "dense", "nadam": "dense", "radam": "dense",
    "rmsprop": "dense", "rprop": "dense", "asgd": "dense", "adafactor": "dense",
}  # fmt: skip
"""Optimizers, and whether they take sparse gradients (any, dense), or nothing else (tables)."""
SpecOf = Callable[[bool, int], ModelSpec]
"""The model's spec, by whether tables are sparse and how many other data types there are."""
PLAIN = tuple(name for name in OPTIMIZERS if name not in ("sparse_adam", "adafactor"))
"""Those that no strategy refuses."""
OFTEN = ("sgd", "momentum", "adagrad")
"""Those that take sparse gradients too are drawn more often than the others, which take turns."""
LOOPS = ("plain", "no_sync", "twice", "clip")


@dataclass(frozen=True, kw_only=True)
class Case:
    """What one number stands for; with a `refusal` the strategy cannot be made, or is not one for the model."""

    seed: int
    builder: str
    aspect: str
    options: dict[str, Any]
    strategy: Strategy
    made: bool
    """Whether the strategy could be made, and only does not fit the model."""
    refusal: str
    optimizer: str
    loop: str
    sparse: bool
    mixed: int
    """How many data types beside float64 the model has: 0, 1 (float32), 3 (both halves too)."""
    linear: bool
    """Whether gradients do not depend on weights: under staleness the end is then the same whoever was late."""

    @property
    def title(self) -> str:
        """For messages."""
        return f"{self.seed} {self.builder} x {self.aspect}: {self.optimizer}, {self.loop}"


def aspects() -> tuple[str, ...]:
    """Every field of a strategy that decides how a variable is trained."""
    found = [field.name for one in (NodeConfig, Sync) for field in fields(one)]
    return tuple(name for name in dict.fromkeys(found) if name not in LABELS and name != "sync")


def devices_of(rng: random.Random, ranks: int) -> tuple[str, ...]:
    """Names that tell of one host, of several, or of none."""
    hosts = rng.choice([(0, 0, 1), (0, 1, 1), (0, 1, 0)])[:ranks]
    named = tuple(f"h{host}.gpu{hosts[:at].count(host)}" for at, host in enumerate(hosts))
    return rng.choice([tuple(f"rank{at}" for at in range(ranks)), named])


class Drawer:
    """Draws one strategy; what it chose for the whole strategy (devices, an order) is used throughout."""

    def __init__(self, rng: random.Random, model: ModelSpec, ranks: int, *, fitting: bool, factors: bool) -> None:
        self.rng, self.model, self.fitting = rng, model, fitting
        self.encoders = tuple(name for name in ENCODERS if factors or name != "sufficient_factors")
        self.devices = devices_of(rng, ranks)
        turn = rng.randrange(ranks)
        shuffled = tuple(rng.sample(self.devices, ranks))
        self.order = rng.choice([self.devices[::-1], self.devices[turn:] + self.devices[:turn], shuffled])

    def built(self, builder: str) -> tuple[Strategy, dict[str, Any]]:
        """What a builder makes with random options."""
        chosen: dict[str, Any] = {}
        for name in BUILDERS[builder].options:
            usual = signature(BUILDERS[builder].make).parameters[name].default
            value = self.rng.choice(OPTIONS[name])
            value = self.devices[-1] if value == "last" else value
            if value != usual:
                chosen[name] = value
        return build(builder, self.model, self.devices, **chosen), chosen

    # One function for each aspect: a sync with that aspect drawn anew.

    def kind(self, sync: Sync, v: Variable) -> Sync:
        """Another synchroniser, with what it needs."""
        kinds = [k for k in SYNCHRONIZERS if k != "sparse_all_gather" or v.sparse or not self.fitting]
        kind = self.rng.choice(kinds)
        server = (self.rng.choice(self.devices),) if kind == "parameter_server" else ()
        return replace(sync, kind=kind, placement=server)

    def placement(self, sync: Sync, v: Variable) -> Sync:
        """Another server; on a collective, which has none, what is to be refused."""
        if self.fitting:
            sync = replace(sync, kind="parameter_server")
        count = 1 if self.fitting else self.rng.randint(1, len(self.devices))
        return replace(sync, placement=tuple(self.rng.sample(self.devices, count)))

    def transfer(self, sync: Sync, v: Variable) -> Sync:
        """Stations."""
        count = self.rng.randint(1, len(self.devices))
        if self.fitting and sync.kind not in ("all_reduce", "parameter_server"):
            sync = replace(sync, kind="all_reduce")
        return replace(sync, transfer=tuple(self.rng.sample(self.devices, count)))

    def sequence(self, sync: Sync, v: Variable) -> Sync:
        """The strategy's own order of devices."""
        if self.fitting and v.sparse and self.rng.random() < 0.5:
            sync = replace(sync, kind="sparse_all_gather", placement=())
        if self.fitting and sync.kind == "parameter_server":
            kinds = [k for k in SYNCHRONIZERS if k != "parameter_server" and (v.sparse or k != "sparse_all_gather")]
            sync = replace(sync, kind=self.rng.choice(kinds), placement=())
        return replace(sync, sequence=self.order)

    def group(self, sync: Sync, v: Variable) -> Sync:
        """Merged, or alone."""
        if self.fitting and v.sparse and self.rng.random() < 0.5:
            sync = replace(sync, kind="sparse_all_gather", placement=())
        return replace(sync, group=self.rng.choice([0, 1, 1 << 20, ALONE, *([] if self.fitting else [-2])]))

    def encoder(self, sync: Sync, v: Variable) -> Sync:
        """Any encoder that fits."""
        linear = ["sufficient_factors"] * 4 if v.factors and "sufficient_factors" in self.encoders else []
        name = self.rng.choice([*self.encoders, *linear])
        if self.fitting:
            if name == "sufficient_factors" and (v.factors < 1 or len(v.shape) != 2):
                name = "onebit"
            if sync.kind == "sharded":
                sync = replace(sync, kind="all_reduce")
        amount = f":{self.rng.choice(AMOUNTS[name])}" if name in AMOUNTS else ""
        return replace(sync, encoder=name + amount)

    def staleness(self, sync: Sync, v: Variable) -> Sync:
        """Late, on a server."""
        if self.fitting and sync.kind != "parameter_server":
            sync = replace(sync, kind="parameter_server", placement=(self.rng.choice(self.devices),))
        return replace(sync, staleness=self.rng.choice([1, 2, 3, -1]))

    def settled(self, sync: Sync, v: Variable, is_cut: bool) -> Sync:
        """What a fitting strategy may say: later choices give way to those that exclude them."""
        if sync.kind == "parameter_server":
            sync = replace(sync, sequence=(), placement=sync.placement[:1] or self.devices[:1])
        else:
            sync = replace(sync, placement=(), staleness=0)
        if sync.kind not in ("all_reduce", "parameter_server") or sync.staleness or sync.sequence:
            sync = replace(sync, transfer=())
        name = sync.encoder.partition(":")[0]
        unfit = v.sparse or sync.kind == "sharded" or (name == "sufficient_factors" and is_cut)
        if unfit or (sync.staleness and name not in STALE_ENCODERS):
            sync = replace(sync, encoder="none")
        return sync

    def partition(self, v: Variable) -> tuple[int | tuple[int, ...], ...]:
        """Cuts along one axis or several, even or not."""
        cuts: list[int | tuple[int, ...]] = [1] * len(v.shape)
        for axis in self.rng.sample(range(len(v.shape)), self.rng.randint(1, len(v.shape))):
            size = v.shape[axis]
            cut: int | tuple[int, ...] = self.rng.randint(1, min(size, 3))
            if size > 1 and self.rng.random() < 0.4:
                first = self.rng.randint(1, size - 1)
                cut = (first, size - first)
            cuts[axis] = cut
        return tuple(cuts)

    def node(self, node: NodeConfig, v: Variable, chosen: Sequence[str]) -> NodeConfig:
        """A variable with some aspects drawn anew."""
        change: dict[str, Callable[[Sync, Variable], Sync]] = {
            name: getattr(self, name) for name in sync_aspects() if name in chosen
        }
        if "partition" in chosen and v.shape:
            node = NodeConfig(variable=v.name, partition=self.partition(v), sync=(node.sync, *node.parts)[-1])
        count = len(node.cut(v))

        def one(sync: Sync) -> Sync:
            for draw in change.values():
                sync = draw(sync, v)
            return self.settled(sync, v, count > 1) if self.fitting else sync

        if "parts" in chosen:
            kinds = [self.kind(node.sync, v) for _ in range(count)]
            return replace(node, parts=tuple(one(sync) for sync in kinds))
        if self.fitting and node.parts:
            return replace(node, parts=tuple(one(sync) for sync in node.parts))
        return replace(node, sync=one(node.sync), parts=())


def sync_aspects() -> tuple[str, ...]:
    """The fields of a `Sync`; one without a function to draw it is an `AttributeError`."""
    return tuple(field.name for field in fields(Sync))


def draw(seed: int, builder: str, aspect: str, ranks: int, spec_of: SpecOf, *, fitting: bool = False) -> Case:
    """The case of a number.

    Args:
        seed: The number.
        builder: The builder to start from.
        aspect: The field that is drawn anew for most variables.
        ranks: How many ranks train.
        spec_of: The model's spec.
        fitting: Whether the draw has to fit together.

    Returns:
        The case, with a strategy or with the message that refuses it.
    """
    rng = random.Random(seed)
    # In the order of the fields: that of a set would be another one in every process.
    chosen = [name for name in aspects() if name == aspect or (name != "staleness" and rng.random() < 0.12)]
    stale = "staleness" in chosen
    kinds = list(PLAIN if fitting else OPTIMIZERS)
    optimizer = rng.choice(OFTEN) if seed // len(kinds) % 2 else kinds[seed % len(kinds)]
    loop = "plain" if rng.random() < 0.5 else rng.choice(LOOPS)
    if stale:
        optimizer, loop = rng.choice(["sgd", "sgd", "momentum"]), "plain"
    takes = OPTIMIZERS[optimizer]
    sparse = takes == "tables" or (takes == "any" and rng.random() < 0.7)
    mixed = rng.choice([0, 1, 3]) if optimizer in ("sgd", "momentum") else rng.choice([0, 1])
    if stale or loop == "clip" or optimizer == "adafactor":
        mixed = 0
    fits = rng.random() < FITTING or fitting
    drawer = Drawer(rng, spec_of(sparse, mixed), ranks, fitting=fits, factors=not stale)
    strategy, options = drawer.built(builder)
    refusal, made = "", False
    try:
        strategy = _changed(strategy, drawer, chosen, aspect)
        made = True
        strategy.check(drawer.model)
    except InvalidInput as error:
        refusal = str(error)
    late = {sync.staleness for node in strategy.nodes for sync in (node.sync, *node.parts)}
    if -1 in late:
        optimizer = "sgd"  # every message is an update: with momentum their order would count
    keeping = any(sync.encoder.startswith(("powersgd", "topk", "onebit", "sufficient", "float16", "bfloat16"))
                  for node in strategy.nodes for sync in (node.sync, *node.parts))  # fmt: skip
    half = any(sync.encoder in ("float16", "bfloat16") for node in strategy.nodes for sync in (node.sync, *node.parts))
    if half and (mixed or optimizer == "rprop"):
        optimizer = "momentum"  # one that does not show which order shares were added in could not be followed
    if keeping and loop == "twice":
        loop = "no_sync"
    if keeping and loop == "clip":
        loop = "plain"
    return Case(
        seed=seed, builder=builder, aspect=aspect, options=options, strategy=strategy, made=made, refusal=refusal,
        optimizer=optimizer, loop=loop, sparse=sparse, mixed=mixed, linear=stale,
    )  # fmt: skip


def _changed(strategy: Strategy, drawer: Drawer, chosen: Sequence[str], aspect: str) -> Strategy:
    nodes = []
    for node in strategy.nodes:
        here = [name for name in chosen if drawer.rng.random() < (0.8 if name == aspect else 0.4)]
        nodes.append(drawer.node(node, drawer.model.variable(node.variable), here) if here else node)
    if all(before is after for before, after in zip(strategy.nodes, nodes, strict=True)):
        nodes[-1] = drawer.node(nodes[-1], drawer.model.variable(nodes[-1].variable), [aspect])
    return replace(strategy, nodes=tuple(nodes))


def cases(first: int, rounds: int, ranks: int, spec_of: SpecOf, *, every: bool = True) -> Iterator[Case]:
    """So many times every builder with every aspect; where a draw is refused also one that fits.

    Args:
        first: The first number.
        rounds: How often every pair is drawn.
        ranks: How many ranks train.
        spec_of: The model's spec.
        every: Whether all cases are for this number of ranks, or each second one.

    Yields:
        The cases.
    """
    seed = first
    for _ in range(rounds):
        for builder in BUILDERS:
            for aspect in aspects():
                if every or seed % 2 == ranks % 2:
                    case = draw(seed, builder, aspect, ranks, spec_of)
                    yield case
                    if case.refusal or case.optimizer not in PLAIN:
                        yield draw(seed, builder, aspect, ranks, spec_of, fitting=True)
                seed += 1


def served(case: Case) -> Case:
    """The case with one more rank that only serves, somewhere among the others, and most servers on it."""
    rng = random.Random(case.seed)
    devices = list(case.strategy.devices)
    devices.insert(rng.randint(0, len(devices)), "servers.cpu0")

    def one(sync: Sync) -> Sync:
        there = sync.kind == "parameter_server" and rng.random() < 0.7
        return replace(sync, placement=("servers.cpu0",)) if there else sync

    nodes = tuple(
        replace(node, sync=one(node.sync), parts=tuple(one(part) for part in node.parts))
        for node in case.strategy.nodes
    )
    strategy = replace(case.strategy, devices=tuple(devices), servers=("servers.cpu0",), nodes=nodes)
    return replace(case, strategy=strategy)


def features(case: Case, model: ModelSpec) -> list[str]:
    """What a case has in it, in words that the test looks for."""
    found = {
        f"builder {case.builder}", f"{case.builder} x {case.aspect}", f"optimizer {case.optimizer}",
        f"loop {case.loop}", f"sparse {case.sparse}", f"hosts {'.' in case.strategy.devices[0]}",
    }  # fmt: skip
    found |= {f"option {case.builder}.{name}" for name in case.options}
    found |= {f"dtype {v.dtype}" for v in model.variables}
    for node in case.strategy.nodes:
        axes = [axis for axis, cut_in in enumerate(node.partition) if cut_in != 1]
        found |= {f"cut along {axis}" for axis in axes} | {f"axes cut {min(len(axes), 2)}"}
        found |= {"uneven" for cut_in in node.partition if isinstance(cut_in, tuple)}
        found |= {"field parts"} if len(node.parts) > 1 else set()
        found |= {"field partition"} if axes else set()
        for sync in node.parts or (node.sync,):
            encoder = sync.encoder.partition(":")[0]
            found |= {f"kind {sync.kind}", f"encoder {encoder}", f"{sync.kind} with {encoder}"}
            for field in fields(Sync):
                if getattr(sync, field.name) != field.default:
                    found |= {f"field {field.name}", f"{sync.kind} with {field.name}"}
    return sorted(found)
