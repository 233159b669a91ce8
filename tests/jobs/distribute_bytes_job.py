# SPDX-License-Identifier: Apache-2.0
"""What ranks really exchange in a step under every builder and encoder, beside what the `Workload` says."""

from __future__ import annotations

import json
import math
import os
import sys
from dataclasses import replace
from pathlib import Path
from unittest import mock

import torch
import torch._dynamo  # optimizers need it: imported once, before the forks
import torch.distributed as dist
from capture_scenarios import fork
from distribute_job import all_strategies
from distribute_models import BATCH, batch, loss_of, made, optimizer_of

import stretto.torch
from stretto.strategy import ModelSpec, Strategy, Sync
from stretto.strategy.builders import BUILDERS
from stretto.strategy.distribute import model_spec, wrap
from stretto.strategy.distribute.session import groups_for
from stretto.strategy.kernels import Message, StepExchange, StrategyStep, global_step, workload_of
from stretto.strategy.model import DTYPE_BYTES
from stretto.workload import Workload

COUNT_BYTES = 8
ENCODERS = ("float16", "powersgd:1", "topk:0.1", "onebit", "sufficient_factors")
OWN = ("mixed", "ordered", "two_level")
Bytes = dict[str, float]


def totals(workload: Workload) -> Bytes:
    """Bytes of each kind of collective, of all groups together."""
    found: Bytes = {}
    for op in workload.comm_ops:
        found[op.kind] = found.get(op.kind, 0.0) + op.nbytes * len(workload.groups_of(op))
    return found


def planned(step: StrategyStep) -> Bytes:
    """Bytes of each kind of collective in the `Workload`; a direct sum of a group is a message of each other member."""
    found = totals(workload_of(step))
    for exchange in (one for message in step.messages for one in message.exchanges if one.direct):
        found[exchange.kind] -= exchange.nbytes * len(exchange.groups)
        _add(found, "send", exchange.nbytes * _senders(exchange))
    return {kind: nbytes for kind, nbytes in found.items() if nbytes}


def _senders(exchange: StepExchange) -> int:
    return sum(len(group) - 1 for group in exchange.groups)


def executed(name: str, strategy: Strategy) -> Bytes:
    """The exchanges of a step, recorded as it runs."""
    model = made(name)
    model, optimizer = stretto.torch.distribute(model, optimizer_of(name, model), strategy)
    with stretto.torch.capture(iterations=1, skip=1) as recorder:
        while not recorder.done:
            optimizer.zero_grad()
            loss_of(model, batch(name, 0, dist.get_rank())).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            recorder.step()
    optimizer.close()
    return totals(recorder.workload)


def beside(step: StrategyStep) -> tuple[Bytes, Bytes]:
    """What travels beside gradients and parameters: exactly known, and at most."""
    exact: Bytes = {}
    most: Bytes = {}
    for message in step.messages:
        encoder = message.sync.encoding[0]
        if message.pieces[0].variable.sparse:
            _rows(message, step, most)
        elif encoder in ("topk", "onebit", "sufficient_factors"):
            _runs(message, step, exact)
        else:
            _flags(message, step, exact)
    return exact, most


def _add(found: Bytes, kind: str, nbytes: float) -> None:
    found[kind] = found.get(kind, 0.0) + nbytes


def _flags(message: Message, step: StrategyStep, exact: Bytes) -> None:
    """Whether anybody has a gradient: an element for each piece, behind each of a sharded message's equal shares.

    Of PowerSGD's exchanges those of its second matrix have none.
    """
    size = DTYPE_BYTES[message.pieces[0].variable.dtype]
    encoder = message.sync.encoding[0]
    flag = 2 if encoder in ("float16", "bfloat16") else size
    count = len(message.pieces)
    if message.sync.kind == "sharded":
        short = -(message.nbytes // size) % step.num_ranks * size
        _add(exact, "reduce_scatter", short + count * size * step.num_ranks)
        _add(exact, "all_gather", short)
        return
    pushes = [exchange for exchange in message.exchanges if exchange.push]
    if encoder == "powersgd" and any(_is_low(piece.part.shape, message.sync.encoding[1]) for piece in message.pieces):
        pushes = pushes[: len(message.exchanges) // 2]
    for exchange in pushes:
        if exchange.direct:
            _add(exact, "send", count * flag * _senders(exchange))
        else:
            _add(exact, exchange.kind, count * flag * len(exchange.groups))


def _is_low(shape: tuple[int, ...], rank: float) -> bool:
    return len(shape) > 1 and rank * (shape[0] + math.prod(shape[1:])) < math.prod(shape)


def _runs(message: Message, step: StrategyStep, exact: Bytes) -> None:
    """A flag or a count for each piece in each run, and lengths where not all are known to be equal."""
    factors = message.sync.encoding[0] == "sufficient_factors"
    pushes = [exchange for exchange in message.exchanges if exchange.push]
    head = (COUNT_BYTES if factors else 1) * len(message.pieces)
    runs = 1
    for exchange in pushes:
        told = exchange.kind == "broadcast"
        runs = step.num_ranks if told else runs * len(exchange.groups[0])
        _add(exact, exchange.kind, head * runs * len(exchange.groups))
        if factors or len(pushes) > 1:
            lengths = COUNT_BYTES * sum(1 if told else len(group) for group in exchange.groups)
            _add(exact, "broadcast" if told else "all_gather", lengths)


def _rows(message: Message, step: StrategyStep, most: Bytes) -> None:
    """Lengths are told first, and each run begins with a count for each piece."""
    for exchange in message.exchanges:
        for group in exchange.groups:
            counts = COUNT_BYTES * len(message.pieces) * (1 if exchange.kind == "broadcast" else step.num_ranks)
            _add(most, exchange.kind, counts)
            asked = "broadcast" if exchange.kind == "broadcast" else "all_gather"
            lengths = COUNT_BYTES * (1 if exchange.kind == "broadcast" else len(group))
            _add(most, asked, lengths)


def with_all_rows(spec: ModelSpec) -> ModelSpec:
    """A spec whose tables have as many touched rows as a batch can touch, each part that many."""
    return replace(spec, variables=tuple(replace(v, rows=2 * BATCH) if v.sparse else v for v in spec.variables))


def encoded(strategy: Strategy, spec: ModelSpec, encoder: str) -> Strategy | None:
    """The same with an encoder, wherever it fits; None where it never does."""

    def fits(variable: str, sync: Sync, cut: bool) -> bool:
        v = spec.variable(variable)
        factors = encoder != "sufficient_factors" or (v.factors > 0 and len(v.shape) == 2 and not cut)
        return sync.kind != "sharded" and factors

    def changed(variable: str, sync: Sync, cut: bool) -> Sync:
        return replace(sync, encoder=encoder) if fits(variable, sync, cut) else sync

    nodes = tuple(
        replace(
            node, sync=changed(node.variable, node.sync, bool(node.partition)),
            parts=tuple(changed(node.variable, part, True) for part in node.parts),
        )
        for node in strategy.nodes
    )  # fmt: skip
    return None if nodes == strategy.nodes else replace(strategy, nodes=nodes)


def main() -> None:
    folder, ranks = Path(sys.argv[1]), int(sys.argv[2])

    def rank_main(rank: int) -> None:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
        # Communicators are used again by the next strategy, as in a session: making them anew is most of the time.
        os.environ["STRETTO_TRIAL"] = "session,"
        lasting = groups_for(None)
        mock.patch.object(wrap, "groups_for", lambda _: lasting).start()
        del os.environ["STRETTO_TRIAL"]
        outcomes = {}
        for name in ("mlp", "ncf"):
            spec = with_all_rows(model_spec(made(name), batch(name, 0, 0)))
            dense = replace(spec, variables=tuple(v for v in spec.variables if not v.sparse))
            found = {label: one for label, one in all_strategies(spec).items() if label != "factors"}
            for encoder in ENCODERS if name == "mlp" else ():
                for label in [*BUILDERS, *OWN]:
                    strategy = encoded(found[label], spec, encoder)
                    found |= {} if strategy is None else {f"{label} {encoder}": strategy}
            for label, strategy in found.items():
                step = global_step(strategy, spec, strategy.devices)
                only = replace(step, messages=tuple(m for m in step.messages if not m.pieces[0].variable.sparse))
                exact, most = beside(step)
                outcomes[f"{name} {label}"] = {
                    "executed": executed(name, strategy), "planned": planned(step),
                    "dense": planned(only) if dense.variables else {}, "exact": exact, "most": most,
                }  # fmt: skip
        (folder / f"{rank}.json").write_text(json.dumps(outcomes))
        dist.barrier()
        dist.destroy_process_group()

    torch.set_num_threads(1)
    fork(ranks, rank_main)


if __name__ == "__main__":
    main()
