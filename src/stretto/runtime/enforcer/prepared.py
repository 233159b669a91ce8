# SPDX-License-Identifier: Apache-2.0
"""A plan made ready on this rank: its share, its programs, what the application is expected to call."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ...cluster import Cluster
from ...planner.plan import Plan
from ...workload import Op, Workload
from ..torch_backend.buffers import CollectiveCall
from ..torch_backend.selection import STRAIGHT
from .binding import OpBinding, Programs, bind_op
from .carrier import Carrier
from .compiled_op import CompiledOp
from .rank_plan import RankPlan, share_of
from .report import OutgrownOp
from .sequencer import QueuedMotif, QueuedOp
from .splits import bind_splits, carries_splits
from .submission import ONE_TENSOR

USUAL_BYTES = 4
"""Reductions are mostly of float32; for other types programs are made when the first call comes."""
MAX_BOUND = 4096
"""How many sizes of ops whose size follows the data are remembered."""
ROOTED = ("broadcast", "reduce", "gather", "scatter")
ONE_SIDED = ("gather", "scatter")
"""Only the root has the larger buffer."""
REDUCING = ("all_reduce", "reduce_scatter", "reduce")


class ExpectedOps:
    """The comm-ops that this rank submits in an iteration, in order."""

    def __init__(self, workload: Workload, rank: int, equal_only: frozenset[int] = frozenset()) -> None:
        self._equal_only = equal_only
        """Positions of all-to-alls that a plan can carry out with equal pieces only."""
        self.digest = workload.digest
        self.workload = workload
        self.ops: list[tuple[int, Op, tuple[int, ...]]] = []
        self._usual: list[tuple[str, int, tuple[int, ...]]] = []
        """What a call mostly is, to compare with at once."""
        for number, op in enumerate(workload.ops):
            if op.is_comm and op.kind != "send" and rank in workload.ranks_of(op):
                group = next(group for group in workload.groups_of(op) if rank in group)
                self.ops.append((number, op, group))
                self._usual.append(("" if op.kind in ROOTED else op.kind, int(op.nbytes), group))

        self.countable = frozenset(range(workload.num_ranks)) == frozenset(
            rank for op in workload.ops if op.is_comm and op.kind != "send" for rank in workload.ranks_of(op)
        )
        """Whether iterations can be counted by calls: every rank of the job has some in each. The same on all ranks."""

    def __len__(self) -> int:
        return len(self.ops)

    def begins(self, call: CollectiveCall, ranks: Sequence[int]) -> bool:
        """Whether a call is the first of an iteration."""
        return not self.refusal(0, call, ranks)

    def differs_in_size(self, at: int, call: CollectiveCall, ranks: Sequence[int]) -> bool:
        """Whether a call that is refused is what comes next but for its size.

        Args:
            at: The position in the step of the op that comes next.
            call: The call.
            ranks: The ranks of its group.

        Returns:
            True where only the size differs.
        """
        _, op, group = self.ops[at]
        return call.op == op.kind and tuple(ranks) == group and (op.kind not in ROOTED or call.root == op.root)

    def refusal(self, at: int, call: CollectiveCall, ranks: Sequence[int]) -> str:
        """How a call differs from what comes next; empty where it does not.

        Args:
            at: The position in the step of the op that comes next.
            call: The call.
            ranks: The ranks of its group.

        Returns:
            The difference in words, or an empty text.
        """
        if at < len(self.ops) and call.splits is None and self._usual[at] == (call.op, call.nbytes, ranks):
            return ""
        if at >= len(self.ops):
            return f"{self.said(call, ranks)} comes after the last comm-op of an iteration"
        number, op, group = self.ops[at]
        if call.op == "barrier":
            same = op.kind == "all_reduce"
        else:
            # With splits each rank has a size of its own, and one that follows the data may always grow: to tell ops
            # apart by it would part the ranks.
            size = op.at_most or call.splits is not None or _nbytes(call, len(ranks)) == op.nbytes
            same = call.op == op.kind and size and (op.kind not in ROOTED or call.root == op.root)
        if same and tuple(ranks) == group and not (call.splits is not None and number in self._equal_only):
            return ""
        equal = " in equal pieces" if number in self._equal_only else ""
        wanted = f"{op.kind} of {op.nbytes:g} bytes among ranks {_listed(group)}{equal}"
        return f"{self.said(call, ranks)} comes instead of {op.name} ({wanted})"

    @staticmethod
    def said(call: CollectiveCall, ranks: Sequence[int]) -> str:
        """A call in words, for errors."""
        splits = " with splits" if call.splits is not None else ""
        return f"{call.op}{splits} of {_nbytes(call, len(ranks))} bytes among ranks {_listed(ranks)}"


class PreparedPlan:
    """A plan ready to become active."""

    def __init__(
        self, plan: Plan, workload: Workload, number: int, *, rank: int, hosts: Sequence[str], carrier: Carrier,
        cluster: Cluster | None, programs: Programs,
    ) -> None:  # fmt: skip
        self.plan, self.number, self.hash = plan, number, plan.hash
        self.share: RankPlan = share_of(
            plan, workload, rank, hosts, messages=not carrier.one_launch_order, link_turns=not carrier.one_launch_order
        )
        self._splits = frozenset(number for number, rank_op in self.share.ops.items() if carries_splits(rank_op))
        exchanges = {number for number, rank_op in self.share.ops.items() if rank_op.whole.kind == "AA"}
        self.expected = ExpectedOps(workload, rank, frozenset(exchanges - self._splits))
        self._last_split: dict[int, tuple[tuple[int, ...], tuple[int, ...], CompiledOp]] = {}
        self._rank, self._carrier = rank, carrier
        self._any_sizes = frozenset(number for number in self._splits if self._carries_any_sizes(number))
        self._cluster = cluster if cluster is not None and cluster.digest == plan.cluster_digest else None
        self._bound: dict[tuple[int, int], CompiledOp] = {}
        self._programs: Programs | None = programs if carrier.programs else None
        self._first = 0
        self._next = 0
        self._queued_ops: dict[tuple[int, int], QueuedOp] = {}
        self._largest: dict[int, int] = {}
        """The most bytes that an op was called with, of ops that the plan was made for less of."""
        for number_, op, group in self.expected.ops:
            if number_ in self._splits:
                self.bound_splits(number_, (0,) * len(group), (0,) * len(group))
            if not self.may_split(number_):
                self.bound(number_, int(op.nbytes) // (USUAL_BYTES if op.kind in REDUCING else 1))

    def compiled(self, queued: QueuedOp) -> CompiledOp | None:
        """A queued op for the size of its call; None where the call's tensors do not fit together."""
        call, op = queued.call, queued.rank_op.number
        assert call is not None
        if call.op in ONE_TENSOR and len(call.inputs) == 1:
            # The call's size is known before memory is laid out, which some carriers need not do.
            return self.bound(op, call.inputs[0].numel() if call.reduce else call.nbytes)
        buffers = queued.buffers
        if buffers is None:
            return None
        if call.splits is not None:
            return self.bound_splits(op, buffers.gives, buffers.takes)
        return self.bound(op, buffers.count)

    def bound(self, op: int, elements: int) -> CompiledOp:
        """The compiled op for a number of elements of its larger buffer."""
        key = (op, elements)
        found = self._bound.get(key)
        if found is None:
            if len(self._bound) >= MAX_BOUND:
                self._bound.clear()
            binding = bind_op(self.share.ops[op], self._rank, elements, self._cluster, self._programs)
            found = self._bound[key] = self._loaded(op, binding)
        return found

    def measure(self, op: int, call: CollectiveCall) -> None:
        """Keep the size of a call of an op, where it is the largest so far and more than was planned."""
        rank_op = self.share.ops[op]
        if call.nbytes <= rank_op.op.nbytes and call.op not in ONE_SIDED:
            return
        nbytes = _nbytes(call, len(rank_op.whole.ranks))
        if nbytes > rank_op.op.nbytes and nbytes > self._largest.get(op, 0):
            self._largest[op] = nbytes

    @property
    def outgrown(self) -> tuple[OutgrownOp, ...]:
        """Ops that have come with more bytes than the plan was made for."""
        return tuple(
            OutgrownOp(op=self.share.ops[op].op.name, planned_nbytes=self.share.ops[op].op.nbytes, nbytes=nbytes)
            for op, nbytes in sorted(self._largest.copy().items())
        )

    def may_split(self, op: int) -> bool:
        """Whether an op is carried out for pieces of any sizes on all ranks, since some rank may give splits."""
        return op in self._any_sizes

    def _carries_any_sizes(self, op: int) -> bool:
        """Where no splits were recorded, only if it costs nothing: no algorithm of the plan's is given up."""
        rank_op = self.share.ops[op]
        straight = not self._carrier.programs or all(rank_motif.algorithm == STRAIGHT for rank_motif in rank_op.motifs)
        return rank_op.op.at_most or straight

    def bound_splits(self, op: int, gives: tuple[int, ...], takes: tuple[int, ...]) -> CompiledOp:
        """An all-to-all with splits: the bytes that go to, and come from, each rank. The last sizes are remembered.

        Args:
            op: The op's number in the workload.
            gives: Bytes to each rank.
            takes: Bytes from each rank.

        Returns:
            The compiled op.
        """
        last = self._last_split.get(op)
        if last is not None and last[:2] == (gives, takes):
            return last[2]
        bound = self._loaded(op, bind_splits(self.share.ops[op], self._rank, gives, takes, self._programs))
        self._last_split[op] = (gives, takes, bound)
        return bound

    def _loaded(self, op: int, binding: OpBinding) -> CompiledOp:
        motifs = {
            motif.number: None if bound is None else self._carrier.load(self.number, motif, bound)
            for motif, bound in zip(self.share.ops[op].motifs, binding.motifs, strict=True)
        }
        return CompiledOp.of(binding, motifs)

    def begin(self, iteration: int) -> Iterator[QueuedMotif]:
        """The plan becomes active with this iteration: what would have run before it is made up for."""
        self._first, self._next = iteration, iteration - self.share.most_ahead
        yield from self.open(iteration)

    def open(self, iteration: int, *, before: tuple[int, int] | None = None) -> Iterator[QueuedMotif]:
        """What stands in line up to the end of an iteration; with `before` only of ops that come earlier.

        The plan's iterations begin at one moment for all ranks. A rank whose own begin later, as the last stage of a
        pipeline's do, may wait in one iteration for what the plan has in the next: that stands in line, too.
        """
        behind = self.share.most_behind if before is None else 0
        for window in range(self._next, iteration + 1 + behind):
            for turn in self.share.turns:
                at = window + turn.ahead
                if before is not None and self.share.ops[turn.op].op.kind == "send":
                    # A plan that ends waits for no messages; those that it holds back begin at once.
                    continue
                if at >= self._first and (before is None or (at, turn.op) < before):
                    yield self.queued_op(at, turn.op).motifs[turn.motif]
        self._next = max(self._next, iteration + 1 + behind)

    def close(self, before: tuple[int, int]) -> Iterator[QueuedMotif]:
        """What is still to run of the ops before this place, when the plan ends there."""
        yield from self.open(before[0] + self.share.most_behind, before=before)

    def queued_op(self, iteration: int, op: int) -> QueuedOp:
        """One op of one iteration."""
        key = (iteration, op)
        found = self._queued_ops.get(key)
        if found is None:
            found = self._queued_ops[key] = QueuedOp(self.number, self.share.ops[op], iteration)
        return found

    def forget(self, before: int) -> None:
        """Iterations that are over on this rank."""
        for key in [key for key, one in self._queued_ops.items() if key[0] < before and one.done]:
            one = self._queued_ops.pop(key)
            if not one.left:
                one.forget()


def _nbytes(call: CollectiveCall, ranks: int) -> int:
    """As a workload counts: the larger buffer of any rank."""
    if call.op in ONE_SIDED and call.inputs + call.outputs:
        tensor = call.tensor
        return tensor.numel() * tensor.element_size() * ranks
    return call.nbytes


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
