# SPDX-License-Identifier: Apache-2.0
"""Weights of models: shapes against published counts, layouts against slicing by hand, plans against the bound."""

from __future__ import annotations

import random
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stretto import Cluster, InvalidInput
from stretto.resharding import load_plan, save_plan
from stretto.resharding.bundles import Bundle
from stretto.resharding.hosts import Hosts
from stretto.resharding.rails import relay_shares
from stretto.weights import MODELS, ModelShapes, ModelTensor, ParallelDegrees, model_shapes, plan_weights

DEVICES = tuple(range(16))


@pytest.mark.parametrize("name", MODELS)
def test_a_model_has_the_parameters_that_its_authors_publish(name: str) -> None:
    model = model_shapes(name)
    assert len({t.name for t in model.tensors}) == len(model.tensors)
    assert model.parameters / 1e9 == pytest.approx(model.published_billion, rel=0.015)


def test_the_counts_do_not_change() -> None:
    # What the shapes of the published configs add up to (DeepSeek-V3 without its module for multi-token prediction).
    assert model_shapes("llama-3-70b").parameters == 70_553_706_496
    assert model_shapes("deepseek-v3").parameters == 671_026_419_200
    assert model_shapes("qwen3-235b").parameters == 235_093_634_560


def test_degrees_are_read_and_checked() -> None:
    side = ParallelDegrees.parse("pp=2, dp=2,tp4 ,ep=8@0-15")
    assert (side.pp, side.dp, side.tp, side.ep, side.size, side.devices) == (2, 2, 4, 8, 16, DEVICES)
    for text, said in [
        ("tp=0", "must be 1.."), ("xp=3", "unknown degree"), ("tp=2,tp=4", "twice"), ("dp=4,ep=3", "does not divide"),
        ("tp=8@0-3", "8 devices, 4 are given"), ("tp", "expected degrees"), ("tp=4@x", "expected a list"),
    ]:  # fmt: skip
        with pytest.raises(InvalidInput, match=said):
            ParallelDegrees.parse(text)


def owned(side: ParallelDegrees, tensor: ModelTensor, device: int) -> Any:
    """The elements that a device of one stage has, cut by hand, axis after axis."""
    whole = np.arange(prod(tensor.shape)).reshape(tensor.shape)
    tp, fsdp = device % side.tp, device // side.tp % side.fsdp
    if tensor.role.startswith("expert") and side.ep > 1:
        mine = np.array_split(whole, side.ep, axis=0)[device % side.ep]
        shards = np.gcd(side.stage // side.ep, side.fsdp)
        return np.array_split(mine, shards, axis=1)[device // side.ep % shards]
    cut = {"row": 1, "expert_column": 1, "expert_row": 2, "replicated": -1}.get(tensor.role, 0)
    if tensor.role == "kv":
        parts = int(np.gcd(side.tp, tensor.heads))
        whole = np.array_split(whole, parts, axis=0)[tp // (side.tp // parts)]
    elif cut >= 0:
        whole = np.array_split(whole, side.tp, axis=cut)[tp]
    return np.array_split(whole, side.fsdp, axis=0)[fsdp]


def test_layouts_are_those_of_cutting_by_hand() -> None:
    draw = random.Random(0)
    for _ in range(200):
        dp, fsdp, tp = (2 ** draw.randrange(3) for _ in range(3))
        stage = dp * fsdp * tp
        side = ParallelDegrees(
            dp=dp,
            fsdp=fsdp,
            tp=tp,
            ep=draw.choice([n for n in (1, 2, 4, 8) if stage % n == 0]),
            devices=tuple(range(stage)),
        )
        role = draw.choice(["column", "row", "kv", "vocab", "expert_column", "expert_row", "replicated"])
        shape = (64, 32, 16) if role.startswith("expert") else (64, 32)
        tensor = ModelTensor(name="x", shape=shape, role=role, heads=draw.choice([2, 4, 8]) if role == "kv" else 0)
        tiles = side.layout(tensor, 0).tiles(shape)
        whole = np.arange(prod(shape)).reshape(shape)
        for device in range(stage):
            mine = whole[tuple(slice(*ends) for ends in tiles[device].tolist())]
            assert np.array_equal(mine, owned(side, tensor, device)), (side, role)


def test_stages_have_their_layers_and_every_byte_is_planned() -> None:
    cluster = Cluster.preset("dgx_h100", nodes=2)
    plan = plan_weights("llama-3-70b", trainer="pp=2,tp=4", server="tp=8", cluster=cluster)
    stages = {t.name: set(t.src.mesh.devices) for t in plan.reshard.tensors}
    assert stages["model.embed_tokens.weight"] == set(range(4)) and stages["lm_head.weight"] == set(range(4, 8))
    assert {name for names in plan.names for name in names} == {t.name for t in plan.model.tensors}
    assert plan.nbytes == 2 * plan.model.parameters
    assert plan.ratio < 1.05
    wanted = sum(t.nbytes * len(t.receivers) for t in plan.reshard.tasks)
    copied = sum(2 * t.parameters * (8 if t.role == "replicated" else 1) for t in plan.model.tensors)
    assert wanted == copied


def test_groups_pass_on_no_more_than_the_busiest_holder_needs() -> None:
    boxes = Cluster.preset("dgx_h100", nodes=4)
    hosts = Hosts.of(boxes, range(32))

    def bundle(holder: int, nbytes: int) -> Bundle:
        wanted = (16, 24)
        return Bundle(
            tasks=(0,), nbytes=nbytes, holders=((holder,),), receivers=wanted, missing=wanted, align=1, reduction=""
        )

    rate = hosts.send_bytes_per_us[hosts.group[0]]
    first, second = relay_shares([bundle(0, 600), bundle(8, 200)], hosts, 900 / rate)
    # The first host would send 1,200 bytes by itself; 900 are as many as each of the others receives.
    homes = hosts.group[0], hosts.group[8]
    assert first[homes[0]] == pytest.approx(0.75, abs=1e-3) and sum(first.values()) == pytest.approx(1, abs=1e-2)
    assert second == {homes[1]: pytest.approx(1.0)}


def test_what_a_rack_shares_goes_round_it_as_a_tree_and_the_plan_is_near_the_bound() -> None:
    racks = Cluster.load("gb200_nvl72:4,trays=2")
    found = plan_weights("deepseek-v3", trainer="pp=4,dp=4,ep=4", server="tp=4,dp=4", cluster=racks, dtype="fp8")
    assert found.ratio < 1.05
    program, depth = found.reshard.program, dict[tuple[int, int], int]()
    assert program is not None
    for at in range(program.num_transfers):
        (chunk,) = program.chunk[program.chunk_ptr[at] : program.chunk_ptr[at + 1]].tolist()
        here, there = (chunk, int(program.src[at])), (chunk, int(program.dst[at]))
        depth[there] = depth.get(here, 0) + 1
    # Out of one rack, into another and a third, and in each to eight devices; a chain would be 18 long.
    assert max(depth.values()) <= 10


TINY = ModelShapes(
    name="tiny", num_layers=1, published_billion=0.0, source="",
    tensors=(
        ModelTensor(name="a.weight", shape=(256, 300), role="column", layer=0),
        ModelTensor(name="norm.weight", shape=(256,), role="replicated", layer=0),
        ModelTensor(name="experts.weight", shape=(8, 32, 64), role="expert_row", layer=0),
        ModelTensor(name="lm_head.weight", shape=(256, 256), role="vocab"),
    ),
)  # fmt: skip


def test_fp8_has_scales_and_leaves_norms_and_the_vocabulary() -> None:
    plan = plan_weights(TINY, trainer="fsdp=8", server="tp=8", cluster=Cluster.preset("dgx_h100", nodes=2), dtype="fp8")
    sizes = {names[0]: (t.shape, t.dtype_bytes) for t, names in zip(plan.reshard.tensors, plan.names, strict=True)}
    assert sizes["a.weight"] == ((1, 256, 300), 1) and sizes["a.weight_scale_inv"] == ((1, 2, 3), 4)
    assert sizes["norm.weight"][1] == sizes["lm_head.weight"][1] == 2


def test_a_plan_is_the_same_after_a_file(tmp_path: Path) -> None:
    cluster = Cluster.preset("gb200_nvl72", nodes=2, trays=2)
    plan = plan_weights(TINY, trainer="dp=4,tp=2,ep=8", server="tp=4,dp=2", cluster=cluster).reshard
    save_plan(plan, tmp_path / "plan.json")
    read = load_plan(tmp_path / "plan.json")
    assert read.time_us == plan.time_us and read.bound_us == plan.bound_us and read.bundles == plan.bundles
    text = (tmp_path / "plan.json").read_text()
    for old, new, said in [
        ("256,", "260,", "bad.json: "), ("collective", "collectives", "program"),
        ('"version": 1', '"version": 2', "version"),
        ('"chunks": [', '"chunks": [1,', "chunks"), ('"src": "(', '"src": "((', "expected a mesh"),
    ]:  # fmt: skip
        assert old in text
        (tmp_path / "bad.json").write_text(text.replace(old, new, 1))
        with pytest.raises(InvalidInput, match=said):
            load_plan(tmp_path / "bad.json")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model": "gpt-5"}, "unknown model"), ({"dtype": "int3"}, "unknown dtype"), ({"server": "tp=x"}, "server: "),
        ({"trainer": "fsdp=64"}, "trainer: fsdp=64 takes 64 devices; dgx_h100:2 has 16"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_named(change: dict[str, str], said: str) -> None:
    given = {"model": "llama-3-70b", "trainer": "fsdp=8", "server": "tp=8", **change}
    with pytest.raises(InvalidInput, match=said):
        plan_weights(given.pop("model"), cluster=Cluster.preset("dgx_h100", nodes=2), **given)
