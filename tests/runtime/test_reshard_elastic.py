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
