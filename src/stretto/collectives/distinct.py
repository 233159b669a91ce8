# SPDX-License-Identifier: Apache-2.0
"""Numbers that must differ, without sorting them wherever that can be avoided.

Slots of all ranks are millions of numbers, and to sort them takes longer than to build what they belong to.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

FLAGS_PER_NUMBER = 64
"""There is a flag for each possible number instead of an order, up to so many flags for each number."""


def all_differ(numbers: NDArray[np.int64], below: int) -> bool:
    """Whether no number, each from 0 to `below` - 1, comes twice.

    >>> all_differ(np.array([3, 1, 2]), 4), all_differ(np.array([3, 1, 3]), 4)
    (True, False)
    """
    if bool((numbers[1:] > numbers[:-1]).all()):
        return True
    return len(distinct(numbers, below)) == len(numbers)


def distinct(numbers: NDArray[np.int64], below: int) -> NDArray[np.int64]:
    """The numbers, each from 0 to `below` - 1, in order and each once.

    >>> distinct(np.array([3, 1, 3]), 4).tolist()
    [1, 3]
    """
    if below > FLAGS_PER_NUMBER * len(numbers):
        ordered = np.sort(numbers)
        return ordered[np.diff(ordered, prepend=-1) > 0]
    seen = np.zeros(below, np.bool_)
    seen[numbers] = True
    return np.flatnonzero(seen)
