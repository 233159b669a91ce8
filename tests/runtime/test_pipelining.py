# SPDX-License-Identifier: Apache-2.0
"""Our schedules under PyTorch's pipeline runtime: the same training; and wrong ones are one error on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from stretto.pipeline import MAKERS, STYLES, interleaved, make, with_comms
from stretto.runtime.torch_backend.torch_versions import pipeline_actions

Outcomes = dict[str, list[Any]]
TRAINED = ["stock", "gpipe", "1f1b", "mirrored", "eager", "delayed", "zb_h1", "zb_h2", "mixed", "blocking"]


@pytest.fixture(scope="module")
def outcomes(job: Callable[..., Outcomes], tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return job("pipelining_job.py", tmp_path_factory.mktemp("pipelining"), ranks=2)


@pytest.mark.parametrize("name", TRAINED)
def test_every_schedule_trains_as_one_process_does(outcomes: Outcomes, name: str) -> None:
    for rank in (0, 1):
        alone, mine = outcomes["alone"][rank], outcomes[name][rank]
        assert mine["losses"] == [pytest.approx(step, rel=1e-5) for step in alone["losses"]]
        assert mine["grads"] == pytest.approx(alone["grads"], rel=1e-3, abs=1e-6)
    assert outcomes[name][1]["losses"] == outcomes["1f1b"][1]["losses"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("swapped", "rank 0: csv: message 0 from rank 0 to 1 is 0SEND_F0, where the receiver expects 0SEND_F1"),
        ("one_rank_differs", "rank 1 has another schedule (gpipe) than rank 0 (1f1b)"),
        ("one_rank_wrong", "rank 1: csv: message 0 from rank 0 to 1"),
        ("three_stages", "rank 0: 1f1b: is for 3 ranks, the group has 2"),
        ("other_stage", "rank 0: stages: rank 0 has [1], the schedule gives it [0]"),
    ],
)
def test_a_wrong_schedule_is_the_same_error_on_every_rank(outcomes: Outcomes, name: str, message: str) -> None:
    assert all(said.startswith(message) for said in outcomes[name])


def torch_actions(rows: list[list[str]]) -> Any:
    from torch.distributed.pipelining.schedules import _Action

    return {rank: [_Action.from_str(action) for action in row] for rank, row in enumerate(rows)}


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("style", STYLES)
def test_pytorch_reads_writes_and_simulates_our_schedules(name: str, style: str) -> None:
    from torch.distributed.pipelining.schedules import _simulate_comms_compute, _validate_schedule

    schedule = with_comms(make(name, 4, 8), style)
    rows = pipeline_actions([list(map(str, row)) for row in schedule.ranks])
    # What versions add and leave out is about when gradients are reduced and sends waited for.
    kept = [[action for action in row if "WAIT" not in action and "REDUCE_GRAD" not in action] for row in rows]
    assert kept == [[str(action) for action in row if action.kind != "REDUCE_GRAD"] for row in schedule.ranks]
    theirs = torch_actions(rows)
    assert [[str(action) for action in row] for row in theirs.values()] == rows
    homes = _validate_schedule(theirs, len(schedule.ranks), schedule.num_stages, schedule.num_microbatches)
    assert tuple(homes[stage] for stage in range(schedule.num_stages)) == schedule.stage_rank
    if style != "ahead":
        # Their simulator lets a receive wait for its send, which is our blocking transport.
        _simulate_comms_compute(torch_actions(kept), lambda stage: schedule.stage_rank[stage], schedule.num_stages)


@pytest.mark.parametrize(("ranks", "per_rank", "microbatches"), [(2, 2, 4), (4, 2, 8), (2, 3, 6), (3, 2, 9)])
def test_interleaved_is_pytorchs_own_order(ranks: int, per_rank: int, microbatches: int) -> None:
    from torch.distributed.pipelining.schedules import ScheduleInterleaved1F1B

    class Bare(ScheduleInterleaved1F1B):
        """Only what the calculation looks at."""

        def __init__(self) -> None:
            self.n_local_stages, self.pp_group_size, self._n_microbatches = per_rank, ranks, microbatches
            self.number_of_rounds = max(1, microbatches // ranks)
            self.microbatches_per_round = microbatches // self.number_of_rounds

    ours = interleaved(ranks * per_rank, microbatches, per_rank=per_rank)
    for rank, row in enumerate(ours.ranks):
        theirs = [str(action) for action in Bare()._calculate_single_rank_operations(rank) if action is not None]
        assert list(map(str, row)) == theirs
