# SPDX-License-Identifier: Apache-2.0
"""Code that builders share: merge groups, balanced placement, and how a variable is cut."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from ...errors import InvalidInput
from ...units import MB
from ..model import ModelSpec, Variable
from ..representation import MAX_PARTS
from ..resources import Resources

BUCKET_MB = 26.2144
"""The size of a bucket: PyTorch's 25 MiB."""
FIRST_BUCKET_MB = 1.048576
PART_MB = 1.0
"""Size below which variables are not cut."""


def check_number(name: str, value: object, low: float, high: float) -> None:
    """Check that an option is a number in a range.

    Args:
        name: name of the option.
        value: its value.
        low: smallest valid number.
        high: largest valid number.

    Raises:
        InvalidInput: the value is no number or out of range.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        last = high if isinstance(high, int) else f"{high:g}"
        raise InvalidInput(f"{name}: must be {low:g}..{last}, not {value!r}")


def merge_groups(
    variables: Sequence[Variable], *, chunk: int = 0, bucket_mb: float = BUCKET_MB, first_mb: float = FIRST_BUCKET_MB
) -> dict[str, int]:
    """Merge groups of dense variables: neighbors by number, or else by size from the last variable on, as DDP does.

    A group holds one data type. Groups are numbered in the order in which the backward pass makes them ready, unless
    `chunk` is given.

    Args:
        variables: dense variables in the order of the forward pass.
        chunk: number of neighbors in a group; 0 groups by size.
        bucket_mb: size in MB at which a group is full.
        first_mb: size in MB at which the first group is full.

    Returns:
        The group of each variable.

    Raises:
        InvalidInput: an option is out of range.
    """
    check_number("chunk", chunk, 0, 1 << 20)
    check_number("bucket_mb", bucket_mb, 0, 1e9)
    check_number("first_mb", first_mb, 0, 1e9)
    groups: dict[str, int] = {}
    number = -1
    if chunk:
        for at, variable in enumerate(variables):
            if at % chunk == 0 or variable.dtype != variables[at - 1].dtype:
                number += 1
            groups[variable.name] = number
        return groups
    held, cap = 0.0, min(first_mb, bucket_mb) * MB
    dtype = ""
    for variable in reversed(variables):
        if number < 0 or held >= cap or variable.dtype != dtype:
            cap = bucket_mb * MB if number >= 0 else cap
            number, held, dtype = number + 1, 0.0, variable.dtype
        groups[variable.name] = number
        held += variable.nbytes
    return groups


def dense(model: ModelSpec) -> list[Variable]:
    """The variables whose gradients are dense."""
    return [variable for variable in model.variables if not variable.sparse]


class Balance:
    """Places items one after the other on the server whose load is least relative to its rate."""

    def __init__(self, servers: Sequence[str], rates: Sequence[float]) -> None:
        self._rates = list(rates)
        self._names = list(servers)
        self._heap = [(0.0, at, 0.0) for at in range(len(servers))]

    def place(self, nbytes: float) -> str:
        """The server of the next item, which has `nbytes` bytes."""
        _, at, load = heapq.heappop(self._heap)
        load += nbytes
        heapq.heappush(self._heap, (load / self._rates[at], at, load))
        return self._names[at]


def stations(there: Resources, server: str) -> tuple[str, ...]:
    """One station per host on which several devices train: where the server is one of them that, else the first."""
    found = []
    for ranks in there.by_host:
        training = [there.devices[rank] for rank in ranks if there.devices[rank] not in there.serving]
        if len(training) > 1:
            found.append(server if server in training else training[0])
    return tuple(found)


def cut_along(variable: Variable, axis: int, parts: int) -> tuple[int, ...]:
    """The partition that cuts one axis.

    Args:
        variable: the variable.
        axis: the axis.
        parts: number of parts; at most the size of the axis and 4096 are made.

    Returns:
        One number of parts per axis.
    """
    size = min(variable.shape[axis], parts, MAX_PARTS)
    return tuple(size if at == axis else 1 for at in range(len(variable.shape)))


def longest_axis(variable: Variable) -> int:
    """The axis to cut: the first, which has the rows, unless it is too short; then the longest."""
    shape = variable.shape
    return 0 if shape[0] >= 16 or shape[0] == max(shape) else shape.index(max(shape))
