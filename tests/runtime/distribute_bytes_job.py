"""What ranks really exchange in a step under every builder, beside what the builder's `Workload` says."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import torch
import torch._dynamo  # optimizers need it: imported once, before the forks
import torch.distributed as dist
from capture_scenarios import fork
from distribute_job import all_strategies
from distribute_models import BATCH, batch, loss_of, made, optimizer_of

import stretto
from stretto.runtime.distribute import model_spec
from stretto.strategy import ModelSpec, Strategy
from stretto.strategy.kernels import Message, Step, global_step, workload_of
from stretto.strategy.model import DTYPE_BYTES
from stretto.workload import Workload

COUNT_BYTES = 8
Bytes = dict[str, float]


def totals(workload: Workload) -> Bytes:
    """Bytes of each kind of collective, of all groups together."""
    found: Bytes = {}
    for op in workload.comm_ops:
        found[op.kind] = found.get(op.kind, 0.0) + op.nbytes * len(workload.groups_of(op))
    return found


def executed(name: str, strategy: Strategy) -> Bytes:
    """The exchanges of a step, recorded as it runs."""
    model = made(name)
    model, optimizer = stretto.distribute(model, optimizer_of(name, model), strategy)
    with stretto.capture(iterations=1, skip=2) as recorder:
        while not recorder.done:
            optimizer.zero_grad()
            loss_of(model, batch(name, 0, dist.get_rank())).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            recorder.step()
    optimizer.close()
    return totals(recorder.workload)


def beside(step: Step) -> tuple[Bytes, Bytes]:
    """What travels beside gradients and parameters: exactly known, and at most."""
    exact: Bytes = {}
    most: Bytes = {}
    for message in step.messages:
        (_rows if message.pieces[0].variable.sparse else _flags)(message, step, most, exact)
    return exact, most


def _flags(message: Message, step: Step, most: Bytes, exact: Bytes) -> None:
    """Whether anybody has a gradient: an element for each piece, behind each of a sharded message's equal shares."""
    size = DTYPE_BYTES[message.pieces[0].variable.dtype]
    count = len(message.pieces)
    if message.sync.kind == "sharded":
        short = -(message.nbytes // size) % step.num_ranks * size
        flags = count * size * step.num_ranks
        for kind, more in (("reduce_scatter", short + flags), ("all_gather", short)):
            exact[kind] = exact.get(kind, 0.0) + more
        return
    for exchange in message.exchanges:
        if exchange.push:
            exact[exchange.kind] = exact.get(exchange.kind, 0.0) + count * size * len(exchange.groups)


def _rows(message: Message, step: Step, most: Bytes, exact: Bytes) -> None:
    """Lengths are told first, and each run begins with a count for each piece."""
    for exchange in message.exchanges:
        for group in exchange.groups:
            counts = COUNT_BYTES * len(message.pieces) * (1 if exchange.kind == "broadcast" else step.num_ranks)
            most[exchange.kind] = most.get(exchange.kind, 0.0) + counts
            asked = "broadcast" if exchange.kind == "broadcast" else "all_gather"
            lengths = COUNT_BYTES * (1 if exchange.kind == "broadcast" else len(group))
            most[asked] = most.get(asked, 0.0) + lengths


def with_all_rows(spec: ModelSpec) -> ModelSpec:
    """A spec whose tables have as many touched rows as a batch can touch, each part that many."""
    return replace(spec, variables=tuple(replace(v, rows=2 * BATCH) if v.sparse else v for v in spec.variables))


def main() -> None:
    folder, ranks = Path(sys.argv[1]), int(sys.argv[2])

    def rank_main(rank: int) -> None:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
        outcomes = {}
        for name in ("mlp", "ncf"):
            spec = with_all_rows(model_spec(made(name), batch(name, 0, 0)))
            dense = replace(spec, variables=tuple(v for v in spec.variables if not v.sparse))
            for label, strategy in all_strategies(spec).items():
                if label == "factors":
                    continue
                step = global_step(strategy, spec, strategy.devices)
                only = replace(step, messages=tuple(m for m in step.messages if not m.pieces[0].variable.sparse))
                exact, most = beside(step)
                outcomes[f"{name} {label}"] = {
                    "executed": executed(name, strategy), "planned": totals(workload_of(step)),
                    "dense": totals(workload_of(only)) if dense.variables else {}, "exact": exact, "most": most,
                }  # fmt: skip
        (folder / f"{rank}.json").write_text(json.dumps(outcomes))
        dist.barrier()
        dist.destroy_process_group()

    torch.set_num_threads(1)
    fork(ranks, rank_main)


if __name__ == "__main__":
    main()
