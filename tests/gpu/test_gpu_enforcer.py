# SPDX-License-Identifier: Apache-2.0
"""Plans above NCCL, on several ranks: run with ``make test-gpu``, on a machine that has a GPU."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

LIMIT_S = 240.0
JOBS = Path(__file__).parents[1] / "jobs"
Told = list[dict[str, Any]]


def launch(folder: Path, ranks: int, *mode: str, reporting: int = 0) -> list[Any]:
    """Every rank in a process of its own, on the one GPU if need be; what each reports, from the one on that is asked.

    With `mode` "alone" the ranks before that one never end.
    """
    assert torch.cuda.is_available(), "make test-gpu needs a GPU and a PyTorch that sees it"
    shared = {
        "OMP_NUM_THREADS": "1", "WORLD_SIZE": str(ranks), "NCCL_SOCKET_IFNAME": "lo", "NCCL_MAX_NCHANNELS": "2",
        "PYTHONPATH": os.pathsep.join([str(JOBS), os.environ.get("PYTHONPATH", "")]),
    }  # fmt: skip
    processes = []
    for rank in range(ranks):
        # Several ranks on one GPU work with NCCL when each believes to be on a host of its own.
        with (folder / f"out-{rank}").open("wb") as out:
            processes.append(
                subprocess.Popen(
                    [sys.executable, str(JOBS / "gpu_enforcer_job.py"), str(folder), str(ranks), *mode],
                    env=os.environ | shared | {"RANK": str(rank), "NCCL_HOSTID": f"rank{rank}"}, stdout=out,
                    stderr=subprocess.STDOUT, start_new_session=True,
                )
            )  # fmt: skip
    deadline = time.monotonic() + LIMIT_S
    try:
        asked = processes[reporting:]
        while any(process.poll() is None for process in asked) and time.monotonic() < deadline:
            if any(process.poll() for process in processes):
                break
            time.sleep(0.1)
        codes = [process.poll() for process in asked]
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    said = "\n".join(f"rank {rank}: {(folder / f'out-{rank}').read_text()[-3000:]}" for rank in range(ranks))
    assert codes == [0] * (ranks - reporting), f"{codes}\n{said}"
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(reporting, ranks)]


@pytest.fixture(scope="module", params=[2, 4])
def told(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Told:
    return launch(tmp_path_factory.mktemp(f"enforcer{request.param}"), request.param)


def test_whole_numbers_are_those_of_plain_nccl_in_every_rewriting(told: Told) -> None:
    for one in told:
        found = one["variants"]
        assert found["wrong"] == [] and found["fell_back"] == "" and found["plans"] >= 5
        assert found["seen"] == list(range(1, found["plans"] + 1))


def test_unequal_exchanges_of_changing_sizes_are_no_mismatch(told: Told) -> None:
    for one in told:
        found = one["uneven"]
        assert found["wrong"] == [] and found["fell_back"] == "" and found["plans"] >= 3
        assert found["seen"] == list(range(1, found["plans"] + 1))


def test_every_type_is_moved_and_added_as_nccl_does(told: Told) -> None:
    for one in told:
        assert all(one["types"].values()) and len(one["types"]) == 8, one["types"]


def test_averages_are_averages_in_one_step_or_several(told: Told) -> None:
    assert all(len(one["averages"]) == 4 and all(one["averages"]) for one in told)


def test_ranks_that_hear_of_a_plan_at_different_times_change_to_it_at_the_same(told: Told) -> None:
    for one in told:
        assert one["switching"] == told[0]["switching"]
        assert one["switching"]["right"]
        assert one["switching"]["carrier"] == "NcclCarrier", "auto, as the job has used NCCL"
        assert one["switching"]["seen"] == [0] * 10 + [1] * 6 + [2] * 2


def test_a_changed_shape_is_named_and_all_ranks_go_on_in_plain_order(told: Told) -> None:
    for one in told:
        assert one["surprise"]["same"], "results are those of plain order"
        assert one["surprise"]["why"].startswith("iteration 5: all_reduce of 2004 bytes")


def test_a_sum_is_held_back_for_the_exchange_of_the_next_iteration(told: Told) -> None:
    for one in told:
        assert one["prefetch"] == {"same": True, "active": 1, "why": "", "held": True}


def test_wait_blocks_the_stream_and_not_the_host(told: Told) -> None:
    for one in told:
        found = one["no_sync"]
        assert found["busy"] == [True] * 3 and found["over"] and found["future"]
        assert found["right"] == found["plain"]


def test_motifs_and_waits_are_timed_by_the_gpu(told: Told) -> None:
    for one in told:
        found = one["no_sync"]
        assert len(found["durations"]) == 2 and all(us > 0 for us in found["durations"])
        assert all(us >= 0 for us in found["starts"]) and found["waits"] > 0


def test_memory_that_nobody_keeps_is_safe_until_the_gpu_is_done(told: Told) -> None:
    assert all(one["memory"] for one in told)


@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_losses_are_those_of_plain_nccl(told: Told, how: str) -> None:
    for one in told:
        found = one["training"][how]
        assert found["active"] == 1 and found["why"] == ""
        assert found["motifs"] > found["ops"] >= 2 and found["timed"]
        if len(told) == 2:
            assert found["got"] == found["want"], "two numbers have one sum"
        assert found["got"] == pytest.approx(found["want"], rel=1e-5)


def test_a_hook_takes_the_plans_way_beside_plain_nccl(told: Told) -> None:
    for one in told:
        found = one["hook"]
        assert found["number"] == 1 and found["why"] == "", found
        assert found["got"] == pytest.approx(found["want"], rel=1e-5)


def test_a_rank_that_alone_does_something_else_is_named_though_the_host_waits_for_the_gpu(tmp_path: Path) -> None:
    (said,) = launch(tmp_path, 2, "alone", reporting=1)
    assert said.startswith("PlanMismatch: all_reduce.1 cannot end: rank 0 gave up plan 1: iteration 5: all_reduce of ")
