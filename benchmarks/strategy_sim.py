"""AutoDist's evaluation in simulation: its models on its clusters A1..B12, Figures 5 to 8.

The systems: `ps1` is TF-PS-LB (whole variables, balanced over hosts), `ps2` the paper's hand-made PS (two levels, large
variables cut for all hosts), `ar` all-reduce with the best of several merge schemes (as Horovod is tuned), `ddp`
PyTorch's buckets of 25 MiB. `best_builder` is the best of our builders, `found` what the search finds with the
simulator in the place of trial runs. Every iteration is simulated (docs/strategies.md), so times compare strategies,
not machines.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from common import Row, finish, options, save

from stretto.errors import Infeasible
from stretto.strategy import BUILDERS, ModelSpec, Strategy, build, simulate_strategy, zoo
from stretto.strategy.clusters import CLUSTERS, PaperCluster, paper_cluster
from stretto.strategy.link_level import link_level_us
from stretto.strategy.search import search

CHUNKS = (1, 8, 32, 64, 128, 512, 100_000)
TUNED = (8, 64, 128)
PART_MB = (1.0, 10.0)
DOMINATED = ("ps", "random_axis", "zero1")
"""Not worth the time in the table: ps_balanced, partitioned_all_reduce and zero2 do better."""
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


@cache
def place(name: str) -> PaperCluster:
    return paper_cluster(name)


@cache
def model_on(model: str, cluster: str) -> ModelSpec:
    name, _, batch = model.partition("/")
    return zoo.model(name, device=place(cluster).device, batch=int(batch or 0))


def time_us(strategy: Strategy, model: str, cluster: str) -> float:
    where = place(cluster)
    return simulate_strategy(strategy, model_on(model, cluster), where.cluster, slowdown=where.slowdown).iteration_us


@cache
def built_us(model: str, cluster: str, builder: str, settings: tuple[tuple[str, Any], ...] = ()) -> float:
    made = build(builder, model_on(model, cluster), place(cluster).cluster, **dict(settings))
    return time_us(made, model, cluster)


def best_us(model: str, cluster: str, builder: str, key: str, values: Iterable[float]) -> float:
    return min(built_us(model, cluster, builder, ((key, value),)) for value in values)


SYSTEMS: dict[str, Callable[[str, str], float]] = {
    "ddp": lambda model, cluster: built_us(model, cluster, "all_reduce"),
    "ar": lambda model, cluster: min(
        best_us(model, cluster, "all_reduce", "chunk", TUNED), built_us(model, cluster, "all_reduce")
    ),
    "ps1": lambda model, cluster: built_us(model, cluster, "ps_balanced"),
    "ps2": lambda model, cluster: best_us(model, cluster, "partitioned_ps", "part_mb", PART_MB),
    "best_builder": lambda model, cluster: min(
        [built_us(model, cluster, name) for name in BUILDERS if name not in DOMINATED]
        + [best_us(model, cluster, "all_reduce", "chunk", TUNED)]
        + [best_us(model, cluster, name, "part_mb", PART_MB) for name in ("partitioned_all_reduce", "partitioned_ps")]
    ),
}


def found_us(model: str, cluster: str, trials: int) -> tuple[float, int]:
    """What the search finds, and after how many trials it was better than the best of ar, ps1 and ps2."""
    found = search(
        model_on(model, cluster), place(cluster).cluster, lambda made: time_us(made, model, cluster), trials=trials,
        confirm=0,
    )  # fmt: skip
    hand = min(SYSTEMS[name](model, cluster) for name in ("ar", "ps1", "ps2"))
    first = next((at + 1 for at, us in enumerate(found.curve()) if us < hand), 0)
    return found.best_us, first


def row(model: str, cluster: str, **rest: Any) -> Row:
    compute_us = simulate_strategy(
        build("all_reduce", model_on(model, cluster), place(cluster).cluster), model_on(model, cluster),
        place(cluster).cluster, slowdown=place(cluster).slowdown,
    ).compute_us  # fmt: skip
    return {"case": f"{model} {cluster.upper()}", "compute_ms": compute_us / 1e3, **rest}


def table(quick: bool) -> list[Row]:
    """Every cluster of Table 1 over the models."""
    models = ("vgg16", "ncf_sparse", "resnet101") if quick else tuple(zoo.MODELS)
    clusters = ("a2", "b7", "b9") if quick else tuple(CLUSTERS)
    return [_systems(model, cluster) for model in models for cluster in clusters]


def _systems(model: str, cluster: str) -> Row:
    times = {name: run(model, cluster) / 1e3 for name, run in SYSTEMS.items()}
    hand = min(times["ar"], times["ps1"], times["ps2"])
    return row(
        model, cluster, **{f"{name}_ms": ms for name, ms in times.items()}, over_hand=hand / times["best_builder"]
    )


def fig5(quick: bool) -> list[Row]:
    """Baselines on one to eight hosts of four GPUs."""
    models = FIG5_MODELS[2:3] if quick else FIG5_MODELS
    clusters = ("b4", "b7") if quick else ("b4", "b5", "b6", "b7", "b8")
    return [
        row(m, c, **{f"{name}_ms": SYSTEMS[name](m, c) / 1e3 for name in ("ddp", "ar", "ps1", "ps2")})
        for m in models for c in clusters
    ]  # fmt: skip


def fig6(quick: bool) -> list[Row]:
    """All-reduce or parameter servers, dense and sparse."""
    cases = [(m, c) for m, clusters in FIG6.items() for c in clusters if not quick or m in ("vgg16", "ncf_sparse")]
    rows = []
    for m, c in cases:
        times = {name: SYSTEMS[name](m, c) / 1e3 for name in ("ps1", "ps2", "ar")}
        rows.append(
            row(m, c, **{f"{name}_ms": ms for name, ms in times.items()}, best=min(times, key=lambda n: times[n]))
        )
    return rows


def fig7(quick: bool) -> list[Row]:
    """How many neighbours to merge into one all-reduce."""
    cases = {m: c for m, c in FIG7.items() if not quick or m in ("vgg16", "ncf_dense")}
    return [
        row(m, c, **{
            f"{chunk if chunk < 100_000 else 'all'}_ms":
            built_us(m, c, "all_reduce", (("chunk", chunk),)) / 1e3 for chunk in CHUNKS
        })
        for m, c in cases.items()
    ]  # fmt: skip


def fig8(quick: bool) -> list[Row]:
    """What a search finds against the best made by hand."""
    rows = []
    for m in FIG8_MODELS[: 1 if quick else None]:
        for c in FIG8_CLUSTERS[1 if quick else 0 :]:
            trials = 20 if quick else 40
            ar, ps = SYSTEMS["ar"](m, c), min(SYSTEMS["ps1"](m, c), SYSTEMS["ps2"](m, c))
            found, first = found_us(m, c, trials)
            rows.append(row(
                m, c, ar_ms=ar / 1e3, ps_ms=ps / 1e3, found_ms=found / 1e3, over_hand=min(ar, ps) / found,
                trials=trials, better_after=first or None,
            ))  # fmt: skip
    return rows


def links(quick: bool) -> list[Row]:
    """The time model against the simulator link by link."""
    rows = []
    for m, c in (("ncf_sparse", "b5"), ("ncf_dense", "b7"), ("vgg16", "a2"), ("vgg16", "b10"))[: 1 if quick else 4]:
        for builder in BUILDERS:
            made = build(builder, model_on(m, c), place(c).cluster)
            us = time_us(made, m, c)
            try:
                exact = link_level_us(made, model_on(m, c), place(c).cluster, slowdown=place(c).slowdown)
            except Infeasible:
                continue
            rows.append({
                "case": f"{m} {c.upper()}", "system": builder, "flows_ms": us / 1e3, "links_ms": exact / 1e3,
                "ratio": us / exact,
            })  # fmt: skip
    return rows


PARTS: dict[str, Callable[[bool], list[Row]]] = {
    "table": table, "fig5": fig5, "fig6": fig6, "fig7": fig7, "fig8": fig8, "links": links,
}  # fmt: skip


if __name__ == "__main__":
    args = options(__doc__, only=tuple(PARTS))
    rows: list[Row] = []
    for part in (args.only,) if args.only else PARTS:
        made = PARTS[part](args.quick)
        finish(made, args, title=f"{part}: {PARTS[part].__doc__}")
        rows += [{"part": part, **one} for one in made]
    if args.json:
        save(rows, args.json)
