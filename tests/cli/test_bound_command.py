# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path

from stretto import AllGather
from stretto.collectives import save_collective

Run = Callable[..., str]


def test_a_bound_says_why(good: Run) -> None:
    text = good("bound", "all_reduce", "--cluster", "ring:4,gb_per_s=10,alpha_us=1", "--bytes", "4M")
    assert "301 us" in text and "counting" in text and "no algorithm is faster" in text


def test_the_next_step_can_be_copied(good: Run) -> None:
    said = "hosts: 2, gpus: 2 x a100, network: 25gbit"
    last = good("bound", "all_reduce", "-c", said, "-b", "1 MB").strip().splitlines()[-1]
    assert shlex.split(last) == ["next:", "stretto", "synth", "all_reduce", "-c", said, "-b", "1 MB"]


def test_sizes_channels_roots_and_subsets(good: Run, bad: Run) -> None:
    assert good("bound", "allgather", "--cluster", "dgx2:2", "--bytes", "1K..1M", "--ranks", "0-7").count("us") >= 6
    assert "broadcast" in good("bound", "broadcast", "--cluster", "ndv2:1", "--root", "3", "--channels", "nvlink")
    assert "root: must be a rank 0..3" in bad("bound", "broadcast", "--cluster", "ring:4", "--root", "9")
    assert "--root: all_reduce has no root; rooted are" in bad("bound", "all_reduce", "-c", "ring:4", "--root", "3")
    for factor in ("1", "-1", "nan", "inf"):
        assert "factor: must be >= 1.1" in bad("bound", "all_reduce", "-c", "ring:4", "--factor", factor)
    assert "unknown collective" in bad("bound", "allgathr", "--cluster", "ring:4")
    assert "needs pairs or counts" in bad("bound", "permute", "--cluster", "ring:4")


def test_a_custom_collective_has_a_bound(good: Run, bad: Run, tmp_path: Path) -> None:
    save_collective(AllGather(4), tmp_path / "mine.yaml")
    assert "no algorithm is faster" in good("bound", str(tmp_path / "mine.yaml"), "--cluster", "ring:4")
    for option in ("--root", "--ranks"):
        said = bad("bound", str(tmp_path / "mine.yaml"), "--cluster", "ring:4", option, "2")
        assert f"{option}: a file says this itself" in said
