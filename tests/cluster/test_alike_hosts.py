# SPDX-License-Identifier: Apache-2.0
"""Hosts that are alike: what is found for one group holds for its images, and a host that differs is left out."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from stretto.cluster import Cluster
from stretto.cluster.alike_hosts import HostSymmetry, Renaming
from stretto.planner.algebra.options import problem
from stretto.planner.costs.costs import Motion, SimulatedCosts
from stretto.workload import Dep, Op, Workload

PRESETS = ("hgx2:4", "dgx_h100:4")


class _Unrenamed(SimulatedCosts):
    """The judge: every motif is simulated where it is."""

    def renamed(self, groups: tuple[tuple[int, ...], ...], channels: tuple[str, ...]) -> Renaming:
        return Renaming(groups=groups, host=np.arange(10_000))


def _slower(cluster: Cluster, link: int) -> Cluster:
    rate = cluster.link_gb_per_s.copy()
    rate[link] /= 3
    return replace(cluster, name="one slow link", link_gb_per_s=rate)


def _random_motion(cluster: Cluster, rng: np.random.Generator) -> Motion:
    per_host = cluster.num_devices // 4
    hosts = rng.permutation(4)[: int(rng.integers(1, 5))]
    width = int(rng.integers(1, 3)) if len(hosts) > 1 else 2
    firsts = rng.permutation(per_host // 2)[: int(rng.integers(1, 3))] * 2
    groups = tuple(tuple(int(h * per_host + f + k) for h in hosts for k in range(width)) for f in firsts)
    kind = str(rng.choice(["all_reduce", "all_gather", "all_to_all"]))
    return Motion(kind=kind, groups=groups, channels=cluster.channels)


@pytest.mark.parametrize("preset", PRESETS)
def test_costs_of_images_are_the_costs_where_they_are(preset: str) -> None:
    rng = np.random.default_rng(7)
    whole = Cluster.load(preset)
    for cluster in (whole, _slower(whole, int(rng.integers(whole.num_links)))):
        fast, judge = SimulatedCosts(cluster), _Unrenamed(cluster)
        for _ in range(6):
            motion = _random_motion(cluster, rng)
            for name in fast.algorithms(motion, 1e6)[:3]:
                assert fast.cost(motion, 1e6, name, exact=True) == judge.cost(motion, 1e6, name, exact=True)
                assert fast.at_least_us(motion, 1e6, name) == judge.at_least_us(motion, 1e6, name)
                mine, theirs = fast.link_loads(motion, 1e6, name), judge.link_loads(motion, 1e6, name)
                assert mine.links.tolist() == theirs.links.tolist()
                assert mine.us_per_byte == pytest.approx(theirs.us_per_byte)


def test_a_host_that_differs_is_in_a_class_of_its_own() -> None:
    whole = Cluster.load("dgx_h100:4")
    assert [len(hosts) for hosts in HostSymmetry(whole).classes] == [4]
    rng = np.random.default_rng(3)
    for link in rng.integers(whole.num_links, size=20).tolist():
        cluster = _slower(whole, link)
        classes = HostSymmetry(cluster).classes
        assert sorted(map(len, classes)) == [1, 3]
        ends = {int(cluster.node_host[cluster.link_src[link]]), int(cluster.node_host[cluster.link_dst[link]])}
        assert set(min(classes, key=len).tolist()) == ends - {-1}


def test_links_straight_to_another_host_end_the_symmetry() -> None:
    ring = Cluster.load("torus:4x4")
    found = HostSymmetry(ring).renamed(((4, 5), (8, 9)))
    assert found.groups == ((4, 5), (8, 9))


def test_groups_are_named_host_by_host() -> None:
    hosts = HostSymmetry(Cluster.load("dgx_h100:4"))
    first, second = hosts.renamed(((0, 8), (1, 9))), hosts.renamed(((24, 16), (25, 17)))
    assert first.groups == second.groups
    assert (first.host[:2].tolist(), second.host[:2].tolist()) == ([0, 1], [3, 2])
    # Another position in the host, and two groups on four hosts instead of two, are not images.
    assert hosts.renamed(((24, 17), (25, 16))).groups != first.groups
    assert hosts.renamed(((0, 8), (17, 25))).groups != first.groups


def test_stages_alike_are_costed_once_and_have_the_options_of_their_own() -> None:
    cluster = Cluster.load("dgx_h100:4")
    ops = [
        Op(name=f"ar{s}", kind="all_reduce", nbytes=3e7, groups=tuple((8 * s + k, 8 * s + 8 + k) for k in range(8)))
        for s in (0, 2)
    ]
    update = Op(name="update", duration_us=5.0, after=tuple(Dep(op=op.name) for op in ops))
    step = Workload(name="stages", num_ranks=32, ops=(*ops, update))
    costs = SimulatedCosts(cluster)
    made = problem(step, cluster, costs)
    alone = SimulatedCosts(cluster)
    first = problem(replace(step, ops=(ops[0], replace(update, after=()))), cluster, alone)
    assert costs.simulations == alone.simulations
    judge = problem(step, cluster, _Unrenamed(cluster))
    for op in ops:
        assert made.options[op.name] == judge.options[op.name]
    assert first.options["ar0"] == made.options["ar0"]
