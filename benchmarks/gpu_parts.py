# SPDX-License-Identifier: Apache-2.0
"""What benchmarks/gpu.py measures beside collectives: copies, the grid of large calls, the cost of steps."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from stretto.algorithms import algorithm
from stretto.doctor.gpu_timing import time_graph
from stretto.runtime.gpu import GpuCommunicator
from stretto.runtime.gpu.compile import GpuKernel, compile_cubin, nvrtc

LARGE_BYTES = 256 << 20
DEFAULT_BLOCKS = 24
SMALL_SLOTS = 16 << 20
COPY = """
typedef unsigned long long u64;
struct Params { const uint4* from; uint4* to; u64 vectors; };
extern "C" __global__ void __launch_bounds__(512, 1) stretto_run(const __grid_constant__ Params P) {
  const u64 per = (P.vectors / gridDim.x + 256) / 256 * 256, low = per * blockIdx.x;  // whole 4 KiB
  const u64 high = low + per < P.vectors ? low + per : P.vectors;
  for (u64 i = low + threadIdx.x; i < high; i += 8 * 512) {
    uint4 v[8];
#pragma unroll
    for (int u = 0; u < 8; u++) if (i + u * 512 < high) v[u] = P.from[i + u * 512];
#pragma unroll
    for (int u = 0; u < 8; u++) if (i + u * 512 < high) P.to[i + u * 512] = v[u];
  }
}
"""


class CopyParams(ctypes.Structure):
    """The argument of the kernel above."""

    _fields_ = [("source", ctypes.c_uint64), ("target", ctypes.c_uint64), ("vectors", ctypes.c_uint64)]


def copy_kernel() -> GpuKernel:
    """A kernel that copies, eight vectors of every thread at a time."""
    major, minor = torch.cuda.get_device_capability()
    return GpuKernel(compile_cubin(nvrtc(), COPY, [f"--gpu-architecture=sm_{major}{minor}", "--std=c++17"]))


def copier(kernel: GpuKernel, source: torch.Tensor, target: torch.Tensor, blocks: int) -> Callable[[], None]:
    """Copies with so many blocks."""
    params: Any = CopyParams(source=source.data_ptr(), target=target.data_ptr(), vectors=source.nbytes // 16)

    def run() -> None:
        kernel.launch(params, blocks=blocks, threads=512, stream=torch.cuda.current_stream().cuda_stream)

    return run


def time_large(group: Any, device: torch.device, meet: Callable[[], None]) -> list[dict[str, Any]]:
    """An all-reduce of 256 MiB in place beside copies of as many bytes: with all SMs, and with the default grid."""
    world = group.size()
    most = torch.cuda.get_device_properties(device).multi_processor_count // world
    comm = GpuCommunicator(group, device=device, max_blocks=most, slot_bytes=SMALL_SLOTS, limit_s=20)
    memory = comm.empty(LARGE_BYTES // 4, torch.float32)
    memory.zero_()
    other = torch.empty_like(memory)
    kernel = copy_kernel()
    rows = []
    for blocks in sorted({most, min(most, DEFAULT_BLOCKS)}, reverse=True):
        program = algorithm("direct", "all_reduce", world, in_place=True)
        loaded = comm.load(program, dtype="float32", nbytes=LARGE_BYTES, symmetric=True, max_blocks=blocks)
        ours = time_graph(partial(comm.launch, loaded, memory, memory), meet, calls=4, rounds=5)
        copied = time_graph(copier(kernel, memory, other, blocks), meet, calls=4, rounds=5)
        rows.append({"blocks": blocks, "ours_us": ours.median_us, "copy_us": copied.median_us})
    everywhere = time_graph(copier(kernel, memory, other, 8 * most), meet, calls=4, rounds=5)
    plain = time_graph(lambda: other.copy_(memory), meet, calls=4, rounds=5)
    meet()
    return [{**row, "all_sms_us": min(everywhere.median_us, plain.median_us)} for row in rows]


def time_steps(comm: GpuCommunicator, device: torch.device, meet: Callable[[], None]) -> dict[str, float]:
    """What a step costs by itself: of tiny programs with many and few of them.

    A hop is a wait for another rank, a step and a signal. A piece is one more item of a step, with its four words.
    """
    world = comm.size

    def us(name: str, kind: str, **options: Any) -> tuple[float, int]:
        chunks = options.pop("chunks", 1)
        program = algorithm(name, kind, world, chunks=chunks)
        nbytes = 16 * world * world * chunks
        loaded = comm.load(program, dtype="float32", nbytes=nbytes, max_blocks=1, **options)
        given, made = (
            torch.zeros(count, device=device)
            for count in (loaded.encoded.inputs[comm.rank], loaded.encoded.outputs[comm.rank])
        )
        return time_graph(partial(comm.launch, loaded, given, made), meet, calls=50, rounds=5).median_us, max(
            len(stream) for stream in loaded.fused.steps
        )

    ring, few = us("ring", "all_reduce", protocol="simple"), us("direct", "all_reduce", protocol="simple")
    packets = us("ring", "all_reduce", protocol="ll")
    one, many = (us("direct", "all_gather", protocol="simple", chunks=chunks)[0] for chunks in (1, 8))
    found = {"us per piece": (many - one) / (7 * world), "us per hop in packets": packets[0] / packets[1]}
    if ring[1] > few[1]:
        found["us per hop with signals"] = (ring[0] - few[0]) / (ring[1] - few[1])
    return found
