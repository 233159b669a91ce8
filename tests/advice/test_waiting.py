# SPDX-License-Identifier: Apache-2.0
"""Waiting that is measured in generated traces, against a count of every microsecond."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest

from stretto.advice import advise
from stretto.workload import kineto
from stretto.workload.kineto_waiting import StepWaiting, waiting_of

Span = tuple[int, int]
COMM = {
    "Collective name": "allreduce", "In msg nelems": 1000, "Out msg nelems": 1000, "Group size": 2, "dtype": "Float",
    "Process Group Ranks": "[0, 1]",
}  # fmt: skip


def event(cat: str, name: str, ts: float, dur: float, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "tid": 1, "ts": ts, "dur": dur, "args": args}


def gpu_trace(steps: list[tuple[list[Span], list[Span]]]) -> dict[str, Any]:
    """A rank with these spans of compute and communication on the GPU; everything is launched ahead of its step."""
    events: list[dict[str, Any]] = []
    link = 0
    for number, (compute, comm) in enumerate(steps):
        events.append(event("user_annotation", f"ProfilerStep#{number}", 10.0 * number, 9.0))
        for spans, extra, stream in ((compute, {}, 7), (comm, COMM, 20)):
            for start, end in spans:
                link += 1
                args = {"correlation": link, "stream": stream, **extra}
                if extra:
                    args["External id"] = link
                launch = 10.0 * number + 0.001 * (link % 1000)
                events.append(event("cuda_runtime", "cudaLaunchKernel", launch, 0.001, correlation=link))
                name = "ncclDevKernel_AllReduce" if extra else "mm"
                events.append(event("kernel", name, 100.0 + start, end - start, **args))
    return {"distributedInfo": {"rank": 0, "world_size": 2}, "traceEvents": events}


def measured(trace: dict[str, Any], folder: Path) -> StepWaiting:
    path = folder / "rank0.json"
    path.write_text(json.dumps(trace))
    (found,) = waiting_of(kineto.read_ranks(path))
    return found


def counted(window: Span, compute: list[Span], comm: list[Span]) -> tuple[int, int, int, int]:
    """Length, compute, waiting and communication of a window, microsecond by microsecond."""

    def runs(spans: list[Span], at: int) -> bool:
        return any(start <= at < end for start, end in spans)

    low, high = window
    waits, pause = 0, list[int]()
    for at in [*range(low, high), high]:
        if at < high and not runs(compute, at):
            pause.append(at)
            continue
        last = max((end for _, end in comm if pause and pause[0] < end <= at), default=0)
        waits += sum(runs(comm, each) for each in pause if each < last)
        pause = []
    busy, moving = ([runs(spans, at) for at in range(low, high)] for spans in (compute, comm))
    return high - low, sum(busy), waits, sum(moving)


def test_a_step_with_a_known_overlap_waits_exactly_so_long(tmp_path: Path) -> None:
    # 300 us of compute, an all-reduce of 250 us of which 100 us lie under compute, then 40 us until the next step.
    steps = [([(at, at + 200), (at + 350, at + 450)], [(at + 100, at + 350)]) for at in (0, 490, 980)]
    found = measured(gpu_trace(steps), tmp_path)
    assert (found.step_us, found.compute_us, found.waits_us, found.comm_us) == (490.0, 300.0, 150.0, 250.0)
    assert found.share == pytest.approx(150 / 490)
    assert found.idle_us == 40.0 and found.steps == 2


def test_a_pause_in_which_no_collective_ends_is_no_waiting(tmp_path: Path) -> None:
    steps = [([(at, at + 100), (at + 150, at + 400)], [(at + 50, at + 300)]) for at in (0, 500)]
    found = measured(gpu_trace(steps), tmp_path)
    # The launch pause from 100 to 150 lies under the collective, which ends later, under compute.
    assert found.waits_us == 0.0 and found.idle_us == 150.0


def test_a_lone_step_lasts_until_its_last_event(tmp_path: Path) -> None:
    found = measured(gpu_trace([([(0, 100)], [(50, 180)])]), tmp_path)
    assert (found.step_us, found.waits_us, found.steps) == (180.0, 80.0, 1)


@pytest.mark.parametrize("seed", range(60))
def test_random_traces_are_counted_alike(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    steps: list[tuple[list[Span], list[Span]]] = []
    at = 0
    for _ in range(3):
        compute, comm, begin = list[Span](), list[Span](), at
        for _ in range(rng.randint(1, 6)):
            start = at + rng.choice([0, 0, rng.randint(1, 30)])
            at = start + rng.randint(1, 40)
            compute.append((start, at))
        for _ in range(rng.randint(0, 4)):
            start = rng.randint(begin, at)
            comm.append((start, start + rng.randint(1, 60)))
        steps.append((compute, comm))
        at += rng.randint(0, 60)
    if len({len(comm) for _, comm in steps}) > 1:
        # Steps of different shapes are compared by nobody; give all of them the same number of collectives.
        steps = [(compute, steps[0][1] if not comm else comm[:1]) for compute, comm in steps]
        steps = [(compute, comm[:1] or [(compute[0][0], compute[0][0] + 1)]) for compute, comm in steps]
    found = measured(gpu_trace(steps), tmp_path)
    every = [span for compute, _ in steps for span in compute]
    moves = [span for _, comm in steps for span in comm]
    begins = [compute[0][0] for compute, _ in steps]
    rows = sorted(counted((low, high), every, moves) for low, high in itertools.pairwise(begins))
    expected = rows[(len(rows) - 1) // 2]
    assert (found.step_us, found.compute_us, found.waits_us, found.comm_us) == expected


def cpu_trace(rank: int, compute: list[list[Span]], comm: list[list[Span]]) -> dict[str, Any]:
    """A rank on gloo: every step has these ops on its thread, and these collectives, called as they begin."""
    events: list[dict[str, Any]] = []
    for number, (works, calls) in enumerate(zip(compute, comm, strict=True)):
        begin, end = works[0][0], max(works[-1][1], *(until for _, until in calls))
        events.append(event("user_annotation", f"ProfilerStep#{number}", begin, end - begin))
        events += [event("cpu_op", f"op{at}", start, until - start) for at, (start, until) in enumerate(works)]
        for start, until in calls:
            shape = {"Input Dims": [[[1000]]], "Input type": ["TensorList"], "Concrete Inputs": [""]}
            events.append(event("cpu_op", "c10d::allreduce_", start - 1, 0.5, **shape))
            span = event("user_annotation", "gloo:all_reduce", start, until - start)
            events.append({**span, "tid": 2, "args": {"Input Dims": [[1000]], "Input type": ["float"]}})
    about = {"backend": "gloo", "rank": rank, "world_size": 2}
    return {"distributedInfo": about, "host_name": f"host{rank}", "traceEvents": events}


def test_a_collective_on_gloo_whose_end_is_noted_late_is_waited_for(tmp_path: Path) -> None:
    # Two collectives at once; the rank goes on 2 us before the end of the last one is noted.
    begins = (0, 560, 1120)
    compute = [[(at, at + 58), (at + 61, at + 88), (at + 91, at + 100), (at + 498, at + 560)] for at in begins]
    comm = [[(at + 60, at + 400), (at + 90, at + 500)] for at in begins]
    found = measured(cpu_trace(0, compute, comm), tmp_path)
    assert found.waits_us == 398.0
    assert (found.comm_us, found.calls_us) == (440.0, 750.0)


def test_collectives_that_run_at_once_on_gloo_are_not_counted_twice(tmp_path: Path) -> None:
    begins = (0, 560, 1120)
    compute = [[(at, at + 58), (at + 61, at + 88), (at + 500, at + 560)] for at in begins]
    comm = [[(at + 60, at + 500), (at + 90, at + 500)] for at in begins]
    for rank in (0, 1):
        (tmp_path / f"rank{rank}.json").write_text(json.dumps(cpu_trace(rank, compute, comm)))
    found = advise(tmp_path, "hosts: 2, gpus: 1 x a100, network: 1gbit", steps=5)
    assert found.measured and found.model_us == pytest.approx(found.step_us, rel=0.25)


def test_an_operator_computes_as_a_whole_and_a_wait_does_not(tmp_path: Path) -> None:
    # A convolution allocates as it begins, and a collective ends while it computes: that hides it. Then a wait.
    begins = (0, 200, 400)
    trace = cpu_trace(
        0, [[(at, at + 10), (at + 190, at + 200)] for at in begins], [[(at + 12, at + 80)] for at in begins]
    )
    for at in begins:
        inside = [("aten::convolution", 20, 100), ("aten::empty", 21, 1), ("_c10d_functional::wait_tensor", 130, 50)]
        trace["traceEvents"] += [event("cpu_op", name, at + start, dur) for name, start, dur in inside]
        # An event around a call is not compute as a whole: its thread may wait inside.
        trace["traceEvents"].append(event("cpu_op", "aten::around", at + 10.5, 9))
    found = measured(trace, tmp_path)
    assert (found.compute_us, found.waits_us) == (120.0, 0.0)
