# SPDX-License-Identifier: Apache-2.0
"""``stretto run``: train as ever, with a controller beside it."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from ..control import inject_folder
from ..control.controller_process import ControllerProcess
from ..control.hangs import GONE
from ..control.messages import CapturedStep, HushRequest, JobStatus, Status, encode
from ..control.transport import HUSH, ControllerConnection, from_environment
from ..errors import InvalidInput, StrettoError
from ..files import write_file
from ..report.enforced_html import write_enforced_html
from ..units import counted, format_us
from .common import json_bytes, say, script_hint
from .gain import gain_lines
from .options import BudgetOption, HtmlOption, JsonOption, PlansOption
from .run_memory import StatusWatcher, with_memory
from .status import hang_line, state

CANNOT_RUN, NOT_FOUND = 126, 127
"""What a shell says."""
HUSH_S = 2.0


def run(
    command: Annotated[list[str], typer.Argument(metavar="-- CMD...", help="What starts the job.")],
    controller: Annotated[
        str, typer.Option(metavar="unix:PATH|HOST:PORT", help="A running `stretto controller`; else one of its own.")
    ] = "",
    token_file: Annotated[Path | None, typer.Option(metavar="FILE", help="That controller's token.")] = None,
    budget: BudgetOption = 5.0,
    plans: PlansOption = "",
    html: HtmlOption = None,
    rows: JsonOption = None,
) -> None:
    """Run a training job unchanged: record a few iterations, plan, go on faster, and say what was gained.

    \b
    The script may know nothing of Stretto. Process groups on gloo (CPUs) become
    ours, those on NCCL are planned above it; optimizer steps mark iterations. Ends with the job's exit code. While
    it runs, `stretto status` with the printed address shows how it goes.

    \b
    Examples:
      stretto run -- torchrun --nproc-per-node 4 train.py
      stretto run -- stretto lab run --hosts 2 --ranks 2 -- python train.py
      stretto run --html gain.html -- torchrun --nproc-per-node 4 train.py
      stretto run --budget 30 -- torchrun --nproc-per-node 8 train.py
      stretto run --plans off -- torchrun --nproc-per-node 4 train.py
    """
    if not 0 < budget < 86400:
        raise InvalidInput(f"--budget: must be more than 0 and less than 86400 seconds, not {budget:g}")
    if str(rows) == "-":
        raise InvalidInput("--json: standard output is the job's; name a file")
    if shutil.which(command[0]) is None and not ("/" in command[0] and Path(command[0]).exists()):
        say(f"stretto: error: {command[0]}: not found{script_hint(command[0])}", error=True)
        raise typer.Exit(NOT_FOUND)
    if token_file is not None and not controller:
        raise InvalidInput("--token-file: is for --controller; a controller of its own makes a token of its own")
    if controller:
        if token_file is None:
            raise InvalidInput("--token-file: must name the token of the controller")
        if plans:
            raise InvalidInput("--plans: is for `stretto controller` to say where one runs already")
        given = (controller, token_file)
        _other(*given)
        name = _job_name(command)
        memory = StatusWatcher(lambda: _other(*given), name)
        memory.start()
        code = _run(command, controller, token_file.absolute(), name, ends=lambda: _hush(*given, name))
        _tell_of_other(*memory.last_words(), html, rows)
        raise typer.Exit(code)

    from ..control.kept_plans import plans_folder

    folder = plans_folder(plans)
    code, status, captured = recorded_run(command, budget, folder)
    _tell(status, html, rows, code=code)
    if captured is not None and folder is not None:
        _choose_buckets(captured, command, budget, folder)
    raise typer.Exit(code)


def _choose_buckets(captured: CapturedStep, command: list[str], budget_s: float, folder: Path) -> None:
    """With STRETTO_BUCKET_MB=auto: which buckets of DDP's the next start of the command takes."""
    from ..control.bucket_choice import asked, choose, keep

    if not asked():
        return
    try:
        found = choose(captured, budget_s)
        if found is None:
            _say("DDP's buckets: the step has none that could be changed")
            return
        now, best = found
        if best.nbytes:
            keep(folder, command, best.cap_mb)
            gained = f"{format_us(best.plan_us)} an iteration beside {format_us(now.plan_us)}, predicted"
            _say(f"DDP's buckets: the next start takes {best.cap_mb:g} MiB ({gained}), unless its script says a size")
        else:
            _say(f"DDP's buckets: none are better than these ({format_us(now.plan_us)} an iteration, predicted)")
    except StrettoError as error:  # the exit code is the job's
        _say(f"DDP's buckets: {error}")


def recorded_run(
    command: list[str], budget_s: float, plans: Path | None = None
) -> tuple[int, Status, CapturedStep | None]:
    """Run a job with a controller of its own beside it.

    Args:
        command: What starts the job.
        budget_s: How long to search for a plan.
        plans: The folder of plans that are kept for the next start; None: none are.

    Returns:
        The job's exit code, what the controller said last, and the training step that was recorded, if one was.
    """
    with tempfile.TemporaryDirectory(prefix="stretto-run-") as folder:
        own = ControllerProcess(Path(folder), budget_s, _say, plans)
        said: list[Status] = []
        try:
            _say(f"to look on: stretto status --address {own.address} --token-file {own.token_path}")
            name, buckets = _job_name(command), _buckets(command, plans)
            code = _run(command, own.address, own.token_path, name, buckets, ends=own.job_ends)
        finally:
            said = own.close()
        return code, _last_status(said), own.captured()


def _last_status(said: list[Status]) -> Status:
    """What a controller said last; what it has forgotten because it was started again comes from its earlier lives."""
    jobs: dict[str, JobStatus] = {}
    for status in said:
        jobs |= {job.job: with_memory(job, jobs.get(job.job)) for job in status.jobs}
    hangs = tuple(dict.fromkeys(hang for status in said for hang in status.hangs))
    return Status(pid=said[-1].pid if said else 0, jobs=tuple(jobs.values()), hangs=hangs)


def _job_name(command: list[str]) -> str:
    return os.environ.get("STRETTO_JOB", "") or f"{Path(command[0]).name[:60]}-{secrets.token_hex(3)}"


def _buckets(command: list[str], plans: Path | None) -> dict[str, str]:
    """With STRETTO_BUCKET_MB=auto: what an earlier start of the command has found out."""
    from ..control.bucket_choice import asked, kept_size
    from ..control.bucket_size import OPTION

    return {OPTION: kept_size(plans, command)} if asked() else {}


def _run(
    command: list[str], address: str, token_path: Path, name: str, more: dict[str, str] | None = None, *,
    ends: Callable[[], None],
) -> int:  # fmt: skip
    """The job, with everything it needs to find us; signals that end us end it first, and `ends` is called."""
    path = [str(inject_folder()), *filter(None, [os.environ.get("PYTHONPATH", "")])]
    environment = (
        os.environ
        | (more or {})
        | {
            "PYTHONPATH": os.pathsep.join(path),
            "STRETTO_CONTROLLER": address,
            "STRETTO_TOKEN_FILE": str(token_path),
            "STRETTO_JOB": name,
        }
    )
    try:
        process = subprocess.Popen(command, env=environment)
    except FileNotFoundError:
        say(f"stretto: error: {command[0]}: not found{script_hint(command[0])}", error=True)
        return NOT_FOUND
    except OSError as error:
        say(f"stretto: error: {command[0]}: {error.strerror}{script_hint(command[0])}", error=True)
        return CANNOT_RUN

    def forward(number: int, _: object) -> None:
        ends()
        process.send_signal(number)

    def interrupted(number: int, _: object) -> None:
        ends()
        # A terminal sends Ctrl-C to the job as well, and torchrun takes a second one for impatience.
        if not _in_foreground():
            process.send_signal(number)

    # The job ends as it likes, and we after it.
    before = {
        signal.SIGTERM: signal.signal(signal.SIGTERM, forward),
        signal.SIGINT: signal.signal(signal.SIGINT, interrupted),
    }
    try:
        code = process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return code if code >= 0 else 128 - code


def _in_foreground() -> bool:
    """Whether a terminal's Ctrl-C reaches this process."""
    try:
        with open("/dev/tty") as terminal:
            return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    except OSError:
        return False


def _other(address: str, token_file: Path) -> ControllerConnection:
    """The way to a controller that is not ours; what is wrong with it is said before the job starts."""
    link = from_environment({**os.environ, "STRETTO_CONTROLLER": address, "STRETTO_TOKEN_FILE": str(token_file)})
    assert link is not None
    return link


def _hush(address: str, token_file: Path, name: str) -> None:
    """Tell a controller that is not ours that the job is to end; whoever handles a signal does not wait for it."""

    def tell() -> None:
        with contextlib.suppress(StrettoError):
            link = _other(address, token_file)
            try:
                link.call(HUSH, encode(HushRequest(job=name)), timeout_s=HUSH_S)
            finally:
                link.close()

    threading.Thread(target=tell, name="stretto-hush", daemon=True).start()


def _tell_of_other(job: JobStatus | None, gone: str, html: Path | None, rows: Path | None) -> None:
    """What was gained, as far as a controller that is not ours has said it."""
    if gone:
        unknown = "" if job is not None else ": what was gained is not known"
        _say(f"the controller is gone at the end ({gone.rstrip(':')}){':' if job is not None else unknown}")
    if job is not None or not gone:
        _tell(Status(pid=0, jobs=(job,) if job is not None else ()), html, rows)


def _tell(status: Status, html: Path | None, rows: Path | None, *, code: int = 0) -> None:
    """Print what the job gained, and by what."""
    for path, write in ((html, write_enforced_html), (rows, lambda path, status: write_file(path, json_bytes(status)))):
        if path is None:
            continue
        try:
            write(path, status)
            _say(f"wrote {path}")
        except InvalidInput as error:  # the exit code is the job's, whatever becomes of the report
            _say(f"error: {error}")
    if not status.jobs and code not in (NOT_FOUND, CANNOT_RUN):
        reasons = "it takes two or more ranks, on gloo or NCCL, that train for some ten steps"
        _say(f"no job was heard of ({reasons}): nothing was gained")
    for job in status.jobs:
        began = "; began with a plan of an earlier start" if job.recalled else ""
        _say(f"{counted(job.size, 'rank')}, {state(job)}; {job.about}{began}")
        for line in gain_lines(job.split):
            _say(f"  {line}")
    for hang in status.hangs:
        if code or hang.kind != GONE:
            _say(f"hang: {hang_line(hang)}")


def _say(text: str) -> None:
    say(f"stretto: {text}", error=True)
