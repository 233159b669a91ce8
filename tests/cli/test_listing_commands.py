# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

Run = Callable[..., str]


def test_algorithms_can_be_narrowed_to_what_fits(good: Run) -> None:
    everything = good("algorithms")
    assert {"ring", "hierarchical", "bruck"} <= set(everything.split())
    for_seven = good("algorithms", "--collective", "all_gather", "--ranks", "7")
    assert "bruck" in for_seven.split()
    assert "recursive_doubling" not in for_seven.split()
    assert good("algorithms", "--collective", "permute", "--ranks", "1") != ""


def test_algorithms_refuses_what_it_does_not_know(bad: Run) -> None:
    assert "unknown collective 'x'; choose from: all_gather" in bad("algorithms", "--collective", "x")
    assert "--ranks: must be >= 1" in bad("algorithms", "--ranks", "0")


def test_collectives_are_listed_with_their_meaning(good: Run) -> None:
    text = good("collective", "list")
    for kind in ("all_gather", "reduce_scatter", "all_to_all_v", "permute"):
        assert kind in text
    assert "Every rank ends with the sum of all" in text


def test_a_collective_is_shown_rank_by_rank(good: Run) -> None:
    text = good("collective", "show", "all_reduce", "--ranks", "3")
    assert "c0..c2[1]" in text
    assert "c0..c2[0-2]" in text
    text = good("collective", "show", "broadcast", "--ranks", "3", "--root", "1")
    assert "root 1" in text
    assert text.count("c0[1]") == 4


def test_many_ranks_are_cut_short(good: Run) -> None:
    assert "48 more ranks" in good("collective", "show", "all_gather", "--ranks", "64")


def test_every_named_collective_can_be_shown(good: Run) -> None:
    from stretto.collectives import COLLECTIVES

    for kind in COLLECTIVES:
        assert kind in good("collective", "show", kind)


def test_a_collective_in_a_file_is_shown_like_its_name(good: Run, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    by_name = good("collective", "show", "scatter", "--ranks", "3", "--root", "2", "-o", str(path))
    assert good("collective", "show", str(path)) == by_name[: by_name.index("wrote")]


def test_bad_collective_files_are_one_line(bad: Run, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    for text in ("", "[", "a: &x 1\nb: *x", "stretto: collective\nversion: 7", "stretto: cluster", "\x00"):
        path.write_text(text)
        assert str(path) in bad("collective", "show", str(path))


def test_bad_collectives_are_one_line(bad: Run) -> None:
    assert "unknown collective" in bad("collective", "show", "all_sing")
    assert "ranks" in bad("collective", "show", "all_gather", "--ranks", "0")
    assert "root" in bad("collective", "show", "broadcast", "--root", "9")
    assert "chunks" in bad("collective", "show", "all_gather", "--chunks", "0")
    assert "missing.yaml" in bad("collective", "show", "missing.yaml")
