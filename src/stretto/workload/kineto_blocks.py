"""The compute between communication calls as a few blocks, with what each call and each block waited for.

Everything is decided over all recorded iterations of all ranks that do the same: a call is taken to have waited for
no more than what had ended before it in *every* sample, and a block for a call only from the place on where every
sample shows the block after the call. The more samples, the less is assumed.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from statistics import median, median_high

from .kineto_rank import Call, RankTrace, inside
from .kineto_steps import Cut, Lane, Step

_SLACK_US = 1.0
"""Clocks of a GPU's streams agree to about this."""
_START: Cut = (0, 0)
ALIKE = 0.1
"""Ranks whose compute differs by less than this share get the same durations, so that one of them stands for all."""


@dataclass(kw_only=True)
class Block:
    """Work of one stream between two cuts, with its median duration on each rank.

    `waits` are the calls, by position, that its start waited for; `lagged` those of the iteration before.
    """

    stream: str
    begin: Cut
    end: Cut
    waits: list[int] = field(default_factory=list)
    lagged: list[int] = field(default_factory=list)
    after: list[tuple[Block, int]] = field(default_factory=list)
    times: dict[int, float] = field(default_factory=dict)
    name: str = ""
    phase: str = ""


@dataclass(kw_only=True)
class Needs:
    """What a call waited for: the last block before it (of the iteration before when `lag`), and earlier calls."""

    block: Block | None = None
    lag: int = 0
    calls: list[int] = field(default_factory=list)


@dataclass(kw_only=True)
class RankClass:
    """Ranks whose iterations have the same shape, and the blocks that their work falls into."""

    traces: dict[int, RankTrace]
    steps: dict[int, dict[int, Step]]
    blocks: list[Block] = field(default_factory=list)
    needs: list[Needs] = field(default_factory=list)

    @cached_property
    def samples(self) -> list[Step]:
        """Every iteration of every rank."""
        return [step for steps in self.steps.values() for step in steps.values()]

    @property
    def num_calls(self) -> int:
        """Communication calls of an iteration."""
        return len(self.samples[0].calls)

    @cached_property
    def gpu(self) -> bool:
        """Whether compute is on streams of a GPU, so that the CPU runs ahead of it."""
        return next(iter(self.traces.values())).gpu

    @cached_property
    def apart(self) -> bool:
        """Whether the ranks differ too much in compute for one of them to stand for all."""
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
    """Find the cuts, then the blocks between them, then who waits for whom."""
    end = these.samples[0].end
    after: list[tuple[str, Cut]] = []
    waits: list[tuple[str, Cut]] = []
    for at in range(these.num_calls):
        stream = _gives(these, at)
        after.append((stream, min(_after(these, step, at, stream) for step in these.samples)))
        stream = _waits(these, at)
        seen = [_wait(these, step, at, stream) for step in these.samples]
        # A thread of gloo may be put to sleep between the end of a transfer and the end of its span.
        waits.append((stream, max(seen) if these.gpu else median_high(seen)))
    crossings = _crossings(these)
    cuts: dict[str, set[Cut]] = {stream: {_START, end} for step in these.samples for stream in step.lanes}
    for stream, cut in [*after, *waits, *((s, c) for edge in crossings for s, c in (edge[:2], edge[2:]))]:
        if stream in cuts:
            cuts[stream].add(cut)
    by_stream: dict[str, list[Block]] = {}
    for stream in sorted(cuts, key=lambda stream: (stream != these.main, stream)):
        edges = sorted(cuts[stream])
        found = [Block(stream=stream, begin=a, end=b) for a, b in pairwise(edges)]
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


def _duration(these: RankClass, step: Step, block: Block) -> float:
    """How long a block took in one sample.

    On the main stream its pauses count: they are launches and Python, which no plan of the communication removes; not
    the time until a call ended that it waited for. On other streams only the work itself counts.
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
    return _mark(these, step, lane, high - 1) - min(start, max(ready, default=start))


def bounds(lane: Lane, block: Block) -> tuple[int, int] | None:
    """The works of a lane that fall into a block, where there are any."""
    low, high = lane.index(block.begin), lane.index(block.end)
    return (low, high) if low < high else None


def _mark(these: RankClass, step: Step, lane: Lane, index: int) -> float:
    """Until when a stream was busy with a work: a processor also until it had made the calls that follow it."""
    end = lane.ends[index]
    if these.gpu:
        return end
    segment = lane.segments[index]
    until = lane.segments[index + 1] if index + 1 < len(lane.works) else len(step.calls)
    return max([end, *(call.submit for call in step.calls[segment:until])])


def _gives(these: RankClass, at: int) -> str:
    """The stream whose work a call waits for: where CUDA does not say, the one that was given work last."""
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


def _sync(these: RankClass, step: Step, call: Call, at: int) -> tuple[str, float] | None:
    """The last time before a call that its stream was told to wait for a stream of compute, and for what of it."""
    syncs = these.traces[step.rank].syncs_of.get(call.stream, [])
    earlier = next((other.submit for other in reversed(step.calls[:at]) if other.stream == call.stream), float("-inf"))
    for index in range(bisect_right(syncs, call.submit, key=lambda sync: sync.at) - 1, -1, -1):
        if syncs[index].at <= earlier:
            break
        if syncs[index].source in step.lanes:
            return syncs[index].source, syncs[index].recorded
    return None


def _after(these: RankClass, step: Step, at: int, stream: str) -> Cut:
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


def _wait(these: RankClass, step: Step, at: int, stream: str) -> Cut:
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
    """Streams of compute that waited for one another, as CUDA recorded it in the first sample."""
    step = these.samples[0]
    out = []
    for sync in these.traces[step.rank].syncs:
        source, taker = step.lane(sync.source), step.lane(sync.stream)
        given = bisect_left(source.submits, sync.recorded)
        taken = bisect_left(taker.submits, sync.at)
        if given > 0 and taken < len(taker.works) and taker.works[0].submit <= sync.at:
            out.append((sync.source, source.cut(given, step.end), sync.stream, taker.cut(taken, step.end)))
    return out


def _bind_wait(blocks: list[Block], at: int, cut: Cut) -> None:
    later = [block for block in blocks if block.begin >= cut]
    if later:
        later[0].waits.append(at)
    elif blocks:
        blocks[0].lagged.append(at)


def _needs(
    these: RankClass,
    by_stream: dict[str, list[Block]],
    after: list[tuple[str, Cut]],
    waits: list[tuple[str, Cut]],
    at: int,
) -> Needs:
    stream, cut = after[at]
    blocks = by_stream.get(stream, [])
    earlier = [block for block in blocks if block.end <= cut]
    needs = Needs()
    if earlier:
        needs.block = earlier[-1]
    else:
        ended = (block for block in reversed(blocks) if not these.gpu or _ended(these, block, at))
        needs.block, needs.lag = next(ended, None), 1
    last = earlier[-1].begin if earlier else (-1, 0)
    # A call that was waited for with no work between the wait and this call: nothing else carries the order.
    needs.calls = [
        other
        for other in range(at)
        if waits[other][0] == stream and last < waits[other][1] and _waited(these, stream, other, at)
    ]
    return needs


def _ended(these: RankClass, block: Block, at: int) -> bool:
    """Whether a block of the iteration before had ended when a call began, in every sample that shows both."""
    for step in these.samples:
        before = these.steps[step.rank].get(step.number - 1)
        if before is not None and (found := bounds(before.lane(block.stream), block)) is not None:
            lane = before.lane(block.stream)
            if lane.ends[found[1] - 1] > step.calls[at].start + _SLACK_US:
                return False
    return True


def _waited(these: RankClass, stream: str, other: int, at: int) -> bool:
    """Whether a call was waited for before a later one was made, in every sample."""
    for step in these.samples:
        first, second = step.calls[other], step.calls[at]
        wait_at = first.submit if first.stream == stream else first.wait_at
        if wait_at is None or wait_at >= second.submit:
            return False
        if these.gpu and first.end > second.start + _SLACK_US:
            return False
    return True


def _name(these: RankClass) -> None:
    """Blocks are named after the phase of training that most of their work was submitted in."""
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
