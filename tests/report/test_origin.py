# SPDX-License-Identifier: Apache-2.0
"""The foot of a page, its labels, and its look in the dark."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from stretto.report.html import Section, write_html
from stretto.report.origin import page_origin


def test_the_foot_names_command_version_date_and_inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "86400")
    given = tmp_path / "my cluster.yaml"
    given.write_text("gpus: 4 x a100")
    said = page_origin(["stretto", "simulate", "ring", "-c", str(given)])
    assert "1970-01-02 00:00 UTC: stretto simulate ring -c '" in said
    assert said.endswith(f"inputs (SHA-256): {given} {hashlib.sha256(given.read_bytes()).hexdigest()[:16]}")
    assert "SHA-256" not in page_origin(["stretto", "simulate", "ring", "--html", str(given)]), "it is written"
    monkeypatch.setattr("sys.argv", ["/usr/bin/pytest", str(given)])
    assert page_origin().endswith("UTC")


def test_a_page_has_a_foot_labels_and_a_dark_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["/x/stretto", "plan", "-w", "<script>"])
    figure = '<div id="a" class="plotly-graph-div"></div>'
    write_html(tmp_path / "page.html", title="T", sections=[Section(heading='A "figure"', body=figure)])
    text = (tmp_path / "page.html").read_text()
    assert "stretto plan -w &#x27;&lt;script&gt;&#x27;" in text.partition("<footer>")[2]
    assert 'role="img" aria-label="A &quot;figure&quot;"' in text
    assert "prefers-color-scheme: dark" in text and "Plotly.relayout" in text
    write_html(tmp_path / "plain.html", title="T", sections=[Section(heading="words")])
    assert len((tmp_path / "plain.html").read_text()) < 4000
