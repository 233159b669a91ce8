# SPDX-License-Identifier: Apache-2.0
"""How iterations of a job on a GPU are timed from the host."""

from __future__ import annotations

from typing import Any


class GpuPace:
    """Keeps the host at most one iteration ahead of the GPU, so that the time between two ends is an iteration's.

    The GPU never runs empty for it: the host waits for the end of the iteration before the one that it has just issued.
    """

    def __init__(self, on: bool) -> None:
        self._on = on
        self._before: Any = None

    def iteration(self) -> None:
        """An iteration ends here, for the host."""
        if not self._on:
            return
        import torch

        cuda: Any = torch.cuda
        event = cuda.Event()
        event.record()
        if self._before is not None:
            self._before.synchronize()
        self._before = event
