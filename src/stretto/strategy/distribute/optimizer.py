# SPDX-License-Identifier: Apache-2.0
"""`DistributedOptimizer`: the user's optimizer, run by each rank on the regions that the strategy assigns to it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ...errors import InvalidInput
from .. import Strategy
from .depot import Depot
from .gradients import GradientSynchronizer
from .groups import Groups
from .regions import EVERYONE, VariableRegion, replicated, shares_memory
from .serving import sendable
from .state import gathered_state, spread_state
from .trial import StepCounter


class DistributedOptimizer(torch.optim.Optimizer):
    """Replaces the optimizer that it was made from, with the same parameter groups.

    `state_dict` is that of the optimizer on one process, whatever the strategy; all ranks call it together.
    """

    def __init__(
        self,
        users: torch.optim.Optimizer,
        strategy: Strategy,
        names: dict[int, str],
        parameters: dict[str, nn.Parameter],
        regions: dict[str, list[VariableRegion]],
        sync: GradientSynchronizer,
        depots: list[Depot],
        groups: Groups,
        trial: StepCounter | None,
    ) -> None:
        super().__init__(users.param_groups, users.defaults)
        # The parameter groups are the same objects, so that a scheduler made before goes on working.
        self.param_groups = users.param_groups
        self.strategy = strategy
        self._names = names
        self._parameters = parameters
        self._regions = regions
        self._sync = sync
        self._depots = depots
        self._groups = groups
        self._trial = trial
        self._versions: dict[str, tuple[int, int]] = {}
        self._follows: Any = None
        self._held: dict[tuple[str, VariableRegion], torch.Tensor] = {}
        self._places: dict[tuple[str, VariableRegion], int] = {}
        """The address of the parameter's memory when a held region became a view of it."""
        self._copied: list[tuple[str, VariableRegion]] = []
        """The held regions that are copies of their parameters."""
        known = {id(p) for group in users.param_groups for p in group["params"]}
        self._frozen = [name for name, p in parameters.items() if not p.requires_grad and id(p) in known]
        self._inner = self._alike(users, self._mine)
        stale = {region for depot in depots for region in depot.regions}
        for depot in depots:
            if depot.owner == groups.rank:
                depot.serve(self._alike(users, depot.held), self._copy_options)
        self._shared = [
            name for name, found in regions.items()
            if any(r.owner != EVERYONE and r not in stale for r in found) and sync.groups.size > 1
        ]  # fmt: skip
        # With this flag GradScaler passes gradients on to `step`, which then explains why scaling does not work.
        self._step_supports_amp_scaling = bool(self._shared or depots)
        sync.after = self._mark
        self._load(users.state_dict())

    def _mine(self, name: str) -> list[torch.Tensor]:
        found = self._regions[name]
        if replicated(found):
            return [self._parameters[name]]
        held = []
        stale = {region for depot in self._depots for region in depot.regions}
        for region in found:
            if region.owner in (EVERYONE, self._groups.rank) and region not in stale:
                self._held[name, region] = region.of(self._parameters[name].detach())
                held.append(self._held[name, region])
        return held

    def _alike(self, users: torch.optim.Optimizer, of: Callable[[str], list[torch.Tensor]]) -> torch.optim.Optimizer:
        """An optimizer of the user's class and settings over other tensors."""
        made = object.__new__(type(users))
        made.__dict__.update(users.__dict__)
        made.__dict__.pop("step", None)  # a scheduler may have wrapped the user's step
        made.state = defaultdict(dict)
        made.param_groups = [
            {**group, "params": [
                tensor for p in group["params"]
                for tensor in (of(self._names[id(p)]) if id(p) in self._names else [])
            ]}
            for group in users.param_groups
        ]  # fmt: skip
        return made

    def _copy_options(self, inner: torch.optim.Optimizer) -> None:
        for outer, group in zip(self.param_groups, inner.param_groups, strict=True):
            group.update({key: value for key, value in outer.items() if key != "params"})

    def no_sync(self) -> AbstractContextManager[None]:
        """Inside this context, backward passes only add to this rank's gradients; the next one outside synchronizes
        them
        all.
        """
        return self._sync.quiet()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters once, on all ranks; all ranks call this together."""
        self._groups.home.check()
        if hasattr(self, "grad_scale"):
            name = self._shared[0] if self._shared else self._depots[0].regions[0].variable
            raise InvalidInput(
                f"{name}.kind: GradScaler looks for infinities in this rank's gradients, but the strategy updates with "
                "averaged ones elsewhere: all-reduce everything, or train in bfloat16 without a scaler"
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._sync.bring()
        self._check_untouched()
        self._check_frozen()
        self._groups.tell("step", [sendable(group) for group in self.param_groups])
        self._update()
        if self._trial is not None:
            self._trial.step()
        return loss

    def _update(self) -> None:
        """Update what this rank updates, and bring parameters to the ranks that train."""
        self._look_again()
        self._hand_over()
        self._copy_options(self._inner)
        self._inner.step()
        for name, region in self._copied:
            region.write(self._parameters[name].detach(), self._held[name, region])
        self._sync.pull()
        for depot in self._depots if self._groups.trains else ():
            depot.send(self._parameters)
        for depot in self._depots if self._groups.trains else ():
            depot.receive(self._parameters)
        self._finished()

    # What a rank that only serves does when it is told.

    def hear(self) -> tuple[str, Any]:
        """Wait for the next word of the first rank that trains."""
        assert self._groups.orders is not None
        return self._groups.orders.hear()

    @torch.no_grad()
    def push_for_others(self) -> None:
        """Take part in the messages of a backward pass, without gradients of its own."""
        self._sync.done()
        self._sync.bring()

    @torch.no_grad()
    def update_for_others(self, options: list[dict[str, Any]]) -> None:
        """Update with the averaged gradients, by the options of the rank that trains."""
        for group, given in zip(self.param_groups, options, strict=True):
            group.update(given)
        self._update()

    @torch.no_grad()
    def take_weights(self, weights: dict[str, torch.Tensor]) -> None:
        """Take over weights that were loaded into the model where it trains."""
        for name, values in weights.items():
            self._parameters[name].detach().copy_(values)
        self.refresh()

    def _look_again(self) -> None:
        """Make the held regions views of the parameters' memory again, in case a script has moved it."""
        self._copied.clear()
        for (name, region), held in self._held.items():
            parameter = self._parameters[name]
            if self._places.get((name, region)) != parameter.data_ptr():
                held.data = region.of(parameter.detach())
                if shares_memory(held, parameter):
                    self._places[name, region] = parameter.data_ptr()
                else:
                    # The flat share of a non-contiguous block is a copy, which is written back after the update.
                    self._copied.append((name, region))

    def _hand_over(self) -> None:
        for (name, region), held in self._held.items():
            if region.owner == EVERYONE:
                gradient = self._parameters[name].grad
                held.grad = None if gradient is None else region.of(gradient)
        for carrier in self._sync.carriers:
            for region, gradient in carrier.results:
                held_one = self._held.get((region.variable, region))
                if held_one is not None:
                    held_one.grad = gradient

    def _finished(self) -> None:
        self._sync.done()
        self._versions.clear()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients, as every optimizer does, and the carriers' state of the last backward pass."""
        super().zero_grad(set_to_none)
        self._finished()

    def _mark(self) -> None:
        """Record the versions of the gradients at the end of a backward pass."""
        self._versions.clear()
        for name in self._shared:
            gradient = self._parameters[name].grad
            if gradient is not None:
                self._versions[name] = _version_of(gradient)

    def _check_untouched(self) -> None:
        for name, version in self._versions.items():
            gradient = self._parameters[name].grad
            if gradient is None or _version_of(gradient) != version:
                raise InvalidInput(
                    f"{name}: its gradient was changed between backward and step, but the strategy has the averaged "
                    "gradient elsewhere: clip with optimizer.clip_grad_norm_(), drop with optimizer.zero_grad()"
                )

    def _check_frozen(self) -> None:
        for name in self._frozen:
            if self._parameters[name].grad is not None:
                raise InvalidInput(
                    f"{name}: has a gradient, but was frozen when stretto.torch.distribute was called, so that nobody "
                    "brings its gradients together: call stretto.torch.distribute after requires_grad_(True)"
                )

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scale the averaged gradients of all parameters, on whichever ranks they are, to at most this norm; return the
        norm.
        """
        self._groups.home.check()
        if self._depots:
            raise InvalidInput("clip_grad_norm_: there is no common gradient under a strategy with staleness")
        self._sync.bring()
        self._groups.tell("clip", max_norm)
        # Pairs (whether every rank has the gradient, gradient), including parameters unknown to the optimizer.
        held: list[tuple[bool, torch.Tensor]] = []
        for name, found in self._regions.items():
            gradient = self._parameters[name].grad
            if gradient is not None:
                parts = [region.of(gradient) for region in found if region.owner == EVERYONE]
                held += [(True, part) for part in ([gradient] if replicated(found) else parts)]
        for carrier in self._sync.carriers:
            held += [(False, gradient) for _, gradient in carrier.results if gradient is not None]
        device = next(iter(self._parameters.values())).device
        total = torch.zeros((), dtype=torch.float64, device=device)
        for everywhere, gradient in held:
            values = gradient.coalesce().values() if gradient.is_sparse else gradient
            total += values.double().square().sum() / (len(self._groups.replicas) if everywhere else 1)
        dist.all_reduce(total, group=self._groups.main)
        norm = total.sqrt()
        scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0).item()
        for _, gradient in held:
            gradient.mul_(scale)
        self._mark()
        return norm if any(p.dtype == torch.float64 for p in self._parameters.values()) else norm.float()

    def state_dict(self) -> dict[str, Any]:
        """The state that the optimizer on one process would have, on every rank; all ranks call this together."""
        self._groups.home.check()
        self._groups.tell("state")
        numbers, at = {}, 0
        for group in self.param_groups:
            for parameter in group["params"]:
                numbers[id(parameter)] = at
                at += 1
        state: dict[int, Any] = {}
        for name, found in self._regions.items():
            parameter = self._parameters[name]
            if id(parameter) not in numbers:
                continue
            whole = gathered_state(self._states(name), found, parameter, self._groups)
            if whole:
                state[numbers[id(parameter)]] = whole
        kept = [{**g, "params": [numbers[id(p)] for p in g["params"]]} for g in self.param_groups]
        return {"state": state, "param_groups": kept}

    def _states(self, name: str) -> dict[VariableRegion, dict[str, Any]]:
        """The states of the regions of a variable that this rank updates."""
        found = self._regions[name]
        if replicated(found):
            return {found[0]: self._inner.state.get(self._parameters[name], {})}
        states: dict[VariableRegion, dict[str, Any]] = {
            region: self._inner.state.get(held, {}) for (of, region), held in self._held.items() if of == name
        }
        for depot in self._depots:
            for region in depot.of(name):
                if depot.inner is not None:
                    with depot.lock:
                        states[region] = dict(depot.inner.state.get(depot.masters[region], {}))
        return states

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a `state_dict` of any strategy, or of the optimizer on one process."""
        groups = state_dict.get("param_groups", [])
        if [len(g["params"]) for g in groups] != [len(g["params"]) for g in self.param_groups]:
            raise InvalidInput("state_dict: has other parameter groups than this optimizer")
        self._groups.tell("load", state_dict)
        for outer, saved in zip(self.param_groups, groups, strict=True):
            outer.update({key: value for key, value in saved.items() if key != "params"})
        self._load(state_dict)

    def _load(self, state_dict: dict[str, Any]) -> None:
        at = 0
        for group in self.param_groups:
            for parameter in group["params"]:
                saved = state_dict["state"].get(at, {})
                at += 1
                name = self._names.get(id(parameter))
                if name is None or not saved:
                    continue
                found = self._regions[name]
                if replicated(found):
                    self._inner.state[parameter] = spread_state(saved, parameter, None)
                for (of, region), held in self._held.items():
                    if of == name:
                        self._inner.state[held] = spread_state(saved, parameter, region)
                for depot in self._depots:
                    if depot.inner is not None:
                        with depot.lock:
                            for region in depot.of(name):
                                master = depot.masters[region]
                                depot.inner.state[master] = spread_state(saved, parameter, region)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group during construction; later calls raise `InvalidInput`, because the strategy does not cover new
        parameters.
        """
        if hasattr(self, "strategy"):
            raise InvalidInput(
                "add_param_group: add it before stretto.torch.distribute, the strategy is for what was there"
            )
        super().add_param_group(param_group)

    def refresh(self) -> None:
        """After weights were loaded into the model: let servers take them over that do not load them themselves."""
        if self._groups.orders is not None:
            self._groups.tell("weights", {name: p.detach() for name, p in self._parameters.items()})
        for depot in self._depots:
            depot.take(self._parameters)

    def follow(self, model: nn.Module) -> None:
        """Call `refresh` whenever weights are loaded into the model."""
        watched: Any = model
        self._follows = watched.register_load_state_dict_post_hook(lambda *_: self.refresh())

    def close(self) -> None:
        """Remove hooks and end servers; all ranks call this before the process group is destroyed."""
        if self._follows is not None:
            self._follows.remove()
        self._groups.tell("end")
        for depot in self._depots:
            depot.close()
        self._sync.close()
        for parameter in self._parameters.values():
            parameter.grad = None  # gradients may be views of buffers that are freed here
        self._groups.close()


def _version_of(gradient: torch.Tensor) -> tuple[int, int]:
    """A key that changes when a gradient is changed in place or replaced by another tensor."""
    values = gradient._values() if gradient.is_sparse else gradient
    return values.data_ptr(), gradient._version
