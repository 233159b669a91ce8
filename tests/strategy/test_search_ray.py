"""Trials as tasks of a local Ray."""

from __future__ import annotations

import sys
from pathlib import Path

from stretto.errors import Infeasible
from stretto.strategy import ModelSpec, Variable
from stretto.strategy.builders import build
from stretto.strategy.trials_ray import ray_trials

JOB = """
import json, os, pathlib
strategy = json.loads(pathlib.Path(os.environ["STRETTO_STRATEGY"]).read_text())
if strategy["name"] == "zero1":
    raise SystemExit("cannot shard")
path = os.environ["STRETTO_TRIAL"].split(",", 2)[2]
pathlib.Path(path).write_text(json.dumps({"ranks": 2, "median_us": 100.0 * len(strategy["name"])}))
"""


def test_ray_tasks_bring_times_and_reasons(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(JOB)
    model = ModelSpec(name="one", variables=(Variable(name="w", shape=(8, 8)),))
    asked = [build(name, model, 2) for name in ("ps", "zero1", "all_reduce")]
    with ray_trials([sys.executable, str(script)], warmup=1, timed=1, timeout_s=60.0, jobs=2) as (run_all, at_once):
        first, second, third = run_all(asked)
    assert at_once == 2
    assert (first, third) == (200.0, 1000.0)
    assert isinstance(second, Infeasible) and "cannot shard" in str(second)
