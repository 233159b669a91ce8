# SPDX-License-Identifier: Apache-2.0
"""Strategies found by the search against PyTorch DDP and every builder: real training steps in the lab.

Miniatures with the shapes of known models (0.4 to 1.0 million parameters, strategy_models.py) on hosts with shaped
uplinks, all on gloo. One job per case measures everything, through the session that `stretto tune` uses: DDP with its
default bucket size and others, the search's trials, every builder, and in the end DDP, DDP with its best bucket, the
best builder and what was found, in turn. Only those rounds are reported: `iteration_ms` is their median, `least_ms` and
`most_ms` their range, and `over_*` the median over rounds of their time over ours. One run of each before the search
tells DDP's best bucket, which is luck where they are alike: `over_best_ddp` is the less of the ratios to it and to DDP.
Where nothing was faster than DDP with confidence the search keeps DDP, and `found` is that.
`ddp, own script` is an ordinary DDP script in a run of its own: what a session measures must be the same.

`ratio` is how long the network takes for an all-reduce of all gradients over the compute of a step; `paper_ratio` the
same for the paper's model on its cluster B7, by the zoo's roofline. `uplink_ms` is the least time that the found
strategy's bytes take on the busiest uplink, `bound_ms` the larger of that and the compute, `of_bound` the found time
over it.

With `--methods` the search runs twice in the same job, guided and with random draws, with equal trials and a seed
(`--seed`), and what each found is then measured in turn with DDP: `over_random` is the median over rounds.
"""

from __future__ import annotations

import argparse
import math
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from common import Row, finish
from strategy_models import LABELS

from stretto.cluster import Cluster
from stretto.errors import Infeasible
from stretto.lab import LabLayout, unavailable
from stretto.strategy import ModelSpec, Strategy, build, zoo
from stretto.strategy.clusters import paper_cluster
from stretto.strategy.cost import StrategyCostModel
from stretto.strategy.decide import ratio
from stretto.strategy.requests import Arm, Reference
from stretto.strategy.search import BUILT, search
from stretto.strategy.trials import Times, Trials, command

RANK = Path(__file__).with_name("strategy_rank.py")
SHAPES = {"slow host": (3, 1), "2x2": (2, 2), "4x1": (4, 1), "fast 3x1": (3, 1)}
"""Hosts, and ranks on each."""
PAPER = {
    "vgg_like": "vgg16", "ncf_like": "ncf_dense", "ncf_like_sparse": "ncf_sparse", "bert_like": "bert_large",
    "bert_like_sparse": "bert_large_sparse", "resnet_like": "resnet101",
}  # fmt: skip
"""Which model of the paper a miniature resembles."""
CASES = {
    f"{model} {shape}": (model, shape, uplink)
    for model, shape, uplink in (
        ("vgg_like", "slow host", "1gbit,1gbit,400mbit"), ("vgg_like", "2x2", "400mbit"),
        ("ncf_like", "4x1", "300mbit"), ("ncf_like", "2x2", "300mbit"), ("ncf_like_sparse", "2x2", "300mbit"),
        ("bert_like", "slow host", "1gbit,1gbit,400mbit"), ("bert_like_sparse", "4x1", "300mbit"),
        ("resnet_like", "2x2", "300mbit"),
        ("resnet_like", "fast 3x1", "4gbit"),
    )
}  # fmt: skip
"""The slow host's uplink is 2.5 times as slow, as in B9. On the fast network compute dominates: there is little to
gain, and nothing may be lost."""
QUICK = ("vgg_like slow host",)
BUCKETS_MB = (25.0, 0.25, 1.0, 4.0)
"""DDP's default first."""
TRIALS, QUICK_TRIALS = 20, 8
WARMUP, LEAST_TIMED, MOST_TIMED, TIMED_US = 2, 6, 20, 0.6e6
"""Iterations of a trial: two to warm up, and then 0.6 seconds of them, but at least 6 and at most 20."""
CONFIRM, ROUNDS = 8, 5
TIMEOUT_S = 60.0


def job(case: str, *more: str) -> list[str]:
    """The command that runs a model's script on a lab."""
    name, shape, uplink = CASES[case]
    hosts, ranks = SHAPES[shape]
    lab = ["lab", "run", "--hosts", str(hosts), "--ranks", str(ranks), "--uplink", uplink]
    return [sys.executable, "-m", "stretto", *lab, "--", sys.executable, str(RANK), name, *more]


def real(case: str, quick: bool) -> list[Row]:
    """One case: everything measured in one job, and DDP in another."""
    name, shape, uplink = CASES[case]
    label = f"{LABELS[name]} {shape}"
    hosts, ranks = SHAPES[shape]
    cluster = LabLayout.of(hosts=hosts, ranks_per_host=ranks, uplinks={"eth": uplink}).cluster()
    with Trials(command(job(case)), warmup=WARMUP, timed=LEAST_TIMED, timeout_s=TIMEOUT_S) as runs:
        model, _ = runs.describe()
        runs.timed = round(min(max(TIMED_US / runs.run(Reference()), LEAST_TIMED), MOST_TIMED))
        begun = time.perf_counter()
        ended = begun

        def trial_ended(_: object) -> None:
            nonlocal ended
            ended = time.perf_counter()

        found = search(
            model, cluster, runs, trials=QUICK_TRIALS if quick else TRIALS, confirm=4 if quick else CONFIRM,
            references=[Reference(bucket_mb=mb) for mb in (BUCKETS_MB[:2] if quick else BUCKETS_MB)],
            on_trial=trial_ended,
        )  # fmt: skip
        search_s, trials_s = time.perf_counter() - begun, ended - begun
        best_ddp = min(found.references, key=lambda one: one[1])[0]
        builder, built = best_builder(runs, {t.origin: t.iteration_us for t in found.trials}, model, cluster, quick)
        arms: dict[str, Arm] = {"ddp": Reference(), "ddp best bucket": best_ddp, "best builder": built}
        if found.kept is None:
            arms["found"] = found.best
        elif found.kept not in arms.values():
            arms["found"] = found.kept
        for last in (False, True):
            rounds: dict[str, Times] = {}
            # A job that dies is started again: DDP with sparse gradients may, on gloo (docs/distribute.md).
            times = runs.measure(list(arms.values()), rounds=3 if quick else ROUNDS, warmup=WARMUP, timed=runs.timed)
            for system, one in zip(arms, times, strict=True):
                if not isinstance(one, Infeasible):
                    rounds[system] = one
                elif last:
                    sys.exit(f"{case}: {system}: {one}")
            if len(rounds) == len(arms):
                break
        started = runs.starts
    if "found" not in rounds:
        rounds["found"] = rounds["ddp" if found.kept == Reference() else "ddp best bucket"]
    parts = StrategyCostModel(model, cluster).components(found.best)
    usual = StrategyCostModel(model, cluster).components(build("all_reduce", model, cluster))
    bed = paper_cluster("b7")
    papers = zoo.model(PAPER[name], device=bed.device)
    paper = StrategyCostModel(papers, bed.cluster).components(build("all_reduce", papers, bed.cluster))
    about = {
        "ddp": "25 MB", "ddp best bucket": f"{best_ddp.bucket_mb:g} MB", "best builder": builder,
        "found": f"{found.kept.name} kept" if found.kept is not None else kinds(found.best),
    }  # fmt: skip
    rows: list[Row] = []
    for system, values in rounds.items():
        row: Row = {
            "case": label, "system": system, "what": about[system], "iteration_ms": median(values) / 1e3,
            "least_ms": min(values) / 1e3, "most_ms": max(values) / 1e3,
        }  # fmt: skip
        if system == "found":
            bound_ms = max(parts.uplink_us, parts.compute_us) / 1e3
            row |= {
                "over_ddp": ratio(rounds["ddp"], values),
                "over_best_ddp": min(ratio(rounds[one], values) for one in ("ddp", "ddp best bucket")),
                "over_builder": ratio(rounds["best builder"], values),
                "uplink_ms": parts.uplink_us / 1e3, "bound_ms": bound_ms,
                "of_bound": median(values) / 1e3 / bound_ms,
                "ratio": usual.serial_us / usual.compute_us, "paper_ratio": paper.serial_us / paper.compute_us,
                "trials": len(found.trials), "trials_s": trials_s, "search_s": search_s,
                "rounds": max(len(one) for one in found.decision.times_us) if found.decision is not None else 0,
                "starts": started,
            }  # fmt: skip
        rows.append(row)
    alone = subprocess.run(job(case, "ddp"), capture_output=True, text=True, timeout=TIMEOUT_S * 2)
    said = re.search(r"median ([\d.]+) ms", alone.stdout + alone.stderr)
    rows.insert(1, {"case": label, "system": "ddp, own script", "what": "25 MB",
                    "iteration_ms": float(said[1]) if said else math.nan})  # fmt: skip
    return rows


def methods(case: str, trials: int, seed: int) -> list[Row]:
    """One case: the guided search beside random draws, each with so many trials, in one job."""
    name, shape, uplink = CASES[case]
    hosts, ranks = SHAPES[shape]
    cluster = LabLayout.of(hosts=hosts, ranks_per_host=ranks, uplinks={"eth": uplink}).cluster()
    with Trials(command(job(case)), warmup=WARMUP, timed=LEAST_TIMED, timeout_s=TIMEOUT_S) as runs:
        model, _ = runs.describe()
        arms: dict[str, Arm] = {"ddp": Reference()}
        curves: dict[str, list[float]] = {}
        for method in ("random", "learned"):
            found = search(model, cluster, runs, trials=trials, seed=seed, method=method, confirm=4,
                           references=[Reference()])  # fmt: skip
            arms[method], curves[method] = found.best, found.curve()
        times = runs.measure(list(arms.values()), rounds=ROUNDS, warmup=WARMUP, timed=MOST_TIMED)
    failed = [str(one) for one in times if isinstance(one, Infeasible)]
    if failed:
        sys.exit(f"{case}: {failed[0]}")
    rounds = {system: one for system, one in zip(arms, times, strict=True) if not isinstance(one, Infeasible)}
    rows: list[Row] = []
    for system, values in rounds.items():
        row: Row = {
            "case": f"{LABELS[name]} {shape}, seed {seed}", "system": system, "iteration_ms": median(values) / 1e3,
            "least_ms": min(values) / 1e3, "most_ms": max(values) / 1e3, "over_ddp": ratio(rounds["ddp"], values),
            "over_random": ratio(rounds["random"], values),
        }  # fmt: skip
        if system in curves:
            row |= {f"best_after_{n}_ms": curves[system][n - 1] / 1e3 for n in (5, 10, trials)}
        rows.append(row)
    return rows


def one_row_each(rows: Sequence[Row]) -> list[Row]:
    """A row for each case: the time of each system, then what the row of the search says beside."""
    found: dict[str, Row] = {}
    for row in rows:
        mine = found.setdefault(row["case"], {"case": row["case"]})
        mine[row["system"]] = row["iteration_ms"]
    for row in rows:
        beside = ("what", "over_ddp", "over_best_ddp", "over_builder", "over_random", "uplink_ms")
        if row["system"] in ("found", "learned"):
            found[row["case"]] |= {column: row[column] for column in beside if column in row}
        for column in row:
            if column.startswith("best_after"):
                found[row["case"]][f"{row['system']} {column.removeprefix('best_')}"] = row[column]
    return list(found.values())


def best_builder(
    runs: Trials, known: dict[str, float], model: ModelSpec, cluster: Cluster, quick: bool
) -> tuple[str, Strategy]:
    """The builder whose strategy takes least, those that the search has not tried included (unless it is quick)."""
    found: dict[str, tuple[float, Strategy]] = {}
    for name, options in BUILT:
        label = ", ".join([name, *(f"{key}={value}" for key, value in options.items())])
        strategy = build(name, model, cluster, **options)
        if any(one.nodes == strategy.nodes for _, one in found.values()) or (quick and label not in known):
            continue
        time_us = known.get(label)
        if time_us is None:
            (measured,) = runs.run_all([strategy])
            time_us = math.inf if isinstance(measured, Infeasible) else measured
        found[label] = time_us, strategy
    best = min(found, key=lambda label: found[label][0])
    return best, found[best][1]


def kinds(strategy: Strategy) -> str:
    """Which synchronisers a strategy uses, for how many variables each, and how many send factors."""
    syncs = [one for node in strategy.nodes for one in (node.parts or (node.sync,))[:1]]
    names = [one.kind if one.encoder == "none" else one.encoder for one in syncs]
    return ", ".join(f"{names.count(kind)} {kind}" for kind in dict.fromkeys(names))


def main(argv: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="end within a minute on two cores")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    parser.add_argument("--markdown", action="store_true", help="print the table as docs/results.md has it")
    parser.add_argument("--only", action="append", choices=[*CASES], help="one case; repeatable")
    parser.add_argument("--methods", action="store_true", help="the guided search beside random draws")
    parser.add_argument("--seed", type=int, default=0, help="with --methods: the seed of both searches")
    args = parser.parse_args(argv)
    if reason := unavailable():
        print(f"real runs: skipped, {reason}", file=sys.stderr)
        return
    rows: list[Row] = []
    for case in args.only or (QUICK if args.quick else CASES):
        begun = time.perf_counter()
        trials = QUICK_TRIALS if args.quick else TRIALS
        rows += methods(case, trials, args.seed) if args.methods else real(case, args.quick)
        print(f"{case}: {time.perf_counter() - begun:.0f} s", file=sys.stderr, flush=True)
    finish(one_row_each(rows) if args.markdown else rows, args, title="real steps in the lab")


if __name__ == "__main__":
    main()
