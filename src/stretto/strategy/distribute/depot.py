# SPDX-License-Identifier: Apache-2.0
"""`Depot`: a parameter server that lets ranks run ahead of each other, by at most K steps, or without limit.

Each rank sends the server its gradients after every step and goes on with the parameters that come back. With a bound K
the server updates once the gradients of a step have come from all ranks, and answers a rank's n-th message as soon as n
- K updates are done: no rank finishes a step more than K ahead of what the slowest rank has sent. Without a bound every
message is an update of its own (with 1/ranks of its gradient), answered at once.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ...errors import StrettoError
from ...runtime.torch_backend.current import SERVES
from ..kernels import VariablePiece
from ..representation import ASYNCHRONOUS
from .dense import CASTS
from .groups import Groups
from .regions import VariableRegion, block_of

PUSH, BYE = 1.0, 0.0
CLOSE_S = 60.0


class Depot:
    """The stale pieces of one server, dtype, encoder and bound; `communicator` is for messages between two ranks.

    The messages are in host memory, wherever parameters are, because only there they may arrive at any time.
    """

    def __init__(
        self,
        number: int,
        pieces: Sequence[VariablePiece],
        parameters: dict[str, nn.Parameter],
        groups: Groups,
        communicator: Any,
        owner: int,
    ) -> None:
        sync = pieces[0].sync
        self.staleness = sync.staleness
        self.owner = owner
        self.groups = groups
        self.regions = [VariableRegion(variable=p.variable.name, part=p.part, owner=owner) for p in pieces]
        self.most_ahead = 0
        """The most steps that a rank was ahead of the slowest when it went on."""
        self.lock = threading.Condition()
        self.inner: torch.optim.Optimizer | None = None
        first = parameters[pieces[0].variable.name]
        self._tag = number
        self._communicator = communicator
        self._elements = sum(piece.part.elements for piece in pieces)
        self._head = 1 + len(pieces)
        """The length of a message's head: its kind, and for each region a flag whether it has a gradient."""
        self._dtype = CASTS.get(sync.encoding[0], first.dtype)
        self._answer = torch.empty(self._elements, dtype=first.dtype)
        self._sending: list[tuple[Any, torch.Tensor]] = []
        self._failure = ""
        self._thread: threading.Thread | None = None
        self.masters = {region: region.of(parameters[region.variable].detach()).clone() for region in self.regions}
        self._waiting: list[deque[torch.Tensor]] = [deque() for _ in range(groups.size)]
        self._sent = [0] * groups.size
        self._answered = [0] * groups.size
        self._gone = [rank not in groups.replicas for rank in range(groups.size)]
        self._updates = 0

    def of(self, name: str) -> list[VariableRegion]:
        """The regions of a variable."""
        return [region for region in self.regions if region.variable == name]

    def held(self, name: str) -> list[torch.Tensor]:
        """The tensors of a variable that the server updates."""
        return [self.masters[region] for region in self.of(name)]

    # Methods that every rank calls.

    def send(self, parameters: dict[str, nn.Parameter]) -> None:
        """Send this rank's gradients to the server."""
        flat = torch.zeros(self._head + self._elements, dtype=self._dtype)
        flat[0] = PUSH
        at = self._head
        for number, region in enumerate(self.regions):
            size = region.part.elements
            gradient = parameters[region.variable].grad
            if gradient is not None:
                flat[1 + number] = 1.0
                dense = gradient.to_dense() if gradient.is_sparse else gradient
                flat[at : at + size].view(region.part.shape).copy_(
                    block_of(dense, region.part) / len(self.groups.replicas)
                )
            at += size
        if self.groups.rank == self.owner:
            with self.lock:
                self._accept(self.owner, flat)
        else:
            self._post(self.owner, flat)

    def receive(self, parameters: dict[str, nn.Parameter]) -> None:
        """Wait until this rank may go on, and take over the server's parameters of that moment."""
        if self.groups.rank == self.owner:
            me = self.owner
            with self.lock:
                self.lock.wait_for(lambda: self._failure or self._may_go(me))
                self._check()
                self._note(me)
                for region, master in self.masters.items():
                    region.of(parameters[region.variable].detach()).copy_(master)
            return
        dist.recv(self._answer, src=self.groups.world[self.owner], group=self._communicator, tag=self._tag)
        at = 0
        for region in self.regions:
            size = region.part.elements
            values = self._answer[at : at + size].view(region.part.shape)
            region.of(parameters[region.variable].detach()).copy_(values)
            at += size

    def take(self, parameters: dict[str, nn.Parameter]) -> None:
        """Replace the server's parameters by those of this rank's model."""
        with self.lock:
            for region, master in self.masters.items():
                master.copy_(region.of(parameters[region.variable].detach()))

    def close(self) -> None:
        """Tell the server that this rank sends no more; the server waits for all ranks."""
        if self.groups.rank != self.owner:
            if not self.groups.trains:
                return
            self._post(self.owner, torch.full((self._head + self._elements,), BYE, dtype=self._dtype))
            for work, _ in self._sending:
                work.wait()
            return
        with self.lock:
            self._leave(self.owner)
        if self._thread is not None:
            self._thread.join(CLOSE_S)

    # Methods of the server.

    def serve(self, inner: torch.optim.Optimizer, options: Callable[[torch.optim.Optimizer], None]) -> None:
        """Start to answer, on the rank that is the server."""
        self.inner = inner
        # Counters of optimizer steps skip this optimizer, because it steps for other ranks.
        setattr(inner, SERVES, True)
        self._options = options
        if self.groups.size > 1:
            self._thread = threading.Thread(target=self._run, name=f"depot-{self._tag}", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        incoming = torch.empty(self._head + self._elements, dtype=self._dtype)
        place = {rank: at for at, rank in enumerate(self.groups.world)}
        try:
            while not all(gone or at == self.owner for at, gone in enumerate(self._gone)):
                rank = place[int(dist.recv(incoming, src=None, group=self._communicator, tag=self._tag))]
                with self.lock:
                    if float(incoming[0]) == BYE:
                        self._leave(rank)
                    else:
                        self._accept(rank, incoming.clone())
        except (RuntimeError, StrettoError) as error:
            with self.lock:
                self._failure = str(error).splitlines()[0]
                self.lock.notify_all()

    def _accept(self, rank: int, flat: torch.Tensor) -> None:
        self._check()
        self._sent[rank] += 1
        if self.staleness == ASYNCHRONOUS:
            self._update(flat)
        else:
            self._waiting[rank].append(flat)
        self._go_on()

    def _leave(self, rank: int) -> None:
        self._gone[rank] = True
        self._go_on()

    def _go_on(self) -> None:
        """Update with all gradients that are complete, then answer the ranks that may go on."""
        while any(self._waiting) and all(one or gone for one, gone in zip(self._waiting, self._gone, strict=True)):
            self._update(torch.stack([one.popleft() for one in self._waiting if one]).sum(0))
        for rank in range(self.groups.size):
            if rank != self.owner and self._answered[rank] < self._sent[rank] and self._may_go(rank):
                self._note(rank)
                self._post(rank, torch.cat([master.reshape(-1).cpu() for master in self.masters.values()]))
        self.lock.notify_all()

    def _may_go(self, rank: int) -> bool:
        return self.staleness == ASYNCHRONOUS or self._updates >= self._sent[rank] - self.staleness

    def _note(self, rank: int) -> None:
        self._answered[rank] = self._sent[rank]
        behind = [sent for sent, gone in zip(self._sent, self._gone, strict=True) if not gone]
        self.most_ahead = max(self.most_ahead, self._answered[rank] - min(behind, default=self._answered[rank]))

    def _update(self, flat: torch.Tensor) -> None:
        assert self.inner is not None
        self._updates += 1
        at = self._head
        for (region, master), used in zip(self.masters.items(), flat[1 : self._head].tolist(), strict=True):
            size = region.part.elements
            gradient = flat[at : at + size].view(region.part.shape).to(master.device, master.dtype)
            master.grad = gradient if used else None
            at += size
        self._options(self.inner)
        self.inner.step()

    def _check(self) -> None:
        if self._failure:
            raise StrettoError(f"the parameter server on rank {self.owner} has stopped: {self._failure}")

    def _post(self, rank: int, flat: torch.Tensor) -> None:
        self._sending = [(work, kept) for work, kept in self._sending if not work.is_completed()]
        work = dist.isend(flat, self.groups.world[rank], group=self._communicator, tag=self._tag)
        self._sending.append((work, flat))
