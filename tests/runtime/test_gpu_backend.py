# SPDX-License-Identifier: Apache-2.0
"""What of the backend on GPU memory needs no GPU: options, agreement, routing, order of launches, lost ranks."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from stretto.cluster import Cluster
from stretto.errors import InvalidInput, PeerLost, StrettoError
from stretto.runtime.torch_backend import gpu_watch
from stretto.runtime.torch_backend.buffers import CollectiveCall, Splits
from stretto.runtime.torch_backend.call_board import RECORDS, CallBoard, make_board_file
from stretto.runtime.torch_backend.gpu_engine import GpuEngine, place_in
from stretto.runtime.torch_backend.gpu_hosts_join import why_not_between
from stretto.runtime.torch_backend.gpu_layout import GpuBuffers, gpu_buffers, gpu_refusal
from stretto.runtime.torch_backend.gpu_meeting import GpuCard, decode_cards, encode_card, sharers, why_not
from stretto.runtime.torch_backend.gpu_options import GpuOptions, gpu_options
from stretto.runtime.torch_backend.gpu_selection import GpuSelector
from stretto.runtime.torch_backend.gpu_watch import GroupWatch
from stretto.runtime.torch_backend.launch_queue import Launch, LaunchQueue
from stretto.runtime.torch_backend.selection import Selector
from stretto.simulator.runtimes import Runtime

SUM = dist.ReduceOp.SUM


def call_of(op: str, dtype: torch.dtype = torch.float32, reduce: Any = None, splits: Splits | None = None) -> Any:
    outputs = None if op in ("all_reduce", "broadcast", "reduce") else [torch.zeros(8, dtype=dtype)]
    return CollectiveCall.of(op, [torch.zeros(8, dtype=dtype)], outputs=outputs, reduce=reduce, splits=splits)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"STRETTO_GPU": "yes"}, "unknown STRETTO_GPU 'yes'; choose from: on, hosts, off"),
        ({"STRETTO_GPU_BLOCKS": "0"}, "STRETTO_GPU_BLOCKS: must be a number from 1 to 1024, not '0'"),
        ({"STRETTO_GPU_BLOCKS": "many"}, "STRETTO_GPU_BLOCKS: must be a number from 1 to 1024, not 'many'"),
        ({"STRETTO_GPU_MEMORY": "much"}, "STRETTO_GPU_MEMORY: size 'much'"),
    ],
)
def test_wrong_options_are_named(given: dict[str, str], said: str) -> None:
    with pytest.raises(InvalidInput) as error:
        gpu_options(given)
    assert str(error.value).startswith(said)


@pytest.mark.parametrize(
    ("call", "why"),
    [
        (call_of("all_reduce", reduce=SUM), ""),
        (call_of("all_gather", torch.complex64), ""),
        (call_of("all_reduce", torch.bool, SUM), ""),
        (call_of("all_to_all"), ""),
        (CollectiveCall.barrier(torch.device("cuda")), ""),
        (call_of("gather"), "no gather on GPU memory"),
        (call_of("all_to_all", splits=Splits(input=(4, 4), output=(4, 4))), "an all-to-all with splits"),
        (call_of("all_reduce", reduce=dist.ReduceOp.BAND), "no reduction band"),
        (call_of("all_reduce", reduce=dist.ReduceOp.PREMUL_SUM), "no reduction premul_sum"),
        (call_of("all_reduce", torch.int32, dist.ReduceOp.AVG), "no avg of torch.int32"),
        (call_of("all_reduce", torch.complex64, SUM), "no reduction of torch.complex64"),
        (CollectiveCall.of("all_reduce", [torch.zeros(0)], reduce=SUM), "an empty tensor"),
    ],
)
def test_what_goes_to_nccl_and_why(call: CollectiveCall, why: str) -> None:
    assert gpu_refusal(call, 2) == why
    assert gpu_refusal(call, 1) == "a group of one rank"


def played(call: CollectiveCall, buffers: GpuBuffers | None, result: torch.Tensor) -> None:
    """Write a program's result, as the executor would."""
    assert buffers is not None
    buffers.target.copy_(result.view(buffers.target.dtype))
    if buffers.finish is not None:
        buffers.finish()


def test_lists_and_strides_are_laid_out_flat_and_come_back() -> None:
    nothing = torch.zeros(1)
    pieces = [torch.zeros(2, 3) for _ in range(2)]
    call = CollectiveCall.of("all_gather", [torch.ones(2, 3)], outputs=pieces)
    played(call, gpu_buffers(call, 2, nothing), torch.arange(12.0).view(torch.uint8))
    assert torch.equal(torch.stack(pieces).view(-1), torch.arange(12.0))
    apart = torch.zeros(4, 2)[:, 0]
    call = CollectiveCall.of("all_reduce", [apart], reduce=SUM)
    buffers = gpu_buffers(call, 2, nothing)
    assert buffers is not None and buffers.source is buffers.target and buffers.nbytes == 16
    played(call, buffers, torch.arange(4.0))
    assert apart.tolist() == [0, 1, 2, 3]
    truth = CollectiveCall.of("all_reduce", [torch.tensor([True])], reduce=dist.ReduceOp.PRODUCT)
    laid = gpu_buffers(truth, 2, nothing)
    assert laid is not None and laid.reduce == "min" and laid.source.dtype == torch.uint8


@pytest.mark.parametrize(
    ("op", "inputs", "outputs"),
    [
        ("all_gather", [4], [9]),
        ("reduce_scatter", [7], [4]),
        ("all_to_all", [5], [5]),
        ("all_to_all", [4], [8]),
    ],
)
def test_tensors_that_do_not_fit_are_left_to_nccl(op: str, inputs: list[int], outputs: list[int]) -> None:
    call = CollectiveCall.of(op, [torch.zeros(n) for n in inputs], outputs=[torch.zeros(n) for n in outputs])
    assert gpu_buffers(call, 2, torch.zeros(1)) is None


def card(rank: int, **changes: Any) -> GpuCard:
    given: dict[str, Any] = {
        "rank": rank, "host": "a", "uuid": f"gpu{rank}", "reached": ("gpu0", "gpu1"), "seen": ("gpu0", "gpu1"),
        "shares": False, "options": GpuOptions().text, "held_bytes": 0, "rendezvous": 1,
        "torch": "2.11",
    }  # fmt: skip
    return GpuCard(**(given | changes))


@pytest.mark.parametrize(
    ("other", "why"),
    [
        ({}, ""),
        ({"host": "b"}, "ranks 0 and 1 are on different hosts"),
        ({"rendezvous": 3}, "rank 1 has joined 3 groups or symmetric tensors, rank 0 1"),
        ({"torch": "2.12"}, "rank 1 has PyTorch 2.12, rank 0 2.11"),
        ({"uuid": "gpu0"}, "ranks 0 and 1 share a GPU (TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1 allows it)"),
        ({"reached": ("gpu1",)}, "the GPU of rank 1 cannot address that of rank 0"),
        ({"held_bytes": 1000 << 20}, "100 MB more are over STRETTO_GPU_MEMORY (rank 1 holds 1.05 GB already)"),
        ({"options": "enabled=False"}, "rank 1 has other options (STRETTO_GPU, ...) than rank 0: enabled=False; "),
    ],
)
def test_ranks_agree_why_their_gpus_cannot_run_programs(other: dict[str, Any], why: str) -> None:
    cards = decode_cards([encode_card(card(0)), encode_card(card(1, **other))])
    found = why_not(cards, GpuOptions(), 100_000_000)
    assert found.startswith(why) and bool(why) == bool(found)
    assert sharers(cards) == (2 if other.get("uuid") == "gpu0" else 1)


def test_ranks_of_several_hosts_agree_on_options() -> None:
    asked = gpu_options({"STRETTO_GPU": "hosts"})
    both = [card(rank, host="ab"[rank], options=asked.text) for rank in range(2)]
    assert why_not_between(both, asked) == ""
    assert "rank 1 has" in why_not_between([card(0), both[1]], asked)


@pytest.fixture
def boards() -> list[CallBoard]:
    path = make_board_file(3)
    found = [CallBoard(path, rank, 3) for rank in range(3)]
    Path(path).unlink()
    return found


def test_a_board_names_the_two_ranks_whose_calls_differ(boards: list[CallBoard]) -> None:
    for board in boards:
        board.post(1, "all_reduce of 8 bytes")
    assert [board.mismatch(1) for board in boards] == [""] * 3
    boards[0].post(2, "all_reduce of 8 bytes")
    assert boards[0].missing(2) == [1, 2] and boards[0].mismatch(2) == ""
    boards[2].post(2, "broadcast")
    want = "call 2 on GPUs: rank 0 runs all_reduce of 8 bytes, rank 2 runs broadcast"
    assert boards[2].mismatch(2) == boards[0].mismatch(2) == want
    boards[1].post(2 + RECORDS, "x" * 1000)
    assert boards[0].call_of(1, 2) is None and boards[0].call_of(1, 2 + RECORDS) == "x" * 120


def test_a_board_carries_the_reason_of_who_gives_up_and_the_word_of_who_leaves(boards: list[CallBoard]) -> None:
    assert boards[0].given_up() is None
    boards[2].give_up("PeerLost", "rank 1 is gone")
    boards[2].give_up("PeerLost", "another reason")
    assert boards[0].given_up() == ("PeerLost", "rank 1 is gone")
    boards[1].leave()
    assert [boards[0].has_left(rank) for rank in range(3)] == [False, True, False]


class FakeEvent:
    """A moment that comes when it is told to."""

    def __init__(self) -> None:
        self.over = False

    def query(self) -> bool:
        return self.over


class FakeStream:
    """Remembers what it waits for."""

    def __init__(self) -> None:
        self.waits: list[Any] = []

    def wait_event(self, event: Any) -> None:
        self.waits.append(event)


def launched(queue: LaunchQueue, stream: FakeStream, blocks: int, capture: int = 0) -> Launch:
    queue.make_room(stream, blocks, capture)
    launch = Launch(stream=stream, end=FakeEvent(), blocks=blocks, capture=capture)
    queue.add(launch)
    return launch


def test_launches_that_do_not_fit_wait_for_the_oldest_ones() -> None:
    queue, streams = LaunchQueue(64), [FakeStream() for _ in range(4)]
    first = launched(queue, streams[0], 24)
    launched(queue, streams[1], 24)
    assert streams[1].waits == []
    third = launched(queue, streams[2], 24)
    assert streams[2].waits == [first.end]
    fourth = launched(queue, streams[1], 24)
    assert streams[1].waits == [], "a stream is in order by itself"
    third.end.over = True
    launched(queue, streams[3], 60)
    assert streams[3].waits == [fourth.end], "what has ended is not waited for"
    assert launched(queue, streams[0], 64, capture=5).ended and streams[0].waits == []


def test_without_a_cluster_the_straight_program_runs_and_with_a_price_the_fastest() -> None:
    plain = GpuSelector(Selector(range(4), ["a"] * 4))
    pick = plain.pick("all_reduce", 1 << 20)
    assert pick.program.name == "direct" and pick.program.collective.in_place
    assert plain.pick("barrier", 4).program.collective.kind == "all_reduce"
    assert not plain.pick("all_gather", 1 << 20).program.collective.in_place
    slow_links = Cluster.preset("ring", nodes=4, gb_per_s=1.0, alpha_us=1.0)
    priced = GpuSelector(Selector(range(4), ["a"] * 4, cluster=slow_links), Runtime(name="gpu"))
    chosen = priced.pick("all_reduce", 64 << 20)
    assert chosen.program.name != "direct" and chosen.why.startswith("predicted ")
    assert "direct" in {name for name, _ in chosen.rejected}


def test_a_place_in_symmetric_memory_is_its_number_and_offset() -> None:
    memory = torch.zeros(200)
    allocations = [memory[:100], memory[100:]]
    assert place_in(allocations, memory[3:10]) == "0+12" and place_in(allocations, memory[100:]) == "1+0"
    assert place_in(allocations, memory[99:101]) == "" and place_in([], memory) == ""


class FakeEngine:
    """A group as the watchdog sees it."""

    def __init__(self, board: CallBoard, cards: list[Any], limit_s: float) -> None:
        end = FakeEvent()
        launch = Launch(stream=FakeStream(), end=end, blocks=1, capture=0)
        board.post(1, "all_reduce")
        self.flights = deque([SimpleNamespace(op="all_reduce", number=1, since=-1e9, limit_s=limit_s, ended=False)])
        self.end, self.launch, self.cards, self.posted, self.captured = end, launch, cards, 1, False
        self.engine = SimpleNamespace(name="0")
        self.broken: Exception | None = None
        clock = SimpleNamespace(read=lambda: None)
        communicator = SimpleNamespace(lost=lambda: None)
        self.site = SimpleNamespace(board=board, clock=clock, communicator=communicator)
        self.lost_ranks = SimpleNamespace(explain=lambda error, call: error)

    def fail(self, error: Exception, *, tell: bool = True) -> None:
        if self.broken is None:
            self.broken = error
            if tell:
                self.site.board.give_up(type(error).__name__, str(error))

    def fail_as_told(self, kind: str, why: str) -> None:
        self.fail(PeerLost(f"{kind}: {why}"), tell=False)


def test_the_watchdog_ends_calls_of_lost_silent_and_differing_ranks(
    boards: list[CallBoard], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_watch, "find_gone", lambda cards, patience_s: [2] if cards else [])
    boards[1].post(1, "all_reduce")
    quiet = FakeEngine(boards[0], [], 1e12)
    assert GroupWatch(quiet).look() and quiet.broken is None
    late = FakeEngine(boards[0], [], 1.0)
    GroupWatch(late).look()
    assert str(late.broken) == ("timed out waiting for rank 2, which has not made this call (in all_reduce of group 0)")
    told = FakeEngine(boards[1], [], 1e12)
    GroupWatch(told).look()
    assert str(told.broken).startswith("PeerLost: timed out waiting for rank 2")


def test_a_rank_that_left_when_it_was_done_is_not_lost(
    boards: list[CallBoard], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_watch, "find_gone", lambda cards, patience_s: [1])
    boards[1].post(1, "all_reduce")
    boards[2].post(1, "all_reduce")
    boards[1].leave()
    fine = FakeEngine(boards[0], [1], 1e12)
    GroupWatch(fine).look()
    assert fine.broken is None
    monkeypatch.setattr(gpu_watch, "find_gone", lambda cards, patience_s: [2])
    GroupWatch(fine).look()
    assert str(fine.broken) == "rank 2 is gone (in all_reduce of group 0)"
    boards[1].post(2, "broadcast")


def test_a_call_that_fails_as_its_group_is_given_up_says_why_it_was() -> None:
    engine: Any = GpuEngine.__new__(GpuEngine)
    engine.broken = PeerLost("rank 1 is gone")
    with pytest.raises(PeerLost, match="rank 1 is gone"):
        engine._launch_failed(StrettoError("rank 1 is gone"))
    told: list[Exception] = []
    engine.broken, engine.fail, engine.engine = None, told.append, SimpleNamespace(rank=3)
    engine._launch_failed(ValueError("no such stream"))
    assert [str(error) for error in told] == ["rank 3: no such stream"]
