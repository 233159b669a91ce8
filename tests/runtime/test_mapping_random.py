# SPDX-License-Identifier: Apache-2.0
"""Random mappings: what each rank makes of its pieces is what NumPy cuts out of whole tensors; wrong ones are
refused.

Pieces are cut out of the sources by the layouts in which `MappedSync` asks for them, after all ranks have compared
these layouts with those of a trainer; that layouts arrive bit for bit is tested elsewhere.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from stretto.errors import InvalidInput
from stretto.resharding.tensors import state
from stretto.resharding.tensors.describe import TensorPart, local_of, placed_tensor
from stretto.resharding.tensors.pieces import assembled, pieces_of
from stretto.weights import WeightMapping

COUNT = int(os.environ.get("STRETTO_TEST_MAPPINGS", "24"))
GRIDS: list[tuple[int, ...]] = [(1,), (2,), (3,), (4,), (2, 2), (2, 3)]
TRAINER = 0
Array = NDArray[np.float32]


@dataclass(kw_only=True)
class Wanted:
    """A tensor of a server: the pieces that it is made of, expert by expert, and how it lies on the mesh."""

    pieces: list[list[Array]]
    ways: list[int | None]
    dtype: torch.dtype
    concat: int | None = None
    stack: bool = False
    padding: int = 0
    scaled: bool = False
    block: int = 1


class Model:
    """A drawn mesh of servers, the trainers' tensors, the rules of a mapping, and what servers want."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.numbers = np.random.default_rng(seed)
        self.grid = rng.choice(GRIDS)
        self.ranks = list(range(10, 10 + math.prod(self.grid)))
        self.full: dict[str, Array] = {"x.inv_freq": np.ones(3, np.float32)}
        self.rules: list[dict[str, Any]] = []
        self.wanted: dict[str, Wanted] = {}
        self.unit = rng.choice([1, 2, 3, 4, 6])
        for number in range(rng.randint(1, 4)):
            self.add(number)
        for number in range(rng.randint(0, 2)):
            shape = [rng.randint(1, 9) for _ in range(rng.randint(0, 2))]
            whole = self.source(f"same{number}", shape)
            self.wanted[f"same{number}"] = Wanted(
                pieces=[[whole]], ways=self.ways(len(shape)), dtype=rng.choice([torch.float32, torch.bfloat16])
            )

    def source(self, name: str, shape: Sequence[int]) -> Array:
        self.full[name] = np.asarray(self.numbers.standard_normal(shape), np.float32)
        return self.full[name]

    def ways(self, dims: int) -> list[int | None]:
        return [self.rng.choice([None, *range(dims)]) for _ in self.grid]

    def add(self, number: int) -> None:
        """A tensor with a rule of its own, in a layer or in none, and perhaps a tied one."""
        rng, layer = self.rng, self.rng.choice(["", f"l.{number}."])
        fused, stack, turned = (rng.random() < 0.4 for _ in range(3))
        rows = not (fused or stack or turned) and rng.random() < 0.6
        dims = max(rng.choice([1, 2, 2, 2, 3]), 2 * turned)
        base = [self.unit * rng.choice([1, 2, 3, 4]) for _ in range(dims)]
        rule: dict[str, Any] = {"to": f"{layer}t{number}"}
        sizes, concat = [1], rng.randrange(dims)
        if fused:
            sizes = [rng.choice([1, 2, 3]) for _ in range(rng.choice([2, 3]))]
            rule |= {"concat": concat, "sizes": sizes if stack else [size * base[concat] for size in sizes]}
        stem = f"{layer}s{number}."
        names = [f"{stem}{{e}}.p{at}" if stack else f"{stem}p{at}" for at in range(len(sizes))]
        rule |= {"from": names if fused else names[0], "stack": stack, "transpose": turned}
        pieces = []
        for expert in range(rng.choice([1, 2, 3, 4, 6]) if stack else 1):
            row = []
            for name, size in zip(names, sizes, strict=True):
                shape = [n * size if fused and dim == concat else n for dim, n in enumerate(base)]
                shape = [*shape[:-2], shape[-1], shape[-2]] if turned else shape
                made = self.source(name.replace("{e}", str(expert)), shape)
                row.append(made.swapaxes(-1, -2) if turned else made)
            pieces.append(row)
        scaled = dims >= 2 and rng.random() < 0.35
        block = rng.choice([2, 3, 128])
        if rows:
            rule["rows"] = base[0]
        if scaled:
            rule |= {"scale": f"{rule['to']}_s", "block": block}
        small = rng.choice([torch.float8_e4m3fn, torch.float8_e5m2])
        plain = rng.choice([torch.float32, torch.bfloat16, torch.float16])
        one = Wanted(
            pieces=pieces, ways=self.ways(dims + stack), dtype=small if scaled else plain, stack=stack, scaled=scaled,
            concat=concat + stack if fused else None, padding=rng.choice([0, 1, 3]) if rows else 0, block=block,
        )  # fmt: skip
        self.put(rule, one, number)
        if rows and rng.random() < 0.5:
            tied = {**rule, "to": f"{layer}tied{number}", "scale": ""}
            more = Wanted(
                pieces=pieces, ways=self.ways(dims), padding=one.padding, dtype=torch.bfloat16 if scaled else plain
            )
            self.put(tied, more, number)

    def put(self, rule: dict[str, Any], one: Wanted, number: int) -> None:
        self.wanted[rule["to"]] = one
        many = {key: rule[key] for key in ("to", "from", "scale") if key in rule}
        for key, said in many.items():
            names = said if isinstance(said, list) else [said]
            names = [name.replace(f"l.{number}.", "l.{n}.") for name in names]
            rule[key] = names if isinstance(said, list) else names[0]
        self.rules.append(rule)

    def text(self) -> dict[str, Any]:
        return {"version": 1, "kind": "weight_mapping", "ignore": ["*.inv_freq"], "rules": self.rules}


def cut(whole: Array, ways: Sequence[int | None], grid: Sequence[int], at: Sequence[int]) -> Array:
    """Axis after axis, as DTensor cuts, uneven shards too."""
    for axis, dim in enumerate(ways):
        if dim is not None:
            size = -(-whole.shape[dim] // grid[axis])
            whole = whole.take(range(min(size * at[axis], whole.shape[dim]), whole.shape[dim])[:size], axis=dim)
    return whole


def by_hand(one: Wanted, grid: Sequence[int], at: Sequence[int]) -> tuple[Array, list[int]]:
    """A rank's part in full precision, and the shape of the whole: of fused pieces a rank has its part of each."""
    rows = [[row[side] for row in one.pieces] for side in range(len(one.pieces[0]))]
    sides = [np.stack(row) if one.stack else row[0] for row in rows]
    if one.padding:
        sides = [np.concatenate([side, np.zeros((one.padding, *side.shape[1:]), np.float32)]) for side in sides]
    whole = list(sides[0].shape)
    parts = [cut(side, one.ways, grid, at) for side in sides]
    if one.concat is None:
        return parts[0], whole
    whole[one.concat] = sum(side.shape[one.concat] for side in sides)
    return np.concatenate(parts, axis=one.concat), whole


def quantized(value: Array, block: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Block after block."""
    *outer, rows, columns = value.shape
    scales = np.full((*outer, -(-rows // block), -(-columns // block)), 1e-12, np.float32)
    small = torch.zeros(value.shape, dtype=dtype)
    for place in np.ndindex(*scales.shape):
        where = (*place[:-2], *(slice(block * i, block * i + block) for i in place[-2:]))
        if value[where].size:
            scales[place] = max(scales[place], np.abs(value[where]).max() / np.float32(torch.finfo(dtype).max))
            small[where] = torch.from_numpy(value[where] / scales[place]).to(dtype)
    return small, torch.from_numpy(scales)


def targets(model: Model, rank: int) -> tuple[dict[str, torch.Tensor], dict[str, TensorPart]]:
    """What a rank is to have, and its empty tensors."""
    at = tuple(int(i) for i in np.unravel_index(model.ranks.index(rank), model.grid))
    want: dict[str, torch.Tensor] = {}
    found = {}
    for name, one in model.wanted.items():
        mine, whole = by_hand(one, model.grid, at)
        shapes = {name: whole}
        made = torch.from_numpy(np.array(mine))
        want[name] = made.to(one.dtype)
        if one.scaled:
            want[name], want[f"{name}_s"] = quantized(made.bfloat16().float().numpy(), one.block, one.dtype)
            shapes[f"{name}_s"] = [*whole[:-2], *(-(-n // one.block) for n in whole[-2:])]
        how = ["R" if dim is None else f"S({dim})" for dim in one.ways]
        for each, shape in shapes.items():
            found[each] = TensorPart.of(
                torch.empty_like(want[each]), ranks=model.ranks, mesh_shape=model.grid, placements=how, shape=shape
            )
    return want, found


def run(model: Model, seed: int) -> None:
    """All ranks of a model: what they ask for, whether that fits the trainer, and what they make of it."""
    mapping = WeightMapping.parse(model.text())
    sent = {n: placed_tensor(n, torch.from_numpy(np.array(model.full[n])), TRAINER) for n in mapping.wanted(model.full)}
    everyone = {TRAINER: state._Sides(source=sent, target={}, staging_bytes=1, gpu="off")}
    ranks = []
    for rank in model.ranks:
        want, target = targets(model, rank)
        made = mapping.resolve({name: part.shape for name, part in target.items()})
        pieces = pieces_of(made, target, rank)
        described = {name: piece.where for name, piece in pieces.items() if rank in piece.where.ranks}
        everyone[rank] = state._Sides(source={}, target=described, staging_bytes=1, gpu="off")
        ranks.append((rank, want, target, made, pieces))
    state._moves(everyone)
    for rank, want, target, made, pieces in ranks:
        where = {name: piece.where for name, piece in pieces.items()}
        arrived = {}
        for name, place in where.items():
            whole = torch.from_numpy(np.array(model.full[name]))
            inside = tuple(slice(*ends) for ends in place.tile(rank)) if whole.ndim else ()
            arrived[name] = whole[inside].to(pieces[name].dtype)
        got = {name: local_of(tensor) for name, tensor in assembled(made, target, arrived, where, rank)}
        assert set(got) == set(want)
        for name, value in want.items():
            said = (seed, rank, name)
            assert (got[name].shape, got[name].dtype) == (value.shape, value.dtype), said
            same = got[name].is_contiguous() and torch.equal(
                got[name].reshape(-1).view(torch.uint8), value.reshape(-1).contiguous().view(torch.uint8)
            )
            if name.removesuffix("_s") in model.wanted and model.wanted[name.removesuffix("_s")].scaled:
                # A quotient may differ in its last bit, and a weight beside it by a step of its type.
                same = torch.allclose(got[name].float(), value.float(), rtol=0.26, atol=0.0)
                equal = float((got[name] == value).float().mean()) if value.numel() else 1.0
                same = same and (name.endswith("_s") or equal > 0.97)
            assert same, said


def test_every_rank_makes_what_numpy_cuts_out_of_whole_tensors() -> None:
    right, refused = 0, []
    for seed in range(COUNT):
        try:
            run(Model(seed), seed)
            right += 1
        except InvalidInput as error:
            refused.append(str(error))
    cannot = ("cut through blocks", "does not divide into", "its local tensor has shape")
    assert [why for why in refused if not any(words in why for words in cannot)] == []
    assert right > COUNT // 2


def changed(**more: Any) -> Callable[[Model], None]:
    return lambda model: model.rng.choice(model.rules).update(more)


def shuffled(model: Model) -> None:
    model.full[next(iter(model.wanted))] = np.ones(3, np.float32)


WRONG: dict[str, Callable[[Model], None]] = {
    "sizes": changed(sizes=[5, 7]),
    "concat": changed(concat=4),
    "negative": changed(concat=-1),
    "rows": changed(rows=9999),
    "no source": changed(**{"from": "nothing"}),
    "no names": changed(**{"from": []}),
    "layer": changed(to="l.{n}.{n}"),
    "pattern": changed(to="(?P<n>.*)"),
    "scale": changed(scale="t{n}_none"),
    "block": changed(scale="same0", block=0),
    "twice": lambda model: model.rules.append(dict(model.rules[0])),
    "left over": shuffled,
    "forgotten": lambda model: model.rules.clear(),
    "stack": lambda model: model.rules[0].update(stack=not model.rules[0]["stack"]),
    "lost": lambda model: model.full.__delitem__(next(n for n in model.full if n.endswith("p0"))),
}


@functools.cache
def right_ones() -> list[int]:
    """Seeds of three mappings that are right."""
    found = []
    for seed in range(100, 100 + COUNT):
        with contextlib.suppress(InvalidInput):
            run(Model(seed), seed)
            found.append(seed)
        if len(found) == 3:
            return found
    raise AssertionError("too few mappings are right")


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_mapping_is_refused_in_one_line(wrong: str) -> None:
    for seed in right_ones():
        model = Model(seed)
        WRONG[wrong](model)
        with pytest.raises(InvalidInput) as error:
            run(model, seed)
        assert "\n" not in str(error.value)


def test_a_turned_stack_of_vectors_and_a_layer_named_twice() -> None:
    head = {"version": 1, "kind": "weight_mapping"}
    rule = {"to": "l.{n}.w{n}", "from": "s{n}.{e}", "stack": True, "transpose": True}
    mapping = WeightMapping.parse({**head, "rules": [rule]})
    with pytest.raises(InvalidInput, match="cannot make"):
        mapping.resolve({"l.3.w3": (2, 4)})
    assert [one.sources for one in mapping.resolve({"l.3.w3": (2, 4, 4)})] == [("s3.0", "s3.1")]
    assert mapping.resolve({"l.3.w4": (2, 4, 4)})[0].sources == ("l.3.w4",)


@pytest.mark.parametrize("experts", [1, 3])
def test_ranks_without_an_expert_have_an_empty_stack(experts: int) -> None:
    mapping = WeightMapping.parse(
        {"version": 1, "kind": "weight_mapping", "rules": [{"to": "w", "from": "w.{e}", "stack": True}]}
    )
    made = mapping.resolve({"w": (experts, 2, 2)})
    for rank in range(4):
        mine = max(0, min(1, experts - rank))
        part = TensorPart.of(torch.empty(mine, 2, 2), ranks=range(4), placements=["S(0)"], shape=(experts, 2, 2))
        pieces = pieces_of(made, {"w": part}, rank)
        assert list(pieces) == [f"w.{rank}"][:mine]


def test_scales_must_lie_as_their_weights_do() -> None:
    rule = {"to": "w", "from": "w", "scale": "s", "block": 2}
    mapping = WeightMapping.parse({"version": 1, "kind": "weight_mapping", "rules": [rule]})
    small, scales = torch.empty(4, 4, dtype=torch.float8_e4m3fn), torch.empty(2, 2)
    target = {
        "w": TensorPart.of(small, ranks=range(4), mesh_shape=(2, 2), placements=["S(0)", "S(1)"]),
        "s": TensorPart.of(scales, ranks=range(4), mesh_shape=(2, 2), placements=["S(1)", "S(0)"]),
    }
    with pytest.raises(InvalidInput, match="'s': rank 1 has"):
        pieces_of(mapping.resolve({"w": (8, 8), "s": (4, 4)}), target, 1)


def test_pieces_that_do_not_divide_are_refused() -> None:
    rule = {"to": "t", "from": ["a", "b"], "concat": 0, "sizes": [1, 1]}
    mapping = WeightMapping.parse({"version": 1, "kind": "weight_mapping", "rules": [rule]})
    part = TensorPart.of(torch.empty(23, 8), ranks=(0, 1), placements=["S(0)"])
    with pytest.raises(InvalidInput, match=r"'t': a piece of .* dimension 0 does not divide into 2 shards"):
        pieces_of(mapping.resolve({"t": (46, 8)}), {"t": part}, 0)
