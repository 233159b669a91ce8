# SPDX-License-Identifier: Apache-2.0
"""Random programs for property tests, and an executable definition of what a program means."""

from __future__ import annotations

import os
import random
import re
import sys
from collections import Counter
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path

import pytest
from hypothesis import settings

from stretto import AllGather, AllReduce, AllToAll, Broadcast, Collective, Program, Reduce, ReduceScatter

# The same examples on every machine: what fails in one place fails in all, and a lucky find stops nobody else's work.
# `HYPOTHESIS_PROFILE=default` looks for new ones.
settings.register_profile("same", derandomize=True, deadline=None)
if os.environ.get("HYPOTHESIS_PROFILE", "same") == "same":
    settings.load_profile("same")

# Tests start hundreds of processes: without bytecode on disk each compiles our modules anew, for a second and more.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Jobs of tests begin anew, whatever ran here before; processes that tests start inherit it.
os.environ["STRETTO_PLANS"] = "off"

HERE = Path(__file__).parent
STARTS_PROCESSES = re.compile(
    r"""
    examples/test_examples_jobs | lab/ | gpu/ | report/test_browser | test_tutorial
    | control/test_control_(faults|fork|kills|planner_process|slower|soak|transport|unchanged)
    | cli/test_(controller|demo|lab|probe|run|tune)_
    | runtime/test_(backend(?!_select)|capture_(?!merge)|ddp_hook|distribute
      |enforcer(_carrier|_flow|_messages|_splits)?\.py|executor|gpu_hosts|inductor|mesh_pipeline|pipelining|probe_(bench|lab)|reshard|torch_versions)
    | strategy/test_search_trials | synthesis/test_(ray_backend|both_solvers)
    """,
    re.VERBOSE,
)
"""The files, below this folder, whose tests are marked `job`."""
SLOW = (HERE / "slow_tests.txt").read_text().split()
"""The files, tests and doctests that are marked `slow`, as pytest names them: a measured list."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The one place that says which tests `make check` leaves out."""
    for item in items:
        if item.path.is_relative_to(HERE) and STARTS_PROCESSES.match(item.path.relative_to(HERE).as_posix()):
            item.add_marker("job")
        name = item.nodeid.partition("[")[0]
        if name in SLOW or name.partition("::")[0] in SLOW:
            item.add_marker("slow")


GPU = HERE / "gpu"
collect_ignore = ["helpers", "jobs"]
"""What the processes of jobs run: no tests, and pytest itself must not import most of it."""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """What needs a GPU is left out unless it is asked for by name: `make test-gpu` does."""
    if collection_path != GPU and GPU not in collection_path.parents:
        return None
    named = [(config.invocation_params.dir / argument.partition("::")[0]).resolve() for argument in config.args]
    asked = any(path == GPU or GPU in path.parents for path in named)
    return None if asked else True


Value = tuple[int, frozenset[tuple[int, int]]]
"""A chunk and how often each part is in it."""


def random_program(seed: int, *, wide: bool = False) -> Program:
    """A correct program over random spanning trees, with random lanes and steps; if wide, some messages are merged."""
    rng = random.Random(seed)
    n = rng.randint(2, 6)
    chunks = rng.randint(1, 3)
    makers: list[Callable[[], Collective]] = [
        lambda: AllGather(n, chunks=chunks),
        lambda: ReduceScatter(n, chunks=chunks),
        lambda: AllReduce(n, chunks=chunks),
        lambda: AllToAll(n, chunks=chunks),
        lambda: Broadcast(n, root=rng.randrange(n), chunks=chunks),
        lambda: Reduce(n, root=rng.randrange(n), chunks=chunks),
    ]
    collective = rng.choice(makers)()
    src, dst, chunk, step, reduce, lane = [], [], [], [], [], []

    def send(a: int, b: int, c: int, at: int, add: bool) -> None:
        src.append(a)
        dst.append(b)
        chunk.append(c)
        step.append(at)
        reduce.append(add)
        lane.append(rng.randint(0, 1))

    for c in range(collective.num_chunks):
        holders = [r for r in range(n) if c in collective.inputs(r)]
        wanted = [r for r in range(n) if c in collective.outputs(r)]
        at = rng.randint(0, 3)
        have = holders[0]
        if len(holders) > 1:  # reduce along a random tree to a random member of it
            rest = holders[:]
            rng.shuffle(rest)
            root = wanted[0] if collective.kind != "all_reduce" else rng.choice(rest)
            rest.remove(root)
            tree = [root]
            parent = {}
            for r in rest:
                parent[r] = rng.choice(tree)
                tree.append(r)
            for r in reversed(tree[1:]):  # children before their parents
                send(r, parent[r], c, at, True)
                at += rng.randint(1, 2)
            have = root
        reached = [have]
        todo = [r for r in wanted if r != have]
        rng.shuffle(todo)
        for r in todo:
            via = rng.choice(reached)
            others = [x for x in range(n) if x not in reached and x not in todo and x not in holders]
            if others and rng.random() < 0.3:  # relay through a rank that does not want it
                relay = rng.choice(others)
                send(via, relay, c, at, False)
                at += 1
                via = relay
            send(via, r, c, at, False)
            at += rng.randint(1, 2)
            reached.append(r)
    messages: dict[tuple[int, ...], list[int]] = {}
    for t in range(len(src)):
        alone = -1 if wide and rng.random() < 0.8 else t
        messages.setdefault((src[t], dst[t], step[t], reduce[t], 0 if wide else lane[t], alone), []).append(chunk[t])
    columns = list(zip(*messages, strict=True)) or [()] * 6
    return Program.from_steps(
        f"random{seed}",
        collective,
        src=columns[0],
        dst=columns[1],
        step=columns[2],
        reduce=columns[3],
        lane=columns[4],
        chunk=[c for chunks in messages.values() for c in chunks],
        chunk_ptr=[0, *accumulate(len(chunks) for chunks in messages.values())],
    )


def execute(program: Program, rng: random.Random, fifo_depth: int) -> str | None:
    """Run a program in one random order that its rules allow; what went wrong, or None.

    Written from the definition of `Program` alone, so that it can judge the verifier.
    """
    c = program.collective
    slots: dict[tuple[int, int], tuple[int, Counter[int]]] = {}
    for r in range(c.num_ranks):
        for at in range(c.in_ptr[r], c.in_ptr[r + 1]):
            slots[r, int(c.in_chunk[at])] = (int(c.in_chunk[at]), Counter([int(c.in_part[at])]))
    count = program.num_transfers
    started: set[int] = set()
    finished: set[int] = set()
    flying: dict[int, list[tuple[int, Counter[int]] | None]] = {}
    queues: dict[tuple[int, int, int], list[int]] = {}
    for t in range(count):
        queues.setdefault((int(program.src[t]), int(program.dst[t]), int(program.lane[t])), []).append(t)
    place = {t: (queue, i) for queue in queues.values() for i, t in enumerate(queue)}

    def may_start(t: int) -> bool:
        queue, i = place[t]
        return (
            all(d in finished for d in program.after_of(t).tolist())
            and (i == 0 or queue[i - 1] in started)
            and (i < fifo_depth or queue[i - fifo_depth] in finished)
        )

    def may_finish(t: int) -> bool:
        queue, i = place[t]
        here = int(program.dst[t])
        return (i == 0 or queue[i - 1] in finished) and all(
            (g in started) if int(program.src[g]) == here else (g in finished) for g in program.gate_of(t).tolist()
        )

    while len(finished) < count:
        moves = [(t, 0) for t in range(count) if t not in started and may_start(t)]
        moves += [(t, 1) for t in started - finished if may_finish(t)]
        if not moves:
            return "deadlock"
        t, end = rng.choice(moves)
        if end == 0:
            started.add(t)
            flying[t] = [slots.get((int(program.src[t]), x)) for x in program.chunks_of(t).tolist()]
            if None in flying[t]:
                return f"transfer {t} reads nothing"
        else:
            finished.add(t)
            for x, value in zip(program.chunks_of(t).tolist(), flying[t], strict=True):
                assert value is not None
                key = (int(program.dst[t]), x)
                if program.reduce[t]:
                    if key not in slots:
                        return f"transfer {t} adds to nothing"
                    value = (x, value[1] + slots[key][1])
                slots[key] = (x, Counter(value[1]))
    for r in range(c.num_ranks):
        for at in range(c.out_ptr[r], c.out_ptr[r + 1]):
            held = slots.get((r, int(c.out_chunk[at])))
            if held is None or held[1] != Counter(c.parts_of(at)):
                return f"rank {r} ends with {held} in chunk {c.out_chunk[at]}"
    return None


@pytest.fixture(scope="session")
def make_random_program() -> Callable[[int], Program]:
    return random_program


@pytest.fixture(scope="session")
def make_wide_program() -> Callable[[int], Program]:
    return lambda seed: random_program(seed, wide=True)


@pytest.fixture(scope="session")
def run_in_random_order() -> Callable[[Program, random.Random, int], str | None]:
    return execute
