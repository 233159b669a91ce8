# SPDX-License-Identifier: Apache-2.0
"""The predefined cost model: an estimate of a strategy's time from six figures that need no run.

AutoDist's Appendix C, which names its six components, is missing from the text at hand; these are ours. Each is a time
in microseconds, computed from the messages that the kernels make of a strategy:

* `uplink_us`: the busiest uplink of a host, in either direction, if everything else were free and all messages at once
* `device_us`: the same for the busiest device inside its host
* `serial_us`: every message alone at its own slowest place, those of a queue one after the other; the longest queue
* `exposed_us`: the time after the backward pass until the last queue is done, if each message begins when it is ready
* `latency_us`: the latency of all steps of all messages
* `update_us`: optimizer and encoders on the busiest rank

The collectives of a lane form a queue and go round a ring in the order of their ranks; servers are reached directly,
each with a queue of its own. The estimate is the compute plus a linear combination of the six with fixed constants, in
which only the part of `uplink_us` counts that the backward pass does not hide.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..cluster import Cluster
from .kernels import Message, StepExchange, global_step
from .kernels.compressor import MEMORY_GB_PER_S
from .kernels.workload import UPDATE_PASSES
from .model import ModelSpec
from .representation import Strategy
from .resources import Where, resources

UNKNOWN_GB_PER_S, INSIDE_GB_PER_S = 1.0, 10.0
UNKNOWN_ALPHA_US = 20.0
"""Assumed for devices that are known by name only: rates of uplinks and inside hosts, and a message's latency."""
THETA = (0.6, 0.1, 0.4, 0.4, 1.0, 1.0)
"""The weights of the six figures: messages overlap partly, so the truth lies between `uplink_us` and `serial_us`."""

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Components:
    """The six figures, in microseconds, and the compute beside them."""

    uplink_us: float
    device_us: float
    serial_us: float
    exposed_us: float
    latency_us: float
    update_us: float
    compute_us: float
    hidden_us: float
    """Time of the backward pass, which hides messages."""

    @property
    def six(self) -> tuple[float, ...]:
        """The six figures, in the order of `NAMES`."""
        return self.uplink_us, self.device_us, self.serial_us, self.exposed_us, self.latency_us, self.update_us

    @property
    def estimate_us(self) -> float:
        """A rough estimate of the iteration time."""
        counted = (max(self.uplink_us - self.hidden_us, 0.0), *self.six[1:])
        return self.compute_us + sum(weight * value for weight, value in zip(THETA, counted, strict=True))


NAMES = ("uplink_us", "device_us", "serial_us", "exposed_us", "latency_us", "update_us")


class StrategyCostModel:
    """Estimates the cost of strategies for one model on one cluster (or on devices known by name)."""

    def __init__(self, model: ModelSpec, where: Where) -> None:
        self.model = model
        self.there = resources(where)
        count = len(self.there.devices)
        self._uplink = np.zeros(count)
        known = bool(self.there.host_gb_per_s)
        for ranks, rate in zip(self.there.by_host, self.there.rates, strict=True):
            self._uplink[list(ranks)] = rate if known else UNKNOWN_GB_PER_S
        self._host = np.zeros(count, dtype=int)
        for at, ranks in enumerate(self.there.by_host):
            self._host[list(ranks)] = at
        self._inside, self._alpha_us = _inside(where, count)
        self._flow_gb_per_s = _flow_gb_per_s(where)
        self._backward_us = sum(v.backward_us for v in model.variables)
        self._compute_us = self._backward_us + sum(v.forward_us for v in model.variables)
        self._ready_us: dict[str, float] = {}
        reached = 0.0
        for variable in reversed(model.variables):
            reached += variable.backward_us
            self._ready_us[variable.name] = reached
        self._ways: dict[tuple[str, tuple[int, ...], int], _Way] = {}
        self._host_rate = self._uplink[[ranks[0] for ranks in self.there.by_host]]

    def components(self, strategy: Strategy) -> Components:
        """The six figures of a strategy."""
        step = global_step(strategy, self.model, self.there)
        uplink, device = np.zeros((2, len(self.there.by_host))), np.zeros((2, len(self.there.devices)))
        busy: defaultdict[Hashable, float] = defaultdict(float)
        until: defaultdict[Hashable, float] = defaultdict(float)
        latency = 0.0
        update = np.zeros(step.num_ranks)
        for message in step.messages:
            served = message.sync.kind == "parameter_server"
            queue: Hashable = (message.updaters,) if served else message.lane
            now = max(until[queue], max(self._ready_us[piece.variable.name] for piece in message.pieces))
            for exchange in message.exchanges:
                alone = 0.0
                for group in exchange.groups:
                    way = self._way(exchange, group, step.ranks)
                    uplink += way.uplink * exchange.nbytes
                    device += way.device * exchange.nbytes
                    alone = max(alone, way.us_per_byte * exchange.nbytes)
                steps_us = self._alpha_us * _steps(exchange)
                latency += steps_us
                busy[queue] += alone
                # A message that may come `lag` iterations late is spread over the compute of these iterations.
                now += (alone + steps_us) / message.lag
            until[queue] = now
            update[list(message.updaters or step.replicas)] += _update_us(message)
        return Components(
            uplink_us=float((uplink / self._host_rate).max()) * 1e-3,
            device_us=float((device / self._inside).max()) * 1e-3,
            serial_us=max(busy.values(), default=0.0),
            exposed_us=max(max(until.values(), default=0.0) - self._backward_us, 0.0),
            latency_us=latency, update_us=float(update.max()), compute_us=self._compute_us,
            hidden_us=self._backward_us,
        )  # fmt: skip

    def estimate_us(self, strategy: Strategy) -> float:
        """A rough estimate of the iteration time, good for telling which of two strategies is faster."""
        return self.components(strategy).estimate_us

    def _way(self, exchange: StepExchange, group: tuple[int, ...], ranks: tuple[int, ...]) -> _Way:
        """The cost of one byte of an exchange in one group."""
        key = (exchange.kind, group, exchange.root)
        if key not in self._ways:
            uplink, device = np.zeros((2, len(self.there.by_host))), np.zeros((2, len(self.there.devices)))
            flow = 0.0
            for source, target, share in _ways(exchange.kind, group, exchange.root):
                a, b = ranks[source], ranks[target]
                device[0, a] += share
                device[1, b] += share
                if self._host[a] != self._host[b]:
                    uplink[0, self._host[a]] += share
                    uplink[1, self._host[b]] += share
                    flow = max(flow, share / self._flow_gb_per_s)
            slowest = max(float((uplink / self._host_rate).max()), float((device / self._inside).max()), flow)
            self._ways[key] = _Way(uplink=uplink, device=device, us_per_byte=slowest * 1e-3)
        return self._ways[key]


@dataclass(frozen=True, kw_only=True, eq=False)
class _Way:
    """Bytes out of and into each host's uplink and each device for one byte of an exchange, and the time of that byte
    alone.
    """

    uplink: Floats
    device: Floats
    us_per_byte: float


def _ways(kind: str, group: tuple[int, ...], root: int) -> list[tuple[int, int, float]]:
    """Transfers of an exchange as (sender, receiver, share of the bytes)."""
    count = len(group)
    if kind in ("all_reduce", "reduce_scatter", "all_gather"):
        share = (count - 1) / count * (2 if kind == "all_reduce" else 1)
        return [(rank, group[(at + 1) % count], share) for at, rank in enumerate(group)]
    share = 1.0 if kind in ("reduce", "broadcast") else 1.0 / count
    others = [(rank, group[root]) for at, rank in enumerate(group) if at != root]
    inward = kind in ("reduce", "gather")
    return [(a, b, share) if inward else (b, a, share) for a, b in others]


def _steps(exchange: StepExchange) -> int:
    widest = max(map(len, exchange.groups))
    if exchange.kind == "all_reduce":
        return 2 * (widest - 1)
    return widest - 1 if exchange.kind in ("reduce_scatter", "all_gather") else 1


def _update_us(message: Message) -> float:
    nbytes = message.nbytes * message.update_share
    if message.pieces[0].variable.sparse:
        nbytes = sum(piece.rows_bytes for piece in message.pieces)
    encoding = sum(exchange.at_work_us for exchange in message.exchanges)
    return UPDATE_PASSES * nbytes / (MEMORY_GB_PER_S * 1e3) + encoding


def _inside(where: Where, count: int) -> tuple[float, float]:
    """The rate of a device inside its host, and a message's latency between hosts."""
    if not isinstance(where, Cluster):
        return INSIDE_GB_PER_S, UNKNOWN_ALPHA_US
    own = where.link_src < count
    rate = float(where.link_gb_per_s[own].max()) if own.any() else INSIDE_GB_PER_S
    alpha = float(where.link_alpha_us.max()) if len(where.link_alpha_us) else UNKNOWN_ALPHA_US
    return rate, max(alpha, 1.0)


def _flow_gb_per_s(where: Where) -> float:
    """The most that one connection carries."""
    return float(where.link_flow_gb_per_s.min()) if isinstance(where, Cluster) and where.num_links else np.inf


__all__ = ["NAMES", "THETA", "Components", "StrategyCostModel"]
