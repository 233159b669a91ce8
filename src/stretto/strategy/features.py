# SPDX-License-Identifier: Apache-2.0
"""The feature vector of a strategy for the learned model: the predefined model's figures, and raw ones.

All vectors of one model on one cluster have the same length: there is one learned model for each search.
"""

from __future__ import annotations

import numpy as np

from .cost import NAMES, Floats, StrategyCostModel
from .representation import SYNCHRONIZERS, Strategy

LARGEST = 6
"""The number of variables, those with the largest gradients, that have features of their own."""

COMMON = (
    "estimate", *NAMES, *(f"share.{kind}" for kind in SYNCHRONIZERS), "cut", "two_level", "ordered", "encoded",
    "stale", "messages", "largest_message", "last_message", "busiest_server",
)  # fmt: skip
"""The features with which every vector begins, whatever the model and the cluster."""


class Features:
    """Feature vectors of strategies for a model on a cluster.

    >>> from stretto.strategy import ModelSpec, Variable
    >>> from stretto.strategy.builders import build
    >>> model = ModelSpec(name="two", variables=(Variable(name="w", shape=(4096, 64)), Variable(name="b", shape=(64,))))
    >>> features = Features(model=StrategyCostModel(model, 2))
    >>> len(features.vector(build("ps", model, 2))) == len(features.names)
    True
    """

    def __init__(self, model: StrategyCostModel) -> None:
        self.cost = model
        variables = model.model.variables
        self._total = max(sum(v.gradient_bytes for v in variables), 1)
        self._largest = [v.name for v in sorted(variables, key=lambda v: -v.gradient_bytes)[:LARGEST]]
        self._host = dict(zip(model.there.devices, model.there.hosts, strict=True))
        self._hosts = [model.there.hosts[ranks[0]] for ranks in model.there.by_host]
        each = [f"{name}.{what}" for name in self._largest for what in (*SYNCHRONIZERS, "parts")]
        self.names = (*COMMON, *(f"served.{at}" for at in range(len(self._hosts))), *each)

    def vector(self, strategy: Strategy) -> Floats:
        """The vector of a strategy: times as logarithms, everything else as shares of the gradient's bytes."""
        parts = self.cost.components(strategy)
        times = [np.log1p(value) for value in (parts.estimate_us, *parts.six)]
        share = dict.fromkeys(SYNCHRONIZERS, 0.0)
        served = dict.fromkeys(self._hosts, 0.0)
        servers: dict[str, float] = {}
        messages: dict[object, float] = {}
        cut = level = ordered = encoded = stale = last = 0.0
        for variable in self.cost.model.variables:
            found = list(strategy.node(variable.name).syncs(variable))
            for part, sync in found:
                nbytes = variable.gradient_bytes * part.elements / variable.elements / self._total
                share[sync.kind] += nbytes
                cut += nbytes * (len(found) > 1)
                level += nbytes * bool(sync.transfer)
                ordered += nbytes * bool(sync.sequence)
                encoded += nbytes * (sync.encoder != "none")
                stale += nbytes * (sync.staleness if sync.staleness >= 0 else 16)
                key = (sync, variable.dtype) if sync.group >= 0 else (variable.name, part.index)
                messages[key] = messages.get(key, 0.0) + nbytes
                if sync.kind == "parameter_server":
                    served[self._host[sync.placement[0]]] += nbytes
                    servers[sync.placement[0]] = servers.get(sync.placement[0], 0.0) + nbytes
        first = self.cost.model.variables[0]
        part, sync = next(iter(strategy.node(first.name).syncs(first)))
        last = messages[(sync, first.dtype) if sync.group >= 0 else (first.name, part.index)]
        own: list[float] = []
        for name in self._largest:
            node = strategy.node(name)
            kinds = [one.kind for one in (node.parts or (node.sync,))]
            own += [kinds.count(kind) / len(kinds) for kind in SYNCHRONIZERS] + [np.log2(len(kinds)) / 4]
        return np.array(
            [*times, *share.values(), cut, level, ordered, encoded, stale, np.log(len(messages)),
             max(messages.values()), last, max(servers.values(), default=0.0), *served.values(), *own]
        )  # fmt: skip


__all__ = ["COMMON", "Features"]
