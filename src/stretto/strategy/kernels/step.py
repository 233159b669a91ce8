"""`StrategyStep`: a training step while kernels rewrite it, and `LocalStep`: one rank's part of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from ..model import DTYPE_BYTES, ModelSpec, Variable
from ..representation import Strategy, Sync, VariablePart
from ..resources import Resources

INDEX_BYTES = 8
"""The number of a row, as PyTorch's sparse gradients carry it."""


@dataclass(frozen=True, kw_only=True)
class VariablePiece:
    """A variable or a part of one, which is synchronised by itself."""

    variable: Variable
    part: VariablePart
    sync: Sync
    whole: bool

    @property
    def name(self) -> str:
        """The variable's name, with the part's number where it is cut."""
        return self.variable.name if self.whole else f"{self.variable.name}[{self.part.index}]"

    @property
    def nbytes(self) -> int:
        """Bytes of its parameters."""
        return self.part.elements * DTYPE_BYTES[self.variable.dtype]

    @property
    def rows_bytes(self) -> float:
        """Bytes of the rows (and their numbers) that one rank's sparse gradient touches of it."""
        v, shape = self.variable, self.part.shape
        if not shape:
            return 0.0
        rows = v.rows * shape[0] / v.shape[0]
        return rows * (self.nbytes / shape[0] + INDEX_BYTES)

    @property
    def table_bytes(self) -> float:
        """Bytes of all its rows and their numbers."""
        return self.nbytes + self.part.shape[0] * INDEX_BYTES if self.part.shape else 0.0


@dataclass(frozen=True, kw_only=True)
class StepExchange:
    """One collective of a message; `push` brings gradients together, what is not brings parameters back.

    `nbytes` are those that a `Collective` counts, `root` a position in each of the `groups`. `at_work_us` is what is
    computed before it (an encoder's work).
    """

    kind: str
    groups: tuple[tuple[int, ...], ...]
    nbytes: float
    push: bool
    root: int = 0
    at_work_us: float = 0.0
    encoding: str = ""


@dataclass(frozen=True, kw_only=True)
class Message:
    """Pieces that travel together: their exchanges in order, and who updates the parameters in between."""

    name: str
    pieces: tuple[VariablePiece, ...]
    exchanges: tuple[StepExchange, ...] = ()
    updaters: tuple[int, ...] = ()
    """The ranks that run the optimizer on it; all when empty."""
    update_share: float = 1.0
    """The part of it that each of them updates."""
    lane: int = 0
    """Collectives of one lane run one after the other, in the order of their messages; lanes run beside each other."""
    lag: int = 1
    """How many iterations later the forward pass needs it."""

    @property
    def sync(self) -> Sync:
        """How all its pieces are synchronised."""
        return self.pieces[0].sync

    @property
    def nbytes(self) -> int:
        """Bytes of its parameters."""
        return sum(piece.nbytes for piece in self.pieces)


@dataclass(frozen=True, kw_only=True, eq=False)
class StrategyStep:
    """A training step of all ranks under a strategy; `ranks` are the devices of the cluster that hold replicas."""

    strategy: Strategy
    model: ModelSpec
    there: Resources
    ranks: tuple[int, ...] = ()
    hosts: tuple[tuple[int, ...], ...] = ()
    pieces: tuple[VariablePiece, ...] = ()
    messages: tuple[Message, ...] = ()

    @property
    def num_ranks(self) -> int:
        """How many replicas there are."""
        return len(self.strategy.devices)


@dataclass(frozen=True, kw_only=True, eq=False)
class LocalStep:
    """What one rank does: its exchanges (each group reduced to its own), and the messages that it updates."""

    rank: int
    step: StrategyStep
    messages: tuple[Message, ...]
    updates: tuple[Message, ...]

    @classmethod
    def of(cls, step: StrategyStep, rank: int) -> LocalStep:
        """Before any kernel has left anything out."""
        return cls(rank=rank, step=step, messages=step.messages, updates=step.messages)


class Kernel(Protocol):
    """Rewrites a step by one aspect: first for all ranks, then for one."""

    def rewrite(self, step: StrategyStep) -> StrategyStep:
        """The global stage."""
        ...

    def localize(self, local: LocalStep) -> LocalStep:
        """The local stage: leave out what this rank has no part in."""
        ...
