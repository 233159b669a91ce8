# SPDX-License-Identifier: Apache-2.0
"""The text form: exact in both directions, readable, and clear about what it cannot read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto import AllGather, AllReduce, AllToAllV, Collective, InvalidInput, Permute, Program
from stretto.programs.formats import load_program, save_program, sniff
from stretto.programs.formats.text import dumps, loads

Build = Callable[..., Program]
DATA = Path(__file__).parent / "data"
NOTHING = np.zeros(0, np.int32)


def empty(collective: Collective, name: str = "empty") -> Program:
    return Program.from_steps(name, collective, src=NOTHING, dst=NOTHING, chunk=NOTHING, step=NOTHING)


@pytest.mark.parametrize("in_place", [False, True])
def test_programs_survive_the_round_trip(build: Build, maker: str, in_place: bool) -> None:
    for k in (1, 3):
        program = build(maker, 4, k=k, in_place=in_place)
        text = dumps(program)
        assert loads(text) == program
        assert dumps(loads(text)) == text
        assert "explicit" not in text


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 1 << 30))
def test_random_programs_survive_the_round_trip(make_random_program: Callable[[int], Program], seed: int) -> None:
    program = make_random_program(seed)
    assert loads(dumps(program)) == program


@pytest.mark.parametrize(
    ("file", "name", "ranks", "options"),
    [
        ("ring_all_reduce_3", "ring_all_reduce", 3, {}),
        ("strided_halving_doubling_4", "strided_halving_doubling", 4, {"k": 2, "in_place": True}),
    ],
)
def test_golden_texts(build: Build, file: str, name: str, ranks: int, options: dict[str, int]) -> None:
    assert dumps(build(name, ranks, **options)) == (DATA / f"{file}.txt").read_text()


def test_routes_lanes_and_digest_are_kept() -> None:
    program = Program.from_steps(
        "routed",
        AllGather([4, 9]),
        src=[0, 1],
        dst=[1, 0],
        chunk=[0, 1],
        step=0,
        lane=[3, 0],
        route=[1, -1],
        routes=[(5,), (0, 7, 8, 9)],
        routes_digest="abc",
    )
    text = dumps(program)
    assert "collective all_gather devices 4,9 chunks 1" in text
    assert "routes abc\nroute 0: 5\nroute 1: 0,7-9\n" in text
    assert "0: 0>1 c0 lane 3 via 1\n1: 1>0 c1\n" in text
    assert loads(text) == program


@given(name=st.text(max_size=30), kind=st.text(max_size=10))
def test_any_name_and_kind_is_kept(name: str, kind: str) -> None:
    program = empty(replace(_odd(), kind=kind), name)
    assert loads(dumps(program)) == program


def _odd() -> Collective:
    """Conditions that no constructor of the library would give."""
    return Collective(
        kind="odd",
        ranks=(3, 1),
        num_chunks=4,
        chunks=1,
        in_ptr=np.array([0, 3, 5]),
        in_chunk=np.array([0, 1, 2, 2, 3], np.int32),
        in_part=np.array([0, 0, 1, 0, 7], np.int32),
        out_ptr=np.array([0, 2, 2]),
        out_chunk=np.array([3, 2], np.int32),
        out_set=np.array([0, -1], np.int32),
        chunk_share=np.array([0.1, 0.1, 1 / 3, 0.25]),
        place=np.array([-1, 4]),
        part_sets=((7,), (0, 1, 2, 5)),
        in_place=True,
        root=1,
    )


def test_conditions_without_a_name_are_written_out() -> None:
    text = dumps(empty(_odd()))
    assert text.splitlines()[2:] == [
        'collective explicit "odd" devices 3,1 num_chunks 4 chunks 1 root 1 in-place',
        "share 0.1*2 0.3333333333333333 0.25",
        "place -1 4",
        "set 0: 7",
        "set 1: 0-2,5",
        "input 0: c0.0 c1.0 c2.1",
        "input 1: c2.0 c3.7",
        "output 0: c3:0 c2",
        "output 1:",
    ]
    assert loads(text).collective == _odd()


def test_a_known_kind_with_another_layout_is_not_taken_for_the_known_one() -> None:
    odd = replace(AllReduce(2, chunks=2), out_chunk=np.array([1, 0, 1, 0], np.int32))
    assert loads(dumps(empty(odd))).collective == odd
    assert "explicit" in dumps(empty(odd))


@pytest.mark.parametrize(
    "collective",
    [
        AllToAllV(3, [[0, 1, 2], [3, 0, 1], [1, 1, 0]], chunks=2),
        AllToAllV(2, [[0.5, 0.25], [0, 0.125]]),
        Permute(4, [(0, 2), (3, 0)], chunks=3),
    ],
)
def test_unequal_collectives_are_named_by_counts_and_pairs(collective: Collective) -> None:
    text = dumps(empty(collective))
    assert "explicit" not in text
    assert loads(text).collective == collective


def test_counts_that_are_no_small_fractions_are_written_out() -> None:
    collective = AllToAllV(2, [[0.0, 0.1234567], [0.7654321, 0.3333]])
    assert loads(dumps(empty(collective))).collective == collective


def test_comments_and_blank_lines_are_skipped() -> None:
    text = "# a pair\n\nstretto-program 1\nname p\ncollective all_gather ranks 2 chunks 1\n\n0: 0>1 c0\n# done\n"
    assert loads(text).num_transfers == 1


HEAD = "stretto-program 1\nname p\ncollective all_gather ranks 2 chunks 1\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "p.txt line 1: the file ends too early"),
        ("stretto-program 2\n", "p.txt line 1: version '2' is not known; this reads version 1"),
        ("stretto-program 1\nname x\n", "the file ends too early"),
        ("stretto-program 1\ncollective x\n", "p.txt line 2: expected 'name ...'"),
        ('stretto-program 1\nname "x\ncollective x\n', "p.txt line 2: not a quoted text"),
        (HEAD.replace("all_gather", "all_gathr"), "p.txt line 3: collective: unknown collective 'all_gathr'; choose"),
        (HEAD.replace("ranks 2", "ranks x"), "p.txt line 3: ranks: expected a whole number, not 'x'"),
        (HEAD.replace("ranks 2", "ranks 999999999"), r"p.txt line 3: ranks: must be 1\.\."),
        (HEAD.replace("chunks 1", "chunks 999999999"), r"p.txt line 3: collective: chunks: must be 1\.\."),
        (HEAD.replace("ranks 2", "ranks 99999"), "p.txt line 3: collective: chunks: 99999 ranks with"),
        (HEAD.replace("chunks 1", "pieces 1"), "p.txt line 3: collective: unknown word 'pieces'; choose from: ranks"),
        (HEAD.replace("all_gather", "broadcast") + "", "p.txt line 3: collective: root: must be a rank"),
        (HEAD + "1: 0>1 c0\n", "p.txt line 4: expected transfer 0, not 1"),
        (HEAD + "0: 0-1 c0\n", r"p.txt line 4: expected 'N: SRC>DST \[\+\]cCHUNKS"),
        (HEAD + "0: 0>1 c0 lane 1 after 2\n", "p.txt line 4: expected 'N: SRC>DST"),
        (HEAD + "0: 0>1 c2\n", r"p.txt line 4: '2': must be within 0\.\.1"),
        (HEAD + "0: 0>1 c0-999999999\n", r"p.txt line 4: '0-999999999': must be within 0\.\.1"),
        (HEAD + "0: 0>1 c1-0\n", r"p.txt line 4: '1-0': must be within 0\.\.1"),
        (HEAD + "0: 0>1 c0 after 5-900000000\n", r"p.txt line 4: '5-900000000': must be within"),
        (HEAD + "0: 0>1 c0 lane 40000\n", r"p.txt line 4: lane: must be 0\.\.32767, not 40000"),
        (HEAD + "0: 0>0 c0\n", "p.txt: transfers.0.: rank 0 cannot send to itself"),
        (HEAD + "0: 0>1 c0 via 0\n", "p.txt: transfers: lane must be >= 0 and route -1"),
        (HEAD + "route 1: 3\n", "p.txt line 4: expected route 0, not '1'"),
    ],
)
def test_errors_name_the_line(text: str, message: str) -> None:
    with pytest.raises(InvalidInput, match=message) as error:
        loads(text, where="p.txt")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("share 0.1*2 0.5", "expected 4 numbers, not 3"),
        ("share 0.1*900000000", "expected 4 numbers, not more"),
        ("share a*4", "expected numbers, not 'a'"),
        ("input 1: c0", "expected input 0, not '1'"),
        ("output 0: c9", r"'9': must be within 0\.\.3"),
    ],
)
def test_errors_in_explicit_conditions_name_the_line(line: str, message: str) -> None:
    word, number = line.split()[0], line.split()[1] if line.startswith("output") else ""
    lines = dumps(empty(_odd())).splitlines()
    at = next(i for i, old in enumerate(lines) if old.startswith(f"{word} {number}".rstrip()))
    lines[at] = line
    with pytest.raises(InvalidInput, match=f"p.txt line {at + 1}: {message}"):
        loads("\n".join(lines), where="p.txt")


def test_files_are_told_apart_by_content(tmp_path: Path, build: Build) -> None:
    program = build("ring_all_gather", 3)
    for ending, kind in ((".txt", "text"), (".prog", "text"), (".xml", "msccl"), (".json", "mscclpp")):
        path = tmp_path / f"ring{ending}"
        save_program(program, path)
        assert sniff(path.read_text()) == kind
        loaded = load_program(path.rename(tmp_path / f"{kind}.any"))
        assert loaded == program if kind == "text" else loaded.name.startswith(program.name)
    with pytest.raises(InvalidInput, match=r"unknown ending '.yaml'; choose from: .txt, .prog, .xml, .json"):
        save_program(program, tmp_path / "ring.yaml")
    with pytest.raises(InvalidInput, match="instruction streams have no text form"):
        save_program(program.lower(), tmp_path / "ring.txt")
    with pytest.raises(InvalidInput, match="No such file"):
        load_program(tmp_path / "nothing.txt")
    with pytest.raises(InvalidInput, match="No such file"):
        save_program(program, tmp_path / "no" / "ring.txt")


def test_errors_in_files_name_the_file(tmp_path: Path) -> None:
    path = tmp_path / "x.xml"
    for content, message in (("hello", "not a program"), ("<algo/>", "attribute ngpus is missing")):
        path.write_text(content)
        with pytest.raises(InvalidInput, match=f"x.xml: .*{message}"):
            load_program(path)
