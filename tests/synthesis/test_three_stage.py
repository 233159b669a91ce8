# SPDX-License-Identifier: Apache-2.0
"""Routing, ordering, contiguity: right programs, no larger than they need be, as fast as is claimed."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from patience import patient

import stretto as st
from stretto.errors import Infeasible, InvalidInput
from stretto.solvers.milp import Milp, solve
from stretto.synthesis import contiguity
from stretto.synthesis.contiguity import MessageSchedule, merge
from stretto.synthesis.explorer import sketches
from stretto.synthesis.logical import LogicalTopology
from stretto.synthesis.makers import plan_tasks
from stretto.synthesis.ordering import VARIANTS, SendTasks, justify, priorities, schedule
from stretto.synthesis.problem import SynthesisProblem
from stretto.synthesis.routing import build, route
from stretto.synthesis.routing_problem import RoutingProblem
from stretto.synthesis.routing_search import search
from stretto.synthesis.sketch import LinkRule, Sketch
from stretto.synthesis.three_stage import ablation, bytes_of, refined, synthesize

DATA = Path(__file__).parent / "data"
MB = 1e6


def nvlinks_as_taccl_counts() -> st.Cluster:
    """One NDv2 host by its NVLinks alone, alpha folded into beta."""
    box = st.Cluster.load("ndv2:1")
    links = [
        st.Link(src=x.src, dst=x.dst, alpha_us=0.0, gb_per_s=x.gb_per_s, channel=x.channel)
        for x in box.links()
        if x.channel == "nvlink"
    ]
    return st.Cluster.build("nvlinks", nodes=list(box.nodes())[:8], links=links)


def simulated_us(program: st.Program, cluster: st.Cluster, nbytes: float, alpha: str = "blocking") -> float:
    return st.simulate(program, cluster, nbytes=nbytes, alpha=alpha).total_us


def problem_on(
    cluster: st.Cluster, collective: st.Collective, sketch: Sketch, nbytes: float, alpha: str = "blocking"
) -> RoutingProblem:
    return RoutingProblem.of(LogicalTopology.of(sketch, cluster, collective), nbytes=nbytes, alpha=alpha)


@patient
def test_all_gather_on_one_ndv2_meets_the_optimum_for_whole_and_for_split_chunks(patience: float) -> None:
    cluster = nvlinks_as_taccl_counts()
    whole = synthesize(
        st.AllGather(8), cluster, nbytes=8 * MB, sketch=Sketch(), alpha="blocking", budget_s=6 * patience
    )
    assert simulated_us(whole, cluster, 8 * MB) == pytest.approx(69.0)
    split = synthesize(
        st.AllGather(8), cluster, nbytes=8 * MB, sketch=Sketch(input_chunkup=2), alpha="blocking", budget_s=8 * patience
    )
    assert split.collective.chunks == 2
    assert simulated_us(split, cluster, 8 * MB) < 69.0


@patient
def test_all_to_all_on_one_ndv2_meets_the_optimum(patience: float) -> None:
    cluster = nvlinks_as_taccl_counts()
    program = synthesize(
        st.AllToAll(8), cluster, nbytes=8 * MB, sketch=Sketch(), alpha="blocking", budget_s=3 * patience
    )
    assert simulated_us(program, cluster, 8 * MB) == pytest.approx(138.0)


@patient
def test_all_gather_on_two_ndv2_beats_taccl(patience: float) -> None:
    cluster = st.Cluster.load("ndv2:2")
    program = synthesize(st.AllGather(16), cluster, nbytes=16 * MB, alpha="blocking", budget_s=3 * patience)
    assert simulated_us(program, cluster, 16 * MB) < 945


def test_models_of_two_hosts_stay_in_the_thousands() -> None:
    paper = Sketch.load(DATA / "taccl_listing1_dgx2_sk1.json")
    cases = [
        (st.Cluster.load("ndv2:2"), st.AllToAll(16), Sketch.load(DATA / "taccl_repo_ndv2_n2.json"), 10_000),
        (st.Cluster.load("dgx2:2"), st.AllGather(32, chunks=2), paper, 4_000),
        (st.Cluster.load("dgx2:2"), st.AllToAll(32), paper, 20_000),
    ]
    for cluster, collective, sketch, most in cases:
        problem = problem_on(cluster, collective, sketch, 32 * MB)
        assert len(build(problem, scale_us=1.0).model.cost) < most
        assert problem.num_orbits * (len(sketch.symmetry_offsets) + 1) <= len(problem.chunk)


def test_symmetric_pairs_are_one_column_and_rotate_onto_each_other() -> None:
    cluster = st.Cluster.load("dgx2:2")
    problem = problem_on(cluster, st.AllGather(32), Sketch(symmetry_offsets=((2, 16), (16, 32))), 32 * MB)
    logical = problem.logical
    pairs = {
        (int(c), int(logical.src[h]), int(logical.dst[h])): int(k)
        for c, h, k in zip(problem.chunk, problem.hop, problem.orbit, strict=True)
    }

    def turn(rank: int) -> int:
        return rank // 16 * 16 + (rank % 16 + 2) % 16

    assert all(pairs[turn(c), turn(a), turn(b)] == k for (c, a, b), k in pairs.items())
    assert all(pairs[(c + 16) % 32, (a + 16) % 32, (b + 16) % 32] == k for (c, a, b), k in pairs.items())
    assert np.all(np.bincount(problem.orbit) == 16)


def test_routings_reach_every_target_and_respect_their_bound() -> None:
    cluster = st.Cluster.load("ndv2:2")
    problem = problem_on(cluster, st.AllGather(16), Sketch(symmetry_offsets=((8, 16),)), 16 * MB)
    for routing in route(problem, limit_s=3, solutions=2):
        assert routing.load_us >= routing.bound_us * (1 - 1e-9)
        for c, hops in enumerate(routing.hops):
            reached = set(problem.logical.sources[c])
            for hop in hops:
                assert problem.logical.src[hop] in reached
                reached.add(int(problem.logical.dst[hop]))
            assert reached == set(range(16))


def test_uc_min_uses_fewer_connections_than_uc_max() -> None:
    cluster = st.Cluster.load("dgx2:1")
    sketch = loads_switch("uc-min")
    used = {}
    for strategy in ("uc-min", "uc-max"):
        problem = problem_on(cluster, st.AllGather(16), sketch.with_strategy(strategy), 16 * MB)
        best = route(problem, limit_s=100, solutions=1)[0]
        used[strategy] = len({hop for hops in best.hops for hop in hops})
    assert used["uc-min"] < used["uc-max"]


def test_a_switch_policy_reaches_the_program() -> None:
    cluster = st.Cluster.load("dgx2:1")
    connected = {}
    for strategy in ("uc-min", "uc-max"):
        sketch = loads_switch(strategy).vary(symmetry_offsets=((1, 16),))
        program = synthesize(st.AllGather(16), cluster, nbytes=32 * MB, budget_s=5.0, sketch=sketch, alpha="blocking")
        connected[strategy] = len(set(zip(program.src.tolist(), program.dst.tolist(), strict=True)))
    assert connected["uc-max"] == 16 * 15
    assert connected["uc-min"] <= 16 * 4


def loads_switch(strategy: str) -> Sketch:
    from stretto.synthesis.sketch import Hyperedge

    return Sketch(switches=(Hyperedge(gpus=tuple(range(16)), strategy=strategy),), symmetry_offsets=((1, 16),))


@pytest.mark.parametrize("solver", ["highs", "cpsat"])
def test_both_solvers_solve_the_model(solver: str) -> None:
    model = Milp()
    x = [model.column(cost=-value, upper=1.0, integer=True) for value in (5.0, 4.0, 3.0)]
    t = model.column(cost=1.0, upper=100.0)
    model.row({x[0]: 2.0, x[1]: 3.0, x[2]: 1.0}, upper=5.0)
    model.row({x[0]: 1.5, x[1]: 1.5, t: -1.0}, upper=0.0)
    solved = solve(model, solver=solver, limit_s=5)
    assert solved.values is not None and solved.optimal
    assert solved.values[:3].round().tolist() == [1, 0, 1]
    assert solved.values[3] == pytest.approx(1.5, abs=1e-3)


@pytest.mark.parametrize("solver", ["highs", "cpsat"])
def test_both_solvers_prove_that_there_is_no_solution(solver: str) -> None:
    model = Milp()
    x = model.column(upper=1.0, integer=True)
    model.row({x: 2.0}, lower=1.0, upper=1.0)
    with pytest.raises(Infeasible):
        solve(model, solver=solver, limit_s=5)


@patient
def test_cp_sat_routes_as_well(patience: float) -> None:
    cluster = nvlinks_as_taccl_counts()
    program = synthesize(
        st.AllGather(8),
        cluster,
        nbytes=8 * MB,
        sketch=Sketch(),
        alpha="blocking",
        budget_s=6 * patience,
        solver="cpsat",
    )
    assert simulated_us(program, cluster, 8 * MB) <= 92.0


def test_every_rule_gives_a_plan_that_no_link_breaks() -> None:
    cluster = nvlinks_as_taccl_counts()
    problem = problem_on(cluster, st.AllGather(8), Sketch(), 8 * MB)
    routing = search(problem, seed=1)
    assert routing is not None
    tasks = SendTasks.of(problem, routing)
    for variant in VARIANTS:
        first = schedule(tasks, priorities(tasks, variant))
        better = justify(tasks, first)
        assert tasks.end_us(better) <= tasks.end_us(first)
        for start in (first, better):
            for link in range(cluster.num_links):
                on = [(t, us) for t in range(tasks.count) for k, us in tasks.busy[t] if k == link]
                uses = sorted((start[t], start[t] + us) for t, us in on)
                assert all(b[0] >= a[1] - 1e-9 for a, b in pairwise(uses))
            for t, before in enumerate(tasks.before):
                assert before < 0 or start[t] >= start[before] + tasks.us[before] - 1e-9


@patient
def test_small_messages_travel_together_where_alpha_takes_the_link(patience: float) -> None:
    cluster = st.Cluster.preset("ring", nodes=2, gb_per_s=1.0, alpha_us=10.0)
    sketch = Sketch(input_chunkup=4)
    program = synthesize(st.AllGather(2), cluster, nbytes=8000, sketch=sketch, alpha="blocking", budget_s=3 * patience)
    assert simulated_us(program, cluster, 8000) == pytest.approx(14.0)
    assert program.num_transfers == 2
    apart = synthesize(st.AllGather(2), cluster, nbytes=8000, sketch=sketch, alpha="pipelined", budget_s=3 * patience)
    assert apart.num_transfers == 8, "where alpha only delays arrival there is nothing to save"


def test_merging_keeps_what_the_simulator_says_is_best() -> None:
    cluster = st.Cluster.preset("ring", nodes=4, gb_per_s=1.0, alpha_us=3.0)
    problem = problem_on(cluster, st.AllGather(4, chunks=3), Sketch(), 12000)
    routing = search(problem, seed=0)
    assert routing is not None
    tasks = SendTasks.of(problem, routing)
    plan = MessageSchedule.single(tasks, schedule(tasks, priorities(tasks, "longest remaining first")))
    seen: list[float] = []

    def score(tried: MessageSchedule) -> float:
        seen.append(tried.end_us)
        return tried.end_us

    best, us = merge(plan, score, limit_s=2)
    assert us == min(seen) and us < plan.end_us
    assert max(len(sends) for sends in best.sends) > 1
    assert sorted(t for sends in best.sends for t in sends) == list(range(tasks.count))


def test_a_large_plan_is_merged_window_by_window(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = st.Cluster.preset("ring", nodes=4, gb_per_s=1.0, alpha_us=3.0)
    problem = problem_on(cluster, st.AllGather(4, chunks=3), Sketch(), 12000)
    routing = search(problem, seed=0)
    assert routing is not None
    tasks = SendTasks.of(problem, routing)
    plan = MessageSchedule.single(tasks, schedule(tasks, priorities(tasks, "longest remaining first")))
    monkeypatch.setattr(contiguity, "MAX_EXACT", 0)
    monkeypatch.setattr(contiguity, "WINDOW", 16)
    # Without whole runs and single pairs only windows can join anything.
    monkeypatch.setattr(contiguity, "_runs", lambda plan, candidates: iter(()))
    frees: list[tuple[int, set[tuple[int, int]]]] = []
    exact = contiguity._exact

    def watched(*given: Any, free: set[tuple[int, int]], chosen: set[tuple[int, int]], **rest: Any) -> Any:
        made = exact(*given, free=free, chosen=chosen, **rest)
        assert set(made) - free == set(chosen) - free, "what is outside the window stays"
        frees.append((len(free), set(made)))
        return made

    monkeypatch.setattr(contiguity, "_exact", watched)
    best, us = merge(plan, lambda tried: tried.end_us, limit_s=60)
    assert len(frees) > 2 and {size for size, _ in frees[:-1]} == {16}
    assert us < plan.end_us and 1 < max(len(sends) for sends in best.sends) <= contiguity.MAX_MERGED
    assert sorted(t for sends in best.sends for t in sends) == list(range(tasks.count))


@pytest.mark.parametrize(
    "collective",
    [st.Broadcast(8, root=3, chunks=2), st.Gather(8, root=1), st.Scatter(8, root=6), st.AllToAll(8), st.AllGather(8)],
    ids=lambda c: c.kind,
)
def test_every_collective_that_does_not_combine_is_synthesised(collective: st.Collective) -> None:
    cluster = st.Cluster.load("ndv2:1")
    program = synthesize(collective, cluster, nbytes=8 * MB, budget_s=1)
    assert program.verify() and program.name.startswith("three_stage(")
    assert program.collective == collective
    bound = st.lower_bound(collective, cluster, nbytes=8 * MB).total_us
    assert bound * (1 - 1e-9) <= simulated_us(program, cluster, 8 * MB, "pipelined") < math.inf


def test_ranks_may_be_some_of_the_devices() -> None:
    cluster = st.Cluster.load("dgx2:2")
    program = synthesize(st.AllGather([3, 5, 19, 30]), cluster, nbytes=MB, sketch=Sketch(), budget_s=1)
    assert program.verify() and simulated_us(program, cluster, MB) > 0


def test_without_a_sketch_roots_and_subsets_work_on_several_hosts() -> None:
    cluster = st.Cluster.load("ndv2:2")
    for collective in (st.Broadcast(16, root=5), st.AllToAll([1, 2, 9]), st.Scatter(16)):
        program = synthesize(collective, cluster, nbytes=MB, budget_s=1)
        assert program.verify() and program.collective == collective


def test_same_seed_same_program() -> None:
    cluster = st.Cluster.preset("ring", nodes=4, gb_per_s=1.0, alpha_us=1.0)
    made = [synthesize(st.AllGather(4), cluster, nbytes=4000, sketch=Sketch(), budget_s=2, seed=5) for _ in range(2)]
    assert made[0] == made[1]


@patient
def test_torus_without_hosts_is_one_node_with_its_rotation(patience: float) -> None:
    cluster = st.Cluster.load("torus:4x4")
    sketch = Sketch(symmetry_offsets=((1, 4), (4, 16)))
    program = synthesize(st.AllGather(16), cluster, nbytes=16 * MB, sketch=sketch, budget_s=4 * patience)
    bound = st.lower_bound(st.AllGather(16), cluster, nbytes=16 * MB).total_us
    assert simulated_us(program, cluster, 16 * MB, "pipelined") <= 1.5 * bound


def test_dropped_links_are_named_when_a_chunk_has_no_way() -> None:
    ring = st.Cluster.preset("ring", nodes=4)
    names = ring.node_names
    gone = Sketch(name="cut", drop=(LinkRule(dst=(names[2],), chunks=(3,)),))
    says = rf"sketch cut: no path for chunk 3 from {names[3]} to {names[2]}: links.drop\[0\] is gone"
    with pytest.raises(Infeasible, match=says):
        synthesize(st.AllGather(4), ring, nbytes=MB, sketch=gone)


def test_relays_that_cannot_be_reached_are_named() -> None:
    cluster = st.Cluster.load("dgx2:2")
    sketch = Sketch(internode_conn={1: (0,)}, chunk_to_relay_map=(2, 1))
    with pytest.raises(Infeasible, match=r"no path for chunk 2 from h0.gpu2 to h1.gpu0: internode_conn limits"):
        synthesize(st.AllGather(32), cluster, nbytes=MB, sketch=sketch)


def test_a_rotation_that_the_collective_does_not_have_is_named() -> None:
    ring = st.Cluster.preset("ring", nodes=4)
    with pytest.raises(Infeasible, match=r"symmetry_offsets\[0\]: broadcast changes with this rotation"):
        synthesize(st.Broadcast(4), ring, nbytes=MB, sketch=Sketch(symmetry_offsets=((1, 4),)))
    with pytest.raises(InvalidInput, match=r"symmetry_offsets\[0\]: groups of 3 do not divide 4 ranks"):
        synthesize(st.AllGather(4), ring, nbytes=MB, sketch=Sketch(symmetry_offsets=((1, 3),)))


def test_a_disconnected_cluster_is_named() -> None:
    nodes = [st.Node(name=f"d{i}") for i in range(3)]
    cluster = st.Cluster.build("broken", nodes=nodes, links=[st.Link(src=0, dst=1, alpha_us=1.0, gb_per_s=1.0)])
    with pytest.raises(Infeasible, match="no path for chunk 0 from d0 to d2: the cluster has no links"):
        synthesize(st.AllGather(3), cluster, nbytes=MB)


def test_progress_tells_the_size_of_the_model_and_rises() -> None:
    told: list[tuple[str, float]] = []
    cluster = st.Cluster.load("ndv2:1")
    synthesize(st.AllGather(8), cluster, nbytes=MB, budget_s=1, progress=lambda m, f: told.append((m, f)))
    assert "binaries" in told[0][0]
    assert [f for _, f in told] == sorted(f for _, f in told)


def test_input_size_stands_in_for_bytes() -> None:
    sketch = Sketch(input_bytes=MB)
    assert bytes_of(sketch, st.AllGather(8)) == pytest.approx(8 * MB)
    assert bytes_of(sketch, st.AllToAll(8)) == pytest.approx(MB)
    with pytest.raises(InvalidInput, match="nbytes: is needed"):
        synthesize(st.AllGather(2), st.Cluster.preset("ring", nodes=2))


def test_refining_is_what_more_chunks_are() -> None:
    for make in (st.AllGather, st.AllToAll):
        assert refined(make(4, chunks=2), 3) == make(4, chunks=6)
    assert refined(st.Scatter(4, root=2), 2) == st.Scatter(4, root=2, chunks=2)


def test_ablations_are_labelled() -> None:
    paper = Sketch.load(DATA / "taccl_listing1_dgx2_sk1.json")
    made = dict(ablation(paper, gpus=16, connections=(1, 8), chunks=(1, 4), strategies=("uc-max",)))
    assert list(made) == [
        "internode_conn=1",
        "internode_conn=8",
        "input_chunkup=1",
        "input_chunkup=4",
        "switches=uc-max",
    ]
    assert made["input_chunkup=4"].input_chunkup == 4


def test_solvers_are_loaded_only_when_they_solve() -> None:
    import subprocess

    code = "import sys, stretto.synthesis.three_stage; print([m for m in ('highspy', 'ortools') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_eighty_gpus_are_served_where_it_is_asked_for_or_has_a_sketch() -> None:
    cluster = st.Cluster.load("ndv2:10")
    problem = SynthesisProblem(collective=st.AllGather(80), cluster=cluster, nbytes=st.MB)
    tasks, refused = plan_tasks(problem, None)
    assert "three_stage" not in {task.maker for task in tasks}
    assert "up to 64 ranks unless it is asked for or given a sketch" in refused["three_stage"]
    assert {task.maker for task in plan_tasks(problem, ["three_stage"])[0]} == {"three_stage"}
    sketched = replace(problem, sketch=next(sketches(cluster)))
    assert "three_stage" in {task.maker for task in plan_tasks(sketched, None)[0]}
