# SPDX-License-Identifier: Apache-2.0
"""Writes timelines as Perfetto TrackEvent traces, for https://ui.perfetto.dev."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from ..files import open_output
from ..simulator import Timeline
from .tracks import MAX_TRACE_SPANS, Tracks, gb_per_s, tracks

if TYPE_CHECKING:
    from perfetto.trace_builder.proto_builder import TraceProtoBuilder

_SEQUENCE = 1
_STATE_CLEARED, _NEEDS_STATE = 1, 2
_PACKETS_AT_ONCE = 20_000
_MAX_LINKS = 64
_COUNTER_SLOTS = 1000
_ABOUT_PID = 1
_FIRST_RANK_PID = 2
# Thread ids are unique over all ranks, because a viewer takes equal thread ids in two processes for one thread.
_FIRST_TID = 1 << 20


def write_perfetto(
    timeline: Timeline,
    path: str | Path,
    *,
    max_spans: int = MAX_TRACE_SPANS,
    processes: Mapping[int, str] | None = None,
) -> int:
    """Write a trace with a process per rank and a thread per stream; times are nanoseconds.

    Spans that overlap on one stream get threads of their own (``nvlink``, ``nvlink #2``). The process *stretto* carries
    the facts, the rate over time, and the average load of the busiest links.

    Args:
        timeline: the timeline.
        path: file to write.
        max_spans: most spans to write; past that, only the lowest ranks that fit are written, and the trace says so.
        processes: names of the processes of some ranks; other processes are named ``rank 3``.

    Returns:
        The number of spans written.

    Raises:
        InvalidInput: the file cannot be written.
    """
    shown = tracks(timeline, max_spans=max_spans)
    with open_output(path) as file:
        _write_about(timeline, shown, file)
        _write_tracks(timeline, shown, file, processes or {})
        _write_slices(timeline, shown, file)
    return len(shown.order)


def _builder() -> TraceProtoBuilder:
    from perfetto.trace_builder.proto_builder import TraceProtoBuilder

    return TraceProtoBuilder()


def _packet(builder: TraceProtoBuilder, timestamp_ns: int = 0) -> Any:
    packet = builder.add_packet()
    packet.timestamp = timestamp_ns
    packet.trusted_packet_sequence_id = _SEQUENCE
    packet.sequence_flags = _NEEDS_STATE
    return packet


def _write_about(timeline: Timeline, shown: Tracks, file: IO[bytes]) -> None:
    """Write interned names first, then the facts, the rate and the links, each on a track of its own."""
    from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import TrackEvent

    builder = _builder()
    first = builder.add_packet()
    first.trusted_packet_sequence_id = _SEQUENCE
    first.sequence_flags = _STATE_CLEARED | _NEEDS_STATE
    for index in np.unique(timeline.name[shown.order]).tolist():
        first.interned_data.event_names.add(iid=index + 1, name=timeline.names[index])
    first.interned_data.debug_annotation_names.add(iid=1, name="bytes")
    first.interned_data.event_categories.add(iid=1, name="critical path")

    process = _packet(builder).track_descriptor
    process.uuid = about = 1
    process.process.pid = _ABOUT_PID
    process.process.process_name = "stretto"
    facts = dict(timeline.facts) | {"total_us": f"{timeline.total_us:.9g}", "spans": str(timeline.num_spans)}
    if shown.left_out:
        facts["left out"] = f"{shown.left_out} spans of the highest ranks"
    event = _packet(builder).track_event
    event.type, event.track_uuid, event.name = TrackEvent.TYPE_INSTANT, about, "facts"
    for key, value in facts.items():
        event.debug_annotations.add(name=key, string_value=value)

    rate = gb_per_s(timeline, _COUNTER_SLOTS)
    slots = np.flatnonzero(np.diff(np.concatenate([[0.0], rate]))).tolist()
    slot_ns = timeline.total_us * 1e3 / _COUNTER_SLOTS
    points = [(round(slot * slot_ns), float(rate[slot])) for slot in slots]
    _counter(builder, 2, about, "in flight, all ranks", "GB/s", [*points, (round(timeline.total_us * 1e3), 0.0)])
    busiest = np.argsort(-timeline.link_busy_us, kind="stable")[:_MAX_LINKS].tolist()
    for index in busiest:
        share = 100 * float(timeline.link_utilization[index])
        if share > 0:
            ends = [(0, share), (round(timeline.total_us * 1e3), 0.0)]
            _counter(builder, 3 + index, about, f"{timeline.link_names[index]} busy, average", "%", ends)
    file.write(builder.serialize())


def _counter(
    builder: TraceProtoBuilder, uuid: int, parent: int, name: str, unit: str, points: list[tuple[int, float]]
) -> None:
    from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import TrackEvent

    track = _packet(builder).track_descriptor
    track.uuid, track.parent_uuid, track.name = uuid, parent, name
    track.counter.unit_name = unit
    for at_ns, value in points:
        event = _packet(builder, at_ns).track_event
        event.type, event.track_uuid, event.double_counter_value = TrackEvent.TYPE_COUNTER, uuid, value


def _write_tracks(timeline: Timeline, shown: Tracks, file: IO[bytes], processes: Mapping[int, str]) -> None:
    for low in range(0, len(shown.rank), _PACKETS_AT_ONCE):
        builder = _builder()
        for index in range(low, min(low + _PACKETS_AT_ONCE, len(shown.rank))):
            rank = int(shown.rank[index])
            pid = rank + _FIRST_RANK_PID
            if index == 0 or rank != shown.rank[index - 1]:
                process = _packet(builder).track_descriptor
                process.uuid = _process_uuid(rank)
                process.process.pid = pid
                process.process.process_name = processes.get(rank, f"rank {rank}")
            track = _packet(builder).track_descriptor
            track.uuid, track.parent_uuid = _track_uuid(index), _process_uuid(rank)
            track.thread.pid, track.thread.tid = pid, _FIRST_TID + index
            track.thread.thread_name = shown.label(index, timeline.streams)
        file.write(builder.serialize())


def _write_slices(timeline: Timeline, shown: Tracks, file: IO[bytes]) -> None:
    from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import TrackEvent

    begin, end = TrackEvent.TYPE_SLICE_BEGIN, TrackEvent.TYPE_SLICE_END
    whole = bool(np.all(timeline.nbytes == np.rint(timeline.nbytes)))
    critical = np.zeros(timeline.num_spans, np.bool_)
    critical[timeline.critical_path] = True
    track_of = np.repeat(np.arange(len(shown.rank)), np.diff(shown.ptr))
    for low in range(0, len(shown.order), _PACKETS_AT_ONCE):
        part = slice(low, low + _PACKETS_AT_ONCE)
        spans = shown.order[part]
        builder = _builder()
        add = builder.add_packet
        for start_ns, end_ns, track, name, nbytes, on_path in zip(
            shown.start_ns[part].tolist(),
            shown.end_ns[part].tolist(),
            track_of[part].tolist(),
            timeline.name[spans].tolist(),
            timeline.nbytes[spans].tolist(),
            critical[spans].tolist(),
            strict=True,
        ):
            packet = add()
            packet.timestamp = start_ns
            packet.trusted_packet_sequence_id = _SEQUENCE
            packet.sequence_flags = _NEEDS_STATE
            event = packet.track_event
            event.type = begin
            event.track_uuid = uuid = _track_uuid(track)
            event.name_iid = name + 1
            if on_path:
                event.category_iids.append(1)
            note = event.debug_annotations.add()
            note.name_iid = 1
            if whole:
                note.int_value = int(nbytes)
            else:
                note.double_value = nbytes
            packet = add()
            packet.timestamp = end_ns
            packet.trusted_packet_sequence_id = _SEQUENCE
            event = packet.track_event
            event.type = end
            event.track_uuid = uuid
        file.write(builder.serialize())


def _process_uuid(rank: int) -> int:
    return (1 << 40) + rank


def _track_uuid(track: int) -> int:
    return (1 << 41) + track
