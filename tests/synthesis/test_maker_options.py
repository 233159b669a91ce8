# SPDX-License-Identifier: Apache-2.0
"""Makers get exactly the options that are meant for them; any other option is an error that names it."""

from __future__ import annotations

import inspect
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import stretto as st
from stretto.cli import run
from stretto.collectives import COLLECTIVES
from stretto.errors import Infeasible, InvalidInput
from stretto.programs.formats import save_program
from stretto.synthesis import synthesize
from stretto.synthesis.makers import LIBRARY, makers
from stretto.synthesis.sketch import Sketch

SHARED = {"nbytes", "budget_s", "seed", "progress", "alpha"}
READS = {
    "symmetric": {"contention"},
    "flow": {"contention"},
    "repair": {"helpers", "base"},
    "steiner": {"helpers"},
    "three_stage": {"sketch"},
}
"""What a maker takes of the problem beside what all of them take."""
MAKERS = {name: maker for name, maker in makers().items() if name != LIBRARY}
SAMPLES: dict[str, dict[str, tuple[str, Any]]] = {
    "symmetric": {"pieces": ("1,2", [1, 2])},
    "compose": {"pieces": ("1,2", [1, 2])},
    "exchange": {},
    "phases": {},
    "timetable": {},
    "rails": {"max_transfers": ("500", 500)},
    "exact": {"solver": ("highs", "highs"), "channels": ("dim0", ["dim0"])},
    "flow": {"pieces": ("4", 4)},
    "forest": {
        "max_k": ("2", 2), "max_height": ("3", 3), "max_transfers": ("500", 500), "multicast": ("false", False),
    },
    "greedy": {"pieces": ("8", [8]), "symmetric": ("true", True)},
    "repair": {"max_transfers": ("500", 500)},
    "steiner": {"max_transfers": ("500", 500)},
    "tree_pairs": {"max_transfers": ("500", 500), "max_steps": ("64", 64)},
    "three_stage": {"solver": ("highs", "highs"), "solutions": ("2", 2), "detour": ("0.25", 0.25)},
}  # fmt: skip
"""A value for every option of every maker, as a command line and as Python gives it."""
KINDS = {
    "flow": "all_to_all", "phases": "all_to_all", "exchange": "all_reduce", "timetable": "all_reduce",
    "rails": "all_reduce", "tree_pairs": "all_reduce",
}  # fmt: skip
CLUSTERS = {"steiner": "ring:5", "phases": "fat_tree:4", "rails": "dgx_h100:3"}
"""A device more than take part, for the maker that asks devices outside the group for help; a tree of switches."""


def synthesize_of(name: str) -> Any:
    return import_module(f"stretto.synthesis.{name}").synthesize


@pytest.mark.parametrize("name", MAKERS)
def test_what_a_maker_declares_is_what_its_function_takes(name: str) -> None:
    maker = MAKERS[name]
    parameters = inspect.signature(synthesize_of(name)).parameters
    keywords = {key for key, p in parameters.items() if p.kind is p.KEYWORD_ONLY}
    declared = [*SHARED, *READS.get(name, ()), *maker.options]
    assert len(declared) == len(set(declared))
    assert keywords == set(declared)
    assert set(SAMPLES[name]) == set(maker.options)


@pytest.mark.parametrize("name", MAKERS)
def test_a_maker_gets_its_options_and_no_others(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: list[dict[str, Any]] = []

    def record(collective: object, cluster: object, **given: Any) -> None:
        calls.append(given)
        raise Infeasible("was only listened to")

    monkeypatch.setattr(f"stretto.synthesis.{name}.synthesize", record)
    old = st.algorithm("ring", "all_gather", 4)
    save_program(old, tmp_path / "old.txt")
    begin = ["--from", str(tmp_path / "old.txt")] if name == "repair" else []
    kind, ring = KINDS.get(name, "all_gather"), CLUSTERS.get(name, "ring:4")
    ranks = 24 if name == "rails" else 4
    for text_or_value in (0, 1):
        given = {key: sample[text_or_value] for key, sample in SAMPLES[name].items()}
        if text_or_value == 0:
            settings = [part for key, text in given.items() for part in ("--set", f"{name}.{key}={text}")]
            command = ["synth", kind, "-c", ring, "--ranks", str(ranks), "--makers", name, "--no-cache"]
            physics = ["--contention", "fair", "--alpha", "blocking"]
            assert run([*command, *settings, *physics, "--budget", "1", "--helpers", "all", *begin]) == 2
        else:
            with pytest.raises(Infeasible, match="was only listened to"):
                synthesize(
                    COLLECTIVES[kind](ranks), st.Cluster.load(ring), 4e6, makers=[name], cache=False,
                    maker_options={name: given}, contention="fair", alpha="blocking", helpers="all",
                    base=old if begin else None,
                )  # fmt: skip
        call = calls[-1]
        assert set(call) == SHARED | READS.get(name, set()) | set(given)
        assert {key: call[key] for key in given} == {key: SAMPLES[name][key][1] for key in given}
        assert call["alpha"] == "blocking"
        assert call.get("contention", "fair") == "fair"


WRONG = sorted({"nonsense", *SHARED, "sketch", *(key for maker in MAKERS.values() for key in maker.options)})


@pytest.mark.parametrize("name", makers())
def test_an_option_that_a_maker_does_not_have_is_an_error(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Also one that another maker has, or that all of them share."""
    known = makers()[name].options
    for option in WRONG:
        if option in known:
            continue
        choices = f"choose from: {', '.join(known)}" if known else "this maker has no options"
        assert run(["synth", "allgather", "-c", "ring:4", "--set", f"{name}.{option}=1"]) == 2
        said = capsys.readouterr().err
        assert said.count("\n") == 1
        assert f"option of {name} '{option}'" in said or f"option '{option}' of {name}" in said
        assert choices in said
        with pytest.raises(InvalidInput, match="option") as caught:
            synthesize(st.AllGather(4), st.Cluster.load("ring:4"), 1e6, maker_options={name: {option: 1}})
        assert str(caught.value) in said


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["--set", "wood.max_k=1"], "unknown maker 'wood'; choose from: library, symmetric, exchange, steiner"),
        (["--set", "forest.max_k=0"], "option max_k of forest: must be a whole number >= 1, not '0'"),
        (["--set", "forest.max_k=few"], "option max_k of forest: must be a whole number, not 'few'"),
        (["--set", "greedy.pieces=1,x"], "option pieces of greedy: $[1]: must be a whole number"),
        (["--set", "exact.solver=gurobi"], "option solver of exact: unknown value 'gurobi'"),
        (["--set", "max_k=1"], "--set 'max_k=1': expected MAKER.KEY=VALUE, such as forest.max_k=4"),
        (["--set", "forest.max_k=1", "--set", "forest.max_k=2"], "forest.max_k is given twice"),
        (["--set", "forest.max_k=1", "--makers", "greedy"], "options of forest: it is not among the makers that are"),
        (["--set", "flow.pieces=1"], "options of flow: it does not do all_gather"),
        (["--set", "exact.channels=dim0,wire"], "unknown channel in options of exact 'wire'; choose from: dim0"),
    ],
)
def test_wrong_settings_are_one_line(settings: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["synth", "allgather", "-c", "ring:4", "--no-cache", *settings]) == 2
    said = capsys.readouterr()
    assert message in said.err
    assert said.err.count("\n") == 1
    assert said.out == ""


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"maker_options": {"forest": 5}}, "maker_options: must be like"),
        ({"maker_options": ["forest"]}, "maker_options: must be like"),
        ({"makers": "forest"}, "makers: must be like"),
        ({"makers": [5]}, "makers: must be like"),
    ],
)
def test_options_and_names_of_another_form_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        synthesize(st.AllGather(4), st.Cluster.load("ring:4"), 1e6, **given)


def test_options_of_a_maker_that_is_left_out_for_its_size_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stretto.synthesis.makers.MAX_WHOLE_MOVES", 1000)
    with pytest.raises(InvalidInput, match="options of greedy: it moves 66306 chunks, written out for all ranks"):
        synthesize(st.AllGather(258), st.Cluster.load("ring:258"), 1e6, maker_options={"greedy": {"pieces": 1}})


def test_a_sketch_that_no_maker_would_follow_is_refused() -> None:
    ring = st.Cluster.load("ring:4")
    with pytest.raises(InvalidInput, match="sketch: of the makers only three_stage follows one, and is not asked"):
        synthesize(st.AllGather(4), ring, 1e6, sketch=Sketch(), makers=["forest", "greedy"])
    with pytest.raises(InvalidInput, match="sketch: three_stage does not do broadcast"):
        synthesize(st.Broadcast(4), ring, 1e6, sketch=Sketch())


def test_options_change_what_is_made() -> None:
    ring = st.Cluster.load("ring:4")
    made = [
        synthesize(st.AllGather(4), ring, 4e6, makers=["greedy"], cache=False, budget_s=1, maker_options=options)
        for options in ({"greedy": {"pieces": [1]}}, {"greedy": {"pieces": [4]}})
    ]  # fmt: skip
    assert made[0].program.collective.chunks != made[1].program.collective.chunks
