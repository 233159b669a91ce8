# SPDX-License-Identifier: Apache-2.0
"""A recurrent ranking model, as AutoDist has one: it reads a strategy variable by variable.

A gated recurrent unit goes over the variables in the order in which their gradients are ready, and a linear layer reads
the utility from its last state. It starts from the predefined model's estimate, and learns with the same pairwise loss
as the Gaussian process of `learned.Ranker`, by Adam. Doubt and distance, which a search needs too, are the process's.
Everything is NumPy: there are tens of trials, and a few hundred weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from .cost import Floats, StrategyCostModel
from .features import Features
from .learned import CLEAR, ESTIMATE_SLOPE, Ranker, sigmoid
from .representation import SYNCHRONIZERS, Strategy

SEGMENTS = 16
"""The most steps: neighboring variables of a longer model are one step, with their sums."""
STEP = len(SYNCHRONIZERS) + 6
HIDDEN = 8
EPOCHS, RATE, DECAY = 120, 0.02, 1e-3
"""Steps of Adam for each fit, their size, and the pull of all weights towards 0."""


class SequenceFeatures(Features):
    """Feature vectors that end in the strategy as a sequence of `SEGMENTS` steps."""

    def __init__(self, model: StrategyCostModel) -> None:
        super().__init__(model)
        self.fixed = len(self.names)
        self.names = (*self.names, *(f"step{at}.{k}" for at in range(SEGMENTS) for k in range(STEP)))

    def vector(self, strategy: Strategy) -> Floats:
        """The vector of a strategy, and its sequence."""
        return np.concatenate([super().vector(strategy), self._sequence(strategy).ravel()])

    def _sequence(self, strategy: Strategy) -> Floats:
        variables = list(reversed(self.cost.model.variables))
        total = max(sum(v.gradient_bytes for v in variables), 1)
        found = np.zeros((SEGMENTS, STEP))
        before: object = None
        for at, variable in enumerate(variables):
            row = found[at * SEGMENTS // len(variables) if len(variables) > SEGMENTS else at]
            pieces = list(strategy.node(variable.name).syncs(variable))
            for part, sync in pieces:
                share = variable.gradient_bytes * part.elements / variable.elements / total
                message = (sync.kind, sync.placement, sync.group)
                row[SYNCHRONIZERS.index(sync.kind)] += share
                row[-6:] += (
                    share * (len(pieces) > 1), share * (sync.encoder != "none"), share * bool(sync.transfer),
                    share * (sync.group >= 0 and message == before), share * sync.staleness,
                    np.log1p(variable.backward_us) / 100.0,
                )  # fmt: skip
                before = message
        return np.sqrt(np.maximum(found, 0.0))


class RecurrentRanker:
    """Utilities of strategies from the vectors of `SequenceFeatures`; used as `learned.Ranker` is.

    Args:
        fixed: the number of features before the sequence.
        hint: what to add to the estimate.
        seed: seed of the first weights.
    """

    def __init__(self, fixed: int, hint: Callable[[Floats], Floats] | None = None, *, seed: int = 0) -> None:
        self._fixed = fixed
        self._beside = Ranker(hint)
        self._hint = hint
        rng = np.random.default_rng(seed)
        width = STEP + HIDDEN
        self._weights: dict[str, Floats] = {
            "gates": rng.normal(size=(width, 2 * HIDDEN)) / np.sqrt(width), "gates0": np.zeros(2 * HIDDEN),
            "state": rng.normal(size=(width, HIDDEN)) / np.sqrt(width), "state0": np.zeros(HIDDEN),
            "out": 0.01 * rng.normal(size=HIDDEN),
        }  # fmt: skip
        self._moments = {name: (np.zeros_like(each), np.zeros_like(each)) for name, each in self._weights.items()}
        self._steps = 0

    @property
    def trials(self) -> int:
        """The number of trials that the model has learned from."""
        return self._beside.trials

    def fit(self, vectors: Sequence[Floats], times_us: Sequence[float]) -> None:
        """Learn from all trials so far, beginning with what was learned before."""
        if len(vectors) < 2:
            return
        raw, speed = np.array(vectors), -np.log(np.array(times_us))
        self._beside.fit(list(raw[:, : self._fixed]), times_us)
        inputs, prior = self._inputs(raw), self._prior(raw)
        first, second = np.triu_indices(len(raw), 1)
        sure = sigmoid((speed[first] - speed[second]) / CLEAR)
        for _ in range(EPOCHS):
            states, memory = self._forward(inputs)
            utility = prior + states @ self._weights["out"]
            wrong = (sigmoid((utility[first] - utility[second]) / CLEAR) - sure) / CLEAR / len(first)
            slope = np.zeros(len(raw))
            np.add.at(slope, first, wrong)
            np.add.at(slope, second, -wrong)
            self._learn(self._backward(slope, states, memory))

    def score(self, vectors: Sequence[Floats]) -> Floats:
        """The utility of each: a logarithm of speed, up to a constant."""
        raw = np.array(vectors)
        if not self.trials:
            return self._prior(raw)
        return np.asarray(self._prior(raw) + self._forward(self._inputs(raw))[0] @ self._weights["out"])

    def doubt(self, vectors: Sequence[Floats]) -> Floats:
        """The standard deviation of each utility."""
        return self._beside.doubt([each[: self._fixed] for each in vectors])

    def distance(self, some: Sequence[Floats], others: Sequence[Floats]) -> Floats:
        """How different strategies are, from 0 to 1."""
        return self._beside.distance([one[: self._fixed] for one in some], [one[: self._fixed] for one in others])

    def _prior(self, raw: Floats) -> Floats:
        said = -ESTIMATE_SLOPE * raw[:, 0]
        return np.asarray(said if self._hint is None else said + self._hint(raw))

    def _inputs(self, raw: Floats) -> Floats:
        return raw[:, self._fixed :].reshape(len(raw), SEGMENTS, STEP)

    def _forward(self, inputs: Floats) -> tuple[Floats, list[tuple[Floats, ...]]]:
        """The last state of each sequence, and what the way back needs of every step."""
        own = self._weights
        state: Floats = np.zeros((len(inputs), HIDDEN))
        memory: list[tuple[Floats, ...]] = []
        for at in range(SEGMENTS):
            seen = np.hstack([inputs[:, at], state])
            gates = sigmoid(seen @ own["gates"] + own["gates0"])
            keep, reset = gates[:, :HIDDEN], gates[:, HIDDEN:]
            partly = np.hstack([inputs[:, at], reset * state])
            fresh = np.tanh(partly @ own["state"] + own["state0"])
            memory.append((seen, gates, partly, fresh, state))
            state = keep * state + (1.0 - keep) * fresh
        return state, memory

    def _backward(self, slope: Floats, states: Floats, memory: list[tuple[Floats, ...]]) -> dict[str, Floats]:
        """The slope of the loss over every weight."""
        own = self._weights
        found = {name: DECAY * each for name, each in own.items()}
        found["out"] = found["out"] + slope @ states
        down = slope[:, None] * own["out"]
        for seen, gates, partly, fresh, state in reversed(memory):
            keep, reset = gates[:, :HIDDEN], gates[:, HIDDEN:]
            at_fresh = down * (1.0 - keep) * (1.0 - fresh**2)
            at_partly = (at_fresh @ own["state"].T)[:, STEP:]
            at_gates = np.hstack([down * (state - fresh), at_partly * state]) * gates * (1.0 - gates)
            found["state"] += partly.T @ at_fresh
            found["state0"] += at_fresh.sum(0)
            found["gates"] += seen.T @ at_gates
            found["gates0"] += at_gates.sum(0)
            down = down * keep + at_partly * reset + (at_gates @ own["gates"].T)[:, STEP:]
        return found

    def _learn(self, slopes: dict[str, Floats]) -> None:
        """One step of Adam."""
        self._steps += 1
        for name, slope in slopes.items():
            mean, square = self._moments[name]
            mean += 0.1 * (slope - mean)
            square += 0.001 * (slope**2 - square)
            size = np.sqrt(square / (1 - 0.999**self._steps)) + 1e-8
            self._weights[name] = self._weights[name] - RATE * mean / (1 - 0.9**self._steps) / size


__all__ = ["RecurrentRanker", "SequenceFeatures"]
