"""Strategies found by the search against PyTorch DDP and every builder: real training steps in the lab.

Models of known shapes, scaled down, on hosts with shaped uplinks, all on gloo: DDP with its default bucket size and
with its best of several, each builder, and what `stretto.strategy.search` finds within its trials (in which it tries
builders too). A model stays loaded while everything is measured, one after the other. At the end DDP, the best builder
and the found strategy are run again in turn, and only those rounds are reported: `iteration_ms` is their median,
`least_ms` and `most_ms` the range. `over_ddp`, `over_best_ddp`, `over_builder`: their time over ours. `uplink_ms` is
the least time that the found strategy's bytes take on the busiest uplink.

`--only ranking` (Figs. 4 and 9): Kendall's tau of the cost model on held-out strategies before and after 20 trials, the
search curve and the hit rate against guided random search, with simulated iterations of the paper's models.
`--only clusters` runs strategy_sim.py: the paper's clusters.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any, Self

import numpy as np
from common import Row, finish

from stretto.errors import Infeasible
from stretto.lab import Lab, unavailable
from stretto.strategy import Strategy, zoo
from stretto.strategy.builders import build
from stretto.strategy.clusters import paper_cluster
from stretto.strategy.cost import CostModel
from stretto.strategy.features import Features
from stretto.strategy.files import read_model, strategy_text
from stretto.strategy.learned import Ranker, kendall_tau
from stretto.strategy.sampler import Sampler
from stretto.strategy.search import BUILT, search
from stretto.strategy.simulate import iteration_us

RANK = Path(__file__).with_name("strategy_rank.py")
SHAPES: dict[str, dict[str, Any]] = {
    "slow host": {"hosts": 3, "ranks_per_host": 1, "uplinks": {"eth": "1200mbit,1200mbit,300mbit"}},
    "2x2": {"hosts": 2, "ranks_per_host": 2, "uplinks": {"eth": "300mbit"}},
    "4x1": {"hosts": 4, "ranks_per_host": 1, "uplinks": {"eth": "300mbit"}},
}
CASES = {
    f"{model} {shape}": (model, shape)
    for model, shape in (
        ("vgg16", "slow host"), ("vgg16", "2x2"), ("ncf", "4x1"), ("ncf_sparse", "2x2"), ("bert", "slow host"),
        ("bert_sparse", "4x1"), ("resnet", "2x2"),
    )
}  # fmt: skip
QUICK = ("vgg16 slow host",)
BUILDERS = [
    (name, options) for name, options in BUILT if name not in ("ps", "random_axis") and "bucket_mb" not in options
]
"""A single server and cuts at random are not what anybody would choose by hand."""
QUICK_BUILDERS = [(name, options) for name, options in BUILDERS if name in ("partitioned_all_reduce", "ps_balanced")]
BUCKETS_MB = (25.0, 0.25, 1.0, 4.0)
"""DDP's default first."""
TRIALS, QUICK_TRIALS = 20, 8
WARMUP, TIMED, MOST_TIMED, TIMED_US = 1, 5, 20, 0.8e6
"""Iterations: one to warm up, and then 0.8 seconds of them, but at least 5 and at most 20."""
ROUNDS = 3
ANSWER_S = 90.0
RANKING = (("vgg16", "b7"), ("ncf_dense", "b7"), ("bert_6l", "b7"))
HELD_OUT, LEARNED, SEEDS = 40, 20, 2


class Served:
    """A job in a lab that runs what it is asked."""

    def __init__(self, model: str, shape: str) -> None:
        self.lab = Lab(**SHAPES[shape])
        self.model = model
        self.timed = TIMED

    def __enter__(self) -> Self:
        self.lab.__enter__()
        self._folder = tempfile.TemporaryDirectory(prefix="stretto-strategy-")
        self._asked = 0
        self._job = self.lab.start([sys.executable, str(RANK), self.model, "serve", self._folder.name])
        return self

    def __exit__(self, *error: Any) -> None:
        try:
            self._job.kill()
        finally:
            self.lab.__exit__(*error)
            self._folder.cleanup()

    def ask(self, **request: Any) -> dict[str, Any]:
        """One request, and its answer."""
        folder, number = Path(self._folder.name), self._asked
        self._asked += 1
        beside = folder / ".request"
        beside.write_text(json.dumps(request))
        beside.replace(folder / f"{number}.json")
        answer, deadline = folder / f"{number}.answer", time.monotonic() + ANSWER_S
        while not answer.exists():
            if time.monotonic() > deadline:
                raise Infeasible(f"no answer within {ANSWER_S:g} s")
            time.sleep(0.01)
        found: dict[str, Any] = json.loads(answer.read_text())
        return found

    def ddp_us(self, bucket_mb: float) -> float:
        """An iteration under DDP."""
        return float(self.ask(system="ddp", bucket_mb=bucket_mb, warmup=WARMUP, timed=self.timed)["median_us"])

    def strategy_us(self, strategy: Strategy) -> float:
        """An iteration under a strategy."""
        text = strategy_text(strategy, as_json=True)
        return float(self.ask(system="stretto", strategy=text, warmup=WARMUP, timed=self.timed)["median_us"])


def real(case: str, quick: bool) -> list[Row]:
    """One case: everything measured in one job."""
    name, shape = CASES[case]
    with Served(name, shape) as job:
        model = read_model(job.ask(system="describe")["model"], as_json=True)
        cluster = job.lab.cluster()
        job.timed = round(min(max(TIMED_US / job.ddp_us(BUCKETS_MB[0]), TIMED), MOST_TIMED))
        buckets = {mb: job.ddp_us(mb) for mb in (BUCKETS_MB[:2] if quick else BUCKETS_MB)}
        best_mb = min(buckets, key=lambda mb: buckets[mb])
        built: dict[str, tuple[Strategy, float]] = {}
        for builder, options in QUICK_BUILDERS if quick else BUILDERS:
            strategy = build(builder, model, cluster, **options)
            label = ", ".join([builder, *(f"{key}={value}" for key, value in options.items())])
            built[label] = strategy, job.strategy_us(strategy)
        best = min(built, key=lambda label: built[label][1])
        begun = time.perf_counter()
        found = search(model, cluster, job.strategy_us, trials=QUICK_TRIALS if quick else TRIALS)
        spent_s = time.perf_counter() - begun
        rounds: dict[str, list[float]] = {"ddp": [], "ddp best bucket": [], "best builder": [], "found": []}
        for _ in range(ROUNDS):
            rounds["ddp"].append(job.ddp_us(BUCKETS_MB[0]))
            rounds["ddp best bucket"].append(job.ddp_us(best_mb))
            rounds["best builder"].append(job.strategy_us(built[best][0]))
            rounds["found"].append(job.strategy_us(found.best))
    times = {system: median(values) / 1e3 for system, values in rounds.items()}
    about = {
        "ddp": "25 MB", "ddp best bucket": f"{best_mb:g} MB", "best builder": best,
        "found": kinds(found.best),
    }  # fmt: skip
    rows: list[Row] = []
    for system, values in rounds.items():
        row: Row = {
            "case": case, "system": system, "what": about[system], "iteration_ms": times[system],
            "least_ms": min(values) / 1e3, "most_ms": max(values) / 1e3,
        }  # fmt: skip
        if system == "found":
            row |= {
                "over_ddp": times["ddp"] / times["found"], "over_best_ddp": times["ddp best bucket"] / times["found"],
                "over_builder": times["best builder"] / times["found"],
                "uplink_ms": CostModel(model, cluster).components(found.best).uplink_us / 1e3,
                "trials": len(found.trials), "search_s": spent_s,
            }  # fmt: skip
        rows.append(row)
    return rows


def kinds(strategy: Strategy) -> str:
    """Which synchronisers a strategy uses, for how many variables each."""
    names = [one.kind for node in strategy.nodes for one in (node.parts or (node.sync,))[:1]]
    return ", ".join(f"{names.count(kind)} {kind}" for kind in dict.fromkeys(names))


def ranking(quick: bool) -> list[Row]:
    """Figs. 4 and 9, in simulation."""
    rows: list[Row] = []
    for name, where in RANKING[1:2] if quick else RANKING:
        bed = paper_cluster(where)
        model = zoo.model(name, device=bed.device)

        def run(strategy: Strategy) -> float:
            return iteration_us(strategy, model, bed.cluster, slowdown=bed.slowdown)  # noqa: B023

        case = f"{name} {where}"
        before, after = taus(Features(CostModel(model, bed.cluster)), Sampler(model, bed.cluster, seed=100), run)
        rows.append({"case": case, "system": "tau", "before": before, "after_20": after})
        base_us = min(run(build(builder, model, bed.cluster, **options)) for builder, options in BUILT)
        for method in ("learned", "random"):
            found = [
                search(
                    model, bed.cluster, run, trials=TRIALS * 2, seed=seed, method=method, with_builders=False,
                    confirm=0,
                )
                for seed in range(1 if quick else SEEDS)
            ]  # fmt: skip
            curve = np.mean([base_us / np.array(each.curve()) for each in found], axis=0)
            rows.append(
                {"case": case, "system": method, "hit_rate": mean(each.hits(base_us) for each in found)}
                | {f"best_after_{at}": float(curve[at - 1]) for at in (1, 5, 10, 20, 40)}
            )
    return rows


def taus(features: Features, sampler: Sampler, run: Any) -> tuple[float, float]:
    """Kendall's tau on held-out strategies without any trial and after 20, over several draws."""
    drawn = [sampler.sample()[1] for _ in range(HELD_OUT + LEARNED)]
    vectors, times = [features.vector(each) for each in drawn], [run(each) for each in drawn]
    before, after = [], []
    for seed in range(5):
        order = np.random.default_rng(seed).permutation(len(drawn))
        held = [int(at) for at in order[:HELD_OUT]]
        ranker = Ranker()
        before.append(kendall_tau(ranker.score([vectors[at] for at in held]).tolist(), [times[at] for at in held]))
        ranker.fit([vectors[at] for at in order[HELD_OUT:]], [times[at] for at in order[HELD_OUT:]])
        after.append(kendall_tau(ranker.score([vectors[at] for at in held]).tolist(), [times[at] for at in held]))
    return mean(before), mean(after)


def main(argv: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="end within a minute on two cores")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    parser.add_argument("--markdown", action="store_true", help="print the table as docs/results.md has it")
    parser.add_argument(
        "--only", action="append", choices=[*CASES, "real", "ranking", "clusters"], help="one part of it; repeatable"
    )
    args = parser.parse_args(argv)
    wanted = args.only or ["real", "ranking"]
    cases = [case for case in CASES if case in wanted or ("real" in wanted and (not args.quick or case in QUICK))]
    rows: list[Row] = []
    if cases and (reason := unavailable()):
        print(f"real runs: skipped, {reason}", file=sys.stderr)
        cases = []
    for case in cases:
        begun = time.perf_counter()
        rows += real(case, args.quick)
        print(f"{case}: {time.perf_counter() - begun:.0f} s", file=sys.stderr, flush=True)
    ranked = ranking(args.quick) if "ranking" in wanted else []
    if "clusters" in wanted:
        script = Path(__file__).with_name("strategy_sim.py")
        subprocess.run([sys.executable, str(script), *(["--quick"] if args.quick else [])], check=True)
    if rows:
        finish(rows, args, title="real steps in the lab")
    if ranked:
        beside = args.json.with_name(f"{args.json.stem}_ranking.json") if args.json and rows else args.json
        finish(ranked, argparse.Namespace(**{**vars(args), "json": beside}), title="ranking (simulated)")


if __name__ == "__main__":
    main()
