# SPDX-License-Identifier: Apache-2.0
"""Scenarios that check results: every library algorithm, types and operations, several at once, identity, a soak."""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import threading
import time
from functools import cache, reduce
from typing import Any

import numpy as np
from executor_ranks import Rank, Scenario, main, open_descriptors, resident_kib
from numpy.typing import NDArray

from stretto.algorithms import algorithm, defined_for
from stretto.collectives import COLLECTIVES
from stretto.programs.lower import lower
from stretto.programs.lowered import Lowered
from stretto.runtime.executor.executor import Executor, LoadedProgram, ProgramWork

Array = NDArray[Any]


@cache
def lowered(kind: str, name: str, world: int, in_place: bool = False) -> Lowered:
    """Built before the ranks are forked, so that each does not do it again."""
    return lower(algorithm(name, kind, world, in_place=in_place))


def every_program(world: int) -> list[tuple[str, str, bool]]:
    """(collective, algorithm, in place) for all that the library has for so many ranks."""
    return [(k, a, place) for k in COLLECTIVES for a in defined_for(k, world) for place in (False, True)]


def expected(kind: str, rank: int, inputs: list[Array], root: int) -> Array:
    """What a rank must end with, straight from the definition."""
    world = len(inputs)
    if kind in ("all_reduce", "reduce", "reduce_scatter"):
        total = reduce(np.add, inputs)
        return total if kind != "reduce_scatter" else np.split(total, world)[rank]
    if kind in ("all_gather", "gather"):
        return np.concatenate(inputs)
    if kind in ("all_to_all", "all_to_all_v"):
        return np.concatenate([np.split(x, world)[rank] for x in inputs])
    if kind == "scatter":
        return np.split(inputs[root], world)[rank]
    return inputs[(rank - 1) % world] if kind == "permute" else inputs[root]


def buffers(handle: LoadedProgram, count: int, dtype: Any = np.float32) -> tuple[Array, Array]:
    """An input and an output as the collective lays them out: apart, or two views of one piece of memory."""
    inputs, outputs = handle.buffer_elements(count)
    if not handle.lowered.collective.in_place:
        return np.zeros(inputs, dtype), np.full(outputs, 77, dtype)
    shift = handle.place_elements(count)
    front = max(0, -shift)
    memory = np.full(max(inputs + shift, outputs) + front, 77, dtype)
    return memory[front + shift : front + shift + inputs], memory[front : front + outputs]


def begin(ex: Executor, handle: LoadedProgram, x: Array, y: Array, count: int, **more: Any) -> ProgramWork:
    """Start on arrays."""
    return ex.start(handle, x.ctypes.data, y.ctypes.data, count, keep=(x, y), **more)


def library(rank: Rank, host: str | None = None) -> list[str]:
    """What came out wrong (nothing, one hopes) over all algorithms, with a size that does not divide."""
    wrong = []
    programs = every_program(rank.world)
    with rank.executor(timeout_s=120, host=host) as ex:
        for number, (kind, name, in_place) in enumerate(programs):
            handle = ex.load(lowered(kind, name, rank.world, in_place), message_bytes=8192)
            c = handle.lowered.collective
            whole = kind in ("all_reduce", "broadcast", "reduce", "permute")
            for count in (1009 if whole else 7 * rank.world, 50_001 if whole else 3001 * rank.world):
                x, y = buffers(handle, count)
                draws = (np.random.default_rng((number, count, r)) for r in range(rank.world))
                everyone = [draw.integers(-99, 99, count) for draw in draws]
                shards = kind in ("all_gather", "gather")
                inputs = [e[: count // rank.world] if shards else e for e in everyone]
                x[:] = inputs[rank.rank][: len(x)]
                begin(ex, handle, x, y, count).wait()
                want = expected(kind, rank.rank, inputs, c.root)
                if len(y) and not np.array_equal(y, want):
                    wrong.append(f"{kind} {name} in_place={in_place} count={count}")
    return wrong


def uneven(rank: Rank) -> bool:
    """All-to-all with another size for every pair, some of them nothing."""
    sizes = np.random.default_rng(5).integers(0, 40, (rank.world, rank.world)) * 37
    program = lower(algorithm("direct", "all_to_all_v", rank.world, counts=sizes.tolist()))
    count = int(max(sizes.sum(axis=0).max(), sizes.sum(axis=1).max()))
    with rank.executor(timeout_s=120) as ex:
        handle = ex.load(program)
        x, y = buffers(handle, count)
        assert (len(x), len(y)) == (sizes[rank.rank].sum(), sizes[:, rank.rank].sum())
        rows = enumerate(sizes.tolist())
        sent = [[np.full(n, 100 * a + b, np.float32) for b, n in enumerate(row)] for a, row in rows]
        x[:] = np.concatenate(sent[rank.rank])
        begin(ex, handle, x, y, count).wait()
        return bool(np.array_equal(y, np.concatenate([row[rank.rank] for row in sent])))


def networked(rank: Rank) -> list[str]:
    """The same with every message over UCX."""
    return library(rank, host=f"host {rank.rank}")


def two_hosts(rank: Rank) -> list[str]:
    """The same with shared memory between two and two, and UCX between them."""
    return library(rank, host=f"host {rank.rank // 2}")


FLOATING: dict[str, Any] = {"float16": np.float16, "float32": np.float32, "float64": np.float64}
WHOLE: dict[str, Any] = {k: getattr(np, k) for k in ("int8", "int16", "int32", "int64", "uint8")}
FOLDS: dict[str, Any] = {
    "sum": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum, "band": np.bitwise_and,
    "bor": np.bitwise_or, "bxor": np.bitwise_xor,
}  # fmt: skip


def types(rank: Rank) -> list[str]:
    """Every type with every operation it has, on values for which all orders give the same."""
    wrong = []
    count = 1237
    with rank.executor(timeout_s=120) as ex:
        handle = ex.load(lowered("all_reduce", "ring", rank.world))

        def run(dtype: str, op: str, all_inputs: list[Array], want: Array) -> None:
            x = np.ascontiguousarray(all_inputs[rank.rank])
            y = np.zeros_like(x)
            begin(ex, handle, x, y, count, dtype=dtype, op=op).wait()
            if not np.array_equal(y, want, equal_nan=y.dtype.kind == "f"):
                wrong.append(f"{dtype} {op}: {y[:4]} instead of {want[:4]}")

        for name, kind in (FLOATING | WHOLE).items():
            for op, fold in FOLDS.items():
                if name in FLOATING and op.startswith("b"):
                    continue
                low, high = (1, 3) if op == "prod" else (0 if name == "uint8" else -20, 20)
                each = [np.random.default_rng(r).integers(low, high, count).astype(kind) for r in range(rank.world)]
                run(name, op, each, reduce(fold, each))
        for op, fold in FOLDS.items():
            truth = [np.random.default_rng(r).random(count) < 0.6 for r in range(rank.world)]
            logic = {"sum": np.logical_or, "prod": np.logical_and, "min": np.logical_and, "max": np.logical_or}
            run("bool", op, truth, reduce(logic.get(op, fold), truth))
        for op in ("sum", "min", "max"):
            floats = [np.random.default_rng(r).integers(-20, 20, count).astype(np.float32) for r in range(rank.world)]
            brains = [(f.view(np.uint32) >> 16).astype(np.uint16) for f in floats]
            run("bfloat16", op, brains, (reduce(FOLDS[op], floats).view(np.uint32) >> 16).astype(np.uint16))
        for name, kind in FLOATING.items():
            each = [np.full(count, 4 * (r + 1), kind) for r in range(rank.world)]
            mean = sum(4 * (r + 1) for r in range(rank.world)) * (1 / rank.world)
            run(name, "avg", each, np.full(count, mean, kind))
            odd = [np.where(np.arange(count) % rank.world == r, np.nan, r).astype(kind) for r in range(rank.world)]
            run(name, "max", odd, reduce(np.maximum, odd))
    return wrong


def halves(rank: Rank) -> bool:
    """Every float16 there is, plus zero: conversions there and back change nothing; and rounding is NumPy's."""
    with rank.executor(timeout_s=120) as ex:
        handle = ex.load(lowered("all_reduce", "ring", rank.world))
        every = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
        other = np.roll(every, 12345) if rank.rank else every
        y = np.zeros_like(every)
        begin(ex, handle, other, y, len(every), dtype="float16").wait()
        with np.errstate(all="ignore"):
            want = reduce(np.add, [every, *[np.roll(every, 12345)] * (rank.world - 1)])
        return bool(np.array_equal(y, want, equal_nan=True))


def in_flight(rank: Rank) -> list[bool]:
    """Works of two communicators at once, waited for in another order on each rank."""
    good = []
    kinds = [("all_reduce", "ring"), ("all_gather", "direct"), ("all_reduce", "direct"), ("all_to_all", "direct")]
    with rank.executor(timeout_s=120) as ex:
        handles = [
            [ex.load(lowered(kind, name, rank.world), communicator=c, message_bytes=4096) for kind, name in kinds]
            for c in (0, 7)
        ]
        for round_ in range(6):
            begun = []
            for i in range(40):  # more than the board has room for
                kind = kinds[i % 4][0]
                handle = handles[i % 2][i % 4]
                count = rank.world * (100 + 900 * (i % 3))
                x, y = buffers(handle, count)
                inputs = [(np.arange(len(x)) % 13 + r + i).astype(np.float32) for r in range(rank.world)]
                x[:] = inputs[rank.rank]
                begun.append((begin(ex, handle, x, y, count), y, expected(kind, rank.rank, inputs, -1)))
            for at in np.random.default_rng((round_, rank.rank)).permutation(len(begun)).tolist():
                work, y, want = begun[at]
                work.wait()
                good.append(bool(np.array_equal(y, want)))
    return good


def many_threads(rank: Rank) -> list[int]:
    """Four threads of one process, each with a communicator of its own, start and wait at the same time."""
    good = [0] * 4
    with rank.executor(timeout_s=120, host=f"{rank.rank // 2}") as ex:
        handles = [ex.load(lowered("all_reduce", "ring", rank.world), communicator=c) for c in range(4)]

        def run(which: int) -> None:
            for i in range(40):
                x = np.full(500 + 3000 * (i % 3), rank.rank + which + i, np.float32)
                y = np.zeros_like(x)
                begin(ex, handles[which], x, y, len(x)).wait()
                good[which] += bool((y == sum(r + which + i for r in range(rank.world))).all())

        threads = [threading.Thread(target=run, args=(which,)) for which in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        rank.barrier()
    return good


def subgroups(rank: Rank) -> list[float]:
    """Two halves run all-reduces of their own beside one of all ranks."""
    half = tuple(r for r in range(rank.world) if r % 2 == rank.rank % 2)
    with rank.executor(timeout_s=120) as ex:
        small = ex.load(lowered("all_reduce", "ring", len(half)), ranks=half, communicator=1 + rank.rank % 2)
        large = ex.load(lowered("all_reduce", "ring", rank.world))
        x = np.full(4097, rank.rank + 1, np.float32)
        y, z = np.zeros_like(x), np.zeros_like(x)
        first = begin(ex, small, x, y, len(x))
        second = begin(ex, large, x, z, len(x))
        second.wait()
        first.wait()
    assert len(set(y.tolist())) == len(set(z.tolist())) == 1
    return [float(y[0]), float(z[0])]


def identity(rank: Rank) -> list[str]:
    """A digest of every all-reduce of noise, twice: equal on all ranks, and from run to run."""
    digests = []
    x = np.random.default_rng(rank.rank).standard_normal(100_003).astype(np.float32)
    with rank.executor(timeout_s=120) as ex:
        for name in defined_for("all_reduce", rank.world):
            handle = ex.load(lowered("all_reduce", name, rank.world))
            y = np.zeros_like(x)
            for _ in range(2):
                begin(ex, handle, x, y, len(x)).wait()
                digests.append(f"{name} {hashlib.sha256(y.tobytes()).hexdigest()[:16]}")
    return digests


def soak(rank: Rank) -> dict[str, Any]:
    """500 mixed collectives; what is held before and after."""
    wrong = 0
    with rank.executor(timeout_s=120) as ex:
        kinds = [("all_reduce", "ring"), ("all_reduce", "direct"), ("all_gather", "ring"), ("reduce_scatter", "direct"),
                 ("all_to_all", "direct"), ("broadcast", "binomial")]  # fmt: skip
        handles = [(kind, ex.load(lowered(kind, name, rank.world))) for kind, name in kinds]

        def one(i: int) -> bool:
            kind, handle = handles[i % len(handles)]
            count = rank.world * (1 + (i * 7919) % (20_000 if i % 10 == 0 else 300))
            x, y = buffers(handle, count)
            inputs = [(np.arange(len(x) or count) % 11 + r + i).astype(np.float32) for r in range(rank.world)]
            x[:] = inputs[rank.rank][: len(x)]
            begin(ex, handle, x, y, count).wait()
            return bool(np.array_equal(y, expected(kind, rank.rank, inputs, 0)))

        wrong += sum(not one(i) for i in range(260))
        before = {"descriptors": open_descriptors(), "kib": resident_kib()}
        wrong += sum(not one(i) for i in range(260, 560))
        rank.barrier()
        after = {"descriptors": open_descriptors(), "kib": resident_kib()}
        counters = ex.counters()
        rank.barrier()  # who closes takes its side of what is shared with it
    return {"wrong": wrong, "before": before, "after": after, "counters": counters, "threads": threads()}


def notified(rank: Rank) -> dict[str, Any]:
    """A second thread hears of the end of every work that asked for it, once; nobody else's; and of the close."""
    heard: list[int] = []
    asked: list[int] = []
    with rank.executor(timeout_s=120) as ex:
        handle = ex.load(lowered("all_reduce", "ring", rank.world))
        nothing = ex.wait_any(0.0)

        def listen() -> None:
            while len(heard) < 30:
                heard.extend(ex.wait_any(5.0))
            heard.extend(ex.wait_any(60.0))  # ended by the close

        listener = threading.Thread(target=listen)
        listener.start()
        kept = []
        for i in range(60):
            x = np.full(500 + 7000 * (i % 3), i, np.float32)
            work = begin(ex, handle, x, np.zeros_like(x), len(x), notify=i % 2 == 0)
            kept.append(work)
            if i % 2 == 0:
                asked.append(work.id)
            if i % 7 == 0:
                work.wait()
        for work in kept:
            work.wait()
        rank.barrier()
    listener.join(300)
    return {"nothing": nothing, "heard": sorted(heard), "asked": asked, "listening": listener.is_alive()}


def threads() -> int:
    """Threads of this process that the kernel knows; one that was waited for may be listed for a moment."""
    deadline = time.monotonic() + 60
    while (found := len(os.listdir("/proc/self/task"))) > threading.active_count() and time.monotonic() < deadline:
        time.sleep(0.001)
    return found


def meetings(rank: Rank) -> list[list[float]]:
    """An all-reduce of nothing is a barrier: when each rank came and left, alone and with others under way."""
    times = []
    with rank.executor(timeout_s=120) as ex:
        handle = ex.load(lowered("all_reduce", "ring", rank.world))
        x, y = np.ones(100, np.float32), np.zeros(100, np.float32)
        for turn in range(2 * rank.world):
            if turn % rank.world == rank.rank:
                time.sleep(0.02)
            came = time.monotonic()
            begin(ex, handle, x, y, 0).wait()
            times.append([came, time.monotonic()])
        # Several are under way at once, and each has an output of its own.
        outputs = [np.zeros(100 * (i % 3 == 0), np.float32) for i in range(60)]
        works = [begin(ex, handle, x, y, len(y)) for y in outputs]
        for work in reversed(works):
            work.wait()
        assert all((y == rank.world).all() for y in outputs)
        rank.barrier()
    return times


def closing(rank: Rank) -> dict[str, Any]:
    """Executors made and closed leave nothing behind; a closed one says so.

    The first one over a network may: UCX opens a machine's GPUs and network devices once for the process.
    """
    before: tuple[int, int] | None = None
    for host in (f"{rank.rank}", None, f"{rank.rank}", None):
        with rank.executor(host=host) as ex:
            handle = ex.load(lowered("all_reduce", "ring", rank.world))
            x = np.ones(1000, np.float32)
            y = np.zeros_like(x)
            begin(ex, handle, x, y, 1000).wait()
        rank.barrier()
        before = before or (open_descriptors(), threads())
    after = open_descriptors(), threads()
    assert threading.active_count() == 1
    return {"before": before, "after": after}


def late(rank: Rank) -> list[bool]:
    """What a rank has sent before it left arrives over a network, also where nobody could take it meanwhile."""
    good = []
    pids = [int(pid) for pid in rank.exchange(str(os.getpid()).encode())]

    def everybody_else(what: signal.Signals) -> None:
        for pid in pids[1:]:
            os.kill(pid, what)

    for count in (1000, 4_000_000):
        x, y = np.full(count, 7, np.float32), np.zeros(count, np.float32)
        with rank.executor(timeout_s=120, host=f"{rank.rank}") as ex:
            handle = ex.load(lowered("broadcast", "direct", rank.world), message_bytes=1 << 22)
            begin(ex, handle, x, y, 0).wait()
            rank.barrier()
            if rank.rank == 0:
                everybody_else(signal.SIGSTOP)
                threading.Timer(2.5, everybody_else, (signal.SIGCONT,)).start()
            begin(ex, handle, x, y, count).wait()
        good.append(rank.rank == 0 or bool((y == 7).all()))
        rank.barrier()
    return good


def forked(rank: Rank) -> list[float]:
    """A child that a rank forks, and that ends as processes do, takes nothing with it."""
    sums = []
    with rank.executor(timeout_s=120, host=f"{rank.rank // 2}") as ex:
        handle = ex.load(lowered("all_reduce", "ring", rank.world))
        x = np.ones(1000, np.float32)
        for _ in range(2):
            y = np.zeros_like(x)
            begin(ex, handle, x, y, len(x)).wait()
            sums.append(float(y.sum()))
            child = os.fork()
            if not child:
                ex.close()
                del ex, handle
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
        rank.barrier()
    return sums


def traced(rank: Rank) -> list[list[int]]:
    """One traced work: rows of (threadblock, step, slice, begin, end)."""
    with rank.executor(timeout_s=120) as ex:
        handle = ex.load(lowered("all_reduce", "ring", rank.world), message_bytes=4096)
        x, y = buffers(handle, rank.world * 3000)
        work = begin(ex, handle, x, y, rank.world * 3000, trace=True)
        work.wait()
        rank.barrier()
        assert work.elapsed_us > 0
        return [column.tolist() for column in work.trace()]


SCENARIOS: dict[str, Scenario] = {
    f.__name__: f
    for f in (
        library, networked, two_hosts, uneven, types, halves, in_flight, many_threads, subgroups,
        identity, soak, notified, meetings, closing, late, forked, traced,
    )
}  # fmt: skip

if __name__ == "__main__":
    size = int(sys.argv[2])
    for what in every_program(size):
        lowered(what[0], what[1], size, what[2])
    main(SCENARIOS)
