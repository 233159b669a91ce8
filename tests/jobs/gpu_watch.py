# SPDX-License-Identifier: Apache-2.0
"""The comm-ops of a step on GPUs, as a workload: `stretto.torch.capture` times the host and refuses these."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from stretto.runtime.torch_backend.watch import RECORDING, SubmittedCall
from stretto.workload import Dep, Op, Workload


class Seen:
    """What was submitted."""

    def __init__(self) -> None:
        self.calls: list[SubmittedCall] = []

    def seen(self, what: SubmittedCall, run: Callable[[], Any]) -> Any:
        """A call comes."""
        self.calls.append(what)
        return run()


def watched(step: Callable[[], float]) -> tuple[Workload, float]:
    """One iteration: what it communicates, all of it waited for at the end, and what the step returns."""
    seen = Seen()
    RECORDING.current = seen
    try:
        result = step()
    finally:
        RECORDING.current = None
    names = [f"{call.op}.{number}" for number, call in enumerate(seen.calls)]
    ops = [Op(name="work", duration_us=100.0)]
    given = (Dep(op="work", why="submit"),)
    ops += [
        Op(name=name, kind=call.op, nbytes=float(call.nbytes), root=call.root, after=given)
        for name, call in zip(names, seen.calls, strict=True)
    ]
    ops.append(Op(name="use", duration_us=10.0, after=tuple(Dep(op=name, why="wait") for name in names)))
    return Workload(name="seen", num_ranks=dist.get_world_size(), ops=tuple(ops)), result
