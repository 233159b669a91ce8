# SPDX-License-Identifier: Apache-2.0
"""Capture of models that two real ranks train: a hybrid-parallel DLRM, a GPT with DDP and with FSDP2."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stretto.workload import Workload

Outcomes = dict[str, list[Any]]

GPT_PARAMETERS = 2 * (2 * 2 * 64 + 64 * 192 + 192 + 64 * 64 + 64 + 2 * 64 * 256 + 256 + 64) + (
    128 * 64 + 32 * 64 + 2 * 64 + 64 * 128 + 128
)


@pytest.fixture(scope="module")
def outcomes(job: Callable[..., Outcomes], tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return job("capture_models_job.py", tmp_path_factory.mktemp("models"), ranks=2)


def recorded(outcomes: Outcomes, name: str) -> Workload:
    first, second = outcomes[name]
    assert isinstance(first, Workload), first
    assert first == second
    return first


def waits_of(workload: Workload) -> dict[str, str]:
    """The compute-op that waits for each comm-op."""
    compute = [op for op in workload.ops if not op.is_comm]
    return {dep.op: op.name for op in compute for dep in op.after if dep.why == "wait" and not dep.lag}


def test_ddp_sums_every_gradient_once_in_buckets_during_the_backward_pass(outcomes: Outcomes) -> None:
    workload = recorded(outcomes, "gpt_ddp")
    assert {(op.kind, op.phase) for op in workload.comm_ops} == {("all_reduce", "backward")}
    assert sum(op.nbytes for op in workload.comm_ops) == 4 * GPT_PARAMETERS
    assert len(workload.comm_ops) >= 3
    assert [op.name for op in workload.comm_ops][:2] == ["backward.all_reduce.bucket.0", "backward.all_reduce.bucket.1"]


def test_ddp_waits_for_all_buckets_at_the_end_of_the_backward_pass(outcomes: Outcomes) -> None:
    workload = recorded(outcomes, "gpt_ddp")
    waits = waits_of(workload)
    assert set(waits) == {op.name for op in workload.comm_ops}
    (waiting,) = set(waits.values())
    last_submit = max(workload.index[op.name] for op in workload.comm_ops)
    assert workload.index[waiting] > last_submit


def test_buckets_are_submitted_while_the_backward_pass_goes_on(outcomes: Outcomes) -> None:
    workload = recorded(outcomes, "gpt_ddp")
    submits = [dep.op for op in workload.comm_ops for dep in op.after if dep.why == "submit"]
    assert len(set(submits)) == len(workload.comm_ops)
    assert all(workload.op(name).phase == "backward" for name in submits)


def test_phases_follow_the_training_step(outcomes: Outcomes) -> None:
    phases = [op.phase for op in recorded(outcomes, "gpt_ddp").ops]
    assert [phase for at, phase in enumerate(phases) if phase not in phases[:at]][-3:] == [
        "forward",
        "backward",
        "optimizer",
    ]


def test_fsdp_gathers_shards_in_both_passes_and_scatters_gradients(outcomes: Outcomes) -> None:
    workload = recorded(outcomes, "gpt_fsdp")
    kinds = [(op.phase, op.kind) for op in workload.comm_ops]
    assert kinds.count(("forward", "all_gather")) == 3
    assert kinds.count(("backward", "all_gather")) == 2
    assert kinds.count(("backward", "reduce_scatter")) == 3
    scattered = sum(op.nbytes for op in workload.comm_ops if op.kind == "reduce_scatter")
    assert scattered == 4 * GPT_PARAMETERS
    assert set(waits_of(workload)) == {op.name for op in workload.comm_ops}
    assert any("do not tell when they end" in note for note in workload.notes)


def test_a_communication_hook_in_python_is_seen_with_what_it_sends(outcomes: Outcomes) -> None:
    workload = recorded(outcomes, "gpt_compressed")
    assert sum(op.nbytes for op in workload.comm_ops) == 2 * GPT_PARAMETERS
    assert set(waits_of(workload)) == {op.name for op in workload.comm_ops}


def test_gradient_accumulation_sums_in_the_last_backward_pass_only(outcomes: Outcomes) -> None:
    workload = recorded(outcomes, "gpt_accumulated")
    assert sum(op.nbytes for op in workload.comm_ops) == 4 * GPT_PARAMETERS
    first = min(workload.index[op.name] for op in workload.comm_ops)
    assert [op.phase for op in workload.ops[:first]].count("backward") == 2


def test_dlrm_exchanges_indices_rows_and_gradients(outcomes: Outcomes) -> None:
    workload = recorded(outcomes, "dlrm_hybrid")
    exchanged = [(op.phase, op.nbytes) for op in workload.comm_ops if op.kind == "all_to_all"]
    indices, rows = 32 * 4 * 8, 32 * 4 * 16 * 4
    assert exchanged == [("forward", indices), ("forward", rows), ("backward", rows)]
    assert {op.phase for op in workload.comm_ops if op.kind == "all_reduce"} == {"backward"}


def test_dlrm_overlaps_the_rows_with_the_bottom_perceptron_and_their_gradients_with_its_sums(
    outcomes: Outcomes,
) -> None:
    workload = recorded(outcomes, "dlrm_hybrid")
    waits = waits_of(workload)
    _, rows, gradients = (op for op in workload.comm_ops if op.kind == "all_to_all")
    between = workload.ops[workload.index[rows.name] + 1 : workload.index[waits[rows.name]]]
    assert any(not op.is_comm for op in between)
    under_way = workload.ops[workload.index[gradients.name] + 1 : workload.index[waits[gradients.name]]]
    assert any(op.kind == "all_reduce" for op in under_way)


def test_broadcasts_of_buffers_that_ddp_waits_for_itself_are_seen(outcomes: Outcomes) -> None:
    workload = recorded(outcomes, "buffers")
    broadcasts = [op for op in workload.comm_ops if op.kind == "broadcast"]
    assert [(op.phase, op.nbytes) for op in broadcasts] == [("forward", 2 * 64 * 4), ("forward", 8)]
    assert {op.name for op in broadcasts} <= set(waits_of(workload)) | {
        dep.op for op in workload.comm_ops for dep in op.after if dep.why == "submit"
    }


def test_training_is_bit_for_bit_what_it_is_without(outcomes: Outcomes) -> None:
    (first, second), (other_first, other_second) = outcomes["unchanged_training"]
    assert first == second == other_first == other_second


def test_the_examples_write_workloads_that_can_be_read(job: Callable[..., Outcomes], tmp_path: Path) -> None:
    found = job("capture_examples_job.py", tmp_path, ranks=2, reporting=1)
    assert {"all_to_all", "all_reduce"} == set(found["capture_dlrm"][0])
    assert {"all_reduce"} == set(found["capture_gpt"][0])
