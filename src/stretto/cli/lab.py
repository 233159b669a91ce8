# SPDX-License-Identifier: Apache-2.0
"""``stretto lab``: run a job on hosts with shaped uplinks that exist only while it runs."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Annotated

import typer

from ..errors import InvalidInput
from ..lab import Lab, LabResult, running
from ..lab import clean as clean_labs
from ..lab.job import ending
from ..lab.layout import TCP_CONTROL
from ..report.table import ResultTable
from .common import out, script_hint, wrote
from .options import JsonOption
from .outputs import YAML, OutputFiles, output
from .session import SESSION

app = typer.Typer(
    no_args_is_help=True,
    help="Hosts with shaped uplinks on this machine, as network namespaces: real ranks on a real, slow network.",
)
TAIL_LINES = 20
LAUNCHERS = ("torch.distributed.run", "torch.distributed.launch")


@app.command(context_settings={"allow_interspersed_args": False})
def run(
    command: Annotated[list[str], typer.Argument(metavar="-- CMD...", help="What every rank runs.")],
    hosts: Annotated[int, typer.Option(help="How many hosts.")] = 2,
    ranks: Annotated[int, typer.Option(help="Ranks on each host.")] = 4,
    order: Annotated[
        str, typer.Option(metavar="host|interleaved", help="Neighbouring ranks on one host, or dealt out in turn.")
    ] = "host",
    uplink: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[NAME=]RATE[,RATE]",
            help="A channel and its rate per host, each way; may be repeated. Default: eth=1gbit.",
        ),
    ] = None,
    shaper: Annotated[str, typer.Option(metavar="tbf|htb", help="What shapes the uplinks.")] = "tbf",
    tcp: Annotated[
        str, typer.Option(metavar="reno|cubic|bbr|machine", help="TCP's congestion control; machine: its own.")
    ] = TCP_CONTROL,
    env: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="Set for all ranks; may be repeated.")
    ] = None,
    timeout: Annotated[float | None, typer.Option(metavar="SECONDS", help="End the ranks then; exit code 124.")] = None,
    keep_going: Annotated[bool, typer.Option(help="When a rank fails, let the others run on.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print only a failing rank's last lines.")] = False,
    truth: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="FILE.yaml", callback=output(*YAML), help="Write what was built as a cluster."
        ),
    ] = None,
) -> None:
    """Run a command once per rank on emulated hosts; ends with the exit code of the first rank that fails.

    \b
    Each host has its own network, host name and shared memory; a channel is a
    switch that joins all hosts, and an interface of that name in each. Ranks
    get torchrun's environment, so scripts need no change and no torchrun: it
    would be started once per rank. One torchrun on each host (--ranks 1, and
    torchrun --nnodes ...) is fine.

    \b
    Examples:
      stretto lab run --hosts 2 --ranks 4 --uplink 200mbit -- python train.py
      stretto lab run --uplink rdma=400mbit --uplink eth=200mbit -- python a.py
      stretto lab run --order interleaved --uplink eth=50MB/s -- python train.py
      stretto lab run --hosts 3 --ranks 1 --uplink 1gbit,1gbit,100mbit -- ./a
    """
    if timeout is not None and not 0 < timeout < 1e7:
        raise InvalidInput(f"--timeout: must be more than 0 and less than 1e7 seconds, not {timeout:g}")
    refuse_many_launchers(command, hosts, ranks)
    variables = _pairs("--env", env or [])
    uplinks = _uplinks(uplink or [])
    try:
        lab = Lab(hosts=hosts, ranks_per_host=ranks, uplinks=uplinks, order=order, shaper=shaper, tcp=tcp)
    except InvalidInput as error:
        raise InvalidInput(f"--{error}") from None
    if shutil.which(command[0]) is None:
        hint = script_hint(command[0]).partition(", or")[0]
        raise InvalidInput(f"command: {command[0]!r} is not an executable file or a command{hint}")
    quiet = quiet or SESSION.quiet
    with lab:
        rights = "rootless" if lab.rootless else "as root"
        print(f"stretto lab: {lab.layout.summary}, {rights}", file=sys.stderr, flush=True)
        if truth is not None:
            lab.cluster().save(truth)
            wrote(out(), truth)
        done = lab.run(
            command, env=variables, timeout_s=timeout, keep_going=keep_going, on_line=None if quiet else _print_line
        )
    _tell(lab, done, timeout, quiet)
    raise typer.Exit(done.exit_code)


@app.command()
def show(rows: JsonOption = None) -> None:
    """The labs on this machine, with a process of every host for a look inside.

    \b
    Examples:
      stretto lab show
      stretto lab show --json -
      nsenter --target=PID --net ip address
    """
    labs = running()
    files = OutputFiles()
    files.json(rows, {"labs": [
        {"lab": lab.pid, "alive": lab.alive, "about": lab.about, "keepers": lab.keepers, "processes": list(lab.pids)}
        for lab in labs
    ]})  # fmt: skip
    if not labs:
        out().print("no lab runs here")
        files.tell()
        return
    table = ResultTable(">lab", "state", "what", "hosts' processes", ">processes")
    for lab in labs:
        keepers = " ".join(f"{name}={pid}" for name, pid in sorted(lab.keepers.items()) if name != "switch")
        state = "runs" if lab.alive else "dead (stretto lab clean)"
        table.add_row(str(lab.pid), state, lab.about, keepers, str(len(lab.pids)))
    out().print(table)
    files.tell()


@app.command()
def clean(
    everything: Annotated[bool, typer.Option("--all", help="Labs that still run, too.")] = False,
) -> None:
    """End what dead labs have left; labs clean up after themselves, unless their keepers were killed as well.

    \b
    Examples:
      stretto lab clean
      stretto lab clean --all
    """
    found = clean_labs(everything=everything)
    for lab in found:
        print(f"ended {len(lab.pids)} processes of the lab of process {lab.pid} ({lab.about or 'ranks only'})")
    if not found:
        print("nothing to clean")


def refuse_many_launchers(command: list[str], hosts: int, ranks: int) -> None:
    """Refuse a launcher that every rank would start: so many jobs that know nothing of each other.

    Args:
        command: What every rank runs.
        hosts: How many hosts there are.
        ranks: Ranks on each host.

    Raises:
        InvalidInput: The command is torchrun, and there is neither one rank only nor one rank with ``--nnodes`` on
            each host.
    """
    words = [Path(command[0]).name, *command[1:]]
    module = next((words[at + 1] for at in range(len(words) - 1) if words[at] == "-m"), "")
    python = words[0].startswith("python")
    if words[0] != "torchrun" and not (python and module in LAUNCHERS):
        return
    spread = any(word.startswith(("--nnodes", "--nnodes=")) for word in words)
    if hosts * ranks == 1 or (ranks == 1 and spread):
        return
    raise InvalidInput(
        f"lab run starts the command once per rank, so {hosts * ranks} torchruns with a job each: leave torchrun out "
        "('stretto lab run ... -- python train.py'; ranks get its environment), or use --ranks 1 and torchrun --nnodes"
    )


def _pairs(option: str, pairs: list[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise InvalidInput(f"{option} {pair!r}: expected KEY=VALUE")
        if key in found:
            raise InvalidInput(f"{option} {pair!r}: {key} is given twice")
        found[key] = value
    return found


def _uplinks(texts: list[str]) -> dict[str, str] | None:
    """A rate alone is that of the channel ``eth``."""
    return _pairs("--uplink", [text if "=" in text else f"eth={text}" for text in texts]) or None


def _print_line(rank: int, stream: str, line: str) -> None:
    print(f"[{rank}] {line}", file=sys.stdout if stream == "stdout" else sys.stderr, flush=True)


def _tell(lab: Lab, done: LabResult, timeout: float | None, quiet: bool) -> None:
    """Say how the job ended, where it failed."""
    if done.failed is None and not done.timed_out:
        return
    if done.failed is not None:
        if quiet:
            said = done.outputs[done.failed].splitlines() + done.errors[done.failed].splitlines()
            for line in said[-TAIL_LINES:]:
                _print_line(done.failed, "stderr", line)
        how = ending(done.returncodes[done.failed])
        print(f"stretto lab: rank {done.failed} on h{lab.host_of(done.failed)} ended {how}", file=sys.stderr)
    if done.timed_out:
        print(f"stretto lab: time was up after {timeout:g} s", file=sys.stderr)
