# SPDX-License-Identifier: Apache-2.0
"""A blocking call that NCCL has queued in the current stream: it gives no work for such a call, and here is one.

Who hands works on takes none for a call that was not run, and would run it once more.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from .cuda_clock import cuda, event_of


class QueuedWork(dist.Work):
    """Stands behind what the stream holds that was current when it was made."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._end: Any = event_of()
        self._end.record(cuda.current_stream(device))

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Make the current stream wait, which is nothing where it is the one of the call."""
        cuda.current_stream(self._device).wait_event(self._end)
        return True

    def is_completed(self) -> bool:
        """Whether the GPU is done with it."""
        return bool(self._end.query())

    def is_success(self) -> bool:
        """NCCL's watchdog tells of what went wrong."""
        return True
