# SPDX-License-Identifier: Apache-2.0
"""The plan's file: what is read back, and what is refused."""

from __future__ import annotations

import hashlib
import json
from dataclasses import fields, replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from stretto.cluster import Cluster
from stretto.errors import InvalidInput, PlanMismatch
from stretto.planner.compare import PlanChange, diff
from stretto.planner.plan import MotifPlan, OpPlan, Plan, ProgramPlan, TurnPlan
from stretto.workload import Dep, Op, Workload

STEP = Workload(
    name="step",
    num_ranks=4,
    ops=(
        Op(name="backward", duration_us=10.0),
        Op(name="g", kind="all_reduce", nbytes=8e6, after=(Dep(op="backward"),)),
        Op(name="h", kind="all_to_all", nbytes=4e6, after=(Dep(op="backward"),)),
    ),
)
RING = Cluster.preset("ring", nodes=4)


def motif(seq: int, **rest: Any) -> MotifPlan:
    defaults: dict[str, Any] = {"motif": f"m{seq}", "algorithm": "ring", "channels": ("nvlink",), "nbytes": 4e6}
    return MotifPlan(**{**defaults, "seq": seq, **rest})


def op_plan(name: str, *motifs: MotifPlan, **rest: Any) -> OpPlan:
    defaults = {"kind": "all_reduce", "nbytes": 8e6, "option": "ring on nvlink", "expression": "AR(T)"}
    return OpPlan(**{**defaults, "op": name, "motifs": motifs, **rest})


def plan(*ops: OpPlan, **rest: Any) -> Plan:
    made = ops or (op_plan("g", motif(0), motif(1, after=(0,))), op_plan("h", motif(2, ahead=1), kind="all_to_all"))
    defaults: dict[str, Any] = {
        "name": "stretto", "workload": "step", "workload_digest": STEP.digest, "cluster": "ring",
        "cluster_digest": RING.digest, "iteration_us": 100.0,
    }  # fmt: skip
    return Plan(ops=made, **{**defaults, **rest})


def test_a_saved_plan_is_read_back_with_the_same_hash(tmp_path: Path) -> None:
    made = plan(notes=("one", "zwei ü"), baselines_us={"fifo": 120.0}, bound_us=99.0, bound_by="compute", seed=3)
    made.save(tmp_path / "p.json")
    again = Plan.load(tmp_path / "p.json")
    assert again == made
    assert again.hash == made.hash
    assert again.gap == pytest.approx(1 / 99)
    text = (tmp_path / "p.json").read_text()
    assert text.index('"hash"') < text.index('"workload"') < text.index('"ops"')
    again.save(tmp_path / "q.json")
    assert (tmp_path / "q.json").read_text() == text


def other(value: Any) -> Any:
    """Another valid value of the same type."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, dict):
        return {**value, "more": 1.0}
    if isinstance(value, tuple):
        return (*value, "more")
    return value + ("x" if isinstance(value, str) else 1)


def test_every_field_is_in_the_hash() -> None:
    made = plan(op_plan("g", motif(0), motif(1)))
    hashes = {made.hash}
    for one in fields(Plan):
        if one.name not in ("ops", "programs", "link_turns"):
            hashes.add(replace(made, **{one.name: other(getattr(made, one.name))}).hash)
    op = made.ops[0]
    for one in fields(OpPlan):
        if one.name != "motifs":
            hashes.add(replace(made, ops=(replace(op, **{one.name: other(getattr(op, one.name))}),)).hash)
    for one in fields(MotifPlan):
        changed: Any = (0,) if one.name == "after" else other(getattr(op.motifs[1], one.name))
        motifs = (op.motifs[0], replace(op.motifs[1], **{one.name: changed}))
        hashes.add(replace(made, ops=(replace(op, motifs=motifs),)).hash)
    brought = ProgramPlan(algorithm="a", kind="all_reduce", channels=("net",), groups=((0, 1),), text="t")
    hashes.add(replace(made, programs=(brought,)).hash)
    for one in fields(ProgramPlan):
        changed = ((0, 2),) if one.name == "groups" else other(getattr(brought, one.name))
        hashes.add(replace(made, programs=(replace(brought, **{one.name: changed}),)).hash)
    every = (fields(Plan), fields(OpPlan), fields(MotifPlan), fields(ProgramPlan))
    assert len(hashes) == 1 + sum(map(len, every)) - len(("ops", "motifs", "link_turns"))


def test_a_plan_keeps_the_options_of_its_model_and_plans_without_any_keep_their_hash(tmp_path: Path) -> None:
    turn = TurnPlan(op="h", motif=0, behind="g", behind_motif=0)
    ops = (op_plan("g", motif(0), motif(1)), op_plan("h", motif(2), motif(3)))
    for turns in ((), (turn,)):
        bare = plan(*ops, link_turns=turns)
        whole = replace(bare, workload_spec="dlrm:A2,ranks=16")
        for one in (bare, whole):
            one.save(tmp_path / "p.json")
            assert Plan.load(tmp_path / "p.json") == one
            text = (tmp_path / "p.json").read_text()
            assert ("workload_spec" in text) == bool(one.workload_spec)
            # The hash is that of the file's own fields, so a reader of another version finds the same.
            content = {key: value for key, value in json.loads(text).items() if key not in ("stretto", "version")}
            said = content.pop("hash")
            assert said == hashlib.sha256(json.dumps(content, separators=(",", ":")).encode()).hexdigest()[:16]
        assert bare.hash != whole.hash
    with pytest.raises(InvalidInput, match="workload_spec: at most 4096 characters, not 5000"):
        replace(bare, workload_spec="x" * 5000)


def test_turns_on_links_are_in_the_hash_and_in_the_file_where_there_are_any(tmp_path: Path) -> None:
    ops = (op_plan("g", motif(0), motif(1)), op_plan("h", motif(2), motif(3)))
    turn = TurnPlan(op="h", motif=0, behind="g", behind_motif=0)
    turns = [turn, replace(turn, motif=1), replace(turn, behind_motif=1), replace(turn, lag=1)]
    made = [plan(*ops), *(plan(*ops, link_turns=(one,)) for one in turns)]
    assert len({one.hash for one in made}) == len(made)
    for one in made:
        one.save(tmp_path / "p.json")
        assert Plan.load(tmp_path / "p.json") == one
        assert ("link_turns" in (tmp_path / "p.json").read_text()) == bool(one.link_turns)


@pytest.mark.parametrize(
    ("turn", "message"),
    [
        ({"op": "k"}, "unknown comm-op"),
        ({"behind_motif": 2}, "g has motifs 0..1, not 2"),
        ({"op": "g", "behind": "h"}, "g must come later in the order than what it waits for, h"),
        ({"lag": -1}, "h must come later in the order than what it waits for, g"),
        ({"behind": "h", "motif": 1}, "h must come later in the order than what it waits for, h"),
    ],
)
def test_turns_follow_the_order(turn: dict[str, Any], message: str) -> None:
    ops = (op_plan("g", motif(0), motif(1)), op_plan("h", motif(2), motif(3)))
    with pytest.raises(InvalidInput, match=message):
        plan(*ops, link_turns=(TurnPlan(**{"op": "h", "motif": 0, "behind": "g", "behind_motif": 0, **turn}),))


def saved(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    path = tmp_path / "p.json"
    plan().save(path)
    return path, json.loads(path.read_text())


def refused(path: Path, value: object) -> str:
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    with pytest.raises(InvalidInput) as caught:
        Plan.load(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert "\n" not in message
    return message.removeprefix(f"{path}: ")


def test_a_file_that_was_cut_short_is_refused(tmp_path: Path) -> None:
    path, _ = saved(tmp_path)
    text = path.read_text()
    for end in range(0, len(text) - 2, 97):
        assert "not valid JSON" in refused(path, text[:end])


def test_a_file_that_was_changed_is_refused(tmp_path: Path) -> None:
    path, value = saved(tmp_path)
    value["ops"][0]["motifs"][0]["seq"] = 1
    assert "does not fit the content" in refused(path, value)
    path, value = saved(tmp_path)
    value["hash"] = "0" * 16
    assert refused(path, value).startswith("hash: '0000000000000000' does not fit")
    del value["hash"]
    assert refused(path, value).startswith("hash: None")


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        ({"version": 2}, "version: must be 1, not 2"),
        ({"version": None}, "version: must be 1, not None"),
        ({"stretto": "cluster"}, "not a plan"),
        ({"colour": "red"}, "colour: unknown field 'colour'; choose from: name,"),
        ({"ops": None}, "$.ops: must be a list"),
        ({"ops": {}}, "$.ops: must be a list"),
        ({"iteration_us": -1.0}, "iteration_us: must be a number >= 0, not -1.0"),
        ({"iteration_us": 1e300}, "iteration_us: must be a number >= 0, not 1e+300"),
        ({"iteration_us": "fast"}, "$.iteration_us: must be a number"),
        ({"iteration_us": None}, "$.iteration_us: must be a number"),
        ({"baselines_us": {"fifo": -1}}, "baselines_us['fifo']: must be a number >= 0"),
        ({"seed": 1.5}, "$.seed: must be a whole number"),
    ],
)
def test_wrong_fields_are_named(tmp_path: Path, edit: dict[str, Any], message: str) -> None:
    path, value = saved(tmp_path)
    assert refused(path, {**value, **edit}).startswith(message)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        ({"channels": []}, "channels: must not be empty"),
        ({"seq": -1}, "seq: must be 0.."),
        ({"seq": 10**30}, "seq: must be 0.."),
        ({"ahead": 10**9}, "ahead: must be within 64 iterations, not 1000000000"),
        ({"after": [0]}, "after: must name earlier motifs of the op"),
        ({"after": [-1]}, "after: must name earlier motifs of the op"),
        ({"duration_us": 1e200}, "duration_us: must be a number >= 0"),
        ({"start_us": -0.5}, "start_us: must be a number >= 0"),
    ],
)
def test_wrong_motifs_are_named(tmp_path: Path, edit: dict[str, Any], message: str) -> None:
    path, value = saved(tmp_path)
    value["ops"][0]["motifs"][0].update(edit)
    assert refused(path, value).startswith(f"ops[0] (g).motifs[0].{message}")


def test_what_no_field_takes_is_refused_at_every_level(tmp_path: Path) -> None:
    path, value = saved(tmp_path)
    value["ops"][1]["color"] = 1
    assert refused(path, value).startswith("ops[1].color: unknown field 'color'; choose from: op, kind,")
    path, value = saved(tmp_path)
    value["ops"][1]["motifs"][0]["color"] = 1
    assert refused(path, value).startswith("ops[1].motifs[0].color: unknown field")


def test_numbers_that_are_none_are_refused(tmp_path: Path) -> None:
    path, value = saved(tmp_path)
    text = json.dumps(value)
    for bad in ("NaN", "Infinity", "1e999", "-1e999"):
        assert "JSON" in refused(path, text.replace('"iteration_us": 100.0', f'"iteration_us": {bad}'))
    with pytest.raises(InvalidInput, match="iteration_us: must be a number >= 0, not nan"):
        plan(iteration_us=float("nan"))
    with pytest.raises(InvalidInput, match="retimed_us: must be a number >= 0, not inf"):
        plan(retimed_us=float("inf"))


def test_ops_are_unique_and_have_motifs(tmp_path: Path) -> None:
    path, value = saved(tmp_path)
    value["ops"][1]["op"] = "g"
    assert refused(path, value) == "ops[1] (g).op: is there twice"
    path, value = saved(tmp_path)
    value["ops"][1]["motifs"] = []
    assert refused(path, value) == "ops[1] (h).motifs: must not be empty"


def test_other_files_are_not_plans(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    for text in ("[]", "3", '"plan"', "{}", "null"):
        assert refused(path, text).startswith("not a plan")
    assert "not valid JSON" in refused(path, "[" * 100_000)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidInput, match="not a UTF-8 text file"):
        Plan.load(path)
    with pytest.raises(InvalidInput, match="No such file"):
        Plan.load(tmp_path / "none.json")


def test_no_change_of_a_byte_goes_unnoticed(tmp_path: Path) -> None:
    path, _ = saved(tmp_path)
    text = path.read_bytes()
    made = Plan.load(path)
    draw = Random(7)
    for _ in range(400):
        at = draw.randrange(len(text))
        path.write_bytes(text[:at] + bytes([draw.randrange(32, 127)]) + text[at + draw.randrange(3) :])
        try:
            again = Plan.load(path)
        except InvalidInput as error:
            assert "\n" not in str(error)
        else:
            assert again == made  # only space between fields was changed


def test_a_plan_knows_what_it_was_made_for() -> None:
    made = plan()
    made.check(STEP, RING)
    longer = replace(STEP, ops=(replace(STEP.ops[0], duration_us=11.0), *STEP.ops[1:]))
    with pytest.raises(PlanMismatch, match=f"was made for workload step \\({STEP.digest}\\), not for step"):
        made.check(longer)
    with pytest.raises(PlanMismatch, match="was made for cluster ring"):
        made.check(STEP, Cluster.preset("ring", nodes=5))


def test_an_op_is_found_by_its_name() -> None:
    made = plan()
    assert made.op("h").motifs[0].ahead == 1
    assert made.op("g").channels == ("nvlink",)
    with pytest.raises(InvalidInput, match="unknown comm-op 'x'; choose from: g, h"):
        made.op("x")
    assert made.num_motifs == 3
    assert repr(made).startswith("<Plan stretto for step on ring: 2 comm-ops in 3 motifs, 100 us per iteration")


def test_two_plans_differ_in_what_they_decide() -> None:
    old = plan()
    assert diff(old, replace(old, seed=7, made_by="somebody else")) == []
    new = plan(
        op_plan("g", motif(1, channels=("pcie",)), option="ring on pcie"), op_plan("h", motif(0), kind="all_to_all")
    )
    assert diff(old, new) == [
        PlanChange(op="g", what="option", before="ring on nvlink", after="ring on pcie"),
        PlanChange(op="g", what="motifs", before="2", after="1"),
        PlanChange(op="g", what="channels", before="nvlink", after="pcie"),
        PlanChange(op="h", what="iterations ahead", before="+1", after="0"),
        PlanChange(op="g", what="turn", before="first", after="after h"),
    ]
    with pytest.raises(PlanMismatch, match="the plans are for different workloads: step"):
        diff(old, replace(old, workload_digest="other"))


def test_only_what_moved_is_said_to_have_moved() -> None:
    old = plan(*(op_plan(f"o{at}", motif(at)) for at in range(6)))
    turns = [5, 0, 1, 2, 3, 4]
    new = plan(*(op_plan(f"o{name}", motif(at)) for at, name in enumerate(turns)))
    assert [(c.op, c.what, c.before, c.after) for c in diff(old, new)] == [("o5", "turn", "after o4", "first")]


def test_an_op_that_only_one_plan_has_is_shown_against_nothing() -> None:
    one, both = plan(op_plan("g", motif(0))), plan(op_plan("g", motif(0)), op_plan("h", motif(1)))
    assert {(c.op, c.before) for c in diff(one, both)} == {("h", "")}
    assert {(c.op, c.after) for c in diff(both, one)} == {("h", "")}
