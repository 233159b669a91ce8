# SPDX-License-Identifier: Apache-2.0
"""Programs that are drawn, for tests of what is made of programs."""

from __future__ import annotations

import random

from stretto import AllReduce
from stretto.programs import Program


def random_program(seed: int) -> Program:
    """An all-reduce by a random tree for every chunk, in random order of chunks."""
    pick = random.Random(seed)
    ranks, chunks = pick.randint(2, 5), pick.randint(1, 4)
    src, dst, chunk, step, reduce = [], [], [], [], []
    for c in range(chunks):
        order = pick.sample(range(ranks), ranks)
        parent = {order[k]: order[pick.randrange(k)] for k in range(1, ranks)}
        late = pick.randint(0, 3)
        for k in range(ranks - 1, 0, -1):
            child = order[k]
            for up in (True, False):
                src.append(child if up else parent[child])
                dst.append(parent[child] if up else child)
                chunk.append(c)
                step.append(late + (ranks - 1 - k if up else ranks - 1 + k))
                reduce.append(up)
    return Program.from_steps(
        f"random{seed}", AllReduce(ranks, chunks=chunks, in_place=pick.random() < 0.5),
        src=src, dst=dst, chunk=chunk, step=step, reduce=reduce,
    )  # fmt: skip
