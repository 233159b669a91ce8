# SPDX-License-Identifier: Apache-2.0
"""The paper's models have the sizes that it gives, and its clusters the GPUs."""

from __future__ import annotations

import pytest

from stretto.errors import InvalidInput
from stretto.strategy import zoo
from stretto.strategy.clusters import CLUSTERS, paper_cluster

PARAMETERS = {  # millions; where the paper says nothing, what the models' authors say
    "vgg16": 138.4, "resnet50": 25.6, "resnet101": 44.5, "densenet121": 8.0, "inceptionv3": 23.8, "bert_3l": 11.0,
    "bert_12l": 110.0, "bert_large": 340.0, "transformer": 62.0, "ncf_dense": 122.0, "ncf_sparse": 122.0,
}  # fmt: skip


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters(name: str) -> None:
    found = sum(v.elements for v in zoo.model(name).variables) / 1e6
    assert found == pytest.approx(PARAMETERS[name], rel=0.06)


def test_resnet50_has_every_parameter_of_torchvisions() -> None:
    """Its 161 tensors: 53 convolutions, each with two of its normalization, and the classifier's two."""
    variables = zoo.model("resnet50").variables
    assert (len(variables), sum(v.elements for v in variables)) == (161, 25_557_032)
    assert variables[-2].shape == (1000, 2048)


def test_ncf_has_ten_variables_and_its_tables_are_sparse_or_not() -> None:
    for name, sparse in (("ncf_dense", 0), ("ncf_sparse", 4)):
        model = zoo.model(name)
        assert len(model.variables) == 10
        assert sum(v.sparse for v in model.variables) == sparse


@pytest.mark.parametrize("name", zoo.MODELS)
def test_a_scaled_model_has_the_same_variables(name: str) -> None:
    whole, small = zoo.model(name), zoo.model(name, scale=0.05)
    assert [v.name for v in small.variables] == [v.name for v in whole.variables]
    assert small.nbytes < 0.2 * whole.nbytes
    assert all(v.backward_us >= v.forward_us for v in whole.variables)


def test_faster_devices_take_less_time() -> None:
    names = ("mi300x", "gb200", "h200", "titan_x", "t4", "m60")
    times = [sum(v.forward_us for v in zoo.model("vgg16", device=name).variables) for name in names]
    assert times == sorted(times)


@pytest.mark.parametrize(
    ("source", "said"),
    [("vgg17", "unknown model 'vgg17'"), ("vgg16@x", "must be a number"), ("vgg16@9", "scale: must be"),
     ("none.yaml", "No such file")],
)  # fmt: skip
def test_models_that_do_not_exist(source: str, said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        zoo.load(source)


def test_every_cluster_has_its_gpus() -> None:
    ranks = {name: paper_cluster(name).cluster.num_devices for name in CLUSTERS}
    assert ranks == {
        "a1": 16, "a2": 11, "b1": 8, "b2": 12, "b3": 16, "b4": 4, "b5": 8, "b6": 12, "b7": 16, "b8": 32, "b9": 5,
        "b10": 8, "b11": 16, "b12": 5,
    }  # fmt: skip
    assert len(paper_cluster("b11").slowdown) == 16
    with pytest.raises(InvalidInput, match="unknown cluster of the paper"):
        paper_cluster("c1")
