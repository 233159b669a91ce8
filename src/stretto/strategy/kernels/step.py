# SPDX-License-Identifier: Apache-2.0
"""`StrategyStep`: a training step while kernels rewrite it; `LocalStep`: one rank's part of it;
`Kernel`: the contract.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from ..model import DTYPE_BYTES, ModelSpec, Variable
from ..representation import Strategy, Sync, VariablePart
from ..resources import Resources

INDEX_BYTES = 8
"""Bytes of a row number in PyTorch's sparse gradients."""


@dataclass(frozen=True, kw_only=True)
class VariablePiece:
    """A variable or a part of one, which is synchronized by itself."""

    variable: Variable
    part: VariablePart
    sync: Sync
    whole: bool

    @property
    def name(self) -> str:
        """The variable's name, with the part's number if the variable is cut."""
        return self.variable.name if self.whole else f"{self.variable.name}[{self.part.index}]"

    @property
    def nbytes(self) -> int:
        """Bytes of the piece's parameters."""
        return self.part.elements * DTYPE_BYTES[self.variable.dtype]

    @property
    def rows_bytes(self) -> float:
        """Bytes of the rows (and their numbers) of the piece that one rank's sparse gradient touches."""
        v, shape = self.variable, self.part.shape
        if not shape:
            return 0.0
        rows = v.rows * shape[0] / v.shape[0]
        return rows * (self.nbytes / shape[0] + INDEX_BYTES)

    @property
    def table_bytes(self) -> float:
        """Bytes of all rows of the piece and their numbers."""
        return self.nbytes + self.part.shape[0] * INDEX_BYTES if self.part.shape else 0.0


@dataclass(frozen=True, kw_only=True)
class StepExchange:
    """One collective of a message: a `push` collects gradients, any other exchange distributes parameters.

    `nbytes` are bytes as a `Collective` counts them, `root` is a position in each of the `groups`. `at_work_us` is the
    time of the encoder that runs before the exchange. `direct` is whether a server sums what all ranks send it, instead
    of a library's reduce.
    """

    kind: str
    groups: tuple[tuple[int, ...], ...]
    nbytes: float
    push: bool
    root: int = 0
    at_work_us: float = 0.0
    encoding: str = ""
    direct: bool = False


@dataclass(frozen=True, kw_only=True)
class Message:
    """Pieces that are sent together: their exchanges in order, and the ranks that update the parameters in between."""

    name: str
    pieces: tuple[VariablePiece, ...]
    exchanges: tuple[StepExchange, ...] = ()
    updaters: tuple[int, ...] = ()
    """The ranks that run the optimizer on the message; empty means all that train."""
    update_share: float = 1.0
    """The share of the message that each updater updates, 0..1."""
    lane: int = 0
    """Collectives of one lane run one after the other, in the order of their messages; lanes run in parallel."""
    lag: int = 1
    """The number of iterations after which the forward pass needs the parameters."""

    @property
    def sync(self) -> Sync:
        """The synchronization of all pieces of the message."""
        return self.pieces[0].sync

    @property
    def nbytes(self) -> int:
        """Bytes of the message's parameters."""
        return sum(piece.nbytes for piece in self.pieces)


@dataclass(frozen=True, kw_only=True, eq=False)
class StrategyStep:
    """A training step of all ranks under a strategy; `ranks` are their devices of the cluster."""

    strategy: Strategy
    model: ModelSpec
    there: Resources
    ranks: tuple[int, ...] = ()
    hosts: tuple[tuple[int, ...], ...] = ()
    pieces: tuple[VariablePiece, ...] = ()
    messages: tuple[Message, ...] = ()

    @property
    def num_ranks(self) -> int:
        """The number of ranks, those that only serve among them."""
        return len(self.strategy.devices)

    @property
    def replicas(self) -> tuple[int, ...]:
        """The ranks that train."""
        return self.strategy.replicas


@dataclass(frozen=True, kw_only=True, eq=False)
class LocalStep:
    """The part of one rank: its own group of each exchange, and the messages that it updates.

    An exchange in which the rank has no part stays in its place, without groups: all ranks begin them in one order.
    """

    rank: int
    step: StrategyStep
    messages: tuple[Message, ...]
    updates: tuple[Message, ...]

    @classmethod
    def of(cls, step: StrategyStep, rank: int) -> LocalStep:
        """The local step before any kernel has left anything out."""
        return cls(rank=rank, step=step, messages=step.messages, updates=step.messages)


class Kernel(Protocol):
    """Rewrites a step by one aspect of a strategy: first for all ranks, then for one.

    `global_step` calls `rewrite` of every kernel once, in the order of `KERNELS`; `local_step` calls `localize` in the
    same order for one rank. Both run in the process that asks: in the search, in the command line, and on every rank of
    a job that calls `distribute`. A kernel therefore communicates with no other rank, keeps no state between calls, and
    gives equal results for equal steps. It returns a new step (`dataclasses.replace`) and leaves its argument
    unchanged.

    When `rewrite` is called, ``step.strategy`` has been checked against ``step.model``, and the kernels before have
    filled in: Replicator `ranks` and `hosts`, Partitioner `pieces`, Merger `messages` (without exchanges), Synchronizer
    each message's `exchanges`, `updaters` and `update_share`, Compressor the encoded exchanges, Bridge each message's
    `lag`. Every piece must stay in exactly one message, and all exchanges with ``push=True`` come before the others.
    """

    def rewrite(self, step: StrategyStep) -> StrategyStep:
        """The global stage: return the step of all ranks with this kernel's aspect applied.

        Ranks are 0..num_ranks-1, in the order of ``step.strategy.devices``.
        """
        ...

    def localize(self, local: LocalStep) -> LocalStep:
        """The local stage: return the step without the groups and updates in which ``local.rank`` has no part.

        A kernel whose aspect is the same on all ranks returns its argument.
        """
        ...
