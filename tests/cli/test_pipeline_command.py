# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from stretto.pipeline import Schedule, check, eager_1f1b
from stretto.workload import Workload

Run = Callable[..., str]


def test_a_schedule_is_drawn_and_proved(good: Run) -> None:
    text = good("pipeline", "show", "eager_1f1b", "--stages", "3", "--microbatches", "6", "--delay", "1")
    for word in ("3 stages on 3 ranks", "rank 2 │", "▒", "in flight at most: 6 4 2", "cannot deadlock over: async"):
        assert word in text
    assert "(blocking)" in good("pipeline", "show", "1f1b", "--stages", "2", "--transport", "blocking")
    assert "in flight at most: 1" in good("pipeline", "show", "1f1b", "--stages", "1")


def test_schedules_are_compared(good: Run, tmp_path: Path) -> None:
    rows = tmp_path / "rows.json"
    options = ["--stages", "2", "--microbatches", "16", "--forward", "10", "--transfer", "6", "--json", str(rows)]
    text = good("pipeline", "simulate", *options)
    assert "of bound" in text
    times = {row["schedule"]: row for row in json.loads(rows.read_text())["rows"]}
    assert times["1f1b"]["blocking_us"] == pytest.approx(702.0)
    assert times["eager_1f1b"]["overlapped_us"] < times["1f1b"]["overlapped_us"] < times["1f1b"]["blocking_us"]
    one = good("pipeline", "simulate", "--schedules", "interleaved", "--stages", "4", "--forward", "10,11,12,13")
    assert "interleaved" in one


def test_a_model_of_the_paper_is_simulated(good: Run, tmp_path: Path) -> None:
    rows = tmp_path / "rows.json"
    text = good("pipeline", "simulate", "--model", "utrans", "--microbatches", "4", "--json", str(rows))
    assert "over Alpa" in text and "upper_bound" in text
    assert len(json.loads(rows.read_text())["rows"]) == 7


def test_the_search_says_how_far_from_the_bound(good: Run, tmp_path: Path) -> None:
    path = tmp_path / "best.csv"
    text = good(
        "pipeline", "search", "--stages", "2", "--microbatches", "8", "--transfer", "6", "--activation", "1G",
        "--fixed", "2G", "--cap", "6G", "-o", str(path),
    )  # fmt: skip
    assert "0.00 % above the lower bound" in text
    assert "no other warm-ups and delays are faster" in text
    check(Schedule.load(path))


def test_stages_are_laid_out_over_a_cluster(good: Run, bad: Run, tmp_path: Path) -> None:
    model, rows, best = tmp_path / "model.yaml", tmp_path / "rows.json", tmp_path / "best.csv"
    layers = "[{name: b, repeat: 4, forward_us: 400, output: [64, 64], parameters: 100000, shared_elements: 100000}]"
    model.write_text(f"version: 1\nkind: pipeline_model\nname: small\nsamples: 8\nlayers: {layers}\n")
    text = good(
        "pipeline", "meshes", str(model), "-c", "p3_8xlarge:2", "--stages", "2", "--microbatches", "4", "--cap", "16G",
        "--json", str(rows), "-o", str(best),
    )  # fmt: skip
    assert "all others have a higher bound" in text
    first = json.loads(rows.read_text())["layouts"][0]
    assert [stage["devices"] for stage in first["stages"]] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert [stage["mesh"] for stage in first["stages"]] == [[4, 1], [4, 1]]
    check(Schedule.load(best))
    assert "no layout" in bad("pipeline", "meshes", str(model), "-c", "p3_8xlarge:2", "--cap", "1K")


def test_a_schedule_is_exported_for_pytorch_and_for_the_planner(good: Run, tmp_path: Path) -> None:
    path, step = tmp_path / "s.csv", tmp_path / "step.yaml"
    text = good("pipeline", "export", "eager_1f1b", "-o", str(path), "--workload", str(step), "--bytes", "8M")
    assert "format compute_comms" in text
    assert Schedule.load(path).compute_only().ranks == eager_1f1b(2, 8).ranks
    assert len(Workload.load(step).comm_ops) == 16
    assert "1RECV_F0" in good("pipeline", "show", str(path))
    assert good("pipeline", "export", "1f1b", "--microbatches", "2", "--comm", "none").splitlines() == [
        "0F0,0F1,0B0,0B1", "1F0,1B0,1F1,1B1",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("show nonsense", "unknown schedule 'nonsense'; choose from: gpipe"),
        ("show nowhere.csv", "nowhere.csv: No such file"),
        ("show 1f1b --delay 1", "--delay: 1f1b has none"),
        ("show 1f1b --transport tcp", "unknown transport 'tcp'"),
        ("show 1f1b --forward 1,2", "--forward: 2 numbers where 4 are needed"),
        ("show 1f1b --forward x", "expected microseconds"),
        ("show 1f1b --forward nan", "must be 0 to"),
        ("show nowhere.csv --delay 1", "--delay: nowhere.csv has none"),
        ("simulate --model bert", "unknown model 'bert'"),
        ("simulate --model utrans --stages 3", "--stages: --model utrans has its own"),
        ("export 1f1b --bytes x", "--bytes: size 'x'"),
        ("simulate --schedules interleaved --stages 3", "3 stages cannot be dealt out"),
        ("search --activation 4G --cap 1G", "stage 0 needs"),
        ("export 1f1b --comm loud", "unknown style of communication 'loud'"),
    ],
)
def test_wrong_input_is_one_line(arguments: str, message: str, bad: Run) -> None:
    assert message in bad("pipeline", *arguments.split())


def test_a_damaged_file_is_one_line(bad: Run, tmp_path: Path) -> None:
    path = tmp_path / "s.csv"
    path.write_text("0F0,0B0\n1F0,oops\n")
    assert "line 2, cell 2: 'oops' is not an action" in bad("pipeline", "show", str(path))
    path.write_text("0F0,0B0\n1F0\n")
    assert "stage 1, micro-batch 0: has F" in bad("pipeline", "show", str(path))
    path.write_text("0UNSHARD\n")
    assert "s: computes nothing" in bad("pipeline", "show", str(path))
    path.write_text('"' + "0F0," * 50_000 + '"\n')
    assert "s: is not a CSV file: field larger than" in bad("pipeline", "show", str(path))


def test_the_bound_is_not_claimed_where_ranks_have_several_stages(good: Run, tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    good("pipeline", "simulate", "--schedules", "1f1b,interleaved", "--json", str(path))
    assert [row["bound_us"] is None for row in json.loads(path.read_text())["rows"]] == [False, True]
