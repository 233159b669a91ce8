# SPDX-License-Identifier: Apache-2.0
"""Programs of generated reshardings on the GPU's kernel, built for the CPU, as weights take them."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from fused_check import check_fused
from gpu_emulation import EmulatedCall, EmulatedGpu
from numpy.typing import NDArray

from stretto.programs.fused import IN, OUT, SLOT, fuse
from stretto.resharding import UnitTask, plan_reshard, plan_tensors
from stretto.resharding.spec import Layout, Mesh, Spec
from stretto.resharding.tasks import Tensor, decompose
from stretto.resharding.tensors.carrier import _gpu_switch
from stretto.resharding.tensors.movers import GpuMover
from stretto.resharding.tensors.rounds import streams_of
from stretto.runtime.gpu.encode import chunk_elements


def drawn(rng: random.Random, ranks: int) -> list[Tensor]:
    """Tensors between two random sides of some ranks, which may overlap."""
    found = []
    for at in range(rng.randint(1, 4)):
        shape = tuple(rng.randint(1, 20) for _ in range(rng.randint(1, 3)))
        sides = []
        for _ in range(2):
            devices = sorted(rng.sample(range(ranks), rng.randint(1, ranks)))
            dim = rng.choice([None, *range(len(shape))])
            axes = tuple((0,) if d == dim else () for d in range(len(shape)))
            sides.append(Layout(mesh=Mesh(shape=(len(devices),), devices=tuple(devices)), spec=Spec(axes=axes)))
        found.append(Tensor(name=f"t{at}", shape=shape, dtype_bytes=rng.choice([1, 2, 4]), src=sides[0], dst=sides[1]))
    return found


def hold_alike(call: EmulatedCall, count: int) -> None:
    """Ranks that hold the same chunk hold the same bytes of it."""
    c = call.fused.collective
    held: dict[int, NDArray[np.uint8]] = {}
    sizes = chunk_elements(c, count, 16)
    for rank, given in enumerate(call.inputs):
        at = 0
        for chunk in c.inputs(rank):
            end = at + int(sizes[chunk])
            given[at:end] = held.setdefault(int(chunk), given[at:end].copy())
            at = end
        call.before[rank][:] = given


@pytest.mark.parametrize("seed", range(12))
def test_generated_reshardings_run_right_on_the_kernel_in_any_order(seed: int) -> None:
    rng = random.Random(seed)
    ranks = rng.randint(2, 6)
    tensors = drawn(rng, ranks)
    tasks = [task for task in decompose(tensors) if task.missing]
    if not tasks:
        return
    streams = streams_of(tasks, rng.choice([None, 4096]), unit=16)
    pseudo: list[UnitTask] = [stream.task() for stream in streams]
    plan = plan_tensors(tensors, _gpu_switch(ranks), helpers=tuple(range(ranks)), tasks=pseudo)
    assert plan.program is not None
    for symmetric in (True, False):
        fused = fuse(plan.program, symmetric=symmetric)
        check_fused(fused)
        # Only outputs are written by others: packed inputs need not be symmetric memory.
        assert not symmetric or (not fused.touched(IN) and not fused.touched(SLOT) and fused.touched(OUT))
        gpu = EmulatedGpu(ranks, block_slots=1 << 14)
        call = gpu.prepare(fused, plan.nbytes, "uint8", "sum", np.random.default_rng(seed), blocks=rng.randint(1, 3))
        assert not symmetric or sum(call.encoded.outputs) == sum(
            stream.nbytes * len(stream.receivers) for stream in streams
        )
        hold_alike(call, plan.nbytes)
        gpu.run([call, call], seed=seed)
        gpu.check(call)


def test_many_receivers_are_served_by_a_chain_and_not_by_their_holder_alone() -> None:
    one = Layout(mesh=Mesh(shape=(1,), devices=(0,)), spec=Spec(axes=((),)))
    rest = Layout(mesh=Mesh(shape=(7,), devices=tuple(range(1, 8))), spec=Spec(axes=((),)))
    plan = plan_reshard(src=one, dst=rest, shape=(1 << 28,), dtype_bytes=1, cluster=_gpu_switch(8))
    assert plan.program is not None
    sent = int((plan.program.src == 0).sum()) / plan.program.num_transfers
    assert sent < 0.3 and plan.ratio < 1.3


def test_a_pending_sum_gives_the_engine_elements_and_not_bytes() -> None:
    ran: list[tuple[torch.dtype, int]] = []
    gpu = SimpleNamespace(run_program=lambda loaded, *given: ran.extend((t.dtype, t.numel()) for t in given))
    carrier: Any = SimpleNamespace(group=SimpleNamespace(gpu=gpu))
    nothing: Any = None
    mover = GpuMover(
        carrier=carrier, plan=nothing, handle=None, dtype=torch.float32, op="sum", loaded=SimpleNamespace(number=0)
    )
    mover.start(torch.zeros(64, dtype=torch.uint8), torch.zeros(32, dtype=torch.uint8)[:0])
    assert ran == [(torch.float32, 16), (torch.float32, 0)]
