# SPDX-License-Identifier: Apache-2.0
"""The systems of AutoDist's evaluation as builders, timed link by link; what strategy_sim.py and its parts share.

`ps1` is TF-PS-LB (whole variables, balanced over hosts), `ps2` the paper's hand-made PS (two levels, large variables
cut for all hosts), `ar` all-reduce with the best of several merge schemes (as Horovod is tuned), `ddp` PyTorch's
buckets of 25 MiB, `best_builder` the best of all builders. Of several settings the one with the least time link by link
counts; those that the fast estimate puts more than a tenth behind are not simulated: wherever the two were compared
(`strategy_sim.py --only links`), the estimate was at most 5 % off.
"""

from __future__ import annotations

import hashlib
import json
from functools import cache
from pathlib import Path
from typing import Any

from judges.link_level import link_level_us

from stretto.errors import Infeasible
from stretto.strategy import ModelSpec, Strategy, build, simulate_strategy, zoo
from stretto.strategy.clusters import PaperCluster, paper_cluster

Setting = tuple[str, tuple[tuple[str, Any], ...]]

TUNED = (8, 64, 128)
PART_MB = (1.0, 10.0)
MARGIN = 1.1
DDP: Setting = ("all_reduce", ())
SYSTEMS: dict[str, tuple[Setting, ...]] = {
    "ddp": (DDP,),
    "ar": (DDP, *(("all_reduce", (("chunk", chunk),)) for chunk in TUNED)),
    "ps1": (("ps_balanced", ()),),
    "ps2": tuple(("partitioned_ps", (("part_mb", mb),)) for mb in PART_MB),
}
SYSTEMS["best_builder"] = (
    *SYSTEMS["ar"], *SYSTEMS["ps1"], *SYSTEMS["ps2"],
    *(("partitioned_all_reduce", (("part_mb", mb),)) for mb in PART_MB), ("uneven_partitioned_ps", ()),
    ("ps_balanced", (("servers", "devices"),)), ("partitioned_ps", (("two_level", False),)), ("parallax", ()),
    ("zero1", ()), ("zero2", ()),
)  # fmt: skip
"""Without a single server for all and cuts at random, which nobody would choose."""


class Times:
    """What was simulated already; with a file also by an earlier run."""

    def __init__(self) -> None:
        self._file: Path | None = None
        self._known: dict[str, float] = {}

    def keep_in(self, file: Path) -> None:
        """Take times from a file, and save all that follow in it."""
        self._file = file
        self._known |= json.loads(file.read_text()) if file.exists() else {}

    def get(self, key: str) -> float | None:
        return self._known.get(key)

    def put(self, key: str, us: float) -> None:
        self._known[key] = us
        if self._file is not None:
            beside = self._file.with_suffix(".part")
            beside.write_text(json.dumps(self._known))
            beside.replace(self._file)


TIMES = Times()


@cache
def place(name: str) -> PaperCluster:
    return paper_cluster(name)


@cache
def model_on(model: str, cluster: str) -> ModelSpec:
    """``vgg16/8`` has 8 samples per rank instead of the usual number."""
    name, _, batch = model.partition("/")
    return zoo.model(name, device=place(cluster).device, batch=int(batch or 0))


def strategy_us(strategy: Strategy, model: str, cluster: str, host_us: float = 0.0) -> float:
    """Link by link."""
    where = place(cluster)
    return link_level_us(strategy, model_on(model, cluster), where.cluster, slowdown=where.slowdown, host_us=host_us)


def tried_us(strategy: Strategy, model: str, cluster: str) -> float:
    """The same, remembered: a search that was cut short takes up where it ended."""
    key = f"{model} {cluster} tried {hashlib.sha1(repr(strategy.nodes).encode()).hexdigest()[:16]}"
    us = TIMES.get(key)
    if us is None:
        us = strategy_us(strategy, model, cluster)
        TIMES.put(key, us)
    return us


def estimate_us(strategy: Strategy, model: str, cluster: str, host_us: float = 0.0) -> float:
    """Messages as loads on links."""
    where = place(cluster)
    return simulate_strategy(
        strategy, model_on(model, cluster), where.cluster, slowdown=where.slowdown, host_us=host_us
    ).iteration_us


def label(setting: Setting) -> str:
    return " ".join([setting[0], *(f"{key}={value}" for key, value in setting[1])])


def made(model: str, cluster: str, setting: Setting) -> Strategy:
    return build(setting[0], model_on(model, cluster), place(cluster).cluster, **dict(setting[1]))


def built_us(model: str, cluster: str, setting: Setting, host_us: float = 0.0) -> float:
    """What a builder makes; infinite where there are too many transfers to simulate."""
    key = f"{model} {cluster} {label(setting)} {host_us:g}"
    us = TIMES.get(key)
    if us is None:
        try:
            us = strategy_us(made(model, cluster, setting), model, cluster, host_us)
        except Infeasible:
            us = float("inf")
        TIMES.put(key, us)
    return us


def best(model: str, cluster: str, system: str, host_us: float = 0.0) -> tuple[float, str]:
    """The least time of a system's settings, and which it was."""
    settings = SYSTEMS[system]
    if len(settings) == 1:
        return built_us(model, cluster, settings[0], host_us), label(settings[0])
    key = f"{model} {cluster} {{}} estimate {host_us:g}"
    guesses = []
    for setting in settings:
        guess = TIMES.get(key.format(label(setting)))
        if guess is None:
            guess = estimate_us(made(model, cluster, setting), model, cluster, host_us)
            TIMES.put(key.format(label(setting)), guess)
        guesses.append((guess, label(setting), setting))
    found = (float("inf"), "")
    for guess, name, setting in sorted(guesses):
        if guess < MARGIN * found[0]:
            found = min(found, (built_us(model, cluster, setting, host_us), name))
    return found


def system_us(model: str, cluster: str, system: str, host_us: float = 0.0) -> float:
    return best(model, cluster, system, host_us)[0]


def compute_us(model: str, cluster: str) -> float:
    """What no synchronisation could be faster than."""
    spec, slowdown = model_on(model, cluster), place(cluster).slowdown
    return sum(v.forward_us + v.backward_us for v in spec.variables) * max(slowdown, default=1.0)
