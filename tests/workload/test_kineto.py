# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import gzip
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from stretto.workload import kineto, kineto_events
from stretto.workload.dag import Dep, Op, Workload

DATA = Path(__file__).parent / "data"


def _maker() -> Any:
    spec = importlib.util.spec_from_file_location("make_traces", DATA / "make_traces.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _all(stem: str, ranks: int) -> Workload:
    first, *peers = [DATA / f"{stem}.{rank}.json" for rank in range(ranks)]
    return kineto.read(first, peers=peers)


def _saved(traces: list[dict[str, Any]], folder: Path) -> Path:
    for trace in traces:
        (folder / f"rank{trace['distributedInfo']['rank']}.json").write_text(json.dumps(trace))
    return folder


def _gpu() -> list[dict[str, Any]]:
    return [json.loads((DATA / f"gpu_nccl.{rank}.json").read_text()) for rank in range(4)]


def _comm(workload: Workload, kind: str) -> Op:
    (op,) = [op for op in workload.comm_ops if op.kind == kind]
    return op


def test_the_committed_gpu_trace_is_what_its_maker_writes() -> None:
    assert _gpu() == [_maker().gpu_rank(rank) for rank in range(4)]


def test_gpu_collectives_have_our_sizes_and_the_groups_of_all_ranks() -> None:
    workload = _all("gpu_nccl", 4)
    gather, reduce = _comm(workload, "all_gather"), _comm(workload, "all_reduce")
    assert (gather.nbytes, gather.groups) == (2_000_000 * 2, ((0, 1), (2, 3)))
    assert (reduce.nbytes, reduce.groups) == (3_000_000 * 4, ((0, 2), (1, 3)))
    assert workload.num_ranks == 4


def test_with_all_ranks_waiting_is_taken_apart_from_transfer() -> None:
    workload = _all("gpu_nccl", 4)
    gather, reduce = _comm(workload, "all_gather"), _comm(workload, "all_reduce")
    # Rank r enters 5 us after rank r - 1: of each pair of neighbours one waits 5 us, of each pair across 10 us.
    assert (gather.duration_us, gather.wait_us) == pytest.approx((40.0, 2.5))
    assert (reduce.duration_us, reduce.wait_us) == pytest.approx((150.0, 5.0))


def test_gpu_blocks_depend_on_collectives_where_streams_waited() -> None:
    workload = _all("gpu_nccl", 4)
    assert [op.name for op in workload.ops if op.stream == "7"] == ["forward.0", "backward.0", "backward.1", "update.0"]
    assert workload.op("all_gather.0").after == (Dep(op="forward.0"),)
    assert Dep(op="all_gather.0", why="wait") in workload.op("backward.0").after
    assert workload.op("all_reduce.0").after == (Dep(op="backward.0"),)
    assert workload.op("backward.1").after == ()
    assert Dep(op="all_reduce.0", why="wait") in workload.op("update.0").after
    assert Dep(op="update.0", lag=1) in workload.op("forward.0").after


def test_gpu_durations_are_kernels_and_launch_gaps_without_the_waiting() -> None:
    workload = _all("gpu_nccl", 4)
    times = {op.name: op.duration_us for op in workload.ops if not op.is_comm}
    # 1 us between kernels; between steps 58 us without work; rank r computes 5 r us longer at first.
    assert times["backward.0"] == pytest.approx(1 + 80 + 1 + 120)
    assert times["backward.1"] == pytest.approx(1 + 100)
    assert times["update.0"] == pytest.approx(1 + 30)
    assert times["forward.0"] == pytest.approx(100 + 7.5 + 58)
    assert times["stream11.forward.0"] == pytest.approx(20)


def test_one_rank_alone_takes_the_shortest_step_and_says_so() -> None:
    workload = kineto.read(DATA / "gpu_nccl.0.json")
    reduce = _comm(workload, "all_reduce")
    assert (reduce.duration_us, reduce.wait_us) == pytest.approx((160.0, 0.0))
    assert reduce.groups == ((0, 2), (1, 3))
    assert _comm(workload, "all_gather").groups == ((0, 1), (2, 3))
    assert any("their waiting is not known" in note for note in workload.notes)
    assert any("taken to do the same" in note for note in workload.notes)


def test_a_directory_and_packed_files_read_the_same(tmp_path: Path) -> None:
    for rank in range(4):
        text = (DATA / f"gpu_nccl.{rank}.json").read_bytes()
        (tmp_path / f"rank{rank}.json.gz").write_bytes(gzip.compress(text))
    assert kineto.read(tmp_path).ops == _all("gpu_nccl", 4).ops


def test_steps_are_found_by_repetition_where_none_are_marked(tmp_path: Path) -> None:
    traces = _gpu()
    for trace in traces:
        trace["traceEvents"] = [e for e in trace["traceEvents"] if not e["name"].startswith("ProfilerStep")]
    workload = kineto.read(_saved(traces, tmp_path))
    assert any("3 steps found by repetition" in note for note in workload.notes)
    assert _comm(workload, "all_reduce").duration_us == pytest.approx(150.0)
    assert len(workload.ops) == 7


def test_metadata_is_found_by_external_id_where_the_kernel_has_none(tmp_path: Path) -> None:
    traces = _gpu()
    for trace in traces:
        for event in trace["traceEvents"]:
            if event["name"].startswith("nccl"):
                keys = ("stream", "correlation", "External id")
                event["args"] = {key: event["args"][key] for key in keys}
    assert kineto.read(_saved(traces, tmp_path)).ops == _all("gpu_nccl", 4).ops


def test_without_a_visible_wait_the_place_is_where_every_sample_shows_it(tmp_path: Path) -> None:
    traces = _gpu()
    for trace in traces:
        trace["traceEvents"] = [e for e in trace["traceEvents"] if e["args"].get("Collective name") != "wait"]
    workload = kineto.read(_saved(traces, tmp_path))
    assert Dep(op="all_reduce.0", why="wait") in workload.op("update.0").after
    assert Dep(op="all_gather.0", why="wait") in workload.op("backward.0").after


def test_cuda_sync_events_say_what_a_collective_waited_for(tmp_path: Path) -> None:
    traces = _gpu()
    for trace in traces:
        for step in range(3):
            t = 1000.0 + 600.0 * step
            # Before the all-reduce: its stream waits for what the copy stream was given, not for the compute stream.
            calls = [("cudaEventRecord", t + 61, 9000 + step), ("cudaStreamWaitEvent", t + 61.5, 9100 + step)]
            for name, ts, correlation in calls:
                args: dict[str, Any] = {"correlation": correlation}
                trace["traceEvents"].append(
                    {"ph": "X", "cat": "cuda_runtime", "name": name, "tid": 1, "ts": ts, "dur": 0.1, "args": args}
                )
            args = {
                "stream": 20, "correlation": 9100 + step, "wait_on_stream": 11,
                "wait_on_cuda_event_record_corr_id": 9000 + step,
            }  # fmt: skip
            sync = {"ph": "X", "cat": "cuda_sync", "name": "Stream Wait Event", "tid": 20, "ts": t, "args": args}
            trace["traceEvents"].append(sync)
    workload = kineto.read(_saved(traces, tmp_path))
    assert workload.op("all_reduce.0").after == (Dep(op="stream11.forward.0"),)


def test_clocks_of_other_hosts_are_set_by_the_ends_of_collectives(tmp_path: Path) -> None:
    traces = _gpu()
    for trace in traces[2:]:
        trace["host_name"] = "other"
        for event in trace["traceEvents"]:
            event["ts"] += 12_345.0
    workload = kineto.read(_saved(traces, tmp_path))
    assert _comm(workload, "all_reduce").duration_us == pytest.approx(150.0)
    assert any("several hosts" in note for note in workload.notes)


def test_sizes_that_change_are_an_upper_bound(tmp_path: Path) -> None:
    traces = _gpu()
    for trace in traces:
        for event in trace["traceEvents"]:
            if event["args"].get("Seq") == 21:
                event["args"]["In msg nelems"] = event["args"]["Out msg nelems"] = 4_000_000
    reduce = _comm(kineto.read(_saved(traces, tmp_path)), "all_reduce")
    assert (reduce.nbytes, reduce.at_most) == (16_000_000, True)


def test_an_all_to_all_with_splits_is_an_upper_bound_also_where_its_size_is_always_the_same(tmp_path: Path) -> None:
    found = {}
    for name in ("all_to_all", "all_to_allv"):
        traces = _gpu()
        for trace in traces:
            for event in trace["traceEvents"]:
                if event["args"].get("Collective name") == "allreduce":
                    event["args"]["Collective name"] = name
        (tmp_path / name).mkdir()
        found[name] = _comm(kineto.read(_saved(traces, tmp_path / name)), "all_to_all").at_most
    assert found == {"all_to_all": False, "all_to_allv": True}


def event(cat: str, name: str, ts: float, dur: float, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "tid": 1, "ts": ts, "dur": dur, "args": args}


def test_work_pulled_ahead_does_not_wait_for_the_step_before(tmp_path: Path) -> None:
    events = []
    for step in range(3):
        t = 1000.0 * step
        events.append(event("user_annotation", f"ProfilerStep#{step}", t, 990.0))
        about = {"Collective name": "all_to_allv", "In msg nelems": 8, "Out msg nelems": 8, "Group size": 2}
        about |= {"dtype": "Long", "Process Group Ranks": "[0, 1]"}
        for number, (launch, start, end) in enumerate([(5.0, 20.0, 120.0), (6.0, 125.0, 200.0)]):
            link = 100 * step + number
            events.append(event("cuda_runtime", "cudaLaunchKernel", t + launch, 1.0, correlation=link))
            named = {"correlation": link, "External id": link, "stream": 20}
            events.append(event("kernel", "ncclDevKernel_SendRecv", t + start, end - start, **named, **about))
        for number, (launch, start, end) in enumerate([(10.0, 300.0, 500.0), (12.0, 505.0, 1250.0)]):
            link = 100 * step + 50 + number
            events.append(event("cuda_runtime", "cudaLaunchKernel", t + launch, 1.0, correlation=link))
            events.append(event("kernel", "mm", t + start, end - start, correlation=link, stream=7))
    trace = {"distributedInfo": {"rank": 0, "world_size": 2}, "traceEvents": events}
    workload = kineto.read(_saved([trace], tmp_path))
    first, second = workload.comm_ops
    # The kernels of the step before run until 250 us into this one; both transfers began before.
    assert first.after == () and second.after == ()
    assert {Dep(op=first.name, why="wait"), Dep(op=second.name, why="wait")} <= set(workload.op("compute.0").after)


def test_long_groups_are_cut_short_by_the_profiler_and_completed(tmp_path: Path) -> None:
    traces = _gpu()
    for trace in traces:
        for each in trace["traceEvents"]:
            if "Group size" in each["args"]:
                each["args"]["Process Group Ranks"] = each["args"]["Process Group Ranks"].split(",")[0] + ", ...]"
    assert kineto.read(_saved(traces, tmp_path)).ops == _all("gpu_nccl", 4).ops
    args = kineto_events.EventArgs(group_ranks="[0, 2, 4, ...]", group_size=8)
    about = kineto_events.Events(where="x", events=[], rank=0, world=16, host="", base_ns=0, groups={})
    assert kineto_events.group_of(args, about, "x") == tuple(range(0, 16, 2))


def test_a_pipeline_of_two_ranks_joins_send_and_receive(tmp_path: Path) -> None:
    traces = []
    for rank in range(2):
        events = []
        for step in range(2):
            t = 1000.0 * step
            events.append(event("user_annotation", f"ProfilerStep#{step}", t, 900.0))
            names = {"Collective name": "recv" if rank else "send", ("Src Rank" if rank else "Dst Rank"): 1 - rank}
            p2p = {"In msg nelems": 250, "Out msg nelems": 250, "dtype": "Float", "Group size": 2, "Seq": step}
            args = {**names, **p2p, "Process Group Ranks": "[0, 1]"}
            if rank == 0:
                events.append(event("kernel", "first", t + 10, 100.0, stream=7))
                events.append(event("kernel", "ncclDevKernel_SendRecv", t + 112, 30.0, stream=20, **args))
            else:
                events.append(event("kernel", "ncclDevKernel_SendRecv", t + 5, 137.0, stream=20, **args))
                events.append(event("kernel", "second", t + 143, 80.0, stream=7))
        about = {"rank": rank, "world_size": 2}
        traces.append({"distributedInfo": about, "traceEvents": events})
    workload = kineto.read(_saved(traces, tmp_path))
    (send,) = workload.comm_ops
    assert (send.kind, send.nbytes, send.groups) == ("send", 1000.0, ((0, 1),))
    assert send.duration_us == pytest.approx(30.0)
    assert send.wait_us == pytest.approx(107.0 / 2)
    first, second = (op for op in workload.ops if not op.is_comm)
    assert (first.ranks, second.ranks) == ((0,), (1,))
    assert Dep(op=first.name) in send.after
    assert Dep(op="send.0", why="wait") in second.after


def test_a_real_ddp_training_on_gloo() -> None:
    workload = _all("ddp_gloo", 2)
    assert [(op.kind, op.nbytes, op.groups) for op in workload.comm_ops] == [
        ("all_reduce", 4 * (256 * 256 + 256 + 256 * 10 + 10), ()),
        ("all_reduce", 4 * (64 * 256 + 256), ()),
        ("all_reduce", 4, ()),
    ]
    assert all(op.duration_us > 0 for op in workload.ops)
    blocks = [op for op in workload.ops if not op.is_comm]
    assert len(blocks) == 3
    forward, backward, update = (block.name for block in blocks)
    first, second, loss = workload.comm_ops
    assert first.after == (Dep(op=forward, why="submit"),)
    assert second.after == (Dep(op=backward, why="submit"),)
    # DDP waits for all its buckets at the end of the backward pass; the loss is reduced by a call that waits.
    assert set(blocks[2].after) == {Dep(op="all_reduce.0", why="wait"), Dep(op="all_reduce.1", why="wait")}
    assert loss.after == (Dep(op=update, why="submit"),)
    assert set(blocks[0].after) == {Dep(op=update, lag=1), Dep(op="all_reduce.2", lag=1, why="wait")}


def test_a_real_rank_alone_has_the_same_ops() -> None:
    both, one = _all("ddp_gloo", 2), kineto.read(DATA / "ddp_gloo.1.json")
    assert [(op.name, op.kind, op.nbytes, op.after) for op in one.ops] == [
        (op.name, op.kind, op.nbytes, op.after) for op in both.ops
    ]


def ddp_on_gloo(late_us: float = 0.0) -> dict[str, Any]:
    """A rank of DDP on gloo that waits for bucket after bucket; the last span is closed so long after its end."""
    sized = {"Input Dims": [[[1000]]], "Input type": ["float"], "Concrete Inputs": ["", "", "True", "-1"]}
    events = []
    for step in range(3):
        t = 100_000.0 * step
        events.append(event("user_annotation", f"ProfilerStep#{step}", t, 99_000.0))
        events.append(event("user_annotation", "DistributedDataParallel.forward", t, 1000.0))
        events.append(event("cpu_op", "aten::mm", t, 1000.0))
        for bucket, end in enumerate((20_000.0, 50_000.0)):
            back = t + 2000.0 * bucket + 1000.0
            events.append(event("cpu_op", "autograd::engine::evaluate_function: AddmmBackward0", back, 1990.0))
            events.append(event("cpu_op", "c10d::allreduce_", back + 1910.0, 10.0, **sized))
            begin, late = back + 1950.0, late_us * bucket
            span = event(
                "user_annotation", "gloo:all_reduce", begin, t + end + late - begin, **sized | {"Input Dims": [[1000]]}
            )
            events.append(span | {"tid": 2})
            events.append(event("cpu_op", "aten::copy_", t + end, 300.0))
        events.append(event("user_annotation", "Optimizer.step#SGD.step", t + 50_400.0, 2000.0))
        events += [event("cpu_op", "aten::add_", t + 50_500.0 + 900.0 * at, 100.0) for at in range(3)]
    world = {"rank": 0, "world_size": 2, "pg_config": [{"pg_name": "0", "ranks": [0, 1]}]}
    return {"distributedInfo": world, "traceEvents": sorted(events, key=lambda each: float(each["ts"]))}


@pytest.mark.parametrize("late_us", [0.0, 1500.0, 20_000.0])
def test_waiting_for_one_bucket_after_the_other_is_no_compute(late_us: float, tmp_path: Path) -> None:
    workload = kineto.read(_saved([ddp_on_gloo(late_us)], tmp_path))
    last = [op for op in workload.ops if not op.is_comm][-1]
    assert {dep.op for dep in last.after} == {op.name for op in workload.comm_ops}
    # Two copies, 100 us of Python, and the optimizer with its pauses; not the 29,700 us between the copies.
    assert last.duration_us == pytest.approx(2700, abs=101)
