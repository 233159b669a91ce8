# SPDX-License-Identifier: Apache-2.0
"""``stretto advise``: how much of a step waits for communication, and what each change would gain."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated

import typer

from ..advice import BackendTrial, StepAdvice
from ..advice import advise as make_advice
from ..control.messages import decode_captured
from ..control.split import GainSplit
from ..errors import InvalidInput, probably_meant
from ..report.advice_html import write_advice_html
from ..report.advice_text import advice_page
from ..workload.registry import MODELS
from .common import out, say, script_hint
from .gain import gain_lines
from .options import BudgetOption, HtmlOption, JsonOption, OptionalCluster, SeedOption
from .outputs import OutputFiles, output
from .plan import search_progress

PROBED = ("probed", "timed")
"""Names of clusters that a job has measured by itself."""
RECORDED = (".json", ".gz", ".yaml", ".yml", ".et")
"""Endings of traces and workload files; anything else that is no directory is a command."""


def advise(
    step: Annotated[
        list[str],
        typer.Argument(
            metavar="TRACE... | MODEL | -- CMD...",
            help="Profiler traces (one file per rank, or their directory), a model, or what starts a job.",
        ),
    ],
    cluster: OptionalCluster = None,
    plan_file: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE.json", callback=output(".json"), help="Write the plan found."),
    ] = None,
    html: HtmlOption = None,
    rows: JsonOption = None,
    budget: BudgetOption = 20.0,
    steps: Annotated[
        int | None, typer.Option(help="Search so many steps instead: then the result depends on the seed alone.")
    ] = None,
    seed: SeedOption = 0,
) -> None:
    """Say how much of a training step waits for communication, and what each change to the job would gain.

    Takes what there is: PyTorch profiler traces, or the command that starts a job on CPUs (gloo), which is then
    run as by `stretto run`; and a cluster as a preset, NCCL's topology XML, `nvidia-smi topo -m`, or three lines. Every
    gain is simulated; where nothing is to be gained, it says so.

    \b
    Examples:
      stretto advise traces/ -c "hosts: 2, gpus: 8 x h100, network: 8 x 400gbit"
      stretto advise rank0.json.gz -c topo.xml:4 --html advice.html
      stretto advise traces/
      stretto advise gpt:1.3b,ranks=16,device=h100 -c dgx_h100:2
      stretto advise -- torchrun --nproc-per-node 4 train.py
    """
    if _is_recorded(step):
        with search_progress() as tell:
            found = make_advice(
                step[0] if len(step) == 1 else step, cluster, budget_s=budget, steps=steps, seed=seed, progress=tell
            )
        _finish(found, plan_file, html, rows)
        return
    if shutil.which(step[0]) is None:
        raise InvalidInput(_not_usable(step[0]))
    raise typer.Exit(_of_job(step, cluster, budget, steps, seed, plan_file, html, rows))


def _is_recorded(step: list[str]) -> bool:
    first = step[0]
    if _model_name(first) in MODELS:
        if len(step) > 1:
            raise InvalidInput(f"{step[1]}: one model at a time; only traces may be several")
        return True
    recorded = [word.endswith(RECORDED) or (word != "" and Path(word).is_dir()) for word in step]
    if recorded[0] and not all(recorded):
        raise InvalidInput(f"{step[recorded.index(False)]}: give traces or a command, not both")
    return recorded[0]


def _model_name(word: str) -> str:
    return word.partition(":")[0].partition(",")[0]


def _not_usable(word: str) -> str:
    """What to say of a word that is nothing to advise on, with what was probably meant."""
    there = word != "" and Path(word).exists()
    traces = f"is no trace ({', '.join(RECORDED)}), no directory of traces" if there else "no such file or directory"
    message = f"{word or repr(word)}: {traces}, no model ('stretto workload list') and no command that can be run"
    return message + (script_hint(word) or probably_meant(_model_name(word), MODELS))


def _of_job(
    command: list[str], cluster: str | None, budget: float, steps: int | None, seed: int, plan_file: Path | None,
    html: Path | None, rows: Path | None,
) -> int:  # fmt: skip
    """Run the job, then advise on what it recorded; the exit code is the job's."""
    from .run_job import recorded_run

    code, status, captured = recorded_run(command, budget)
    if captured is None:
        why = "two or more ranks on gloo or NCCL that train for some ten steps are recorded"
        failed = f"it ended with exit code {code}" if code else why
        raise InvalidInput(
            f"{command[0]}: the job recorded no training step ({failed}); its profiler traces will do as well "
            "(docs/traces.md)"
        )
    workload, machine = decode_captured(captured)
    job = status.jobs[-1] if status.jobs else None
    timing = None if job is None else job.split.unchanged or job.split.backend
    with search_progress() as tell:
        found = make_advice(
            workload, machine if cluster is None else cluster, budget_s=budget, steps=steps, seed=seed, progress=tell,
            gpu=job is not None and job.split.own == "nccl",
            measured_us=timing.median_us if timing is not None else 0.0,
            probed=cluster is None and machine.name in PROBED, trial=None if job is None else _trial(job.split),
        )  # fmt: skip
    for line in [] if job is None else gain_lines(job.split):
        say(f"stretto: {line}", error=True)
    _finish(found, plan_file, html, rows)
    return code


def _trial(split: GainSplit) -> BackendTrial | None:
    """What a job has measured of itself under `stretto run`, beside itself unchanged."""
    ways = {"backend": ("our backend, plain order", split.backend), "plan": ("the plan", split.plan)}
    known = [ways[split.kept]] if split.kept in ways else list(ways.values())
    tried = [(timing.median_us, name) for name, timing in known if timing is not None]
    if split.unchanged is None or not tried:
        return None
    tried_us, name = min(tried)
    return BackendTrial(
        own=split.own, own_us=split.unchanged.median_us, tried=name, tried_us=tried_us, kept=split.kept in ways
    )


def _finish(found: StepAdvice, plan_file: Path | None, html: Path | None, rows: Path | None) -> None:
    files = OutputFiles()
    if plan_file is not None and found.plan is None:
        raise InvalidInput("--output: there is no plan without a cluster and communication")
    if found.plan is not None:
        files.write(plan_file, found.plan.save, f"hash {found.plan.plan.hash}")
    files.write(html, lambda path: write_advice_html(path, found))
    files.json(rows, found.rows())
    out().print(advice_page(found))
    files.tell()
