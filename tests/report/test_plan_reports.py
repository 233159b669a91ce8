# SPDX-License-Identifier: Apache-2.0
"""A plan's page, tables and trace."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from judges.drawn_steps import random_problem
from rich.console import Console

from stretto.cluster import Cluster
from stretto.planner import api
from stretto.planner.api import SYSTEM, PlanResult, to_plan
from stretto.planner.schedule.schedule import Scheduler
from stretto.planner.schedule.search import search
from stretto.report.plan_html import write_plan_html
from stretto.report.plan_tables import motif_table, plan_tables, systems_table
from stretto.report.plan_trace import write_plan_trace
from stretto.workload import Dep, Op, Workload

EVIL = "</script><script>alert('x')</script>\"&<b>"
HGX2 = Cluster.preset("hgx2", nodes=1)
STEP = Workload(
    name=EVIL,
    num_ranks=4,
    ops=(
        Op(name="prep", kind="all_to_all", nbytes=4e6),
        Op(name=f"f {EVIL}", duration_us=50.0, after=(Dep(op="prep"), Dep(op=f"g {EVIL}", lag=1)), phase=EVIL),
        Op(name=f"g {EVIL}", kind="all_reduce", nbytes=1.6e7, after=(Dep(op=f"f {EVIL}"),)),
    ),
    notes=(EVIL,),
)


@pytest.fixture(scope="module")
def found() -> PlanResult:
    return api.plan(STEP, HGX2, steps=100)


class Page(HTMLParser):
    """What a browser would load, run and show."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.scripts: list[str] = []
        self.text = ""
        self.loads: list[str] = []
        self._inside = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._inside = tag
        self.loads += [value or "" for key, value in attrs if key in ("src", "href", "data", "action")]
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside == "script":
            self.scripts[-1] += data
        elif self._inside != "style":
            self.text += data


@pytest.fixture(scope="module")
def page(found: PlanResult, tmp_path_factory: pytest.TempPathFactory) -> Page:
    path = tmp_path_factory.mktemp("page") / "plan.html"
    write_plan_html(path, found, against="p3")
    return Page(path.read_text())


def figures(page: Page) -> list[tuple[list[dict[str, Any]], dict[str, Any]]]:
    """The data and layout of every figure, as its script hands them to plotly."""
    made = []
    decoder = json.JSONDecoder()
    for script in page.scripts:
        for call in re.finditer(r"Plotly\.newPlot\(\s*\"[^\"]+\",\s*(?=\[)", script):
            data, end = decoder.raw_decode(script, call.end())
            layout, _ = decoder.raw_decode(script, re.compile(r",\s*").match(script, end).end())  # type: ignore[union-attr]
            made.append((data, layout))
    return made


def test_the_page_loads_nothing_and_runs_nothing_of_the_workload(page: Page) -> None:
    assert page.loads == []
    # Plotly itself, and one call for each of the two figures.
    assert len(figures(page)) == 2
    assert all(not script.lstrip().startswith("alert(") for script in page.scripts)
    assert sum("alert('x')" in script.replace("\\u0027", "'") and len(script) < 200 for script in page.scripts) == 0
    assert EVIL in page.text


def test_the_page_says_what_the_plan_brings(page: Page, found: PlanResult) -> None:
    for word in ("What the plan brings", "One iteration: p3 above", "Decisions", "The search", "What was assumed"):
        assert word in page.text
    assert "times the throughput" in page.text
    assert "Simulated link by link" in page.text
    for op in found.plan.ops:
        assert op.option in page.text
        assert op.reason in page.text


def test_both_timelines_hold_every_motif_inside_the_iteration(page: Page, found: PlanResult) -> None:
    bars, layout = figures(page)[0]
    axes = {"y": "p3", "y2": SYSTEM}
    drawn: dict[str, float] = dict.fromkeys(axes.values(), 0.0)
    idle = dict(drawn)
    for group in bars:
        schedule = found.schedules[axes[group["yaxis"]]]
        assert group["x"]
        for base, length in zip(group["base"], group["x"], strict=True):
            assert base >= 0
            assert (base + length) * 1e3 <= schedule.period_us * (1 + 1e-9)
            (idle if group["name"] == "no compute" else drawn)[axes[group["yaxis"]]] += length * 1e3
        assert "<script" not in group["name"]
        assert all("<script" not in text for text in group["hovertext"])
    for name in axes.values():
        schedule = found.schedules[name]
        options = [found.problem.options[op.name][k] for op, k in zip(STEP.comm_ops, schedule.choice, strict=True)]
        held = sum(task.duration_us * len(task.channels) for option in options for task in option.tasks)
        assert drawn[name] == pytest.approx(held + 50.0, rel=1e-6)
        assert idle[name] == pytest.approx(float(schedule.compute_idle.sum()) * schedule.period_us, rel=0.02)
    assert layout["height"] < 900
    legend = [unescape(group["name"]) for group in bars if group["showlegend"]]
    assert len(set(legend)) == len(legend) == 4


def many(num_comm: int, seed: int = 2) -> PlanResult:
    problem = random_problem(seed, num_comm=num_comm, num_options=2, two_places=True)
    result = search(problem, steps=20)
    schedules = {"fifo": Scheduler(problem).schedule({}, discipline="fifo", serial=True), SYSTEM: result.schedule}
    plan = to_plan(SYSTEM, result.schedule, problem, HGX2)
    return PlanResult(
        plan=plan, problem=problem, schedules=schedules, search=result, make_plain=lambda: schedules["fifo"]
    )


def test_many_comm_ops_are_coloured_by_kind_and_their_table_scrolls(tmp_path: Path) -> None:
    write_plan_html(tmp_path / "p.html", many(30))
    text = (tmp_path / "p.html").read_text()
    bars, layout = figures(Page(text))[0]
    legend = {group["name"] for group in bars if group["showlegend"]}
    assert legend == {"compute", "no compute", "all_reduce", "all_to_all"}
    assert any("rank 0 " in name for name in layout["yaxis"]["categoryarray"])
    assert "overflow-y:auto" in text


def printed(part: object, width: int = 100) -> str:
    text = io.StringIO()
    Console(width=width, file=text).print(part)
    return text.getvalue()


def test_tables_show_promise_and_decisions(found: PlanResult) -> None:
    text = printed(plan_tables(found.plan))
    for word in ("iteration", "link by link", "lower bound", "times ours", "fifo 1.", "made by", "prep", "why"):
        assert word in text
    assert found.plan.hash in text
    systems = printed(systems_table(found.schedules))
    assert [line.split()[0] for line in systems.splitlines()[1:]] == list(found.schedules)
    assert EVIL.replace(" ", "")[:8] in text.replace("\n", "")
    assert "bytescheduler+" not in printed(systems_table({"fifo": found.schedules["fifo"]}))


def test_a_plan_says_what_could_not_be_done(found: PlanResult) -> None:
    assert "not re-timed" in printed(plan_tables(replace(found.plan, retimed_us=0.0, notes=("not re-timed: large",))))


def test_long_lists_of_motifs_are_cut() -> None:
    made = many(6).plan
    op = made.ops[0]
    text = printed(motif_table(replace(op, motifs=op.motifs * 30)), width=160)
    assert f"... and {30 * len(op.motifs) - 24} more motifs" in text
    assert "why: " in text


def test_a_run_of_turns_does_not_read_as_a_number_of_motifs(found: PlanResult) -> None:
    op = found.plan.ops[0]
    motif = op.motifs[0]
    apart = replace(found.plan, ops=(replace(op, motifs=(replace(motif, seq=0), replace(motif, seq=1047))),))
    row = next(line for line in printed(plan_tables(apart), width=160).splitlines() if "1047" in line)
    assert row.split()[:4] == ["0", "..", "1047", "2"]


def test_the_trace_holds_before_and_after(found: PlanResult, tmp_path: Path) -> None:
    from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace, TrackEvent

    shown = {"before (fifo)": found.schedules["fifo"], "after (plan)": found.schedules[SYSTEM]}
    path = tmp_path / "t.pftrace"
    write_plan_trace({name: schedule.timeline(found.problem) for name, schedule in shown.items()}, path)
    trace = Trace()
    trace.ParseFromString(path.read_bytes())
    processes: dict[int, str] = {}
    threads: dict[int, int] = {}
    last: dict[str, int] = {}
    for packet in trace.packet:
        track = packet.track_descriptor
        if track.HasField("process"):
            processes[track.uuid] = track.process.process_name
        if track.HasField("thread"):
            threads[track.uuid] = track.parent_uuid
        if packet.HasField("track_event") and packet.track_event.type == TrackEvent.TYPE_SLICE_END:
            name = processes[threads[packet.track_event.track_uuid]]
            last[name] = max(last.get(name, 0), packet.timestamp)
    assert set(processes.values()) == {"stretto", "before (fifo), rank 0", "after (plan), rank 0"}
    for name, schedule in shown.items():
        assert last[f"{name}, rank 0"] == pytest.approx(float(schedule.end_us.max()) * 1e3, abs=1)


def test_gaps_of_communication_are_what_the_motifs_leave(found: PlanResult) -> None:
    workload = found.problem.workload
    for schedule in found.schedules.values():
        period = schedule.period_us
        clock = (np.arange(20_000) + 0.5) * period / 20_000
        busy = np.zeros((len(workload.places), len(clock)), bool)
        for op, task, start, end in zip(schedule.op, schedule.task, schedule.start_us, schedule.end_us, strict=True):
            if task >= 0:
                runs = ((clock >= start) & (clock < end)) | (clock + period < end)
                busy[list(workload.op_places[op])] |= runs
        assert schedule.comm_idle == pytest.approx(1 - busy.mean(1), abs=0.002)
        # Communication without compute is part of all communication.
        assert (schedule.exposed_us <= (1 - schedule.comm_idle) * period + 1e-6).all()
