# SPDX-License-Identifier: Apache-2.0
"""``stretto status``: what a controller knows of its jobs."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ..control.live_page import LivePage
from ..control.messages import HangStatus, JobStatus, RankStatus, Status, StatusRequest, decode, encode
from ..control.metrics import prometheus_text
from ..control.transport import STATUS, ControllerConnection, check_address, default_folder, from_environment
from ..errors import InvalidInput
from ..report.enforced_html import enforced_page, write_enforced_html
from ..report.table import ResultTable
from ..units import format_us
from .common import one_line, out
from .gain import gain_line
from .options import HtmlOption, JsonOption
from .outputs import OutputFiles

ASK_S, AGAIN_S = 5.0, 5.0


def status(
    address: Annotated[
        str, typer.Option(metavar="unix:PATH|HOST:PORT", help="Of the controller; else STRETTO_CONTROLLER's.")
    ] = "",
    token_file: Annotated[Path | None, typer.Option(metavar="FILE", help="Else STRETTO_TOKEN_FILE.")] = None,
    tls_cert: Annotated[Path | None, typer.Option(metavar="PEM", help="The asking side's certificate.")] = None,
    tls_key: Annotated[Path | None, typer.Option(metavar="PEM", help="Its key.")] = None,
    tls_ca: Annotated[Path | None, typer.Option(metavar="PEM", help="Who signed the controller's.")] = None,
    rows: JsonOption = None,
    html: HtmlOption = None,
    metrics: Annotated[bool, typer.Option("--metrics", help="Counters for Prometheus instead of tables.")] = False,
    serve: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="A live page at an address of this machine, 127.0.0.1:0 say.")
    ] = "",
) -> None:
    """Show the jobs of a controller: plan, hash, waits, gain, and how every rank is.

    \b
    Examples:
      stretto status
      stretto status --address 127.0.0.1:7077 --token-file token
      stretto status --json -
      stretto status --html now.html
      stretto status --metrics > stretto.prom
      stretto status --serve 127.0.0.1:8080
    """
    given = {
        "STRETTO_CONTROLLER": address, "STRETTO_TOKEN_FILE": token_file, "STRETTO_TLS_CERT": tls_cert,
        "STRETTO_TLS_KEY": tls_key, "STRETTO_TLS_CA": tls_ca,
    }  # fmt: skip
    if address:
        check_address(address)
    environment = _environment({name: str(value) for name, value in given.items() if value})
    if serve:
        serve_page(serve, environment)
        return
    link = from_environment(environment)
    assert link is not None
    found = ask(link)
    files = OutputFiles()
    files.write(html, lambda path: write_enforced_html(path, found))
    files.json(rows, found)
    console = out()
    if metrics:
        print(prometheus_text(found), end="")
        files.tell()
        return
    if not found.jobs:
        console.print("no job has been heard of")
    for job in found.jobs:
        show(console, job)
    for hang in found.hangs:
        console.print(one_line(f"job {hang.job}: hang: {hang_line(hang)}"), markup=False, soft_wrap=True)
    files.tell()


def _environment(given: dict[str, str]) -> dict[str, str]:
    """Where the controller is: as given, else as this process's environment says, else this user's own."""
    environment = dict(os.environ) | given
    if not environment.get("STRETTO_CONTROLLER"):
        folder = default_folder()
        environment["STRETTO_CONTROLLER"] = f"unix:{folder / 'controller.sock'}"
        environment.setdefault("STRETTO_TOKEN_FILE", str(folder / "token"))
        if not (folder / "controller.sock").exists():
            raise InvalidInput(
                "--address: no `stretto controller` of this user runs here (`stretto run` prints its own address)"
            )
    return environment


def ask(link: ControllerConnection) -> Status:
    """The answer of the controller at the other end."""
    try:
        return decode(link.call(STATUS, encode(StatusRequest()), timeout_s=ASK_S), Status)
    finally:
        link.close()


def serve_page(address: str, environment: dict[str, str]) -> None:
    """Serve a page of all jobs that renews itself, until interrupted; each time the controller is asked anew."""

    def page() -> str:
        link = from_environment(environment)
        assert link is not None
        return enforced_page(ask(link), again_s=AGAIN_S)

    live = LivePage(address, page)
    print(f"{live.url} (end with Ctrl-C)", flush=True)
    with suppress(KeyboardInterrupt):
        live.serve()


def show(console: Console, job: JobStatus) -> None:
    """One job: its plan, and a line for every rank."""

    # What ranks say of themselves must not look like a line of another job.
    head = one_line(f"job {job.job}: {job.size} ranks, {job.phase}; {job.about}")
    console.print(head, markup=False, soft_wrap=True)
    console.print(f"  {one_line(summary(job))}", markup=False, soft_wrap=True)
    table = ResultTable(">rank", "runs", "vote", ">iteration", ">time", ">waits", ">held", "heard")
    for rank in job.ranks:
        waits, held = (
            f"{us / rank.iteration_us:.1%}" if rank.iteration_us else "" for us in (rank.waits_us, rank.held_us)
        )
        heard = "has ended" if rank.left else f"{rank.heard_s:.1f} s ago"
        times = format_us(rank.iteration_us) if rank.iteration_us else ""
        shown = (str(rank.rank), one_line(str(rank.active)), _vote(rank), str(rank.iteration), times)
        table.add_row(*shown, waits, held, heard)
    console.print(table)
    for rank in job.ranks:
        if rank.fell_back:
            came_back = ", and came back" if rank.active.number else ""
            why = one_line(f"rank {rank.rank} fell back{came_back}: {rank.fell_back}")
            console.print(f"  {why}", markup=False, soft_wrap=True)


def hang_line(hang: HangStatus) -> str:
    """What hung, and whether it went on."""
    return f"{hang.text}{f'; it went on {hang.went_on_s:.0f} s later' if hang.went_on_s else ''}"


def summary(job: JobStatus) -> str:
    """Plan and gain on one line."""
    line = gain_line(job.split)
    if not line and job.iteration_us:
        line = f"{format_us(job.iteration_us)} per iteration"
    text = state(job) + (f": {line}" if line else "")
    if job.plan.number and job.predicted_us:
        text += f" (predicted {format_us(job.predicted_us)})"
    return text


def state(job: JobStatus) -> str:
    """What a job runs on: plain order, or a plan by its number."""
    if not job.plan.number:
        return f"{job.split.own} in plain order, as without us" if job.split.kept == "unchanged" else "plain order"
    text = f"plan {job.plan.number}{f' by {job.plan_name}' if job.plan_name else ''}, hash {job.plan.hash}"
    if job.iteration_us:
        text += f", waits {job.waits_us / job.iteration_us:.1%}, held {job.held_us / job.iteration_us:.1%}"
    return text + (f", plan made anew: {job.replans}x" if job.replans else "")


def _vote(rank: RankStatus) -> str:
    if rank.ballot is None:
        return ""
    state = "committed" if rank.committed == rank.ballot.plan else "yes" if rank.ballot.yes else "no"
    return f"{rank.ballot.plan.number}: {state}"
