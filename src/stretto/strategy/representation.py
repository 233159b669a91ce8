# SPDX-License-Identifier: Apache-2.0
"""`Strategy`: how each variable of a model is synchronized. AutoDist's section 2.2, complete.

Graph level: the devices that hold a replica, and those that only serve. Node level, for each variable: how it is cut,
and for the whole or for each part its placement, the primitives that synchronize it, the form in which it is sent, and
how late it may arrive.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, product

from ..errors import InvalidInput, unknown
from .model import ModelSpec, Variable

SYNCHRONIZERS = ("all_reduce", "parameter_server", "sparse_all_gather", "sharded")
"""``parameter_server`` is (Reduce, Broadcast); ``sharded`` is (ReduceScatter, AllGather), as in ZeRO."""
ENCODERS = ("none", "float16", "bfloat16", "powersgd", "topk", "onebit", "sufficient_factors")
WITH_AMOUNT: dict[str, tuple[Callable[[float], bool], str]] = {
    "powersgd": (lambda rank: 1 <= rank <= MAX_RANK and rank == int(rank), "a rank (powersgd:4), whole and > 0"),
    "topk": (lambda share: 0 < share <= 1, "a share (topk:0.01), more than 0 and at most 1"),
}
MAX_RANK = 1 << 20
LOSSLESS = frozenset({"none", "sufficient_factors"})
STALE_ENCODERS = ("none", "float16", "bfloat16")
"""Encoders for servers that do not wait for all ranks: those that keep nothing back for the next step."""
ALONE = -1
"""The `group` of a variable or part that is sent as a message by itself."""
ASYNCHRONOUS = -1
MAX_STALENESS = 16
MAX_PARTS = 4096


def _no_amount(amount: float) -> bool:
    return amount == 0


@dataclass(frozen=True, kw_only=True)
class Sync:
    """How one variable, or one part of it, is synchronized.

    `placement`: the one device of a parameter server; a collective has none, since every replica takes part in it.
    `transfer`: stations, at most one per host, where a host's gradients are summed before they are sent on and where
    parameters arrive first. `sequence`: the order of devices in a reduction. `group`: equal numbers are sent as one
    message (-1: alone). `encoder` with its amount after a colon: ``powersgd:4`` (rank), ``topk:0.01`` (share).
    `staleness`: how many steps the fastest replica may be ahead (0: synchronous, -1: no limit).
    """

    kind: str = "all_reduce"
    placement: tuple[str, ...] = ()
    transfer: tuple[str, ...] = ()
    sequence: tuple[str, ...] = ()
    group: int = ALONE
    encoder: str = "none"
    staleness: int = 0

    @property
    def encoding(self) -> tuple[str, float]:
        """The encoder's name and its amount (0 if it has none)."""
        name, _, amount = self.encoder.partition(":")
        try:
            return name, float(amount) if amount else 0.0
        except ValueError:
            raise InvalidInput(f"encoder: {self.encoder!r}: what follows the colon must be a number") from None

    @property
    def is_lossless(self) -> bool:
        """Whether training computes the same as synchronous training with whole gradients."""
        return self.encoding[0] in LOSSLESS and self.staleness == 0


@dataclass(frozen=True, kw_only=True)
class VariablePart:
    """A part of a variable: its begin on each axis, and its shape."""

    index: int
    start: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, kw_only=True)
class NodeConfig:
    """The decision for one variable.

    `partition` has an entry per axis: a number of parts, or their sizes; empty: the variable is not cut. `parts` has
    one `Sync` per part, in row-major order; empty: all parts use `sync`.
    """

    variable: str
    partition: tuple[int | tuple[int, ...], ...] = ()
    sync: Sync = field(default_factory=Sync)
    parts: tuple[Sync, ...] = ()

    def cut(self, variable: Variable) -> tuple[VariablePart, ...]:
        """The parts of a variable; raises `InvalidInput` if it cannot be cut in this way.

        >>> node = NodeConfig(variable="w", partition=((3, 1), 1))
        >>> [(part.start, part.shape) for part in node.cut(Variable(name="w", shape=(4, 8)))]
        [((0, 0), (3, 8)), ((3, 0), (1, 8))]
        """
        shape = variable.shape
        if not self.partition:
            return (VariablePart(index=0, start=(0,) * len(shape), shape=shape),)
        if len(self.partition) != len(shape):
            raise InvalidInput(f"{self.variable}.partition: must have {len(shape)} entries, not {len(self.partition)}")
        axes = [self._sizes(axis, self.partition[axis], size) for axis, size in enumerate(shape)]
        if math.prod(len(sizes) for sizes in axes) > MAX_PARTS:
            raise InvalidInput(f"{self.variable}.partition: at most {MAX_PARTS} parts")
        spans = [list(zip(accumulate(sizes, initial=0), sizes, strict=False)) for sizes in axes]
        return tuple(
            VariablePart(index=at, start=tuple(start for start, _ in cell), shape=tuple(size for _, size in cell))
            for at, cell in enumerate(product(*spans))
        )

    def _sizes(self, axis: int, cut: int | tuple[int, ...], size: int) -> list[int]:
        where = f"{self.variable}.partition[{axis}]"
        if isinstance(cut, int):
            if not 1 <= cut <= size:
                raise InvalidInput(f"{where}: must be 1..{size} parts (the axis has {size}), not {cut}")
            return [size // cut + (at < size % cut) for at in range(cut)]
        if any(one < 1 for one in cut) or sum(cut) != size:
            raise InvalidInput(f"{where}: sizes {list(cut)} must be > 0 and add up to {size}")
        return list(cut)

    def syncs(self, variable: Variable) -> Iterator[tuple[VariablePart, Sync]]:
        """Each part with its synchronization."""
        parts = self.cut(variable)
        if self.parts and len(self.parts) != len(parts):
            raise InvalidInput(f"{self.variable}.parts: must be {len(parts)} (as cut), not {len(self.parts)}")
        yield from zip(parts, self.parts or (self.sync,) * len(parts), strict=True)


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """A decision for every variable of a model, on named devices.

    Devices are named as in the cluster (or ``rank0``, ``rank1``, ...), one per rank, in the order of ranks. Those in
    `servers` hold no replica: they compute nothing, take no part in collectives, and only serve what is placed on them.
    """

    name: str
    model: str
    model_digest: str
    devices: tuple[str, ...]
    nodes: tuple[NodeConfig, ...]
    servers: tuple[str, ...] = ()
    made_by: str = ""
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.devices or len(set(self.devices)) != len(self.devices):
            raise InvalidInput("devices: must be one or more different names")
        for name in self.servers:
            if name not in self._ranks:
                raise InvalidInput(f"servers: {unknown('device', name, self.devices)}")
        if len(set(self.servers)) != len(self.servers) or len(self.servers) == len(self.devices):
            raise InvalidInput("servers: must be different devices, and at least one device must train")
        names = [node.variable for node in self.nodes]
        if len(set(names)) != len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise InvalidInput(f"nodes: variable {twice!r} is there twice")
        for node in self.nodes:
            for at, sync in enumerate((node.sync, *node.parts)):
                self._check(sync, f"{node.variable}.{'sync' if at == 0 else f'parts[{at - 1}]'}")

    def _check(self, sync: Sync, where: str) -> None:
        if sync.kind not in SYNCHRONIZERS:
            raise InvalidInput(f"{where}.kind: {unknown('synchroniser', sync.kind, SYNCHRONIZERS)}")
        for key in ("placement", "transfer", "sequence"):
            names = getattr(sync, key)
            for name in names:
                if name not in self._ranks:
                    raise InvalidInput(f"{where}.{key}: {unknown('device', name, self.devices)}")
            if len(set(names)) != len(names):
                raise InvalidInput(f"{where}.{key}: names a device twice")
        if sync.kind == "parameter_server" and len(sync.placement) != 1:
            raise InvalidInput(f"{where}.placement: a parameter server is on one device, not {len(sync.placement)}")
        if sync.kind != "parameter_server" and sync.placement:
            raise InvalidInput(f"{where}.placement: {sync.kind} is on every device: name none")
        if sync.group < ALONE:
            raise InvalidInput(f"{where}.group: must be a number >= 0, or {ALONE} (alone), not {sync.group}")
        if sync.sequence and set(sync.sequence) != set(self.devices) - set(self.servers):
            raise InvalidInput(f"{where}.sequence: must name every device that trains once")
        if set(sync.transfer) & set(self.servers):
            raise InvalidInput(f"{where}.transfer: {min(set(sync.transfer) & set(self.servers))} only serves")
        encoder, amount = sync.encoding
        if encoder not in ENCODERS:
            raise InvalidInput(f"{where}.encoder: {unknown('encoder', encoder, ENCODERS)}")
        fits, wanted = WITH_AMOUNT.get(encoder, (_no_amount, "no amount"))
        if not fits(amount):
            raise InvalidInput(f"{where}.encoder: {encoder} takes {wanted}, not {sync.encoder!r}")
        if sync.kind == "sharded" and encoder != "none":
            raise InvalidInput(f"{where}.encoder: sharded has none: shares of an encoded gradient cannot be told apart")
        if not ASYNCHRONOUS <= sync.staleness <= MAX_STALENESS:
            raise InvalidInput(f"{where}.staleness: must be {ASYNCHRONOUS}..{MAX_STALENESS}, not {sync.staleness}")
        if sync.staleness and sync.kind != "parameter_server":
            raise InvalidInput(f"{where}.staleness: needs a parameter server, {sync.kind} is synchronous")
        if sync.staleness and sync.transfer:
            raise InvalidInput(f"{where}.transfer: with staleness ranks reach the server directly: name no stations")
        if sync.staleness and encoder not in STALE_ENCODERS:
            raise InvalidInput(
                f"{where}.encoder: with staleness it must be {' or '.join(STALE_ENCODERS)}, not {sync.encoder}"
            )
        if sync.transfer and sync.kind not in ("all_reduce", "parameter_server"):
            raise InvalidInput(f"{where}.transfer: {sync.kind} has no stations")
        if sync.sequence and (sync.kind == "parameter_server" or sync.transfer):
            raise InvalidInput(f"{where}.sequence: servers and stations decide the order themselves")

    @cached_property
    def _ranks(self) -> dict[str, int]:
        return {name: rank for rank, name in enumerate(self.devices)}

    @cached_property
    def replicas(self) -> tuple[int, ...]:
        """The ranks that hold a replica and train."""
        serving = set(self.servers)
        return tuple(rank for rank, name in enumerate(self.devices) if name not in serving)

    def rank(self, device: str) -> int:
        """The rank of a device."""
        if device not in self._ranks:
            raise unknown("device", device, self.devices)
        return self._ranks[device]

    @cached_property
    def _nodes(self) -> dict[str, NodeConfig]:
        return {node.variable: node for node in self.nodes}

    def node(self, variable: str) -> NodeConfig:
        """The decision for a variable."""
        if variable not in self._nodes:
            raise unknown("variable", variable, self._nodes)
        return self._nodes[variable]

    @property
    def is_lossless(self) -> bool:
        """Whether the strategy trains as synchronous training with whole gradients does."""
        return all(sync.is_lossless for node in self.nodes for sync in (node.parts or (node.sync,)))

    def check(self, model: ModelSpec) -> None:
        """Raise `InvalidInput` unless this is a strategy for this model."""
        known = {v.name for v in model.variables}
        missing = [v.name for v in model.variables if v.name not in self._nodes]
        extra = [node.variable for node in self.nodes if node.variable not in known]
        if missing or extra:
            said = f"has no node for {missing[0]!r}" if missing else f"has a node for {extra[0]!r}, which is not in it"
            other = f", not for {model.name}" if model.name != self.model else ""
            raise InvalidInput(f"strategy {self.name} was made for {self.model}{other}: it {said}")
        for node in self.nodes:
            variable = model.variable(node.variable)
            syncs = list(node.syncs(variable))
            for _, sync in syncs:
                _check_fit(sync, variable, is_cut=len(syncs) > 1)
        if self.model_digest != model.digest:
            raise InvalidInput(f"strategy {self.name} was made for {self.model} ({self.model_digest}): shapes differ")


def _check_fit(sync: Sync, variable: Variable, *, is_cut: bool) -> None:
    """Raise `InvalidInput` for a synchronization that the variable's gradient does not allow."""
    encoder = sync.encoding[0]
    if sync.kind == "sparse_all_gather" and not variable.sparse:
        raise InvalidInput(f"{variable.name}.kind: sparse_all_gather needs a sparse gradient")
    if encoder != "none" and variable.sparse:
        raise InvalidInput(f"{variable.name}.encoder: {encoder} needs a dense gradient: rows travel as they are")
    if encoder == "sufficient_factors":
        if variable.factors < 1 or len(variable.shape) != 2:
            raise InvalidInput(f"{variable.name}.encoder: sufficient_factors needs the weight of a linear layer")
        if is_cut:
            raise InvalidInput(f"{variable.name}.partition: sufficient_factors needs the whole variable: do not cut it")
