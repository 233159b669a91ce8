# SPDX-License-Identifier: Apache-2.0
"""Everything of PyTorch, and of Python beside it, that Stretto replaces in a running job; nothing else in `src` does.

Each patch says which attribute, why, and in which versions of PyTorch it is there; `apply` puts a replacement in its
place and returns what takes it out again. Kernels of operators and settings of the interpreter that are changed for a
while have a function each, which returns the same. The option of `torch.compile` that PyTorch offers for an estimate of
costs is set in `inductor.py`, at the caller's wish. Loads no torch until a patch is applied.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any

Undo = Callable[[], object]
Wrap = Callable[[Any], Any]
"""Makes the replacement, given the original."""


@dataclass(frozen=True, kw_only=True)
class Patch:
    """An attribute that is replaced, under every name by which PyTorch calls it.

    `owners` are modules, or classes as ``module:class``; `first` and `last` are the versions, both included, that have
    the attribute.
    """

    owners: tuple[str, ...]
    name: str
    why: str
    first: tuple[int, int] = (2, 8)
    last: tuple[int, int] = (2, 15)

    def found(self) -> list[Any]:
        """The modules and classes that have the attribute."""
        found = []
        for owner in self.owners:
            module, _, inside = owner.partition(":")
            found.append(getattr(import_module(module), inside) if inside else import_module(module))
        return found


INIT_PROCESS_GROUP = Patch(
    owners=("torch.distributed.distributed_c10d",),
    name="init_process_group",
    why="`stretto run` puts our backend in the place of gloo, and begins to count iterations",
)
DESTROY_PROCESS_GROUP = Patch(
    owners=("torch.distributed.distributed_c10d",),
    name="destroy_process_group",
    why="`stretto run` leaves nothing under way, and tells its controller, before the job's groups go",
)
DDP_FORWARD = Patch(
    owners=("torch.nn.parallel:DistributedDataParallel",),
    name="forward",
    why="`stretto run` counts iterations of scripts without an optimizer of PyTorch's by calls of their model",
)
DDP_INIT = Patch(
    owners=("torch.nn.parallel:DistributedDataParallel",),
    name="__init__",
    why="`stretto run` with STRETTO_BUCKET_MB gives models that ask for no size the buckets that a plan was made for",
)
RUN_BACKWARD = Patch(
    owners=("torch.autograd", "torch.autograd.graph"),
    name="_engine_run_backward",
    why="a recording knows when the application is in a backward pass; PyTorch has no hook around one",
)
FUTURE_WAIT = Patch(
    owners=("torch._C:Future",),
    name="wait",
    why="a recording sees when the application waits for a call by its future",
)
FUTURE_THEN = Patch(
    owners=("torch._C:Future",),
    name="then",
    why="a future made from another one stands for the same call",
)
BATCH_P2P = Patch(
    owners=("torch.distributed.pipelining.schedules",),
    name="_batch_p2p",
    why="a pipeline in which nothing overlaps waits for every transfer where it is issued",
)
COMPILE = Patch(
    owners=("torch",),
    name="compile",
    why="`stretto run` tells Inductor what collectives cost once a job compiles, and loads it for no other job",
)
DDP_PARTS = Patch(
    owners=("torch._dynamo.backends.distributed:SubmodCompiler",),
    name="compile_submod",
    why="a model under DDP is compiled in parts, and a guard of one part that dies late takes the flag of the next",
)
EVENT_RECORD = Patch(
    owners=("torch.cuda.streams:Event",),
    name="record",
    why="a recording on a GPU knows what streams that the application uses beside its own stand behind",
)
EVENT_WAIT = Patch(
    owners=("torch.cuda.streams:Event",),
    name="wait",
    why="a recording on a GPU sees when one of the application's streams waits for another",
)
DDP_REDUCER = Patch(
    owners=("torch.distributed",),
    name="Reducer",
    why="DDP's buckets lie in symmetric memory with STRETTO_GPU_POOL=on; DDP itself asks only backends in C++",
)
FSDP_ALL_GATHER = Patch(
    owners=("torch.distributed.fsdp._fully_shard._fsdp_collectives:DefaultAllGather",),
    name="__call__",
    why="under `stretto run` with STRETTO_EARLY_GATHERS=on a plan sees FSDP2's all-gathers before they are waited for",
    first=(2, 9),
)
PATCHES = (
    INIT_PROCESS_GROUP, DESTROY_PROCESS_GROUP, DDP_FORWARD, DDP_INIT, RUN_BACKWARD, FUTURE_WAIT, FUTURE_THEN, BATCH_P2P,
    COMPILE, DDP_PARTS, EVENT_RECORD, EVENT_WAIT, DDP_REDUCER, FSDP_ALL_GATHER,
)  # fmt: skip


def apply(patch: Patch, wrap: Wrap) -> Undo:
    """Replace an attribute for every owner by what `wrap` makes of the first owner's; the result puts it back."""
    owners = patch.found()
    before = [getattr(owner, patch.name) for owner in owners]
    new = wrap(before[0])
    for owner in owners:
        setattr(owner, patch.name, new)

    def undo() -> None:
        for owner, old in zip(owners, before, strict=True):
            setattr(owner, patch.name, old)

    return undo


@contextmanager
def applied(patch: Patch, wrap: Wrap) -> Iterator[None]:
    """`apply` for a block."""
    undo = apply(patch, wrap)
    try:
        yield
    finally:
        undo()


def apply_kernels(kernels: Mapping[str, Callable[..., Any]]) -> Undo:
    """Put kernels of ours in front of operators of `torch.ops.c10d`, for all devices.

    A recording sees so every call that any code submits, also from C++, to backends that are not ours.
    """
    from torch.library import Library

    library: Any = Library("c10d", "IMPL")  # type: ignore[no-untyped-call]
    for name, kernel in kernels.items():
        library.impl(name, kernel, "BackendSelect")
    undo: Undo = library._destroy
    return undo


def ignore_warning(message: str) -> Undo:
    """Do not show a warning that is about something of ours: global hooks that a compiled module may call twice."""
    filters: Any = warnings.filters
    warnings.filterwarnings("ignore", message)
    mine = filters[0]
    return lambda: filters.remove(mine) if mine in filters else None


def set_switch_interval(seconds: float) -> Undo:
    """Let threads of Python take turns more often: a library's thread needs a turn to say that a call has ended."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(seconds)
    return lambda: sys.setswitchinterval(before)
