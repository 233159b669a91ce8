# SPDX-License-Identifier: Apache-2.0
"""The load of links over time: slots add up to what each link was busy, and no link carries more than it can."""

from __future__ import annotations

import numpy as np
import pytest

from stretto import MB, Cluster, algorithm, simulate
from stretto.errors import InvalidInput


@pytest.mark.parametrize("contention", ["fifo", "fair"])
@pytest.mark.parametrize("alpha", ["pipelined", "blocking"])
@pytest.mark.parametrize(
    ("preset", "name"), [("dgx2:2", "halving_doubling"), ("ndv2:2", "ring"), ("torus:4x4", "direct")]
)
def test_slots_add_up_to_the_time_that_links_were_busy(preset: str, name: str, alpha: str, contention: str) -> None:
    cluster = Cluster.load(preset)
    program = algorithm(name, "all_gather", 16)
    plain = simulate(program, cluster, nbytes=3 * MB, contention=contention, alpha=alpha)
    timeline = simulate(program, cluster, nbytes=3 * MB, contention=contention, alpha=alpha, load_slots=37)
    assert timeline.total_us == plain.total_us and plain.link_load.size == 0
    assert timeline.link_load.shape == (cluster.num_links, 37)
    busy = timeline.link_load.sum(axis=1) * timeline.total_us / 37
    np.testing.assert_allclose(busy, timeline.link_busy_us, rtol=1e-9, atol=1e-9 * timeline.total_us)
    assert timeline.link_load.min() >= 0 and timeline.link_load.max() <= 1 + 1e-9


def test_a_link_is_busy_when_its_transfer_is() -> None:
    ring = Cluster.preset("ring", nodes=4, gb_per_s=10.0, alpha_us=0.0)
    timeline = simulate(algorithm("chain", "broadcast", 4, chunks=1), ring, nbytes=MB, load_slots=6)
    used = timeline.link_load[timeline.link_bytes > 0]
    assert sorted(row.tolist() for row in used.round(9)) == sorted(
        [[1.0 if at // 2 == hop else 0.0 for at in range(6)] for hop in range(3)]
    ), "three hops, one after the other"


def test_runtimes_have_it_too_and_too_many_slots_are_refused() -> None:
    cluster = Cluster.load("dgx_h200")
    program = algorithm("direct", "all_gather", 8)
    timeline = simulate(program, cluster, nbytes=MB, runtime="mscclpp:h200", load_slots=10)
    busy = timeline.link_load.sum(axis=1) * timeline.total_us / 10
    assert timeline.link_load.shape == (cluster.num_links, 10)
    assert busy.sum() == pytest.approx(timeline.link_busy_us.sum(), rel=0.2)
    with pytest.raises(InvalidInput, match="load_slots: must be 0"):
        simulate(program, cluster, nbytes=MB, load_slots=1 << 40)
    with pytest.raises(InvalidInput, match="load_slots: must be 0"):
        simulate(program, cluster, nbytes=MB, load_slots=-1)
