# SPDX-License-Identifier: Apache-2.0
"""`stretto.torch.ElasticSync`: servers come late, leave and die in the middle; then a trainer dies."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

RANKS = 5


def test_servers_come_and_go_and_every_version_is_whole(job: Callable[..., Any], tmp_path: Path) -> None:
    trainer, _, leaving, dying, late = job("elastic_job.py", tmp_path, ranks=RANKS)["elastic"]
    # Server 3 dies in version 2, which the others get in the next attempt; trainer 1 dies in version 5.
    assert trainer[:4] == [1, 2, 3, 4] and trainer[4].startswith("PeerLost: ") and "rank 1 is gone" in trainer[4]
    assert leaving == [[1, True], [2, True], [3, True]]
    assert dying is None
    assert late == [[3, True], [4, True], ["PeerLost", 4, True]]


def test_a_stopped_server_is_left_out_and_comes_back(job: Callable[..., Any], tmp_path: Path) -> None:
    trainer, stopped, other = job("elastic_stopped_job.py", tmp_path, ranks=3)["stopped"]
    versions = [version for version, _ in trainer]
    assert versions == list(range(1, len(versions) + 1))
    # It stops in the second version, which the other server gets without it, and so the third.
    assert [servers for _, servers in trainer[:3]] == [[1, 2], [2], [2]] and 1 in trainer[-1][1]
    assert other == [[version, True] for version in versions]
    assert stopped[0] == [1, True] and stopped[-1] == [versions[-1], True] and all(whole for _, whole in stopped)
    assert {2, 3}.isdisjoint(version for version, _ in stopped)
