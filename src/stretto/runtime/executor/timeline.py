# SPDX-License-Identifier: Apache-2.0
"""What an executor's traces say, as a `Timeline` with the streams and names of a predicted one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ...errors import InvalidInput
from ...programs.lowered import Lowered
from ...programs.streams import InstructionStreams
from ...simulator.messages import MessageGraph
from ...simulator.timeline import Timeline

Trace = tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]
"""(threadblock, step, slice, begin_ns, end_ns), as `Work.trace` gives it."""


def measured_timeline(
    lowered: Lowered, traces: Sequence[Trace], *, nbytes: float, clock_offset_ns: Sequence[int] | None = None
) -> Timeline:
    """One span per message and slice: from when its sender began to write it until its receiver had done with it.

    ``traces[r]`` is rank r's. Ranks of one host share a clock; for others ``clock_offset_ns[r]`` is what to subtract
    from rank r's times.

    Args:
        lowered: The program that ran.
        traces: What each rank noted, by rank.
        nbytes: The size of the call.
        clock_offset_ns: What to subtract from each rank's times. Default: nothing.

    Returns:
        The timeline.

    Raises:
        InvalidInput: There is not one trace per rank.
    """
    if len(traces) != lowered.collective.num_ranks:
        raise InvalidInput(f"traces: must be {lowered.collective.num_ranks}, one per rank, not {len(traces)}")
    streams, messages = InstructionStreams.of(lowered), MessageGraph.of(lowered)
    first_block = np.searchsorted(lowered.tb_rank, np.arange(lowered.collective.num_ranks))
    slices = 1 + max((int(t[2].max(initial=0)) for t in traces), default=0)
    begin = np.full((lowered.num_instructions, slices), -1, np.int64)
    end = begin.copy()
    for rank, (block, step, piece, began, ended) in enumerate(traces):
        shift = clock_offset_ns[rank] if clock_offset_ns is not None else 0
        instruction = lowered.tb_ptr[first_block[rank] + block] + step
        begin[instruction, piece] = began - shift
        end[instruction, piece] = ended - shift
    order = np.argsort(streams.step[streams.senders], kind="stable")  # as `MessageGraph` lists them
    senders, receivers = streams.senders[order], streams.receivers[order]
    start, stop = begin[senders], end[receivers]
    if np.any(start < 0) or np.any(stop < 0):
        raise InvalidInput("traces: not every message is in them (were all ranks traced, and the same work?)")
    number = np.repeat(np.arange(len(senders)), slices)
    zero = int(start.min(initial=0 if not start.size else int(start.flat[0])))
    lanes = int(messages.lane.max(initial=0)) + 1
    to = messages.dst.astype(np.int64) * lanes + messages.lane
    values, stream = np.unique(to, return_inverse=True)
    names = tuple(dict.fromkeys(messages.labels))
    name = np.array([names.index(label) for label in messages.labels], np.int32)
    return Timeline(
        total_us=float((stop.max(initial=zero) - zero) / 1e3),
        rank=messages.src[number],
        stream=stream.astype(np.int32)[number],
        name=name[number],
        start_us=(start.ravel() - zero) / 1e3,
        end_us=(stop.ravel() - zero) / 1e3,
        nbytes=messages.transfer_bytes(nbytes)[number] / slices,
        streams=tuple(f"to {v // lanes}" + (f" lane {v % lanes}" if lanes > 1 else "") for v in values.tolist()),
        names=names,
        facts=(("program", lowered.name), ("measured", "executor"), ("slices", str(slices))),
    )
