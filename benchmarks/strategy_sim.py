# SPDX-License-Identifier: Apache-2.0
"""AutoDist's evaluation in simulation: its models on its clusters A1..B12, Figures 5 to 8, and what the paper says.

Systems are strategy_systems.py's; `found` is what the search finds with the simulator in the place of trial runs. Every
iteration is simulated link by link (docs/strategies.md), so times compare strategies, not machines. `--only paper`
lists the paper's statements beside what holds here, `--only overhead` how that depends on what a message costs in host
code, `--only links` the fast estimate beside the simulation link by link. `--keep FILE` saves every time as it
is known and takes those of an earlier run from it: the whole table takes minutes, and may be made in parts.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from common import Row, finish, save
from strategy_paper import overhead, paper
from strategy_systems import (
    SYSTEMS,
    TIMES,
    best,
    built_us,
    compute_us,
    estimate_us,
    label,
    made,
    model_on,
    place,
    system_us,
    tried_us,
)  # fmt: skip

from stretto.strategy import BUILDERS, zoo
from stretto.strategy.clusters import CLUSTERS
from stretto.strategy.search import search

CHUNKS = (1, 8, 32, 64, 128, 512, 100_000)
FIG5_MODELS = ("bert_large", "densenet121", "resnet101", "inceptionv3")
FIG6 = {
    "bert_3l": ("a1", "b2", "b7"), "bert_large": ("a2", "b3", "b7"), "ncf_dense": ("a1", "b3", "b7", "b9"),
    "resnet101": ("b3", "b7"), "transformer": ("a1", "b2", "b12"), "vgg16": ("a1", "b7", "b11"),
    "ncf_sparse": ("a1", "b7"), "lm1b": ("a1", "b7"),
}  # fmt: skip
FIG7 = {
    "resnet101": "b7", "vgg16": "b7", "ncf_dense": "b7", "bert_6l": "b7", "bert_12l": "b7", "transformer": "b2",
    "bert_large": "b7",
}  # fmt: skip
FIG8_MODELS, FIG8_CLUSTERS = ("ncf_dense", "vgg16", "vgg16/8", "bert_large"), ("a2", "b7")
"""``/8``: with 8 samples per rank. At our usual 32 VGG16 computes for longer than it communicates."""
FIG8_TRIALS = 40


def row(model: str, cluster: str, **rest: Any) -> Row:
    return {"case": f"{model} {cluster.upper()}", "compute_ms": compute_us(model, cluster) / 1e3, **rest}


def table(quick: bool) -> list[Row]:
    """Every cluster of Table 1 over the models."""
    models = ("vgg16", "ncf_sparse", "resnet101") if quick else tuple(zoo.MODELS)
    clusters = ("a2", "b7", "b9") if quick else tuple(CLUSTERS)
    rows = []
    for m in models:
        for c in clusters:
            times = {name: system_us(m, c, name) / 1e3 for name in SYSTEMS}
            hand = min(times["ar"], times["ps1"], times["ps2"])
            rows.append(row(
                m, c, **{f"{name}_ms": ms for name, ms in times.items()}, over_hand=hand / times["best_builder"],
                builder=best(m, c, "best_builder")[1],
            ))  # fmt: skip
    return rows


def fig5(quick: bool) -> list[Row]:
    """Baselines on one to eight hosts of four GPUs."""
    models = FIG5_MODELS[2:3] if quick else FIG5_MODELS
    clusters = ("b4", "b7") if quick else ("b4", "b5", "b6", "b7", "b8")
    return [
        row(m, c, **{f"{name}_ms": system_us(m, c, name) / 1e3 for name in ("ddp", "ar", "ps1", "ps2")})
        for m in models for c in clusters
    ]  # fmt: skip


def fig6(quick: bool) -> list[Row]:
    """All-reduce or parameter servers, dense and sparse."""
    cases = [(m, c) for m, clusters in FIG6.items() for c in clusters if not quick or m in ("vgg16", "ncf_sparse")]
    rows = []
    for m, c in cases:
        times = {name: system_us(m, c, name) / 1e3 for name in ("ps1", "ps2", "ar")}
        rows.append(
            row(m, c, **{f"{name}_ms": ms for name, ms in times.items()}, best=min(times, key=lambda n: times[n]))
        )
    return rows


def fig7(quick: bool) -> list[Row]:
    """How many neighbours to merge into one all-reduce."""
    cases = {m: c for m, c in FIG7.items() if not quick or m in ("vgg16", "ncf_dense")}
    return [
        row(m, c, **{
            f"{chunk if chunk < 100_000 else 'all'}_ms": built_us(m, c, ("all_reduce", (("chunk", chunk),))) / 1e3
            for chunk in CHUNKS
        })
        for m, c in cases.items()
    ]  # fmt: skip


def fig8(quick: bool) -> list[Row]:
    """What a search finds against the best made by hand; after how many trials it was better."""
    rows = []
    for m in FIG8_MODELS[: 1 if quick else None]:
        for c in FIG8_CLUSTERS[1 if quick else 0 :]:
            trials = 20 if quick else FIG8_TRIALS
            ar, ps = system_us(m, c, "ar"), min(system_us(m, c, "ps1"), system_us(m, c, "ps2"))
            found, better = found_us(m, c, trials, min(ar, ps))
            rows.append(row(
                m, c, ar_ms=ar / 1e3, ps_ms=ps / 1e3, builder_ms=system_us(m, c, "best_builder") / 1e3,
                found_ms=found / 1e3, over_hand=min(ar, ps) / found, trials=trials, better_after=better or None,
            ))  # fmt: skip
    return rows


def found_us(m: str, c: str, trials: int, hand_us: float) -> tuple[float, int]:
    """What the search finds, and after how many trials it was better than what was made by hand."""
    key = f"{m} {c} found {trials}"
    us, first = TIMES.get(key), TIMES.get(f"{key} first")
    if us is None or first is None:
        found = search(
            model_on(m, c), place(c).cluster, lambda strategy: tried_us(strategy, m, c), trials=trials, confirm=0
        )
        us, first = found.best_us, next((at + 1 for at, us in enumerate(found.curve()) if us < hand_us), 0)
        TIMES.put(key, us)
        TIMES.put(f"{key} first", first)
    return us, int(first)


def links(quick: bool) -> list[Row]:
    """The fast estimate against the simulation link by link."""
    rows = []
    cases = (("ncf_sparse", "b5"), ("ncf_dense", "b7"), ("vgg16", "a2"), ("vgg16", "b10"), ("bert_large", "b7"))
    for m, c in cases[: 1 if quick else None]:
        for builder in BUILDERS:
            exact = built_us(m, c, (builder, ()))
            us = estimate_us(made(m, c, (builder, ())), m, c)
            rows.append({
                "case": f"{m} {c.upper()}", "system": label((builder, ())), "flows_ms": us / 1e3,
                "links_ms": exact / 1e3, "ratio": us / exact,
            })  # fmt: skip
    return rows


PARTS: dict[str, Callable[[bool], list[Row]]] = {
    "table": table, "fig5": fig5, "fig6": fig6, "fig7": fig7, "fig8": fig8, "paper": paper, "overhead": overhead,
    "links": links,
}  # fmt: skip


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="end within a minute on two cores")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    parser.add_argument("--markdown", action="store_true", help="print the table as docs/results.md has it")
    parser.add_argument("--only", action="append", choices=tuple(PARTS), help="one part of it; repeatable")
    parser.add_argument("--keep", type=Path, metavar="FILE", help="times of an earlier run, and all new ones")
    args = parser.parse_args()
    if args.keep:
        TIMES.keep_in(args.keep)
    rows: list[Row] = []
    for part in args.only or PARTS:
        found = PARTS[part](args.quick)
        finish(found, argparse.Namespace(**{**vars(args), "json": None}), title=f"{part}: {PARTS[part].__doc__}")
        rows += [{"part": part, **one} for one in found]
    if args.json:
        save(rows, args.json)


if __name__ == "__main__":
    main()
