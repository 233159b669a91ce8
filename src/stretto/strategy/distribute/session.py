# SPDX-License-Identifier: Apache-2.0
"""A session: one run of a script tries one strategy after the other, so that none of them costs a start.

``STRETTO_TRIAL=session,FOLDER``. Between two steps of the script, the optimizer that `distribute` has returned is
changed to the strategy that is requested in the folder (`strategy.requests`). PyTorch's own DDP can be requested too,
around the same module in the same loop. Every measurement starts from the same weights.
"""

from __future__ import annotations

import gc
import os
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ...errors import InvalidInput
from ..model import ModelSpec
from ..requests import DDP_BUCKET_MB, MODEL_FILE, Arm, Reference, TrialReply, TrialRequest, leave, read_request
from .groups import Groups
from .optimizer import DistributedOptimizer
from .trial import DESCRIBE_STEPS, TRIAL_VARIABLE, Description, StepCounter

POLL_S = 0.005
FEW = 3
"""The number of timed iterations after which a strategy that is far too slow is given up."""


def groups_for(group: Any) -> Groups:
    """The communicators of a script's ranks; in a session the next strategy uses them again."""
    asked = os.environ.get(TRIAL_VARIABLE, "").startswith("session,")
    return _LastingGroups(group) if asked else Groups(group)


class _LastingGroups(Groups):
    def close(self) -> None:
        """Do nothing: the communicators are kept until the job ends."""


def trial_from_environment(
    groups: Groups, describe: Callable[[], ModelSpec], done: Callable[[], None]
) -> StepCounter | None:
    """The trial that STRETTO_TRIAL asks for.

    Args:
        groups: the communicators.
        describe: returns the model's description.
        done: called once the model needs no further observation.

    Returns:
        The trial; None if the variable is not set.

    Raises:
        InvalidInput: the variable is malformed, or its folder does not exist.
    """
    kind, _, rest = os.environ.get(TRIAL_VARIABLE, "").partition(",")
    if kind == "session" and rest:
        if not Path(rest).is_dir():
            raise InvalidInput(f"{TRIAL_VARIABLE}: {rest}: there is no such folder")
        return Session(groups, Path(rest), describe, done)
    trial = StepCounter.from_environment(groups, "", describe)
    if not isinstance(trial, Description):
        done()
    return trial


class Session(StepCounter):
    """Describes the model, then measures what is requested until it is asked to end."""

    def __init__(
        self, groups: Groups, folder: Path, describe: Callable[[], ModelSpec], done: Callable[[], None]
    ) -> None:
        super().__init__(groups, "", 1, DESCRIBE_STEPS, folder)
        self._description = Description(groups, "", folder / MODEL_FILE, describe)
        self._described = done
        self._rank, self._ranks, self._main = groups.rank, groups.size, groups.main
        self._number = -1
        self._asked = TrialRequest()
        self._left: list[int] = []
        self._at = 0
        self._times: list[list[float]] = []
        self._why: list[str] = []
        self.switch: LiveTraining | None = None

    def step(self) -> None:
        """Count an iteration; at the end of a measurement, begin the next one."""
        self._seen += 1
        if self._seen >= max(self.warmup, 1):
            self._marks.append(time.perf_counter())
        if len(self._marks) <= self.timed and not self._hopeless():
            return
        if self._number < 0:
            self._description.conclude()
            self._described()
        else:
            self._times[self._at].append(self._slowest())
            assert self.switch is not None
            self._why[self._at] = self.switch.wrong()
        self._next()

    def _hopeless(self) -> bool:
        """Whether the present arm is so slow that it needs no better measurement; all ranks ask at the same step."""
        return self._asked.enough_us > 0 and len(self._marks) == FEW + 1 and self._slowest() > self._asked.enough_us

    def _slowest(self) -> float:
        spans = [1e6 * (b - a) for a, b in zip(self._marks, self._marks[1:], strict=False)]
        return self.groups.greatest(statistics.median(spans))

    def _next(self) -> None:
        """Begin the next requested arm; one that does not fit this job is noted and skipped."""
        assert self.switch is not None
        while True:
            while not self._left:
                self._ask()
            self._at = self._left.pop(0)
            if self._why[self._at]:
                continue
            try:
                self.switch(self._asked.arm(self._at))
            except InvalidInput as error:
                self._why[self._at] = str(error)
                continue
            self._seen, self._marks = 0, []
            self.warmup, self.timed = self._asked.warmup, self._asked.timed
            return

    def _ask(self) -> None:
        """Write the reply, and wait for the next request; a request without arms ends the job."""
        if self._rank == 0 and self._number >= 0:
            answer = TrialReply(ranks=self._ranks, times_us=self._times, why=self._why)
            leave(answer, self.result / f"{self._number}.answer")
        self._number += 1
        asked: list[Any] = [None]
        if self._rank == 0:
            path = self.result / f"{self._number}.json"
            while not path.exists():
                if not self.result.is_dir():  # the search has removed its folder
                    break
                time.sleep(POLL_S)
            asked = [read_request(path) if path.exists() else TrialRequest()]
        dist.broadcast_object_list(asked, group_src=0, group=self._main)
        self._asked = asked[0]
        count = len(self._asked.arms)
        if not count:
            self.end()
        # Every second round runs in reverse order, so that a drift of the machine's speed affects all arms alike.
        order = list(range(count))
        self._left = [at for number in range(self._asked.rounds) for at in order[:: -1 if number % 2 else 1]]
        self._times, self._why = [[] for _ in order], [""] * count


class LiveTraining:
    """A script's model and optimizer, changed while it runs; an arm that cannot run raises
    `InvalidInput` on all ranks.
    """

    def __init__(
        self, model: nn.Module, made: DistributedOptimizer, group: Any, assemble: Callable[[Arm], DistributedOptimizer]
    ) -> None:
        self._model, self._made, self._group, self._assemble = model, made, group, assemble
        self._ddp: PlainDdp | None = None
        self._open = True
        self._weights = [tensor.detach().clone() for tensor in self._tensors()]

    def _tensors(self) -> list[torch.Tensor]:
        return [*self._model.parameters(), *self._model.buffers()]

    @torch.no_grad()
    def __call__(self, arm: Arm) -> None:
        """Switch to another arm, with the initial weights and without any state of the arm before."""
        if self._open:
            self._made.close()
        if self._ddp is not None:
            self._ddp.close()
        self._open, self._ddp = False, None
        for tensor, weight in zip(self._tensors(), self._weights, strict=True):
            tensor.detach().copy_(weight)
            tensor.grad = None
        fresh = self._assemble(arm)
        self._open = True
        if isinstance(arm, Reference):
            try:
                with torch.enable_grad():
                    self._ddp = PlainDdp(self._model, arm.bucket_mb, self._group)
            except RuntimeError as error:
                raise InvalidInput(f"{arm.name}: {str(error).splitlines()[0]}") from None
        # The script keeps the old object, whose step a scheduler may have wrapped, so its content is replaced.
        fresh.__dict__.update({key: value for key, value in self._made.__dict__.items() if key not in fresh.__dict__})
        self._made.__dict__ = fresh.__dict__

    def wrong(self) -> str:
        """The reason why the measurement is not of the requested arm; empty if it is."""
        unused = self._ddp is not None and not self._ddp.calls
        return "DDP: the script never calls the module itself, so DDP brings nothing together" if unused else ""


class PlainDdp:
    """PyTorch's DDP around a module that the script goes on calling itself."""

    def __init__(self, model: nn.Module, bucket_mb: float, group: Any) -> None:
        self._model = model
        self._before = model.__dict__.get("forward")
        self.calls = 0
        # DDP makes a small first bucket only if no size is given.
        size = None if bucket_mb == DDP_BUCKET_MB else bucket_mb
        # Buffers are not broadcast, as under a strategy; broadcasts would make DDP slower.
        with warnings.catch_warnings():
            # PyTorch 2.13 deprecates broadcast_buffers, but its newer option replaces only a part of it.
            warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
            self.wrapped: Any = nn.parallel.DistributedDataParallel(
                _Shell(model), bucket_cap_mb=size, broadcast_buffers=False, init_sync=False, process_group=group
            )
        # A function is assigned and not the wrapper, because a module assigned to a module becomes its child.
        model.__dict__["forward"] = self._forward

    def _forward(self, *inputs: Any, **named: Any) -> Any:
        self.calls += 1
        return self.wrapped(*inputs, **named)

    def close(self) -> None:
        """Remove DDP from the module."""
        del self._model.forward
        if self._before is not None:
            self._model.__dict__["forward"] = self._before
        self.wrapped = None
        gc.collect()  # the reducer removes its hooks when it is collected


class _Shell(nn.Module):
    """The module that DDP calls: it runs the original forward function."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.inner = model
        self._forward = model.forward

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return self._forward(*inputs, **named)
