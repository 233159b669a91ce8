# SPDX-License-Identifier: Apache-2.0
"""Programs on real processes: results against NumPy, over shared memory and over UCX."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from executor_ranks import launch

from stretto import Cluster, simulate
from stretto.algorithms import algorithm
from stretto.collectives import AllReduce
from stretto.errors import InvalidInput, StrettoError, VerificationError
from stretto.programs.ir import Program
from stretto.programs.lower import lower
from stretto.programs.streams import InstructionStreams
from stretto.runtime.executor.executor import DTYPES, Executor
from stretto.runtime.executor.load import contents, signature
from stretto.runtime.executor.timeline import measured_timeline

JOB = Path(__file__).parents[1] / "jobs" / "executor_job.py"


def said(folder: Path, world: int, *scenarios: str) -> dict[str, list[Any]]:
    return launch(JOB, folder, world, *scenarios)


@pytest.mark.parametrize("world", [2, 3, 4, 8])
def test_every_library_algorithm_gives_what_numpy_gives(tmp_path: Path, world: int) -> None:
    assert said(tmp_path, world, "library")["library"] == [[]] * world


def test_the_same_over_ucx_alone_and_mixed_with_shared_memory(tmp_path: Path) -> None:
    answers = said(tmp_path, 4, "networked", "two_hosts")
    assert answers == {"networked": [[]] * 4, "two_hosts": [[]] * 4}


def test_what_was_sent_arrives_after_its_sender_has_left(tmp_path: Path) -> None:
    assert said(tmp_path, 3, "late")["late"] == [[True, True]] * 3


def test_a_child_that_a_rank_forks_takes_nothing_with_it(tmp_path: Path) -> None:
    assert said(tmp_path, 3, "forked")["forked"] == [[3000.0, 3000.0]] * 3


def test_types_operations_and_uneven_shares(tmp_path: Path) -> None:
    answers = said(tmp_path, 3, "types", "uneven")
    assert answers == {"types": [[]] * 3, "uneven": [True] * 3}


def test_an_empty_all_reduce_is_a_barrier(tmp_path: Path) -> None:
    ranks = np.array(said(tmp_path, 4, "meetings")["meetings"])  # rank, turn, (came, left)
    assert (ranks[:, :, 1].min(axis=0) >= ranks[:, :, 0].max(axis=0)).all()


def test_half_precision_rounds_as_numpy_does(tmp_path: Path) -> None:
    assert said(tmp_path, 2, "halves")["halves"] == [True, True]


def test_several_at_once_subgroups_identity_and_a_soak(tmp_path: Path) -> None:
    answers = said(tmp_path, 4, "in_flight", "many_threads", "subgroups", "identity", "soak", "closing")
    assert all(all(good) and len(good) == 240 for good in answers["in_flight"])
    assert answers["many_threads"] == [[40] * 4] * 4
    assert answers["subgroups"] == [[4.0, 10.0], [6.0, 10.0], [4.0, 10.0], [6.0, 10.0]]
    assert all(digests == answers["identity"][0] for digests in answers["identity"])
    first = answers["identity"][0]
    assert first[0::2] == first[1::2]
    for rank in answers["soak"]:
        assert rank["wrong"] == 0
        assert rank["after"]["descriptors"] <= rank["before"]["descriptors"]
        if "STRETTO_SANITIZED" not in os.environ:  # a sanitizer remembers what was freed, and may have a thread
            assert rank["after"]["kib"] - rank["before"]["kib"] < 2048  # and 300 works in between
            assert rank["threads"] == 1
        assert rank["counters"]["staging_bytes"] == rank["counters"]["lingering"] == 0
    for rank in answers["closing"]:
        assert rank["before"] == rank["after"]


def test_another_thread_hears_of_every_end_it_asked_for(tmp_path: Path) -> None:
    for rank in said(tmp_path, 3, "notified")["notified"]:
        assert rank["nothing"] == [] and rank["heard"] == rank["asked"] and not rank["listening"]


def test_a_traced_run_is_a_timeline_like_a_predicted_one(tmp_path: Path) -> None:
    traces = [tuple(np.array(column) for column in rank) for rank in said(tmp_path, 3, "traced")["traced"]]
    ring = lower(algorithm("ring", "all_reduce", 3))
    measured = measured_timeline(ring, traces, nbytes=9000 * 4)  # type: ignore[arg-type]
    predicted = simulate(ring, Cluster.preset("dgx2"), nbytes=9000 * 4)
    assert measured.num_spans == 3 * predicted.num_spans  # 12 KB chunks in slices of 4 KB
    assert measured.streams == predicted.streams and set(measured.names) == set(predicted.names)
    assert np.all(measured.end_us >= measured.start_us) and measured.start_us.min() == 0
    assert measured.total_us == measured.end_us.max() > 0
    assert measured.nbytes.sum() == pytest.approx(predicted.nbytes.sum())
    with pytest.raises(InvalidInput, match="traces: must be 3"):
        measured_timeline(ring, [], nbytes=1)


def alone(**options: Any) -> Executor:
    return Executor(0, 1, lambda mine: [mine], token=b"only for tests", **options)


def test_one_rank_needs_nobody() -> None:
    with alone() as ex:
        handle = ex.load(Program.from_steps("nothing", AllReduce(1), src=[], dst=[], chunk=[], step=[]))
        x = np.arange(10, dtype=np.float32)
        y = np.zeros_like(x)
        assert ex.start(handle, x.ctypes.data, y.ctypes.data, 10, op="avg").wait()
    assert np.array_equal(x, y)


def test_bad_arguments_name_the_field() -> None:
    with alone() as ex:
        handle = ex.load(Program.from_steps("nothing", AllReduce(1), src=[], dst=[], chunk=[], step=[]))
        x = np.zeros(10, np.float32)
        at = x.ctypes.data
        cases: list[tuple[tuple[int, int, int], dict[str, Any], str]] = [
            ((at, at + 4, 5), {}, "input, output: overlap"),
            ((at, 0, 5), {}, "output: must be the address"),
            ((at + 2, at + 20, 1), {}, "input: the address of float32"),
            ((at, at + 20, -1), {}, "count: must be >= 0"),
            ((at, at + 20, 5), {"dtype": "complex64"}, "unknown dtype 'complex64'; choose from: float16"),
            ((at, at + 20, 5), {"op": "mean"}, "unknown op 'mean'; choose from: sum"),
        ]
        for arguments, options, text in cases:
            with pytest.raises(InvalidInput, match=text):
                ex.start(handle, *arguments, **options)
        with pytest.raises(InvalidInput, match="ranks: ring is for 2 ranks"):
            ex.load(algorithm("ring", "all_reduce", 2))
        with pytest.raises(InvalidInput, match="communicator: must be"):
            ex.load(handle.lowered, communicator=9999)
    with pytest.raises(InvalidInput, match="token: must be at least 8"):
        Executor(0, 1, lambda mine: [mine], token=b"short")
    with pytest.raises(InvalidInput, match="interface: 'nosuch0' has no IPv4 address"):
        alone(interface="nosuch0")


def test_without_the_module_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "stretto._executor", None)
    with pytest.raises(StrettoError, match=r"the executor is not available .* pip install libucx-cu12"):
        alone()


def test_only_verified_programs_are_loaded() -> None:
    good = lower(algorithm("ring", "all_reduce", 2))
    source = good.src_off.copy()
    source[np.flatnonzero(good.op == 1)[0]] ^= 1
    with alone() as ex, pytest.raises(VerificationError):
        ex.load(replace(good, src_off=source))


def test_contents_follow_chunks_through_scratch() -> None:
    x = lower(algorithm("bruck", "all_to_all", 4))
    streams = InstructionStreams.of(x)
    inside = contents(x, streams)
    for message, (a, b) in enumerate(zip(streams.senders, streams.receivers, strict=True)):
        assert inside.chunks[a] == inside.chunks[b], message
    assert not any(inside.complete)
    ring = lower(algorithm("ring", "all_reduce", 4))
    assert sum(contents(ring, InstructionStreams.of(ring)).complete) == 4


def test_signatures_tell_programs_apart() -> None:
    ring, tree = (lower(algorithm(name, "all_reduce", 4)) for name in ("ring", "binary_tree"))
    assert signature(ring, range(4), 1024) == signature(lower(algorithm("ring", "all_reduce", 4)), range(4), 1024)
    others = {signature(tree, range(4), 1024), signature(ring, [0, 1, 3, 2], 1024), signature(ring, range(4), 2048)}
    assert len(others) == 3 and signature(ring, range(4), 1024) not in others
    assert len(DTYPES) == 10
