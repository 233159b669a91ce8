"""What all models share: a list of ops under construction, and buckets of gradients."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from ...errors import InvalidInput
from ...units import MIB, is_number
from ..dag import MAX_OPS, Dep, Op, Why, Workload

DDP_BUCKET_BYTES = 25 * MIB
DDP_FIRST_BUCKET_BYTES = 1 * MIB
MAX_RANKS = 1 << 14

Groups = tuple[tuple[int, ...], ...]
Waits = Iterable[str | Dep]


def last(op: str, *, lag: int = 1, why: Why = "data") -> Dep:
    """The op of an earlier iteration."""
    return Dep(op=op, lag=lag, why=why)


class Steps:
    """Collects ops in program order.

    A collective over groups of one rank is no op: whoever waits for it waits for what it would have waited for. So a
    model needs no special case for one rank, for no tensor parallelism, or for experts that all live on one rank.
    """

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self._ops: list[Op] = []
        self._skipped: dict[str, tuple[Dep, ...]] = {}

    def compute(
        self, name: str, duration_us: float, after: Waits = (), *, phase: str, ranks: tuple[int, ...] = ()
    ) -> str:
        """Add a compute-op; returns its name."""
        everybody = len(ranks) in (0, self.num_ranks)
        self._add(
            Op(
                name=name,
                after=_deps(after),
                phase=phase,
                duration_us=duration_us,
                ranks=() if everybody else ranks,
            )
        )
        return name

    def comm(
        self, name: str, kind: str, nbytes: float, after: Waits, *, phase: str, groups: Groups = (), encoding: str = ""
    ) -> str:
        """Add a comm-op over `groups` (all ranks together when empty); returns its name."""
        whole = not groups or groups == (tuple(range(self.num_ranks)),)
        size = self.num_ranks if whole else len(groups[0])
        if size < 2 or not nbytes:
            self._skipped[name] = _deps(after)
            return name
        self._add(
            Op(
                name=name,
                kind=kind,
                after=_deps(after),
                phase=phase,
                nbytes=float(nbytes),
                groups=() if whole else groups,
                encoding=encoding,
            )
        )
        return name

    def _add(self, op: Op) -> None:
        if len(self._ops) >= MAX_OPS:
            raise InvalidInput(f"the model has over {MAX_OPS} ops; try fewer layers, micro-batches or stages")
        self._ops.append(op)

    def workload(self, name: str, *, samples: float, unit: str, notes: Sequence[str]) -> Workload:
        """All that was added, with nothing left that waits for a collective that was skipped."""
        ops = tuple(replace(op, after=self._resolve(op)) if self._skipped else op for op in self._ops)
        return Workload(
            name=name, num_ranks=self.num_ranks, ops=ops, samples=float(samples), unit=unit, notes=tuple(notes)
        )

    def _resolve(self, op: Op) -> tuple[Dep, ...]:
        found: dict[tuple[str, int], Dep] = {}
        waiting = list(reversed(op.after))
        passed: set[str] = set()
        while waiting:
            dep = waiting.pop()
            if dep.op in passed:
                continue
            if dep.op in self._skipped:
                passed.add(dep.op)
                waiting += [
                    Dep(op=behind.op, lag=behind.lag + dep.lag, why=dep.why)
                    for behind in reversed(self._skipped[dep.op])
                ]
            else:
                found.setdefault((dep.op, dep.lag), dep)
        return tuple(found.values())


def _deps(after: Waits) -> tuple[Dep, ...]:
    return tuple(Dep(op=item) if isinstance(item, str) else item for item in after)


def buckets(
    sizes: Sequence[float], cap_bytes: float = DDP_BUCKET_BYTES, *, first_bytes: float | None = None
) -> list[list[int]]:
    """How DistributedDataParallel groups gradients: from the last parameter on, each until it has reached the cap.

    >>> buckets([10, 10, 30, 10, 10], cap_bytes=20)
    [[4, 3], [2], [1, 0]]
    """
    result: list[list[int]] = []
    held, cap = 0.0, cap_bytes if first_bytes is None else first_bytes
    for at in reversed(range(len(sizes))):
        if not result or held >= cap:
            if result:
                cap = cap_bytes
            result.append([])
            held = 0.0
        result[-1].append(at)
        held += sizes[at]
    return result


def blocks_of_buckets(buckets_: Sequence[Sequence[int]]) -> list[list[int]]:
    """The same groups in the order of the forward pass.

    >>> blocks_of_buckets([[4, 3], [2], [1, 0]])
    [[0, 1], [2], [3, 4]]
    """
    return [sorted(bucket) for bucket in reversed(buckets_)]


def numbered(name: str, count: int) -> list[str]:
    """Names of the parts of something: just its own when there is one part only."""
    return [name] if count == 1 else [f"{name}.{number}" for number in range(count)]


def check_count(name: str, value: object, low: int, high: int) -> None:
    """Refuse an option that is no whole number in range."""
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise InvalidInput(f"{name}: must be a whole number {low}..{high}, not {value!r}")


def check_scale(name: str, value: object, low: float, high: float) -> None:
    """Refuse an option that is no number in range."""
    if not is_number(value) or not low <= value <= high:
        raise InvalidInput(f"{name}: must be a number {low:g}..{high:g}, not {value!r}")


def check_ranks(ranks: object) -> None:
    """Refuse a rank count out of range."""
    check_count("ranks", ranks, 1, MAX_RANKS)


def check_divides(name: str, value: int, what: str, total: int) -> None:
    """Refuse a way to spread something that does not come out even."""
    if total % value:
        raise InvalidInput(f"{name}: {value} does not divide {what}, which is {total}")
