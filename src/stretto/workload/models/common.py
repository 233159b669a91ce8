# SPDX-License-Identifier: Apache-2.0
"""Code that all models share: a list of ops under construction, gradient buckets, and checks of options."""

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
    """A dependency on an op of an earlier iteration.

    Args:
        op: name of the op.
        lag: number of iterations before, >= 1.
        why: reason of the dependency, see `Dep`.

    Returns:
        The dependency.
    """
    return Dep(op=op, lag=lag, why=why)


class OpCollector:
    """Collects the ops of a step in program order.

    A collective over groups of one rank is left out: an op that waits for it waits for the collective's own
    dependencies. So a model needs no special case for one rank, for no tensor parallelism, or for experts that all live
    on one rank.
    """

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self._ops: list[Op] = []
        self._skipped: dict[str, tuple[Dep, ...]] = {}

    def compute(
        self, name: str, duration_us: float, after: Waits = (), *, phase: str, ranks: tuple[int, ...] = ()
    ) -> str:
        """Add a compute-op.

        Args:
            name: name of the op, unique in the step.
            duration_us: microseconds on each rank.
            after: names of ops of the same iteration, or dependencies, that the op waits for.
            phase: phase of training: ``forward``, ``backward`` or ``optimizer``.
            ranks: ranks that compute the op; empty means all.

        Returns:
            The op's name.

        Raises:
            InvalidInput: the model has too many ops.
        """
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
        """Add a comm-op, or remember that it is left out because its groups have one rank or it moves no bytes.

        Args:
            name: name of the op, unique in the step.
            kind: one of `COMM_KINDS`.
            nbytes: bytes of the larger of one rank's send and receive buffer.
            after: names of ops of the same iteration, or dependencies, that the op waits for.
            phase: phase of training: ``forward``, ``backward`` or ``optimizer``.
            groups: disjoint groups of ranks, all of the same size; empty means one group of all ranks.
            encoding: data type on the wire, such as ``fp16``.

        Returns:
            The op's name; other ops may wait for it even if the op was left out.

        Raises:
            InvalidInput: the model has too many ops.
        """
        whole = not groups or (len(groups[0]) == self.num_ranks and groups == (tuple(range(self.num_ranks)),))
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
        """The collected ops as a workload, with dependencies on left-out collectives replaced by those of the
        collectives.

        Args:
            name: name of the workload.
            samples: samples that all ranks together process in one iteration.
            unit: plural noun for the samples, such as ``images``.
            notes: sentences about assumptions.

        Returns:
            The workload.

        Raises:
            InvalidInput: the ops do not make a valid workload.
        """
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
    """Group gradients as DistributedDataParallel does: from the last parameter on, each bucket until it reaches the
    cap.

    >>> buckets([10, 10, 30, 10, 10], cap_bytes=20)
    [[4, 3], [2], [1, 0]]

    Args:
        sizes: bytes of each gradient, in the order of the forward pass.
        cap_bytes: bytes at which a bucket is full.
        first_bytes: bytes at which the first bucket is full; None takes `cap_bytes`.

    Returns:
        The indices of the gradients in each bucket, in the order in which buckets become full.
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
    """The same buckets, and the gradients in each, in the order of the forward pass.

    >>> blocks_of_buckets([[4, 3], [2], [1, 0]])
    [[0, 1], [2], [3, 4]]
    """
    return [sorted(bucket) for bucket in reversed(buckets_)]


def numbered(name: str, count: int) -> list[str]:
    """Names for the parts of something: the bare name if there is one part only."""
    return [name] if count == 1 else [f"{name}.{number}" for number in range(count)]


def check_count(name: str, value: object, low: int, high: int) -> None:
    """Check that an option is a whole number in a range.

    Args:
        name: name of the option.
        value: its value.
        low: smallest valid number.
        high: largest valid number.

    Raises:
        InvalidInput: the value is no whole number or out of range.
    """
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise InvalidInput(f"{name}: must be a whole number {low}..{high}, not {value!r}")


def check_scale(name: str, value: object, low: float, high: float) -> None:
    """Check that an option is a number in a range.

    Args:
        name: name of the option.
        value: its value.
        low: smallest valid number.
        high: largest valid number.

    Raises:
        InvalidInput: the value is no number or out of range.
    """
    if not is_number(value) or not low <= value <= high:
        raise InvalidInput(f"{name}: must be a number {low:g}..{high:g}, not {value!r}")


def check_ranks(ranks: object) -> None:
    """Raise `InvalidInput` for a number of ranks out of range."""
    check_count("ranks", ranks, 1, MAX_RANKS)


def check_divides(name: str, value: int, what: str, total: int) -> None:
    """Check that an option divides a total.

    Args:
        name: name of the option.
        value: its value, >= 1.
        what: noun for the total, for the error.
        total: the number that must be a multiple of `value`.

    Raises:
        InvalidInput: `value` does not divide `total`.
    """
    if total % value:
        raise InvalidInput(f"{name}: {value} does not divide {what}, which is {total}")
