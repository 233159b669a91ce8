# SPDX-License-Identifier: Apache-2.0
"""Symmetric programs: one rank stands for all, and must agree with the whole."""

from __future__ import annotations

import dataclasses
from math import prod
from typing import Any

import numpy as np
import pytest

from stretto import Cluster, Dimension, InvalidInput, VerificationError, algorithm, simulate
from stretto.algorithms.hierarchical import hierarchical
from stretto.algorithms.symmetric import symmetric_algorithm, symmetric_hierarchical
from stretto.cluster.grid import regular
from stretto.cluster.symmetry import link_orbits
from stretto.programs.symmetry import SymmetricProgram
from stretto.programs.symmetry_views import translate

CASES = [
    ((4, 3), ("ring", "switch"), "ring"),
    ((4, 2, 4), ("ring", "fully_connected", "switch"), ("ring", "direct", "halving_doubling")),
    ((8, 4), ("switch", "switch"), "halving_doubling"),
    ((3, 5), ("ring", "ring"), "direct"),
]


def network(dims: tuple[int, ...], kinds: tuple[str, ...]) -> Cluster:
    return regular(
        "net",
        [
            Dimension(kind=kind, size=size, gb_per_s=10.0 * (at + 1), alpha_us=0.5 + at)
            for at, (kind, size) in enumerate(zip(kinds, dims, strict=True))
        ],
    )


@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "all_reduce"])
@pytest.mark.parametrize(("dims", "kinds", "inside"), CASES)
def test_one_rank_agrees_with_all_of_them(
    dims: tuple[int, ...], kinds: tuple[str, ...], inside: str, kind: str, chunks: int
) -> None:
    cluster = network(dims, kinds)
    one = symmetric_hierarchical(kind, dims, chunks=chunks, inside=inside)
    whole = one.expand()
    other = hierarchical(kind, prod(dims), dims=dims, chunks=chunks, inside=inside)
    assert one.verify().fifo_depth >= whole.verify().fifo_depth >= 1
    assert whole.num_transfers == one.num_transfers == other.num_transfers
    for alpha in ("pipelined", "blocking"):
        for contention in ("fifo", "fair"):
            times = [
                simulate(p, cluster, nbytes=1e6, alpha=alpha, contention=contention).total_us
                for p in (one, whole, other)
            ]
            assert times == pytest.approx([times[0]] * 3, rel=1e-9)


def test_every_span_of_the_representative_is_the_spans_of_its_orbit() -> None:
    one = symmetric_hierarchical("all_reduce", (4, 3), chunks=2)
    cluster = network((4, 3), ("ring", "switch"))
    short, full = simulate(one, cluster, nbytes=1e5), simulate(one.expand(), cluster, nbytes=1e5)
    ranks = one.num_ranks
    assert np.repeat(short.end_us, ranks).tolist() == pytest.approx(full.end_us.tolist())
    assert short.link_bytes.sum() * ranks == pytest.approx(full.link_bytes.sum())


def ring(**changes: object) -> SymmetricProgram:
    columns: dict[str, Any] = {"dst": [1, 1, 1], "home": [0, 3, 2], "piece": [0, 0, 0], "step": [0, 1, 2]}
    columns |= {"sizes": (4,), "pieces": 1} | changes
    return SymmetricProgram.from_steps("ring", "all_gather", **columns)


def test_wrong_symmetric_programs_are_refused() -> None:
    assert ring().verify().fifo_depth == 1
    with pytest.raises(VerificationError, match="before it arrives"):
        ring(home=[0, 2, 3]).verify()
    with pytest.raises(VerificationError, match="ends without chunk 0"):
        ring(dst=[1, 1], home=[0, 3], piece=[0, 0], step=[0, 1]).verify()


def test_symmetric_and_expanded_verdicts_agree_on_random_rings() -> None:
    rng = np.random.default_rng(5)
    agreed = {True: 0, False: 0}
    for _ in range(200):
        sizes = [(4,), (2, 2), (3,), (2, 3)][rng.integers(4)]
        ranks, count = prod(sizes), int(rng.integers(1, 6))
        kind = ["all_gather", "reduce_scatter", "all_reduce"][rng.integers(3)]
        p = SymmetricProgram.from_steps(
            "random", kind, sizes, pieces=1, dst=rng.integers(1, ranks, count), home=rng.integers(0, ranks, count),
            piece=np.zeros(count, int), step=np.arange(count), reduce=rng.random(count) < 0.5,
        )  # fmt: skip
        verdicts = []
        for q in (p, p.expand()):
            try:
                q.verify()
                verdicts.append(True)
            except VerificationError:
                verdicts.append(False)
        assert verdicts[0] <= verdicts[1]  # what the representative proves holds for the whole
        agreed[verdicts[0] == verdicts[1]] += 1
    assert agreed[False] == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"home": [0, 3, 9]}, "home must be 0..3 and piece 0..0"),
        ({"dst": [1, 0, 1]}, "dst: must be 0..3, and another rank than the sender"),
        ({"chunk_ptr": [0, 0, 2, 3]}, "each must move at least one chunk"),
        ({"chunk_ptr": [0, 2, 3], "dst": [1, 1], "home": [0, 0, 3], "step": [0, 1]}, "moves a chunk twice"),
        ({"step": [0, 1]}, "step: must be a list of 3 numbers"),
        ({"lane": -1}, "lane must be >= 0"),
    ],
)
def test_columns_that_do_not_fit_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        ring(**changes)


@pytest.mark.parametrize(
    ("field", "value"),
    [("after", 99), ("gate", -1), ("after_ptr", 7), ("home", -1), ("sizes", (0,)), ("pieces", 1 << 40)],
)
def test_a_hand_made_symmetric_program_is_checked_before_it_is_used(field: str, value: Any) -> None:
    one = symmetric_hierarchical("all_reduce", (2, 2), inside="halving_doubling")
    old = getattr(one, field)
    new = np.where(np.arange(len(old)) == 0, value, old).astype(old.dtype) if isinstance(old, np.ndarray) else value
    changes: dict[str, Any] = {field: new}
    with pytest.raises(InvalidInput):
        dataclasses.replace(one, **changes)


def test_one_rank_alone_has_nothing_to_send() -> None:
    alone = ring(sizes=(1,), dst=[], home=[], piece=[], step=[])
    assert alone.verify().fifo_depth == alone.expand().verify().fifo_depth == 1


def test_translation_is_a_group() -> None:
    sizes = (3, 4, 2)
    ranks = np.arange(prod(sizes))
    back = translate(translate(ranks, 17, sizes), 17, sizes, sign=-1)
    assert back.tolist() == ranks.tolist()
    assert sorted(translate(ranks, 5, sizes).tolist()) == ranks.tolist()


def test_coordinates_of_two_move_as_all_others_do() -> None:
    sizes, ranks, by = (2, 1, 2, 2), np.arange(8)[:, None], np.arange(8)
    moved = translate(ranks, by, sizes)
    assert moved.tolist() == translate(ranks, by, sizes, sign=-1).tolist()
    coordinates = [[(r >> k & 1) ^ (b >> k & 1) for k in range(3)] for r in range(8) for b in range(8)]
    assert moved.ravel().tolist() == [a + 2 * b + 4 * c for a, b, c in coordinates]


def test_a_cluster_without_the_symmetry_is_refused() -> None:
    with pytest.raises(InvalidInput, match="does not look the same from every device"):
        link_orbits(Cluster.preset("mesh", nodes=9), (9,))
    p3 = Cluster.preset("p3_8xlarge", nodes=2)
    assert link_orbits(p3, (4, 2)).shared.any()
    with pytest.raises(InvalidInput, match="is shared by several ranks"):
        simulate(symmetric_hierarchical("all_gather", (4, 2)), p3, nbytes=1e6)
    with pytest.raises(InvalidInput, match="do not fill the 4 devices"):
        link_orbits(Cluster.preset("ring", nodes=4), (5,))


def test_equal_routes_are_refused_because_ranks_may_differ() -> None:
    torus = Cluster.preset("torus", dims=(4, 4))
    far = symmetric_hierarchical("all_reduce", (4, 4), inside="direct")
    with pytest.raises(InvalidInput, match="several equal routes from npu0 to npu8"):
        simulate(far, torus, nbytes=1e6)


def test_orbits_of_a_torus_are_its_directions() -> None:
    found = link_orbits(Cluster.preset("torus", dims=(4, 4)), (4, 4))
    assert len(found.first) == 4 and np.bincount(found.orbit).tolist() == [16] * 4


@pytest.mark.parametrize(("name", "source"), [
    ("ring", "ring:8"), ("ring", "6"), ("direct", "fully_connected:5"), ("direct", "6"),
    ("halving_doubling", "8"), ("hierarchical", "torus:4x3"), ("hierarchical", "8"),
])  # fmt: skip
@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "all_reduce"])
def test_symmetric_algorithms_take_the_time_of_the_librarys(name: str, source: str, kind: str) -> None:
    cluster = network((int(source),), ("switch",)) if source.isdecimal() else Cluster.load(source)
    for chunks in (1, 3) if name == "hierarchical" else (1,):
        one = symmetric_algorithm(name, kind, cluster, chunks=chunks)
        plain = algorithm(name, kind, cluster.num_devices, cluster=cluster, chunks=chunks)
        assert one.num_transfers == plain.num_transfers
        times = [simulate(p, cluster, nbytes=1e6).total_us for p in (one, one.expand(), plain)]
        assert times == pytest.approx([times[0]] * 3, rel=1e-9)


def test_algorithms_without_a_symmetric_form_are_refused() -> None:
    with pytest.raises(InvalidInput, match="unknown symmetric algorithm 'bruck'"):
        symmetric_algorithm("bruck", "all_gather", Cluster.load("ring:4"))
    with pytest.raises(InvalidInput, match="has a symmetric form for 1 chunk, not 2"):
        symmetric_algorithm("ring", "all_gather", Cluster.load("ring:4"), chunks=2)
    with pytest.raises(InvalidInput, match="has several dimensions"):
        symmetric_algorithm("ring", "all_gather", Cluster.load("torus:4x4"))
    with pytest.raises(InvalidInput, match="has no regular dimensions"):
        symmetric_algorithm("ring", "all_gather", Cluster.load("dgx_h100:2"))
