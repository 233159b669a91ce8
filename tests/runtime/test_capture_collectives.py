# SPDX-License-Identifier: Apache-2.0
"""Capture on four real ranks that call torch.distributed in every way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from stretto import InvalidInput
from stretto.torch import capture
from stretto.workload import Op, Workload

Outcomes = dict[str, list[Any]]


@pytest.fixture(scope="module")
def outcomes(job: Callable[..., Outcomes], tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return job("capture_collectives_job.py", tmp_path_factory.mktemp("collectives"), ranks=4)


def workload_of(outcomes: Outcomes, name: str) -> Workload:
    """What a scenario recorded; the same on all ranks."""
    first = outcomes[name][0]
    assert isinstance(first, Workload), first
    assert all(other == first for other in outcomes[name])
    return first


def refused(outcomes: Outcomes, name: str) -> str:
    """Why a scenario could not be recorded; the same on all ranks."""
    first = outcomes[name][0]
    assert isinstance(first, str)
    assert set(outcomes[name]) == {first}
    return first


def waiters(workload: Workload, comm: str, *, lag: int = 0) -> list[int]:
    """Where the compute-ops that wait for a comm-op stand."""
    return [
        at
        for at, op in enumerate(workload.ops)
        if not op.is_comm and any((dep.op, dep.lag, dep.why) == (comm, lag, "wait") for dep in op.after)
    ]


def submitter(workload: Workload, comm: Op) -> int:
    """Where the last compute-op before a submit stands."""
    found = [workload.index[dep.op] for dep in comm.after if dep.why == "submit" and not workload.op(dep.op).is_comm]
    assert found
    return max(found)


def test_every_collective_with_its_bytes_and_root_in_order(outcomes: Outcomes) -> None:
    workload = workload_of(outcomes, "every_kind")
    assert [(op.kind, op.nbytes, op.root) for op in workload.comm_ops] == [
        ("all_reduce", 400, 0),
        ("all_gather", 800, 0),
        ("all_gather", 960, 0),
        ("reduce_scatter", 1120, 0),
        ("all_to_all", 1280, 0),
        ("broadcast", 360, 1),
        ("reduce", 440, 2),
        ("gather", 1920, 3),
        ("scatter", 2080, 1),
        ("all_reduce", 1, 0),
    ]
    assert workload.comm_ops[-1].name == "step.barrier.0"
    assert all(op.groups == () for op in workload.comm_ops)


def test_a_blocking_collective_comes_between_what_was_before_and_after(outcomes: Outcomes) -> None:
    workload = workload_of(outcomes, "every_kind")
    first = workload.comm_ops[0]
    assert waiters(workload, first.name) == [submitter(workload, first) + 2]
    assert first.duration_us > 0


def test_ops_under_way_together_keep_the_order_of_submits_and_waits(outcomes: Outcomes) -> None:
    workload = workload_of(outcomes, "overlapped")
    first, second = workload.comm_ops
    assert (first.kind, second.kind) == ("all_reduce", "all_to_all")
    assert submitter(workload, first) < submitter(workload, second)
    (second_waited,), (first_waited,) = waiters(workload, second.name), waiters(workload, first.name)
    assert submitter(workload, second) < second_waited < first_waited


def test_disjoint_groups_that_do_the_same_are_one_op(outcomes: Outcomes) -> None:
    workload = workload_of(outcomes, "subgroups")
    (gathered,) = [op for op in workload.comm_ops if op.kind == "all_gather"]
    assert gathered.groups == ((0, 2), (1, 3))
    (broadcast,) = [op for op in workload.comm_ops if op.kind == "broadcast"]
    assert (broadcast.groups, broadcast.root) == (((0, 1),), 1)
    reduced = {group for op in workload.comm_ops if op.kind == "all_reduce" for group in op.groups}
    assert reduced == {(0, 1), (2, 3)}


def test_a_group_of_one_rank_does_not_communicate(outcomes: Outcomes) -> None:
    workload = workload_of(outcomes, "subgroups")
    assert all(op.nbytes != 40 for op in workload.comm_ops)


def test_messages_join_the_programs_of_two_stages(outcomes: Outcomes) -> None:
    workload = workload_of(outcomes, "stages")
    (message,) = [op for op in workload.comm_ops if op.kind == "send"]
    assert (message.groups, message.nbytes) == (((0, 2), (1, 3)), 2000)
    waiting = {workload.ops[at].ranks for at in waiters(workload, message.name)}
    assert waiting == {(0, 1), (2, 3)}
    assert {op.ranks for op in workload.ops if not op.is_comm} == {(0, 1), (2, 3)}
    sums = [op for op in workload.comm_ops if op.kind == "all_reduce"]
    assert sorted(group for op in sums for group in op.groups) == [(0, 1), (2, 3)]


def test_a_ring_of_messages_is_cut_where_a_rank_would_be_in_two_groups(outcomes: Outcomes) -> None:
    workload = workload_of(outcomes, "ring")
    groups = [op.groups for op in workload.comm_ops]
    assert sorted(group for op in groups for group in op) == [(0, 1), (1, 2), (2, 3), (3, 0)]
    assert len(groups) == 2


def test_a_wait_in_the_next_iteration_has_a_lag(outcomes: Outcomes) -> None:
    workload = workload_of(outcomes, "across_iterations")
    (op,) = workload.comm_ops
    assert waiters(workload, op.name) == []
    assert len(waiters(workload, op.name, lag=1)) == 1


def test_an_iteration_follows_the_one_before(outcomes: Outcomes) -> None:
    workload = workload_of(outcomes, "overlapped")
    blocks = [op for op in workload.ops if not op.is_comm]
    assert [(dep.op, dep.lag) for dep in blocks[0].after] == [(blocks[-1].name, 1)]


def test_functional_collectives_and_futures_are_waited_for_where_they_are_used(outcomes: Outcomes) -> None:
    workload = workload_of(outcomes, "functional_and_futures")
    assert [op.nbytes for op in workload.comm_ops] == [400, 800]
    for op in workload.comm_ops:
        (waited,) = waiters(workload, op.name)
        assert waited > submitter(workload, op) + 1
        assert not workload.ops[waited - 1].is_comm


def test_a_size_that_follows_the_data_is_an_upper_bound(outcomes: Outcomes) -> None:
    (op,) = workload_of(outcomes, "sizes_that_follow_the_data").comm_ops
    assert op.at_most
    assert op.nbytes == 4 * (4 * (10 + 4) + 1)


@pytest.mark.parametrize(
    ("scenario", "said"),
    [
        ("another_op_sometimes", "the first does not have op 1 (broadcast of ranks 0, 1, 2, 3)"),
        ("another_wait_sometimes", "the wait for op 1 (all_reduce of ranks 0, 1, 2, 3) there, the wait for op 0"),
        ("another_size_sometimes", "op 0 (all_reduce of ranks 0, 1, 2, 3) has 408 to 416 bytes"),
        ("another_order_on_a_rank", "ranks 0 and 1 do not submit in one order: op 0"),
        ("too_few_steps", "step() was called 4 times, fewer than skip + iterations = 5"),
        ("receive_from_anybody", "recv without src"),
    ],
)
def test_what_has_no_one_program_is_refused_on_every_rank(outcomes: Outcomes, scenario: str, said: str) -> None:
    assert said in refused(outcomes, scenario)


def test_results_are_right_and_the_hooks_are_gone_after_the_last_iteration(outcomes: Outcomes) -> None:
    for seen in outcomes["traceless"]:
        assert seen == [[True, 6.0, True]] * 4 + [[False, 6.0, True]]


def test_an_error_of_the_loop_comes_out_as_it_is(outcomes: Outcomes) -> None:
    assert outcomes["an_error_inside"] == [["of the training loop", False]] * 4


def test_a_clock_offset_is_within_its_error(outcomes: Outcomes) -> None:
    measured = outcomes["clocks"][0]
    assert len(measured) == 3
    for offset_us, error_us in measured:
        assert abs(offset_us) <= error_us


def test_arguments_and_a_missing_job_are_named() -> None:
    with pytest.raises(InvalidInput, match="skip: must be >= 1"):
        capture(skip=0)
    with pytest.raises(InvalidInput, match=r"iterations: must be 1\.\.1000, not 0"):
        capture(iterations=0)
    with pytest.raises(InvalidInput, match="init_process_group"), capture():
        pass
    with pytest.raises(InvalidInput, match="after the `with` block"):
        print(capture().workload)
