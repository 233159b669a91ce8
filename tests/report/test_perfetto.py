# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stretto.report import write_perfetto
from stretto.simulator import Timeline

Make = Callable[..., Timeline]


class Read:
    """An independent reading of a trace: what a viewer would draw."""

    def __init__(self, path: Path) -> None:
        from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace, TrackEvent

        trace = Trace()
        trace.ParseFromString(path.read_bytes())
        self.processes: dict[int, str] = {}
        self.threads: dict[int, tuple[int, str]] = {}
        self.tids: list[int] = []
        self.counters: dict[str, list[tuple[int, float]]] = defaultdict(list)
        self.slices: list[tuple[str, str, str, int, int, float, bool]] = []
        self.facts: dict[str, str] = {}
        names: dict[int, str] = {}
        counter_names: dict[int, str] = {}
        open_on: dict[int, list[tuple[Any, int]]] = defaultdict(list)
        for packet in trace.packet:
            for entry in packet.interned_data.event_names:
                names[entry.iid] = entry.name
            track = packet.track_descriptor
            if track.HasField("process"):
                self.processes[track.process.pid] = track.process.process_name
            if track.HasField("thread"):
                self.threads[track.uuid] = (track.thread.pid, track.thread.thread_name)
                self.tids.append(track.thread.tid)
            if track.HasField("counter"):
                counter_names[track.uuid] = track.name
            if not packet.HasField("track_event"):
                continue
            event = packet.track_event
            if event.type == TrackEvent.TYPE_COUNTER:
                self.counters[counter_names[event.track_uuid]].append((packet.timestamp, event.double_counter_value))
            elif event.type == TrackEvent.TYPE_INSTANT:
                self.facts = {a.name: a.string_value for a in event.debug_annotations}
            elif event.type == TrackEvent.TYPE_SLICE_BEGIN:
                assert not open_on[event.track_uuid], "two slices open on one track"
                open_on[event.track_uuid].append((event, packet.timestamp))
            else:
                begin, at = open_on[event.track_uuid].pop()
                pid, thread = self.threads[event.track_uuid]
                note = begin.debug_annotations[0]
                nbytes = note.int_value or note.double_value
                self.slices.append(
                    (
                        self.processes[pid],
                        thread,
                        names[begin.name_iid],
                        at,
                        packet.timestamp,
                        nbytes,
                        bool(begin.category_iids),
                    )
                )
        assert not any(open_on.values()), "a slice never ends"


def test_every_span_is_a_slice_of_its_rank_and_stream(timeline: Timeline, tmp_path: Path) -> None:
    path = tmp_path / "t.pftrace"
    assert write_perfetto(timeline, path) == 5
    read = Read(path)
    assert sorted(read.slices) == [
        ("rank 0", "nvlink", "copy", 0, 2000, 4000, True),
        ("rank 0", "nvlink", "copy", 2000, 4000, 4000, True),
        ("rank 0", "nvlink #2", "reduce", 1000, 3000, 4000, False),
        ("rank 1", "nvlink", "copy", 500, 1250, 1000, False),
        ("rank 1", "rdma", "reduce", 3000, 5000, 9000, True),
    ]
    assert read.processes[1] == "stretto"
    assert read.facts["program"] == "ring"
    assert read.facts["total_us"] == "5"


def test_counters_show_the_rate_and_the_links(timeline: Timeline, tmp_path: Path) -> None:
    path = tmp_path / "t.pftrace"
    write_perfetto(timeline, path)
    counters = Read(path).counters
    assert counters["gpu0>gpu1 busy, average"] == [(0, pytest.approx(80.0)), (5000, 0.0)]
    rate = counters["in flight, all ranks"]
    moved = sum(value * (after - at) for (at, value), (after, _) in pairwise(rate))
    assert moved == pytest.approx(timeline.nbytes.sum(), rel=1e-6)
    assert rate[-1] == (5000, 0.0)


def test_no_track_ever_holds_two_slices_at_once(random_timeline: Make, tmp_path: Path) -> None:
    timeline = random_timeline(2000, 5)
    path = tmp_path / "t.pftrace"
    write_perfetto(timeline, path)
    read = Read(path)
    assert len(read.slices) == 2000
    assert len(set(read.tids)) == len(read.tids)
    by_track = defaultdict(list)
    for process, thread, _, begin, end, _, _ in read.slices:
        by_track[process, thread].append((begin, end))
    for spans in by_track.values():
        assert all(a[1] <= b[0] for a, b in pairwise(sorted(spans)))
    expected = sorted(np.rint(timeline.end_us * 1e3).astype(int).tolist())
    assert sorted(end for *_, end, _, _ in read.slices) == expected


def test_a_limit_keeps_whole_ranks_and_says_what_is_missing(random_timeline: Make, tmp_path: Path) -> None:
    timeline = random_timeline(1000, 10)
    path = tmp_path / "t.pftrace"
    written = write_perfetto(timeline, path, max_spans=450)
    read = Read(path)
    ranks = {process for process, *_ in read.slices}
    assert ranks == {f"rank {r}" for r in range(len(ranks))}
    assert written == len(read.slices) == np.count_nonzero(timeline.rank < len(ranks)) <= 450
    assert read.facts["left out"].startswith(f"{1000 - written} spans")


def test_an_empty_timeline_is_a_valid_trace(make_timeline: Make, tmp_path: Path) -> None:
    path = tmp_path / "t.pftrace"
    assert write_perfetto(make_timeline([], 0.0), path) == 0
    assert Read(path).slices == []


def test_fractional_bytes_survive(make_timeline: Make, tmp_path: Path) -> None:
    path = tmp_path / "t.pftrace"
    write_perfetto(make_timeline([(0, 0, 0, 0.0, 1.0, 0.5)], 1.0), path)
    assert Read(path).slices[0][5] == 0.5
