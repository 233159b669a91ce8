# SPDX-License-Identifier: Apache-2.0
"""``stretto cluster``: each command does what its help says."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

import stretto as st
from stretto import Cluster, InvalidInput
from stretto.cli import run as stretto_command
from stretto.cli.cluster import app
from stretto.cluster.presets import presets

DATA = Path(__file__).parent / "data"


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


def test_list_names_every_preset() -> None:
    text = run("list")
    for entry in presets():
        assert entry.name in text


def test_show_draws_in_the_terminal() -> None:
    text = run("show", "ndv2:2")
    assert "hosts 0 1 (2 alike)" in text
    assert "43.48 GB/s" in text


def test_show_writes_svg(tmp_path: Path) -> None:
    path = tmp_path / "x.svg"
    assert run("show", "dgx2:2", "-o", str(path)).startswith("wrote")
    assert ElementTree.parse(path).getroot().tag.endswith("svg")


def test_check_says_what_is_odd() -> None:
    text = run("check", "ndv2_teccl:2")
    assert "ndv2_teccl:2: valid, 16 devices that all reach each other" in text
    assert "channel nvlink joins groups of 2 x 8 devices by itself" in text
    assert "odd: 2 links have no link back" in text
    assert "channel ethernet joins no devices by itself" in run("check", "hgx2:2")


def test_check_refuses_devices_that_cannot_reach_each_other(tmp_path: Path) -> None:
    path = tmp_path / "islands.yaml"
    path.write_text(
        "stretto: cluster\nversion: 1\nname: islands\nnodes: [{kind: device, names: 'd[0..2]'}]\n"
        "links: [{gb_per_s: 1, alpha_us: 0, between: [[d0, d1]]}]\n"
    )
    with pytest.raises(InvalidInput, match="links: no route from d0 to d2"):
        run("check", str(path))


def test_check_accepts_direct_links_over_which_synth_finds_a_program(tmp_path: Path) -> None:
    path = tmp_path / "line.yaml"
    path.write_text(
        "stretto: cluster\nversion: 1\nname: line\nnodes: [{kind: device, names: 'd[0..2]'}]\n"
        "links: [{gb_per_s: 1, alpha_us: 1, between: [[d0, d1], [d1, d2]]}]\n"
    )
    assert "3 devices" in run("check", str(path))
    found = st.synthesize(st.AllGather(3), Cluster.load(path), 1e3, budget_s=0.3, cache=False, makers=["greedy"])
    assert found.certificate.gap >= 0


def test_convert_keeps_everything(tmp_path: Path) -> None:
    path = tmp_path / "four.yaml"
    text = run("convert", f"{DATA / 'nccl_dgx1.xml'}:4", str(path))
    assert "32 devices" in text
    assert "note: assumed" in text
    assert Cluster.load(path) == Cluster.load(f"{DATA / 'nccl_dgx1.xml'}:4")
    again = tmp_path / "again.json"
    run("convert", str(path), str(again))
    assert Cluster.load(again) == Cluster.load(path)


def test_convert_refuses_forms_it_does_not_write(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"unknown ending '.xml'; choose from: .yaml, .yml, .json"):
        run("convert", "ring", str(tmp_path / "x.xml"))


def test_renumber_gives_the_order_and_refuses_other_machines() -> None:
    host = str(DATA / "nccl_dgx1.xml")
    assert run("renumber", host, "--like", host) == "CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7\n"
    with pytest.raises(InvalidInput, match="no order of its GPUs"):
        run("renumber", host, "--like", str(DATA / "nccl_hgx_h100.xml"))


def test_show_refuses_a_place_it_cannot_write() -> None:
    with pytest.raises(InvalidInput, match="there is no directory /nonexistent"):
        run("show", "ring", "-o", "/nonexistent/x.svg")


@pytest.mark.parametrize("command", ["list", "show", "check", "convert"])
def test_help_teaches_with_examples(command: str) -> None:
    assert f"stretto cluster {command}" in run(command, "--help")


def test_a_file_that_is_not_connected_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "cut.json"
    Cluster.preset("ring", nodes=3).save(file)
    text = json.loads(file.read_text())
    text["links"] = []
    file.write_text(json.dumps(text))
    assert stretto_command(["cluster", "check", str(file)]) == 2
    assert f"{file}: links: no route from " in capsys.readouterr().err
