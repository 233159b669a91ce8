# SPDX-License-Identifier: Apache-2.0
"""The range of sizes that a program file is meant for: runtimes choose among files by it."""

from __future__ import annotations

import math

from ..lowered import Lowered, check_size_range

NEAR = 2
"""A program made for one size is used from 1/NEAR of it to just below NEAR times it."""


def size_range(lowered: Lowered, min_bytes: int | None, max_bytes: int | None) -> tuple[int, int]:
    """The range of call sizes that a file is written for.

    Args:
        lowered: The streams, whose own range is the default.
        min_bytes: The smallest size that the caller asks for, or None.
        max_bytes: The largest size that the caller asks for (0: no limit), or None.

    Returns:
        ``(min_bytes, max_bytes)``.

    Raises:
        InvalidInput: No call can be in the range.
    """
    low = lowered.min_bytes if min_bytes is None else min_bytes
    high = lowered.max_bytes if max_bytes is None else max_bytes
    check_size_range(low, high)
    return low, high


def range_around(nbytes: float) -> tuple[int, int]:
    """The sizes for which a program made for `nbytes` is used: from half of that to just below twice that.

    Files made for sizes that grow by factors of 4 then meet without overlapping.

    >>> range_around(16_000_000), range_around(64_000_000)
    ((8000000, 31999999), (32000000, 127999999))
    """
    low = max(1, math.ceil(nbytes / NEAR))
    return low, max(low, math.ceil(nbytes * NEAR) - 1)
