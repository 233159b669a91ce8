# SPDX-License-Identifier: Apache-2.0
"""STRETTO_BUCKET_MB=auto: what one start has recorded decides on the buckets of the next."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from stretto.cluster import Cluster
from stretto.control.bucket_choice import ENDING, MIB, SIZES_MB, asked, choose, keep, kept_size
from stretto.control.messages import encode_captured
from stretto.control.worker import costs_of
from stretto.errors import InvalidInput
from stretto.planner import api
from stretto.planner.buckets import ALIKE, rebucket
from stretto.workload import Dep, Op, Workload

COMMAND = ["torchrun", "train.py"]


def recorded(sizes: list[float], computes: list[float]) -> Workload:
    """A backward pass with a bucket behind each of its parts, as a recording has it."""
    ops: list[Op] = [Op(name="forward", kind="compute", duration_us=computes[0])]
    for at, (nbytes, us) in enumerate(zip(sizes, computes, strict=True)):
        ops.append(Op(name=f"backward.{at}", kind="compute", duration_us=us, phase="backward"))
        bucket = f"all_reduce.bucket.{at}"
        ops.append(Op(name=bucket, kind="all_reduce", nbytes=nbytes, after=(Dep(op=f"backward.{at}", why="submit"),)))
    waits = tuple(Dep(op=f"all_reduce.bucket.{at}") for at in range(len(sizes)))
    ops.append(Op(name="optimizer", kind="compute", duration_us=10.0, after=waits))
    return Workload(name="step", num_ranks=4, ops=tuple(ops))


@pytest.mark.parametrize("seed", range(4))
def test_the_choice_is_the_best_of_all_sizes(seed: int) -> None:
    draw = random.Random(seed)
    count = draw.randint(1, 3)
    step = recorded([draw.uniform(1, 20) * MIB for _ in range(count)], [draw.uniform(10, 4000) for _ in range(count)])
    cluster = Cluster.load("ring:4")
    captured = encode_captured(step, cluster, 100.0)
    found = choose(captured, 2.0)
    assert found is not None
    now, best = found
    each = {
        size: api.plan(
            rebucket(step, size * MIB), cluster, budget_s=0.3, costs=costs_of(captured, {})
        ).plan.iteration_us
        for size in SIZES_MB
    }
    least = min(*each.values(), now.plan_us)
    # Two searches of the same step end close to each other.
    assert best.plan_us <= least * (1 + 3 * ALIKE)
    assert not best.nbytes or best.plan_us < now.plan_us


def test_a_step_without_buckets_is_left_alone() -> None:
    ops = (
        Op(name="a", kind="compute", duration_us=5.0),
        Op(name="s", kind="all_reduce", nbytes=1e6, after=(Dep(op="a"),)),
    )
    step = Workload(name="step", num_ranks=4, ops=ops)
    assert choose(encode_captured(step, Cluster.load("ring:4"), 0.0), 0.5) is None


def test_a_size_is_kept_for_the_same_command_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "plans"
    assert kept_size(folder, COMMAND) == ""
    assert kept_size(None, COMMAND) == ""
    keep(folder, COMMAND, 4.0)
    assert kept_size(folder, COMMAND) == "4"
    assert kept_size(folder, [*COMMAND, "--more"]) == ""
    monkeypatch.chdir(tmp_path)
    assert kept_size(folder, COMMAND) == ""


@pytest.mark.parametrize("text", ["", "{}", '{"cap_mb": -1}', '{"cap_mb": 4, "more": 1}', "[4]"])
def test_a_file_that_says_no_size_is_ignored(tmp_path: Path, text: str) -> None:
    folder = tmp_path / "plans"
    keep(folder, COMMAND, 4.0)
    next(folder.glob(f"*{ENDING}")).write_text(text)
    assert kept_size(folder, COMMAND) == ""


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidInput, match="file"):
        keep(tmp_path / "file" / "plans", COMMAND, 4.0)


@pytest.mark.parametrize(("said", "found"), [("auto", True), ("Auto ", True), ("4", False), ("", False)])
def test_only_auto_asks(monkeypatch: pytest.MonkeyPatch, said: str, found: bool) -> None:
    monkeypatch.setenv("STRETTO_BUCKET_MB", said)
    assert asked() == found
