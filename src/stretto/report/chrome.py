# SPDX-License-Identifier: Apache-2.0
"""Writes timelines as Chrome trace JSON (``chrome://tracing``, older tools); Perfetto's own form holds more."""

from __future__ import annotations

from pathlib import Path

import msgspec

from ..files import open_output
from ..simulator import Timeline
from .tracks import MAX_TRACE_SPANS, tracks

_EVENTS_AT_ONCE = 50_000


class _Bytes(msgspec.Struct):
    bytes: float


class _Event(msgspec.Struct):
    """A complete event; `ts` and `dur` are microseconds with nanoseconds as decimals."""

    name: str
    ph: str
    pid: int
    tid: int
    ts: float
    dur: float
    args: _Bytes


def write_chrome_json(timeline: Timeline, path: str | Path, *, max_spans: int = MAX_TRACE_SPANS) -> int:
    """Write Chrome trace events with a process per rank and a thread per stream.

    Args:
        timeline: the timeline.
        path: file to write.
        max_spans: most spans to write; past that, only the lowest ranks that fit are written, and ``otherData`` says
            so.

    Returns:
        The number of spans written.

    Raises:
        InvalidInput: the file cannot be written.
    """
    shown = tracks(timeline, max_spans=max_spans)
    encode = msgspec.json.encode
    about = dict(timeline.facts) | {
        "total_us": f"{timeline.total_us:.9g}",
        "spans_left_out": str(shown.left_out),
    }
    labels: list[dict[str, object]] = []
    for track, rank in enumerate(shown.rank.tolist()):
        if track == 0 or rank != shown.rank[track - 1]:
            labels.append({"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"rank {rank}"}})
        name = shown.label(track, timeline.streams)
        labels.append({"name": "thread_name", "ph": "M", "pid": rank, "tid": track, "args": {"name": name}})
    with open_output(path) as file:
        file.write(b'{"displayTimeUnit":"ns","otherData":' + encode(about) + b',"traceEvents":[')
        file.write(encode(labels)[1:-1])
        for track, rank in enumerate(shown.rank.tolist()):
            for low in range(shown.ptr[track], shown.ptr[track + 1], _EVENTS_AT_ONCE):
                part = slice(low, min(low + _EVENTS_AT_ONCE, shown.ptr[track + 1]))
                spans = shown.order[part]
                columns = zip(
                    timeline.name[spans].tolist(),
                    shown.start_ns[part].tolist(),
                    shown.end_ns[part].tolist(),
                    timeline.nbytes[spans].tolist(),
                    strict=True,
                )
                events = [
                    _Event(
                        timeline.names[name],
                        "X",
                        rank,
                        track,
                        begin / 1e3,
                        (end - begin) / 1e3,
                        _Bytes(nbytes),
                    )
                    for name, begin, end, nbytes in columns
                ]
                file.write(b"," + encode(events)[1:-1])
        file.write(b"]}\n")
    return len(shown.order)
