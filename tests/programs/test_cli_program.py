# SPDX-License-Identifier: Apache-2.0
"""``stretto program``: prove, show, convert and run files; one line and exit code 2 when something is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from stretto import AllGather, Permute, Program
from stretto.cli import run
from stretto.programs.formats import load_program, save_program

Build = Callable[..., Program]
Capture = pytest.CaptureFixture[str]
DATA = Path(__file__).parent / "data"


@pytest.fixture
def ring(tmp_path: Path, build: Build) -> Path:
    path = tmp_path / "ring.txt"
    save_program(build("ring_all_gather", 4), path)
    return path


def stretto(capture: Capture, *arguments: object) -> str:
    """What a command that works prints."""
    assert run(["program", *map(str, arguments)]) == 0
    shown = capture.readouterr()
    assert shown.err == ""
    return shown.out


def refused(capture: Capture, *arguments: object) -> str:
    """The one line of a command that does not work."""
    assert run(["program", *map(str, arguments)]) == 2
    line = capture.readouterr().err
    assert line.count("\n") == 1
    return line


def test_verify_says_what_was_proved(ring: Path, capsys: Capture) -> None:
    text = stretto(capsys, "verify", ring)
    assert "right: ring_all_gather: all_gather over 4 ranks, 12 transfers" in text
    assert "cannot deadlock with FIFO depth 1" in text


def test_verify_says_where_a_file_is_wrong(capsys: Capture) -> None:
    wrong = DATA / "msccl" / "wrong_twice.xml"
    assert "rank 0 tb 0 step 3 (re) adds rank 1's part" in refused(capsys, "verify", wrong)


def test_verify_judges_many_files(ring: Path, capsys: Capture) -> None:
    wrong = DATA / "msccl" / "wrong_missing.xml"
    assert run(["program", "verify", str(ring), str(wrong)]) == 2
    shown = capsys.readouterr()
    assert f"{ring}: right" in shown.out
    assert f"{wrong}: WRONG: missing: rank 0 ends without chunk 0" in shown.out
    assert "1 of 2 files are wrong" in shown.err


def test_show_prints_the_text_form_and_one_ranks_transfers(ring: Path, capsys: Capture) -> None:
    assert stretto(capsys, "show", ring) == ring.read_text()
    mine = stretto(capsys, "show", ring, "--rank", "2")
    assert "1: 1>2 c1\n" in mine
    assert "0: 0>1 c0\n" not in mine


def test_show_prints_streams(ring: Path, capsys: Capture) -> None:
    lowered = stretto(capsys, "show", ring, "--lower", "--rank", "0")
    assert "rank 0 tb 0: from 3 to 1, channel 0" in lowered
    assert "rank 1" not in lowered
    assert "from 3" in lowered
    xml = stretto(capsys, "show", DATA / "msccl" / "ring_all_reduce_3_old.xml")
    assert "rrcs" in xml
    assert "i[0]" in xml
    assert "rank 2 tb 0" in xml


def test_show_prints_plans(ring: Path, tmp_path: Path, capsys: Capture) -> None:
    plan = tmp_path / "ring.json"
    stretto(capsys, "convert", ring, plan)
    text = stretto(capsys, "show", plan, "--rank", "1")
    assert "rank 1 tb 0" in text
    assert "signal" in text


@pytest.mark.parametrize("ending", ["xml", "json"])
@pytest.mark.parametrize("place", ["--in-place", "--out-of-place"])
def test_convert_run_and_verify_work_on_every_format(
    ring: Path, tmp_path: Path, ending: str, place: str, capsys: Capture
) -> None:
    target = tmp_path / f"out.{ending}"
    shown = stretto(capsys, "convert", ring, target, place, "--instances", "2")
    assert f"{target}: ring_all_gather" in shown
    assert "2 channels" in shown
    stretto(capsys, "verify", target)
    assert "right" in stretto(capsys, "run", target)


def test_convert_changes_the_dialect(tmp_path: Path, capsys: Capture) -> None:
    new, old = DATA / "msccl" / "ring_all_gather_3_new.xml", tmp_path / "old.xml"
    stretto(capsys, "convert", new, old, "--dialect", "old", "--protocol", "LL")
    assert "outofplace" not in old.read_text()
    assert 'proto="LL"' in old.read_text()
    back = tmp_path / "new.xml"
    stretto(capsys, "convert", old, back, "--protocol", "Simple")
    assert back.read_text() == new.read_text()


def test_convert_writes_size_range_and_protocol(ring: Path, tmp_path: Path, capsys: Capture) -> None:
    target = tmp_path / "out.xml"
    stretto(capsys, "convert", ring, target, "--min-bytes", "1K", "--max-bytes", "4MiB", "--protocol", "LL128")
    head = target.read_text().splitlines()[0]
    assert 'minBytes="1000" maxBytes="4194304"' in head
    assert 'proto="LL128"' in head


def test_convert_to_text_keeps_the_program(ring: Path, tmp_path: Path, capsys: Capture) -> None:
    target = tmp_path / "copy.prog"
    stretto(capsys, "convert", ring, target, "--in-place")
    copy = load_program(target)
    assert isinstance(copy, Program)
    assert copy.collective == AllGather(4, in_place=True)


def test_wrong_programs_are_not_converted(tmp_path: Path, capsys: Capture) -> None:
    target = tmp_path / "out.xml"
    message = refused(capsys, "convert", DATA / "msccl" / "wrong_race.xml", target)
    assert "rank 0 tb 1 step 0" in message
    assert not target.exists()


@pytest.mark.parametrize("op", ["sum", "max", "min", "prod"])
def test_run_compares_with_the_right_answer(op: str, capsys: Capture) -> None:
    file = DATA / "ring_all_reduce_3.txt"
    text = stretto(capsys, "run", file, "--op", op, "--fifo-depth", "1", "--seed", "5")
    assert f"all 9 output chunks are right ({op})" in text


def test_run_reports_a_deadlock(capsys: Capture) -> None:
    fused = DATA / "msccl" / "ring_all_gather_3_new.xml"
    assert "deadlock with FIFO depth 1" in refused(capsys, "run", fused, "--fifo-depth", "1")


def test_custom_files_need_their_collective(tmp_path: Path, capsys: Capture) -> None:
    exchange = Permute(2, [(0, 1), (1, 0)])
    program = Program.from_steps("swap", exchange, src=[0, 1], dst=[1, 0], chunk=[0, 1], step=0)
    target = tmp_path / "swap.xml"
    save_program(program, target, dialect="old")
    assert "give the collective" in refused(capsys, "verify", target)
    assert run(["program", "verify", str(target), str(target)]) == 2
    shown = capsys.readouterr()
    assert f"{target}: cannot judge: algo coll: custom" in shown.out and "WRONG" not in shown.out
    assert "2 of 2 files do not say what is to be proved" in shown.err
    wanted = tmp_path / "swap.yaml"
    wanted.write_text(
        "stretto: collective\nversion: 1\nkind: custom\nranks: 2\nnum_chunks: 2\n"
        "start:\n- [0]\n- [1]\nend:\n- [1]\n- [0]\n"
    )
    assert "right" in stretto(capsys, "verify", target, "--collective", wanted)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["verify", "nothing.txt"], "nothing.txt: No such file"),
        (["show", "{ring}", "--rank", "4"], "--rank: must be 0..3, not 4"),
        (["convert", "{ring}", "out.yaml"], "out.yaml: unknown ending '.yaml'; choose from: .txt, .prog, .xml, .json"),
        (["convert", "{ring}", "out.xml", "--dialect", "ancient"], "unknown dialect 'ancient'; choose from: new, old"),
        (["convert", "{ring}", "out.xml", "--instances", "0"], "instances: must be 1..256, not 0"),
        (["convert", "{ring}", "out.xml", "--min-bytes", "x"], "size 'x': expected a number"),
        (["convert", "{ring}", "out.txt", "--instances", "2"], "--instances: the text form knows nothing of it"),
        (["convert", "{ring}", "out.json", "--dialect", "old"], "--dialect: only MSCCL XML has it"),
        (["convert", "{xml}", "out.xml", "--fifo-depth", "2"], "--fifo-depth: instruction streams cannot be low"),
        (["convert", "{ring}", "out.xml", "--zero-copy"], "--zero-copy: only an MSCCL++ plan (.json) has it"),
        (["convert", "{ring}", "out.json", "--hosts", "0,a"], "--hosts: '0,a' is not a list of host numbers"),
        (["convert", "{ring}", "out.json", "--hosts", "0,1"], "hosts: must give the host of each of the 4 ranks"),
        (["run", "{ring}", "--op", "avg"], "unknown op 'avg'; choose from: sum, prod, max, min"),
        (["run", "{ring}", "--fifo-depth", "0"], "--fifo-depth: must be >= 1, not 0"),
    ],
)
def test_mistakes_are_one_line(ring: Path, capsys: Capture, arguments: list[str], message: str) -> None:
    xml = DATA / "msccl" / "ring_all_gather_3_new.xml"
    assert message in refused(capsys, *(a.format(ring=ring, xml=xml) for a in arguments))


def test_plans_use_ports_between_hosts(ring: Path, tmp_path: Path, capsys: Capture) -> None:
    plan = tmp_path / "ring.json"
    stretto(capsys, "convert", ring, plan, "--hosts", "0,0,1,1", "--zero-copy")
    kinds = {channel["channel_type"] for gpu in json.loads(plan.read_text())["gpus"] for channel in gpu["channels"]}
    assert kinds == {"memory", "port"}
    assert "right and free of races" in stretto(capsys, "run", plan)


def test_plans_cannot_be_converted_back(ring: Path, tmp_path: Path, capsys: Capture) -> None:
    plan = tmp_path / "ring.json"
    stretto(capsys, "convert", ring, plan)
    assert "cannot be converted back" in refused(capsys, "convert", plan, tmp_path / "x.xml")
    assert "out of place calls only" in refused(capsys, "verify", plan, "--in-place")


@pytest.mark.parametrize("command", ["verify", "show", "convert", "run"])
def test_help_teaches_with_examples(command: str, capsys: Capture) -> None:
    text = stretto(capsys, command, "--help")
    assert "Example" in text
    assert f"stretto program {command} " in text
