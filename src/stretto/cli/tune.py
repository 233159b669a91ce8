"""``stretto tune``: find the strategy under which a training script runs fastest, by running it."""

from __future__ import annotations

import math
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import InvalidInput
from .common import out, progress, write_json, wrote

if TYPE_CHECKING:
    from ..strategy.search import Found, Trial
    from ..strategy.trials import Trials

SHOWN = 8


def tune(
    command: Annotated[list[str], typer.Argument(metavar="-- CMD...", help="What starts the job.")],
    trials: Annotated[int, typer.Option(help="How many runs to spend.")] = 20,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="Where the strategy goes.")] = Path(
        "strategy.yaml"
    ),
    cluster: Annotated[
        str | None,
        typer.Option("--cluster", "-c", help="A preset or file whose devices are the ranks. Default: hosts only."),
    ] = None,
    warmup: Annotated[int, typer.Option(help="Iterations before each measurement.")] = 10,
    timed: Annotated[int, typer.Option(help="Iterations measured.")] = 40,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", help="For one run; what takes longer has failed.")] = 600,
    allow_lossy: Annotated[bool, typer.Option("--allow-lossy", help="Also try compressed gradients.")] = False,
    allow_stale: Annotated[int, typer.Option(metavar="K", help="Also try parameters up to K steps old.")] = 0,
    method: Annotated[
        str, typer.Option(metavar="learned|random", help="Learn from trials, or draw guided by rules alone.")
    ] = "learned",
    backend: Annotated[
        str, typer.Option(metavar="processes|ray", help="Where runs go: here, one by one, or to a Ray cluster.")
    ] = "processes",
    ray_address: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Ray's head node. Default: $RAY_ADDRESS, else a local Ray.")
    ] = None,
    jobs: Annotated[int, typer.Option("--jobs", "-j", help="Runs at once on a local Ray.")] = 1,
    scratch: Annotated[
        Path | None, typer.Option(metavar="DIR", help="A folder that all hosts see. Default: this machine's for such.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Same seed, same candidates.")] = 0,
    rows: Annotated[Path | None, typer.Option("--json", metavar="FILE.json", help="Write all trials.")] = None,
) -> None:
    """Find the fastest synchronisation strategy for a training script by short runs of it.

    \b
    The script calls `stretto.distribute(model, optimizer)`; nothing else in it
    changes. The first run finds out about the model, each further one tries a
    strategy for a few iterations. What is found trains as synchronous training
    with whole gradients does, unless --allow-lossy or --allow-stale is given,
    and was not slower than all-reduce in buckets (as DDP does) in its last runs.
    Use it with STRETTO_STRATEGY=strategy.yaml.

    \b
    Examples:
      stretto tune -- torchrun --nproc-per-node 4 train.py
      stretto tune --trials 50 -o best.yaml -- torchrun ... train.py
      stretto tune -- stretto lab run --hosts 2 --ranks 2 -- python train.py
      stretto tune --backend ray -- torchrun --nproc-per-node 8 train.py
    """
    from ..strategy.files import save_strategy
    from ..strategy.search import METHODS
    from ..strategy.trials import Trials
    from ..strategy.trials import command as launched
    from ..synthesis.worker import check_backend

    check_backend(backend, ray_address)
    if trials < 1 or trials > 10_000:
        raise InvalidInput(f"--trials: must be 1..10000, not {trials}")
    if not 1 <= jobs <= 1024:
        raise InvalidInput(f"--jobs: must be 1..1024, not {jobs}")
    if method not in METHODS:
        raise InvalidInput(f"--method: must be one of {', '.join(METHODS)}, not {method!r}")
    if not output.absolute().parent.is_dir():
        raise InvalidInput(f"--output {output}: there is no such folder")
    if scratch is not None and not scratch.is_dir():
        raise InvalidInput(f"--scratch {scratch}: there is no such folder")
    folder = str(scratch.absolute()) if scratch is not None else None
    runs = Trials(launch=launched(command), warmup=warmup, timed=timed, timeout_s=timeout, folder=folder)
    # A run is in a session of its own: it must be ended by us when we are.
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        found = _searched(
            runs, command, trials=trials, cluster=cluster, method=method, lossy=allow_lossy, staleness=allow_stale,
            seed=seed, backend=backend, ray_address=ray_address, jobs=jobs,
        )  # fmt: skip
    finally:
        signal.signal(signal.SIGTERM, before)
    _show(found)
    save_strategy(found.best, output)
    wrote(out(), output, f"use it with STRETTO_STRATEGY={output}")
    if rows is not None:
        write_json(rows, [_row(trial) for trial in found.trials])
        wrote(out(), rows)


def _searched(
    runs: Trials, command: list[str], *, trials: int, cluster: str | None, method: str, lossy: bool, staleness: int,
    seed: int, backend: str, ray_address: str | None, jobs: int,
) -> Found:  # fmt: skip
    from ..cluster.files import load
    from ..strategy.resources import resources
    from ..strategy.search import search

    known = load(cluster) if cluster is not None else None
    with progress("tune", trials + 1) as advance:
        advance("what the model is")
        model, there = runs.describe()
        if known is not None and len(resources(known).devices) != len(there.devices):
            count = len(resources(known).devices)
            raise InvalidInput(f"--cluster: {known.name} has {count} devices, the job {len(there.devices)} ranks")
        out().print(f"{model!r}, {len(there.devices)} ranks on {len(there.by_host)} hosts", markup=False)

        def started(number: int, origin: str) -> None:
            advance(f"trial {number + 1}, {origin}")

        if backend == "processes":
            return search(
                model, known or there, runs.run, trials=trials, seed=seed, method=method, lossy=lossy,
                staleness=staleness, on_start=started,
            )  # fmt: skip
        from ..strategy.trials_ray import ray_trials

        with ray_trials(
            command, warmup=runs.warmup, timed=runs.timed, timeout_s=runs.timeout_s, folder=runs.folder,
            address=ray_address, jobs=jobs,
        ) as (run_all, at_once):
            return search(
                model, known or there, runs.run, run_all=run_all, at_once=at_once, trials=trials, seed=seed,
                method=method, lossy=lossy, staleness=staleness, on_start=started,
            )  # fmt: skip


def _show(found: Found) -> None:
    from rich.table import Table

    table = Table("trial", "strategy", "iteration", "against usual", box=None)
    for column in (0, 2, 3):
        table.columns[column].justify = "right"
    ran = sorted(found.trials, key=lambda trial: trial.iteration_us)
    for trial in ran[:SHOWN]:
        if not trial.why:
            ratio = f"{found.usual_us / trial.iteration_us:.2f}x" if math.isfinite(found.usual_us) else ""
            again = f" (again {trial.again + 1})" if trial.again >= 0 else ""
            table.add_row(str(trial.number + 1), trial.origin + again, f"{trial.iteration_us / 1e3:.2f} ms", ratio)
    console = out()
    console.print(table)
    failed = [trial for trial in found.trials if trial.why]
    if failed:
        console.print(f"{len(failed)} did not run; the first: {failed[0].why}", markup=False)
    gain = f", {found.usual_us / found.best_us:.2f}x the usual all-reduce" if math.isfinite(found.usual_us) else ""
    console.print(f"best: {found.best_us / 1e3:.2f} ms per iteration{gain}, {len(found.trials)} trials", markup=False)


def _row(trial: Trial) -> dict[str, object]:
    from ..strategy.files import strategy_text

    return {
        "number": trial.number, "origin": trial.origin, "again": trial.again, "score": trial.score,
        "estimate_us": trial.estimate_us, "why": trial.why,
        "iteration_us": trial.iteration_us if math.isfinite(trial.iteration_us) else None,
        "strategy": strategy_text(trial.strategy),
    }  # fmt: skip
