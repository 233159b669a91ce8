# SPDX-License-Identifier: Apache-2.0
"""`stretto.torch.WeightSync`: versions of a state dict arrive bit for bit, on all ranks or on none."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from torch._C import _distributed_c10d as c10d

from stretto import InvalidInput
from stretto.resharding import UnitTask
from stretto.resharding.tensors.agree import ReshardAgreement
from stretto.resharding.tensors.rounds import deal, split, streams_of

Outcomes = dict[str, list[Any]]
SERVERS, LOST = range(2, 6), 1


@pytest.fixture(scope="module")
def outcomes(job: Callable[..., Outcomes], tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return job("reshard_weights_job.py", tmp_path_factory.mktemp("weights"), ranks=6)


@pytest.mark.parametrize(("scenario", "rounds"), [("versions_arrive", 1), ("small_staging", 3)])
def test_versions_arrive_bit_for_bit_within_the_staging_limit(outcomes: Outcomes, scenario: str, rounds: int) -> None:
    for runs in outcomes[scenario]:
        assert len(runs) == 2
        for seen, num_rounds, staging_bytes in runs:
            assert seen == [[True, True, True]] * 3
            assert num_rounds >= rounds
            assert staging_bytes <= (2500 if scenario == "small_staging" else 256 << 20)


def test_dtypes_are_cast_before_sending_and_pending_averages_are_done(outcomes: Outcomes) -> None:
    for runs in outcomes["casts"]:
        assert all(all(run) for run in runs)


def test_readers_never_see_two_versions_at_once(outcomes: Outcomes) -> None:
    for rank, ((torn, in_order, versions),) in enumerate(outcomes["readers_see_one_version"]):
        assert torn == []
        assert in_order
        assert rank not in SERVERS or versions >= 10


def test_the_version_before_stays_until_the_next_update_which_waits_for_its_readers(outcomes: Outcomes) -> None:
    for ((held, gone, late, number),) in outcomes["old_versions"]:
        assert held
        assert gone == ["InvalidInput", "version: 0 is not here; there are: 1, 2"]
        assert late == [True]
        assert number == 3


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("keys", "'norm' (not in source)"),
        ("keys of a rank", "rank 1 has none"),
        ("keys of a replica's rank", "rank 5 has none"),
        ("shapes", "'norm': source has shape (16,), target (17,)"),
        ("shapes of a rank", "rank 1 has (66, 16)"),
        ("no tensor", "source['up']: must be a tensor, not str"),
        ("nothing", "no rank gives a tensor"),
        ("staging", "staging_bytes: 1 does not hold one element of each; give at least 48"),
        ("other staging", "staging_bytes: is 2097152 on rank 3"),
        ("changed source", "source['norm']: is (16,) float64"),
    ],
)
def test_dicts_that_do_not_fit_are_refused_on_every_rank(outcomes: Outcomes, what: str, words: str) -> None:
    for (found,) in outcomes["wrong"]:
        kind, text = found[what]
        assert kind == "InvalidInput"
        assert words in text and "\n" not in text
        assert found["then"] == ["2", "True"]


def test_a_rank_that_fails_in_the_middle_stops_all_and_the_old_version_stays(outcomes: Outcomes) -> None:
    for ((first, kept, again, rounds),) in outcomes["raises"]:
        assert first == ["StrettoError", "rank 1: RuntimeError: no more paper"]
        assert kept == [1, True]
        assert "has failed before" in again[1]
        assert rounds > 1


def test_a_rank_that_dies_in_the_middle_is_named_and_the_old_version_stays(outcomes: Outcomes) -> None:
    for rank, found in enumerate(outcomes["dies"]):
        if rank == LOST:
            assert found is None
            continue
        first, kept, again, _, later = found
        assert first[0] == again[0] == "PeerLost"
        assert "rank 1 is gone" in first[1] and "rank 1 is gone" in again[1]
        assert kept == [1, True]
        # The others go on; a replica that was left out has the newest version after the next update.
        assert later == ([[1, 3, True]] if rank > 3 else [[1, 2, True], [2, 3, True]])


def test_a_mapping_makes_tensors_of_others_bit_for_bit_or_is_refused_everywhere(outcomes: Outcomes) -> None:
    said = {
        "layout": "'small_scale': rank ", "blocks": "cut through blocks of 16",
        "fused": "[30, 6] is no multiple of the sizes [2, 1, 1]", "lacking": "'small_scale': is the scale of a rule",
        "two ways": "'embed': is needed as", "shape": "'norm': source has shape (6,), target (7,)",
    }  # fmt: skip
    for ((seen, errors),) in outcomes["mapped"]:
        assert seen == [True, True]
        assert {name: kind for name, (kind, _) in errors.items()} == dict.fromkeys(said, "InvalidInput")
        assert all(said[name] in text for name, (_, text) in errors.items())


def task(rows: int, columns: int, *, holders: tuple[int, ...] = (0,), receivers: tuple[int, ...] = (1,)) -> UnitTask:
    return UnitTask(
        tensor=0, box=((0, rows), (0, columns)), nbytes=4 * rows * columns, holders=(holders,), receivers=receivers,
        align=4,
    )  # fmt: skip


@pytest.mark.parametrize("limit", [64, 100, 1000, 5000, 1 << 20])
@pytest.mark.parametrize("unit", [1, 16])
def test_rounds_move_everything_once_and_keep_to_the_limit(limit: int, unit: int) -> None:
    tasks = [task(8, 16), task(1, 37, receivers=(1, 2)), task(3, 5, holders=(0, 1), receivers=(1, 2)), task(1, 1)]
    streams = streams_of(tasks, limit, unit=unit)
    rounds = deal(tasks, streams)
    assert sum(piece.task.nbytes for these in rounds for piece in these) == sum(t.nbytes for t in tasks)
    for device in range(3):
        held = sum(s.nbytes * ((device in s.holders[0]) + (device in s.receivers)) for s in streams)
        assert held <= limit
    for these in rounds:
        taken = [(p.stream, at) for p in these for at in range(p.offset, p.offset + p.task.nbytes)]
        assert len(set(taken)) == len(taken) and all(at < streams[stream].nbytes for stream, at in taken)
        assert all(p.offset % p.task.align == 0 for p in these)


def test_pieces_of_random_tasks_tile_their_boxes() -> None:
    rng = random.Random(3)
    for _ in range(300):
        whole = task(rng.randint(1, 5), rng.randint(1, 12))
        left, cells, room = [whole], [], 0
        while left:
            room = room if room >= 4 else rng.randint(1, 20) * 4
            head, rest = split(left.pop(0), room, rng.randint(0, 40))
            left = rest + left
            room -= head.nbytes if head is not None else room
            if head is not None:
                assert head.nbytes == 4 * (head.box[0][1] - head.box[0][0]) * (head.box[1][1] - head.box[1][0])
                cells += [(i, j) for i in range(*head.box[0]) for j in range(*head.box[1])]
        assert sorted(cells) == [(i, j) for i in range(whole.box[0][1]) for j in range(whole.box[1][1])]


def test_a_limit_below_one_element_is_refused() -> None:
    with pytest.raises(InvalidInput, match="staging_bytes: 3 does not hold one element of each; give at least 4"):
        streams_of([task(2, 2)], 3)


def test_a_vote_that_is_late_names_who_hangs_and_not_who_waits_for_that_rank() -> None:
    store: Any = c10d.HashStore()
    store.set_timeout(timedelta(seconds=2))
    voting, waiting, hanging = (ReshardAgreement(store, rank) for rank in range(3))
    over = threading.Event()

    def wait_for_bytes() -> None:
        while not over.wait(0.1):
            waiting.beat()

    thread = threading.Thread(target=wait_for_bytes)
    thread.start()
    hanging.beat()
    try:
        found = voting.vote("a version", [0, 1, 2])
    finally:
        over.set()
        thread.join()
    assert str(found) == "rank 2 did not vote within 2 s"


@pytest.mark.parametrize("limit", [20_000, 50_000, 190_000])
def test_rows_that_are_not_cut_do_not_cost_a_round(limit: int) -> None:
    # Halves of columns of matrices that lie in rows, and vectors, as trainers and servers of a transformer cut them.
    shapes = [(192, 256, (4,)), (64, 128, (4, 5)), (256, 256, (4,)), (64, 512, (4, 5)), (1, 64, (4, 5))] * 4
    tasks = [task(rows, columns, receivers=to) for rows, columns, to in shapes]
    streams = streams_of(tasks, limit, depth=2)
    moved = len(deal(tasks, streams)) * sum(stream.nbytes for stream in streams)
    assert moved <= 1.04 * sum(one.nbytes for one in tasks)
