# SPDX-License-Identifier: Apache-2.0
"""SYNDICATE's A1 to A4: the sizes of Table 2 and the training DAG of Figure 13."""

from __future__ import annotations

import pytest

import stretto as st
from stretto.workload import Workload
from stretto.workload.models.dlrm import MODELS


def ancestors(workload: Workload, name: str, iteration: int) -> set[tuple[str, int]]:
    """What has to be over before, by dependencies and by the order of the compute stream over iterations."""
    compute = [op.name for op in workload.ops if not op.is_comm]
    seen: set[tuple[str, int]] = set()
    waiting = [(name, iteration)]
    while waiting:
        at, i = waiting.pop()
        steps = [(dep.op, i - dep.lag) for dep in workload.op(at).after]
        if at in compute:
            place = compute.index(at)
            steps.append((compute[place - 1], i) if place else (compute[-1], i - 1))
        for step in steps:
            if step[1] >= 0 and step not in seen:
                seen.add(step)
                waiting.append(step)
    return seen


@pytest.mark.parametrize("variant", MODELS)
def test_the_mlps_keep_the_averages_of_the_table(variant: str) -> None:
    model = MODELS[variant]
    assert model.bottom_layers + model.top_layers == model.layers
    widths = model.bottom_layers * model.bottom_width + model.top_layers * model.top_width
    assert widths / model.layers == pytest.approx(model.width)
    assert model.bottom_width > model.top_width
    assert 0 < model.interaction_flops < model.mflops * 1e6


def test_the_messages_have_the_orders_of_magnitude_of_the_paper() -> None:
    a2 = st.workloads.dlrm("A2")
    bottom = [op.nbytes for op in a2.comm_ops if op.name.startswith("ar-bottom-mlp")]
    assert 0.5e9 < a2.op("a2a-emb-fwd").nbytes < 2e9
    assert all(1e8 < size < 1e9 for size in bottom)
    assert sum(bottom) < 1e9
    assert 1e6 < a2.op("ar-top-mlp").nbytes < 1e7


def test_bytes_are_those_worked_out_by_hand() -> None:
    a2 = st.workloads.dlrm("A2")
    assert a2.op("a2a-emb-fwd").nbytes == a2.op("a2a-emb-bwd").nbytes == 3000 * 93 * 1024 * 4
    assert a2.op("a2a-data-prep").nbytes == 3000 * 1024 * (15 + 1) * 8
    top = (0.25 * 3375) ** 2 * 3 * 4
    bottom = ((20 * 3375 - 3 * 0.25 * 3375) / 17) ** 2 * 17 * 4
    assert a2.op("ar-top-mlp").nbytes == pytest.approx(top)
    assert sum(op.nbytes for op in a2.comm_ops if op.kind == "all_reduce") == pytest.approx(top + bottom)
    assert a2.samples == 128 * 1024


def test_the_compute_is_the_roofline_of_the_table() -> None:
    a2 = st.workloads.dlrm("A2", efficiency=1.0)
    lookups = 3000 * 15 * 93 * 1024 * 4 + 3000 * 93 * 1024 * 4
    assert a2.op("fwd-emb").duration_us == pytest.approx(lookups / 900e3 + 5)
    dense = [op for op in a2.ops if not op.is_comm and op.phase != "optimizer" and not op.name.endswith("-emb")]
    flops_us = 3 * 638e6 * 1024 / 15e6
    kernels = 3 * 20 + 3
    assert sum(op.duration_us for op in dense) == pytest.approx(flops_us + 5 * kernels)


def test_half_and_double_the_tables_change_embeddings_only() -> None:
    half, full, double = (st.workloads.dlrm("A2", tables=scale) for scale in (0.5, 1.0, 2.0))
    for name in ("a2a-data-prep", "a2a-emb-fwd", "a2a-emb-bwd"):
        assert 4 * half.op(name).nbytes == 2 * full.op(name).nbytes == double.op(name).nbytes
    assert half.op("fwd-emb").duration_us < full.op("fwd-emb").duration_us < double.op("fwd-emb").duration_us
    assert half.op("fwd-bottom-mlp.1") == double.op("fwd-bottom-mlp.1")
    assert half.op("ar-top-mlp") == double.op("ar-top-mlp")


@pytest.mark.parametrize("variant", ["A1", "A2", "A3"])
def test_collectives_are_submitted_in_the_order_of_figure_13(variant: str) -> None:
    names = [op.name.split(".")[0] for op in st.workloads.dlrm(variant).comm_ops]
    order = list(dict.fromkeys(names))
    assert order == ["a2a-data-prep", "a2a-emb-fwd", "ar-top-mlp", "a2a-emb-bwd", "ar-bottom-mlp"]
    assert names == sorted(names, key=order.index)


@pytest.mark.parametrize("variant", MODELS)
def test_data_prep_can_move_into_the_iteration_before(variant: str) -> None:
    workload = st.workloads.dlrm(variant)
    before = ancestors(workload, "a2a-data-prep", 5)
    assert {op for op, i in before if i >= 4} == {"a2a-data-prep"}
    assert ("bwd-emb", 3) in before
    stock = ancestors(st.workloads.dlrm(variant, prefetch=False), "a2a-data-prep", 5)
    assert ("bwd-emb", 4) in stock


def test_the_all_to_all_of_the_backward_pass_is_on_the_way_to_the_embeddings() -> None:
    workload = st.workloads.dlrm("A2")
    assert {"a2a-emb-bwd"} <= {dep.op for dep in workload.op("bwd-emb").after}
    waits = ancestors(workload, "a2a-emb-bwd", 5)
    assert ("bwd-interaction", 5) in waits
    assert not {op for op, i in waits if i == 5 and op.startswith(("bwd-bottom", "ar-"))}
    interaction = ancestors(workload, "interaction", 5)
    assert ("a2a-emb-fwd", 5) in interaction
    assert ("fwd-bottom-mlp.3", 5) in interaction
    assert ("a2a-emb-fwd", 5) not in ancestors(workload, "fwd-bottom-mlp.3", 5)


def test_a_forward_block_waits_for_its_own_gradients_of_the_last_iteration_only() -> None:
    workload = st.workloads.dlrm("A2")
    first = ancestors(workload, "fwd-bottom-mlp.0", 5)
    assert ("ar-bottom-mlp.0", 4) in first
    assert ("ar-bottom-mlp.3", 4) not in first
    assert ("ar-top-mlp", 4) not in ancestors(workload, "fwd-bottom-mlp.3", 5)
    assert ("ar-top-mlp", 4) in ancestors(workload, "fwd-top-mlp", 5)
    assert not {op for op, i in ancestors(workload, "fwd-emb", 5) if i == 4 and op.startswith("ar-")}


def test_a4_shards_its_bottom_mlp() -> None:
    workload = st.workloads.dlrm("A4")
    kinds = {op.kind for op in workload.comm_ops}
    assert kinds == {"all_to_all", "all_gather", "reduce_scatter", "all_reduce"}
    params = MODELS["A4"].bottom_layers * MODELS["A4"].bottom_width ** 2
    scattered = sum(op.nbytes for op in workload.comm_ops if op.kind == "reduce_scatter")
    assert scattered == pytest.approx(4 * params)
    gathered = {op.name: op.nbytes for op in workload.comm_ops if op.kind == "all_gather"}
    forward = sum(size for name, size in gathered.items() if "fwd" in name)
    backward = sum(size for name, size in gathered.items() if "bwd" in name)
    assert forward == pytest.approx(4 * params)
    assert backward == pytest.approx(4 * params - max(gathered.values()))
