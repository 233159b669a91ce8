# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console, RenderableType

from stretto.cluster import Cluster
from stretto.errors import InvalidInput
from stretto.report import Sweep, parse_sizes, run_sweep
from stretto.report.html import Section, sweep_section, sweep_table_section, timeline_section, write_html
from stretto.report.plots import busy_plot, sweep_plot
from stretto.report.tables import comparison_table, sweep_table, timeline_tables
from stretto.simulator import Timeline

Make = Callable[..., Timeline]


def small_then_large(sizes: tuple[int, ...] = (1_000, 1_000_000, 1_000_000_000)) -> Sweep:
    """`tree` wins small sizes, `ring` large ones."""
    cost = {"ring": lambda n: 62.0 + 1.1 * n / 25e3, "tree": lambda n: 10.0 + 2.0 * n / 25e3}
    return run_sweep(
        ["ring", "tree"],
        sizes,
        cluster="dgx2:2",
        collective="all_reduce",
        time_us=lambda name, size: cost[name](size),
        bound_us=lambda size: 5.0 + size / 25e3,
        facts=(("contention", "fifo"),),
        left_out={"hierarchical": "needs <hosts>"},
    )


def printed(what: RenderableType, width: int = 80) -> str:
    console = Console(width=width, no_color=True)
    with console.capture() as capture:
        console.print(what)
    return capture.get()


def test_sizes_are_single_listed_or_a_range() -> None:
    assert parse_sizes("64M") == (64_000_000,)
    assert parse_sizes("1K,1M") == (1000, 1_000_000)
    assert parse_sizes("1K..64K", factor=8) == (1000, 8000, 64000)
    assert parse_sizes("1K..1K") == (1000,)


@pytest.mark.parametrize("text", ["1M..1K", "", "..", "1K..", "x", "1..1G..2", "-5", "1K,,2K"])
def test_bad_sizes_are_refused(text: str) -> None:
    with pytest.raises(InvalidInput, match="size"):
        parse_sizes(text)


@pytest.mark.parametrize("factor", [1.0, 0.0, -4.0, float("nan")])
def test_a_range_must_grow(factor: float) -> None:
    with pytest.raises(InvalidInput, match="factor"):
        parse_sizes("1K..1G", factor=factor)


def test_a_range_has_a_bounded_number_of_sizes() -> None:
    with pytest.raises(InvalidInput, match="at most 64"):
        parse_sizes("1..1G", factor=1.1)


def test_the_best_depends_on_the_size() -> None:
    sweep = small_then_large()
    assert [sweep.best(at) for at in range(3)] == ["tree", "tree", "ring"]
    assert sweep.by_speed == ["ring", "tree"]


def test_rows_are_flat_and_complete() -> None:
    rows = small_then_large().rows()
    assert len(rows) == 6
    assert rows[0] == {
        "case": "all_reduce 1KB",
        "system": "ring",
        "cluster": "dgx2:2",
        "collective": "all_reduce",
        "contention": "fifo",
        "nbytes": 1000,
        "time_us": pytest.approx(62.044),
        "bound_us": pytest.approx(5.04),
        "algorithm_gb_per_s": pytest.approx(1000 / 62.044 / 1e3),
    }


def test_the_plot_fits_its_width_and_orders_the_curves() -> None:
    text = printed(sweep_plot(small_then_large(), width=80, height=20))
    lines = text.splitlines()
    assert max(len(line) for line in lines) <= 80
    assert "a ring" in text
    assert "b tree" in text
    first_column = "".join(line[7:8] for line in lines[1:21])
    assert first_column.index("a") < first_column.index("b"), "ring is slower at the smallest size"
    last_column = "".join(line[79:80] or " " for line in lines[1:21])
    assert last_column.index("b") < last_column.index("a"), "tree is slower at the largest size"
    assert "1x" in text
    assert "1 GB" in text


def test_a_plot_of_one_size_and_of_no_bound_still_draws() -> None:
    assert "a" in printed(sweep_plot(small_then_large((1000,))))
    sweep = run_sweep(["x"], (1, 10), cluster="c", collective="k", time_us=lambda n, s: 0.0, bound_us=lambda s: 0.0)
    assert "x" in printed(sweep_plot(sweep))
    assert "x" in printed(sweep_table(sweep))


def test_the_table_shows_leaders_and_says_what_is_missing() -> None:
    names = [f"algorithm_number_{k}" for k in range(12)]
    sweep = run_sweep(
        names,
        (1000, 2000),
        cluster="c",
        collective="k",
        time_us=lambda name, size: 1.0 + int(name.rsplit("_", 1)[1]),
        bound_us=lambda size: 0.5,
    )
    text = printed(sweep_table(sweep, width=80))
    assert "algorithm_number_0" in text
    assert "2.00x" in text
    assert re.search(r"\d+ more algorithms", text)
    assert max(len(line) for line in text.splitlines()) <= 80


def test_the_comparison_lists_everything_by_speed() -> None:
    lines = printed(comparison_table(small_then_large((1_000_000_000,)))).splitlines()
    assert [line.split()[0] for line in lines[1:4]] == ["ring", "tree", "lower"]


def test_the_summary_names_links_channels_and_the_critical_path(timeline: Timeline) -> None:
    cluster = Cluster.preset("ring", nodes=2)
    named = Timeline(
        **{key: getattr(timeline, key) for key in Timeline.__dataclass_fields__}
        | {"link_names": tuple(cluster.link_name(k) for k in range(cluster.num_links))}
    )
    text = printed(timeline_tables(named, cluster=cluster))
    assert re.search(r"total\s+5 us", text)
    assert re.search(r"program\s+ring", text)
    assert cluster.channels[0] in text
    assert "80.0 %" in text
    assert "critical path (3)" in text
    assert "22 KB in all" in text


def test_a_long_critical_path_is_shortened(random_timeline: Make) -> None:
    base = random_timeline(100, 2)
    timeline = Timeline(
        **{key: getattr(base, key) for key in Timeline.__dataclass_fields__}
        | {"critical_path": np.arange(100, dtype=np.int32)}
    )
    text = printed(timeline_tables(timeline))
    assert "92 more" in text


def test_the_busy_plot_groups_ranks_and_fits(random_timeline: Make, make_timeline: Make) -> None:
    text = printed(busy_plot(random_timeline(500, 100), width=80))
    assert max(len(line) for line in text.splitlines()) <= 80
    assert "ranks 0-6" in text
    assert "nothing moved" in printed(busy_plot(make_timeline([], 0.0)))
    idle_then_busy = printed(busy_plot(make_timeline([(0, 0, 0, 5.0, 10.0, 1)], 10.0), width=24)).splitlines()[0]
    assert idle_then_busy == "rank 0             █████"


def test_the_page_is_one_file_with_its_script_and_escaped_text(
    timeline: Timeline, random_timeline: Make, tmp_path: Path
) -> None:
    path = tmp_path / "report.html"
    sweep = small_then_large()
    sections = [
        sweep_section(sweep),
        sweep_table_section(sweep),
        timeline_section(timeline, "bars"),
        timeline_section(random_timeline(9000, 300), "heat"),
    ]
    write_html(path, title="<b>title</b>", sections=sections)
    text = path.read_text(encoding="utf-8")
    assert "<b>title" not in text
    assert "needs &lt;hosts&gt;" in text
    assert not re.search(r"<(script|link)[^>]+(src|href)=", text), "nothing is loaded from elsewhere"
    assert text.count("Plotly.newPlot(") >= 3
    assert "<td class=best>" in text


def test_a_page_without_figures_carries_no_script(tmp_path: Path) -> None:
    write_html(tmp_path / "r.html", title="t", sections=[Section(heading="h", body="<svg></svg>")])
    assert "<script" not in (tmp_path / "r.html").read_text()


def test_bars_hold_the_spans_themselves(timeline: Timeline) -> None:
    body = timeline_section(timeline, "bars").body
    data = json.loads(re.search(r"newPlot\(\s*\"[^\"]+\",\s*(\[.*?\]),\s*\{", body, re.S)[1])  # type: ignore[index]
    assert data[0]["orientation"] == "h"
    assert sorted(set(data[0]["y"])) == ["rank 0 nvlink", "rank 0 nvlink #2", "rank 1 nvlink", "rank 1 rdma"]
