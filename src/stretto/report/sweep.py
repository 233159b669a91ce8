# SPDX-License-Identifier: Apache-2.0
"""One collective over many sizes: the time of every algorithm beside the lower bound."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ..errors import InvalidInput
from ..units import format_bytes, parse_bytes

MAX_SIZES = 64


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """``time_us[algorithm][k]`` is the time for ``sizes[k]`` bytes, ``bound_us[k]`` the lower bound for that size."""

    cluster: str
    collective: str
    sizes: tuple[int, ...]
    bound_us: tuple[float, ...]
    time_us: Mapping[str, tuple[float, ...]]
    facts: tuple[tuple[str, str], ...] = ()
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Algorithms that are not shown, each with the reason."""

    @property
    def by_speed(self) -> list[str]:
        """The algorithms, sorted by their time at the largest size."""
        return sorted(self.time_us, key=lambda name: (self.time_us[name][-1], name))

    @property
    def largest(self) -> str:
        """The largest size, as a person writes it."""
        return format_bytes(self.sizes[-1])

    def best(self, at: int) -> str:
        """The fastest algorithm at ``sizes[at]``."""
        return min(self.time_us, key=lambda name: (self.time_us[name][at], name))

    def algorithm_gb_per_s(self, name: str) -> tuple[float, ...]:
        """Bytes divided by time at every size: the algorithm bandwidth that benchmarks of collectives print."""
        return rates(self.sizes, self.time_us[name])

    def times_bound(self, name: str) -> tuple[float, ...]:
        """Time divided by the lower bound at every size."""
        pairs = zip(self.time_us[name], self.bound_us, strict=True)
        return tuple(us / bound if bound > 0 else 1.0 for us, bound in pairs)

    def rows(self) -> list[dict[str, object]]:
        """Flat rows with units in the keys, in the form that the benchmarks write."""
        about = {"cluster": self.cluster, "collective": self.collective} | dict(self.facts)
        return [
            {
                "case": f"{self.collective} {format_bytes(size).replace(' ', '')}",
                "system": name,
                **about,
                "nbytes": size,
                "time_us": times[at],
                "bound_us": self.bound_us[at],
                "algorithm_gb_per_s": self.algorithm_gb_per_s(name)[at],
            }
            for name, times in self.time_us.items()
            for at, size in enumerate(self.sizes)
        ]


def rates(sizes: Sequence[int], times_us: Sequence[float]) -> tuple[float, ...]:
    """The rate in GB/s for each size; infinite where the time is 0."""
    pairs = zip(sizes, times_us, strict=True)
    return tuple(size / us / 1e3 if us > 0 else float("inf") for size, us in pairs)


def run_sweep(
    names: Sequence[str],
    sizes: Sequence[int],
    *,
    cluster: str,
    collective: str,
    time_us: Callable[[str, int], float],
    bound_us: Callable[[int], float],
    advance: Callable[[str], None] = lambda label: None,
    facts: tuple[tuple[str, str], ...] = (),
    left_out: Mapping[str, str] | None = None,
) -> Sweep:
    """Evaluate every algorithm at every size, and the bound at every size.

    Args:
        names: the algorithms.
        sizes: the sizes in bytes.
        cluster: name of the cluster.
        collective: name of the collective.
        time_us: returns the microseconds of an algorithm for a size.
        bound_us: returns the lower bound in microseconds for a size.
        advance: called before each evaluation with a label of it, for progress bars.
        facts: pairs of name and value that are shown with the results.
        left_out: algorithms that are not evaluated, each with the reason.

    Returns:
        All times and bounds.
    """
    times: dict[str, tuple[float, ...]] = {}
    bounds = []
    for size in sizes:
        advance(f"bound {format_bytes(size)}")
        bounds.append(bound_us(size))
    for name in names:
        row = []
        for size in sizes:
            advance(f"{name} {format_bytes(size)}")
            row.append(time_us(name, size))
        times[name] = tuple(row)
    return Sweep(
        cluster=cluster,
        collective=collective,
        sizes=tuple(sizes),
        bound_us=tuple(bounds),
        time_us=times,
        facts=facts,
        left_out=left_out or {},
    )


def check_factor(factor: float) -> None:
    """Raise `InvalidInput` for a factor by which sizes do not grow."""
    if not 1.1 <= factor < math.inf:
        raise InvalidInput(f"factor: must be >= 1.1, not {factor:g}")


def parse_sizes(text: str, *, factor: float = 4.0) -> tuple[int, ...]:
    """One size, several sizes, or a range that grows by `factor` and always contains its end.

    >>> parse_sizes("64M"), parse_sizes("1K,1M"), parse_sizes("1Ki..100Ki")
    ((64000000,), (1000, 1000000), (1024, 4096, 16384, 65536, 102400))
    """
    check_factor(factor)
    if ".." not in text:
        sizes = tuple(parse_bytes(part) for part in text.split(","))
    else:
        low, high = (parse_bytes(part) for part in text.split("..", 1))
        if low > high:
            raise InvalidInput(f"size {text!r}: the range must rise")
        grown: list[int] = []
        size = float(low)
        while size < high and len(grown) <= MAX_SIZES:
            grown.append(round(size))
            size *= factor
        sizes = (*grown, high)
    if len(sizes) > MAX_SIZES:
        raise InvalidInput(f"size {text!r}: at most {MAX_SIZES} sizes, use a larger factor")
    return tuple(dict.fromkeys(sizes))
