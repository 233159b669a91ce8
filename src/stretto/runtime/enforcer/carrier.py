# SPDX-License-Identifier: Apache-2.0
"""Who moves the motifs of a plan: the contract that every carrier keeps, and what those of CPU tensors share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from ..torch_backend.buffers import CollectiveCall
from ..torch_backend.engine import Engine
from ..torch_backend.job_store import start_store
from ..torch_backend.work import GroupWork
from .background import StoreMaximum
from .binding import MotifBinding
from .compiled_op import CompiledMotif, CompiledOp
from .memory import StagedBuffers
from .planned_work import PlannedWork
from .rank_plan import RankMotif
from .sequencer import ActiveMotif, QueuedMotif, QueuedOp, Sequencer
from .submission import BaseSubmission, StagedSubmission, SubmissionOwner

SLOTS = 6
"""Plans that may be loaded at once, each with a number modulo this of its own: one runs out while the next begins."""
MAX_NUMBER = (1 << 16) - 1
CPU = torch.device("cpu")


class PendingMaximum(Protocol):
    """A maximum over all ranks that is being computed."""

    def over(self, timeout_s: float) -> bool:
        """Whether the maximum is known, or its search failed, within a time."""

    def wait(self) -> list[int]:
        """The values, once all ranks have given theirs."""


class Carrier(Protocol):
    """Moves the data of the motifs of plans, on one rank; the enforcer keeps order and agreement.

    *Who calls.* One enforcer in each process makes one carrier, all ranks at the same point of the program, and
    closes it at the same point. Training's thread calls `check`, `refusal`, `submit` and `agree`; the control plane's
    thread calls `load` and `unload`, and training's thread `load` too, where a call comes with a new size. A motif is
    started by any thread (whoever submits, waits, or reports that another motif has ended), one at a time under the
    sequencer's lock.

    *In which order.* Every motif of a plan is loaded before the plan is active; of one plan all ranks load the motifs
    that they share in the same order, so making connections together is allowed. Ops are submitted in the
    application's order. A carrier hands what it submits to ``site.sequencer.submit``, which starts each motif in its
    turn. Motifs of the same ranks and channels start in the same order on all these ranks, and none before the one
    that holds its channels has ended (brief ones excepted); so a communicator for each (number of the plan, channels,
    ranks) never sees two orders. What is submitted may run out after its plan was unloaded.

    *What it may assume.* Every op that is submitted is one that `refusal` let pass, on all ranks of its group. A
    motif that starts here starts on all its ranks, unless one of them dies or does something else: then the job's
    timeout ends it with an error, or the sequencer does. Memory that a motif was given stays until the op is over.

    *What it promises.* `submit` does not wait for other ranks; that a call is ``blocking`` only says that its thread
    is going to wait at once. The end of a motif is reported by ``site.sequencer.ended``, where the sequencer has
    marked it as ``watched`` or asks for it by `watch`; else whoever waits looks at `ActiveMotif.done`. Reporting more
    ends than that does no harm. A motif that fails has its reason in `ActiveMotif.error`; everything ends with it.

    `HostCarrier` does `submit` in terms of a method that moves one motif, which is all that most carriers want to
    write.

    Attributes:
        programs: Whether it runs the programs that a plan names; else it has algorithms of its own.
        averages: Whether a reduction over all ranks of an op can be an average.
        one_launch_order: Whether a motif that was started may keep all others from running until its peers are there.
            Then all ranks must start all motifs in one order: plans without one are refused, and a call of some ranks
            alone ends the plan.
        device: Where the tensors are that it moves.
    """

    programs: bool
    averages: bool
    one_launch_order: bool
    device: torch.device

    def refusal(self, call: CollectiveCall, engine: Engine) -> str:
        """Why a call is left to the wrapped backend, in plain order; empty where it is not.

        It may depend on nothing but what is the same on all ranks of the call.
        """

    def load(self, number: int, rank_motif: RankMotif, binding: MotifBinding) -> CompiledMotif:
        """Make a motif of a plan ready for one size; the same motif may be loaded for many sizes.

        Args:
            number: The plan's number.
            rank_motif: The motif with its ranks, channels and lane.
            binding: What this rank reads and writes in it, and its program, where `programs` is set.

        Returns:
            What `CompiledOp.motifs` holds for it.

        Raises:
            PlanMismatch: It cannot be carried out here.
        """

    def submit(self, queued: QueuedOp, compiled: CompiledOp) -> GroupWork:
        """Carry out a call as the active plan says.

        Args:
            queued: The op with its call and its tensors; it stands in the plan's order already.
            compiled: What was loaded for each of the op's motifs, for the call's own size.

        Returns:
            What the application waits for.
        """

    def check(self) -> None:
        """Raise what has ended the plan, where no CPU waits; asked before every call and step."""

    def read(self) -> None:
        """Report what was measured since, where measurements come late; before every report."""

    def agree(self, values: Sequence[int]) -> PendingMaximum:
        """Begin to take the maximum of each value over all ranks; all ranks call it in the same order."""

    @property
    def alive(self) -> bool:
        """Whether the job still runs that it was made for."""

    def unload(self, number: int) -> None:
        """Forget a plan. What was submitted and is held back still runs out."""

    def close(self) -> None:
        """End the carrier's threads and give back what it was given."""


@dataclass(frozen=True, kw_only=True)
class CarrierSite:
    """Where a carrier works: what the enforcer that makes it has for it.

    Attributes:
        rank: This process in the job.
        size: The number of the job's processes.
        engine: The engine of the group of all ranks.
        sequencer: The order of the plan: takes what is submitted, and hears of motifs that have ended.
        owner: Hears what was measured, and of waits that take long.
        generation: How many enforcers this process has made; the same on all ranks.
        explain: Turns an error of the wrapped backend's into one that names the rank that is gone.
        hopeless: Why an op that does not end never will, as another rank has left the plan; empty where it may.
    """

    rank: int
    size: int
    engine: Engine
    sequencer: Sequencer
    owner: SubmissionOwner
    generation: int
    explain: Callable[[Exception], Exception]
    hopeless: Callable[[QueuedOp], str]


CarrierMaker = Callable[[CarrierSite], Carrier]
"""Makes this rank's carrier; all ranks call it at the same point."""


class HostCarrier(ABC):
    """A carrier of CPU tensors, whose motifs end some time after they were started; subclasses move single motifs."""

    programs = averages = one_launch_order = False
    device = CPU

    def __init__(self, site: CarrierSite) -> None:
        self.site = site
        self._sequencer, self._owner = site.sequencer, site.owner
        self._agreed = 0

    def refusal(self, call: CollectiveCall, engine: Engine) -> str:
        """Why a call is left to the wrapped backend: what is not plain memory of the host's."""
        if call.device.type != "cpu" or engine.size == 1:
            return "not on the host, or nobody to talk to"
        if call.splits is not None:
            # Not whether a tensor is empty: those of other ranks may not be.
            return "sparse tensors" if any(tensor.layout != torch.strided for tensor in call.inputs) else ""
        return "nothing to move" if call.tensor.layout != torch.strided or call.tensor.numel() == 0 else ""

    @abstractmethod
    def load(self, number: int, rank_motif: RankMotif, binding: MotifBinding) -> CompiledMotif:
        """See `Carrier.load`."""

    @abstractmethod
    def start(
        self, loaded: CompiledMotif, staged: StagedBuffers, dtype: str, op: str, motif: QueuedMotif, *, blocking: bool
    ) -> ActiveMotif:
        """Begin to move one motif, without waiting for it.

        Args:
            loaded: What `load` has made of it.
            staged: Where it reads (`source`) and writes (`target`): (flat tensor, first element, behind the last). The
                target need not hold the input.
            dtype: The type of the elements, by PyTorch's name; ``uint8`` (and so sizes in bytes) where nothing is added
                up, as in all-gathers and all-to-alls of any type.
            op: The reduction (``sum``, ``max``, ...), where the motif is one.
            motif: What `site.sequencer.ended` is told at its end, if it is ``motif.watched``.
            blocking: Whether the thread that calls waits for it at once.

        Returns:
            The motif under way.
        """

    def watch(self, motif: QueuedMotif) -> None:
        """Report the end of a motif that was started without; nothing to do where every end is reported."""
        return

    def submit(self, queued: QueuedOp, compiled: CompiledOp) -> GroupWork:
        """Put an op in line whose motifs `start` moves."""
        submission = StagedSubmission(self._owner, self, queued, compiled)
        return self._put_in_line(queued, submission, inline=queued.blocking and len(compiled.motifs) == 1)

    def _put_in_line(self, queued: QueuedOp, submission: BaseSubmission, *, inline: bool) -> GroupWork:
        tensors = queued.tensors
        # Only a motif that is started inside of this call is started by the thread that waits.
        submission.inline = inline
        self._sequencer.submit(queued, submission)
        submission.inline = False
        return PlannedWork(self._owner, self._sequencer, queued, submission, tensors)

    def check(self) -> None:
        """Raise `PeerLost` where a rank is known to be gone."""
        return

    def read(self) -> None:
        """Measurements come with the ends of motifs."""
        return

    def agree(self, values: Sequence[int]) -> PendingMaximum:
        """Begin to take the maximum of each value over all ranks, through the job's store."""
        self._agreed += 1
        store = start_store("stretto/agreement")
        name = f"{self.site.generation}/{self._agreed}"
        return StoreMaximum(store, name, self.site.rank, self.site.size, values)

    def unload(self, number: int) -> None:
        """Forget a plan; nothing to do where motifs hold nothing."""
        return

    def close(self) -> None:
        """End the carrier's threads; nothing to do where they end with their motifs."""
        return

    @property
    def alive(self) -> bool:
        """Whether the job still runs that it was made for."""
        return dist.is_initialized()
