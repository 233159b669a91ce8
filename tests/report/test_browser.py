# SPDX-License-Identifier: Apache-2.0
"""A page in Debian's Chromium, where it is installed: it is small, draws its figures, and complains of nothing."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from stretto import MB, Cluster, algorithm, simulate
from stretto.report.html import timeline_section, write_html

CHROMIUM = shutil.which("chromium")


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "page.html"
    cluster = Cluster.preset("ring", nodes=4)
    timeline = simulate(algorithm("ring", "all_reduce", 4), cluster, nbytes=MB)
    write_html(path, title="ring", sections=[timeline_section(timeline, "ring")])
    return path


def test_a_page_is_under_a_megabyte_and_loads_nothing(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert len(text.encode()) < 1_000_000
    assert "src=" not in text.partition('id="plotly"')[0]


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
def test_a_browser_draws_it_without_a_word(page: Path, tmp_path: Path) -> None:
    assert CHROMIUM is not None
    done = subprocess.run(
        [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr",
         f"--user-data-dir={tmp_path}", "--virtual-time-budget=20000", "--dump-dom", page.as_uri()],
        capture_output=True, text=True, timeout=600, check=True,
    )  # fmt: skip
    assert 'data-drawn="yes"' in done.stdout and 'class="main-svg"' in done.stdout
    assert [line for line in done.stderr.splitlines() if "CONSOLE" in line] == []
