# SPDX-License-Identifier: Apache-2.0
"""Hops inside a sending group are planned just before the hop that they serve, and never after it."""

from __future__ import annotations

import random

import numpy as np

from stretto.resharding.balanced import ChunkHops, just_in_time


def drawn(rng: random.Random) -> tuple[ChunkHops, np.ndarray, np.ndarray]:
    count = rng.randint(1, 30)
    parent = [rng.choice([-1, rng.randrange(j)]) if j else -1 for j in range(count)]
    port = [rng.choice([-1, 0, 1]) for _ in range(count)]
    duration = [rng.uniform(0.1, 2.0) for _ in range(count)]
    start = np.zeros(count)
    for j, p in enumerate(parent):
        start[j] = rng.uniform(0, 3) + (start[p] + duration[p] if p >= 0 else 0)
    same = [0] * count
    hops = ChunkHops(
        src=same, dst=same, chunk=same, reduce=[False] * count, parent=parent, out_port=port, in_port=port,
        duration_us=duration, done=same, rest=same, lane=same, progress=[0.0] * count, step=[0.0] * count,
    )  # fmt: skip
    return hops, start, start + np.array(duration)


def test_drawn_times_stay_feasible_and_only_hops_before_any_port_move() -> None:
    for seed in range(300):
        hops, start, end = drawn(random.Random(seed))
        later, ended = just_in_time(hops, start, end)
        assert (later >= start - 1e-9).all() and np.allclose(ended - later, hops.duration_us)
        for j, parent in enumerate(hops.parent):
            assert parent < 0 or later[j] >= ended[parent] - 1e-9
            before, at = True, j
            while at >= 0:
                before, at = before and hops.out_port[at] < 0, hops.parent[at]
            assert before or later[j] == start[j]
