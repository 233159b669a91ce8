# SPDX-License-Identifier: Apache-2.0
"""The learned model: it predicts which of two strategies is faster, from tens of trials.

AutoDist trains a recurrent network with a ranking loss. With tens of samples a Gaussian process does better, and gives
its uncertainty: a utility for each strategy, with a prior that begins at the predefined model's estimate and varies
smoothly over the features. Its loss is pairwise: for each two trials, the cross-entropy between how clearly one was
faster than the other and how clearly the utilities say so. For two that are far apart only the order counts. The most
probable utilities are found with Newton's method (Laplace's approximation).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from .cost import Floats

NOISE = 0.03
"""Relative spread of the times of one strategy's trials."""
CLEAR = 0.2
"""Relative difference of two times that leaves little doubt about their order."""
ESTIMATE_SLOPE, SMOOTH = 1.0, 0.3
"""Prior: the slope of the utility (a logarithm of speed) over the estimate, and its standard deviation around that."""
ROUNDS = 40
LEAST_SPREAD = 0.05
LEAST_BEND = 0.1


class Ranker:
    """Utilities of strategies from feature vectors whose first entry is the logarithm of the estimated time.

    Higher is faster. Without trials the utility is the estimate's, and what `hint` adds to it.

    >>> ranker = Ranker()
    >>> slow, fast = np.array([2.0, 0.0]), np.array([1.0, 1.0])
    >>> bool(np.diff(ranker.score([slow, fast]))[0] > 0)
    True
    >>> ranker.fit([slow, fast], [10.0, 90.0])  # the runs say otherwise
    >>> bool(np.diff(ranker.score([slow, fast]))[0] < 0)
    True
    """

    def __init__(self, hint: Callable[[Floats], Floats] | None = None) -> None:
        self._hint = hint
        self._vectors: Floats = np.zeros((0, 0))
        self._pull: Floats = np.zeros(0)
        self._solve: Floats = np.zeros((0, 0))
        self._mean: Floats = np.zeros(0)
        self._scale: Floats = np.ones(0)
        self._length = 1.0

    @property
    def trials(self) -> int:
        """The number of trials that the model has learned from."""
        return len(self._pull)

    def fit(self, vectors: Sequence[Floats], times_us: Sequence[float]) -> None:
        """Learn from all trials so far; fewer than two change nothing."""
        if len(vectors) < 2:
            return
        raw, speed = np.array(vectors), -np.log(np.array(times_us))
        self._mean = raw.mean(0)
        spread = raw.std(0)
        # A feature that never varied must not decide about a candidate in which it differs.
        self._scale = np.where(spread > 1e-9, np.maximum(spread, LEAST_SPREAD), 1.0)
        self._vectors = self._standard(raw)
        gaps = ((self._vectors[:, None] - self._vectors[None]) ** 2).sum(-1)
        self._length = max(float(np.median(gaps[np.triu_indices(len(raw), 1)])), 1e-6)
        prior, kernel = self._prior(raw), self._kernel(self._vectors, self._vectors) + 1e-6 * np.eye(len(raw))
        first, second = np.triu_indices(len(raw), 1)
        sure = sigmoid((speed[first] - speed[second]) / CLEAR)
        # A trial is in as many pairs as there are others; together the pairs weigh as much as one time with its noise.
        weight = 4 * (CLEAR / NOISE) ** 2 / (len(raw) - 1)
        utility = prior.copy()
        for _ in range(ROUNDS):
            said = sigmoid((utility[first] - utility[second]) / CLEAR)
            slope = np.zeros(len(raw))
            np.add.at(slope, first, weight * (sure - said) / CLEAR)
            np.add.at(slope, second, -weight * (sure - said) / CLEAR)
            # Where utilities are far apart the curvature is enlarged, which shortens steps but keeps the optimum.
            bend = weight * np.maximum(said * (1 - said), LEAST_BEND) / CLEAR**2
            hessian = np.zeros((len(raw), len(raw)))
            np.add.at(hessian, (first, first), bend)
            np.add.at(hessian, (second, second), bend)
            np.add.at(hessian, (first, second), -bend)
            np.add.at(hessian, (second, first), -bend)
            target = hessian @ (utility - prior) + slope
            fresh = prior + kernel @ np.linalg.solve(np.eye(len(raw)) + hessian @ kernel, target)
            moved = float(np.abs(fresh - utility).max())
            utility = fresh
            if moved < 1e-7:
                break
        self._pull = np.asarray(np.linalg.solve(kernel, utility - prior), np.float64)
        self._solve = np.asarray(np.linalg.solve(np.eye(len(raw)) + hessian @ kernel, hessian), np.float64)

    def score(self, vectors: Sequence[Floats]) -> Floats:
        """The utility of each: a logarithm of speed, up to a constant."""
        raw = np.array(vectors)
        if not self.trials:
            return self._prior(raw)
        return np.asarray(self._prior(raw) + self._kernel(self._standard(raw), self._vectors) @ self._pull)

    def doubt(self, vectors: Sequence[Floats]) -> Floats:
        """The standard deviation of each utility."""
        raw = np.array(vectors)
        if not self.trials:
            return np.full(len(raw), SMOOTH)
        standard = self._standard(raw)
        cross = self._kernel(standard, self._vectors)
        own = SMOOTH**2 * (1.0 + (standard**2).mean(1))
        return np.asarray(np.sqrt(np.maximum(own - ((cross @ self._solve) * cross).sum(1), 1e-9)))

    def distance(self, some: Sequence[Floats], others: Sequence[Floats]) -> Floats:
        """How different strategies are, from 0 to 1."""
        a, b = np.array(some), np.array(others)
        if self.trials:
            a, b = self._standard(a), self._standard(b)
        gaps = ((a[:, None] - b[None]) ** 2).sum(-1)
        return np.asarray(1.0 - np.exp(-gaps / (2.0 * max(self._length, float(np.median(gaps)), 1e-9))))

    def _standard(self, raw: Floats) -> Floats:
        return np.asarray((raw - self._mean) / self._scale)

    def _prior(self, raw: Floats) -> Floats:
        middle = self._mean[0] if len(self._mean) else 0.0
        said = -ESTIMATE_SLOPE * (raw[:, 0] - middle)
        return np.asarray(said if self._hint is None else said + self._hint(raw))

    def _kernel(self, a: Floats, b: Floats) -> Floats:
        gaps = ((a[:, None] - b[None]) ** 2).sum(-1)
        return np.asarray(SMOOTH**2 * (np.exp(-gaps / (2.0 * self._length)) + a @ b.T / a.shape[1]))


def sigmoid(x: Floats) -> Floats:
    """The logistic function; it overflows nowhere."""
    return np.asarray(0.5 * (1.0 + np.tanh(0.5 * x)))


def expected_gain(ahead: Floats, doubt: Floats) -> Floats:
    """The mean of what a normal variable is above 0, from its mean and its standard deviation.

    >>> expected_gain(np.array([0.0, 1.0, -1.0]), np.array([1.0, 0.0, 0.5])).round(3).tolist()
    [0.399, 1.0, 0.004]
    """
    spread = np.maximum(doubt, 1e-12)
    at = ahead / spread
    below = 0.5 * (1.0 + np.array([math.erf(x / math.sqrt(2.0)) for x in at]))
    return np.asarray(ahead * below + spread * np.exp(-0.5 * at**2) / math.sqrt(2.0 * math.pi))


def fidelity(scores: Sequence[float], times_us: Sequence[float], *, accuracy: float = 0.8) -> float:
    """The fidelity level: the highest score below which the scores rank trials right in `accuracy` of all pairs.

    A pair belongs below a score if one of the two does. Trials whose times differ by less than the noise do not count.

    >>> fidelity([1.0, 2.0, 3.0, 4.0], [40.0, 10.0, 20.0, 30.0])
    2.0

    Args:
        scores: score of each trial, higher is faster.
        times_us: measured time of each trial.
        accuracy: required share of pairs in the right order, 0..1.

    Returns:
        The level; minus infinity if there is none.
    """
    order = np.argsort(np.array(scores), kind="stable")
    score, speed = np.array(scores)[order], -np.log(np.array(times_us)[order])
    best, right, pairs = -np.inf, 0, 0
    for at in range(len(score) - 1):
        gaps = speed[at + 1 :] - speed[at]
        clear = np.abs(gaps) > NOISE
        right += int((gaps[clear] > 0).sum())
        pairs += int(clear.sum())
        if pairs and right >= accuracy * pairs:
            best = float(score[at + 1])
    return best


def kendall_tau(scores: Sequence[float], times_us: Sequence[float]) -> float:
    """How well scores rank times: 1 for the same order, -1 for the opposite one; ties count as neither.

    >>> kendall_tau([3.0, 2.0, 1.0], [10.0, 20.0, 30.0])
    1.0
    """
    score, speed = np.array(scores), -np.array(times_us)
    first, second = np.triu_indices(len(score), 1)
    agree = np.sign(score[first] - score[second]) * np.sign(speed[first] - speed[second])
    untied = (score[first] != score[second]).sum(), (speed[first] != speed[second]).sum()
    return float(agree.sum() / np.sqrt(float(untied[0]) * float(untied[1]))) if min(untied) else 0.0


__all__ = ["Ranker", "expected_gain", "fidelity", "kendall_tau", "sigmoid"]
