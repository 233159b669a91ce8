# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import stretto as st
from stretto.errors import InvalidInput
from stretto.report import load_timeline, save_timeline
from stretto.report.chrome import write_chrome_json
from stretto.report.perfetto import write_perfetto
from stretto.simulator import Timeline

Make = Callable[..., Timeline]


def same(a: Timeline, b: Timeline) -> bool:
    for key in Timeline.__dataclass_fields__:
        x, y = getattr(a, key), getattr(b, key)
        if isinstance(x, np.ndarray):
            if not (np.array_equal(x, y) and x.dtype == y.dtype):
                return False
        elif x != y:
            return False
    return True


def test_every_bit_comes_back(timeline: Timeline, random_timeline: Make, make_timeline: Make, tmp_path: Path) -> None:
    for original in (timeline, random_timeline(500, 4), make_timeline([], 0.0)):
        save_timeline(original, tmp_path / "t.json")
        assert same(load_timeline(tmp_path / "t.json"), original)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "version: this Stretto reads version 1, not 2"),
        ({"format": "other"}, "format: expected 'stretto-timeline'"),
        ({"rank": [0, 0, 0, 1]}, "stream: has 5 entries, not 4"),
        ({"rank": [0, 0, 0, 0, 1e30]}, "rank: "),
        ({"rank": [0, 0, 0, 0, 1 << 70]}, "rank: a number of 71 bits is out of range"),
        ({"rank": [0, 0, 0, 0, -(10**400)]}, "rank: a number of 1329 bits is out of range"),
        ({"nbytes": [0, 0, 0, 0, 10**400]}, "nbytes"),
        ({"rank": [0, 0, 0, 0, -1]}, "rank[4]: must be 0.."),
        ({"stream": [0, 0, 0, 0, 2]}, "stream[4]: must be 0..1, not 2"),
        ({"name": [9, 0, 0, 0, 0]}, "name[0]: must be 0..1, not 9"),
        ({"critical_path": [5]}, "critical_path[0]: must be 0..4, not 5"),
        ({"end_us": [2.0, 0.5, 4.0, 1.25, 5.0]}, "end_us[1]: ends before it starts"),
        ({"start_us": [0, 1, 2, 0.5, None]}, "start_us: "),
        ({"nbytes": [1, 2, 3, 4, -5]}, "nbytes[4]: must be 0..1e+15, not -5"),
        ({"nbytes": "many"}, "nbytes: "),
        ({"link_bytes": [1.0]}, "link_bytes: has 1 entries, not 2"),
        ({"total_us": -1}, "total_us: must be 0.."),
        ({"streams": 3}, "$.streams: "),
        ({"surprise": 3}, "surprise"),
    ],
)
def test_bad_fields_are_named(timeline: Timeline, tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = tmp_path / "t.json"
    save_timeline(timeline, path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(InvalidInput) as error:
        load_timeline(path)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["", "{", "[1, 2]", '{"format": "stretto-timeline"}', "[" * 100_000, "\x00"])
def test_what_is_no_timeline_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "t.json"
    path.write_text(text)
    with pytest.raises(InvalidInput):
        load_timeline(path)


def test_a_truncated_file_is_refused(timeline: Timeline, tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    save_timeline(timeline, path)
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(InvalidInput, match="truncated"):
        load_timeline(path)


def test_a_rank_that_no_trace_format_can_hold_is_refused(tmp_path: Path) -> None:
    timeline = st.simulate(st.algorithm("ring", "all_gather", 3), st.Cluster.preset("ring", nodes=3), nbytes=3e6)
    path = tmp_path / "t.json"
    for rank, good in (((1 << 30) - 1, True), (1 << 30, False), ((1 << 31) - 1, False)):
        save_timeline(replace(timeline, rank=np.full_like(timeline.rank, rank)), path)
        if good:
            assert write_perfetto(load_timeline(path), tmp_path / "t.pftrace") == timeline.num_spans
            assert write_chrome_json(load_timeline(path), tmp_path / "t.chrome") == timeline.num_spans
        else:
            with pytest.raises(InvalidInput, match=r"rank\[0\]: must be 0\.\.1073741823"):
                load_timeline(path)
