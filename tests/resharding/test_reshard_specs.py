# SPDX-License-Identifier: Apache-2.0
"""Specs, meshes and tiles: every element once, DTensor's rule where sizes do not divide, clear refusals."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto import Cluster, InvalidInput
from stretto.resharding import Layout, Mesh, Side, Spec, Tensor, decompose, place


def layout(text: str, *shape: int, rounding: str = "chunk") -> Layout:
    mesh = Mesh(shape=shape, devices=tuple(range(int(np.prod(shape)))))
    return Layout(mesh=mesh, spec=Spec.parse(text), rounding=rounding)


def rows(side: Layout, shape: tuple[int, ...], dim: int = 0) -> list[list[int]]:
    return [box[dim] for box in side.tiles(shape).tolist()]


@pytest.mark.parametrize("text", ["S0RR", "RS01R", "RS1S0", "S10R", "R", "S0RP1", "RRP01"])
def test_specs_are_written_as_they_are_read(text: str) -> None:
    assert str(Spec.parse(text)) == text


def test_axes_cut_in_the_order_in_which_they_are_written() -> None:
    assert rows(layout("S01", 2, 2), (8,)) == [[0, 2], [2, 4], [4, 6], [6, 8]]
    assert rows(layout("S10", 2, 2), (8,)) == [[0, 2], [4, 6], [2, 4], [6, 8]]


def test_uneven_tiles_follow_torch_chunk_and_may_be_empty() -> None:
    assert rows(layout("S0", 4), (10,)) == [[0, 3], [3, 6], [6, 9], [9, 10]]
    assert rows(layout("S0", 4), (5,)) == [[0, 2], [2, 4], [4, 5], [5, 5]]
    assert rows(layout("S0", 4, rounding="balanced"), (10,)) == [[0, 3], [3, 6], [6, 8], [8, 10]]


def test_tiles_are_what_nested_torch_chunks_leave() -> None:
    import torch

    for mesh, size in (((3, 2), 10), ((2, 3), 7), ((4, 4), 5), ((2, 2, 2), 9)):
        axes = "".join(str(axis) for axis in range(len(mesh)))
        for place_, (low, high) in zip(np.ndindex(*mesh), rows(layout(f"S{axes}", *mesh), (size,)), strict=True):
            left = torch.arange(size)
            for axis, at in enumerate(place_):
                pieces = torch.chunk(left, mesh[axis])
                left = pieces[at] if at < len(pieces) and len(left) else left[:0]
            assert left.tolist() == list(range(low, high))


def test_placements_of_dtensor_are_read_as_objects_and_as_texts() -> None:
    class Shard:
        def __repr__(self) -> str:
            return "Shard(dim=1)"

    assert str(Spec.from_placements([Shard(), "Replicate()", "Partial(sum)"], 2)) == "RS0P2"
    assert Spec.from_placements(["P(avg)", "S(-1)"], 3).reduction == "avg"
    assert str(Spec.from_placements(["Shard(0)", "Shard(0)"], 1)) == "S01"


@settings(max_examples=60, deadline=None)
@given(
    mesh=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    shape=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    data=st.data(),
    rounding=st.sampled_from(["chunk", "balanced"]),
)
def test_tiles_cover_the_tensor_once_for_each_copy(
    mesh: list[int], shape: list[int], data: st.DataObject, rounding: str
) -> None:
    axes: list[list[int]] = [[] for _ in shape]
    copies = 1
    for axis in data.draw(st.permutations(range(len(mesh)))):
        dim = data.draw(st.integers(-1, len(shape) - 1))
        if dim >= 0:
            axes[dim].append(axis)
        else:
            copies *= mesh[axis]
    side = Layout(
        mesh=Mesh(shape=tuple(mesh), devices=tuple(range(int(np.prod(mesh))))),
        spec=Spec(axes=tuple(tuple(a) for a in axes)),
        rounding=rounding,
    )
    seen = np.zeros(shape, np.int64)
    for box in side.tiles(shape):
        seen[tuple(slice(*ends) for ends in box.tolist())] += 1
    assert np.all(seen == copies)


def test_unit_tasks_tile_what_every_receiver_wants() -> None:
    src, dst = place("(2,4) S0RR", "(3,4) S0RR", Cluster.preset("p3_8xlarge", nodes=5))
    tensor = Tensor(shape=(10, 4, 2), dtype_bytes=2, src=src, dst=dst)
    tasks = decompose([tensor])
    assert [task.box[0] for task in tasks] == [(0, 4), (4, 5), (5, 8), (8, 10)]
    assert sum(task.nbytes for task in tasks) == tensor.nbytes
    assert tasks[1].holders == ((0, 1, 2, 3),) and tasks[1].receivers == (12, 13, 14, 15)


def test_the_papers_case_4_has_64_unit_tasks_and_case_8_has_one() -> None:
    cluster = Cluster.preset("p3_8xlarge", nodes=5)
    for sides, count in ((("(2,4) RS01R", "(2,4) S01RR"), 64), (("(2,3) RRR", "(3,2) RRR"), 1)):
        src, dst = place(*sides, cluster)
        assert len(decompose([Tensor(shape=(1024, 1024, 512), dtype_bytes=4, src=src, dst=dst)])) == count


def test_what_is_in_place_is_not_missing() -> None:
    src, dst = place("(2,2)@0-3 S0R", "(2,2)@0-3 S01R", Cluster.preset("p3_8xlarge", nodes=1))
    assert all(not task.missing for task in decompose([Tensor(shape=(8, 2), dtype_bytes=4, src=src, dst=dst)]))


def test_meshes_take_one_host_per_row_and_dense_devices_where_hosts_are_few() -> None:
    cluster = Cluster.preset("p3_8xlarge", nodes=2)
    assert [side.mesh.devices for side in place("(2,2) RR", "(2,2) RR", cluster)] == [(0, 1, 4, 5), (2, 3, 6, 7)]
    assert Side.parse("(2,2)@0-1,6,4 S0R").devices == (0, 1, 6, 4)


@pytest.mark.parametrize(
    ("src", "dst", "shape", "message"),
    [
        ("(2,4) S0RX", "(2,4) RRR", (8, 8, 8), "src: spec 'S0RX': expected one of S"),
        ("2,4 S0RR", "(2,4) RRR", (8, 8, 8), "expected a mesh and a spec such as"),
        ("(2,4) S2RR", "(2,4) RRR", (8, 8, 8), "mesh axis 2 does not exist; mesh (2,4) has axes 0..1"),
        ("(2,4) S0S0R", "(2,4) RRR", (8, 8, 8), "names a mesh axis twice"),
        ("(2,4) S0R", "(2,4) RR", (8, 8, 8), "src: S0R: is for 2 dimensions, the tensor has 3"),
        ("(2,4) RRR", "(3,4) RRR", (8, 8, 8), "dst: mesh (3,4): needs 12 devices"),
        ("(2,4)@0-6 RRR", "(2,4) RRR", (8, 8, 8), "needs 8 devices, not 7"),
        ("(1,2)@0,0 RRR", "(2,4) RRR", (8, 8, 8), "devices must be distinct"),
        ("(1,2)@98-99 RRR", "(2,4) RRR", (8, 8, 8), "src: device 98 does not exist"),
        ("(0,4) RRR", "(2,4) RRR", (8, 8, 8), "must be 1..16 sizes >= 1"),
        ("(2,4) RRR", "(2,4) RRRP0", (8, 8, 8), "nothing can be brought into a pending sum"),
        ("(2,4) RRR", "(2,4) RRR", (8, 0, 8), "must be 1..16 sizes >= 1"),
        ("(999999,999999) RRR", "(2,4) RRR", (8, 8, 8), "is too many; at most 65536"),
    ],
)
def test_wrong_specs_and_meshes_are_refused_in_one_line(
    src: str, dst: str, shape: tuple[int, ...], message: str
) -> None:
    with pytest.raises(InvalidInput) as caught:
        sides = place(src, dst, Cluster.preset("p3_8xlarge", nodes=4))
        decompose([Tensor(shape=shape, dtype_bytes=4, src=sides[0], dst=sides[1])])
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("placement", ["Shard(7)", "_StridedShard(dim=0, sf=2)", "Partial(median)"])
def test_unknown_placements_are_refused(placement: str) -> None:
    with pytest.raises(InvalidInput):
        Spec.from_placements([placement], 2)


@pytest.mark.parametrize("reduction", ["sum", "avg", "max"])
def test_the_reduction_of_a_pending_placement_is_asked_for_not_read_from_its_text(reduction: str) -> None:
    class Partial:
        """As in PyTorch 2.8."""

        reduce_op = reduction

        def __str__(self) -> str:
            return "P"

    class NormPartial(Partial):
        """Reduces in a way of its own."""

    assert Spec.from_placements([Partial()], 1).reduction == reduction
    with pytest.raises(InvalidInput, match="unknown placement 'NormPartial'"):
        Spec.from_placements([NormPartial()], 1)
