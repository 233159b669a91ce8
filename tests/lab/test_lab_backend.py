# SPDX-License-Identifier: Apache-2.0
"""The backend on the lab's links: the bits of gloo, programs chosen for the lab, a measured timeline like any other."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest
from rich.console import Console

from stretto.lab import Lab
from stretto.report import load_timeline, write_chrome_json, write_perfetto
from stretto.report.html import timeline_section, write_html
from stretto.report.tables import timeline_tables


@pytest.mark.real_lab
def test_a_job_across_hosts_gives_the_bits_of_gloo_and_a_timeline_that_all_reports_take(tmp_path: Path) -> None:
    job = Path(__file__).parents[1] / "jobs" / "lab_backend_job.py"
    with Lab(hosts=2, ranks_per_host=2, uplinks={"eth": "200mbit"}, order="interleaved") as lab:
        lab.cluster().save(tmp_path / "lab.yaml")
        saved = tmp_path / "recorded.json"
        known = {"STRETTO_CLUSTER": str(tmp_path / "lab.yaml")}
        done = lab.run([sys.executable, str(job), str(saved)], env=known, timeout_s=480)
    assert done.exit_code == 0, done.errors
    found = json.loads(done.outputs[0].splitlines()[-1])
    assert all(found["same"].values()) and len(found["same"]) == 5
    for op in found["same"]:
        program, why = found["programs"][op]
        assert program and why.startswith("predicted") and why.endswith("on lab-2x2")

    timeline = load_timeline(saved)
    assert [timeline.names[n].split()[0] for n in timeline.name] == list(found["same"])
    assert set(timeline.rank.tolist()) == {0}
    assert (timeline.end_us > timeline.start_us).all() and timeline.total_us >= timeline.end_us.max()
    assert ("measured", "rank 0") in timeline.facts
    assert write_perfetto(timeline, tmp_path / "run.pftrace") == timeline.num_spans
    assert write_chrome_json(timeline, tmp_path / "run.json") == timeline.num_spans
    write_html(tmp_path / "run.html", title="a run", sections=[timeline_section(timeline, "Rank 0")])
    assert f"all_reduce {found['programs']['all_reduce'][0]}" in (tmp_path / "run.html").read_text(encoding="utf-8")
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(timeline_tables(timeline))
    assert "measured" in console.export_text()
