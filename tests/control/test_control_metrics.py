# SPDX-License-Identifier: Apache-2.0
"""Counters for Prometheus, read back by a parser of the format's own grammar."""

from __future__ import annotations

import re
import urllib.error
import urllib.request

import pytest

from stretto.control.messages import PLAIN, HangStatus, JobStatus, PlanId, RankStatus, Status
from stretto.control.metrics import CONTENT, MetricsServer, prometheus_text
from stretto.control.split import split
from stretto.errors import InvalidInput
from stretto.runtime.enforcer.report import Timing

LABEL = r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\\n]|\\\\|\\"|\\n)*)"'
LINE = re.compile(rf"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{{({LABEL}(?:,{LABEL})*)\}})? (\S+)")


def parsed(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Every value by its name and labels; each family has help and type before its first value, and stands once."""
    found: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
    announced: dict[str, str] = {}
    assert text.endswith("\n")
    for line in text.splitlines():
        if line.startswith("# HELP "):
            assert line.split()[2] not in announced
            announced[line.split()[2]] = ""
        elif line.startswith("# TYPE "):
            assert announced[line.split()[2]] == ""
            announced[line.split()[2]] = line.split()[3]
        else:
            match = LINE.fullmatch(line)
            assert match is not None, line
            name = match[1]
            assert announced[name] == ("counter" if name.endswith("_total") else "gauge")
            labels = tuple((key, _plain(value)) for key, value in re.findall(LABEL, match[2] or ""))
            assert (name, labels) not in found
            found[name, labels] = float(match[match.lastindex or 0])
    return found


def _plain(value: str) -> str:
    return re.sub(r"\\(.)", lambda match: {"n": "\n"}.get(match[1], match[1]), value)


def job_status(name: str, ranks: int, *, plan: int = 3) -> JobStatus:
    """A job under a plan."""
    timing = Timing(median_us=3e5, low_us=3e5, high_us=3e5, iterations=8)
    return JobStatus(
        job=name, epoch=1, size=ranks, phase="running", about="", plan=PlanId(plan, "abc"), plan_name="stretto",
        digest="", predicted_us=1.5e5, plain_us=3e5, iteration_us=1e5, waits_us=2e4, replans=2,
        split=split(own="gloo", kept="plan", unchanged=timing, backend=timing, plan=timing),
        ranks=tuple(
            RankStatus(
                rank=rank, heard_s=0.5, ballot=None, committed=PLAIN, active=PLAIN, iteration=40 + rank,
                iteration_us=1e5, waits_us=1e4, fell_back="", left=False, held_us=5e3,
            )
            for rank in range(ranks)
        ),
    )  # fmt: skip


def test_every_figure_is_there_in_seconds() -> None:
    odd = 'a "quoted"\\ job\nof two lines'
    hang = HangStatus(job=odd, kind="behind", ranks=(1,), text="")
    over = HangStatus(job=odd, kind="behind", ranks=(0,), text="", went_on_s=3.0)
    found = parsed(prometheus_text(Status(pid=1, jobs=(job_status(odd, 2), job_status("b", 1)), hangs=(hang, over))))
    mine, one = (("job", odd),), (("job", odd), ("rank", "1"))
    assert found["stretto_jobs", ()] == 2
    assert found["stretto_job_ranks", mine] == 2
    assert found["stretto_job_plan", mine] == 3
    assert found["stretto_job_replans_total", mine] == 2
    assert found["stretto_job_iteration_seconds", mine] == pytest.approx(0.1)
    assert found["stretto_job_unchanged_iteration_seconds", mine] == pytest.approx(0.3)
    assert found["stretto_job_predicted_iteration_seconds", mine] == pytest.approx(0.15)
    assert found["stretto_job_gain_ratio", mine] == pytest.approx(1.0)
    assert found["stretto_rank_iterations_total", one] == 41
    assert found["stretto_rank_waits_seconds", one] == pytest.approx(0.01)
    assert found["stretto_rank_held_seconds", one] == pytest.approx(0.005)
    assert found["stretto_hangs_total", (("job", odd), ("kind", "behind"))] == 2
    assert found["stretto_hangs", (("job", odd), ("kind", "behind"))] == 1


def test_served_on_this_machine_alone() -> None:
    status = Status(pid=1, jobs=(job_status("a", 1),))
    server = MetricsServer("127.0.0.1:0", lambda: status)
    try:
        with urllib.request.urlopen(f"http://{server.address}/metrics", timeout=60) as answer:
            assert answer.headers["Content-Type"] == CONTENT
            assert parsed(answer.read().decode())["stretto_jobs", ()] == 1
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"http://{server.address}/", timeout=60)
    finally:
        server.close()
    for address in ("0.0.0.0:0", "10.0.0.1:9464", "unix:/tmp/x"):
        with pytest.raises(InvalidInput, match="of this machine alone"):
            MetricsServer(address, lambda: status)
    with pytest.raises(InvalidInput, match="expected"):
        MetricsServer("nonsense", lambda: status)
