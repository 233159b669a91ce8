# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from stretto.report import write_chrome_json
from stretto.simulator import Timeline

Make = Callable[..., Timeline]


def test_spans_become_complete_events_in_microseconds(timeline: Timeline, tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    assert write_chrome_json(timeline, path) == 5
    data = json.loads(path.read_text())
    threads = {e["tid"]: (e["pid"], e["args"]["name"]) for e in data["traceEvents"] if e["name"] == "thread_name"}
    slices = [
        (threads[e["tid"]], e["name"], e["ts"], e["dur"], e["args"]["bytes"])
        for e in data["traceEvents"]
        if e["ph"] == "X"
    ]
    assert sorted(slices) == [
        ((0, "nvlink"), "copy", 0.0, 2.0, 4000.0),
        ((0, "nvlink"), "copy", 2.0, 2.0, 4000.0),
        ((0, "nvlink #2"), "reduce", 1.0, 2.0, 4000.0),
        ((1, "nvlink"), "copy", 0.5, 0.75, 1000.0),
        ((1, "rdma"), "reduce", 3.0, 2.0, 9000.0),
    ]
    assert data["otherData"]["program"] == "ring"


def test_a_limit_is_written_down(random_timeline: Make, tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    written = write_chrome_json(random_timeline(1000, 10), path, max_spans=300)
    assert json.loads(path.read_text())["otherData"]["spans_left_out"] == str(1000 - written)


def test_an_empty_timeline_is_valid_json(make_timeline: Make, tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    write_chrome_json(make_timeline([], 0.0), path)
    assert json.loads(path.read_text())["traceEvents"] == []
