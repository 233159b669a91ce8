# SPDX-License-Identifier: Apache-2.0
"""What scripts do to a model beside plain steps: on two ranks, beside one process, or refused in one line."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # optimizers need it: imported once, before the forks
import torch.distributed as dist
from capture_scenarios import fork
from torch import nn
from torch.utils.checkpoint import checkpoint

import stretto
import stretto.torch
from stretto.strategy import Strategy
from stretto.strategy.builders import build
from stretto.strategy.distribute import model_spec

BUILDERS: dict[str, dict[str, Any]] = {
    "all_reduce": {"chunk": 1}, "ps_balanced": {"servers": "devices"}, "partitioned_ps": {"part_mb": 0.0, "parts": 2},
    "zero2": {"bucket_mb": 0.0001},
}  # fmt: skip
STEPS = 3
Model = Callable[[], nn.Module]
Loop = Callable[[nn.Module, Any, int, list[int]], None]


def strategy_of(model: nn.Module, builder: str, **options: Any) -> Strategy:
    """What a builder makes for this number of ranks."""
    return build(builder, model_spec(model), dist.get_world_size(), **(BUILDERS[builder] | options))


def inputs(step: int, rank: int) -> torch.Tensor:
    """What a rank trains on in a step."""
    return torch.randn(3, 6, generator=torch.Generator().manual_seed(10 * step + rank), dtype=torch.float64)


def plain_step(model: nn.Module, optimizer: Any, step: int, ranks: list[int]) -> None:
    """The mean of the losses of some ranks' batches, and an update."""
    optimizer.zero_grad()
    for rank in ranks:
        (model(inputs(step, rank)).square().mean() / len(ranks)).backward()
    optimizer.step()


def weights(model: nn.Module) -> torch.Tensor:
    """All parameters in one vector."""
    return torch.cat([p.detach().double().reshape(-1) for p in model.parameters()])


def apart(make: Model, strategy: Callable[[nn.Module], Strategy | None], loop: Loop = plain_step, **sgd: Any) -> Any:
    """How far a loop ends from the same loop in one process with all batches; or what it is refused with."""
    ranks = list(range(dist.get_world_size()))
    found = []
    for mine in (ranks, [dist.get_rank()]):
        torch.manual_seed(1)
        model = make().double()
        optimizer: Any = torch.optim.SGD(model.parameters(), **({"lr": 0.1, "momentum": 0.9} | sgd))
        distributed = len(mine) == 1
        try:
            if distributed:
                model, optimizer = stretto.torch.distribute(model, optimizer, strategy(model))
            for step in range(STEPS):
                loop(model, optimizer, step, mine)
        except stretto.InvalidInput as error:
            return str(error)
        if distributed:
            optimizer.close()
        found.append(weights(model))
    return float((found[0] - found[1]).abs().max())


class Twice(nn.Module):
    """One layer at two places, registered under two names, its weight also used as a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(6, 6)
        self.two = self.one

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Through it twice, and by the weight itself."""
        out: torch.Tensor = self.two(self.one(x).tanh()) + x @ self.one.weight
        return out


class Overlapping(nn.Module):
    """Two parameters in the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self.whole = nn.Parameter(torch.randn(6, 6, dtype=torch.float64))
        self.part = nn.Parameter(self.whole.detach()[:3])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Both are used."""
        return (x @ self.whole).tanh() @ self.part.T


class Checkpointed(nn.Module):
    """Layers that are computed again in the backward pass, in the older way: a backward pass inside another."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The middle one is computed twice."""
        y = self.first(x).tanh()
        y = checkpoint(self.second, y, use_reentrant=True)
        out: torch.Tensor = self.third(y.tanh())
        return out


class Buffered(nn.Module):
    """Buffers of types that not every backend sends."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        rank = dist.get_rank()
        self.register_buffer("flags", torch.tensor([rank == 0, True]))
        self.register_buffer("waves", torch.full((2, 2), complex(rank, 1), dtype=torch.complex64).t())
        self.register_buffer("empty", torch.zeros(0, 4))
        self.register_buffer("count", torch.tensor(rank, dtype=torch.int16), persistent=False)
        self.register_buffer("graph", torch.eye(3).mul(rank + 1.0).to_sparse())
        self.register_buffer("small", torch.full((2,), rank + 1.0).to(torch.float8_e4m3fn))

    def sums(self) -> list[float]:
        """The buffers in numbers."""
        found = [b.to_dense() if b.is_sparse else b for b in self.buffers()]
        return [float((b.abs() if b.is_complex() else b).double().sum()) for b in found]


def two(width: int = 6) -> nn.Module:
    """Two layers."""
    return nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 6))


def half_frozen() -> nn.Module:
    """Two layers, the first one frozen."""
    model: Any = two()
    model[0].requires_grad_(False)
    frozen: nn.Module = model
    return frozen


def table() -> nn.Module:
    """A sparse table behind indices that come from numbers."""

    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(11, 6, sparse=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.table((x[:, 0].abs() * 3).long().clamp(max=10)) * x
            return out

    return Table()


def moved_memory(model: nn.Module, optimizer: Any, step: int, ranks: list[int]) -> None:
    """A script that puts parameters into other memory between steps."""
    plain_step(model, optimizer, step, ranks)
    nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(model.parameters()).detach() * 0.9, model.parameters())


def later_momentum(model: nn.Module, optimizer: Any, step: int, ranks: list[int]) -> None:
    """A schedule that switches momentum on after the first step."""
    for group in optimizer.param_groups:
        group["momentum"] = 0.9 if step else 0.0
    plain_step(model, optimizer, step, ranks)


def second_order(model: nn.Module, optimizer: Any, step: int, ranks: list[int]) -> None:
    """Gradients that have a graph themselves."""
    optimizer.zero_grad()
    for rank in ranks:
        (model(inputs(step, rank)).square().mean() / len(ranks)).backward(create_graph=True)
    optimizer.step()


def unfrozen(model: Any, optimizer: Any, step: int, ranks: list[int]) -> None:
    """A layer that is frozen at first, and then is not."""
    model[0].requires_grad_(step > 0)
    plain_step(model, optimizer, step, ranks)


def replaced(model: nn.Module, optimizer: Any, step: int, ranks: list[int]) -> None:
    """Gradients with other ones put in their place."""
    optimizer.zero_grad()
    for rank in ranks:
        (model(inputs(step, rank)).square().mean() / len(ranks)).backward()
    for p in model.parameters():
        p.grad = p.grad * 0.5 if p.grad is not None else None
    optimizer.step()


def dropped(model: nn.Module, optimizer: Any, step: int, ranks: list[int]) -> None:
    """Gradients that are thrown away in the second step, without the optimizer's knowledge."""
    optimizer.zero_grad()
    for rank in ranks:
        (model(inputs(step, rank)).square().mean() / len(ranks)).backward()
    if step == 1:
        model.zero_grad()
    optimizer.step()


def halved(p: Any) -> None:
    """A script's own hook."""
    p.grad.mul_(0.5)


def hooked(model: nn.Module, optimizer: Any, step: int, ranks: list[int]) -> None:
    """Hooks of the script on gradients, registered after `stretto.torch.distribute`."""
    if step == 0:
        for p in model.parameters():
            watched: Any = p
            watched.register_post_accumulate_grad_hook(halved)
    optimizer.zero_grad()
    torch.stack([model(inputs(step, rank)).square().mean() for rank in ranks]).mean().backward()  # type: ignore[no-untyped-call]
    optimizer.step()


def hooked_late(model: nn.Module, optimizer: Any, step: int, ranks: list[int]) -> None:
    """The same, right before the first backward pass."""
    if step == 0:
        for p in model.parameters():
            watched: Any = p
            watched.register_post_accumulate_grad_hook(halved)
    torch.stack([model(inputs(step, rank)).square().mean() for rank in ranks]).mean().backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()


def penalised(model: Any, optimizer: Any, step: int, ranks: list[int]) -> None:
    """A backward pass through a layer that leaves no gradients, from the second step on."""
    optimizer.zero_grad()
    for rank in ranks:
        x = inputs(step, rank).requires_grad_()
        out = model(x)
        if step:
            torch.autograd.grad(out.sum(), x, retain_graph=True)
        (out.square().mean() / len(ranks)).backward()
    optimizer.step()


def thrown_away(model: nn.Module, optimizer: Any, step: int, ranks: list[int]) -> None:
    """A pass inside no_sync whose gradients the script throws away itself."""
    optimizer.zero_grad()
    if len(ranks) == 1:
        with optimizer.no_sync():
            model(inputs(step + 7, ranks[0])).sum().backward()
        model.zero_grad()
    for rank in ranks:
        (model(inputs(step, rank)).square().mean() / len(ranks)).backward()
    optimizer.step()


class GlobalClip(torch.optim.SGD):
    """An optimizer whose update of one variable depends on the others."""


def foreign(builder: str) -> Any:
    """An optimizer that nobody knows."""
    model = two().double()
    optimizer = GlobalClip(model.parameters(), lr=0.1)
    return said(lambda: stretto.torch.distribute(model, optimizer, strategy_of(model, builder)))


def adafactor(builder: str) -> Any:
    """An optimizer that looks at rows and columns; of zero2's one message each rank has a whole variable, but flat."""
    model = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)).double()
    optimizer = torch.optim.Adafactor(model.parameters())
    options = {"bucket_mb": 26.0} if builder == "zero2" else {}
    return said(lambda: stretto.torch.distribute(model, optimizer, strategy_of(model, builder, **options)))


def said(act: Callable[[], Any]) -> str:
    """What an act is refused with on this rank."""
    try:
        act()
    except stretto.InvalidInput as error:
        return str(error)
    return ""


def again() -> list[str]:
    """A model distributed twice, and once more after the first was closed."""
    model = two().double()
    _, first = stretto.torch.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
    found = [said(lambda: stretto.torch.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1)))]
    first.close()
    found.append(said(lambda: stretto.torch.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))[1].close()))
    return found


def unlike(folder: Path) -> dict[str, str]:
    """Ranks that differ."""
    rank = dist.get_rank()
    found = {}
    model = two().double()
    found["options"] = said(lambda: stretto.torch.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1 + rank)))
    groups = [{"params": [p]} for p in list(model.parameters())[:: 1 - 2 * rank]]
    found["groups"] = said(lambda: stretto.torch.distribute(model, torch.optim.SGD(groups, lr=0.1)))
    wide = two(6 + rank).double()
    found["shapes"] = said(lambda: stretto.torch.distribute(wide, torch.optim.SGD(wide.parameters(), lr=0.1)))
    conv = nn.Conv2d(3, 4, 2)
    if rank:
        conv.weight.data = conv.weight.data.contiguous(memory_format=torch.channels_last)
    found["layout"] = said(lambda: stretto.torch.distribute(conv, torch.optim.SGD(conv.parameters(), lr=0.1)))
    path = folder / f"strategy-{rank}.yaml"
    if rank == 0:
        from stretto.strategy.files import save_strategy

        save_strategy(strategy_of(model, "all_reduce"), path)
    found["file"] = said(lambda: stretto.torch.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), path))
    warm = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if rank == 0:
        model(inputs(0, 0)).sum().backward()
        warm.step()
        model.zero_grad()
    found["state"] = said(lambda: stretto.torch.distribute(model, warm))
    return found


def pickled() -> float:
    """A strategy that rank 0 made and sent to the others."""
    told: list[Any] = [None]

    def sent(model: nn.Module) -> Strategy:
        told[0] = strategy_of(model, "partitioned_ps") if dist.get_rank() == 0 else None
        dist.broadcast_object_list(told, src=0)
        strategy: Strategy = told[0]
        return strategy

    found: float = apart(two, sent)
    return found


def whole_job(folder: Path) -> Iterator[tuple[str, Any]]:
    """Everything, by name."""

    def by(builder: str, **options: Any) -> Callable[[nn.Module], Strategy]:
        return lambda model: strategy_of(model, builder, **options)

    def by_factors(model: nn.Module) -> Strategy:
        return build("all_reduce", model_spec(model, (inputs(0, 0),)), 2, encoder="sufficient_factors", chunk=1)

    loops: dict[str, tuple[Model, Loop, dict[str, Any]]] = {
        "shared": (Twice, plain_step, {}), "overlapping": (Overlapping, plain_step, {}),
        "checkpointed": (Checkpointed, plain_step, {}), "moved": (two, moved_memory, {}),
        "second order": (two, second_order, {}), "unfrozen": (half_frozen, unfrozen, {}),
        "replaced": (two, replaced, {}), "dropped": (two, dropped, {}), "thrown away": (two, thrown_away, {}),
        "momentum": (table, later_momentum, {"momentum": 0.0}), "hooked": (two, hooked, {}),
        "hooked late": (two, hooked_late, {}),
    }  # fmt: skip
    for builder in BUILDERS:
        for name, (make, loop, options) in loops.items():
            yield f"{name} {builder}", apart(make, by(builder), loop, **options)
        yield f"foreign {builder}", foreign(builder)
        yield f"adafactor {builder}", adafactor(builder)
    for name, make, loop in (
        ("plain", two, plain_step), ("penalised", two, penalised), ("thrown away", two, thrown_away),
        ("shared", Twice, plain_step),
    ):  # fmt: skip
        yield f"{name} factors", apart(make, by_factors, loop)
    model: Any = Buffered()
    stretto.torch.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))[1].close()
    yield "buffers", model.sums()
    wavy = nn.Linear(3, 3).to(torch.complex64)
    yield "complex", said(lambda: stretto.torch.distribute(wavy, torch.optim.SGD(wavy.parameters(), lr=0.1)))
    lazy = nn.LazyLinear(3)
    yield "lazy", said(lambda: stretto.torch.distribute(lazy, torch.optim.SGD(lazy.parameters(), lr=0.1)))
    yield "again", again()
    yield "unlike", unlike(folder)
    yield "pickled", pickled()


@contextmanager
def joined(folder: Path, rank: int, ranks: int) -> Iterator[None]:
    """A job of these ranks."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    yield
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    folder, ranks = Path(sys.argv[1]), int(sys.argv[2])

    def rank_main(rank: int) -> None:
        with joined(folder, rank, ranks):
            (folder / f"{rank}.json").write_text(json.dumps(dict(whole_job(folder))))

    fork(ranks, rank_main)


if __name__ == "__main__":
    main()
