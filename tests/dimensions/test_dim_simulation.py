# SPDX-License-Identifier: Apache-2.0
"""The native simulator against one written from the definition, and the order that it fixes."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto import InvalidInput, _native
from stretto.dimensions import Dim, DimChunk, DimSchedule, baseline, simulate, stretto, themis
from stretto.dimensions.schedule import Stages
from stretto.dimensions.simulation import ChunkJob, keys, simulate_jobs

DIMS = (
    Dim(kind="switch", size=4, gb_per_s=100, step_us=0.7),
    Dim(kind="ring", size=3, gb_per_s=60, step_us=0.3),
    Dim(kind="fully_connected", size=2, gb_per_s=25, step_us=1.7),
)


def reference(schedule: DimSchedule, release: list[float], in_flight: int, sharing: str) -> tuple[list[float], float]:
    """Ends of all stages and the total: whoever holds a slot and has bytes left sends; moment by moment."""
    table, rate = schedule.stages, [dim.bytes_per_us for dim in schedule.dims]
    given_key, left = keys(schedule).tolist(), table.wire_bytes.tolist()
    state = ["later"] * len(left)  # later, waiting, sending, flying, over
    until, end, came = [math.inf] * len(left), [0.0] * len(left), 0
    arrived: dict[int, int] = {}
    begins = {int(table.chunk_ptr[c]): release[c] for c in range(len(release))}
    now = 0.0

    def key(op: int) -> tuple[float, int]:
        return (arrived[op] if schedule.discipline == "fifo" else given_key[op], int(table.chunk[op]))

    while "over" not in state or any(s != "over" for s in state):
        # Everything that happens at this moment, by number of the stage.
        for op in range(len(state)):
            ends = state[op] == "flying" and until[op] <= now * (1 + 1e-12)
            if ends:
                state[op], end[op] = "over", now
            starts = [op + 1] if ends and op + 1 < table.chunk_ptr[table.chunk[op] + 1] else []
            starts += [op] if state[op] == "later" and begins.get(op, math.inf) <= now else []
            for other in starts:
                state[other], arrived[other], came = "waiting", came, came + 1
        for dim in range(len(rate)):
            mine = [op for op in range(len(state)) if table.dim[op] == dim]
            busy = sum(state[op] in ("sending", "flying") for op in mine)
            for op in sorted((op for op in mine if state[op] == "waiting"), key=key)[: max(0, in_flight - busy)]:
                state[op] = "sending"
        speed = [0.0] * len(state)
        for dim in range(len(rate)):
            mine = [op for op in range(len(state)) if table.dim[op] == dim]
            sending = sorted((op for op in mine if state[op] == "sending"), key=key)
            for op in sending[:1] if sharing == "ordered" else sending:
                speed[op] = rate[dim] / (1 if sharing == "ordered" else len(sending))
        moments = [until[op] for op in range(len(state)) if state[op] == "flying"]
        moments += [begins[op] for op in begins if state[op] == "later"]
        moments += [now + left[op] / speed[op] for op in range(len(state)) if speed[op]]
        if not moments:
            break
        after = min(moments)
        for op in range(len(state)):
            left[op] -= speed[op] * (after - now)
            if speed[op] and left[op] <= 1e-9 * table.wire_bytes[op]:
                state[op], until[op] = "flying", after + float(table.latency_us[op])
        now = after
    return end, now


@st.composite
def schedules(draw: st.DrawFn) -> DimSchedule:
    rng = random.Random(draw(st.integers(0, 1 << 30)))
    dims = tuple(
        Dim(
            kind=rng.choice(["ring", "switch", "fully_connected"]), size=rng.randint(2, 6),
            gb_per_s=rng.uniform(10, 200), step_us=rng.uniform(0.1, 3),
        )
        for _ in range(rng.randint(1, 3))
    )  # fmt: skip
    weights = [rng.uniform(0.5, 2) for _ in range(rng.randint(1, 8))]
    collective = rng.choice(["all_reduce", "reduce_scatter", "all_gather"])

    def order(wanted: bool) -> tuple[int, ...]:
        return tuple(rng.sample(range(len(dims)), len(dims))) if wanted else ()

    chunks = tuple(
        DimChunk(
            share=weight / sum(weights), reduce_scatter=order(collective != "all_gather"),
            all_gather=order(collective != "reduce_scatter"),
        )
        for weight in weights
    )  # fmt: skip
    return DimSchedule(
        name="random", dims=dims, collective=collective, nbytes=rng.uniform(1e4, 1e7), chunks=chunks,
        discipline=rng.choice(["fifo", "scf", "johnson"]),
    )  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(schedules(), st.integers(1, 5), st.sampled_from(["ordered", "equal"]), st.integers(0, 1 << 30))
def test_the_native_simulator_does_what_the_definition_says(
    schedule: DimSchedule, in_flight: int, sharing: str, seed: int
) -> None:
    release = [random.Random(seed + c).uniform(0, 50) for c in range(len(schedule.chunks))]
    run = simulate(schedule, in_flight=in_flight, sharing=sharing, release_us=release)
    ends, total = reference(schedule, release, in_flight, sharing)
    assert run.total_us == pytest.approx(total, rel=1e-6)
    assert run.end_us.tolist() == pytest.approx(ends, rel=1e-6)


@settings(max_examples=60, deadline=None)
@given(schedules(), st.integers(1, 8))
def test_the_enforced_order_is_the_simulated_one(schedule: DimSchedule, in_flight: int) -> None:
    run = simulate(schedule, in_flight=in_flight)
    again = simulate(run.enforced(), in_flight=in_flight)
    assert again.start_us.tolist() == run.start_us.tolist()
    assert again.end_us.tolist() == run.end_us.tolist()


@settings(max_examples=60, deadline=None)
@given(schedules(), st.integers(1, 8), st.integers(0, 1 << 30), st.sampled_from(["fifo", "scf", "enforced"]))
def test_an_enforced_order_never_gets_stuck_when_chunks_are_ready_in_another_order(
    schedule: DimSchedule, in_flight: int, seed: int, discipline: str
) -> None:
    fixed = replace(simulate(schedule, in_flight=in_flight).enforced(), discipline=discipline)
    rng = random.Random(seed)
    late = [rng.uniform(0, 1000) for _ in schedule.chunks]
    slow = [replace(dim, gb_per_s=dim.gb_per_s * rng.uniform(0.2, 5)) for dim in schedule.dims]
    run = simulate(fixed, in_flight=rng.randint(1, 8), release_us=late, dims=slow)
    assert np.all(run.end_us > 0)
    table = fixed.stages
    for dim, order in enumerate(fixed.order):
        starts = [run.start_us[table.chunk_ptr[chunk] + stage] for chunk, stage in order]
        assert starts == sorted(starts), f"dimension {dim} began its stages in another order"


def test_an_order_that_can_never_end_is_refused() -> None:
    ways = (
        DimChunk(share=0.5, reduce_scatter=(0, 1)),
        DimChunk(share=0.5, reduce_scatter=(1, 0)),
    )
    order = (((1, 1), (0, 0)), ((0, 1), (1, 0)))
    with pytest.raises(InvalidInput, match=r"order\[0\]\[0\]: stage 1 of chunk 1 can never begin"):
        DimSchedule(
            name="stuck", dims=DIMS[:2], collective="reduce_scatter", nbytes=1e6, chunks=ways, order=order,
            discipline="enforced",
        )  # fmt: skip


def test_one_chunk_alone_takes_the_sum_of_its_stages() -> None:
    run = simulate(baseline(DIMS, "all_reduce", 12e6, chunks=1))
    # 12 MB: 9 MB at 100 GB/s, 2 MB at 60, 0.5 MB at 25, and back; steps 2, 2, 1.
    once = 90 + 2 * 0.7 + 2000 / 60 + 2 * 0.3 + 20 + 1.7
    assert run.total_us == pytest.approx(2 * once)
    assert run.busy_us.tolist() == pytest.approx([180, 4000 / 60, 40])


def test_latencies_overlap_as_far_as_there_are_slots() -> None:
    wire = Dim(kind="switch", size=2, gb_per_s=1.0, step_us=100.0)
    schedule = baseline([wire], "reduce_scatter", 80e3, chunks=8)  # 8 x 5 us of sending
    for in_flight, expected in ((1, 8 * 105), (2, 4 * 105 + 5), (8, 40 + 100)):
        assert simulate(schedule, in_flight=in_flight).total_us == pytest.approx(expected)


def test_activity_is_the_share_of_each_window_with_a_chunk_there() -> None:
    wire = Dim(kind="switch", size=2, gb_per_s=1.0, step_us=0.0)
    schedule = baseline([wire], "reduce_scatter", 80e3, chunks=2)
    run = simulate(schedule, release_us=[10.0, 50.0])  # busy 10..30 and 50..70
    assert run.activity(20.0).tolist() == [[0.5, 0.5, 0.5, pytest.approx(1.0)]]
    assert run.activity(70.0).tolist() == [[pytest.approx(40 / 70)]]
    with pytest.raises(InvalidInput, match="window_us"):
        run.activity(0.0)


def test_jobs_wait_for_jobs_and_priorities_decide_between_them() -> None:
    def work(nbytes: float, dim: int = 0) -> Stages:
        one = np.array([nbytes])
        return Stages(
            chunk_ptr=np.array([0, 1]), dim=np.array([dim], np.int32), before_bytes=one, wire_bytes=one,
            latency_us=np.zeros(1),
        )  # fmt: skip

    first, second, third = (
        ChunkJob(stages=work(10)),
        ChunkJob(stages=work(20), after=(0,)),
        ChunkJob(stages=work(5, 1), after=(0, 1)),
    )
    starts, ends, busy = simulate_jobs([1.0, 1.0], [first, second, third])
    assert (starts.tolist(), ends.tolist(), busy.tolist()) == ([0, 10, 30], [10, 30, 35], [30, 5])
    slow, urgent = ChunkJob(stages=work(50), priority=1), ChunkJob(stages=work(20), priority=0)
    assert simulate_jobs([1.0], [slow, urgent])[1].tolist() == [70, 20]
    with pytest.raises(InvalidInput, match=r"jobs\[0\]\.after: may only name jobs before it"):
        simulate_jobs([1.0], [replace(first, after=(0,))])


def test_what_cannot_be_simulated_is_refused() -> None:
    schedule = themis(DIMS, "all_reduce", 1e6, chunks=4)
    with pytest.raises(InvalidInput, match="in_flight: must be 1"):
        simulate(schedule, in_flight=0)
    with pytest.raises(InvalidInput, match="unknown sharing"):
        simulate(schedule, sharing="random")
    for wrong in (DIMS[:2], [replace(dim, size=dim.size + 1) for dim in DIMS]):
        with pytest.raises(InvalidInput, match="dims: must be of the kinds and sizes that the schedule is for"):
            simulate(schedule, dims=wrong)
    switches = [Dim(kind="switch", size=4, gb_per_s=100, step_us=1)]
    with pytest.raises(InvalidInput, match="only rates may differ"):
        simulate(baseline(switches, "all_reduce", 1e6), dims=[replace(switches[0], in_network=True)])
    with pytest.raises(InvalidInput, match="release_us: must be 4 times 0"):
        simulate(schedule, release_us=[0.0])
    for never in (math.nan, math.inf, -1.0):
        with pytest.raises(InvalidInput, match="release_us: must be 4 times 0"):
            simulate(schedule, release_us=[0.0, 0.0, 0.0, never])


@pytest.mark.parametrize("field", ["rate", "bytes", "latency", "key", "release"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_the_native_simulator_itself_takes_only_numbers(field: str, value: float) -> None:
    one = np.ones(1)
    floats = {"rate": one, "bytes": one, "latency": one, "key": one, "release": one} | {field: np.array([value])}
    with pytest.raises(ValueError, match=f"{field}: must be finite numbers"):
        _native.simulate_dimensions(
            **floats, chunk_ptr=np.array([0, 1]), dim=np.zeros(1, np.int32), job=np.zeros(1, np.int32),
            after_ptr=np.zeros(2, np.int64), after=np.zeros(0, np.int32), priority=np.zeros(1, np.int64),
            fifo=np.array([True]), turn=np.zeros(0, np.int64), in_flight=1, ordered=True,
        )  # fmt: skip


def test_jobs_that_can_never_end_are_said() -> None:
    lost = Stages(
        chunk_ptr=np.array([0, 1]), dim=np.zeros(1, np.int32), before_bytes=np.ones(1), wire_bytes=np.array([1e300]),
        latency_us=np.zeros(1),
    )  # fmt: skip
    with pytest.raises(InvalidInput, match="stages: 1 of 1 can never end"):
        simulate_jobs([1e-300], [ChunkJob(stages=lost)])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"chunks": ()}, r"chunks: must be 1\.\.65536, not 0"),
        (
            {"chunks": (DimChunk(share=1.0, reduce_scatter=(0, 1, 2)),)},
            r"chunks\[0\]\.all_gather: must be each of the 3",
        ),
        (
            {"chunks": (DimChunk(share=0.5, reduce_scatter=(0, 1, 2), all_gather=(0, 1, 2)),)},
            "must add up to 1, not 0.5",
        ),
        ({"discipline": "lifo"}, "unknown discipline"),
        ({"discipline": "enforced"}, "order: must not be empty"),
        ({"order": ((), (), ())}, "order: must name every stage of every chunk once"),
        ({"order": ((),)}, "order: one list for each of the 3 dimensions, not 1"),
        ({"nbytes": math.inf}, "nbytes: must be > 0"),
        ({"nbytes": 1e308}, r"nbytes: must be > 0 and at most 1e\+18"),
    ],
)
def test_a_wrong_schedule_is_refused(changes: dict[str, object], message: str) -> None:
    good = stretto(DIMS, "all_reduce", 1e6, chunks=4)
    with pytest.raises(InvalidInput, match=message):
        replace(good, **changes)  # type: ignore[arg-type]
