"""What builders share: merge groups, balanced placement, and how a variable is cut."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from ...errors import InvalidInput
from ...units import MB
from ..model import ModelSpec, Variable
from ..representation import MAX_PARTS
from ..resources import Resources

BUCKET_MB = 26.2144
"""PyTorch's 25 MiB."""
FIRST_BUCKET_MB = 1.048576
PART_MB = 1.0
"""Variables of less than this are not cut."""


def check_number(name: str, value: object, low: float, high: float) -> None:
    """Refuse an option that is no number in range."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        last = high if isinstance(high, int) else f"{high:g}"
        raise InvalidInput(f"{name}: must be {low:g}..{last}, not {value!r}")


def merge_groups(
    variables: Sequence[Variable], *, chunk: int = 0, bucket_mb: float = BUCKET_MB, first_mb: float = FIRST_BUCKET_MB
) -> dict[str, int]:
    """Merge groups of dense variables: `chunk` neighbours each, or else as DDP does it: from the last one on.

    A group holds one data type. Its number says when it is ready: those of the last variables come first in the
    backward pass.
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
    """Places one thing after the other where the load, relative to what a server takes, is least."""

    def __init__(self, servers: Sequence[str], rates: Sequence[float]) -> None:
        self._rates = list(rates)
        self._names = list(servers)
        self._heap = [(0.0, at, 0.0) for at in range(len(servers))]

    def place(self, nbytes: float) -> str:
        """The server of the next thing."""
        _, at, load = heapq.heappop(self._heap)
        load += nbytes
        heapq.heappush(self._heap, (load / self._rates[at], at, load))
        return self._names[at]


def stations(there: Resources, server: str) -> tuple[str, ...]:
    """One station per host that has several devices: the server itself on its own host, else the first device."""
    mine = there.hosts[there.devices.index(server)]
    found = []
    for ranks in there.by_host:
        if len(ranks) > 1:
            found.append(server if there.hosts[ranks[0]] == mine else there.devices[ranks[0]])
    return tuple(found)


def cut_along(variable: Variable, axis: int, parts: int) -> tuple[int, ...]:
    """The partition vector that cuts one axis."""
    size = min(variable.shape[axis], parts, MAX_PARTS)
    return tuple(size if at == axis else 1 for at in range(len(variable.shape)))


def longest_axis(variable: Variable) -> int:
    """The axis to cut: the first, where rows are, unless it is too short for that."""
    shape = variable.shape
    return 0 if shape[0] >= 16 or shape[0] == max(shape) else shape.index(max(shape))
