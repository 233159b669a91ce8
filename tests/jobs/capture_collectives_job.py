# SPDX-License-Identifier: Apache-2.0
"""Four ranks that call torch.distributed by hand, in every way there is."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from capture_scenarios import compute, record, run

from stretto.runtime.capture.clock import measure
from stretto.runtime.capture.hooks import RecordedWork


def every_kind() -> Any:
    """Each collective once, each waited for at once, with sizes that tell them apart."""
    rank, world = dist.get_rank(), dist.get_world_size()

    def step(number: int) -> None:
        dist.all_reduce(torch.ones(100))
        compute()
        dist.all_gather_into_tensor(torch.empty(4 * 50), torch.ones(50))
        dist.all_gather([torch.empty(60) for _ in range(world)], torch.ones(60))
        compute()
        dist.reduce_scatter_tensor(torch.empty(70), torch.ones(4 * 70))
        dist.all_to_all_single(torch.empty(4 * 80), torch.ones(4 * 80))
        compute()
        dist.broadcast(torch.ones(90), src=1)
        dist.reduce(torch.ones(110), dst=2)
        dist.gather(torch.ones(120), [torch.empty(120) for _ in range(world)] if rank == 3 else None, dst=3)
        dist.scatter(torch.empty(130), [torch.ones(130) for _ in range(world)] if rank == 1 else None, src=1)
        compute()
        dist.barrier()

    return record(step)


def overlapped() -> Any:
    """Two ops under way at once, waited for in the other order."""

    def step(number: int) -> None:
        compute()
        first = dist.all_reduce(torch.ones(1000), async_op=True)
        compute()
        second = dist.all_to_all_single(torch.empty(400), torch.ones(400), async_op=True)
        compute()
        second.wait()
        compute()
        first.wait()
        first.wait()
        compute()

    return record(step)


def subgroups() -> Any:
    """Rows and columns of a 2 x 2 grid, and one op of a single row."""
    rank = dist.get_rank()
    rows = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    columns = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    alone = dist.new_group([rank], use_local_synchronization=True)

    def step(number: int) -> None:
        compute()
        dist.all_reduce(torch.ones(100), group=rows[rank // 2])
        compute()
        dist.all_gather_into_tensor(torch.empty(100), torch.ones(50), group=columns[rank % 2])
        compute()
        dist.all_reduce(torch.ones(10), group=alone)
        if rank < 2:
            dist.broadcast(torch.ones(30), src=1, group=rows[0])

    return record(step)


def stages() -> Any:
    """Two pipeline stages of two ranks each: activations go one way, and each stage sums its gradients."""
    rank = dist.get_rank()
    stage = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]

    def step(number: int) -> None:
        compute()
        if rank < 2:
            dist.send(torch.ones(500), rank + 2)
        else:
            dist.recv(torch.empty(500), rank - 2)
            compute()
        dist.all_reduce(torch.ones(40), group=stage)
        compute()

    return record(step)


def ring() -> Any:
    """Everybody sends to the right and receives from the left at once."""
    rank, world = dist.get_rank(), dist.get_world_size()

    def step(number: int) -> None:
        compute()
        sent = dist.isend(torch.ones(50), (rank + 1) % world)
        received = dist.irecv(torch.empty(50), (rank - 1) % world)
        assert sent is not None and received is not None
        received.wait()
        sent.wait()
        compute()

    return record(step)


def across_iterations() -> Any:
    """An op that is waited for in the next iteration."""
    pending: list[Any] = []

    def step(number: int) -> None:
        compute()
        if pending:
            pending.pop().wait()
        compute()
        pending.append(dist.all_reduce(torch.ones(100), async_op=True))

    outcome = record(step)
    pending.pop().wait()
    return outcome


def functional_and_futures() -> Any:
    """Functional collectives, which are waited for when used, and waits by future."""

    def step(number: int) -> None:
        compute()
        reduced = functional.all_reduce(torch.ones(100), "sum", list(range(dist.get_world_size())))
        compute()
        assert float((reduced + 1)[0]) == 5.0
        compute()
        work = dist.all_reduce(torch.ones(200), async_op=True)
        assert work is not None
        doubled = work.get_future().then(lambda future: future.value()[0] * 2)
        compute()
        assert float(doubled.wait()[0]) == 8.0
        compute()

    return record(step)


def sizes_that_follow_the_data() -> Any:
    """An uneven all-to-all whose size changes from batch to batch."""
    rank, world = dist.get_rank(), dist.get_world_size()

    def step(number: int) -> None:
        compute()
        rows = [10 + number + (peer == rank) for peer in range(world)]
        dist.all_to_all_single(torch.empty(sum(rows)), torch.ones(sum(rows)), rows, rows)

    return record(step)


def another_op_sometimes() -> Any:
    """A broadcast in the last iteration only, on top of the usual."""

    def step(number: int) -> None:
        compute()
        dist.all_reduce(torch.ones(100))
        if number == 4:
            dist.broadcast(torch.ones(10), src=0)

    return record(step)


def another_wait_sometimes() -> Any:
    """The same ops, waited for in another order once."""

    def step(number: int) -> None:
        works = [dist.all_reduce(torch.ones(size), async_op=True) for size in (100, 200)]
        compute()
        for work in works if number < 4 else reversed(works):
            assert work is not None
            work.wait()

    return record(step)


def another_size_sometimes() -> Any:
    """Gradients that grow."""
    return record(lambda number: dist.all_reduce(torch.ones(100 + number)))


def another_order_on_a_rank() -> Any:
    """Two groups of the same ranks, used the other way round on rank 1."""
    groups = [dist.new_group([0, 1, 2, 3]), dist.new_group([0, 1, 2, 3])]
    order = (1, 0) if dist.get_rank() == 1 else (0, 1)

    def step(number: int) -> None:
        compute()
        works = [dist.all_reduce(torch.ones(100 + at), group=groups[at], async_op=True) for at in order]
        for work in works:
            assert work is not None
            work.wait()

    return record(step)


def too_few_steps() -> Any:
    """Fewer iterations than asked for."""
    return record(lambda number: dist.all_reduce(torch.ones(100)), iterations=3, extra=-1)


def receive_from_anybody() -> Any:
    """A receive that does not say from whom."""
    rank = dist.get_rank()

    def step(number: int) -> None:
        if rank == 0:
            dist.recv(torch.empty(10))
        elif rank == 1:
            dist.send(torch.ones(10), 0)

    return record(step)


def traceless() -> Any:
    """Whether results are right during the recording, and works are the library's own before and after."""
    seen: list[list[Any]] = []

    def step(number: int) -> None:
        values = torch.full((10,), float(dist.get_rank()))
        work = dist.all_reduce(values, async_op=True)
        assert work is not None
        work.wait()
        seen.append([isinstance(work, RecordedWork), float(values[0]), work.is_completed()])

    record(step, iterations=2, extra=1)
    return seen


def an_error_inside() -> Any:
    """An error of the training loop comes out as it is, and nothing of ours stays behind."""

    def step(number: int) -> None:
        dist.all_reduce(torch.ones(10))
        if number == 1:
            raise ZeroDivisionError("of the training loop")

    try:
        record(step)
    except ZeroDivisionError as error:
        work = dist.all_reduce(torch.ones(10), async_op=True)
        assert work is not None
        work.wait()
        return [str(error), isinstance(work, RecordedWork)]


def clocks() -> Any:
    """The measured offset of every rank's clock; they share one."""
    return [[offset.offset_us, offset.error_us] for offset in map(measure, range(1, dist.get_world_size()))]


if __name__ == "__main__":
    scenarios = (
        every_kind, overlapped, subgroups, stages, ring, across_iterations, functional_and_futures,
        sizes_that_follow_the_data, another_op_sometimes, another_wait_sometimes, another_size_sometimes,
        another_order_on_a_rank, too_few_steps, receive_from_anybody, traceless, an_error_inside, clocks,
    )  # fmt: skip
    run({scenario.__name__: scenario for scenario in scenarios})
