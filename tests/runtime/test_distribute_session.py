# SPDX-License-Identifier: Apache-2.0
"""One run of a script under every builder and DDP in turn: what a session changes under its hands."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from stretto.errors import Infeasible
from stretto.strategy.builders import BUILDERS, build
from stretto.strategy.requests import Arm, Reference
from stretto.strategy.trials import Trials, command

SCRIPT = """
import json, sys, torch, torch.distributed as dist, stretto.torch
torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(0)

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(50, 8, sparse=True)
        self.body = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))

    def forward(self, rows):
        return self.body(self.table(rows))

model = Model()
model, optimizer = stretto.torch.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
rows = torch.arange(5) + 7 * dist.get_rank()
kept = None
with open(f"{sys.argv[1]}.{dist.get_rank()}", "w") as seen:
    while True:
        optimizer.zero_grad()
        with optimizer.no_sync():
            (model(rows).square().mean() / 2).backward()
        loss = model(rows + 1).square().mean() / 2
        loss.backward()
        print(json.dumps([optimizer.strategy.name, loss.item()]), file=seen, flush=True)
        optimizer.step()
        schedule.step()
"""
STEPS = 3
LIMIT_S = 600.0
"""For the start of a job and for a run: far more than they take, since the machine may be busy."""


@pytest.fixture(scope="module")
def losses(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[list[float]]]:
    """By what was asked for, each rank's losses from its beginning on."""
    folder = tmp_path_factory.mktemp("session")
    script, seen = folder / "train.py", folder / "seen"
    script.write_text(SCRIPT)
    job = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    with Trials(command([*job, str(seen)]), timeout_s=LIMIT_S) as trials:
        model, there = trials.describe()
        asked: dict[str, Arm] = {name: build(name, model, there) for name in BUILDERS}
        asked |= {"ddp": Reference(), "again": replace(build("all_reduce", model, there), name="again")}
        stale = replace(build("ps_balanced", model, there, staleness=1), name="stale")
        other = replace(build("ps", model, there), name="other", model_digest="0" * len(model.digest))
        found = trials.measure([*asked.values(), stale, other], rounds=1, warmup=1, timed=STEPS - 1)
        assert trials.starts == 1
    *ran, refused = found
    assert all(not isinstance(one, Infeasible) and one[0] > 0 for one in ran), ran
    assert isinstance(refused, Infeasible) and "shapes differ" in str(refused)
    by_name: dict[str, list[list[float]]] = {}
    for rank in range(2):
        runs: list[tuple[str, list[float]]] = []
        for line in Path(f"{seen}.{rank}").read_text().splitlines():
            name, loss = json.loads(line)
            if not runs or runs[-1][0] != name or len(runs[-1][1]) == STEPS:
                runs.append((name, []))
            runs[-1][1].append(loss)
        # The description comes first; DDP is driven by a strategy's optimizer that brings nothing.
        order = ["description", "description", *asked, "stale"]
        for key, (_, values) in zip(order, runs, strict=False):
            by_name.setdefault(key, []).append(values)
    return by_name


@pytest.mark.parametrize("name", [*BUILDERS, "ddp", "again"])
def test_every_synchronous_one_starts_from_the_same_weights_and_trains_alike(
    name: str, losses: dict[str, list[list[float]]]
) -> None:
    for rank in range(2):
        assert losses[name][rank] == pytest.approx(losses["again"][rank], rel=1e-5)


def test_losses_fall_and_ranks_have_their_own(losses: dict[str, list[list[float]]]) -> None:
    first, second = losses["again"]
    assert first[-1] < first[0] and second[-1] < second[0] and first != second


BY_PARTS = """
import sys, torch, torch.distributed as dist, stretto.torch
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
model = torch.nn.Sequential(torch.nn.Linear(4, 4))
model.forward = str  # of the instance, which must be there again behind DDP
model, optimizer = stretto.torch.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
while True:
    optimizer.zero_grad()
    assert model.forward is str or optimizer.strategy.name == "all_reduce"
    model[0](torch.ones(2, 4)).sum().backward()
    optimizer.step()
"""


def test_a_script_that_never_calls_the_module_has_no_time_under_ddp(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(BY_PARTS)
    with Trials(command([sys.executable, str(script), str(tmp_path / "store")]), timeout_s=LIMIT_S) as trials:
        model, there = trials.describe()
        ps = build("ps", model, there)
        found = trials.measure([Reference(), ps, Reference(bucket_mb=1.0)], rounds=2, warmup=1, timed=2)
        assert trials.starts == 1
    for at in (0, 2):
        assert isinstance(found[at], Infeasible) and "never calls the module" in str(found[at])
    assert not isinstance(found[1], Infeasible) and len(found[1]) == 2
