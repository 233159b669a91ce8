# SPDX-License-Identifier: Apache-2.0
"""Every kind of page in Debian's Chromium, where it is installed: a silent console, no texts that overlap or are cut.

`scripts/screenshots` looks at larger ones, made by the commands, in all widths and colors.
"""

from __future__ import annotations

import importlib.util
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from stretto import MB, Cluster, algorithm, simulate
from stretto.cli import run
from stretto.report.html import timeline_section, write_html

ROOT = Path(__file__).parents[2]
PAGES: dict[str, str] = {
    "advise": "advise resnet:50,ranks=4 -c ring:4 --steps 5",
    "bound": "bound all_reduce -c dgx2:2 -b 1K..1G",
    "dims compare": "dims compare -c themis_3d_fc_ring_sw -b 100M,1G",
    "dims plot": "dims plot -c themis_3d_fc_ring_sw -b 1G --window 2000",
    "dims sweep": "dims sweep -c torus:4x4 -b 1M --chunks 4,8",
    "dims train": "dims train themis:dlrm -c themis_2d_sw_sw",
    "pipeline meshes": "pipeline meshes gpt -c p3_8xlarge:2 --microbatches 4 --layouts 3",
    "pipeline search": "pipeline search --stages 2 --microbatches 4",
    "pipeline show": "pipeline show zb_h1 --stages 4",
    "pipeline simulate": "pipeline simulate --stages 4 --microbatches 16",
    "plan": "plan -w dlrm:A2,ranks=8 -c hgx2:1 --steps 20",
    "reshard": "reshard --src (2,4)|S0RR --dst (3,4)|S0RR --shape 64,64,64 -c p3_8xlarge:5",
    "simulate": "simulate ring -c dgx2:2 -b 64M",
    "simulate all": "simulate all -c ring:4 -b 1K..1G",
    "strategy": "strategy simulate all_reduce -m bert_large@0.02 -c autodist_b7",
    "synth": "synth allgather -c ring:4 -b 1M --makers library --no-cache",
    "synth sizes": "synth allgather -c ring:4 -b 1K,1M --makers library --no-cache",
    "weights": "weights plan llama-3-70b --trainer fsdp=8 --server tp=8 -c dgx_h100:2",
}
"""A command for each kind of page; a bar stands for a blank."""


def browser_module() -> ModuleType:
    spec = importlib.util.spec_from_file_location("browser", ROOT / "scripts" / "browser.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["browser"] = module
    spec.loader.exec_module(module)
    return module


def status_page(path: Path) -> None:
    import msgspec

    from stretto.control.messages import Status
    from stretto.report.enforced_html import write_enforced_html

    known = runpy.run_path(str(Path(__file__).parent / "test_enforced_html.py"))
    spans = {"split": known["SPLIT"], "before": known["SPANS"], "after": known["SPANS"]}
    job = msgspec.structs.replace(known["JOB"], motifs_plan=known["JOB"].plan, **spans)
    write_enforced_html(path, Status(pid=1, jobs=(job,)))


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    made = {name: folder / f"{name.replace(' ', '-')}.html" for name in [*PAGES, "status"]}
    for name, line in PAGES.items():
        words = [word.replace("|", " ") for word in line.split()]
        assert run([*words, "--html", str(made[name])]) == 0, name
    status_page(made["status"])
    return made


def test_pages_are_under_a_megabyte_and_load_nothing(pages: dict[str, Path]) -> None:
    for name, page in pages.items():
        text = page.read_text(encoding="utf-8")
        assert len(text.encode()) < 1_000_000, name
        assert "src=" not in text.partition('id="plotly"')[0], name
        assert "<footer>" in text and 'name="viewport"' in text, name


@pytest.mark.skipif(browser_module().CHROMIUM is None, reason="chromium is not installed")
def test_a_browser_shows_them_without_a_word_and_without_overlaps(pages: dict[str, Path]) -> None:
    browser: Any = sys.modules["browser"]
    faults: dict[tuple[str, int], tuple[str, ...]] = {}
    with browser.Browser() as chromium:
        for name, page in pages.items():
            for size, dark in ((browser.DESKTOP, False), (browser.PHONE, True)):
                view = chromium.look(page, size=size, dark=dark)
                assert view.texts > 5, name
                faults |= {(name, size[0]): view.faults} if view.faults else {}
    assert faults == {}


@pytest.mark.skipif(browser_module().CHROMIUM is None, reason="chromium is not installed")
def test_what_is_wrong_with_a_page_is_found(tmp_path: Path) -> None:
    browser: Any = sys.modules["browser"]
    page = tmp_path / "page.html"
    good = simulate(algorithm("ring", "all_reduce", 4), Cluster.preset("ring", nodes=4), nbytes=MB, load_slots=20)
    write_html(page, title="ring", sections=[timeline_section(good, "ring")])
    text = page.read_text()
    spoil: dict[str, Callable[[str], str]] = {
        "overlap: one | two": lambda page: page.replace(
            "<footer>", "<div style='position:relative;height:0'>one</div><div>two</div><footer>"
        ),
        "console: ['hello']": lambda page: page.replace("</head>", "<script>console.log('hello')</script></head>"),
        "wider than the screen": lambda page: page.replace("<footer>", "<div style='width:3000px'>x</div><footer>"),
        "no footer": lambda page: page.replace("<footer>", "<div>").replace("</footer>", "</div>"),
        "cut: far away": lambda page: page.replace(
            "<footer>", "<svg width=50 height=20 aria-label=x><text x=20 y=15>far away</text></svg><footer>"
        ),
    }
    with browser.Browser() as chromium:
        for fault, change in spoil.items():
            page.write_text(change(text))
            assert any(one.startswith(fault) for one in chromium.look(page).faults), fault
