# SPDX-License-Identifier: Apache-2.0
"""Generated strategies on real ranks, beside one process.

``python distribute_generated_job.py FOLDER RANKS [ROUNDS [FIRST]]`` trains ROUNDS times every builder with every aspect
on two ranks and on three, from the number FIRST on, and leaves what became of each case in FOLDER/0.json.
"""

from __future__ import annotations

import faulthandler
import json
import sys
import traceback
from dataclasses import replace
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # optimizers need it: imported once, before the forks
import torch.distributed as dist
from capture_scenarios import fork
from distribute_draw import Case, cases, features, served
from distribute_everything import Everything, batch, optimizer_of
from distribute_reference import Reference

import stretto
import stretto.torch
from stretto.strategy import ModelSpec, Strategy, explain
from stretto.strategy.distribute import dense, model_spec
from stretto.strategy.distribute.serving import serve_until_end
from stretto.strategy.distribute.wrap import wrap
from stretto.strategy.kernels import to_workload

STEPS = 3
CASE_S = 100


@cache
def spec_of(sparse: bool, mixed: int) -> ModelSpec:
    """The spec of the model, with the factors of layers that the sample does not use."""
    spec = model_spec(Everything(sparse=sparse, mixed=mixed, linear=False), (batch(0, 1),), name="Everything")
    variables = tuple(replace(v, factors=1) if v.name == "nobody.weight" else v for v in spec.variables)
    return replace(spec, variables=variables)


def flat(model: Everything) -> torch.Tensor:
    """All weights, exact in 64 bits."""
    return torch.cat([p.detach().double().reshape(-1) for p in model.parameters()])


def named(model: Everything, values: torch.Tensor) -> dict[str, torch.Tensor]:
    """The weights out of one vector."""
    found, at = {}, 0
    for name, p in model.named_parameters():
        found[name] = values[at : at + p.numel()].view(p.shape).to(p.dtype)
        at += p.numel()
    return found


def doors(strategy: Strategy, spec: ModelSpec) -> str:
    """What `explain` and the kernels (so `simulate`, `tune` and the planner) say against a strategy."""
    said = []
    for door in (lambda: explain(strategy, spec), lambda: to_workload(strategy, spec, strategy.devices)):
        try:
            door()
            said.append("")
        except stretto.InvalidInput as error:
            said.append(str(error))
    if len(set(said)) > 1:
        raise AssertionError(f"explain says {said[0]!r}, the kernels say {said[1]!r}")
    return said[0]


def everywhere(mine: Any) -> list[Any]:
    """What each rank has."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


def trained(case: Case, strategy: Strategy) -> tuple[Any, list[tuple[torch.Tensor, Any]], Any, Any]:
    """An ordinary loop: the model, after each step all weights and before it PowerSGD's numbers, masters, state."""
    model: Any = Everything(sparse=case.sparse, mixed=case.mixed, linear=case.linear)
    if dist.get_rank():
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()  # rank 0's are sent to all
    if dist.get_rank() not in strategy.replicas:
        _, server = wrap(model, optimizer_of(model, case.optimizer), strategy, None, serving=True)
        assert serve_until_end(server) == STEPS
        return model, [], masters_of(server), None
    model, optimizer = stretto.torch.distribute(model, optimizer_of(model, case.optimizer), strategy)
    me = strategy.replicas.index(dist.get_rank())
    seen = []
    for step in range(STEPS):
        q = {
            (piece.variable.name, piece.part.index): one.clone()
            for carrier in optimizer._sync.carriers
            for piece, one in zip(carrier.pieces, getattr(carrier, "q", ()), strict=False)
            if one is not None
        }
        model.zero_grad()  # also what the optimizer does not know
        optimizer.zero_grad()
        data = batch(step, me)
        if case.loop in ("no_sync", "twice"):
            first, second = data.halves()
            with optimizer.no_sync() if case.loop == "no_sync" else torch.enable_grad():
                (model(first) / 2).backward()
            (model(second) / 2).backward()
        else:
            model(data).backward()
        if case.loop == "clip":
            optimizer.clip_grad_norm_(0.2)
        optimizer.step()
        seen.append((flat(model), q))
    state = None if optimizer._depots else optimizer.state_dict()
    optimizer.close()
    return model, seen, masters_of(optimizer), state


def masters_of(optimizer: Any) -> dict[Any, torch.Tensor]:
    """What servers of stale parameters on this rank have."""
    return {
        (region.variable, region.part.start, region.part.shape): master
        for depot in optimizer._depots
        for region, master in depot.masters.items()
        if depot.owner == dist.get_rank()
    }


def outcome(case: Case, number: int) -> dict[str, Any]:
    """What became of a case: refused (and why), or how far from one process; `wrong` says what must not be."""
    if not case.made:
        return {"refused": case.refusal}
    spec = spec_of(case.sparse, case.mixed)
    against = doors(case.strategy, spec)
    try:
        model, seen, masters, state = trained(case, case.strategy)
        said = ""
    except stretto.InvalidInput as error:
        said = str(error)
        where = traceback.extract_tb(error.__traceback__)
        if all(frame.name != "wrap" for frame in where):
            return {"wrong": f"refused while it trained: {said}"}
    told = everywhere(said)
    if any(bool(one) != bool(said) for one in told):
        return {"wrong": f"refused on some ranks only: {told}"}
    if said:
        ours = "SparseAdam" in said or said.startswith("optimizer:")
        return {"refused": said} if against or ours else {"wrong": f"only distribute refuses: {said}"}
    if against:
        return {"wrong": f"distribute trains what others refuse: {against}"}
    trained_there = [weights for weights in everywhere([weights for weights, _ in seen]) if weights]
    vectors = [torch.stack(one) for one in zip(*trained_there, strict=True)]
    late = any(sync.staleness for node in case.strategy.nodes for sync in (node.sync, *node.parts))
    if not late and any(not torch.equal(one, vector[0]) for vector in vectors for one in vector):
        return {"wrong": "ranks have different weights"}
    everything = {key: value for one in everywhere(masters) for key, value in one.items()}
    replicas = case.strategy.replicas
    if replicas[number % len(replicas)] != dist.get_rank():
        return {}
    of_rank_0 = [(vector[0], q) for vector, (_, q) in zip(vectors, seen, strict=True)]
    try:
        return compared(case, model, of_rank_0, everything, state)
    except Exception:
        return {"wrong": traceback.format_exc()}


def compared(
    case: Case, model: Everything, seen: list[tuple[torch.Tensor, Any]], masters: dict[Any, torch.Tensor], state: Any
) -> dict[str, Any]:
    """How far the weights of each step, the servers' at the end and the optimizer's state are from one process."""
    variables = spec_of(case.sparse, case.mixed).variables
    reference = Reference(case, case.strategy, variables, len(case.strategy.replicas))
    for weights, q in seen:
        reference.step(named(model, weights), q)
    ends = named(model, seen[-1][0])
    for (name, start, shape), master in masters.items():
        ends[name][tuple(slice(a, a + n) for a, n in zip(start, shape, strict=True))] = master
    reference.finish(ends, state)
    return {"off": reference.worst, "where": reference.where}


def rank_main(rank: int, folder: Path, made: list[Case], ranks: int) -> None:
    """All cases of one number of ranks."""
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store-{ranks}", rank=rank, world_size=ranks,
        timeout=timedelta(seconds=CASE_S),
    )  # fmt: skip
    found = []
    for number, case in enumerate(made):
        faulthandler.dump_traceback_later(CASE_S, exit=True)
        try:
            found.append(outcome(case, number))
        except Exception as error:
            raise RuntimeError(f"case {case.title}: {type(error).__name__}: {error}") from error
    together = zip(*everywhere(found), strict=True)
    merged = [{key: value for one in of_ranks for key, value in one.items()} for of_ranks in together]
    if rank == 0:
        (folder / f"ranks-{ranks}.json").write_text(json.dumps(merged))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    folder, most = Path(sys.argv[1]), int(sys.argv[2])
    long = len(sys.argv) > 3
    rounds, first = (int(sys.argv[at]) if len(sys.argv) > at else usual for at, usual in ((3, 1), (4, 0)))
    dense.LARGE_BYTES = 200  # so that this model has large variables too
    found = {}
    drawn = {str(ranks): list(cases(first, rounds, ranks, spec_of, every=long)) for ranks in range(2, most + 1)}
    # Two ranks that train and one that serves: a part of what two ranks train.
    drawn[f"{most - 1} and a server"] = [served(case) for case in drawn[str(most - 1)] if not case.refusal][::2]
    for name, made in drawn.items():
        ranks = len(made[0].strategy.devices)
        fork(ranks, lambda rank, made=made, ranks=ranks: rank_main(rank, folder, made, ranks))  # type: ignore[misc]
        outcomes = json.loads((folder / f"ranks-{ranks}.json").read_text())
        (folder / f"store-{ranks}").unlink()
        found[name] = [
            {"title": case.title, "features": features(case, spec_of(case.sparse, case.mixed)), **one}
            for case, one in zip(made, outcomes, strict=True)
        ]
    (folder / "0.json").write_text(json.dumps(found))
    for name, outcomes in found.items() if long else ():
        report(name, outcomes)


def report(ranks: str, outcomes: list[dict[str, Any]]) -> None:
    """For a person: what was wrong, and how many there were."""
    wrong = [one for one in outcomes if "wrong" in one or one.get("off", 0.0) > 1.0]
    for one in wrong:
        print(f"{ranks} ranks, {one['title']}: {one.get('wrong') or [one['off'], one['where']]}")
    refused = sum("refused" in one for one in outcomes)
    print(f"{ranks} ranks: {len(outcomes)} strategies, {len(outcomes) - refused} trained, {refused} refused, "
          f"{len(wrong)} wrong")  # fmt: skip


if __name__ == "__main__":
    main()
