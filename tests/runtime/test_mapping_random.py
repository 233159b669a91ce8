# SPDX-License-Identifier: Apache-2.0
"""Random mappings: what each rank makes of its pieces is what it would cut out of whole tensors.

The reference makes every server's tensor of whole source tensors and slices it by hand. Pieces are cut out of the same
sources by the layouts in which `MappedSync` asks for them; that layouts arrive bit for bit is tested elsewhere.
"""

from __future__ import annotations

import os
import random
from typing import Any

import pytest
import torch

from stretto.errors import InvalidInput
from stretto.resharding.tensors.describe import TensorPart, local_of
from stretto.resharding.tensors.pieces import assembled, pieces_of
from stretto.weights import MappingRule, WeightMapping

COUNT = int(os.environ.get("STRETTO_TEST_MAPPINGS", "20"))
FP8 = torch.float8_e4m3fn
BLOCK = 4
Dict = dict[str, torch.Tensor]


def drawn(draw: random.Random, full: Dict) -> tuple[dict[str, Any], torch.Tensor, list[MappingRule]]:
    """A mesh, the tensors of a server as functions of its rank's coordinates, and the rules that make them."""
    grid = draw.choice([(1,), (2,), (4,), (2, 2), (3,)])
    rules: list[MappingRule] = []
    wanted: dict[str, Any] = {}
    for number in range(draw.randint(1, 5)):
        kind = draw.choice(["fused", "stack", "experts", "rows", "same", "turned", "scaled"])
        dims = [None, 0, 1, 2] if kind in ("stack", "experts") else [None, 0, 1]
        name, ways = f"t{number}", [draw.choice(dims) for _ in grid]
        wanted[name] = (kind, ways, add(draw, kind, name, full, rules))
    return wanted, torch.arange(torch.Size(grid).numel()).view(grid), rules


def add(draw: random.Random, kind: str, name: str, full: Dict, rules: list[MappingRule]) -> list[str]:
    """Source tensors of one rule, and the rule; sizes that meshes of 2, 3 and 4 divide, twice over."""
    turned = draw.random() < 0.5 and kind in ("fused", "stack", "experts", "turned")
    shape = (48, 96) if kind != "scaled" else (144, 48)
    pieces = {"fused": draw.randint(2, 3), "stack": draw.choice([12, 24]), "experts": 24}.get(kind, 1)
    sizes = [draw.choice([1, 2]) for _ in range(pieces)]
    old = [n for n in full if n.startswith("rows")]
    sources = []
    for at in range(pieces):
        # Of the stacked experts each has two pieces, gate and up.
        source = f"{kind}{name}.{at}" if kind != "experts" else f"{kind}{name}.{at // 2}.{'gu'[at % 2]}"
        size = (shape[0] * sizes[at], shape[1]) if kind == "fused" and not turned else shape
        size = (shape[1], shape[0] * sizes[at]) if kind == "fused" and turned else size
        full[source] = torch.randn(size, generator=torch.Generator().manual_seed(draw.randrange(1 << 30)))
        sources.append(source)
    if kind == "rows" and old and draw.random() < 0.5:
        del full[sources[0]]
        sources = [old[0]]  # tied
    if kind == "scaled":
        full[sources[0]] = full[sources[0]].bfloat16()
    many: dict[str, Any] = {"concat": 0, "sizes": tuple(sizes)} if kind == "fused" else {}
    names = {"stack": (f"{kind}{name}.{{e}}",), "experts": (f"{kind}{name}.{{e}}.g", f"{kind}{name}.{{e}}.u")}
    if kind == "experts":
        many = {"concat": 0, "sizes": (1, 1)}
    rules.append(
        MappingRule(
            to=name, sources=names.get(kind, tuple(sources)), stack=kind in names,
            transpose=turned or kind == "turned", rows=shape[0] if kind == "rows" else None,
            scale=f"{name}_scale" if kind == "scaled" else "", block=BLOCK, **many,
        )
    )  # fmt: skip
    return sources


def pieces_whole(rule: MappingRule, sources: list[str], full: Dict) -> list[torch.Tensor]:
    return [full[s].t() if rule.transpose else full[s] for s in sources]


def sliced(tensor: torch.Tensor, ways: list[int | None], grid: tuple[int, ...], at: tuple[int, ...]) -> torch.Tensor:
    """Axis after axis, as DTensor cuts."""
    for axis, dim in enumerate(ways):
        if dim is not None:
            tensor = tensor.tensor_split(grid[axis], dim)[at[axis]]
    return tensor


def by_hand(
    rule: MappingRule, sources: list[str], full: Dict, ways: list[int | None], grid: tuple[int, ...], at: Any
) -> Dict:
    whole = pieces_whole(rule, sources, full)
    if rule.stack and rule.concat is None:
        return {rule.to: sliced(torch.stack(whole), ways, grid, at)}
    if rule.stack:
        # A rank has its part of both pieces of each of its experts.
        halves = [sliced(torch.stack(whole[side::2]), ways, grid, at) for side in (0, 1)]
        return {rule.to: torch.cat(halves, dim=1)}
    if rule.rows is not None:
        padded = torch.cat([whole[0], torch.zeros(48, 96)])
        return {rule.to: sliced(padded, ways, grid, at)}
    # A rank has its part of every piece.
    mine = torch.cat([sliced(piece, ways, grid, at) for piece in whole])
    if not rule.scale:
        return {rule.to: mine}
    scales = torch.zeros(mine.shape[0] // BLOCK, mine.shape[1] // BLOCK)
    small = torch.zeros(mine.shape).to(FP8)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            where = (slice(BLOCK * i, BLOCK * i + BLOCK), slice(BLOCK * j, BLOCK * j + BLOCK))
            scales[i, j] = mine[where].float().abs().max() / torch.finfo(FP8).max
            small[where] = (mine[where].float() / scales[i, j]).to(FP8)
    return {rule.to: small, rule.scale: scales}


def checked(seed: int) -> str:
    """One drawn mapping on all ranks of its mesh; returns why it was refused, if it was."""
    draw = random.Random(seed)
    full: Dict = {}
    wanted, grid, rules = drawn(draw, full)
    mapping = WeightMapping(rules=tuple(rules))
    shape, ranks = tuple(grid.shape), grid.flatten().tolist()
    layouts = []
    for rank in ranks:
        at = tuple(int(x) for x in (grid == rank).nonzero()[0])
        want: Dict = {}
        target: dict[str, TensorPart] = {}
        for rule in rules:
            _, ways, sources = wanted[rule.to]
            made = by_hand(rule, sources, full, ways, shape, at)
            want |= made
            how = ["R" if dim is None else f"S({dim})" for dim in ways]
            for name, value in made.items():
                target[name] = TensorPart.of(torch.empty_like(value), ranks=ranks, mesh_shape=shape, placements=how)
        try:
            found = mapping.resolve({name: part.shape for name, part in target.items()})
            pieces = pieces_of(found, target, rank)
        except InvalidInput as error:
            return str(error)
        where = {name: piece.where for name, piece in pieces.items()}
        layouts.append({name: (w.placements, w.mesh_shape, len(w.ranks)) for name, w in where.items()})
        cut = {
            name: full[name][tuple(slice(*ends) for ends in w.tile(rank))].to(piece.dtype)
            for (name, w), piece in zip(where.items(), pieces.values(), strict=True)
        }
        got = {name: local_of(t) for name, t in assembled(found, target, cut, where, rank)}
        assert set(got) == set(want)
        for name, value in want.items():
            assert got[name].is_contiguous() and torch.equal(
                got[name].view(torch.uint8), value.contiguous().view(torch.uint8)
            ), (seed, name, rules)
    # What two ranks of the mesh both receive they must receive in one layout, or a transfer would be refused.
    for name in set().union(*layouts):
        assert len({one[name] for one in layouts if name in one}) == 1, (seed, name)
    return ""


def test_every_rank_makes_what_it_would_cut_out_of_whole_tensors() -> None:
    assert [why for why in map(checked, range(COUNT)) if why] == []


def test_pieces_that_do_not_divide_are_refused() -> None:
    rule = MappingRule(to="t", sources=("a", "b"), concat=0, sizes=(1, 1))
    part = TensorPart.of(torch.empty(23, 8), ranks=(0, 1), placements=["S(0)"])
    with pytest.raises(InvalidInput, match="dimension 0 does not divide into 2 shards"):
        pieces_of(WeightMapping(rules=(rule,)).resolve({"t": (46, 8)}), {"t": part}, 0)
