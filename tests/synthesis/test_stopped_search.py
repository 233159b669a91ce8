# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C in a search: what was found so far is proved, timed and written as any other result."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

import stretto as st
from stretto.cli import run
from stretto.programs import Lowered
from stretto.programs.formats import load_program
from stretto.synthesis import SearchStopped, select, synthesize
from stretto.synthesis import makers as registry
from stretto.synthesis.attempts import STOPPED
from stretto.synthesis.problem import MakerTask, SynthesisProblem

RING = st.Cluster.preset("ring", nodes=4)


@pytest.fixture(autouse=True)
def signals_as_on_a_terminal() -> Iterator[None]:
    """What a shell starts in the background ignores SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def ctrl_c() -> None:
    os.kill(os.getpid(), signal.SIGINT)


class Stopping:
    """A maker that makes a ring, is stopped, and would make another program (a `Maker`)."""

    name = "stopping"
    options: ClassVar[dict[str, Any]] = {}
    follows_sketch = False

    def __init__(self, *, makes_first: bool = True, only_at: float | None = None) -> None:
        self.makes_first, self.only_at = makes_first, only_at

    def tasks(self, problem: SynthesisProblem) -> list[MakerTask]:
        return [MakerTask(maker=self.name, label=self.name, weight=1.0)]

    def programs(self, task: Any, problem: SynthesisProblem, budget_s: float, progress: Any) -> Iterator[st.Program]:
        kind, ranks = problem.collective.kind, problem.collective.ranks
        if self.makes_first:
            yield st.algorithm("ring", kind, ranks)
        if self.only_at in (None, problem.nbytes):
            ctrl_c()
        yield st.algorithm("direct", kind, ranks)


def use(monkeypatch: pytest.MonkeyPatch, maker: Stopping) -> None:
    monkeypatch.setattr(registry, "makers", lambda: {maker.name: maker})


@pytest.mark.parametrize("lower", [False, True])
def test_the_exception_holds_what_was_found(monkeypatch: pytest.MonkeyPatch, lower: bool) -> None:
    use(monkeypatch, Stopping())
    with pytest.raises(SearchStopped) as stop:
        synthesize(st.AllGather(4), RING, 4 * st.MB, cache=False, lower=lower)
    found = stop.value.found
    found.program.verify()
    assert found.program.name.startswith("ring") and found.certificate.cut == STOPPED
    assert found.certificate.time_us >= found.certificate.bound_us
    assert (found.lowering is not None) == lower


def test_a_second_ctrl_c_or_one_before_any_program_is_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, Stopping(makes_first=False))
    with pytest.raises(KeyboardInterrupt) as stop:
        synthesize(st.AllGather(4), RING, 4 * st.MB, cache=False)
    assert not isinstance(stop.value, SearchStopped)


def test_ctrl_c_while_programs_are_lowered_leaves_one_that_is(monkeypatch: pytest.MonkeyPatch) -> None:
    from stretto.synthesis import lowering, portfolio

    use(monkeypatch, Stopping(only_at=-1.0))
    lower, budgets = lowering.search_lowering, []

    def stopped_once(programs: Any, problem: Any, *, budget_s: float, report: Any) -> Any:
        budgets.append(budget_s)
        if len(budgets) == 1:
            ctrl_c()
        return lower(programs, problem, budget_s=budget_s, report=report)

    monkeypatch.setattr(portfolio, "search_lowering", stopped_once)
    with pytest.raises(SearchStopped) as stop:
        synthesize(st.AllGather(4), RING, 4 * st.MB, cache=False, lower=True)
    assert stop.value.found.lowering is not None
    assert budgets[1] == portfolio.STOPPED_S


def test_a_stopped_search_is_not_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("STRETTO_CACHE", str(tmp_path))
    use(monkeypatch, Stopping())
    with pytest.raises(SearchStopped):
        synthesize(st.AllGather(4), RING, 4 * st.MB)
    assert not list(tmp_path.rglob("*.json"))


def test_a_table_has_the_sizes_that_were_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, Stopping(only_at=2 * st.MB))
    with pytest.raises(SearchStopped) as stop:
        select(st.AllGather(4), RING, [st.MB, 2 * st.MB, 4 * st.MB], cache=False)
    points = [point[0] for choice in stop.value.found.choices for point in choice.points]
    assert points == [st.MB, 2 * st.MB]
    assert stop.value.found.choices[-1].max_bytes == 0


@pytest.mark.parametrize("sizes", ["4M", "1M,4M"])
def test_the_command_writes_it_and_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], sizes: str
) -> None:
    use(monkeypatch, Stopping())
    target = tmp_path / ("ag.xml" if sizes == "4M" else "ag")
    line = ["synth", "allgather", "-c", "ring:4", "-b", sizes, "--no-cache", "-o", str(target)]
    assert run(line) == 130
    said = " ".join(capsys.readouterr().out.split())
    assert STOPPED in said
    assert ("not searched: 4 MB" in said) == (sizes != "4M")
    path = target if target.is_file() else target / "all_gather-0.xml"
    found = load_program(path)
    assert isinstance(found, Lowered)
    found.verify()
