# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from stretto.workload import Workload

Run = Callable[..., str]


def test_models_are_listed_with_variants_and_options(good: Run) -> None:
    text = good("workload", "list")
    assert {"dlrm:A2,", "xlmr:xl,", "resnet:152"} <= set(text.split())
    assert "prefetch" not in text
    assert "ranks=128" in good("workload", "list", "--options")


def test_a_model_is_shown_op_by_op_with_totals(good: Run) -> None:
    text = good("workload", "show", "dlrm:A2,ranks=16")
    for word in ("a2a-emb-bwd", "all_to_all", "1.14 GB", "ar-top-mlp -1", "3000 assumed", "16,384"):
        assert word in text
    totals = text[text.index("compute, forward") :]
    assert "in 3 ops" in totals


def test_long_workloads_are_cut_and_can_be_seen_whole(good: Run) -> None:
    assert "49 more ops; --ops 0 shows all" in good("workload", "show", "gpt:1.3b", "--ops", "53")
    assert "more ops" not in good("workload", "show", "gpt:1.3b", "--ops", "0")
    assert "8 ranks" in good("workload", "show", "gpt:125m,ranks=16,pipeline=2,micro_batches=2")


def test_names_of_ops_are_never_cut(good: Run) -> None:
    spec = "gpt:125m,ranks=16,tensor=2,pipeline=2,micro_batches=4,mode=zero3"
    text = good("workload", "show", spec, "--ops", "0")
    assert "\u2026" not in text
    shown = {line.split()[0] for line in text.splitlines() if line.strip()}
    assert {op.name for op in Workload.load(spec).ops} <= shown


def test_a_step_without_communication_says_so(good: Run) -> None:
    assert "no communication" in good("workload", "show", "dlrm:A2,ranks=1")
    assert "no communication" not in good("workload", "show", "dlrm:A2,ranks=2")


def test_converting_keeps_everything(good: Run, tmp_path: Path) -> None:
    for ending in ("yaml", "json"):
        path = tmp_path / f"a2.{ending}"
        said = good("workload", "convert", "dlrm:A2", str(path))
        assert Workload.load(path) == Workload.load("dlrm:A2")
        assert Workload.load(path).digest in said
    assert good("-q", "workload", "show", str(path)) == good("workload", "show", "-q", "dlrm:A2")


def test_a_workload_can_become_chakra_traces_and_come_back(good: Run, tmp_path: Path) -> None:
    assert "files" in good("workload", "convert", "resnet:50,ranks=2", str(tmp_path / "traces"))
    again = Workload.load(tmp_path / "traces")
    assert again.num_ranks == 2
    assert sum(op.nbytes for op in again.comm_ops) == sum(op.nbytes for op in Workload.load("resnet:50").comm_ops)


def test_wrong_input_is_one_line(bad: Run, tmp_path: Path) -> None:
    assert "unknown model 'bert'; choose from: dlrm, gpt" in bad("workload", "show", "bert")
    assert "--ops: must be >= 0" in bad("workload", "show", "dlrm:A2", "--ops", "-1")
    assert "OUT: " in bad("workload", "convert", "dlrm:A2", str(tmp_path / "a.xml"))
    assert "there is no directory" in bad("workload", "convert", "dlrm:A2", str(tmp_path / "none" / "a.yaml"))
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert "not a regular file" in bad("workload", "show", str(pipe))
    file = tmp_path / "w.yaml"
    file.write_text("stretto: workload\nversion: 1\nname: x\nranks: 2\nops: [{name: a, nbytes: 5}]")
    assert f"{file}: ops[0] (a): a compute-op has no nbytes and no groups" in bad("workload", "show", str(file))
