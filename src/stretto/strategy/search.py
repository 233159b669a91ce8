# SPDX-License-Identifier: Apache-2.0
"""Algorithm 1 of AutoDist: sample, score, filter, select, try, learn; until the budget of trials is spent.

All-reduce in buckets, as in DDP, comes first, then the builders with the best estimates, one setting of each. Later
candidates are strategies of the guided sampler, neighbors of the best so far, and the remaining builders. In the end
the best few are compared with the references, which are kept unless they are beaten.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

import numpy as np

from ..errors import Infeasible, InvalidInput, unknown
from ..units import MB, MIB, check_seed
from .builders import build
from .cost import Floats, StrategyCostModel
from .decide import Decision, decide
from .experience import MAX_TRIALS, Experience, Hint, PastSearch, PastTrial
from .features import COMMON, Features
from .habits import habit_of
from .learned import Ranker, expected_gain, fidelity
from .model import ModelSpec
from .propose import BUILT, PARENTS, USUAL, Proposal, Proposals
from .recurrent import RecurrentRanker, SequenceFeatures
from .representation import Strategy
from .requests import Arm, Reference
from .resources import Where, resources
from .sampler import Recipe, Sampler

METHODS = ("learned", "random")
"""``random`` is the guided sampler alone, as in the paper's comparison."""
RANKERS = ("recurrent", "gaussian")
"""Models that learn from trials: a recurrent network as in the paper, which finds more, and a Gaussian process."""
CANDIDATES = 96
PER_ROUND = 4
KEPT = 32
"""The number of candidates that were not chosen and stay candidates."""
HABITS = 2
"""The number of past searches, those most alike, whose best habit is tried first."""
FIRST_SHARE = 4
"""One in so many trials, at the beginning, is the best setting of a builder by its estimate."""
FOLDS = 5
MOST_REJECTED = 0.75
"""The largest share of candidates that the fidelity level may reject, so that there is a choice left."""
CONFIRM = 12
"""The largest number of rounds of the comparison at the end."""
FINALISTS = 3
Try = Callable[[Strategy], float]
"""Runs a strategy and returns the microseconds of an iteration; raises `Infeasible` if it did not run."""


@runtime_checkable
class Bench(Protocol):
    """Measures strategies and DDP in real runs, for `search`; `Trials` and `RayTrials` are benches.

    `search` calls the methods from one thread of its own process, which is not a rank of the job. It first calls
    `run_all` with single references, then repeatedly with at most `places` strategies, and in the end `rounds` with the
    finalists. Times are microseconds of one iteration on the slowest rank. A contestant that does not run gives an
    `Infeasible` in its place of the result: a bench raises only if it cannot go on at all.
    """

    @property
    def places(self) -> int:
        """The number of contestants that can run at the same time, >= 1."""

    def run_all(self, arms: Sequence[Arm]) -> Sequence[float | Infeasible]:
        """Measure each contestant in one run of its own; return one time or error per contestant, in their order."""

    def rounds(self, arms: Sequence[Arm], rounds: int) -> Sequence[list[float] | Infeasible]:
        """Measure all contestants in turn, in `rounds` rounds; return one list of times (or an error) per contestant.

        The times of one round must be comparable: taken shortly after one another, on the same machines.
        """


class _Alone:
    """A function as a bench that runs one strategy at a time."""

    places = 1

    def __init__(self, run: Try) -> None:
        self._run = run

    def run_all(self, arms: Sequence[Arm]) -> list[float | Infeasible]:
        found: list[float | Infeasible] = []
        for arm in arms:
            assert isinstance(arm, Strategy)
            try:
                found.append(self._run(arm))
            except Infeasible as error:
                found.append(error)
        return found

    def rounds(self, arms: Sequence[Arm], rounds: int) -> list[list[float] | Infeasible]:
        turns = [self.run_all(arms) for _ in range(rounds)]
        found: list[list[float] | Infeasible] = []
        for each in zip(*turns, strict=True):
            failed = next((one for one in each if isinstance(one, Infeasible)), None)
            found.append(failed or [one for one in each if not isinstance(one, Infeasible)])
        return found


@dataclass(frozen=True, kw_only=True)
class StrategyTrial:
    """One run: the strategy, its origin, the models' predictions, and the measured time."""

    number: int
    strategy: Strategy
    recipe: Recipe
    vector: Floats = field(repr=False)
    origin: str
    estimate_us: float
    score: float
    iteration_us: float
    """The measured time; infinite if the run failed."""
    why: str = ""


@dataclass(frozen=True, kw_only=True)
class StrategyResult:
    """The result of a search: the best strategy, all trials, and the final comparison."""

    best: Strategy
    best_us: float
    usual_us: float
    """The time of all-reduce in DDP's buckets, run as a strategy."""
    trials: tuple[StrategyTrial, ...]
    levels: tuple[float, ...]
    """The share of candidates that the fidelity level rejected in each round."""
    references: tuple[tuple[Reference, float], ...] = ()
    """The references with their times at the beginning, each measured once (infinite: it did not run)."""
    finalists: tuple[tuple[str, Arm], ...] = ()
    decision: Decision | None = None
    """The comparison of the finalists."""
    lesson: PastSearch | None = None
    """What a later search can use, for `Experience.plus`; None if the usual strategy did not run."""
    kept: Reference | None = None
    """The reference that no strategy beat with confidence; `best` is then the strategy that does the same."""

    def times(self, reference: Reference) -> tuple[float, ...]:
        """The times of a reference in the rounds of the comparison."""
        at = [arm for _, arm in self.finalists].index(reference)
        return self.decision.times_us[at] if self.decision is not None else ()

    def curve(self) -> list[float]:
        """The least time found after each trial."""
        times = [trial.iteration_us for trial in self.trials]
        return [min(times[: at + 1]) for at in range(len(times))]

    def hits(self, baseline_us: float) -> float:
        """The share of all tried strategies (without the usual one) that beat a baseline."""
        times = [trial.iteration_us for trial in self.trials if trial.number > 0]
        return sum(time_us < baseline_us for time_us in times) / max(len(times), 1)


def search(
    model: ModelSpec, where: Where, run: Try | Bench, *, trials: int = 20, seed: int = 0, method: str = "learned",
    lossy: bool = False, staleness: int = 0, references: Sequence[Reference] = (), confirm: int = CONFIRM,
    with_builders: bool = True, ranker: str = RANKERS[0], experience: Experience | None = None,
    on_trial: Callable[[StrategyTrial], None] | None = None, on_start: Callable[[str], None] | None = None,
) -> StrategyResult:  # fmt: skip
    """The best strategy found in a number of trials.

    References are measured at the beginning, and with the best few strategies in the final comparison; neither counts
    as a trial. Without references the usual strategy (all-reduce in buckets) has to be beaten.

    Args:
        model: the model.
        where: a cluster, resources, names of devices, or a number of ranks.
        run: a function that runs one strategy, or a `Bench`, which can also measure references and several strategies
            at once.
        trials: number of trials, 1..100000.
        seed: seed of all random draws, >= 0.
        method: one of `METHODS`.
        lossy: whether encoders that lose information may be used.
        staleness: largest staleness of parameter servers, 0..16.
        references: configurations of plain DDP to compare with; only with a `Bench`.
        confirm: largest number of rounds of the final comparison, 0..1000.
        with_builders: whether strategies of builders are candidates.
        ranker: the model that learns from trials, one of `RANKERS`.
        experience: past searches, of this model or others, to begin with; the result's `lesson` can be added to it.
        on_trial: called after each trial.
        on_start: called before each run with a name of what is run.

    Returns:
        The best strategy and all trials.

    Raises:
        InvalidInput: an argument is unknown or out of range.
        Infeasible: no strategy ran.
    """
    check_seed(seed)
    if not 1 <= trials <= 100_000:
        raise InvalidInput(f"trials: must be 1..100000, not {trials}")
    if not 0 <= confirm <= 1000:
        raise InvalidInput(f"confirm: must be 0..1000 rounds, not {confirm}")
    if method not in METHODS:
        raise unknown("method", method, METHODS)
    if ranker not in RANKERS:
        raise unknown("ranker", ranker, RANKERS)
    if references and not isinstance(run, Bench):
        raise InvalidInput("references: a function can only run strategies; give a Bench")
    return _Search(
        model, where, run if isinstance(run, Bench) else _Alone(run), trials=trials, seed=seed, method=method,
        sampler=Sampler(model, where, lossy=lossy, staleness=staleness, seed=seed), references=references,
        on_trial=on_trial, on_start=on_start, confirm=confirm, with_builders=with_builders, ranker=ranker,
        experience=experience or Experience(),
    ).found()  # fmt: skip


class _Search:
    def __init__(
        self, model: ModelSpec, where: Where, bench: Bench, *, trials: int, seed: int, method: str, sampler: Sampler,
        references: Sequence[Reference], on_trial: Callable[[StrategyTrial], None] | None,
        on_start: Callable[[str], None] | None, confirm: int, with_builders: bool, ranker: str, experience: Experience,
    ) -> None:  # fmt: skip
        self._model = model
        self._bench = bench
        self._budget = trials
        cost = StrategyCostModel(model, where)
        self._features = SequenceFeatures(cost) if ranker == "recurrent" else Features(cost)
        self._there = resources(where)
        self._sampler = sampler
        self._seed = seed
        self._learns = method == "learned"
        self._round_size = max(bench.places, PER_ROUND)
        self._on_trial = on_trial
        self._on_start = on_start or (lambda _: None)
        self._confirm = confirm if self._learns else 0
        self._proposals = Proposals(
            sampler, self._features, rng=random.Random(seed + 1), with_builders=with_builders and self._learns
        )
        self._references = list(references)
        self._reference_us: list[float] = []
        self._usual = self._proposals.usual()
        self._past = experience.nearest(self._lesson())
        self._hint = Hint(self._past, self._lesson()) if self._past else None
        self._ranker = self._fresh_ranker()
        self._trials: list[StrategyTrial] = []
        self._levels: list[float] = []

    def found(self) -> StrategyResult:
        for reference in self._references:
            self._on_start(reference.name)
            (time_us,) = self._bench.run_all([reference])
            self._reference_us.append(math.inf if isinstance(time_us, Infeasible) else time_us)
        usual = self._usual
        self._proposals.chose([usual])
        first = self._first()
        self._proposals.chose(first)
        self._try([usual, *first][: self._budget])
        while len(self._trials) < self._budget:
            room = self._budget - len(self._trials)
            chosen = self._round(min(self._round_size, room))
            if not chosen:
                break
            self._try(chosen)
        ran = sorted((trial for trial in self._trials if not trial.why), key=lambda trial: trial.iteration_us)
        if not ran:
            raise Infeasible(f"no strategy ran: {self._trials[0].why}")
        return self._decided(ran)

    def _fresh_ranker(self) -> Ranker | RecurrentRanker:
        if isinstance(self._features, SequenceFeatures):
            return RecurrentRanker(self._features.fixed, self._hint, seed=self._seed)
        return Ranker(self._hint)

    def _lesson(self, trials: Sequence[StrategyTrial] = ()) -> PastSearch:
        """This search as a later one can use it."""
        wide, ran = len(COMMON), [trial for trial in trials if not trial.why]
        times = [math.log(trial.iteration_us / trials[0].iteration_us) for trial in ran]
        return PastSearch(
            model=self._model.name, devices=len(self._there.devices), hosts=len(self._there.by_host), names=COMMON,
            usual=tuple(self._usual.vector[:wide].tolist()),
            trials=tuple(
                PastTrial(
                    vector=tuple(trial.vector[:wide].tolist()), slower=slower,
                    habit=habit_of(trial.recipe, self._sampler),
                )
                for trial, slower in list(zip(ran, times, strict=True))[:MAX_TRIALS]
            ),
        )  # fmt: skip

    def _first(self) -> list[Proposal]:
        """What past searches suggest, and of each builder the setting with the best estimate."""
        found = self._proposals.followed(self._past)[:HABITS]
        for candidate in sorted(self._proposals.built(), key=lambda one: -self._ranker.score([one.vector])[0]):
            if all(candidate.family != other.family for other in found):
                found.append(candidate)
        return found[: max(self._budget // FIRST_SHARE - 1, 1)] if self._learns else []

    def _decided(self, ran: list[StrategyTrial]) -> StrategyResult:
        """Compare the best few strategies with the references."""
        usual = self._trials[0]
        known = [at for at, time_us in enumerate(self._reference_us) if math.isfinite(time_us)]
        # The first reference is the default of DDP; the best of the others may be better.
        chosen = known[:1] + sorted(known[1:], key=lambda at: self._reference_us[at])[:1]
        entered: list[tuple[str, Arm]] = [(self._references[at].name, self._references[at]) for at in chosen]
        best = ran[:FINALISTS]
        if not entered and not usual.why:
            best = [usual, *(trial for trial in best if trial is not usual)]
        references = list(range(len(entered))) or ([0] if best[0] is usual else [])
        entered += [(trial.origin, trial.strategy) for trial in best]
        base = StrategyResult(
            best=self._named(ran[0].strategy), best_us=ran[0].iteration_us, usual_us=usual.iteration_us,
            trials=tuple(self._trials), levels=tuple(self._levels), finalists=tuple(entered),
            lesson=None if usual.why else self._lesson(self._trials),
            references=tuple(zip(self._references, self._reference_us, strict=True)),
        )  # fmt: skip
        if not self._confirm or len(entered) < 2:
            return base

        def rounds(who: Sequence[int], count: int) -> list[list[float]]:
            self._on_start(f"{count} rounds of {', '.join(entered[at][0] for at in who)}")
            found = self._bench.rounds([entered[at][1] for at in who], count)
            return [[] if isinstance(one, Infeasible) else list(one) for one in found]

        decision = decide(len(entered), references, rounds, most=self._confirm)
        winner = entered[decision.chosen][1]
        base = replace(base, best_us=decision.median_us(decision.chosen), decision=decision)
        for at, (_, arm) in enumerate(entered):
            if arm is usual.strategy and decision.times_us[at]:
                base = replace(base, usual_us=decision.median_us(at))
        if isinstance(winner, Reference):
            return replace(base, best=self._named(self._same_as(winner)), kept=winner)
        return replace(base, best=self._named(winner))

    def _same_as(self, reference: Reference) -> Strategy:
        """The strategy with a reference's buckets; a size that is given (in MiB) is also that of the first bucket."""
        sizes: dict[str, Any] = {}
        if reference != Reference():
            sizes = dict.fromkeys(("bucket_mb", "first_mb"), reference.bucket_mb * MIB / MB)
        return build(USUAL, self._model, self._there, **sizes)

    def _named(self, strategy: Strategy) -> Strategy:
        return replace(strategy, name=f"tuned-{self._model.name}")

    def _round(self, count: int) -> list[Proposal]:
        """Lines 2 to 5: candidates above the fidelity level, by what they promise."""
        ran = sorted((t for t in self._trials if not t.why), key=lambda t: t.iteration_us)
        if not self._learns:
            return self._proposals.drawn(count, ())
        candidates = self._proposals.round(CANDIDATES, [t.recipe for t in ran[:PARENTS]])
        if not candidates:
            return []
        vectors = [candidate.vector for candidate in candidates]
        scores = self._ranker.score(vectors)
        keep = scores >= min(self._level(), float(np.quantile(scores, MOST_REJECTED)))
        self._levels.append(1.0 - float(keep.mean()))
        if keep.sum() < count:
            keep[np.argsort(-scores, kind="stable")[:count]] = True
        kept = np.flatnonzero(keep)
        chosen = [int(kept[at]) for at in self._chosen([vectors[at] for at in kept], count)]
        rest = [int(at) for at in np.argsort(-scores, kind="stable") if at not in chosen][:KEPT]
        self._proposals.chose([candidates[at] for at in chosen], [candidates[at] for at in rest])
        return [candidates[at] for at in chosen]

    def _chosen(self, vectors: list[Floats], count: int) -> list[int]:
        """The places of those that are tried: the best score, then those with the most to gain, apart from each other.

        What one has to gain is the expected improvement over the best trial: a good score, or a doubtful one.
        """
        scores, doubt = self._ranker.score(vectors), self._ranker.doubt(vectors)
        best = float(self._ranker.score([t.vector for t in self._trials if not t.why] or vectors).max())
        gain = expected_gain(scores - best, doubt)
        chosen = [int(np.argmax(scores))]
        while len(chosen) < min(count, len(vectors)):
            gain *= self._ranker.distance(vectors, [vectors[chosen[-1]]])[:, 0]
            gain[chosen] = -1.0
            chosen.append(int(np.argmax(gain)))
        return chosen

    def _level(self) -> float:
        """Line 2: the fidelity level.

        The paper tests on the most recent trials; there are so few that all are tested, each by a model that has not
        seen it.
        """
        known = [trial for trial in self._trials if not trial.why]
        if len(known) < 2 * FOLDS:
            return -math.inf
        scores = np.zeros(len(known))
        for fold in range(FOLDS):
            ranker = self._fresh_ranker()
            learned = [trial for at, trial in enumerate(known) if at % FOLDS != fold]
            ranker.fit([t.vector for t in learned], [t.iteration_us for t in learned])
            scores[fold::FOLDS] = ranker.score([t.vector for t in known[fold::FOLDS]])
        return fidelity(scores.tolist(), [t.iteration_us for t in known])

    def _try(self, chosen: list[Proposal]) -> None:
        """Lines 6 to 9: run the chosen candidates and learn from their times."""
        scores = self._ranker.score([candidate.vector for candidate in chosen])
        results: list[float | Infeasible] = []
        for at in range(0, len(chosen), self._bench.places):
            now = chosen[at : at + self._bench.places]
            for candidate in now:
                self._on_start(candidate.origin)
            results += self._bench.run_all([candidate.strategy for candidate in now])
        for candidate, score, result in zip(chosen, scores, results, strict=True):
            trial = StrategyTrial(
                number=len(self._trials), strategy=candidate.strategy, recipe=candidate.recipe,
                vector=candidate.vector, origin=candidate.origin,
                estimate_us=self._features.cost.estimate_us(candidate.strategy), score=float(score),
                iteration_us=math.inf if isinstance(result, Infeasible) else result,
                why=str(result) if isinstance(result, Infeasible) else "",
            )  # fmt: skip
            self._trials.append(trial)
            if self._on_trial is not None:
                self._on_trial(trial)
        known = [trial for trial in self._trials if not trial.why]
        if self._learns:
            self._ranker.fit([t.vector for t in known], [t.iteration_us for t in known])


__all__ = ["BUILT", "METHODS", "RANKERS", "Bench", "StrategyResult", "StrategyTrial", "search"]
