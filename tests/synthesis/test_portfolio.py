# SPDX-License-Identifier: Apache-2.0
"""The front door: candidates, certificates, the cache, worker processes, lowering, size tables."""

from __future__ import annotations

import json
import logging
import pickle
import threading
import time
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

import stretto as st
from stretto.collectives import Collective
from stretto.errors import InvalidInput
from stretto.files import cache_directory
from stretto.programs.formats.msccl_xml import unfit_for_old
from stretto.programs.interpret import check
from stretto.synthesis import certificate as certificates
from stretto.synthesis import greedy, portfolio, select, synthesize, worker
from stretto.synthesis import makers as registry
from stretto.synthesis.cache import Cache
from stretto.synthesis.explorer import rotations, sketch_variants, sketches, smallest
from stretto.synthesis.maker import Maker, MakerRequest, SearchMaker
from stretto.synthesis.makers import plan_tasks, register_maker
from stretto.synthesis.matching import same_task
from stretto.synthesis.problem import MakerTask, SynthesisProblem
from stretto.synthesis.sketch import Sketch

LIBRARY = ["library"]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("STRETTO_CACHE", str(folder))
    return folder


@pytest.fixture
def ring() -> st.Cluster:
    return st.Cluster.preset("ring", nodes=4, gb_per_s=10.0, alpha_us=1.0)


def only(monkeypatch: pytest.MonkeyPatch, *made: Maker) -> None:
    monkeypatch.setattr(registry, "makers", lambda: {maker.name: maker for maker in made})


def does(request: MakerRequest, action: Any) -> st.Program:
    """Do what a test says."""
    request.progress("working", 0.5)
    made = action(request.problem) if callable(action) else action
    if isinstance(made, Exception):
        raise made
    return cast(st.Program, made)


def greedily(request: MakerRequest) -> st.Program:
    return greedy.synthesize(request.collective, request.cluster, **request.shared)


def ring_program(problem: SynthesisProblem) -> st.Program:
    return st.algorithm("ring", problem.collective.kind, problem.collective.ranks)


def other_ranks(problem: SynthesisProblem) -> st.Program:
    return st.algorithm("ring", problem.collective.kind, problem.ranks - 1)


def wrong(problem: SynthesisProblem) -> st.Program:
    return st.Program.from_steps("wrong", st.AllGather(4), src=[0], dst=[1], chunk=[0], step=[0])


ACTIONS: dict[str, Any] = {
    "good": ring_program,
    "other": other_ranks,
    "wrong": wrong,
    "refuses": st.Infeasible("links: none may be used"),
    "breaks": IndexError("list index out of range"),
}


def fake(name: str, **options: Any) -> SearchMaker:
    return SearchMaker(name=name, make=partial(does, action=ACTIONS[name]), collectives=("all_gather",), **options)


def test_the_best_candidate_wins_and_the_certificate_repeats_what_simulate_says(ring: st.Cluster) -> None:
    found = synthesize(st.AllGather(4), ring, 4 * st.MB, makers=LIBRARY)
    timed = [c.time_us for c in found.candidates if c.time_us is not None]
    assert timed == sorted(timed)
    assert found.certificate.time_us == timed[0]
    assert st.simulate(found.program, ring, nbytes=4 * st.MB).total_us == found.certificate.time_us
    assert found.certificate.bound_us == st.lower_bound(st.AllGather(4), ring, 4 * st.MB).total_us
    assert found.certificate.gap == pytest.approx(found.time_us / found.certificate.bound_us - 1)
    assert found.certificate.program == found.program.name
    assert found.certificate.maker.startswith("library:")
    assert found.certificate.versions["stretto"] == st.__version__


@pytest.mark.parametrize(
    "collective",
    [
        st.AllGather(4, in_place=True),
        st.ReduceScatter(4),
        st.AllReduce(4),
        st.AllToAll(4),
        st.Broadcast(4, root=2),
        st.Reduce(4, root=3),
        st.Gather(4, root=1),
        st.Scatter(4, root=1),
        st.AllGather([0, 2, 3]),
    ],
    ids=lambda c: f"{c.kind}{c.ranks}",
)
def test_every_collective_of_the_library_is_served(collective: Collective) -> None:
    cluster = st.Cluster.preset("fully_connected", nodes=4)
    found = synthesize(collective, cluster, st.MB, makers=LIBRARY)
    assert same_task(found.program.collective, collective)
    assert found.time_us >= found.certificate.bound_us * (1 - 1e-9)


def test_more_chunks_are_tried_for_as_long_as_they_help(ring: st.Cluster) -> None:
    small = synthesize(st.Broadcast(4), ring, st.KB, makers=["library:chain"])
    large = synthesize(st.Broadcast(4), ring, 100 * st.MB, makers=["library:chain"])
    assert large.collective.chunks > small.collective.chunks


def test_a_maker_that_fails_is_listed_with_its_reason_and_the_others_go_on(
    ring: st.Cluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    only(
        monkeypatch,
        *map(fake, ("refuses", "breaks", "other", "wrong", "good")),
        replace(fake("good"), name="tiny", max_ranks=2),
    )
    found = synthesize(st.AllGather(4), ring, st.MB, cache=False)
    reasons = {c.maker: c.reason for c in found.candidates if c.time_us is None}
    assert found.certificate.maker == "good"
    assert reasons["refuses"] == "links: none may be used"
    assert reasons["breaks"] == "IndexError: list index out of range"
    assert "over 3 ranks" in reasons["other"]
    assert reasons["wrong"].startswith("wrong program: ")
    assert reasons["tiny"] == "is for up to 2 ranks, not 4"
    assert "maker breaks failed" in caplog.text


def test_a_result_without_a_maker_that_crashed_is_not_kept(
    ring: st.Cluster, own_cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    only(monkeypatch, fake("breaks"), fake("good"))
    synthesize(st.AllGather(4), ring, st.MB)
    assert not (own_cache / "synthesis").exists()
    assert "Traceback" not in caplog.text
    # One that refuses, or makes a wrong program, does so every time.
    only(monkeypatch, fake("refuses"), fake("wrong"), fake("good"))
    synthesize(st.AllGather(4), ring, st.MB)
    assert synthesize(st.AllGather(4), ring, st.MB).cached


def test_a_result_of_a_busy_machine_is_not_kept_where_makers_were_not_tried(
    ring: st.Cluster, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    only(monkeypatch, fake("good"), fake("refuses"))
    monkeypatch.setattr(portfolio, "_processor_s", lambda: 0.0)
    late = [row for row in synthesize(st.AllGather(4), ring, st.MB, budget_s=1e-6).candidates if row.time_us is None]
    assert [row.maker for row in late] == ["refuses"] and not (own_cache / "synthesis").exists()
    # All were tried, or the machine was not busy.
    synthesize(st.AllGather(4), ring, st.MB)
    assert synthesize(st.AllGather(4), ring, st.MB).cached
    monkeypatch.setattr(portfolio, "_processor_s", time.monotonic)
    synthesize(st.AllGather(4), ring, st.MB, budget_s=1e-6)
    assert synthesize(st.AllGather(4), ring, st.MB, budget_s=1e-6).cached


def test_a_result_without_a_worker_that_died_is_not_kept(
    ring: st.Cluster, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Dead(worker.ProcessTask):
        def __init__(self, request: bytes, tell: worker.Tell) -> None:
            super().__init__(request, tell)
            self.end()

    monkeypatch.setattr(worker, "ProcessTask", Dead)
    found = synthesize(st.AllGather(4), ring, st.MB, makers=["library:ring", "greedy"], jobs=2)
    assert any("ended with code -9" in each.reason for each in found.candidates)
    assert not (own_cache / "synthesis").exists()


def test_when_nobody_succeeds_the_error_says_why(ring: st.Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, fake("refuses"))
    with pytest.raises(st.Infeasible, match=r"all_gather on ring.*refuses: links: none may be used"):
        synthesize(st.AllGather(4), ring, st.MB)


def test_a_candidate_at_the_bound_ends_the_search() -> None:
    full = st.Cluster.preset("fully_connected", nodes=4, gb_per_s=10.0, alpha_us=1.0)
    found = synthesize(st.AllGather(4), full, st.MB, makers=["library:direct", "forest"])
    assert found.certificate.gap < 1e-5
    assert found.candidates[-1].reason == "not tried: direct is within 0.1 % of the lower bound"


def test_what_the_budget_does_not_reach_is_said(ring: st.Cluster) -> None:
    found = synthesize(st.AllGather(4), ring, st.MB, makers=["library"], budget_s=1e-3)
    assert found.candidates[-1].reason == "not tried: the budget of 0.001 s was spent"


def test_progress_tells_the_best_so_far(ring: st.Cluster) -> None:
    lines: list[tuple[str, float]] = []
    synthesize(st.AllGather(4), ring, st.MB, makers=LIBRARY, progress=lambda *line: lines.append(line))
    assert any("best" in message and "above the bound" in message for message, _ in lines)
    assert all(0 <= fraction <= 1 for _, fraction in lines)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nbytes": 0}, "nbytes: must be finite and > 0, not 0"),
        ({"nbytes": None}, "nbytes: must be finite and > 0, not None"),
        ({"nbytes": "1M"}, "nbytes: must be a number, not the text '1M'; stretto.units.parse_bytes reads a size"),
        ({"budget_s": float("nan")}, "budget_s: must be finite and > 0, not nan"),
        ({"budget_s": float("inf")}, "budget_s: must be finite and > 0, not inf"),
        ({"makers": []}, "makers: none is named; choose from: library, "),
        ({"jobs": 0}, "jobs: must be 1..256, not 0"),
        ({"alpha": "fast"}, "unknown alpha mode 'fast'; choose from: pipelined, blocking"),
        ({"contention": "no"}, "unknown contention mode 'no'; choose from: fifo, fair"),
        ({"makers": ["forrest"]}, "unknown maker 'forrest'; choose from: library"),
        ({"makers": ["library:rign"]}, "unknown task of library 'library:rign'; choose from: library:ring"),
    ],
)
def test_wrong_arguments_are_named(ring: st.Cluster, options: dict[str, Any], message: str) -> None:
    arguments = {"nbytes": st.MB} | options
    with pytest.raises(st.InvalidInput) as error:
        synthesize(st.AllGather(4), ring, **arguments)
    assert str(error.value).startswith(message)


def test_devices_that_do_not_exist_are_refused(ring: st.Cluster) -> None:
    with pytest.raises(st.InvalidInput, match="device 7 does not exist"):
        synthesize(st.AllGather([0, 7]), ring, st.MB)


def test_a_disconnected_cluster_says_which_devices_are_apart() -> None:
    nodes = [st.Node(name=f"gpu{i}") for i in range(3)]
    links = [st.Link(src=0, dst=1, alpha_us=1, gb_per_s=1), st.Link(src=1, dst=0, alpha_us=1, gb_per_s=1)]
    cluster = st.Cluster.build("islands", nodes=nodes, links=links)
    with pytest.raises(st.StrettoError, match="gpu2"):
        synthesize(st.AllGather(3), cluster, st.MB)


def test_worker_processes_find_what_one_process_finds(ring: st.Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(portfolio, "SMALL", 0)
    makers = ["library:ring", "library:direct", "library:bruck"]
    alone = synthesize(st.AllGather(4), ring, st.MB, makers=makers, cache=False)
    beside = synthesize(st.AllGather(4), ring, st.MB, makers=makers, cache=False, jobs=2)
    assert beside.program == alone.program
    assert {(c.maker, c.name, c.time_us) for c in beside.candidates} == {
        (c.maker, c.name, c.time_us) for c in alone.candidates
    }


def test_a_worker_that_takes_too_long_is_ended(ring: st.Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    from stretto.synthesis import backends

    monkeypatch.setattr(portfolio, "SMALL", 0)
    monkeypatch.setattr(worker, "GRACE_S", -1e9)
    monkeypatch.setattr(backends, "LATE_S", -1e9)
    monkeypatch.setattr(backends, "LATE", -1e9)
    with pytest.raises(st.Infeasible, match="ended: the budget of 30 s was spent"):
        synthesize(st.AllGather(4), ring, st.MB, makers=["greedy"], cache=False, jobs=2)


@pytest.mark.parametrize("makers", [["library:ring"], ["greedy"], ["flow", "greedy", "library:ring"]])
def test_a_search_that_is_late_ends_with_the_first_program(
    ring: st.Cluster, monkeypatch: pytest.MonkeyPatch, makers: list[str]
) -> None:
    monkeypatch.setattr(portfolio, "SMALL", 0)
    monkeypatch.setattr(worker, "GRACE_S", -1e9)
    found = synthesize(st.AllGather(4), ring, st.MB, makers=makers, cache=False, budget_s=1e-3, jobs=2)
    found.program.verify()


@pytest.mark.parametrize("wait_s", [0.0, 1e9])
def test_where_nobody_is_done_in_time_the_library_is_asked_and_others_have_some_time_more(
    monkeypatch: pytest.MonkeyPatch, wait_s: float
) -> None:
    from stretto.synthesis import backends
    from stretto.synthesis.attempts import Attempt, Board
    from stretto.synthesis.certificate import ProvedProgram

    monkeypatch.setattr(backends, "LATE_S", wait_s)
    monkeypatch.setattr(worker, "GRACE_S", 0.0)
    ring = st.Cluster.preset("ring", nodes=4)
    program = st.algorithm("ring", "all_gather", 4)
    problem = SynthesisProblem(
        collective=st.AllGather(4), cluster=ring, nbytes=st.MB, alpha="pipelined", contention=None, seed=0
    )
    asked: list[str] = []
    tells: dict[str, Any] = {}

    class Late:
        """The library is done at once, and the first maker, which is faster by then, some time later."""

        def __init__(self, request: bytes, tell: Any) -> None:
            task = pickle.loads(request)[2]
            asked.append(task.label)
            tells[task.label] = tell
            if task.maker == "library":
                self.done("library", 1e9)
                if wait_s:
                    threading.Timer(0.5, self.done, ("greedy", 1e8)).start()

        def done(self, maker: str, time_us: float) -> None:
            tells[maker](Attempt(made=[ProvedProgram(maker=maker, program=program, time_us=time_us, seconds=0.0)]))

        def end(self) -> None:
            asked.append("end")

        def reason(self) -> str:
            return ""

    tasks = [MakerTask(maker=name, label=name, weight=1.0) for name in ("greedy", "compose", "library")]
    board = Board(bound=st.lower_bound(st.AllGather(4), ring, st.MB), budget_s=0.2, began=time.monotonic())
    backends.run_tasks(problem, tasks, board, jobs=1, start=Late)
    assert [name for name in asked if name != "end"] == ["greedy", "library"]
    assert ("end" in asked) == (not wait_s)
    assert board.best is not None and board.best.maker == ("greedy" if wait_s else "library")


def test_on_many_ranks_phases_and_direct_come_before_bruck() -> None:
    tree = st.Cluster.load("fat_tree:512")
    problem = SynthesisProblem(
        collective=st.AllToAll(512), cluster=tree, nbytes=st.MB, alpha="pipelined", contention=None, seed=0
    )
    labels = [task.label for task in plan_tasks(problem, None)[0]]
    assert labels[0] == "phases"
    assert labels.index("library:direct") < labels.index("library:bruck")


def test_results_are_kept_and_proved_again(ring: st.Cluster, own_cache: Path) -> None:
    first = synthesize(st.AllGather(4), ring, st.MB, makers=LIBRARY)
    again = synthesize(st.AllGather(4), ring, st.MB, makers=LIBRARY)
    assert (first.cached, again.cached) == (False, True)
    assert again.program == first.program
    assert again.certificate == first.certificate
    assert again.candidates == first.candidates
    assert sorted(path.suffix for path in (own_cache / "synthesis").iterdir()) == [".json", ".prog"]


@pytest.mark.parametrize(
    "change",
    [
        {"nbytes": 2 * st.MB},
        {"seed": 1},
        {"alpha": "blocking"},
        {"budget_s": 5.0},
        {"makers": ["library:ring"]},
        {"contention": "fair"},
    ],
)
def test_another_question_is_another_entry(ring: st.Cluster, change: dict[str, Any]) -> None:
    question: dict[str, Any] = {"nbytes": st.MB, "makers": LIBRARY}
    synthesize(st.AllGather(4), ring, **question)
    assert not synthesize(st.AllGather(4), ring, **(question | change)).cached


@pytest.mark.parametrize("what", ["truncated", "not json", "other program", "wrong time", "missing", "not a program"])
def test_a_damaged_entry_is_ignored_with_a_warning(
    what: str, ring: st.Cluster, own_cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = synthesize(st.AllGather(4), ring, st.MB, makers=LIBRARY)
    program = next((own_cache / "synthesis").glob("*.prog"))
    entry = program.with_suffix(".json")
    if what == "truncated":
        program.write_text(program.read_text()[:40])
    elif what == "not json":
        entry.write_text('{"sha256": "')
    elif what == "other program":
        program.write_text(program.read_text().replace("0>", "1>"))
    elif what == "wrong time":
        time_us = f"{first.time_us!r}"
        assert time_us in entry.read_text()
        entry.write_text(entry.read_text().replace(time_us, "1.5"))
    elif what == "missing":
        program.unlink()
    else:
        entry.write_text("[1, 2]")
    with caplog.at_level(logging.WARNING):
        again = synthesize(st.AllGather(4), ring, st.MB, makers=LIBRARY)
    assert not again.cached
    assert "cache entry ignored" in caplog.text
    assert again.program == first.program
    assert synthesize(st.AllGather(4), ring, st.MB, makers=LIBRARY).cached


def test_a_cache_that_cannot_be_written_is_only_a_warning(
    ring: st.Cluster, own_cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own_cache.write_text("a file where a folder should be")
    found = synthesize(st.AllGather(4), ring, st.MB, makers=LIBRARY)
    assert not found.cached
    assert "not cached" in caplog.text


def test_the_cache_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STRETTO_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache_directory() == Path("/somewhere/stretto")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_directory() == Path.home() / ".cache" / "stretto"


def test_large_programs_are_not_cached(ring: st.Cluster, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stretto.synthesis.cache.MAX_TRANSFERS", 3)
    synthesize(st.AllGather(4), ring, st.MB, makers=LIBRARY)
    assert not own_cache.exists()


def test_the_key_is_the_content_not_the_object(ring: st.Cluster) -> None:
    problem = SynthesisProblem(collective=st.AllGather(4), cluster=ring, nbytes=st.MB)
    same = replace(problem, cluster=replace(ring), collective=st.AllGather(4))
    assert Cache.of(problem, {}).key == Cache.of(same, {}).key


def test_a_certificate_survives_its_file(ring: st.Cluster, tmp_path: Path) -> None:
    found = synthesize(st.AllGather(4), ring, st.MB, makers=LIBRARY)
    found.save(tmp_path / "ag.txt")
    text = (tmp_path / "ag.certificate.json").read_text()
    assert certificates.loads(text) == (found.certificate, found.candidates)
    from stretto.programs.formats import load_program

    assert load_program(tmp_path / "ag.txt") == found.program


def test_lowering_picks_streams_that_fit_the_runtimes_and_run(tmp_path: Path) -> None:
    cluster = st.Cluster.load("ndv2")
    found = synthesize(st.AllReduce(8), cluster, 16 * st.MB, makers=["library:ring"], lower=True, cache=False)
    lowering = found.lowering
    assert lowering is not None
    times = [c.time_us for c in lowering.tried if c.time_us is not None]
    assert lowering.time_us == min(times)
    assert len(times) > 2
    assert st.simulate(lowering.lowered, cluster, nbytes=16 * st.MB).total_us == lowering.time_us
    assert found.certificate.lowered_us == lowering.time_us
    check(lowering.lowered, fifo_depth=lowering.fifo_depth, op="sum", seed=0)
    found.save(tmp_path / "ar.xml")
    assert "<algo" in (tmp_path / "ar.xml").read_text()


def test_a_program_at_the_bound_ends_the_search_only_where_it_can_be_lowered(ring: st.Cluster) -> None:
    makers = ["library:ring", "library:bruck"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(portfolio, "lower_bound", lambda *of: replace(st.lower_bound(*of), total_us=1e9))
        patch.setattr(portfolio, "lowers_well", lambda made, problem: made.maker == "library:bruck")
        found = synthesize(st.AllGather(4), ring, st.MB, makers=makers, lower=True, cache=False)
        assert {c.maker for c in found.candidates if c.time_us} == set(makers)
        patch.setattr(portfolio, "lowers_well", lambda made, problem: True)
        found = synthesize(st.AllGather(4), ring, st.MB, makers=makers, lower=True, cache=False)
        assert len({c.maker for c in found.candidates if c.time_us}) == 1


def test_streams_that_the_original_runtime_cannot_load_say_so() -> None:
    streams = st.algorithm("direct", "all_to_all", 16, chunks=1).lower(instances=16)
    assert unfit_for_old(streams) == "gpu 0: 480 threadblocks are more than the 216 of the old runtime"
    assert unfit_for_old(st.algorithm("ring", "all_gather", 4).lower()) == ""


def test_programs_that_do_not_fit_the_runtimes_give_way_to_those_that_do() -> None:
    cluster = st.Cluster.preset("ring", nodes=16, alpha_us=0.0)
    # Far more time than is needed: on a busy machine a budget of seconds ends before every cut was tried.
    options: dict[str, Any] = {"makers": ["library:halving_doubling"], "cache": False, "budget_s": 600.0}
    best = synthesize(st.AllGather(16), cluster, 64 * st.MB, **options)
    fits = synthesize(st.AllGather(16), cluster, 64 * st.MB, lower=True, **options)
    assert best.collective.chunks >= fits.collective.chunks
    assert fits.lowering is not None
    assert int(np.diff(fits.lowering.lowered.tb_ptr).max()) <= 256


def test_streams_of_pairs_of_trees_are_cut_as_coarsely_as_files_need() -> None:
    nodes = [st.Node(name=f"d{k}") for k in range(8)]
    ends = [pair for k in range(7) for pair in ((k, k + 1), (k + 1, k))]
    line = st.Cluster.build(
        "line", nodes=nodes, links=[st.Link(src=a, dst=b, gb_per_s=30, alpha_us=0.8) for a, b in ends]
    )
    found = synthesize(st.AllReduce(8), line, 1e6, makers=["tree_pairs"], lower=True, cache=False, budget_s=60.0)
    assert found.lowering is not None
    assert found.lowering.time_us < 1.05 * min(one.time_us for one in found.candidates if one.time_us is not None)


def test_a_lowered_result_comes_back_from_the_cache(ring: st.Cluster) -> None:
    first = synthesize(st.AllGather(4), ring, st.MB, makers=["library:ring"], lower=True)
    again = synthesize(st.AllGather(4), ring, st.MB, makers=["library:ring"], lower=True)
    assert again.cached
    assert first.lowering is not None and again.lowering is not None
    assert again.lowering.time_us == first.lowering.time_us


def test_a_size_table_has_no_holes_and_picks_the_faster_program_everywhere(ring: st.Cluster, tmp_path: Path) -> None:
    cluster = st.Cluster.load("ndv2:2")
    sizes = [st.KB, 64 * st.KB, 4 * st.MB, 256 * st.MB]
    table = select(st.AllGather(16), cluster, sizes, makers=["library:bruck", "library:ring"], lower=True)
    assert len(table.choices) > 1
    assert table.choices[0].min_bytes == 0
    assert table.choices[-1].max_bytes == 0
    for before, after in zip(table.choices, table.choices[1:], strict=False):
        assert after.min_bytes == before.max_bytes + 1
        for nbytes, faster, slower in (
            (before.max_bytes, before, after),
            (before.points[-1][0], before, after),
            (after.points[0][0], after, before),
        ):
            pair = [choice.synthesis.runnable for choice in (faster, slower)]
            times = [st.simulate(streams, cluster, nbytes=nbytes).total_us for streams in pair]
            assert times[0] <= times[1]
            assert table.best(nbytes) == faster.program
    written = table.save(tmp_path / "table")
    assert [path.name for path in written[-2:]] == ["index.json", "index.csv"]
    rows = json.loads((tmp_path / "table" / "index.json").read_text())["rows"]
    assert [row["nbytes"] for row in rows] == sizes
    assert {row["file"] for row in rows} == {path.name for path in written[:-2]}


def test_unequal_cuts_of_one_buffer_are_recognised_and_other_buffers_are_not() -> None:
    whole = st.AllGather(4)
    finer = st.AllGather(4, chunks=2)
    uneven = replace(finer, chunk_share=np.tile([0.1, 0.15], 4))
    swapped = replace(finer, in_chunk=finer.in_chunk[::-1].copy())
    longer = replace(finer, chunk_share=np.tile([0.1, 0.2], 4))
    assert same_task(whole, uneven) and same_task(uneven, whole)
    assert not same_task(whole, swapped)
    assert not same_task(whole, longer)
    assert not same_task(st.AllReduce(4), st.AllGather(4))
    assert not same_task(st.Broadcast(4, root=0), st.Broadcast(4, root=1))


def test_the_explorer_finds_the_rotations_of_the_papers_sketch() -> None:
    assert smallest(rotations(st.Cluster.load("dgx2:2"))) == ((2, 16), (16, 32))
    assert rotations(st.Cluster.load("autodist_b9")) == []


def test_the_explorer_proposes_different_sketches_that_fit_the_cluster() -> None:
    found = list(sketches(st.Cluster.load("dgx2:2")))
    assert found[0].name == "auto"
    assert len({sketch.name for sketch in found}) == len(found) > 5
    assert {edge.strategy for sketch in found for edge in sketch.switches} == {"uc-min", "uc-max"}
    assert {sketch.input_chunkup for sketch in sketches(st.Cluster.load("ndv2:2"), split=False)} == {1}


def test_a_given_sketch_is_the_only_one(ring: st.Cluster) -> None:
    problem = SynthesisProblem(collective=st.AllGather(4), cluster=ring, nbytes=st.MB)
    assert len(sketch_variants(problem)) > 1
    assert sketch_variants(replace(problem, sketch=Sketch())) == [("", {})]


@pytest.mark.parametrize("collective", [st.ReduceScatter(4), st.AllReduce(4), st.AllReduce(4, chunks=3)])
def test_reductions_are_derived_for_makers_that_only_copy(
    collective: Collective, ring: st.Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies = SearchMaker(name="copies", make=greedily, collectives=(collective.kind,), reduces=False)
    only(monkeypatch, copies)
    found = synthesize(collective, ring, st.MB, cache=False)
    assert found.certificate.maker == "copies"
    assert same_task(found.program.collective, collective)


def test_every_maker_serves_a_small_case_or_says_why_not() -> None:
    cluster = st.Cluster.preset("ring", nodes=4, gb_per_s=10.0, alpha_us=1.0)
    makers = list(registry.makers())
    found = synthesize(st.AllReduce(4), cluster, st.MB, cache=False, budget_s=6.0)
    assert {c.maker.partition(":")[0] for c in found.candidates} == set(makers)
    assert all(c.time_us is not None or c.reason for c in found.candidates)
    assert not any("wrong program" in c.reason for c in found.candidates)


THIRD_PARTY = """
import stretto as st
from stretto.synthesis import MakerTask


class TwoPrograms:
    name, options, follows_sketch = "two_programs", {"chunks": int}, False

    def tasks(self, problem):
        return [MakerTask(maker=self.name, label=self.name, weight=1.0)]

    def programs(self, task, problem, budget_s, progress):
        kind, ranks = problem.collective.kind, problem.collective.ranks
        yield st.algorithm("ring", kind, ranks)
        yield st.algorithm("ring", kind, ranks, chunks=task.options.get("chunks", 2))
"""


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_maker_of_somebody_else_takes_part_here_and_in_a_worker(
    ring: st.Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jobs: int
) -> None:
    module = f"third_party_{jobs}"
    (tmp_path / f"{module}.py").write_text(THIRD_PARTY)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(registry._MAKERS, "_things", registry.makers())
    register_maker(import_module(module).TwoPrograms())
    options = {"two_programs": {"chunks": 4}}
    found = synthesize(st.AllGather(4), ring, 4 * st.MB, makers=["two_programs"], maker_options=options, jobs=jobs)
    assert len({c.name for c in found.candidates if c.time_us is not None}) == 2
    assert found.certificate.maker == "two_programs"
    with pytest.raises(InvalidInput, match="unknown option of two_programs 'depth'; choose from: chunks"):
        synthesize(st.AllGather(4), ring, st.MB, maker_options={"two_programs": {"depth": 1}})


def test_a_maker_that_a_worker_cannot_import_says_so() -> None:
    task = MakerTask(maker="hidden", label="hidden", weight=1.0)
    request = (pickle.dumps(None), b"cno_such_module\nHidden\n.", task, 1.0)
    result = worker.work(pickle.dumps(request), lambda message: None)
    assert result.crashed and "no module that a worker can import" in result.candidates[0].reason
