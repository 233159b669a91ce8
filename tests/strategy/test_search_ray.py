# SPDX-License-Identifier: Apache-2.0
"""Trials as actors of a local Ray."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path

from local_ray import started

from stretto.errors import Infeasible
from stretto.strategy import ModelSpec, Variable
from stretto.strategy.builders import build
from stretto.strategy.files import model_text
from stretto.strategy.requests import Reference
from stretto.strategy.search import search
from stretto.strategy.trials_ray import ray_trials

MODEL = ModelSpec(name="one", variables=(Variable(name="w", shape=(8, 8)),))
JOB = """
import json, os, pathlib, sys, time
folder = pathlib.Path(os.environ["STRETTO_TRIAL"].partition(",")[2])
(folder / "model.hosts").write_text("[0, 1]")
(folder / ".model").write_text(MODEL)
(folder / ".model").replace(folder / "model.json")
for number in range(1000):
    path = folder / f"{number}.json"
    while not path.exists():
        time.sleep(0.005)
    asked = json.loads(path.read_text())
    names = [json.loads(arm["strategy"])["name"] if "strategy" in arm else "ddp" for arm in asked["arms"]]
    if not names:
        break
    if names == ["zero1"]:
        raise SystemExit("cannot shard")
    times = [[100.0 * len(name)] * asked["rounds"] for name in names]
    (folder / ".answer").write_text(json.dumps({"ranks": 2, "times_us": times, "why": [""] * len(names)}))
    (folder / ".answer").replace(folder / f"{number}.answer")
with open(NOTE, "a") as note:
    note.write("ended\\n")
"""


def test_ray_actors_bring_times_and_reasons_and_a_search_spreads_over_them(tmp_path: Path) -> None:
    script, note = tmp_path / "job.py", tmp_path / "note"
    script.write_text(f"MODEL, NOTE = {model_text(MODEL, as_json=True)!r}, {str(note)!r}\n{JOB}")
    asked = [build(name, MODEL, 2) for name in ("ps", "zero1", "all_reduce")]
    with ExitStack() as stack:
        job = [sys.executable, str(script)]
        bench = started(stack, lambda: ray_trials(job, warmup=1, timed=1, timeout_s=60.0, jobs=2))
        assert bench.places == 2
        first, second, third = bench.run_all(asked)
        assert (first, third) == (200.0, 1000.0)
        assert isinstance(second, Infeasible) and "cannot shard" in str(second)
        assert bench.rounds([asked[0], Reference()], 3) == [[200.0] * 3, [300.0] * 3]
        found = search(MODEL, 2, bench, trials=6, references=[Reference()])
    assert found.best_us == 200.0 and found.kept is None
    assert note.read_text().count("ended") == 2
