# SPDX-License-Identifier: Apache-2.0
"""Lines through measured times: what a link costs per message and per byte, and how well the line fits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from ...errors import InvalidInput

CLEAN = 0.01
"""A line that leaves less than this over was measured without disturbance."""


@dataclass(frozen=True, kw_only=True)
class Fit:
    """``offset_us + bytes / gb_per_s``; `error` is the root mean square of what is left, as a share of the times."""

    offset_us: float
    gb_per_s: float
    error: float


def fit_line(nbytes: Sequence[float], times_us: ArrayLike) -> Fit:
    """A line through the least time of each size (a row of `times_us` for each).

    Whatever disturbs a measurement on a busy machine makes it slower, so the least of several is nearest to the link.
    The rate comes from differences between sizes: what a shaper lets through at once after a pause, and what it costs
    to start, is the same for every size and goes into the offset, which may so be negative.

    >>> fit = fit_line([1e6, 2e6, 4e6], [[20_010, 25_000], [40_010, 40_900], [80_010, 80_020]])
    >>> round(fit.gb_per_s, 6), round(fit.offset_us, 3), fit.error < 1e-9
    (0.05, 10.0, True)
    """
    sizes = np.asarray(nbytes, np.float64)
    least = np.asarray(times_us, np.float64).reshape(len(sizes), -1).min(axis=1)
    if len(np.unique(sizes)) < 2:
        raise InvalidInput("nbytes: a line needs two sizes")
    slope, offset = np.polyfit(sizes, least, 1)
    if slope <= 0:
        # Larger flows took no longer, so that only latency was seen; the largest size bounds the rate from below.
        offset, slope = 0.0, float(least[-1] / sizes[-1])
    left = (offset + slope * sizes) / least - 1
    return Fit(offset_us=float(offset), gb_per_s=float(1e-3 / slope), error=float(np.sqrt(np.mean(left**2))))


def bounded_line(nbytes: Sequence[float], times_us: ArrayLike, most_offset: float = 0.03) -> Fit:
    """As `fit_line`, but noise in the short flows must not tilt the line.

    Where the points do not lie on a line, the offset is kept within a share of the longest time, so that the rate is
    that of the longest flow to within this share.

    >>> noisy = [[29_000.0], [62_000.0], [80_000.0]]
    >>> round(fit_line([1e6, 2e6, 4e6], noisy).gb_per_s, 3), round(bounded_line([1e6, 2e6, 4e6], noisy).gb_per_s, 3)
    (0.063, 0.052)

    Args:
        nbytes: The sizes of the flows.
        times_us: Their times, one row for each size.
        most_offset: The share of the longest time that the offset may have.

    Returns:
        The line.
    """
    fit = fit_line(nbytes, times_us)
    sizes = np.asarray(nbytes, np.float64)
    least = np.asarray(times_us, np.float64).reshape(len(sizes), -1).min(axis=1)
    longest = int(np.argmax(sizes))
    limit = most_offset * float(least[longest])
    if fit.error <= CLEAN or abs(fit.offset_us) <= limit:
        return fit
    offset = float(np.clip(fit.offset_us, -limit, limit))
    slope = (float(least[longest]) - offset) / float(sizes[longest])
    left = (offset + slope * sizes) / least - 1
    return Fit(offset_us=offset, gb_per_s=1e-3 / slope, error=float(np.sqrt(np.mean(left**2))))


def per_hop_us(few: int, few_us: ArrayLike, many: int, many_us: ArrayLike) -> float:
    """What one small message costs when many follow one another, without what starting them costs.

    >>> round(per_hop_us(2, [130, 120], 10, [520, 700]), 6)
    50.0

    Args:
        few: A small number of messages.
        few_us: Times of these.
        many: A larger number.
        many_us: Times of those.

    Returns:
        Microseconds of one.
    """
    low, high = float(np.min(few_us)), float(np.min(many_us))
    return max((high - low) / (many - few), 0.0) or high / many
