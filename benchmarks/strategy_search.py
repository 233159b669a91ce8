# SPDX-License-Identifier: Apache-2.0
"""The search for a strategy against random draws at equal trials, on models and clusters that a seed draws.

A model has 6 to 16 variables from 1 k to 16 M elements (a third of the models with a sparse table, half with linear
layers whose factors are known), a cluster 2 to 4 hosts with 1, 2 or 4 GPUs, uplinks of 1 to 50 Gb/s, alike or not, and
for half of them a limit of 10 Gb/s for one connection. The compute is 0.2 to 2 times what the bytes take on the slowest
uplink. Iterations are simulated link by link. `random` is the guided sampler alone; `recurrent` is what `stretto tune`
does the first time; `gaussian` is the same with the Gaussian process; `no builders` Algorithm 1 with the sampler alone,
as in the paper; `experienced` with what twelve other searches, on other models and clusters, have left. All begin with
all-reduce in DDP's buckets.

`best_after_N` is DDP's time over the best after N trials, the geometric mean over problems and seeds; `over_random` the
same over what random draws found with the same problem and seed after all trials, with the standard deviation and the
share of searches that are better, and worse, by more than 0.1 %. The search was made with the seeds below 20; nothing
was changed after a look at others.

`--phases` is AutoDist's Figure 4: the trials of a search in five phases; after each, both ranking models learn from all
trials so far and rank strategies that no search has seen (60 of the sampler), in four buckets of times, slowest first.
`bucket_N` is the share of pairs within a bucket that are in the right order, `all` that of all pairs; pairs within
0.1 % do not count, and phase 0 is the estimate alone.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from common import Row, finish
from judges.link_level import link_level_us

from stretto.cluster import Cluster
from stretto.cluster.model import NO_CAP
from stretto.cluster.wiring import Wiring
from stretto.strategy import ModelSpec, Strategy, Variable
from stretto.strategy.cost import Floats, StrategyCostModel
from stretto.strategy.experience import Experience
from stretto.strategy.features import Features
from stretto.strategy.learned import Ranker
from stretto.strategy.recurrent import RecurrentRanker, SequenceFeatures
from stretto.strategy.sampler import Sampler
from stretto.strategy.search import RANKERS, StrategyResult, search

METHODS: dict[str, dict[str, Any]] = {
    "random": {"method": "random"},
    "gaussian, no builders": {"ranker": "gaussian", "with_builders": False},
    "gaussian": {"ranker": "gaussian"},
    "recurrent": {"ranker": "recurrent"},
    "gaussian, experienced": {"ranker": "gaussian"},
}
TAUGHT = tuple(range(800, 812))
"""The problems whose searches are the experience of `experienced`."""
TRIALS, PHASES, BUCKETS, HELD_OUT = 40, 5, 4, 60
AFTER = (5, 10, 20, 40)
CLEAR = 1e-3


def drawn_cluster(rng: random.Random) -> Cluster:
    """Hosts of GPUs on one switch, each with an uplink of its own."""
    hosts, gpus = rng.randint(2, 4), rng.choice((1, 2, 4))
    rates = [float(rng.choice((1, 5, 10, 25, 50)))] * hosts
    if rng.random() < 0.5:
        rates = [rng.choice((rates[0], rates[0] / 2.5)) for _ in range(hosts)]
    host_of = np.repeat(np.arange(hosts), gpus)
    wiring = Wiring([f"h{h}.gpu{g}" for h in range(hosts) for g in range(gpus)], hosts=host_of)
    nics = wiring.add([f"h{h}.nic" for h in range(hosts)], kind="nic", hosts=np.arange(hosts))
    fabric = wiring.add(["fabric"], kind="switch")
    wiring.duplex(wiring.devices, nics[host_of], gb_per_s=12.0, alpha_us=1.0, channel="pcie")
    cap = 10 / 8 if rng.random() < 0.5 else NO_CAP
    wiring.duplex(
        nics, fabric, gb_per_s=[rate / 8 for rate in rates], alpha_us=rng.choice((2.0, 10.0)), channel="ethernet",
        flow_gb_per_s=cap,
    )  # fmt: skip
    return wiring.cluster("drawn")


def drawn_model(rng: random.Random, cluster: Cluster) -> ModelSpec:
    """Variables in the order of use, with compute in proportion to what their bytes take on the slowest uplink."""
    has_factors, tables = rng.random() < 0.5, 1 if rng.random() < 1 / 3 else 0
    count = rng.randint(6, 16)
    shapes: list[tuple[int, ...]] = []
    for _ in range(count):
        width = 2 ** rng.randint(5, 12)
        shapes.append(rng.choice(((width,), (width, 2 ** rng.randint(5, 12)), (3, 3, width // 8, width // 4))))
    elements = [int(np.prod(shape)) for shape in shapes]
    slowest = float(cluster.link_gb_per_s.min())
    total_us = rng.choice((0.2, 0.5, 1.0, 2.0)) * sum(elements) * 4 / (slowest * 1e3)
    weights = [rng.random() for _ in shapes]
    variables = []
    for at, shape in enumerate(shapes):
        share_us = total_us * weights[at] / sum(weights)
        sparse = at < tables and len(shape) == 2
        factors = rng.choice((16, 256)) if has_factors and len(shape) == 2 and not sparse else 0
        variables.append(Variable(
            name=f"v{at}", shape=(shape[0] * 16, shape[1]) if sparse else shape, sparse=sparse,
            rows=shape[0] // 4 if sparse else 0, forward_us=share_us / 3, backward_us=share_us * 2 / 3, factors=factors,
        ))  # fmt: skip
    return ModelSpec(name="drawn", variables=tuple(variables))


def problem(seed: int) -> tuple[ModelSpec, Cluster]:
    """The model and the cluster of a seed."""
    rng = random.Random(seed)
    cluster = drawn_cluster(rng)
    return drawn_model(rng, cluster), cluster


def searched(seed: int, how: str, trials: int, experience: Experience | None = None) -> StrategyResult:
    """One search."""
    model, cluster = problem(seed)
    known: dict[tuple[object, ...], float] = {}

    def run(strategy: Strategy) -> float:
        key = tuple(strategy.nodes)
        if key not in known:
            known[key] = link_level_us(strategy, model, cluster)
        return known[key]

    return search(model, cluster, run, trials=trials, seed=seed, confirm=0, experience=experience, **METHODS[how])


@cache
def taught(trials: int) -> Experience:
    """The experience of searches on other models and clusters."""
    known = Experience()
    for seed in TAUGHT:
        lesson = searched(seed, "gaussian", trials).lesson
        assert lesson is not None
        known = known.plus(lesson)
    return known


def curve(seed: int, how: str, trials: int) -> Floats:
    """The gain over all-reduce in buckets after each trial of one search."""
    found = searched(seed, how, trials, taught(trials) if how == "gaussian, experienced" else None)
    return np.array(found.usual_us / np.minimum.accumulate([trial.iteration_us for trial in found.trials]))


def accuracy(scores: Floats, times: Floats) -> float:
    """The share of pairs whose order the scores have right; NaN where no pair counts."""
    first, second = np.triu_indices(len(times), 1)
    gap = np.log(times[second] / times[first])
    clear = np.abs(gap) > CLEAR
    right = (scores[first] - scores[second]) * gap > 0
    return float(right[clear].mean()) if clear.any() else float("nan")


def phase_accuracies(seed: int, ranker: str) -> Floats:
    """Phases by buckets of one search; the last column has all pairs."""
    model, cluster = problem(seed)
    trials = searched(seed, "gaussian", TRIALS).trials
    cost = StrategyCostModel(model, cluster)
    features = SequenceFeatures(cost) if ranker == "recurrent" else Features(cost)
    sampler = Sampler(model, cluster, seed=seed + 10_000)
    drawn = {tuple(one.nodes): one for one in (sampler.sample()[1] for _ in range(HELD_OUT))}
    held = sorted(((link_level_us(one, model, cluster), one) for one in drawn.values()), key=lambda pair: -pair[0])
    times, vectors = np.array([us for us, _ in held]), [features.vector(one) for _, one in held]
    buckets = np.array_split(np.arange(len(held)), BUCKETS)
    made: Ranker | RecurrentRanker = Ranker()
    if isinstance(features, SequenceFeatures):
        made = RecurrentRanker(features.fixed, seed=seed)
    found = []
    for phase in range(PHASES + 1):
        known = trials[: phase * TRIALS // PHASES]
        made.fit([features.vector(trial.strategy) for trial in known], [trial.iteration_us for trial in known])
        scores = made.score(vectors)
        found.append([accuracy(scores[some], times[some]) for some in (*buckets, np.arange(len(held)))])
    return np.array(found)


def phases(seeds: Sequence[int]) -> list[Row]:
    """A row for each model and phase, means over problems."""
    rows: list[Row] = []
    names = [*(f"bucket_{at + 1}" for at in range(BUCKETS)), "all"]
    for ranker in RANKERS:
        each = np.nanmean([phase_accuracies(seed, ranker) for seed in seeds], axis=0)
        rows += [
            {"system": ranker, "phase": at, "trials": at * TRIALS // PHASES}
            | dict(zip(names, map(float, each[at]), strict=True))
            for at in range(PHASES + 1)
        ]
    return rows


def rows_of(curves: dict[str, Floats]) -> list[Row]:
    """A row per method from the curves of all seeds."""
    rows: list[Row] = []
    for how, each in curves.items():
        over = each[:, -1] / curves["random"][:, -1]
        after = [at for at in AFTER if at <= each.shape[1]]
        rows.append(
            {"system": how}
            | {f"best_after_{at}": float(np.exp(np.log(each[:, at - 1]).mean())) for at in after}
            | {"over_random": float(np.exp(np.log(over).mean())), "deviation": float(np.log(over).std())}
            | {"better": float((over > 1 + CLEAR).mean()), "worse": float((over < 1 - CLEAR).mean())}
            | {f"over_random_at_{at}": float(np.exp(np.log(each[:, at - 1] / curves["random"][:, at - 1]).mean()))
               for at in after[:-1]}
        )  # fmt: skip
    return rows


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="end within a minute on two cores")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    parser.add_argument("--markdown", action="store_true", help="print the table as docs/results.md has it")
    parser.add_argument("--seed", type=int, default=1000, help="the first seed")
    parser.add_argument("--count", type=int, default=40, help="the number of seeds, each a problem of its own")
    parser.add_argument("--trials", type=int, default=TRIALS, help="trials of each search")
    parser.add_argument("--only", action="append", choices=list(METHODS), help="one method beside random; repeatable")
    parser.add_argument("--phases", action="store_true", help="ranking accuracy by phase instead")
    args = parser.parse_args()
    seeds = range(args.seed, args.seed + (4 if args.quick else args.count))
    trials = 10 if args.quick else args.trials
    if args.phases:
        finish(phases(seeds), args, title=f"ranking accuracy by phase (simulated), {len(seeds)} problems")
        return
    names = ["random", *(how for how in METHODS if how != "random" and (not args.only or how in args.only))]
    curves = {how: np.array([curve(seed, how, trials) for seed in seeds]) for how in names}
    finish(rows_of(curves), args, title=f"search against random draws (simulated), {len(seeds)} problems")


if __name__ == "__main__":
    main()
