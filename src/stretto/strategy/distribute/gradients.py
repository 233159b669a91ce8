# SPDX-License-Identifier: Apache-2.0
"""Starts each message as soon as the backward pass has its gradients, in one order on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from ...errors import InvalidInput
from ...process_state import STATE, ProcessPart
from .carriers import Flow, PendingExchange, VariableCarrier
from .groups import Groups


class DistributedParameters(ProcessPart):
    """Parameters whose gradients a synchronizer averages; a second synchronizer would average them again."""

    def __init__(self) -> None:
        self.known: Any = WeakIdKeyDictionary()


DISTRIBUTED = STATE.part(DistributedParameters)
AHEAD = 2
"""The number of later messages that are started before the backward pass waits for an earlier one's next exchange."""


class ActiveExchanges:
    """Flows that were started, in an order of starts and waits that does not depend on what has arrived."""

    def __init__(self) -> None:
        self._flows: list[tuple[Flow, PendingExchange] | None] = []

    def begin(self, flow: Flow) -> None:
        """Start a flow, and advance the flows that were started `AHEAD` flows before and have
        another exchange to do.
        """
        first = next(flow, None)
        self._flows.append(None if first is None else (flow, first))
        for at in range(len(self._flows) - AHEAD):
            running = self._flows[at]
            if running is not None and running[1].more:
                self._move(at)

    def _move(self, at: int) -> None:
        running = self._flows[at]
        assert running is not None
        flow, wait = running
        if wait.work is not None:
            wait.work.wait()
        following = next(flow, None)
        self._flows[at] = None if following is None else (flow, following)

    def finish(self) -> None:
        """Wait for all flows, exchange by exchange."""
        while any(running is not None for running in self._flows):
            for at, running in enumerate(self._flows):
                if running is not None:
                    self._move(at)
        self._flows.clear()


class GradientSynchronizer:
    """Hooks on the parameters of all carriers, from the first backward pass on."""

    def __init__(
        self, carriers: Sequence[VariableCarrier], parameters: dict[str, nn.Parameter], groups: Groups
    ) -> None:
        self.carriers = list(carriers)
        self.groups = groups
        self._order = list(range(len(self.carriers)))
        self._ordered = not self.carriers
        self._of: dict[str, list[int]] = {}
        for at, carrier in enumerate(self.carriers):
            for name in carrier.variables:
                self._of.setdefault(name, []).append(at)
        self._missing = [len(carrier.variables) for carrier in self.carriers]
        self._round = 0
        self._arrived: list[int] = []
        self._running = ActiveExchanges()
        self._next = 0
        self._active = False
        self._quiet = False
        self._fresh = False
        """Whether the carriers hold the averages of the present gradients."""
        self._pushed = False
        self.after: Callable[[], None] | None = None
        """Called whenever gradients have been averaged."""
        self._trained = [parameter for parameter in parameters.values() if parameter.requires_grad]
        for parameter in self._trained:
            DISTRIBUTED.known[parameter] = True
        watched: dict[str, Any] = dict(parameters)
        self._hooks = [(watched[name], self._hook(name, watched[name])) for name in self._of]
        self._handles = [parameter.register_post_accumulate_grad_hook(hook) for parameter, hook in self._hooks]
        for carrier in self.carriers:
            carrier.watch()

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Inside this context, backward passes only add to this rank's gradients."""
        before, self._quiet = self._quiet, True
        try:
            yield
        finally:
            self._quiet = before

    def _hook(self, name: str, parameter: Any) -> Callable[[torch.Tensor], None]:
        # The hook runs once for each parameter and step, so it does as little as possible.
        mine = [(at, self.carriers[at]) for at in self._of[name]]
        missing, arrived = self._missing, self._arrived
        seen = 0

        def ready(_: torch.Tensor) -> None:
            nonlocal seen
            self._fresh = False
            if next(reversed(parameter._post_accumulate_grad_hooks.values())) is not ready:
                raise InvalidInput(
                    f"{name}: a hook on its gradient that was registered after stretto.torch.distribute would not be "
                    "seen: register it before, or call optimizer.zero_grad() afterwards"
                )
            if self._quiet:
                return
            if not self._active:
                self._begin()
                torch.autograd.Variable._execution_engine.queue_callback(self._end)
            if seen == self._round:
                raise InvalidInput(f"{name}: its gradient was computed twice in one backward pass")
            seen = self._round
            complete = False
            for at, carrier in mine:
                carrier.accept(name)
                missing[at] -= 1
                if not missing[at]:
                    arrived.append(at)
                    complete = True
            while complete and self._next < len(self._order) and not missing[self._order[self._next]]:
                self._start()

        return ready

    def _begin(self) -> None:
        if self._pushed and any(carrier.stateful for carrier in self.carriers):
            raise InvalidInput(
                "a second backward pass before optimizer.step(): with encoders that keep something back, "
                "accumulate gradients inside `with optimizer.no_sync():`"
            )
        self.groups.tell("push")
        self._active = True
        self._round += 1
        self._next = 0
        self._arrived.clear()
        self._missing[:] = [len(carrier.variables) for carrier in self.carriers]

    def _start(self) -> None:
        self._running.begin(self.carriers[self._order[self._next]].push())
        self._next += 1

    def _end(self) -> None:
        """At the end of a backward pass, also push messages without a gradient on this rank, since other ranks may have
        one.
        """
        while self._next < len(self._order):
            self._start()
        self._running.finish()
        self._active = False
        self._fresh = self._pushed = True
        if not self._ordered:
            self._agree()
        if self.after is not None:
            self.after()

    def _agree(self) -> None:
        """Let messages start from now on in the order in which the first training rank had them ready."""
        order = self._arrived + [at for at in self._order if at not in set(self._arrived)]
        told = torch.tensor(order, dtype=torch.int64, device=self.carriers[0].device)
        dist.broadcast(told, group_src=self.groups.lead, group=self.groups.main)
        self._order = told.tolist()
        self._ordered = True

    def bring(self) -> None:
        """Before an update: push the messages that no backward pass has pushed."""
        if not self._fresh:
            self._begin()
            self._end()

    def pull(self) -> None:
        """After an update: distribute parameters to all ranks."""
        for at in self._order:
            self._running.begin(self.carriers[at].pull())
        self._running.finish()

    def done(self) -> None:
        """Note that the gradients have been used or dropped."""
        self._fresh = self._pushed = False
        for carrier in self.carriers:
            carrier.forget()
        self._be_last()

    def _be_last(self) -> None:
        """Move this object's hooks behind the script's own, also those registered meanwhile, to see their results."""
        for at, (parameter, hook) in enumerate(self._hooks):
            if next(reversed(parameter._post_accumulate_grad_hooks.values()), hook) is not hook:
                self._handles[at].remove()
                self._handles[at] = parameter.register_post_accumulate_grad_hook(hook)

    def close(self) -> None:
        """Remove the hooks from the parameters, and close all carriers."""
        for parameter in self._trained:
            DISTRIBUTED.known.pop(parameter, None)
        for handle in self._handles:
            handle.remove()
        for carrier in self.carriers:
            carrier.close()


def check_free(model: nn.Module) -> None:
    """Raise `InvalidInput` for a model whose gradients are already synchronized."""
    for name, parameter in model.named_parameters():
        if parameter in DISTRIBUTED.known:
            raise InvalidInput(f"{name}: is distributed already: call close() of the earlier optimizer first")
