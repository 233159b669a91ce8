# SPDX-License-Identifier: Apache-2.0
"""``stretto tune``: find the strategy under which a training script runs fastest, by running it."""

from __future__ import annotations

import math
import shlex
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Annotated

import typer

from ..cluster import Cluster
from ..cluster.files import load
from ..errors import InvalidInput, unknown
from ..files import cache_directory
from ..report.table import ResultTable
from ..strategy import ModelSpec
from ..strategy.experience import Experience
from ..strategy.files import save_model as written_model
from ..strategy.files import save_strategy, strategy_text
from ..strategy.representation import MAX_STALENESS
from ..strategy.requests import Reference
from ..strategy.resources import resources
from ..strategy.search import METHODS, RANKERS, Bench, StrategyResult, StrategyTrial, search
from ..strategy.simulate import plan_strategy
from ..strategy.trials import Trials
from ..strategy.trials import command as launched
from ..strategy.trials_ray import ray_trials
from ..synthesis.backends import check_backend
from ..units import counted, format_us
from .common import about, out, progress, quoted, say
from .options import BackendOption, HtmlOption, JobsOption, JsonOption, OptionalCluster, RayOption, SeedOption
from .outputs import YAML, OutputFiles, output
from .pages import write_tables

SHOWN = 8
ENOUGH_ROUNDS = 12
"""The default of --rounds: where fewer were run, an undecided comparison says so."""
MAX_ROUNDS, MAX_PLAN_S = 1000, 3600.0
BUCKETS_MB = (25.0, 0.25, 1.0, 4.0)
"""DDP as everybody uses it, and with other bucket sizes."""

PlanFileOption = Annotated[
    Path | None,
    typer.Option(
        "--plan",
        metavar="FILE.json",
        callback=output(".json"),
        help="Write what the joint planner makes of what was found; needs --cluster.",
    ),
]
ModelFileOption = Annotated[
    Path | None,
    typer.Option(
        "--save-model",
        metavar="FILE",
        callback=output(*YAML),
        help="Write the model too, for 'stretto strategy ... -m FILE'.",
    ),
]
TargetOption = Annotated[
    Path, typer.Option("--output", "-o", metavar="FILE", callback=output(*YAML), help="Where the strategy goes.")
]
MethodOption = Annotated[
    str, typer.Option(metavar="learned|random", help="Learn from trials, or draw guided by rules alone.")
]
PlanBudgetOption = Annotated[
    float, typer.Option("--budget", metavar="SECONDS", help="How long the planner of --plan searches.")
]
ScratchOption = Annotated[
    Path | None, typer.Option(metavar="DIR", help="A folder that all hosts see. Default: this machine's for such.")
]
RankerOption = Annotated[
    str, typer.Option(metavar="recurrent|gaussian", help="What learns from trials; the first finds more.")
]
ExperienceOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        callback=output(".json"),
        help="What searches have found so far, to begin with and to add to. Default: a file in the cache folder.",
    ),
]

RoundsOption = Annotated[
    int,
    typer.Option(help="Most rounds of the comparison in the end; 0: none. One alone is never enough for confidence."),
]


def tune(
    command: Annotated[list[str], typer.Argument(metavar="-- CMD...", help="What starts the job.")],
    trials: Annotated[int, typer.Option(help="How many strategies to try.")] = 20,
    target: TargetOption = Path("strategy.yaml"),
    cluster: OptionalCluster = None,
    warmup: Annotated[int, typer.Option(help="Iterations before each measurement.")] = 10,
    timed: Annotated[int, typer.Option(help="Iterations measured.")] = 40,
    rounds: RoundsOption = ENOUGH_ROUNDS,
    ddp: Annotated[bool, typer.Option("--ddp/--no-ddp", help="Compare with PyTorch's own DDP, too.")] = True,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", help="For one run; what takes longer has failed.")] = 600,
    allow_lossy: Annotated[bool, typer.Option("--allow-lossy", help="Also try compressed gradients.")] = False,
    allow_stale: Annotated[int, typer.Option(metavar="K", help="Also try parameters up to K steps old.")] = 0,
    method: MethodOption = "learned",
    ranker: RankerOption = RANKERS[0],
    experience: ExperienceOption = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Use no experience, and leave none.")] = False,
    backend: BackendOption = "processes",
    ray_address: RayOption = None,
    jobs: JobsOption = 1,
    scratch: ScratchOption = None,
    seed: SeedOption = 0,
    plan: PlanFileOption = None,
    budget: PlanBudgetOption = 10.0,
    save_model: ModelFileOption = None,
    html: HtmlOption = None,
    rows: JsonOption = None,
) -> None:
    """Find the fastest synchronisation strategy for a training script by short runs of it.

    \b
    The script calls `stretto.torch.distribute(model, optimizer)`; nothing else in it
    changes. It is started once and tries one strategy after the other for a few
    iterations each. In the end the best few run again in turn with PyTorch's
    DDP, and DDP is kept unless one of them is faster with confidence.
    What is found trains as synchronous training with whole gradients does, unless
    --allow-lossy or --allow-stale is given. Use it with STRETTO_STRATEGY=strategy.yaml.

    \b
    Examples:
      stretto tune -- torchrun --nproc-per-node 4 train.py
      stretto tune --trials 50 -o best.yaml -- torchrun ... train.py
      stretto tune -- stretto lab run --hosts 2 --ranks 2 -- python train.py
      stretto tune -c cluster.yaml --plan plan.json -- torchrun ... train.py
      stretto tune --backend ray -- torchrun --nproc-per-node 8 train.py
    """
    check_backend(backend, ray_address)
    if not 0 < budget <= MAX_PLAN_S:
        raise InvalidInput(f"--budget: must be more than 0 and at most {MAX_PLAN_S:g} seconds, not {budget:g}")
    _check(trials=trials, jobs=jobs, rounds=rounds, allow_stale=allow_stale)
    _check_words(method=method, ranker=ranker, scratch=scratch)
    if fresh and experience is not None:
        raise InvalidInput("--fresh: means no experience; leave --experience out")
    if plan is not None and cluster is None:
        raise InvalidInput("--plan: the planner needs to know the network: give --cluster")
    known = load(cluster) if cluster is not None else None
    memory = None if fresh or method == "random" else experience or cache_directory() / "experience.json"
    past = _remembered(memory, named=experience is not None)
    folder = str(scratch.absolute()) if scratch is not None else None
    with _ended_with_us(), Trials(
        launched(command), warmup=warmup, timed=timed, timeout_s=timeout, folder=folder
    ) as runs:  # fmt: skip
        model, found = _searched(
            runs, command, trials=trials, cluster=known, method=method, lossy=allow_lossy, staleness=allow_stale,
            seed=seed, backend=backend, ray_address=ray_address, jobs=jobs, rounds=rounds, ddp=ddp, ranker=ranker,
            experience=past,
        )  # fmt: skip
    files = OutputFiles()
    if memory is not None:
        _remember(memory, past, found)
    files.write(target, lambda path: save_strategy(found.best, path), f"use it with STRETTO_STRATEGY={target}")
    files.write(save_model, lambda path: written_model(model, path))
    files.json(rows, [_row(trial) for trial in found.trials])
    table = _table(found)
    files.write(html, lambda path: write_tables(path, f"Strategies for {model.name}", table))
    planned = _plan(files, found, model, known, plan, budget) if plan is not None and known is not None else ""
    out().print(table)
    _show(found)
    if planned:
        out().print(planned, markup=False)
    files.tell(f"STRETTO_STRATEGY={quoted(target)} {shlex.join(command)}")


def _check(**numbers: float) -> None:
    """Refuse numbers out of range before the job is started."""
    limits = {
        "trials": (1, 10_000), "jobs": (1, 1024), "rounds": (0, MAX_ROUNDS),
        "allow_stale": (0, MAX_STALENESS),
    }  # fmt: skip
    for name, number in numbers.items():
        low, high = limits[name]
        if not low <= number <= high:
            raise InvalidInput(f"--{name.replace('_', '-')}: must be {low}..{high}, not {number}")


def _check_words(*, method: str, ranker: str, scratch: Path | None) -> None:
    """Refuse names that do not exist."""
    if method not in METHODS:
        raise InvalidInput(f"--method: {unknown('method', method, METHODS)}")
    if ranker not in RANKERS:
        raise InvalidInput(f"--ranker: {unknown('ranker', ranker, RANKERS)}")
    if scratch is not None and not scratch.is_dir():
        raise InvalidInput(f"--scratch {scratch}: there is no such folder")


@contextmanager
def _ended_with_us() -> Iterator[None]:
    """A job is in a session of its own: it must be ended by us when we are."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _remembered(path: Path | None, *, named: bool) -> Experience:
    """The experience in a file; without the file none. One in the cache folder that cannot be read is passed over."""
    if path is None or not path.exists():
        return Experience()
    try:
        return Experience.load(path)
    except InvalidInput as error:
        if named:
            raise
        say(f"{error}; the search begins without experience", error=True)
        return Experience()


def _remember(path: Path, past: Experience, found: StrategyResult) -> None:
    """Add a search to the experience; where the file cannot be written, say so and go on."""
    if found.lesson is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        past.plus(found.lesson).save(path)
    except (InvalidInput, OSError) as error:
        say(f"the experience of this search is lost: {error}", error=True)


def _searched(
    runs: Trials, command: list[str], *, trials: int, cluster: Cluster | None, method: str, lossy: bool,
    staleness: int, seed: int, backend: str, ray_address: str | None, jobs: int, rounds: int, ddp: bool, ranker: str,
    experience: Experience,
) -> tuple[ModelSpec, StrategyResult]:  # fmt: skip
    references = [Reference(bucket_mb=mb) for mb in BUCKETS_MB] if ddp else []
    with progress("tune", 1 + len(references) + trials + (1 if rounds else 0)) as advance:
        advance("what the model is")
        model, there = runs.describe()
        if cluster is not None and len(resources(cluster).devices) != len(there.devices):
            count = len(resources(cluster).devices)
            raise InvalidInput(f"--cluster: {cluster.name} has {count} devices, the job {len(there.devices)} ranks")
        where = f"{counted(len(there.devices), 'rank')} on {counted(len(there.by_host), 'host')}"
        out().print(f"{about(model)}, {where}", markup=False)

        def searched(bench: Bench) -> StrategyResult:
            return search(
                model, cluster or there, bench, trials=trials, seed=seed, method=method, lossy=lossy,
                staleness=staleness, references=references, confirm=rounds, ranker=ranker, experience=experience,
                on_start=advance,
            )  # fmt: skip

        if backend == "processes":
            return model, searched(runs)

        runs.close()
        with ray_trials(
            command, warmup=runs.warmup, timed=runs.timed, timeout_s=runs.timeout_s, folder=runs.folder,
            address=ray_address, jobs=jobs,
        ) as bench:  # fmt: skip
            return model, searched(bench)


def _table(found: StrategyResult) -> ResultTable:
    table = ResultTable("what", ">iteration", ">in turn", ">rounds")
    decided = {id(arm): at for at, (_, arm) in enumerate(found.finalists)} if found.decision is not None else {}
    ran: list[tuple[float, str, object]] = [(time_us, one.name, one) for one, time_us in found.references]
    ran += [(trial.iteration_us, f"{trial.number + 1}: {trial.origin}", trial.strategy) for trial in found.trials]
    ran.sort(key=lambda one: (id(one[2]) not in decided, one[0]))
    for time_us, label, arm in ran[:SHOWN]:
        if math.isfinite(time_us):
            at = decided.get(id(arm))
            times = found.decision.times_us[at] if found.decision is not None and at is not None else ()
            again = f"{median(times) / 1e3:.2f} ms" if times else ""
            table.add_row(label, f"{time_us / 1e3:.2f} ms", again, str(len(times)) if times else "")
        else:
            table.add_row(label, "given up", "", "")
    if len(ran) > SHOWN:
        table.caption = f"{len(ran) - SHOWN} more, slower or given up"
    return table


def _show(found: StrategyResult) -> None:
    console = out()
    failed = [trial for trial in found.trials if trial.why]
    if failed:
        console.print(f"{counted(len(failed), 'trial')} did not run; the first: {failed[0].why}", markup=False)
    if found.kept is not None:
        known = math.isfinite(found.best_us)
        why = f"{found.best_us / 1e3:.2f} ms per iteration, and" if known else "the runs in turn did not end, so"
        rounds = max(map(len, found.decision.times_us), default=0) if found.decision is not None else 0
        few = _undecided(found.best_us, min((one.iteration_us for one in found.trials), default=math.inf), rounds)
        console.print(
            f"keep {found.kept.name}: {why} no strategy was faster with confidence{few}, {len(found.trials)} trials; "
            "what is written does the same as a strategy", markup=False,
        )  # fmt: skip
        return
    # Only what ran in turn is compared, if anything did.
    gains: list[tuple[float, str]] = []
    if found.decision is not None:
        for at, (label, arm) in enumerate(found.finalists):
            usual = arm is found.trials[0].strategy
            if found.decision.times_us[at] and (usual or any(arm is one for one, _ in found.references)):
                gains.append((found.decision.gain(at), "the usual all-reduce" if usual else label))
    elif math.isfinite(found.usual_us):
        gains.append((found.usual_us / found.best_us, "the usual all-reduce"))
    gain = "".join(f", {times:.2f}x {label}" for times, label in gains)
    console.print(f"best: {found.best_us / 1e3:.2f} ms per iteration{gain}, {len(found.trials)} trials", markup=False)


def _undecided(kept_us: float, least_us: float, rounds: int) -> str:
    """What to say where a strategy took less than what is kept, but not in enough rounds to be sure.

    >>> _undecided(629_180.0, 491_110.0, 4)
    ' (one took 491.11 ms in its trial; 4 rounds in turn were few, more --rounds may decide)'
    >>> _undecided(629_180.0, 640_000.0, 4), _undecided(629_180.0, 491_110.0, 12)
    ('', '')
    """
    if not least_us < kept_us < math.inf or not 0 < rounds < ENOUGH_ROUNDS:
        return ""
    were = f"{counted(rounds, 'round')} in turn {'was' if rounds == 1 else 'were'} few"
    return f" (one took {least_us / 1e3:.2f} ms in its trial; {were}, more --rounds may decide)"


def _plan(
    files: OutputFiles, found: StrategyResult, model: ModelSpec, cluster: Cluster, path: Path, budget_s: float
) -> str:
    """Plan the strategy that was found, write the plan, and say what it promises."""
    with progress("planning", 1) as advance:
        advance(found.best.name)
        made = plan_strategy(found.best, model, cluster, budget_s=budget_s).plan
    files.write(path, made.save, f"hash {made.hash}")
    return (
        f"planned: {format_us(made.iteration_us)}, in order of submission {format_us(made.baselines_us['fifo'])}, "
        f"bound {format_us(made.bound_us)} (simulated)"
    )


def _row(trial: StrategyTrial) -> dict[str, object]:
    return {
        "number": trial.number, "origin": trial.origin, "score": trial.score, "estimate_us": trial.estimate_us,
        "why": trial.why, "iteration_us": trial.iteration_us if math.isfinite(trial.iteration_us) else None,
        "strategy": strategy_text(trial.strategy),
    }  # fmt: skip
