# SPDX-License-Identifier: Apache-2.0
"""How well the cost model ranks strategies, and what the search makes of it, in simulation (AutoDist's Figs. 4 and 9).

Every iteration is simulated link by link. `KNOWN` are the pairs of model and cluster that were looked at while the cost
model and the sampler were made, `UNSEEN` were chosen before anybody had looked at them.

`tau`: Kendall's tau on 40 held-out strategies of the guided sampler, from the estimate alone and after learning from 20
others; means over seeds, with their range. Then the search: `random` is the guided sampler alone, `learned` Algorithm 1
without builders (as in the paper, where the baseline is made by hand), `tune` what `stretto tune` does, with builders
among its candidates. `best_after_N` is the best builder's time over the best found in N trials, the mean over seeds;
`least` and `most` are the range of the last; `hit_rate` is the share of trials that beat the best builder. `--html`
plots the curves to a file.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from statistics import mean

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from common import Row, finish, save
from strategy_systems import TIMES, built_us, model_on, place, strategy_us, tried_us

from stretto.errors import Infeasible
from stretto.report.html import Section, figure_html, look, write_html
from stretto.strategy import Strategy
from stretto.strategy.cost import Floats, StrategyCostModel
from stretto.strategy.features import Features
from stretto.strategy.learned import Ranker, kendall_tau
from stretto.strategy.sampler import Sampler
from stretto.strategy.search import BUILT, search

KNOWN = (("vgg16", "b7"), ("ncf_dense", "b7"), ("bert_6l", "b7"))
UNSEEN = (("transformer", "b2"), ("resnet101", "a2"), ("lm1b", "b12"), ("densenet121", "b4"))
HELD_OUT, LEARNED, SEEDS, SPLITS = 40, 20, 3, 3
TRIALS = 40
METHODS = {"learned": ("learned", False), "random": ("random", False), "tune": ("learned", True)}
"""How `search` is called: its method, and whether builders are candidates."""
AFTER = (1, 5, 10, 20, 40)


def drawn(model: str, cluster: str, seed: int) -> tuple[list[Floats], list[float]]:
    """Strategies of the guided sampler: what the learned model sees of each, and how long it takes."""
    sampler = Sampler(model_on(model, cluster), place(cluster).cluster, seed=100 + seed)
    features = Features(StrategyCostModel(model_on(model, cluster), place(cluster).cluster))
    vectors, times = [], []
    for number in range(HELD_OUT + LEARNED):
        strategy = sampler.sample()[1]
        key = f"{model} {cluster} drawn {seed} {number}"
        us = TIMES.get(key)
        if us is None:
            us = _run(strategy, model, cluster)
            TIMES.put(key, us)
        if us < float("inf"):
            vectors.append(features.vector(strategy))
            times.append(us)
    return vectors, times


def _run(strategy: Strategy, model: str, cluster: str) -> float:
    try:
        return strategy_us(strategy, model, cluster)
    except Infeasible:  # too many transfers
        return float("inf")


def taus(vectors: list[Floats], times: list[float]) -> tuple[float, float]:
    """Kendall's tau on held-out strategies without any trial and after 20, over several splits."""
    before: list[float] = []
    after: list[float] = []
    for seed in range(SPLITS):
        order = np.random.default_rng(seed).permutation(len(vectors))
        held, known = order[LEARNED:], order[:LEARNED]
        ranker = Ranker()
        for into in (before, after):
            scores = ranker.score([vectors[at] for at in held]).tolist()
            into.append(kendall_tau(scores, [times[at] for at in held]))
            ranker.fit([vectors[at] for at in known], [times[at] for at in known])
    return mean(before), mean(after)


def curves(model: str, cluster: str, how: str, seed: int) -> list[float]:
    """The time of each trial of one search."""
    keys = [f"{model} {cluster} {how} {seed} {at}" for at in range(TRIALS)]
    known = [us for us in map(TIMES.get, keys) if us is not None]
    if len(known) < TRIALS:
        method, builders = METHODS[how]
        found = search(
            model_on(model, cluster), place(cluster).cluster, lambda each: tried_us(each, model, cluster),
            trials=TRIALS, seed=seed, method=method, with_builders=builders, confirm=0,
        )  # fmt: skip
        known = [trial.iteration_us for trial in found.trials]
        for key, us in zip(keys, known, strict=True):
            TIMES.put(key, us)
    return known


def pair(model: str, cluster: str, seeds: int) -> tuple[list[Row], dict[str, Floats]]:
    """One pair of model and cluster: its rows, and the mean curves."""
    case = f"{model} {cluster.upper()}" + ("" if (model, cluster) in KNOWN else " (unseen)")
    both = [taus(*drawn(model, cluster, seed)) for seed in range(seeds)]
    rows: list[Row] = [{
        "case": case, "system": "tau", "before": mean(b for b, _ in both), "after_20": mean(a for _, a in both),
        "least": min(a for _, a in both), "most": max(a for _, a in both),
    }]  # fmt: skip
    base_us = min(built_us(model, cluster, (name, tuple(options.items()))) for name, options in BUILT)
    shown = {}
    for how in METHODS:
        runs = np.array([curves(model, cluster, how, seed) for seed in range(seeds)])
        ratio = base_us / np.minimum.accumulate(runs, axis=1)
        # The first trial is always all-reduce in buckets; a builder again is no hit.
        hits = (runs[:, 1:] < base_us * (1 - 1e-9)).mean()
        shown[how] = ratio.mean(axis=0)
        rows.append(
            {"case": case, "system": how, "hit_rate": float(hits)}
            | {f"best_after_{at}": float(shown[how][at - 1]) for at in AFTER}
            | {"least": float(ratio[:, -1].min()), "most": float(ratio[:, -1].max())}
        )
    return rows, shown


def plot(path: Path, found: dict[str, dict[str, Floats]]) -> None:
    """The search curves as a page."""
    from plotly.graph_objects import Figure

    sections = []
    for case, each in found.items():
        figure = Figure()
        for how, curve in each.items():
            figure.add_scatter(x=list(range(1, len(curve) + 1)), y=curve.tolist(), name=how, mode="lines")
        figure.add_hline(y=1.0, line_dash="dot")
        figure.update_xaxes(title_text="trials", gridcolor="#eee")
        figure.update_yaxes(title_text="best builder / best found", gridcolor="#eee")
        figure.update_layout(height=360, **look())
        sections.append(Section(heading=case, note="Higher is better; mean over seeds.", body=figure_html(figure)))
    write_html(path, title="What a search finds, in simulation", sections=sections)


def main() -> None:
    """The command."""
    names = [f"{model} {cluster}" for model, cluster in (*KNOWN, *UNSEEN)]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="end within a minute on two cores")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    parser.add_argument("--markdown", action="store_true", help="print the table as docs/results.md has it")
    parser.add_argument("--only", action="append", choices=names, help="one pair; repeatable")
    parser.add_argument("--keep", type=Path, metavar="FILE", help="times of an earlier run, and all new ones")
    parser.add_argument("--html", type=Path, metavar="FILE", help="plot the search curves")
    args = parser.parse_args()
    if args.keep:
        TIMES.keep_in(args.keep)
    rows: list[Row] = []
    found = {}
    for name in args.only or (names[1:2] if args.quick else names):
        model, cluster = name.split()
        more, found[name] = pair(model, cluster, 1 if args.quick else SEEDS)
        rows += more
    finish(rows, argparse.Namespace(**{**vars(args), "json": None}), title="ranking and search (simulated)")
    if args.json:
        save(rows, args.json)
    if args.html:
        plot(args.html, found)


if __name__ == "__main__":
    main()
