# SPDX-License-Identifier: Apache-2.0
"""Layouts of a model's stages over a cluster: what is tried, what is predicted, and that the best one is found."""

from __future__ import annotations

import random
from itertools import combinations, pairwise
from pathlib import Path

import pytest

from stretto import Cluster
from stretto.errors import Infeasible, InvalidInput
from stretto.pipeline import PipelineLayer, PipelineModel, search, search_layouts
from stretto.pipeline.layouts import LayoutCosts, every_layout
from stretto.pipeline.models import paper_model

CLUSTER = Cluster.preset("p3_8xlarge", nodes=2)


def model(seed: int, layers: int = 5) -> PipelineModel:
    rng = random.Random(seed)
    made = [
        PipelineLayer(
            name=f"l{at}", forward_us=rng.uniform(100, 900), output=(64, 64), parameters=1e5, shared_elements=4096,
            needs=("l0",) if at == 3 else (),
        )
        for at in range(layers)
    ]  # fmt: skip
    return PipelineModel(name="drawn", layers=tuple(made), samples=8)


@pytest.mark.parametrize("seed", range(12))
def test_cuts_are_balanced_as_no_other_cuts_are(seed: int) -> None:
    rng = random.Random(seed)
    what = model(seed, layers=7)
    devices = [rng.choice([1, 2, 4]) for _ in range(rng.choice([2, 3]))]

    def slowest(cuts: tuple[int, ...]) -> float:
        times = [sum(each.forward_us for each in what.layers[a:b]) for a, b in pairwise(cuts)]
        return max(time / count for time, count in zip(times, devices, strict=True))

    every = [(0, *inner, 7) for inner in combinations(range(1, 7), len(devices) - 1)]
    assert slowest(what.balanced_cuts(devices)) == pytest.approx(min(map(slowest, every)))


def test_layouts_use_every_device_once_and_split_layers_inside_hosts() -> None:
    found = [layout for count in (1, 2, 3) for layout in every_layout(model(1), CLUSTER, count)]
    assert len(found) == len({tuple((s.shape, s.devices) for s in layout) for layout in found})
    for layout in found:
        assert [d for stage in layout for d in stage.devices] == list(range(8))
        assert layout[0].first == 0 and layout[-1].last == 5
        for stage in layout:
            rows = [stage.devices[at : at + stage.tensor] for at in range(0, len(stage.devices), stage.tensor)]
            assert all(len({device // 4 for device in row}) == 1 for row in rows)


def test_the_best_layout_is_the_best_of_all() -> None:
    what, one = model(4, layers=2), Cluster.preset("p3_8xlarge", nodes=1)
    found = search_layouts(what, one, 3, layouts=1000)
    assert found.exhaustive
    costs = LayoutCosts(what, one)
    layouts = [layout for count in (1, 2) for layout in every_layout(what, one, count)]
    every = [search(costs.costs(layout), 3, evaluations=100).total_us for layout in layouts]
    assert found.best.total_us == pytest.approx(min(every))


def test_memory_decides_which_layouts_fit() -> None:
    roomy = search_layouts(model(2), CLUSTER, 4, stages=2, layouts=1)
    need = max(roomy.best.result.peak_bytes)
    with pytest.raises(Infeasible, match="no layout of drawn fits"):
        search_layouts(model(2), CLUSTER, 4, cap_bytes=need / 1e6)
    assert not roomy.exhaustive or roomy.considered == 1


def test_the_papers_models_cross_as_in_the_paper() -> None:
    unet = paper_model("utrans")
    assert len(unet.crossing(len(unet.layers) // 2)) > 1
    assert paper_model("gpt").crossing(16) == [(1024, 2560)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("layers: [{name: a, forward_us: 1, output: [4], needs: [b]}]", "'b' is no layer before it"),
        ("layers: [{name: a, forward_us: -1, output: [4]}]", "forward_us: must be 0 to 1e15"),
        ("layers: [{name: a, forward_us: 1, output: [0]}]", "output: must be sizes >= 1"),
        ("layers: []", "layers: must be 1..4096"),
        ("layers: [{name: a, output: [4]}]", "forward_us"),
    ],
)
def test_wrong_models_are_one_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "model.yaml"
    path.write_text(f"version: 1\nkind: pipeline_model\nname: m\nsamples: 4\n{text}\n")
    with pytest.raises(InvalidInput, match=message):
        PipelineModel.load(path)
