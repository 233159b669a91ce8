# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest

from stretto.report.tracks import busy_share, gb_per_s, tracks
from stretto.simulator import Timeline

Make = Callable[..., Timeline]


def test_a_stream_without_overlap_has_one_lane(make_timeline: Make) -> None:
    shown = tracks(make_timeline([(0, 0, 0, 0, 1, 1), (0, 0, 0, 1, 2, 1), (0, 1, 0, 0, 2, 1)], 2.0))
    assert shown.lane.tolist() == [0, 0]
    assert [shown.label(j, ("a", "b")) for j in range(2)] == ["a", "b"]


def test_no_more_lanes_than_spans_at_once(random_timeline: Make) -> None:
    timeline = random_timeline(800, 3)
    shown = tracks(timeline)
    for rank in range(3):
        for stream in range(2):
            here = (timeline.rank == rank) & (timeline.stream == stream)
            start, end = np.rint(timeline.start_us[here] * 1e3), np.rint(timeline.end_us[here] * 1e3)
            most = max(int(np.count_nonzero((start <= at) & (at < np.maximum(end, at)))) for at in start)
            lanes = shown.lane[(shown.rank == rank) & (shown.stream == stream)]
            assert lanes.tolist() == list(range(len(lanes)))
            assert len(lanes) <= max(most, 1) + 1


def test_tracks_hold_every_span_once_and_apart(random_timeline: Make) -> None:
    shown = tracks(random_timeline(800, 3))
    assert sorted(shown.order.tolist()) == list(range(800))
    for low, high in pairwise(shown.ptr.tolist()):
        assert np.all(shown.end_ns[low : high - 1] <= shown.start_ns[low + 1 : high])


def test_at_least_one_rank_is_taken(random_timeline: Make) -> None:
    timeline = random_timeline(100, 2)
    shown = tracks(timeline, max_spans=1)
    assert shown.left_out == np.count_nonzero(timeline.rank == 1)


def test_busy_share_counts_overlapping_spans_once(make_timeline: Make) -> None:
    spans = [(0, 0, 0, 0.0, 1.0, 1), (0, 0, 0, 0.5, 1.0, 1), (0, 1, 0, 2.5, 4.0, 1), (1, 0, 0, 3.0, 3.5, 1)]
    timeline = make_timeline(spans, 4.0)
    share = busy_share(timeline, timeline.rank.astype(np.int64), 2, 4)
    assert share.tolist() == [[1.0, 0.0, 0.5, 1.0], [0.0, 0.0, 0.0, 0.5]]


def test_busy_share_agrees_with_counting_by_hand(random_timeline: Make) -> None:
    timeline = random_timeline(200, 4)
    share = busy_share(timeline, timeline.rank.astype(np.int64), 4, 11)
    grid = (np.arange(11 * 2000) + 0.5) * timeline.total_us / (11 * 2000)
    for rank in range(4):
        here = timeline.rank == rank
        inside = (timeline.start_us[here, None] <= grid) & (grid < timeline.end_us[here, None])
        by_hand = inside.any(axis=0).reshape(11, 2000).mean(axis=1)
        assert share[rank] == pytest.approx(by_hand, abs=0.01)


def test_the_rate_integrates_to_the_bytes(random_timeline: Make) -> None:
    timeline = random_timeline(300, 4)
    rate = gb_per_s(timeline, 50)
    assert rate.sum() * timeline.total_us / 50 * 1e3 == pytest.approx(timeline.nbytes.sum(), rel=1e-6)


def test_an_empty_timeline_has_no_tracks(make_timeline: Make) -> None:
    empty = make_timeline([], 0.0)
    assert len(tracks(empty).rank) == 0
    assert busy_share(empty, np.zeros(0, np.int64), 2, 3).tolist() == [[0.0] * 3] * 2
    assert gb_per_s(empty, 3).tolist() == [0.0] * 3
