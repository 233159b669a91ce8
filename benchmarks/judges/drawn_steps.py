# SPDX-License-Identifier: Apache-2.0
"""A worked example of why order and options must be chosen together, in the manner of Fig. 6 of the SYNDICATE paper."""

from __future__ import annotations

from random import Random

from stretto.planner.schedule.problem import MotifTask, Option, PlanProblem
from stretto.workload import Dep, Op, Workload

FAST = ("nvlink", "rdma")
SLOW = ("pcie", "ethernet")


def figure6() -> PlanProblem:
    """Four collectives of one iteration: all-reduces b, c, d and, submitted last, an all-to-all a.

    The paper prints the totals 11 and 9.5 and no durations; the durations here were chosen to give these totals.

    Alone, each is fastest over NVLink and RDMA, and a traditional stack runs one after the other as submitted: 11
    units. Putting `a` first hides the compute that waits for it: 10. Only with its *slower* option, over PCIe and
    Ethernet beside the all-reduces, the step takes 9.5, which is the least possible.

    >>> from stretto.planner.schedule.schedule import Scheduler
    >>> scheduler = Scheduler(figure6())
    >>> scheduler.schedule(scheduler.greedy, discipline="fifo", serial=True).period_us
    11.0
    >>> scheduler.schedule(scheduler.greedy).period_us
    10.0
    >>> scheduler.schedule({"a": 1}).period_us
    9.5
    """
    forward = (Dep(op="forward"),)
    workload = Workload(
        name="figure6",
        num_ranks=4,
        ops=(
            Op(name="forward", duration_us=1.0, after=(Dep(op="update", lag=1),)),
            *(Op(name=name, kind="all_reduce", nbytes=1.0, after=forward) for name in "bcd"),
            Op(name="a", kind="all_to_all", nbytes=1.0, after=forward),
            Op(name="head", duration_us=1.0, after=(Dep(op="a"),)),
            Op(name="update", duration_us=1.0, after=(Dep(op="head"), *(Dep(op=name) for name in "bcd"))),
        ),
        notes=("durations in units, chosen so that the totals are 11 and 9.5",),
    )
    reduce = (_option("AR", "ring", FAST, 2.0), _option("AR", "tree", FAST, 2.5))
    exchange = (_option("A2A", "pairwise", FAST, 2.0), _option("A2A", "pairwise", SLOW, 6.5))
    return PlanProblem(workload=workload, options={"a": exchange, **dict.fromkeys("bcd", reduce)}, costs="example")


def _option(motif: str, algorithm: str, channels: tuple[str, ...], duration_us: float) -> Option:
    task = MotifTask(motif=motif, algorithm=algorithm, channels=channels, duration_us=duration_us)
    return Option(name=f"{algorithm}@{'+'.join(channels)}", expression=motif, tasks=(task,))


def random_problem(
    seed: int,
    *,
    num_comm: int = 6,
    num_options: int = 3,
    num_tasks: int = 2,
    longest_us: float = 3.0,
    two_places: bool = False,
) -> PlanProblem:
    """A small training step with random durations (multiples of a half), to compare searches on.

    Each comm-op follows some compute-op and is awaited by a later one of the same iteration, or by one of the next.

    Args:
        seed: seed of the random numbers.
        num_comm: number of comm-ops.
        num_options: most options of a comm-op.
        num_tasks: most tasks of an option.
        longest_us: longest task in microseconds.
        two_places: whether ops may be on one half of the ranks only.

    Returns:
        The problem.
    """
    draw = Random(seed)
    num_compute = max(2, num_comm)
    ranks = 4
    halves: tuple[tuple[int, ...], ...] = ((0, 1), (2, 3)) if two_places else ((),)
    after: list[list[Dep]] = [[] for _ in range(num_compute)]
    comm: list[tuple[int, Op]] = []
    for number in range(num_comm):
        name = f"comm{number}"
        source = draw.randrange(num_compute)
        needs = [Dep(op=f"compute{source}")]
        if comm and draw.random() < 0.3:
            other_source, other = draw.choice(comm)
            needs.append(Dep(op=other.name, lag=draw.choice((0, 0, 1)) if other_source <= source else 1))
        if source + 1 < num_compute and draw.random() < 0.6:
            after[draw.randrange(source + 1, num_compute)].append(Dep(op=name))
        else:
            after[draw.randrange(num_compute)].append(Dep(op=name, lag=1))
        kind = draw.choice(("all_reduce", "all_to_all"))
        part = draw.choice((*halves, ())) if two_places else ()
        comm.append((source, Op(name=name, kind=kind, nbytes=1.0, after=tuple(needs), groups=(part,) if part else ())))
    ops: list[Op] = []
    for at in range(num_compute):
        where = draw.choice((*halves, ())) if two_places else ()
        ops.append(Op(name=f"compute{at}", duration_us=draw.randrange(1, 9) / 2, ranks=where, after=tuple(after[at])))
        ops += [op for source, op in comm if source == at]
    options = {op.name: _random_options(draw, num_options, num_tasks, longest_us) for _, op in comm}
    return PlanProblem(
        workload=Workload(name=f"random{seed}", num_ranks=ranks, ops=tuple(ops)), options=options, costs="random"
    )


def _random_options(draw: Random, num_options: int, num_tasks: int, longest_us: float) -> tuple[Option, ...]:
    found = []
    for number in range(draw.randint(1, num_options)):
        tasks = tuple(
            MotifTask(
                motif=f"m{at}",
                algorithm="any",
                channels=draw.choice((("x",), ("y",), ("z",), ("x", "y"), ("y", "z"))),
                duration_us=draw.randint(1, round(2 * longest_us)) / 2,
                after=tuple(before for before in range(at) if draw.random() < 0.4),
            )
            for at in range(draw.randint(1, num_tasks))
        )
        found.append(Option(name=f"option{number}", expression="", tasks=tasks))
    return tuple(found)
