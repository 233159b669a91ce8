# SPDX-License-Identifier: Apache-2.0
"""DDP's buckets and FSDP2's buffers in symmetric memory: run with ``make test-gpu``, on a machine that has a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Launch = Callable[..., list[Any]]


@pytest.mark.parametrize("ranks", [2, 4])
def test_models_train_in_symmetric_memory_with_the_same_losses(launch: Launch, ranks: int) -> None:
    for told in launch(ranks, "pool"):
        print(told)
        for how in ("ddp", "fsdp"):
            assert told[how]["losses"] == told[f"{how} in pool"]["losses"]
            assert told[how]["in_pool"] == 0 and told[f"{how} in pool"]["in_pool"] > 0, told
        assert told["modules"] == 25 and told["held"] > 100 << 20
