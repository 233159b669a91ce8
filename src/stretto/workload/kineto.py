# SPDX-License-Identifier: Apache-2.0
"""Reads PyTorch profiler (Kineto) traces of a real job into a `Workload`."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from graphlib import CycleError
from pathlib import Path
from statistics import median

from ..errors import InvalidInput
from . import kineto_cpu, kineto_gpu
from .dag import Dep, Op, Workload
from .kineto_blocks import RankClass, StreamBlock, bounds, build
from .kineto_events import Events, decode
from .kineto_ops import CommOp, comm_ops
from .kineto_rank import KinetoRank, merged
from .kineto_steps import TraceStep, steps_of
from .ordering import few, in_order
from .trace_files import rank_files

ENDINGS = (".json", ".json.gz")
_STEP = re.compile(r"ProfilerStep#([0-9]{1,18})")


def read(path: str | Path, *, peers: Sequence[str | Path] = ()) -> Workload:
    """One training step from the trace of one rank, of several ranks (`peers`), or of all ranks in a directory.

    Durations are medians over the recorded steps. With the traces of all ranks of a group, a collective's transfer time
    runs from its latest start to its end, and `wait_us` is the rest. Otherwise the shortest of the recorded steps is
    taken, and a note says so. ``docs/traces.md`` lists what is read and what is assumed.
    """
    return workload_of(path, read_ranks(path, peers=peers))


def read_ranks(path: str | Path, *, peers: Sequence[str | Path] = ()) -> dict[int, KinetoRank]:
    """The traces of all ranks of a job that are given, as `read` takes them, by rank."""
    files = rank_files(path, peers, ENDINGS)
    traces: dict[int, KinetoRank] = {}
    for at, file in enumerate(files):
        trace = _rank_trace(decode(file), at)
        if trace.rank in traces:
            raise InvalidInput(f"{file}: of rank {trace.rank}, like {traces[trace.rank].where}; give each rank once")
        traces[trace.rank] = trace
    return dict(sorted(traces.items()))


def _rank_trace(about: Events, fallback_rank: int) -> KinetoRank:
    """Sort the events of one file into calls, work and steps."""
    rank = fallback_rank if about.rank is None else about.rank
    steps: dict[int, tuple[float, float]] = {}
    backward, update = [], []
    for event in about.events:
        if event.cat not in ("user_annotation", "cpu_op"):
            continue
        if event.name.startswith("autograd::engine::evaluate_function"):
            backward.append((event.ts, event.end))
        elif event.name.startswith("Optimizer.step"):
            update.append((event.ts, event.end))
        elif found := _STEP.fullmatch(event.name):
            steps.setdefault(int(found[1]), (event.ts, event.end))
    gpu = any(event.cat == "kernel" for event in about.events)
    trace = KinetoRank(
        where=about.where, rank=rank, world=about.world or 0, host=about.host, base_ns=about.base_ns, gpu=gpu, calls=[],
        works=[], steps=dict(sorted(steps.items())), backward=merged(backward), update=merged(update),
    )  # fmt: skip
    (kineto_gpu if gpu else kineto_cpu).fill(trace, about)
    trace.calls.sort(key=lambda call: (call.submit, call.start))
    trace.works.sort()
    if not trace.works and not trace.calls:
        raise InvalidInput(f"{about.where}: no kernels, CPU ops or collectives in it")
    if not trace.world:
        trace.world = max((max(call.message.group) + 1 for call in trace.calls), default=rank + 1)
    for call in trace.calls:
        if bad := [member for member in call.message.group if not 0 <= member < trace.world]:
            raise InvalidInput(f"{about.where}: a {call.message.kind} names rank {bad[0]}; there are {trace.world}")
        if len(set(call.message.group)) != len(call.message.group):
            raise InvalidInput(f"{about.where}: a {call.message.kind} names a rank of its group twice")
    return trace


def workload_of(source: str | Path, traces: dict[int, KinetoRank]) -> Workload:
    """The training step of the traces that `read_ranks` returned; `source` gives it its name."""
    path = Path(source)
    worlds = {trace.world for trace in traces.values()}
    world = max(worlds)
    if any(trace.world != world for trace in traces.values() if trace.calls):
        raise InvalidInput(f"{path}: traces of different jobs: their numbers of ranks are {sorted(worlds)}")
    if len({trace.gpu for trace in traces.values()}) > 1:
        raise InvalidInput(f"{path}: some ranks recorded GPU kernels and some did not")
    notes = [note for trace in traces.values() for note in trace.notes]
    steps = {rank: steps_of(trace, notes) for rank, trace in traces.items()}
    for rank, found in steps.items():
        if not found:
            raise InvalidInput(f"{traces[rank].where}: no work inside its ProfilerStep annotations")
    classes = _classes(traces, steps)
    if len(classes) > 1 and len(traces) < world:
        raise InvalidInput(
            f"{path}: the ranks do different things, and only {len(traces)} of {world} are here; give the traces of all"
        )
    for these in classes:
        build(these)
    comms = comm_ops(classes, world, notes)
    ops = _order(classes, comms, world, spread=len(traces) == world)
    count = min(len(found) for found in steps.values())
    kind = "GPU" if classes[0].gpu else "CPU"
    head = f"{kind} trace of {len(traces)} of {world} ranks, {count} steps ({path.name})"
    if len(traces) < world:
        notes.append("ranks without a trace are taken to do the same as those with one")
    return Workload(name=_job(path), num_ranks=world, ops=ops, notes=(head, *dict.fromkeys(notes)))


def _job(path: Path) -> str:
    """The name of a job from the name of a file, without the part that names the rank."""
    name = path.name
    for ending in (".gz", ".json", ".pt", ".trace"):
        name = name.removesuffix(ending)
    return re.sub(r"[._-]?(rank)?[._-]?\d+$", "", name) or name or "trace"


def _classes(traces: dict[int, KinetoRank], steps: dict[int, dict[int, TraceStep]]) -> list[RankClass]:
    """Ranks grouped by the shape of their iterations, in the order of their first rank."""
    ranks: dict[object, list[int]] = {}
    for rank, found in steps.items():
        ranks.setdefault(next(iter(found.values())).shape, []).append(rank)
    return [
        RankClass(traces={rank: traces[rank] for rank in members}, steps={rank: steps[rank] for rank in members})
        for members in ranks.values()
    ]


def _order(classes: list[RankClass], comms: list[CommOp], world: int, *, spread: bool) -> tuple[Op, ...]:
    """The ops of all classes in the order in which they were submitted."""
    rows: list[tuple[float, int, object]] = []
    for number, these in enumerate(classes):
        step = these.samples[0]
        origin = min([lane.works[0].submit for lane in step.lanes.values()] + [call.submit for call in step.calls[:1]])
        for block in these.blocks:
            if len(classes) > 1:
                block.name = f"r{min(these.traces)}.{block.name}"
            sample = next(sample for sample in these.samples if bounds(sample.lane(block.stream), block) is not None)
            lane = sample.lane(block.stream)
            shift = 0.0 if sample is step else min(work.works[0].submit for work in sample.lanes.values()) - origin
            rows.append((lane.works[lane.index(block.begin)].submit - origin - shift, 1, (number, block)))
        for comm in comms:
            if comm.first_class == number:
                rows.append((step.calls[comm.first_position].submit - origin, 0, comm))
    rows.sort(key=lambda row: row[:2])
    named: Counter[str] = Counter()
    for _, _, row in rows:
        if isinstance(row, CommOp):
            row.name = f"{row.kind}.{named[row.kind]}"
            named[row.kind] += 1
    by_call = {user: comm for comm in comms for user in comm.users}
    out = []
    for _, _, row in rows:
        if isinstance(row, CommOp):
            out.append(_comm(row, classes, by_call, world))
        elif isinstance(row, tuple):
            out.append(_compute(row[1], row[0], classes, by_call, spread=spread))
    return _sorted(out)


def _sorted(ops: list[Op]) -> tuple[Op, ...]:
    """Ops in an order in which each follows its dependencies; times of ranks that differ cannot give one."""
    needs: dict[str, list[str]] = {}
    last: dict[tuple[str, tuple[int, ...]], str] = {}
    for op in ops:
        needs[op.name] = [dep.op for dep in op.after if not dep.lag]
        if not op.is_comm:
            needs[op.name] += [last[op.stream, op.ranks]] if (op.stream, op.ranks) in last else []
            last[op.stream, op.ranks] = op.name
    by_name = {op.name: op for op in ops}
    try:
        return tuple(by_name[name] for name in in_order(needs))
    except CycleError as error:
        circle = " -> ".join(few(list(reversed(error.args[1]))))
        raise InvalidInput(f"the ranks' traces do not fit together: ops wait in a circle: {circle}") from None


def _comm(comm: CommOp, classes: list[RankClass], by_call: dict[tuple[int, int, int], CommOp], world: int) -> Op:
    deps: dict[Dep, None] = {}
    for number, rank, position in comm.users:
        these = classes[number]
        needs = these.needs[position]
        if needs.block is not None:
            deps[Dep(op=needs.block.name, lag=needs.lag, why="data" if these.gpu else "submit")] = None
        for other in needs.calls:
            earlier = by_call[number, rank, other]
            if earlier is not comm:
                deps[Dep(op=earlier.name, why="submit")] = None
    groups = () if comm.groups == (tuple(range(world)),) and comm.kind != "send" else comm.groups
    return Op(
        name=comm.name, kind=comm.kind, after=tuple(deps), stream="comm", nbytes=comm.nbytes, groups=groups,
        root=comm.root, at_most=comm.at_most, duration_us=comm.transfer_us, wait_us=comm.wait_us,
    )  # fmt: skip


def _compute(
    block: StreamBlock,
    number: int,
    classes: list[RankClass],
    by_call: dict[tuple[int, int, int], CommOp],
    *,
    spread: bool,
) -> Op:
    these = classes[number]
    deps: dict[Dep, None] = {}
    for earlier, lag in block.after:
        deps[Dep(op=earlier.name, lag=lag)] = None
    for waits, lag in ((block.waits, 0), (block.lagged, 1)):
        for position in waits:
            for rank in these.traces:
                deps[Dep(op=by_call[number, rank, position].name, lag=lag, why="wait")] = None
    times = block.times
    apart = spread and these.apart
    ranks = tuple(these.traces) if len(classes) > 1 else ()
    return Op(
        name=block.name, after=tuple(deps), stream=block.stream, phase=block.phase, ranks=ranks,
        duration_us=max(times.values()) if apart else median(times.values()),
        durations_us=tuple(times.values()) if apart else (),
    )  # fmt: skip
