# SPDX-License-Identifier: Apache-2.0
"""The cases ``strided`` of benchmarks/enforcer.py: real pipelines whose stages have their replicas on two lab hosts.

Four stages, two replicas: every data-parallel group has a rank on each host, so four groups share one uplink; with
``across`` every message between two stages crosses it, too, with ``networks`` there is a second, slower uplink beside
it, and with ``turns`` stages compute, so that it matters whose gradients go first. Links are slow enough for the
processors to be idle nearly all the time, which `cpu_share` shows: the processor time of all ranks in a step over that
of the step on all cores.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from common import Row

from stretto.lab import Lab, unavailable

RANK = Path(__file__).with_name("enforcer_strided_rank.py")
LIMIT_S = 400.0
HOSTS, STAGES = 2, 4
UPLINKS = {
    "across": {"rdma": "10mbit"},
    "inside": {"rdma": "10mbit"},
    "networks": {"rdma": "10mbit", "eth": "5mbit"},
    "turns": {"rdma": "10mbit"},
}
SHAPES = {"turns": {"busy_s": 0.05, "rows": 512, "tables": 1}}
"""What a layout has of its own: `busy_s` are seconds that a forward pass of a micro-batch takes beside, and a backward
pass twice; the others hardly compute."""
ROUNDS, TIMES = 5, 3
"""Rounds of all systems, whose median counts, and the iterations of each."""


def strided(layout: str, order: str, quick: bool) -> list[Row]:
    """Plain order and a plan."""
    why = unavailable()
    if why:
        sys.exit(f"no lab here: {why}")
    asked = {
        "layout": layout, "order": order, "each": STAGES, "rows": 256, "width": 128, "tables": 4, "batches": 4,
        "budget_s": 4.0, "rounds": 1 if quick else ROUNDS, "times": TIMES, "busy_s": 0.0, **SHAPES.get(layout, {}),
    }  # fmt: skip
    found = _in_lab(asked)
    plain = found["times"]["plain order"]
    return [
        {
            "case": f"strided, {layout}, {order}",
            "system": system,
            "iteration_us": us,
            "gain": plain / us,
            "predicted_us": found["predicted_us"][system],
            "over_predicted": us / found["predicted_us"][system] - 1,
            "bound_us": found["bound_us"],
            "turns": found["link_turns"] if system == "stretto" else 0,
            "cpu_share": found["cpu_us"] / (os.cpu_count() or 1) / us,
        }
        for system, us in found["times"].items()
    ]


def _in_lab(asked: dict[str, Any]) -> dict[str, Any]:
    lab = Lab(hosts=HOSTS, ranks_per_host=STAGES, uplinks=UPLINKS[asked["layout"]])
    with tempfile.TemporaryDirectory() as name, lab:
        folder = Path(name)
        lab.cluster().save(folder / "truth.yaml")
        (folder / "asked.json").write_text(json.dumps(asked))
        done = lab.run([sys.executable, str(RANK), name], timeout_s=LIMIT_S)
        if done.failed is not None or done.timed_out:
            sys.exit(f"strided: {done.why}")
        found: dict[str, Any] = json.loads((folder / "found.json").read_text())
        return found


CASES: dict[str, Callable[[bool], list[Row]]] = {
    f"strided {layout} {order}": partial(strided, layout, order) for layout in UPLINKS for order in ("gpipe", "1f1b")
}
