# SPDX-License-Identifier: Apache-2.0
"""``stretto motif``: lists, shows, proves and writes; anything wrong is one line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from stretto import Program
from stretto.programs.formats import load_program

Run = Callable[..., str]
WHOLE = "AR(T[0:1024], PG[0:8])"


def test_list_names_every_rule_with_its_parameters(good: Run) -> None:
    text = good("motif", "list")
    for name in ("segment", "ring", "tree", "hierarchical", "spline", "scatter"):
        assert f"\n{name}\n" in f"\n{text}"
    assert "rewrites AR, BC, RE; parameters n" in text
    assert "tree" not in good("motif", "list", "--kind", "AA")


def test_show_prints_the_notation_the_tree_and_the_proof(good: Run) -> None:
    text = good("motif", "show", WHOLE, "--apply", "segment:4", "--apply", "tree:4@0")
    first = text.splitlines()[0]
    assert first.startswith("(RE_0(T[0:256], PG[0:4]) || RE_4(T[0:256], PG[4:8]) -> AR(T[0:256], PG[0,4]) -> ")
    assert "0.1  AR(T[0:256], PG[0,4])  all_reduce, 256 B, ring" in text
    assert "proved: 8 motifs, " in text
    assert text.rstrip().endswith(WHOLE)


def test_show_writes_a_program_that_verifies(good: Run, tmp_path: Path) -> None:
    file = tmp_path / "aa.txt"
    good("motif", "show", "AA(T[0:8, 0:63], PG[0:8])", "-a", "spline:3", "-a", "segment:2@1", "-o", str(file))
    made = load_program(file)
    assert isinstance(made, Program)
    assert made.verify().fifo_depth == 1
    assert "right" in good("program", "verify", str(file))


def test_several_motifs_are_proved_against_what_they_should_be(good: Run, bad: Run) -> None:
    two = "RE_0(T[0:64], PG[0:4]) -> BC_0(T[0:64], PG[0:4])"
    assert "proved: 2 motifs" in good("motif", "show", two, "--of", "AR(T[0:64], PG[0:4])")
    assert "not proved" in good("motif", "show", two)
    assert "P_0 ends without P_1's part of T[64:65]" in bad("motif", "show", two, "--of", "AR(T[0:65], PG[0:4])")
    assert "--of: must be a single motif" in bad("motif", "show", two, "--of", two)
    assert "--of: say what" in bad("motif", "show", two, "-o", "x.txt")


def test_long_trees_are_cut_short(good: Run) -> None:
    text = good("motif", "show", "AR(T[0:1024], PG[0:2])", "-a", "segment:100")
    assert "... 40 more" in text
    assert "proved: 100 motifs" in text
    assert len(good("motif", "show", WHOLE, "-a", "segment:4", "--expand").splitlines()[0]) > 100


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["AR(T[0:1024] PG[0:8])"], "motif text, column 14: expected ',', not 'PG'"),
        ([WHOLE, "-a", "nothing"], "unknown rule 'nothing'; choose from: segment, ring"),
        ([WHOLE, "-a", "spline:2"], "spline does not rewrite AR"),
        ([WHOLE, "-a", "segment:2@5"], "path 5: there is no child 5"),
        ([WHOLE, "-o", "x.pdf"], "unknown ending '.pdf'"),
        (["\x1b[31m" * 100], "column 1"),
    ],
)
def test_wrong_input_is_one_line(bad: Run, arguments: list[str], message: str) -> None:
    assert message in bad("motif", "show", *arguments)
    assert "unknown motif 'XX'" in bad("motif", "list", "--kind", "XX")
