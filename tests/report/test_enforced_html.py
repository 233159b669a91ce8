"""The page of a running job."""

from __future__ import annotations

from pathlib import Path

import msgspec

from stretto.control.messages import JobStatus, MotifStatus, PlanId, Status
from stretto.report.enforced_html import write_enforced_html

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


def test_a_job_without_a_plan_and_no_job_at_all_are_pages_too(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    plain = msgspec.structs.replace(JOB, plan=PlanId(0, ""), motifs=())
    write_enforced_html(path, Status(pid=1, jobs=(plain,)))
    assert "plain order" in path.read_text()
    write_enforced_html(path, Status(pid=1, jobs=()))
    assert "No job" in path.read_text()
