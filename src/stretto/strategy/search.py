"""Algorithm 1: sample, score, filter, select, try, learn; until the budget of trials is spent.

Beside the guided sampler's strategies, every builder's is a candidate, the user's usual one (all-reduce in buckets) is
always tried, and the neighbours of the best so far are candidates too. The last trials repeat the best few and the
usual one: of twenty noisy times the least is mostly luck.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

import numpy as np

from ..errors import Infeasible, InvalidInput, unknown
from .builders import build
from .cost import CostModel, Floats
from .features import Features
from .learned import NOISE, Ranker, fidelity
from .model import ModelSpec
from .representation import Strategy
from .resources import Where, resources
from .sampler import Recipe, Sampler

METHODS = ("learned", "random")
"""``random`` is the guided sampler alone, as in the paper's comparison."""
CANDIDATES = 96
PER_ROUND = 4
NEIGHBOURS = 0.5
"""The share of candidates that are neighbours of what was good, once there are trials."""
FOLDS = 5
MOST_REJECTED = 0.75
"""However high the fidelity level is, so many are left to choose from that they can differ."""
DIVERSITY = 1.0
"""What being wholly different from everything tried is worth, in standard deviations of the scores."""
CONFIRM = 6
"""How many trials repeat the best two and the usual strategy, in turn, in the end."""
FINALISTS = 2
USUAL = "all_reduce"

BUILT: tuple[tuple[str, dict[str, Any]], ...] = (
    (USUAL, {}),
    (USUAL, {"bucket_mb": 1.0}), (USUAL, {"bucket_mb": 4.0}), (USUAL, {"bucket_mb": 100.0}),
    ("partitioned_all_reduce", {}), ("ps", {}), ("ps_balanced", {}), ("ps_balanced", {"servers": "devices"}),
    ("partitioned_ps", {}), ("partitioned_ps", {"two_level": False}), ("uneven_partitioned_ps", {}), ("parallax", {}),
    ("random_axis", {}), ("zero1", {}), ("zero2", {}), ("zero2", {"bucket_mb": 4.0}),
)  # fmt: skip

Try = Callable[[Strategy], float]
"""Runs a strategy and says how many microseconds an iteration took; raises `Infeasible` where it did not run."""
TryAll = Callable[[Sequence[Strategy]], Sequence["float | Infeasible"]]
"""The same for several at once."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One run: what was tried, in which round, what the models expected, how long an iteration took."""

    number: int
    strategy: Strategy
    recipe: Recipe | None
    vector: Floats = field(repr=False)
    origin: str
    estimate_us: float
    score: float
    iteration_us: float
    """Infinite where it failed."""
    why: str = ""
    again: int = -1
    """The number of the trial that this one repeats."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a search found; `best` has the least median time in the repeats at the end (or, without any, at all)."""

    best: Strategy
    best_us: float
    usual_us: float
    trials: tuple[Trial, ...]
    levels: tuple[float, ...]
    """The share of candidates that the fidelity level rejected in each round."""

    def curve(self) -> list[float]:
        """The least time found after each trial."""
        times = [trial.iteration_us for trial in self.trials]
        return [min(times[: at + 1]) for at in range(len(times))]

    def hits(self, baseline_us: float) -> float:
        """The share of all strategies tried (the usual one apart) that beat a baseline."""
        times = [trial.iteration_us for trial in self.trials if trial.again < 0 and trial.number > 0]
        return sum(time_us < baseline_us for time_us in times) / max(len(times), 1)


def search(
    model: ModelSpec, where: Where, run: Try, *, trials: int = 20, seed: int = 0, method: str = "learned",
    lossy: bool = False, staleness: int = 0, run_all: TryAll | None = None, at_once: int = 1,
    on_trial: Callable[[Trial], None] | None = None, on_start: Callable[[int, str], None] | None = None,
    confirm: int = CONFIRM, with_builders: bool = True,
) -> Found:  # fmt: skip
    """The best strategy found in so many trials.

    `run` tries one strategy; `run_all` several, `at_once` at a time. The search is lossless and synchronous unless
    `lossy` or `staleness` say otherwise.
    """
    if not 1 <= trials <= 100_000:
        raise InvalidInput(f"trials: must be 1..100000, not {trials}")
    if method not in METHODS:
        raise unknown("method", method, METHODS)
    return _Search(
        model, where, run_all or (lambda strategies: [_tried(run, each) for each in strategies]), trials=trials,
        seed=seed, method=method, sampler=Sampler(model, where, lossy=lossy, staleness=staleness, seed=seed),
        round_size=max(at_once, PER_ROUND), on_trial=on_trial, on_start=on_start, confirm=confirm,
        with_builders=with_builders,
    ).found()  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class _Candidate:
    strategy: Strategy
    recipe: Recipe | None
    origin: str
    vector: Floats


class _Search:
    def __init__(
        self, model: ModelSpec, where: Where, run_all: TryAll, *, trials: int, seed: int, method: str,
        sampler: Sampler, round_size: int, on_trial: Callable[[Trial], None] | None,
        on_start: Callable[[int, str], None] | None, confirm: int, with_builders: bool,
    ) -> None:  # fmt: skip
        self._model = model
        self._run_all = run_all
        self._budget = trials
        self._sampler = sampler
        self._features = Features(CostModel(model, where))
        self._there = resources(where)
        self._ranker = Ranker()
        self._rng = random.Random(seed + 1)
        self._learns = method == "learned"
        self._round_size = round_size
        self._on_trial = on_trial
        self._on_start = on_start
        # Repeats cost trials: with few there is no room for them.
        self._confirm = min(confirm, (trials - 1) // 3) // (FINALISTS + 1) * (FINALISTS + 1) if self._learns else 0
        self._builders = with_builders and self._learns
        self._trials: list[Trial] = []
        self._levels: list[float] = []
        self._seen: set[tuple[object, ...]] = set()

    def found(self) -> Found:
        usual = self._candidate(build(USUAL, self._model, self._there), None, USUAL)
        assert usual is not None
        self._try([usual])
        while len(self._trials) < self._budget - self._confirm:
            room = self._budget - self._confirm - len(self._trials)
            chosen = self._select(self._candidates(), min(self._round_size, room))
            if not chosen:
                break
            self._try(chosen)
        self._repeat()
        times = self._times()
        if not times:
            raise Infeasible(f"no strategy ran: {self._trials[0].why}")
        best = min(times, key=lambda number: times[number])
        return Found(
            best=replace(self._trials[best].strategy, name=f"tuned-{self._model.name}"), best_us=times[best],
            usual_us=times.get(0, math.inf), trials=tuple(self._trials), levels=tuple(self._levels),
        )  # fmt: skip

    def _times(self) -> dict[int, float]:
        """The median time of each strategy, by the number of its first run. Where some were repeated, only those count,
        and of them only the repeats: the first run is why they were chosen, so it was likely a lucky one."""
        repeated = [trial for trial in self._trials if trial.again >= 0]
        runs: dict[int, list[float]] = {}
        for trial in repeated or self._trials:
            runs.setdefault(trial.again if repeated else trial.number, []).append(trial.iteration_us)
        return {at: median(times) for at, times in runs.items() if math.isfinite(median(times))}

    def _candidates(self) -> list[_Candidate]:
        """Line 3: sampled strategies, neighbours of good ones, and what the builders make."""
        found = list(self._built()) if self._builders else []
        good = [t for t in sorted(self._trials, key=lambda t: t.iteration_us) if t.recipe and not t.why][:4]
        wanted = CANDIDATES if self._learns else self._round_size
        for _ in range(4 * wanted):
            if len(found) >= wanted:
                break
            if self._learns and good and self._rng.random() < NEIGHBOURS:
                recipe = self._rng.choice(good).recipe
                assert recipe is not None
                recipe, strategy = self._sampler.change(recipe)
            else:
                recipe, strategy = self._sampler.sample()
            candidate = self._candidate(strategy, recipe, "sampled")
            if candidate is not None:
                found.append(candidate)
        return found

    def _built(self) -> Iterable[_Candidate]:
        for name, options in BUILT:
            label = ", ".join([name, *(f"{key}={value}" for key, value in options.items())])
            candidate = self._candidate(build(name, self._model, self._there, **options), None, label, note=False)
            if candidate is not None:
                yield candidate

    def _candidate(
        self, strategy: Strategy, recipe: Recipe | None, origin: str, *, note: bool = True
    ) -> _Candidate | None:
        """None for what was there already."""
        key = tuple(strategy.nodes)
        if key in self._seen:
            return None
        if note:
            self._seen.add(key)
        vector = self._features.vector(strategy)
        return _Candidate(strategy=strategy, recipe=recipe, origin=origin, vector=vector)

    def _select(self, candidates: list[_Candidate], count: int) -> list[_Candidate]:
        """Lines 2, 4 and 5: those above the fidelity level, by score and by how they differ from all others tried."""
        if not self._learns or not candidates:
            return candidates[:count]
        vectors = [candidate.vector for candidate in candidates]
        scores, doubt = self._ranker.score(vectors), self._ranker.doubt(vectors)
        keep = scores >= min(self._level(), float(np.quantile(scores, MOST_REJECTED)))
        self._levels.append(1.0 - float(keep.mean()))
        if keep.sum() < count:
            keep[np.argsort(-scores, kind="stable")[:count]] = True
        kept = np.flatnonzero(keep)
        # A round's first is the best there is; others may also be worth it for what they would teach.
        merit = scores[kept] / max(float(scores[kept].std()), NOISE)
        apart = self._ranker.distance([vectors[at] for at in kept], [t.vector for t in self._trials]).min(1)
        chosen: list[int] = []
        for turn in range(min(count, len(kept))):
            bonus = DIVERSITY * apart + doubt[kept] / max(float(doubt.max()), 1e-9) if turn else 0.0
            value = np.asarray(merit + bonus)
            value[chosen] = -np.inf
            at = int(np.argmax(value))
            chosen.append(at)
            near = self._ranker.distance([vectors[k] for k in kept], [vectors[kept[at]]])[:, 0]
            apart = np.minimum(apart, near)
        picked = [candidates[kept[at]] for at in chosen]
        self._seen.update(tuple(candidate.strategy.nodes) for candidate in picked)
        return picked

    def _level(self) -> float:
        """Line 2. The paper tests on the most recent trials; with so few all are tested, each by a model that has not
        seen it."""
        known = [trial for trial in self._trials if not trial.why and trial.again < 0]
        if len(known) < 2 * FOLDS:
            return -math.inf
        scores = np.zeros(len(known))
        for fold in range(FOLDS):
            ranker = Ranker()
            learned = [trial for at, trial in enumerate(known) if at % FOLDS != fold]
            ranker.fit([t.vector for t in learned], [t.iteration_us for t in learned])
            scores[fold::FOLDS] = ranker.score([t.vector for t in known[fold::FOLDS]])
        return fidelity(scores.tolist(), [t.iteration_us for t in known])

    def _try(self, chosen: list[_Candidate]) -> None:
        """Lines 6 to 9."""
        for at, candidate in enumerate(chosen):
            if self._on_start is not None:
                self._on_start(len(self._trials) + at, candidate.origin)
        scores = self._ranker.score([candidate.vector for candidate in chosen])
        results = self._run_all([candidate.strategy for candidate in chosen])
        for candidate, score, result in zip(chosen, scores, results, strict=True):
            self._note(Trial(
                number=len(self._trials), strategy=candidate.strategy, recipe=candidate.recipe,
                vector=candidate.vector, origin=candidate.origin,
                estimate_us=self._features.cost.estimate_us(candidate.strategy), score=float(score),
                iteration_us=math.inf if isinstance(result, Infeasible) else result,
                why=str(result) if isinstance(result, Infeasible) else "",
            ))  # fmt: skip
        known = [trial for trial in self._trials if not trial.why]
        if self._learns:
            self._ranker.fit([t.vector for t in known], [t.iteration_us for t in known])

    def _repeat(self) -> None:
        """The best two and the usual one again, in turn, so that a machine that slows down is unfair to none."""
        ran = [trial for trial in self._trials if not trial.why]
        best = sorted(ran, key=lambda trial: trial.iteration_us)[:FINALISTS]
        first = self._trials[0]
        again = best if first in best or first.why else [*best, first]
        rounds = self._confirm // len(again) if again else 0
        for trial in again * rounds:
            if self._on_start is not None:
                self._on_start(len(self._trials), f"{trial.origin} again")
            (result,) = self._run_all([trial.strategy])
            self._note(replace(
                trial, number=len(self._trials), again=trial.number,
                iteration_us=math.inf if isinstance(result, Infeasible) else result,
                why=str(result) if isinstance(result, Infeasible) else "",
            ))  # fmt: skip

    def _note(self, trial: Trial) -> None:
        self._trials.append(trial)
        if self._on_trial is not None:
            self._on_trial(trial)


def _tried(run: Try, strategy: Strategy) -> float | Infeasible:
    try:
        return run(strategy)
    except Infeasible as error:
        return error


__all__ = ["BUILT", "METHODS", "Found", "Trial", "search"]
