# SPDX-License-Identifier: Apache-2.0
"""The page of a running job."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from stretto.control.messages import JobStatus, MotifStatus, PlanId, Status
from stretto.control.spans import ReportSpan
from stretto.control.split import split
from stretto.report.enforced_html import write_enforced_html
from stretto.runtime.enforcer.report import Timing

MOTIF = MotifStatus(
    op="backward.<bucket>", motif=1, algorithm="ring", channels=("shm", "eth"), nbytes=4096.0, predicted_start_us=10.0,
    predicted_us=2000.0, start_us=12.0, duration_us=2500.0, wait_us=0.0,
)  # fmt: skip
JOB = JobStatus(
    job="train", epoch=1, size=4, phase="active", about="plan 3 is active", plan=PlanId(3, "cafe"), plan_name="stretto",
    digest="d", predicted_us=4000.0, plain_us=9000.0, iteration_us=4400.0, waits_us=100.0, replans=0, ranks=(),
    motifs=(MOTIF,),
)  # fmt: skip


def test_promised_and_measured_stand_beside_each_other(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    write_enforced_html(path, Status(pid=1, jobs=(JOB,)))
    page = path.read_text()
    assert "plan 3, hash cafe" in page and "plotly-graph-div" in page
    for text in ("predicted", "measured", "<td>2 ms</td>", "<td>2.5 ms</td>", "<td>1.25</td>", "shm+eth"):
        assert text in page
    assert "1.10 times what was predicted" in page
    assert "<td>backward.&lt;bucket&gt;#1</td>" in page


SPANS = (
    ReportSpan(track="compute", name="forward.1", start_us=0.0, duration_us=900.0, phase="forward"),
    ReportSpan(track="eth", name="backward.<bucket>", start_us=950.0, duration_us=2500.0, comm=True),
)
SPLIT = split(
    own="gloo", kept="plan", unchanged=Timing(median_us=12000.0, low_us=11000.0, high_us=13000.0, iterations=16),
    backend=Timing(median_us=8000.0, low_us=7000.0, high_us=9000.0, iterations=15),
    plan=Timing(median_us=4000.0, low_us=3000.0, high_us=5000.0, iterations=24), predicted_backend_us=16000.0,
    predicted_plan_us=2000.0, whole_us=6000.0, whole_iterations=99,
)  # fmt: skip


def test_the_three_figures_stand_beside_their_predictions(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    write_enforced_html(path, Status(pid=1, jobs=(msgspec.structs.replace(JOB, split=SPLIT),)))
    page = path.read_text()
    for row in (
        "<td>unchanged job (gloo)</td><td>12 ms</td><td></td><td>11 ms to 13 ms</td><td>16</td><td></td><td></td>",
        "<td>our backend, plain order</td><td>8 ms</td><td>1.50x</td><td>7 ms to 9 ms</td><td>15</td><td>16 ms</td>"
        "<td>0.50</td>",
        "<td>under the plan</td><td>4 ms</td><td>2.00x</td><td>3 ms to 5 ms</td><td>24</td><td>2 ms</td><td>2.00</td>",
        "Together 3.00 times as fast as the unchanged job",
        "The whole job: 6 ms per iteration, 2.00 times as fast as unchanged (mean of 99 iterations",
    ):
        assert row in page, row


def test_a_few_iterations_under_a_plan_are_no_gain(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    few = Timing(median_us=4000.0, low_us=3000.0, high_us=5000.0, iterations=5)
    both = split(own="gloo", kept="plan", unchanged=SPLIT.unchanged, backend=SPLIT.backend, plan=few, plan_number=3)
    write_enforced_html(path, Status(pid=1, jobs=(msgspec.structs.replace(JOB, split=both),)))
    page = path.read_text()
    assert "Together" not in page and "Too early to say what was gained: 5 iterations under the plan." in page
    assert "<td>under plan 3, the last</td>" in page


def test_timelines_begin_at_zero_show_compute_and_stay_when_the_plan_does_not_run(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    later = msgspec.structs.replace(
        JOB, plan=PlanId(0, ""), motifs_plan=PlanId(3, "cafe"), about="planning again", split=SPLIT, before=SPANS,
        after=SPANS,
    )  # fmt: skip
    write_enforced_html(path, Status(pid=1, jobs=(later,)))
    page = path.read_text()
    assert "plan 3 below, the last that was active" in page and "planning again" in page
    for title in ("plain order, predicted", "the plan, predicted", "the plan, measured"):
        assert title in page
    ranges = re.findall(r'"range":\[([-\d.]+),', page)
    assert ranges and set(ranges) == {"0"}
    assert page.count('"name":"forward"') == 2, "compute of plain order and of the plan"


def test_a_page_without_a_plan_shows_what_was_recorded_and_why_there_is_none(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    plain = msgspec.structs.replace(
        JOB, plan=PlanId(0, ""), motifs=(), about="no plan promises to be 3% faster", recorded=SPANS,
        about_recorded="<Workload train>",
    )  # fmt: skip
    write_enforced_html(path, Status(pid=1, jobs=(plain,)))
    page = path.read_text()
    assert "What was recorded; no plan was used" in page and "no plan promises to be 3% faster" in page
    assert "plotly-graph-div" in page and '"name":"forward"' in page


def test_a_job_without_a_plan_and_no_job_at_all_are_pages_too(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    plain = msgspec.structs.replace(JOB, plan=PlanId(0, ""), motifs=())
    write_enforced_html(path, Status(pid=1, jobs=(plain,)))
    assert "plain order" in path.read_text()
    write_enforced_html(path, Status(pid=1, jobs=()))
    assert "No job" in path.read_text()
