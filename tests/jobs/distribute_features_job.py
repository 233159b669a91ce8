# SPDX-License-Identifier: Apache-2.0
"""What training loops do beside the plain step, under strategies that keep gradients and state in different places."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # optimizers need it: imported once, before the forks
import torch.distributed as dist
from capture_scenarios import fork
from distribute_job import DEVICES, apart, trained
from distribute_models import STEPS, alone, batch, loss_of, made, optimizer_of, weights
from torch import nn

import stretto
import stretto.torch
from stretto.strategy import Strategy
from stretto.strategy.builders import build
from stretto.strategy.distribute import model_spec
from stretto.strategy.distribute.regions import block_of
from stretto.strategy.files import save_strategy

PLACES = ("all_reduce", "partitioned_ps", "zero2")
KEEPING = ("powersgd:1", "topk:0.1", "onebit")


def built(name: str, builder: str, **options: Any) -> Strategy:
    """A builder's strategy with small parts."""
    small: dict[str, Any] = {"partitioned_ps": {"part_mb": 0.0}, "zero2": {"bucket_mb": 0.0003}}.get(builder, {})
    return build(builder, model_spec(made(name), batch(name, 0, 0)), DEVICES, **small, **options)


def accumulated(name: str, strategy: Strategy, *, inside: bool) -> list[float]:
    """Two half batches before each update, with or without `no_sync`."""
    model, optimizer = stretto.torch.distribute(*_pair(name), strategy)
    for step in range(STEPS):
        optimizer.zero_grad()
        first, second = batch(name, step, dist.get_rank()).chunk(2)
        if inside:
            with optimizer.no_sync():
                (loss_of(model, first) / 2).backward()  # type: ignore[no-untyped-call]
        else:
            (loss_of(model, first) / 2).backward()  # type: ignore[no-untyped-call]
        (loss_of(model, second) / 2).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    optimizer.close()
    return weights(model)


def _pair(name: str, kind: str = "") -> tuple[nn.Module, torch.optim.Optimizer]:
    model = made(name)
    return model, optimizer_of(name, model, kind)


def plain(name: str, ranks: int) -> list[float]:
    """One process without a scheduler."""
    model, optimizer = _pair(name)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, torch.cat([batch(name, step, rank) for rank in range(ranks)])).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return weights(model)


def resumed(name: str, before: Strategy, after: Strategy) -> list[float]:
    """Half of the steps under one strategy, saved, the rest under another; the weights, as one process has them."""
    model, optimizer = stretto.torch.distribute(*_pair(name), before)
    half = STEPS // 2
    for step in range(STEPS):
        if step == half:
            saved = model.state_dict(), optimizer.state_dict()
            optimizer.close()
            # What was saved fits the plain optimizer too.
            _pair(name)[1].load_state_dict(saved[1])
            model, optimizer = stretto.torch.distribute(*_pair(name), after)
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
        optimizer.zero_grad()
        loss_of(model, batch(name, step, dist.get_rank())).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    optimizer.close()
    return weights(model)


def error_of(act: Callable[[], object]) -> str:
    """What an act is refused with."""
    try:
        act()
    except stretto.InvalidInput as error:
        return str(error)
    return ""


class Uneven(nn.Module):
    """A layer that only rank 1 uses, one that nobody does, and one that is not used in the second of three steps."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.some, self.nobody, self.pausing = (nn.Linear(6, 6) for _ in range(4))
        self.table = nn.Embedding(4, 6, sparse=True)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Through several layers, one more on one rank."""
        self.calls += 1
        out: torch.Tensor = self.shared(x)
        if self.calls != 2:
            out = out + self.pausing(x) + self.table(torch.tensor([dist.get_rank() % 2, 2]))
        return out + self.some(x) if dist.get_rank() == 1 else out


def unused(builder: str, **options: Any) -> dict[str, Any]:
    """How layers fare that one rank uses, that nobody does, and that pause, with momentum and weight decay on."""
    torch.manual_seed(1)
    model: nn.Module = Uneven()
    begin = {key: value.clone() for key, value in model.state_dict().items()}
    dense = [p for name, p in model.named_parameters() if name != "table.weight"]
    tables = [p for name, p in model.named_parameters() if name == "table.weight"]
    groups = [{"params": dense, "weight_decay": 0.5}, {"params": tables, "weight_decay": 0.0}]
    optimizer: Any = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    model, optimizer = stretto.torch.distribute(model, optimizer, build(builder, model_spec(model), DEVICES, **options))
    for step in range(3):
        before = {key: value.clone() for key, value in model.state_dict().items()}
        _uneven_loss(model, step).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        if step == 1:
            after = model.state_dict()
            stayed = [torch.equal(before[key], after[key]) for key in ("pausing.weight", "table.weight")]
    moved = {key: float((value - begin[key]).abs().max()) for key, value in model.state_dict().items()}
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, weights(model))
    optimizer.close()
    return {
        "some moved": moved["some.weight"] > 0, "nobody stayed": moved["nobody.weight"] == 0,
        "pausing stayed": stayed[0], "table stayed": stayed[1], "alike": all(one == everyone[0] for one in everyone),
    }  # fmt: skip


def _uneven_loss(model: nn.Module, step: int) -> torch.Tensor:
    torch.manual_seed(10 * step + dist.get_rank())
    loss: torch.Tensor = (model(torch.randn(2, 6)) * torch.randn(2, 6)).sum()
    return loss


def lost(builder: str, encoder: str) -> float:
    """How far what the weights have moved by and what ranks keep back are, together, from the mean of gradients."""
    torch.manual_seed(1)
    model: nn.Module = Uneven()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer = stretto.torch.distribute(
        model, optimizer, build(builder, model_spec(model), DEVICES, encoder=encoder)
    )
    rest = {name: -p.detach() for name, p in model.named_parameters()}
    for step in range(5):
        loss = _uneven_loss(model, step)
        gradients = torch.autograd.grad(loss, [*model.parameters()], retain_graph=True, allow_unused=True)
        for name, gradient in zip(rest, gradients, strict=True):
            total = torch.zeros_like(rest[name]) if gradient is None else gradient.to_dense()
            dist.all_reduce(total)
            rest[name] += total / dist.get_world_size()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    for carrier in optimizer._sync.carriers:
        for piece, left in zip(carrier.pieces, getattr(carrier, "left", ()), strict=False):
            total = left.view(piece.part.shape).clone()
            dist.all_reduce(total)
            block_of(rest[piece.variable.name], piece.part).sub_(total)
    optimizer.close()
    return max(float((rest[name] + p.detach()).abs().max()) for name, p in model.named_parameters())


def in_32_bits() -> list[float]:
    """Adam on a layer of attention in 32 bits: how far from one process the key's bias ends, and all the rest.

    A key's bias adds the same to all scores of a softmax: its gradient is zero but for rounding, and Adam divides it by
    its own size.
    """
    width, ranks, found = 6, dist.get_world_size(), []
    for on in (range(ranks), [dist.get_rank()]):
        torch.manual_seed(5)
        model: nn.Module = nn.TransformerEncoderLayer(width, 2, 9, dropout=0.0, batch_first=True)
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.02)
        if len(on) == 1:
            model, optimizer = stretto.torch.distribute(
                model, optimizer, build("ps_balanced", model_spec(model), DEVICES)
            )
        for step in range(STEPS):
            inputs = [torch.randn(4, 3, width, generator=torch.Generator().manual_seed(100 * step + r)) for r in on]
            optimizer.zero_grad()
            loss_of(model, torch.cat(inputs)).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        found.append({key: value.clone() for key, value in model.state_dict().items()})
    optimizer.close()
    bias = "self_attn.in_proj_bias"
    key = slice(width, 2 * width)
    of_key = float((found[0][bias][key] - found[1][bias][key]).abs().max())
    for one in found:
        one[bias][key] = 0.0
    return [of_key, max(float((found[0][name] - found[1][name]).abs().max()) for name in found[0])]


def kept(builder: str) -> bool:
    """Whether gradients that a script keeps are still those of their step after the next one."""
    model, optimizer = stretto.torch.distribute(*_pair("mlp"), built("mlp", builder))
    for step in range(2):
        optimizer.zero_grad()
        loss_of(model, batch("mlp", step, dist.get_rank())).backward()  # type: ignore[no-untyped-call]
        if step == 0:
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            copies = [g.clone() for g in gradients]
        optimizer.step()
    optimizer.close()
    return all(torch.equal(g, c) for g, c in zip(gradients, copies, strict=True))


class Twice(nn.Module):
    """Two layers worth a call each, the second of which is only used at first."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.at_first = nn.Linear(96, 96), nn.Linear(96, 96)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Through both, or one."""
        self.calls += 1
        out: torch.Tensor = self.always(x)
        return self.at_first(out) if self.calls == 1 else out


def kept_unused(**options: Any) -> list[bool]:
    """Whether a kept gradient survives a step in which nobody uses its layer, and the layer gets no gradient then."""
    torch.manual_seed(1)
    model: nn.Module = Twice()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    strategy = build("all_reduce", model_spec(model), DEVICES, chunk=1)
    nodes = tuple(
        replace(node, sync=replace(node.sync, **options)) if node.variable.endswith("weight") else node
        for node in strategy.nodes
    )
    model, optimizer = stretto.torch.distribute(model, optimizer, replace(strategy, nodes=nodes))
    watched: Any = model
    watches = len(watched.at_first._forward_hooks)
    found: list[bool] = []
    for step in range(2):
        optimizer.zero_grad()
        before = watched.at_first.weight.detach().clone()
        model(torch.full((2, 96), 1.0 + dist.get_rank())).sum().backward()
        if step == 0:
            gradient = watched.at_first.weight.grad
            copy = gradient.clone()
        optimizer.step()
        found.append(bool(torch.equal(before, watched.at_first.weight)))
    optimizer.close()
    return [*found, bool(torch.equal(gradient, copy)), watches == ("encoder" in options),
            not watched.at_first._forward_hooks]  # fmt: skip


def scaled(builder: str) -> list[Any]:
    """Weights after training with a GradScaler, or what is said about it."""
    model, optimizer = stretto.torch.distribute(*_pair("mlp"), built("mlp", builder))
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    try:
        for step in range(STEPS):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, batch("mlp", step, dist.get_rank()))).backward()  # type: ignore[no-untyped-call]
            scaler.step(optimizer)
            scaler.update()
    except stretto.InvalidInput as error:
        return [str(error)]
    optimizer.close()
    return weights(model)


def errors() -> dict[str, str]:
    """What is refused, and how."""
    strategy = built("mlp", "partitioned_ps")
    found = {}

    def changed() -> None:
        model, optimizer = stretto.torch.distribute(*_pair("mlp"), strategy)
        loss_of(model, batch("mlp", 0, 0)).backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        optimizer.step()

    def twice() -> None:
        model, _ = stretto.torch.distribute(*_pair("mlp"), built("mlp", "all_reduce", encoder="topk:0.5"))
        for _ in range(2):
            loss_of(model, batch("mlp", 0, 0)).backward()  # type: ignore[no-untyped-call]

    class Own(torch.optim.SGD):
        """An optimizer that nobody knows."""

    def differently() -> None:
        mine = built("mlp", "all_reduce" if dist.get_rank() == 2 else "zero1")
        stretto.torch.distribute(*_pair("mlp"), mine)

    model = made("mlp")
    found["clipped by hand"] = error_of(changed)
    found["twice"] = error_of(twice)
    found["another model"] = error_of(lambda: stretto.torch.distribute(*_pair("conv"), strategy))
    found["ranks"] = error_of(
        lambda: stretto.torch.distribute(*_pair("mlp"), replace(strategy, devices=(*DEVICES, "h9")))
    )
    found["own"] = error_of(lambda: stretto.torch.distribute(model, Own(model.parameters(), lr=1.0), strategy))
    found["differently"] = error_of(differently)
    found["foreign"] = error_of(lambda: stretto.torch.distribute(made("mlp"), Own(model.parameters(), lr=1.0)))
    found["file"] = error_of(lambda: stretto.torch.distribute(*_pair("mlp"), "no/such/file.yaml"))
    return found


def whole_job(folder: Path) -> dict[str, Any]:
    """Everything that ends well, or in a message."""
    ranks = dist.get_world_size()
    outcomes: dict[str, Any] = {}
    for name in ("mlp", "ncf", "mixed"):
        want = plain(name, ranks)
        clipped = alone(name, ranks, clip=0.05, kind="adamw") if name == "mlp" else []
        for builder in PLACES:
            strategy = built(name, builder)
            for inside in (True, False):
                got = accumulated(name, strategy, inside=inside)
                outcomes[f"accumulated {name} {builder} {inside}"] = apart(got, want)
            if name == "mlp":
                got = trained(name, strategy, clip=0.05)
                outcomes[f"clipped {builder}"] = apart(got, clipped)
    for kind in ("momentum", "adagrad"):
        want = alone("ncf", ranks, kind=kind)
        outcomes[f"rows {kind}"] = apart(trained("ncf", built("ncf", "partitioned_ps"), kind=kind), want)
    outcomes |= changed_on_the_way(("mlp", "ncf", "mixed"))
    outcomes["in 32 bits"] = in_32_bits()
    outcomes["scaled"] = apart(scaled("all_reduce"), plain("mlp", ranks))
    outcomes["scaled elsewhere"] = scaled("partitioned_ps")[0]
    outcomes["kept"] = [kept(builder) for builder in PLACES]
    outcomes["kept unused"] = [kept_unused(), kept_unused(encoder="sufficient_factors")]
    for builder in ("all_reduce", "ps", "zero1", "parallax"):
        outcomes[f"unused {builder}"] = unused(builder)
    outcomes["unused ps stale"] = unused("ps", staleness=1)
    for encoder in ("float16", "powersgd:1", "topk:0.1", "onebit", "sufficient_factors"):
        for builder in ("all_reduce", "ps_balanced"):
            outcomes[f"unused {builder} {encoder}"] = unused(builder, encoder=encoder)
            if encoder in KEEPING:
                outcomes[f"lost {builder} {encoder}"] = lost(builder, encoder)
    outcomes["errors"] = errors()
    half = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])][dist.get_rank() % 2]
    outcomes["some ranks"] = _of_some(half)
    path = folder / f"strategy-{dist.get_rank()}.yaml"
    save_strategy(built("mlp", "zero2"), path)
    os.environ["STRETTO_STRATEGY"] = str(path)
    _, optimizer = stretto.torch.distribute(*_pair("mlp"))
    outcomes["named by the environment"] = optimizer.strategy.name
    return outcomes


def changed_on_the_way(names: Sequence[str]) -> dict[str, Any]:
    """How far training ends from one process that changes its strategy in the middle."""
    found = {}
    for name in names:
        want = plain(name, dist.get_world_size())
        for before, after in (("partitioned_ps", "zero2"), ("zero2", "all_reduce"), ("all_reduce", "partitioned_ps")):
            got = resumed(name, built(name, before), built(name, after))
            found[f"resumed {name} {before} {after}"] = apart(got, want)
    return found


def _of_some(group: Any) -> bool:
    """Two pairs of ranks, each a job of its own: like in a pair, unlike between pairs."""
    got = trained("mlp", None, group=group)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, got)
    return bool(everyone[0] == everyone[2] and everyone[1] == everyone[3] and everyone[0] != everyone[1])


def main() -> None:
    folder, ranks = Path(sys.argv[1]), int(sys.argv[2])

    def rank_main(rank: int) -> None:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
        outcomes = whole_job(folder)
        dist.barrier()
        dist.destroy_process_group()
        dist.init_process_group("stretto", init_method=f"file://{folder}/store-2", rank=rank, world_size=ranks)
        del os.environ["STRETTO_STRATEGY"]
        outcomes["on our backend"] = changed_on_the_way(["mixed"])
        want = plain("mixed", ranks)
        for builder in PLACES:
            got = accumulated("mixed", built("mixed", builder), inside=True)
            outcomes["on our backend"][f"accumulated {builder}"] = apart(got, want)
        (folder / f"{rank}.json").write_text(json.dumps(outcomes))
        dist.barrier()
        dist.destroy_process_group()

    fork(ranks, rank_main)


if __name__ == "__main__":
    main()
