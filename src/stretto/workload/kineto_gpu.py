# SPDX-License-Identifier: Apache-2.0
"""Reads traces of jobs that compute on GPUs: kernels by stream; NCCL kernels get the description the CPU recorded."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict

from ..errors import InvalidInput
from .kineto_events import CallPayload, Event, EventArgs, Events, args_of, count, element_bytes, group_of, sized
from .kineto_rank import KinetoRank, StreamWait, TraceCall, TraceWork, backward_end, inside, kind_of

_GPU = ("kernel", "gpu_memcpy", "gpu_memset")


def fill(trace: KinetoRank, about: Events) -> None:
    """Add the calls and the work of a GPU trace, and the waits that the CPU or CUDA's own events show."""
    launched: dict[object, float] = {}
    described: dict[object, EventArgs] = {}
    waited: dict[tuple[str, object], float] = {}
    for event in about.events:
        args = args_of(event)
        if event.cat in ("cuda_runtime", "cuda_driver", "hip_runtime"):
            launched[args.correlation] = event.ts
        elif event.name == "record_param_comms":
            if args.collective == "wait":
                waited.setdefault((str(args.group_name), args.seq), event.ts)
            elif args.collective is not None:
                described[args.external_id] = args
    labels: dict[str, int] = {}
    together: dict[object, TraceCall] = {}
    alone = 0
    for number, event in enumerate(about.events):
        args = args_of(event)
        if event.cat == "cuda_sync" and args.wait_on_stream is not None:
            if args.correlation in launched and args.wait_on_record in launched:
                at, recorded = launched[args.correlation], launched[args.wait_on_record]
                trace.syncs.append(StreamWait(at, str(args.stream), recorded, str(args.wait_on_stream)))
            continue
        if event.cat not in _GPU:
            continue
        stream = str(event.tid if args.stream is None else args.stream)
        submit = min(launched.get(args.correlation, event.ts), event.ts)
        if not _is_nccl(event, args):
            label = labels.setdefault(event.name, len(labels))
            trace.works.append(TraceWork(submit, event.ts, event.end, stream, label))
            continue
        where = f"{about.where}: event {number} ({event.name.partition('(')[0]})"
        known = args if args.collective is not None else described.get(args.external_id, args)
        message, receives = _nccl_message(known, about, trace.rank, where)
        if message is None:
            alone += 1
            continue
        seq = known.seq if isinstance(known.seq, int) else None
        earlier = together.get(args.external_id) if args.external_id is not None else None
        if earlier is not None and earlier.message == message:
            earlier.start, earlier.end = min(earlier.start, event.ts), max(earlier.end, event.end)
            continue
        call = TraceCall(
            message=message, submit=submit, start=event.ts, end=event.end, stream=stream, seq=seq, receives=receives,
            wait_at=waited.get((str(known.group_name), seq)) if seq is not None else None,
        )  # fmt: skip
        together[args.external_id] = call
        trace.calls.append(call)
    if alone:
        trace.notes.append(f"rank {trace.rank}: left out {alone} collectives of a single rank")
    _bind_waits(trace)
    if any(event.name == "DistributedDataParallel.forward" for event in about.events):
        for call in trace.calls:
            if call.wait_at is None and inside(trace.backward, call.submit):
                call.wait_at = backward_end(trace, call.submit)


def _is_nccl(event: Event, args: EventArgs) -> bool:
    named = event.name.startswith(("ncclDevKernel", "ncclKernel"))
    return event.cat == "kernel" and (named or args.collective is not None)


def _nccl_message(args: EventArgs, about: Events, rank: int, where: str) -> tuple[CallPayload | None, bool]:
    if args.collective is None:
        raise InvalidInput(f"{where}: no Collective name; record on PyTorch 2.2 or newer, with CPU activity too")
    kind = kind_of(args.collective, f"{where}.Collective name")
    group = group_of(args, about, where)
    if len(group) < 2:
        return None, False
    elements = max(
        count(args.in_elements, f"{where}.In msg nelems"), count(args.out_elements, f"{where}.Out msg nelems")
    )
    nbytes = sized(elements, element_bytes(args.dtype, f"{where}.dtype"), where)
    if kind in ("send", "recv"):
        peer = args.dst_rank if kind == "send" else args.src_rank
        if peer is None:
            at = count(args.rank, f"{where}.Rank")
            if at >= len(group):
                raise InvalidInput(f"{where}.Rank: must be a position 0..{len(group) - 1} in its group, not {at}")
            peer = group[at]
        peer = count(peer, f"{where}.{'Dst' if kind == 'send' else 'Src'} Rank")
        pair = (rank, peer) if kind == "send" else (peer, rank)
        return CallPayload("send", nbytes, pair, 0), kind == "recv"
    root = args.rank if isinstance(args.rank, int) and 0 <= args.rank < len(group) else 0
    rooted = kind in ("broadcast", "reduce", "gather", "scatter")
    # PyTorch calls an all-to-all with splits all_to_allv.
    return CallPayload(kind, nbytes, group, root if rooted else 0, splits=args.collective == "all_to_allv"), False


def _bind_waits(trace: KinetoRank) -> None:
    """Find the collectives that compute streams waited for, and when, where CUDA recorded its event waits."""
    calls_of: dict[str, list[TraceCall]] = defaultdict(list)
    for call in sorted(trace.calls, key=lambda call: call.submit):
        calls_of[call.stream].append(call)
    for sync in sorted(trace.syncs):
        calls = calls_of.get(sync.source, [])
        at = bisect_left(calls, sync.recorded, key=lambda call: call.submit) - 1
        if at >= 0 and sync.stream not in calls_of and calls[at].wait_at is None:
            calls[at].wait_at, calls[at].wait_stream = sync.at, sync.stream
