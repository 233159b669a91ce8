# SPDX-License-Identifier: Apache-2.0
"""Divides the compute between communication calls into a few blocks, and finds what each call and block waited for.

Every decision is taken over all recorded iterations of all ranks that do the same. A call is taken to have waited only
for blocks that had ended before it in *every* sample, and a block for a call only from the place on where every sample
shows the block after the call. The more samples there are, the fewer waits are assumed.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from statistics import median, median_high

from .kineto_rank import KinetoRank, TraceCall, TraceWork, inside
from .kineto_steps import Cut, StreamLane, TraceStep

_SLACK_US = 1.0
"""Microseconds to which the clocks of a GPU's streams agree."""
_START: Cut = (0, 0)
ALIKE = 0.1
"""Ranks whose compute differs by less than this share get the same durations, so that one rank stands for all."""


@dataclass(kw_only=True)
class StreamBlock:
    """The work of one stream between two cuts, with its median duration on each rank.

    `waits` are the calls, by position, that the block's start waited for; `lagged` are such calls of the previous
    iteration.
    """

    stream: str
    begin: Cut
    end: Cut
    waits: list[int] = field(default_factory=list)
    lagged: list[int] = field(default_factory=list)
    after: list[tuple[StreamBlock, int]] = field(default_factory=list)
    times: dict[int, float] = field(default_factory=dict)
    name: str = ""
    phase: str = ""


@dataclass(kw_only=True)
class CallNeeds:
    """What a call waited for: the last block before it (of the previous iteration if `lag` is 1), and earlier calls."""

    block: StreamBlock | None = None
    lag: int = 0
    calls: list[int] = field(default_factory=list)


@dataclass(kw_only=True)
class RankClass:
    """Ranks whose iterations have the same shape, and the blocks that their work falls into."""

    traces: dict[int, KinetoRank]
    steps: dict[int, dict[int, TraceStep]]
    blocks: list[StreamBlock] = field(default_factory=list)
    needs: list[CallNeeds] = field(default_factory=list)

    @cached_property
    def samples(self) -> list[TraceStep]:
        """Every iteration of every rank."""
        return [step for steps in self.steps.values() for step in steps.values()]

    @property
    def num_calls(self) -> int:
        """The number of communication calls in an iteration."""
        return len(self.samples[0].calls)

    @cached_property
    def gpu(self) -> bool:
        """Whether the ranks compute on GPU streams, so that the CPU runs ahead of the compute."""
        return next(iter(self.traces.values())).gpu

    @cached_property
    def apart(self) -> bool:
        """Whether the ranks differ too much in compute for one rank to stand for all."""
        totals = [sum(block.times[rank] for block in self.blocks) for rank in self.traces]
        return any(abs(total - median(totals)) > ALIKE * median(totals) for total in totals)

    @cached_property
    def main(self) -> str:
        """The stream that computes most."""
        busy: Counter[str] = Counter()
        for step in self.samples:
            for stream, lane in step.lanes.items():
                busy[stream] += sum(work.end - work.start for work in lane.works)  # type: ignore[assignment]
        return max(sorted(busy), key=lambda stream: busy[stream], default="")


def build(these: RankClass) -> None:
    """Find the cuts of a class of ranks, then the blocks between them, then the waits of calls and blocks."""
    end = these.samples[0].end
    after: list[tuple[str, Cut]] = []
    waits: list[tuple[str, Cut]] = []
    for at in range(these.num_calls):
        stream = _gives(these, at)
        after.append((stream, min(_after(these, step, at, stream) for step in these.samples)))
        stream = _waits(these, at)
        seen = [_wait(these, step, at, stream) for step in these.samples]
        # The system may suspend a gloo thread between the end of a transfer and the end of its span: take the median.
        waits.append((stream, max(seen) if these.gpu else median_high(seen)))
    crossings = _crossings(these)
    cuts: dict[str, set[Cut]] = {stream: {_START, end} for step in these.samples for stream in step.lanes}
    for stream, cut in [*after, *waits, *((s, c) for edge in crossings for s, c in (edge[:2], edge[2:]))]:
        if stream in cuts:
            cuts[stream].add(cut)
    by_stream: dict[str, list[StreamBlock]] = {}
    for stream in sorted(cuts, key=lambda stream: (stream != these.main, stream)):
        edges = sorted(cuts[stream])
        found = [StreamBlock(stream=stream, begin=a, end=b) for a, b in pairwise(edges)]
        by_stream[stream] = [
            block for block in found if any(bounds(step.lane(stream), block) is not None for step in these.samples)
        ]
    for at, (stream, cut) in enumerate(waits):
        _bind_wait(by_stream.get(stream, []), at, cut)
    these.needs = [_needs(these, by_stream, after, waits, at) for at in range(these.num_calls)]
    for source, given, stream, taken in crossings:
        earlier = [block for block in by_stream.get(source, []) if block.end <= given]
        later = [block for block in by_stream.get(stream, []) if block.begin >= taken]
        if earlier and later:
            later[0].after.append((earlier[-1], 0))
    for blocks in by_stream.values():
        if blocks:
            blocks[0].after.append((blocks[-1], 1))
    every = [block for blocks in by_stream.values() for block in blocks]
    these.blocks = sorted(every, key=lambda block: (block.begin, block.stream != these.main))
    for block in every:
        block.times = {
            rank: median(_duration(these, step, block) for step in steps.values())
            for rank, steps in these.steps.items()
        }
    _name(these)


def _duration(these: RankClass, step: TraceStep, block: StreamBlock) -> float:
    """The duration of a block in one sample.

    On the main stream pauses count, because they are kernel launches and Python, which no plan of the communication
    removes; the time until the end of a call that the block waited for does not count, be it before the block or, on a
    CPU, between its works: DDP waits for one bucket, copies it, and waits for the next. On other streams only the work
    itself counts.
    """
    lane = step.lane(block.stream)
    found = bounds(lane, block)
    if found is None:
        return 0.0
    low, high = found
    if block.stream != these.main:
        return sum(work.end - work.start for work in lane.works[low:high])
    before = these.steps[step.rank].get(step.number - 1)
    ready = [_mark(these, step, lane, low - 1)] if low else []
    if not low and before is not None and before.lane(block.stream).works:
        ready.append(_mark(these, before, before.lane(block.stream), len(before.lane(block.stream).works) - 1))
    ready += [step.calls[at].end for at in block.waits]
    if before is not None:
        ready += [before.calls[at].end for at in block.lagged]
    start = lane.works[low].start
    ends = [_mark(these, step, lane, index) for index in range(low, high)]
    waited = 0.0 if these.gpu else _waited_within(these, step, block, lane.works[low:high], ends)
    return ends[-1] - min(start, max(ready, default=start)) - waited


def _waited_within(
    these: RankClass, step: TraceStep, block: StreamBlock, works: list[TraceWork], ends: list[float]
) -> float:
    """How long a block's thread did nothing between its works while a call that the block waited for had not ended."""
    until = max((step.calls[at].end for at in block.waits), default=float("-inf"))
    # A thread of gloo's may close its span late, but DDP has waited for all buckets before the optimizer begins.
    update = these.traces[step.rank].update
    first = bisect_left(update, (works[0].start, 0.0))
    until = min(until, update[first][0]) if first < len(update) else until
    return sum(max(0.0, min(work.start, until) - end) for end, work in zip(ends, works[1:], strict=False))


def bounds(lane: StreamLane, block: StreamBlock) -> tuple[int, int] | None:
    """First and last index of the works of a lane that fall into a block; None if there are none."""
    low, high = lane.index(block.begin), lane.index(block.end)
    return (low, high) if low < high else None


def _mark(these: RankClass, step: TraceStep, lane: StreamLane, index: int) -> float:
    """The time until which a stream was busy with a work; a CPU is busy until it has made the calls that follow the
    work.
    """
    end = lane.ends[index]
    if these.gpu:
        return end
    segment = lane.segments[index]
    until = lane.segments[index + 1] if index + 1 < len(lane.works) else len(step.calls)
    return max([end, *(call.submit for call in step.calls[segment:until])])


def _gives(these: RankClass, at: int) -> str:
    """The stream whose work a call waits for; where CUDA events do not say, the stream that got work last."""
    step = these.samples[0]
    call = step.calls[at]
    if not these.gpu or call.stream in step.lanes:
        return call.stream if these.gpu else these.main
    if sync := _sync(these, step, call, at):
        return sync[0]
    last = {
        stream: lane.works[index - 1].submit
        for stream, lane in step.lanes.items()
        if (index := lane.index((at + 1, 0)))
    }
    return max(sorted(last), key=lambda stream: last[stream], default=these.main)


def _sync(these: RankClass, step: TraceStep, call: TraceCall, at: int) -> tuple[str, float] | None:
    """The last wait of a call's stream for a compute stream before the call: that stream, and until when it waits."""
    syncs = these.traces[step.rank].syncs_of.get(call.stream, [])
    earlier = next((other.submit for other in reversed(step.calls[:at]) if other.stream == call.stream), float("-inf"))
    for index in range(bisect_right(syncs, call.submit, key=lambda sync: sync.at) - 1, -1, -1):
        if syncs[index].at <= earlier:
            break
        if syncs[index].source in step.lanes:
            return syncs[index].source, syncs[index].recorded
    return None


def _after(these: RankClass, step: TraceStep, at: int, stream: str) -> Cut:
    given = (at + 1, 0)
    if not these.gpu:
        return given
    lane, call = step.lane(stream), step.calls[at]
    index = lane.index(given)
    sync = _sync(these, step, call, at)
    if sync is not None and sync[0] == stream:
        index = min(index, bisect_left(lane.submits, sync[1]))
    ended = bisect_right(lane.ends, call.start + _SLACK_US)
    return given if min(index, ended) == lane.index(given) else lane.cut(min(index, ended), step.end)


def _waits(these: RankClass, at: int) -> str:
    call = these.samples[0].calls[at]
    if call.wait_stream is not None:
        return call.wait_stream
    return call.stream if call.stream in these.samples[0].lanes else these.main


def _wait(these: RankClass, step: TraceStep, at: int, stream: str) -> Cut:
    lane, call = step.lane(stream), step.calls[at]
    given = (at + 1, 0)
    if call.stream == stream:
        return given
    if call.wait_at is not None:
        return max(given, lane.cut(bisect_left(lane.submits, call.wait_at), step.end))
    index = lane.index(given)
    while index < len(lane.works) and lane.works[index].start < call.end - _SLACK_US:
        index += 1
    return max(given, lane.cut(index, step.end))


def _crossings(these: RankClass) -> list[tuple[str, Cut, str, Cut]]:
    """Waits between compute streams, as CUDA recorded them in the first sample."""
    step = these.samples[0]
    out = []
    for sync in these.traces[step.rank].syncs:
        source, taker = step.lane(sync.source), step.lane(sync.stream)
        given = bisect_left(source.submits, sync.recorded)
        taken = bisect_left(taker.submits, sync.at)
        if given > 0 and taken < len(taker.works) and taker.works[0].submit <= sync.at:
            out.append((sync.source, source.cut(given, step.end), sync.stream, taker.cut(taken, step.end)))
    return out


def _bind_wait(blocks: list[StreamBlock], at: int, cut: Cut) -> None:
    later = [block for block in blocks if block.begin >= cut]
    if later:
        later[0].waits.append(at)
    elif blocks:
        blocks[0].lagged.append(at)


def _needs(
    these: RankClass,
    by_stream: dict[str, list[StreamBlock]],
    after: list[tuple[str, Cut]],
    waits: list[tuple[str, Cut]],
    at: int,
) -> CallNeeds:
    stream, cut = after[at]
    blocks = by_stream.get(stream, [])
    earlier = [block for block in blocks if block.end <= cut]
    needs = CallNeeds()
    if earlier:
        needs.block = earlier[-1]
    else:
        ended = (block for block in reversed(blocks) if not these.gpu or _ended(these, block, at))
        needs.block, needs.lag = next(ended, None), 1
    last = earlier[-1].begin if earlier else (-1, 0)
    # If no work lies between the wait for an earlier call and this call, only a direct dependency keeps their order.
    needs.calls = [
        other
        for other in range(at)
        if waits[other][0] == stream and last < waits[other][1] and _waited(these, stream, other, at)
    ]
    return needs


def _ended(these: RankClass, block: StreamBlock, at: int) -> bool:
    """Whether a block of the previous iteration had ended when a call began, in every sample that shows both."""
    for step in these.samples:
        before = these.steps[step.rank].get(step.number - 1)
        if before is not None and (found := bounds(before.lane(block.stream), block)) is not None:
            lane = before.lane(block.stream)
            if lane.ends[found[1] - 1] > step.calls[at].start + _SLACK_US:
                return False
    return True


def _waited(these: RankClass, stream: str, other: int, at: int) -> bool:
    """Whether the application waited for a call before it made a later one, in every sample."""
    for step in these.samples:
        first, second = step.calls[other], step.calls[at]
        wait_at = first.submit if first.stream == stream else first.wait_at
        if wait_at is None or wait_at >= second.submit:
            return False
        if these.gpu and first.end > second.start + _SLACK_US:
            return False
    return True


def _name(these: RankClass) -> None:
    """Name each block after the training phase in which most of its work was submitted."""
    counts: Counter[str] = Counter()
    step = these.samples[0]
    trace = these.traces[step.rank]
    for block in these.blocks:
        lane = step.lane(block.stream)
        phases: Counter[str] = Counter()
        for work in lane.works[lane.index(block.begin) : lane.index(block.end)]:
            phase = "backward" if inside(trace.backward, work.submit) else ""
            phase = "update" if inside(trace.update, work.submit) else phase
            phases[phase] += work.end - work.start  # type: ignore[assignment]
        block.phase = phases.most_common(1)[0][0] if phases else ""
        if not block.phase and trace.backward and step.lanes:
            first = bisect_left(trace.backward, (min(lane.works[0].submit for lane in step.lanes.values()), 0.0))
            submit = lane.works[min(lane.index(block.begin), len(lane.works) - 1)].submit if lane.works else 0.0
            block.phase = "forward" if first < len(trace.backward) and submit < trace.backward[first][0] else ""
        base = block.phase or "compute"
        if block.stream != these.main:
            base = f"stream{block.stream}.{base}"
        block.name = f"{base}.{counts[base]}"
        counts[base] += 1
