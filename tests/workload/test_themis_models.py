# SPDX-License-Identifier: Apache-2.0
"""The four workloads of Themis."""

from __future__ import annotations

import pytest

from stretto import InvalidInput, Workload
from stretto.workload.dag import Op
from stretto.workload.models.themis import BATCH, gnmt_layers, themis


def grads(work: Workload) -> list[Op]:
    return [op for op in work.comm_ops if op.name.startswith("ar-")]


@pytest.mark.parametrize(("variant", "megabytes"), [("resnet152", 120.4), ("gnmt", 561.5), ("dlrm", 203.5)])
def test_gradients_are_fp16_and_leave_together_after_the_backward_pass(variant: str, megabytes: float) -> None:
    work = themis(variant)
    (op,) = grads(work)
    assert op.nbytes == pytest.approx(megabytes * 1e6, rel=0.01)
    backward = [each.name for each in work.ops if each.phase == "backward" and not each.is_comm]
    assert [dep.op for dep in op.after] == backward[-1:]
    assert work.samples == BATCH[variant] * 1024


@pytest.mark.parametrize("variant", ["resnet152", "gnmt", "dlrm"])
def test_buckets_carry_the_same_bytes_and_leave_earlier(variant: str) -> None:
    whole, bucketed = themis(variant), themis(variant, bucket_mb=25)
    assert len(grads(bucketed)) > 2
    assert sum(op.nbytes for op in grads(bucketed)) == pytest.approx(sum(op.nbytes for op in grads(whole)))
    assert bucketed.compute_us == pytest.approx(whole.compute_us)


def test_compute_is_flops_over_the_peak_and_scales() -> None:
    # 11.5 G multiply-adds per image, three passes, 32 images, 312 TFLOP/s.
    assert themis("resnet152").compute_us == pytest.approx(11.51e9 * 2 * 3 * 32 / 312e6, rel=0.01)
    assert themis("resnet152", compute=0.1).compute_us == pytest.approx(0.1 * themis("resnet152").compute_us)
    assert themis("gnmt", batch=64).compute_us == pytest.approx(0.5 * themis("gnmt").compute_us)


def test_gnmt_has_about_280_million_parameters() -> None:
    assert sum(layer.params for layer in gnmt_layers()) == pytest.approx(281e6, rel=0.01)


def test_embeddings_travel_beside_the_bottom_mlp() -> None:
    work = themis("dlrm")
    assert {op.name: op.kind for op in work.comm_ops if op.kind == "all_to_all"}.keys() == {"mp-a2a-fwd", "mp-a2a-bwd"}
    assert "mp-a2a-fwd" in {dep.op for dep in work.op("fwd-top0").after}
    assert "mp-a2a-fwd" not in {dep.op for op in work.ops if "bottom" in op.name for dep in op.after}


def test_the_transformer_is_split_over_128_and_replicated_with_zero2() -> None:
    work = themis("transformer1t", batch=1)
    blocking = [op for op in work.comm_ops if op.name.startswith("mp-")]
    assert len(blocking) == 128 * 6
    assert {len(op.groups[0]) for op in blocking} == {128}
    scattered = [op for op in work.comm_ops if op.kind == "reduce_scatter"]
    assert len(scattered) == 128
    assert scattered[0].groups[0] == tuple(range(0, 1024, 128))
    # 12 h^2 of each layer in FP16 over 128 shards.
    assert sum(op.nbytes for op in scattered) * 128 / 2 == pytest.approx(1.007e12, rel=0.01)
    assert work.op("ag-params").nbytes == pytest.approx(sum(op.nbytes for op in scattered))


def test_by_name_and_wrong_names() -> None:
    assert Workload.load("themis:dlrm,bucket_mb=25") == themis("dlrm", bucket_mb=25)
    for spec, message in (
        ("themis:bert", "unknown variant of themis 'bert'"),
        ("themis:gnmt,compute=-1", "compute: must be a number"),
        ("themis:gnmt,bucket_mb=x", "bucket_mb: must be a number"),
        ("themis:transformer1t,ranks=100", "ranks: transformer1t takes a multiple of 128"),
        ("themis:gnmt,batch=0", "batch: must be a whole number"),
    ):
        with pytest.raises(InvalidInput, match=message):
            Workload.load(spec)
