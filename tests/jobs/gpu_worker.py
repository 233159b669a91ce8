# SPDX-License-Identifier: Apache-2.0
"""Started by torchrun: checks programs on GPU memory, and times them beside PyTorch's symmetric memory.

torchrun --nproc-per-node 4 tests/jobs/gpu_worker.py check|time|kinds|programs|launches|graph|lost [--sizes 1024,65536]
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from stretto.algorithms import algorithm
from stretto.programs.ir import Program
from stretto.runtime.gpu import GpuCommunicator, GpuProgram, compile, encode
from stretto.runtime.gpu.communicator import MAX_BLOCKS
from stretto.runtime.gpu.compile import EndParams, GpuParams
from stretto.runtime.probe.mscclpp_ranks import graph_times_us
from stretto.runtime.torch_backend.gpu_options import gpu_options

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")


def say(*words: object) -> None:
    if dist.get_rank() == 0:
        print(f"n={dist.get_world_size()}", *words, flush=True)


def reference(kind: str, inputs: list[torch.Tensor], rank: int) -> torch.Tensor:
    """What this rank's output is, from everybody's input (float32 or integers)."""
    n = len(inputs)
    if kind == "all_gather":
        return torch.cat(inputs)
    if kind == "broadcast":
        return inputs[0]
    if kind == "all_to_all":
        return torch.cat([x.chunk(n)[rank] for x in inputs])
    total = torch.stack([x.double() for x in inputs]).sum(0).to(inputs[0].dtype)
    return total if kind == "all_reduce" else total.chunk(n)[rank]


def buffers(comm: GpuCommunicator, loaded: GpuProgram, symmetric: bool, dtype: torch.dtype) -> list[torch.Tensor]:
    made = []
    for count in (max(loaded.encoded.inputs), max(loaded.encoded.outputs)):
        made.append(comm.empty(count, dtype) if symmetric else torch.empty(count, dtype=dtype, device=comm.device))
    return [made[0][: loaded.encoded.inputs[comm.rank]], made[1][: loaded.encoded.outputs[comm.rank]]]


def inputs_of(loaded: GpuProgram, seed: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Every rank's input: small whole numbers, so that any order of adding gives the same."""
    found = []
    for rank, count in enumerate(loaded.encoded.inputs):
        generator = torch.Generator().manual_seed(seed * 1000 + rank)
        found.append(torch.randint(-8, 8, (count,), generator=generator).to(dtype))
    return found


def check_one(comm: GpuCommunicator, kind: str, program: Program, nbytes: int, **options: Any) -> str:
    dtype = torch.float32
    loaded = comm.load(program, dtype=dtype, nbytes=nbytes, **options)
    input, output = buffers(comm, loaded, bool(options.get("symmetric")), dtype)
    bad = 0
    for turn in range(3):
        everybody = inputs_of(loaded, turn, dtype)
        input.copy_(everybody[comm.rank])
        output.fill_(-1)
        comm.launch(loaded, input, output)
        torch.cuda.synchronize()
        if len(output):
            bad += int((output.cpu() != reference(kind, everybody, comm.rank)).sum())
        dist.barrier()
    return "ok" if not bad else f"WRONG {bad}"


def check(comm: GpuCommunicator) -> None:
    n = comm.size
    for kind in KINDS:
        program = algorithm("direct", kind, n)
        for nbytes in (n * n * 4, 16384, 1 << 20, 8 << 20):
            words = []
            for options in ({"protocol": "ll"}, {"protocol": "simple"}, {"symmetric": True}):
                if nbytes > 1 << 20 and options.get("protocol") == "ll":
                    continue
                start = time.time()
                said = check_one(comm, kind, program, nbytes, **options)
                words.append(f"{options}: {said} {time.time() - start:.2f}s")
            say(kind, nbytes, "; ".join(words))


def median_us(run: Callable[[], None], calls: int = 100) -> float:
    for _ in range(3):
        run()
    return median(graph_times_us(run, calls))


def time_all_reduce(comm: GpuCommunicator, sizes: list[int]) -> None:
    import torch.distributed._symmetric_memory as sm

    n, name = comm.size, comm.group.group_name
    one, two = algorithm("direct", "all_reduce", n, steps=1), algorithm("direct", "all_reduce", n)
    for nbytes in sizes:
        rows = []
        cases: list[tuple[str, Program, dict[str, Any]]] = []
        if nbytes <= 1 << 17:
            cases += [(f"ll1 b{b}", one, {"protocol": "ll", "max_blocks": b}) for b in (1, 4, 8, 16)]
        if 16384 <= nbytes <= 1 << 19:
            cases += [(f"ll2 b{b}", two, {"protocol": "ll", "max_blocks": b}) for b in (8, 16, 32)]
        cases += [(f"sym2 b{b}", two, {"symmetric": True, "in_place": True, "max_blocks": b}) for b in (8, 16, 32)]
        if nbytes <= 1 << 18:
            cases += [(f"sym1 b{b}", one, {"symmetric": True, "max_blocks": b}) for b in (8, 16)]
        if nbytes >= 1 << 20:
            cases += [("staged", two, {"protocol": "simple"})]
        for label, program, options in cases:
            loaded = comm.load(program, dtype=torch.float32, nbytes=nbytes, **options)
            x, y = buffers(comm, loaded, bool(options.get("symmetric")), torch.float32)
            y = x if options.get("in_place") else y
            x.zero_()
            took = median_us(partial(comm.launch, loaded, x, y), 100 if nbytes <= 1 << 20 else 8)
            rows.append(f"{label}({loaded.encoded.blocks},{loaded.encoded.threads}) {took:.2f}")
        t = sm.empty(nbytes // 4, dtype=torch.float32, device=comm.device)
        t.zero_()
        sm.rendezvous(t, name)
        theirs = []
        calls = 100 if nbytes <= 1 << 20 else 8
        if nbytes <= 1 << 20:
            took = median_us(partial(torch.ops.symm_mem.one_shot_all_reduce, t, "sum", name), calls)
            theirs.append(f"one {took:.2f}")
        if not (n == 8 and nbytes > 1 << 20):
            took = median_us(partial(torch.ops.symm_mem.two_shot_all_reduce_, t, "sum", name), calls)
            theirs.append(f"two {took:.2f}")
        say(nbytes, " | ".join(rows), "|| symm_mem", " ".join(theirs))


def time_kinds(comm: GpuCommunicator, sizes: list[int]) -> None:
    """Every kind in every mode."""
    for nbytes in sizes:
        calls = 100 if nbytes <= 1 << 20 else 8 if nbytes <= 64 << 20 else 3
        for kind in KINDS[: 4 if nbytes <= 64 << 20 else 1]:
            rows = []
            modes: list[dict[str, Any]] = [{"symmetric": True}, {"protocol": "simple"}]
            modes += [{"protocol": "ll"}] if nbytes <= 1 << 20 else []
            for options in modes:
                loaded = comm.load(algorithm("direct", kind, comm.size), dtype="float32", nbytes=nbytes, **options)
                x, y = buffers(comm, loaded, bool(options.get("symmetric")), torch.float32)
                took = median_us(partial(comm.launch, loaded, x, y), calls)
                mode = "symmetric" if "symmetric" in options else options["protocol"]
                rows.append(f"{mode}({loaded.encoded.blocks},{loaded.encoded.rounds}) {took:.2f}")
            say(nbytes, kind, " | ".join(rows))


PRICED = {
    "all_reduce": ("ring", "direct", "halving_doubling", "recursive_doubling"),
    "all_gather": ("ring", "direct", "bruck"),
    "reduce_scatter": ("ring", "direct"),
    "all_to_all": ("direct", "bruck"),
    "broadcast": ("chain", "binomial"),
}


def time_programs(comm: GpuCommunicator, sizes: list[int]) -> None:
    """Programs of the library with staged memory, one line each: what the prices of a runtime are fitted to."""
    for kind, names in PRICED.items():
        for name in names:
            program = algorithm(name, kind, comm.size)
            row = []
            for nbytes in sizes:
                loaded = comm.load(program, dtype="float32", nbytes=nbytes, protocol="simple")
                x, y = buffers(comm, loaded, False, torch.float32)
                row.append(round(median_us(partial(comm.launch, loaded, x, y), 40), 2))
            say("price", kind, name, dict(zip(sizes, row, strict=True)))


def time_launches(comm: GpuCommunicator, sizes: list[int]) -> None:
    """What a launch costs by itself: programs of no rounds, of all three kinds of kernels."""
    for nbytes in sizes:
        row = []
        for options in ({"protocol": "ll"}, {"protocol": "simple"}, {"symmetric": True}):
            program = algorithm("direct", "all_reduce", comm.size)
            loaded = comm.load(program, dtype="float32", nbytes=nbytes, **options)
            took = median_us(partial(launch_nothing, loaded), 100)
            row.append(f"{options}({loaded.encoded.blocks},{loaded.encoded.threads}) {took:.2f}")
        say("launch", nbytes, " | ".join(row))


def launch_nothing(loaded: GpuProgram) -> None:
    params, e = type(loaded.params).from_buffer_copy(loaded.params), loaded.encoded
    if isinstance(params, GpuParams):
        params.header[2] = 0
    elif isinstance(params, EndParams):
        params.steps = params.ready = params.tell_ready = params.done = params.tell_done = 0
    else:
        params.rounds = 0
    stream = torch.cuda.current_stream().cuda_stream
    loaded.kernel.launch(params, blocks=e.blocks, threads=e.threads, stream=stream)


def check_graph(comm: GpuCommunicator) -> None:
    """Calls on two streams in one CUDA graph, replayed with other inputs."""
    runs: list[tuple[str, GpuProgram, torch.Tensor, torch.Tensor]] = []
    cases: list[tuple[str, dict[str, Any]]] = [
        ("all_reduce", {"symmetric": True}),
        ("broadcast", {}),
        ("all_gather", {"protocol": "ll"}),
    ]
    for kind, options in cases:
        loaded = comm.load(algorithm("direct", kind, comm.size), dtype="float32", nbytes=16384, **options)
        input, output = buffers(comm, loaded, bool(options.get("symmetric")), torch.float32)
        runs.append((kind, loaded, input, output))
    graph, bad = torch.cuda.CUDAGraph(), 0
    with torch.cuda.graph(graph):
        for _, loaded, input, output in runs * 2:
            comm.launch(loaded, input, output)
    for turn in range(5):
        for _, loaded, input, output in runs:
            if loaded.encoded.inputs[comm.rank]:
                input.copy_(inputs_of(loaded, turn, torch.float32)[comm.rank])
            output.fill_(-1)
        graph.replay()
        other = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(other):  # A call beside a graph waits for what was launched before it.
            other.wait_stream(torch.cuda.default_stream())
            comm.launch(*runs[0][1:])
        torch.cuda.synchronize()
        for kind, loaded, _, output in runs:
            bad += int((output.cpu() != reference(kind, inputs_of(loaded, turn, torch.float32), comm.rank)).sum())
        dist.barrier()
    say("graph", "ok" if not bad else f"WRONG {bad}")


def check_lost(comm: GpuCommunicator) -> None:
    """Rank 0 never comes: the others give up, and name it."""
    loaded = comm.load(algorithm("direct", "all_reduce", comm.size), dtype="float32", nbytes=16384, protocol="simple")
    input, output = buffers(comm, loaded, False, torch.float32)
    if comm.rank:
        start = time.time()
        comm.launch(loaded, input, output)
        torch.cuda.synchronize()
        print("lost", comm.rank, comm.lost(), f"after {time.time() - start:.1f} s", flush=True)
        assert comm.lost() == (0, 1)
    dist.barrier()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("check", "time", "kinds", "programs", "launches", "graph", "lost"))
    parser.add_argument("--sizes", default="1024,16384,65536,1048576,16777216,67108864")
    parser.add_argument("--vectors", type=int, default=encode.BLOCK_VECTORS)
    parser.add_argument("--define", default="", help="names that are defined when the kernel is compiled")
    parser.add_argument("--seconds", type=float, default=100)
    options = parser.parse_args()
    encode.BLOCK_VECTORS = options.vectors
    if options.define:
        plain = compile.kernel_options
        extra = [f"-D{name}" for name in options.define.split(",")]
        compile.kernel_options = lambda *a, **k: [*plain(*a, **k), *extra]
        print("defined", extra)
    faulthandler.dump_traceback_later(options.seconds, exit=True)
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
    dist.init_process_group("gloo")
    start = time.time()
    assert dist.group.WORLD is not None
    # Jobs side by side on one GPU must fit together: STRETTO_GPU_BLOCKS says how many blocks each takes.
    blocks = gpu_options().max_blocks or MAX_BLOCKS
    comm = GpuCommunicator(dist.group.WORLD, max_blocks=blocks, limit_s=2 if options.what == "lost" else 10)
    say("made in", round(time.time() - start, 2), "s;", comm.held_bytes, "bytes,", comm.max_blocks, "blocks")
    try:
        timed = {"time": time_all_reduce, "kinds": time_kinds, "programs": time_programs, "launches": time_launches}
        if options.what in timed:
            timed[options.what](comm, [int(s) for s in options.sizes.split(",")])
        else:
            {"check": check, "graph": check_graph, "lost": check_lost}[options.what](comm)
    finally:
        if comm.lost() and options.what != "lost":
            print("LOST", comm.rank, comm.lost(), comm._host.tolist(), flush=True)
    say("done")
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
