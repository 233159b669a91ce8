# SPDX-License-Identifier: Apache-2.0
"""Every registered model: valid, scaling, and of the size that one can work out by hand."""

from __future__ import annotations

import pytest

import stretto as st
from stretto.errors import InvalidInput
from stretto.workload import Op, Workload, registry
from stretto.workload.catalog.convolutional import RESNET_BLOCKS
from stretto.workload.models import cnn, transformer
from stretto.workload.models.common import OpCollector, buckets, last
from stretto.workload.models.transformer_step import one_f_one_b

SMALL = {
    "gpt:13b": "layers=4,micro_batches=2", "gpt:175b": "layers=8,micro_batches=2", "gpt:1t": "layers=2,ranks=256",
    "themis:transformer1t": "batch=1,ranks=256",
}  # fmt: skip
PHASES = {"data", "forward", "backward", "optimizer"}


def build(spec: str) -> Workload:
    return Workload.load(f"{spec},{SMALL[spec]}" if spec in SMALL else spec)


def total(workload: Workload, kind: str) -> float:
    return sum(op.nbytes for op in workload.comm_ops if op.kind == kind)


def past(workload: Workload, name: str, iteration: int) -> set[tuple[str, int]]:
    """Everything that has to be over before an op of an iteration starts, by data and by the order of streams."""
    before: dict[str, list[str]] = {op.name: [] for op in workload.ops}
    previous: dict[str, str] = {}
    for op in workload.ops:
        if not op.is_comm:
            before[op.name] = [previous[op.stream]] if op.stream in previous else []
            previous[op.stream] = op.name
    seen: set[tuple[str, int]] = set()
    waiting = [(name, iteration)]
    while waiting:
        at, i = waiting.pop()
        steps = [(dep.op, i - dep.lag) for dep in workload.op(at).after] + [(other, i) for other in before[at]]
        for step in steps:
            if step[1] >= 0 and step not in seen:
                seen.add(step)
                waiting.append(step)
    return seen


@pytest.mark.parametrize("spec", st.workloads.names())
def test_every_model_is_a_workload_with_phases_and_notes(spec: str) -> None:
    workload = build(spec)
    assert workload.name == spec
    assert {op.phase for op in workload.ops} <= PHASES
    assert workload.compute_us > 0
    assert workload.comm_ops
    assert workload.samples > 0
    assert workload.notes
    assert all(op.duration_us > 0 for op in workload.ops if not op.is_comm)
    assert build(spec).digest == workload.digest


@pytest.mark.parametrize("spec", st.workloads.names())
def test_the_listed_order_can_be_submitted(spec: str) -> None:
    seen: set[str] = set()
    for op in build(spec).ops:
        assert {dep.op for dep in op.after if not dep.lag} <= seen
        seen.add(op.name)


@pytest.mark.parametrize("spec", [s for s in st.workloads.names() if s not in SMALL and "moe" not in s])
def test_weak_scaling_keeps_the_work_of_a_rank(spec: str) -> None:
    small, large = Workload.load(f"{spec},ranks=8"), Workload.load(f"{spec},ranks=128")
    assert [op.name for op in small.ops] == [op.name for op in large.ops]
    assert large.samples == 16 * small.samples
    for one, other in zip(small.ops, large.ops, strict=True):
        assert one.nbytes == other.nbytes
        assert one.duration_us == other.duration_us or one.phase == "optimizer"


@pytest.mark.parametrize("spec", ["dlrm:A2", "dlrm:A4", "gpt:125m", "gpt:6.7b", "xlmr:xl", "regnetz:4gf", "resnet:50"])
def test_one_rank_computes_the_same_and_communicates_nothing(spec: str) -> None:
    alone, together = Workload.load(f"{spec},ranks=1"), Workload.load(f"{spec},ranks=8")
    assert not alone.comm_ops
    forward = [[op.duration_us for op in w.ops if op.phase == "forward" and not op.is_comm] for w in (alone, together)]
    assert forward[0] == forward[1]


def test_half_the_efficiency_doubles_the_compute() -> None:
    full, half = st.workloads.dlrm("A2", efficiency=1.0), st.workloads.dlrm("A2", efficiency=0.5)
    assert half.compute_us == pytest.approx(2 * full.compute_us, rel=0.01)


def test_gpt_data_parallel_reduces_every_parameter_once() -> None:
    workload = st.workloads.gpt("125m", ranks=8)
    parameters = 12 * 12 * 768**2 + 51200 * 768
    assert transformer.GPT["125m"].parameters == parameters
    assert total(workload, "all_reduce") == pytest.approx(2 * parameters)
    zero1 = st.workloads.gpt("125m", ranks=8, mode="zero1")
    assert total(zero1, "reduce_scatter") == total(zero1, "all_gather") == pytest.approx(2 * parameters)


def test_zero2_reduces_in_every_micro_batch_and_zero1_in_the_last() -> None:
    def reduced(mode: str) -> float:
        return total(st.workloads.gpt("125m", ranks=8, mode=mode, micro_batches=4), "reduce_scatter")

    assert reduced("zero2") == pytest.approx(4 * reduced("zero1"))


def test_fsdp_gathers_twice_but_what_stays() -> None:
    workload = st.workloads.xlmr("xl", ranks=16)
    layer, table = 12 * 2560**2, 250_002 * 2560
    assert transformer.XLMR["xl"].parameters == 36 * layer + table == pytest.approx(3.47e9, rel=0.001)
    assert total(workload, "reduce_scatter") == pytest.approx(2 * (36 * layer + table))
    # The embedding and the last layer are still there when the backward pass begins.
    assert total(workload, "all_gather") == pytest.approx(2 * (36 * layer + table + 35 * layer))
    assert {op.kind for op in workload.comm_ops} == {"all_gather", "reduce_scatter"}


def test_fsdp_holds_two_units_at_a_time() -> None:
    workload = st.workloads.xlmr("xl", ranks=16)
    gather = workload.op("ag-fwd-params.9")
    assert ("fwd-layer.6", "submit") in {(dep.op, dep.why) for dep in gather.after}
    before = {op for op, i in past(workload, "ag-bwd-params.9", 5) if i == 5}
    assert "bwd-layer.10" in before
    assert "bwd-layer.9" not in before


def test_tensor_parallel_layers_are_reduced_twice_each_way() -> None:
    plain = st.workloads.gpt("125m", ranks=8, tensor=8)
    activations = 4 * 2048 * 768 * 2
    assert len(plain.comm_ops) == 4 * 12 + 2
    assert total(plain, "all_reduce") == pytest.approx((4 * 12 + 2) * activations)
    cut = st.workloads.gpt("125m", ranks=8, tensor=8, sequence_parallel=True)
    assert total(cut, "all_gather") == pytest.approx(4 * 12 * activations)
    assert total(cut, "reduce_scatter") == pytest.approx((4 * 12 + 2) * activations)


def test_a_stage_finds_what_it_receives_where_it_uses_it() -> None:
    """Each rank's own order is 1F1B, and nothing that is sent to it later stands before what it does now."""
    workload = st.workloads.gpt("125m", ranks=4, pipeline=4, micro_batches=4)
    first: list[str] = []
    last: list[str] = []
    for op, places in zip(workload.ops, workload.op_places, strict=True):
        for place, listed in ((0, first), (3, last)):
            if place in places and (op.kind == "send" or op.name.startswith(("fwd-layer.0.", "bwd-layer.9."))):
                listed.append(op.name)
    assert [name for name in first if name.startswith("send-fwd")] == [f"send-fwd.s0.m{k}" for k in range(4)]
    turns = [name for name in last if name.startswith(("send", "bwd"))]
    for micro in range(1, 4):
        # Its input of the next micro-batch but one is not there before it has sent back this one.
        assert turns.index(f"send-fwd.s2.m{micro}") > turns.index(f"send-fwd.s2.m{micro - 1}")
        if micro >= 2:
            assert turns.index(f"send-fwd.s2.m{micro}") > turns.index(f"send-bwd.s3.m{micro - 2}")


def test_pipeline_stages_hand_on_activations_in_1f1b_order() -> None:
    workload = st.workloads.gpt("125m", ranks=16, tensor=2, pipeline=4, micro_batches=6)
    assert len(workload.places) == 4
    sends = [op for op in workload.comm_ops if op.kind == "send"]
    assert len(sends) == 2 * 3 * 6
    assert workload.op("send-fwd.s1.m0").groups == ((4, 8), (5, 9), (6, 10), (7, 11))
    assert workload.op("send-bwd.s2.m0").groups == ((8, 4), (9, 5), (10, 6), (11, 7))
    assert workload.op("tp-fwd-attn.0.m0").groups == ((0, 1), (2, 3))
    stage = [op.name for op in workload.ops if op.name.startswith(("fwd-attn.5.", "bwd-attn.5."))]
    order = [f"{what}{micro}" for what, micro in one_f_one_b(1, 4, 6)]
    assert [f"{name[0].upper()}{name[-1]}".replace("f", "F") for name in stage] == order
    assert order[:5] == ["F0", "F1", "F2", "B0", "F3"]


def test_experts_exchange_tokens_in_their_own_groups() -> None:
    workload = st.workloads.moe("1.3b-8e", ranks=16, tensor=2, layers=2, expert_parallel=4)
    tokens = 4 * 2048 * 2048 * 2
    exchanges = [op for op in workload.comm_ops if op.kind == "all_to_all"]
    assert len(exchanges) == 4
    assert {op.nbytes for op in exchanges} == {2 * tokens}
    assert exchanges[0].groups == ((0, 2, 4, 6), (1, 3, 5, 7), (8, 10, 12, 14), (9, 11, 13, 15))
    experts = workload.op("ar-experts")
    assert experts.groups[0] == (0, 8)
    assert experts.nbytes == 2 * (8 // 4) * 8 * 2048**2 / 2


def test_parameters_are_used_only_after_their_update() -> None:
    for workload in (st.workloads.resnet("50", ranks=8), st.workloads.gpt("6.7b", ranks=8, layers=4)):
        first = next(op for op in workload.ops if op.phase == "forward" and not op.is_comm)
        reduces = [op.name for op in workload.comm_ops if op.kind in ("all_reduce", "reduce_scatter")]
        before = past(workload, first.name, 5)
        assert (reduces[-1], 4) in before


def test_convolutional_networks_have_their_published_sizes() -> None:
    sizes = {name: sum(block.params for block in cnn.resnet_blocks(name)) for name in RESNET_BLOCKS}
    assert sizes == {"50": 25_557_032, "101": 44_549_160, "152": 60_192_808}
    flops = sum(block.flops for block in cnn.resnet_blocks("50")) / 2
    assert flops == pytest.approx(4.09e9, rel=0.005)
    z = cnn.regnetz_blocks("4gf")
    assert list(cnn.REGNETZ["4gf"].stages()) == [(48, 2), (104, 6), (240, 14), (528, 6)]
    assert sum(block.params for block in z) == pytest.approx(27.1e6, rel=0.002)
    assert sum(block.flops for block in z) / 2 == pytest.approx(4.0e9, rel=0.02)


def test_data_parallel_networks_reduce_in_ddp_buckets() -> None:
    workload = st.workloads.resnet("152", ranks=8)
    assert total(workload, "all_reduce") == 4 * 60_192_808
    sizes = [op.nbytes for op in workload.comm_ops]
    assert sizes[0] == 4 * (2048 * 1000 + 1000)
    assert all(size >= 25 * st.MIB for size in sizes[1:-1])
    half = st.workloads.resnet("152", ranks=8, gradient_bytes=2)
    assert total(half, "all_reduce") == 2 * 60_192_808
    for before, after in zip(workload.comm_ops, workload.comm_ops[1:], strict=False):
        assert workload.index[before.after[0].op] < workload.index[after.after[0].op]


def test_buckets_fill_from_the_last_parameter() -> None:
    assert buckets([5, 5, 5, 5], 10, first_bytes=1) == [[3], [2, 1], [0]]
    assert buckets([100, 1], 10) == [[1, 0]]
    assert buckets([]) == []


def test_whoever_waits_for_a_skipped_collective_waits_for_its_reasons() -> None:
    steps = OpCollector(1)
    steps.compute("a", 1.0, [last("sum")], phase="forward")
    steps.comm("sum", "all_reduce", 8.0, ["a", last("sum")], phase="backward")
    steps.compute("b", 1.0, ["sum"], phase="optimizer")
    workload = steps.workload("x", samples=1, unit="samples", notes=())
    waits: dict[str, Op] = {op.name: op for op in workload.ops}
    assert [(dep.op, dep.lag) for dep in waits["b"].after] == [("a", 0)]
    assert [(dep.op, dep.lag) for dep in waits["a"].after] == [("a", 1)]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("dlrm:A7", "unknown variant of dlrm 'A7'; choose from: A1, A2, A3, A4"),
        ("dlrm:A2,tabels=2", "unknown option of dlrm 'tabels'; choose from: ranks, tables"),
        ("dlrm:A2,ranks", "expected key=value"),
        ("dlrm:A2,ranks=8,ranks=9", "ranks: is given twice"),
        ("dlrm:A2,ranks=0", "ranks: must be a whole number 1..16384, not 0"),
        ("dlrm:A2,ranks=99999999", "ranks: must be a whole number 1..16384"),
        ("dlrm:A2,tables=nan", "tables: nan: must be a number up to 1e+15"),
        ("dlrm:A2,efficiency=2", "efficiency: must be above 0 and at most 1, not 2"),
        ("dlrm:A2,prefetch=1", "prefetch: must be true or false"),
        ("dlrm:A2,device=tpu", "unknown accelerator 'tpu'"),
        ("gpt:13b,ranks=24", "tensor x pipeline: 16 does not divide ranks, which is 24"),
        ("gpt:125m,pipeline=5,ranks=5", "pipeline: 5 does not divide layers, which is 12"),
        ("gpt:125m,mode=zero9", "unknown mode 'zero9'; choose from: ddp, zero1"),
        ("gpt:125m,layers=1000000000", "layers: must be a whole number 1..10000"),
        ("gpt:125m,micro_batches=10000,layers=1000", "over 200000 ops"),
        ("moe:1.3b-8e,experts=3", "expert_parallel: 8 does not divide experts, which is 3"),
        ("moe:1.3b-8e,ranks=4", "expert_parallel: 8 does not divide replicas, which is 4"),
        ("resnet:50,batch=0", "batch: must be a whole number"),
    ],
)
def test_wrong_specs_are_one_line(spec: str, message: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        Workload.load(spec)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_registry_and_the_functions_agree() -> None:
    for name, entry in registry.MODELS.items():
        assert getattr(st.workloads, name) is entry.build
        assert entry.default in entry.variants
        assert "ranks" in entry.options
