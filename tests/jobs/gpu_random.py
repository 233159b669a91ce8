# SPDX-License-Identifier: Apache-2.0
"""Started by torchrun: random collectives on GPU memory beside a reference, in any order, without waiting between them.

torchrun --nproc-per-node 4 tests/jobs/gpu_random.py --trials 2000 [--library] [--programs FOLDER] [--delays] [--seed S]
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import random
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from stretto import InvalidInput
from stretto.algorithms import algorithm
from stretto.algorithms.registry import defined_for
from stretto.collectives import COLLECTIVES
from stretto.programs.formats import load_program
from stretto.programs.fused import fuse
from stretto.programs.ir import Program
from stretto.runtime.gpu import GpuCommunicator, GpuProgram
from stretto.runtime.gpu.communicator import MAX_BLOCKS
from stretto.runtime.gpu.compile import compiled
from stretto.runtime.gpu.encode import ELEMENT_BYTES, REDUCTIONS, chunk_elements, kernel_shapes
from stretto.runtime.torch_backend.gpu_options import gpu_options

MODES: tuple[dict[str, Any], ...] = ({"protocol": "simple"}, {"symmetric": True}, {"protocol": "ll"})


def say(*words: object) -> None:
    if dist.get_rank() == 0:
        print(f"n={dist.get_world_size()}", *words, flush=True)


@dataclass
class Case:
    """A loaded program with buffers of its own."""

    loaded: GpuProgram
    input: torch.Tensor
    output: torch.Tensor
    sizes: list[int]

    @classmethod
    def of(cls, comm: GpuCommunicator, pool: torch.Tensor, at: int, loaded: GpuProgram) -> Case:
        """Buffers are cut from one symmetric allocation, at the same place on all ranks."""
        dtype = getattr(torch, loaded.dtype)
        made = []
        for counts in (loaded.encoded.inputs, loaded.encoded.outputs):
            size = max(counts) * ELEMENT_BYTES[loaded.dtype]
            made.append(pool[at : at + size].view(dtype)[: counts[comm.rank]])
            at += -(-size // 256) * 256
        if loaded.fused.in_place:
            made[1] = made[0]
        lane = 16 // ELEMENT_BYTES[loaded.dtype]
        sizes = chunk_elements(loaded.fused.collective, loaded.count, lane).tolist()
        return cls(loaded, made[0], made[1], sizes)


def drawn_inputs(case: Case, seed: int, device: torch.device) -> list[torch.Tensor]:
    """Every rank's input, the same on all ranks: small whole numbers, so that any order of adding gives the same."""
    dtype = getattr(torch, case.loaded.dtype)
    generator = torch.Generator(device).manual_seed(seed)
    low, high = (0, 2) if case.loaded.dtype == "bool" else (1, 3) if case.loaded.reduce == "prod" else (0, 4)
    scale = case.loaded.fused.collective.num_ranks if case.loaded.reduce == "avg" else 1
    return [
        (torch.randint(low, high, (count,), generator=generator, device=device) * scale).to(dtype)
        for count in case.loaded.encoded.inputs
    ]


def expected(case: Case, inputs: list[torch.Tensor], rank: int) -> torch.Tensor:
    """This rank's output, piece by piece from the collective's postcondition."""
    c = case.loaded.fused.collective
    held: dict[tuple[int, int], torch.Tensor] = {}
    for r, x in enumerate(inputs):
        pieces = torch.split(x, [case.sizes[chunk] for chunk in c.inputs(r).tolist()])
        parts = c.in_part[c.in_ptr[r] : c.in_ptr[r + 1]].tolist()
        for chunk, part, piece in zip(c.inputs(r).tolist(), parts, pieces, strict=True):
            held[chunk, part] = piece
    wanted = []
    for at in range(int(c.out_ptr[rank]), int(c.out_ptr[rank + 1])):
        stack = torch.stack([held[int(c.out_chunk[at]), part] for part in c.parts_of(at)])
        wanted.append(stack[0] if len(stack) == 1 else reduced(stack, case.loaded.reduce, c.num_ranks))
    return torch.cat(wanted) if wanted else case.output


def reduced(stack: torch.Tensor, reduce: str, ranks: int) -> torch.Tensor:
    if stack.dtype == torch.bool:
        return stack.all(0) if reduce in ("prod", "min") else stack.any(0)
    if reduce in ("min", "max"):
        return stack.amin(0) if reduce == "min" else stack.amax(0)
    wide = stack.double() if stack.is_floating_point() else stack.long()
    total = wide.prod(0) if reduce == "prod" else wide.sum(0)
    if reduce == "avg":
        total = total / ranks if stack.is_floating_point() else total // ranks
    return total.to(stack.dtype)


def programs(options: argparse.Namespace, n: int, rng: random.Random) -> list[Program]:
    """The library's programs (all, or some), and those of files that are for as many ranks."""
    found: list[Program] = []
    for kind in COLLECTIVES:
        for name in defined_for(kind, n):
            in_place = kind == "all_reduce" and rng.random() < 0.5
            found.append(algorithm(name, kind, n, in_place=in_place))
    if not options.library:
        found = rng.sample(found, min(len(found), 24))
    for file in sorted(Path(options.programs).glob("*.txt")) if options.programs else []:
        program = load_program(file)
        if isinstance(program, Program) and program.collective.num_ranks == n:
            found.append(program)
    return found


def drawn_loads(options: argparse.Namespace, n: int, rng: random.Random) -> list[tuple[Program, dict[str, Any]]]:
    """Every program in every mode, with a type, an operation and a size: what `load` is called with."""
    made: list[tuple[Program, dict[str, Any]]] = []
    for program in programs(options, n, rng):
        for mode in MODES:
            dtype = rng.choice(options.dtypes.split(","))
            # A kernel is compiled for each pair: the direct programs have them all.
            many = options.reductions and program.name == "direct"
            dtype = dtype if many else "float32"
            reduce = rng.choice(REDUCTIONS[: 4 if dtype == "bool" else 5]) if many else "sum"
            most = 1 << (15 if mode.get("protocol") == "ll" else 20)
            unit = n * n * ELEMENT_BYTES[dtype]
            nbytes = unit * max(1, int(most ** rng.random()) // unit)
            made.append((program, {"dtype": dtype, "reduce": reduce, "nbytes": nbytes, **mode}))
    return made


def compile_together(comm: GpuCommunicator, loads: list[tuple[Program, dict[str, Any]]], delays: bool) -> int:
    """All kernels, each by one rank in a thread; the others find them in the cache."""
    kernels = set()
    for program, load in loads:
        protocol, symmetric = load.get("protocol", "simple"), bool(load.get("symmetric"))
        fused = fuse(program, protocol=protocol, symmetric=symmetric)
        kernels.add((load["dtype"], load["reduce"], kernel_shapes(fused)))
    capability = torch.cuda.get_device_capability(comm.device)
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // comm.size)) as pool:
        jobs = [
            pool.submit(compiled, *kernel, capability, delays=delays)
            for at, kernel in enumerate(sorted(kernels))
            if at % comm.size == comm.rank
        ]
        for job in jobs:
            job.result()
    dist.barrier()
    return len(kernels)


def cases(comm: GpuCommunicator, options: argparse.Namespace, rng: random.Random) -> list[Case]:
    pool = comm.empty(options.pool, torch.uint8)
    made: list[Case] = []
    at = 0
    loads = drawn_loads(options, comm.size, rng)
    say(compile_together(comm, loads, options.delays), "kernels for", len(loads), "programs")
    for program, load in loads:
        try:
            case = Case.of(comm, pool, at, comm.load(program, **load))
        except InvalidInput as error:
            say("left out:", program.name, load, str(error)[:100])
            continue
        made.append(case)
        at = place_after(made)
        if at > options.pool - (8 << 20):
            break
    return made


def place_after(made: list[Case]) -> int:
    """Where the next case begins: sizes are those of the largest rank, so that it is the same on all."""
    total = 0
    for case in made:
        for counts in (case.loaded.encoded.inputs, case.loaded.encoded.outputs):
            total += -(-max(counts) * ELEMENT_BYTES[case.loaded.dtype] // 256) * 256
    return total


def trial(comm: GpuCommunicator, case: Case, seed: int, bad: torch.Tensor) -> None:
    inputs = drawn_inputs(case, seed, comm.device)
    want = expected(case, inputs, comm.rank)
    case.input.copy_(inputs[comm.rank])
    comm.launch(case.loaded, case.input, case.output)
    if case.output.numel():
        bad += (case.output != want).any()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--library", action="store_true")
    parser.add_argument("--programs", default="")
    parser.add_argument("--delays", action="store_true")
    parser.add_argument("--reductions", action="store_true")
    parser.add_argument("--dtypes", default="float32")
    parser.add_argument("--pool", type=int, default=256 << 20)
    parser.add_argument("--seconds", type=float, default=100)
    parser.add_argument("--until", type=float, default=1e9, help="begin no more trials after so many seconds")
    options = parser.parse_args()
    faulthandler.dump_traceback_later(options.seconds, exit=True)
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
    dist.init_process_group("gloo")
    assert dist.group.WORLD is not None
    # Jobs side by side on one GPU must fit together: STRETTO_GPU_BLOCKS says how many blocks each takes.
    blocks = gpu_options().max_blocks or MAX_BLOCKS
    comm = GpuCommunicator(
        dist.group.WORLD, limit_s=10, max_blocks=blocks, delays=options.delays, seed=options.seed + 1
    )
    rng = random.Random(options.seed)
    start = begun = time.time()
    pool = cases(comm, options, rng)
    say(f"{len(pool)} programs loaded in {time.time() - start:.1f} s, {comm.held_bytes >> 20} MiB held")
    start, wrong, done = time.time(), 0, 0
    order = [*range(len(pool)), *(rng.randrange(len(pool)) for _ in range(options.trials))]
    counts = torch.zeros(len(pool), dtype=torch.int64, device=comm.device)
    for number, at in enumerate(order):
        trial(comm, pool[at], options.seed * 1_000_000 + number, counts[at])
        done += 1
        if number % 200 == 199:
            torch.cuda.synchronize()
            if comm.lost():
                print("LOST", comm.rank, comm.lost(), comm._host.tolist(), flush=True)
                break
            late = torch.tensor(float(time.time() - begun > options.until))
            dist.broadcast(late, 0)
            if late:
                break
    torch.cuda.synchronize()
    for at in torch.nonzero(counts).flatten().tolist():
        wrong += int(counts[at])
        case = pool[at].loaded
        print(f"WRONG rank {comm.rank}: {case.describe()} {case.dtype} {case.reduce} {case.count}", flush=True)
    dist.barrier()
    say(f"{done} collectives, {wrong} wrong on rank 0, {time.time() - start:.1f} s, lost: {comm.lost()}")
    dist.barrier()
    os._exit(1 if wrong or comm.lost() else 0)


if __name__ == "__main__":
    main()
