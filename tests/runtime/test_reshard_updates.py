# SPDX-License-Identifier: Apache-2.0
"""Generated state dicts between real processes: beside training, as deltas, and with a trainer that dies."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest
from warm import Started

JOB = Path(__file__).parents[1] / "jobs" / "weights_job.py"
RANKS, LIMIT_S = 4, 400


def outcomes_of(folder: Path, seed: int, *scenarios: str, lost: int | None = None) -> list[dict[str, Any]]:
    """What every rank reports, but for one that is lost on purpose."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    arguments = [str(folder), "cpu", str(RANKS), str(seed), *scenarios]
    ranks = [
        Started(JOB, arguments, env=shared | {"RANK": str(rank)}, log=folder / f"log{rank}") for rank in range(RANKS)
    ]
    try:
        codes = [process.wait(LIMIT_S) for process in ranks]
    finally:
        for process in ranks:
            process.end()
    found = {rank: folder / f"{rank}.json" for rank in range(RANKS) if codes[rank] != -9 or lost is None}
    said = [json.loads(path.read_text()) for path in found.values() if path.exists()]
    assert all(code == 0 for rank, code in enumerate(codes) if rank in found), said
    return said


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    names = ("generated", "resharded", "overlapped", "deltas", "mapped", "pinned")
    return outcomes_of(tmp_path_factory.mktemp("updates"), 1, *names)


def test_generated_state_dicts_arrive_bit_for_bit_whatever_their_layouts(outcomes: list[dict[str, Any]]) -> None:
    for told in outcomes:
        assert told["generated"]["wrong"] == [] and told["generated"]["rounds"] > 1
        assert told["resharded"]["wrong"] == []


def test_drawn_models_get_through_a_mapping_whatever_both_sides_parallelize(outcomes: list[dict[str, Any]]) -> None:
    assert [told["mapped"]["wrong"] for told in outcomes] == [[]] * RANKS


def test_versions_arrive_by_way_of_pinned_memory(outcomes: list[dict[str, Any]]) -> None:
    for told in outcomes:
        assert told["pinned"]["wrong"] == told["pinned"]["beside"] == []
        assert told["pinned"]["routes"] == ["pinned"] and told["pinned"]["rounds"] > 1


def test_weights_may_change_while_a_version_of_them_is_sent(outcomes: list[dict[str, Any]]) -> None:
    for told in outcomes:
        assert told["overlapped"]["wrong"] == []
    assert {"copy", "wait"} <= {did for told in outcomes for did in told["overlapped"]["did"]}


def test_a_snapshot_that_is_too_small_is_refused_on_all_ranks(outcomes: list[dict[str, Any]]) -> None:
    for told in outcomes:
        assert "snapshot_bytes: 1 is less than the " in told["overlapped"]["refused"]


def test_deltas_send_fewer_rounds_and_every_version_is_whole(outcomes: list[dict[str, Any]]) -> None:
    for told in outcomes:
        found = told["deltas"]
        assert found["wrong"] == []
        # The first update sends everything.
        assert found["rounds"][0] == found["all"] > 2 and sum(found["rounds"][1:]) < found["all"]


def test_a_trainer_that_dies_with_the_store_leaves_servers_on_the_old_version(tmp_path: Path) -> None:
    told = outcomes_of(tmp_path, 1, "dies", lost=0)
    assert len(told) == RANKS - 1
    for found in told:
        assert found["dies"]["said"].startswith("PeerLost: ") and found["dies"]["kept"]
