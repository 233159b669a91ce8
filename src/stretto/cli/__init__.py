"""The command ``stretto``: one module per subcommand, one line and exit code 2 for anything wrong."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from .. import __version__
from ..errors import StrettoError
from .algorithms import algorithms
from .bench import bench
from .bound import bound
from .cluster import app as cluster_app
from .collective import app as collective_app
from .common import one_line, say
from .controller import controller
from .demo import demo
from .dims import app as dims_app
from .lab import app as lab_app
from .motif import app as motif_app
from .outputs import open_standard_streams, quiet_stdout
from .pipeline import app as pipeline_app
from .plan import app as plan_app
from .probe import probe
from .program import app as program_app
from .reshard import reshard
from .run import run as run_job
from .simulate import simulate
from .status import status
from .strategy import app as strategy_app
from .synth import synth
from .tune import tune
from .workload import app as workload_app

WRONG_INPUT = 2
INTERRUPTED = 130
MAX_MESSAGE = 1500

app = typer.Typer(
    name="stretto",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(demo)
app.command()(simulate)
app.command()(bound)
app.command()(synth)
app.command()(reshard)
app.command()(algorithms)
app.command()(probe)
app.command()(bench)
app.command("run", context_settings={"allow_interspersed_args": False})(run_job)
app.command(context_settings={"allow_interspersed_args": False})(tune)
app.command()(controller)
app.command()(status)
app.add_typer(cluster_app, name="cluster")
app.add_typer(collective_app, name="collective")
app.add_typer(lab_app, name="lab")
app.add_typer(dims_app, name="dims")
app.add_typer(motif_app, name="motif")
app.add_typer(pipeline_app, name="pipeline")
app.add_typer(program_app, name="program")
app.add_typer(plan_app, name="plan")
app.add_typer(strategy_app, name="strategy")
app.add_typer(workload_app, name="workload")


def _version(wanted: bool) -> None:
    if wanted:
        print(f"stretto {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """A communication compiler for distributed training.

    \b
    Examples:
      stretto demo
      stretto cluster show dgx2:2
      stretto simulate all --cluster dgx2:2 --bytes 1K..1G
      stretto synth allgather --cluster dgx2:2 --bytes 64M -o ag.xml
      stretto program verify FILE
      stretto workload show dlrm:A2
    """


def main() -> None:
    """The entry point of the command."""
    open_standard_streams()
    quiet_stdout()
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code; wrong input is one line on stderr."""
    try:
        code = app(args=list(arguments), prog_name="stretto", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except StrettoError as error:
        return _fail(str(error))
    except typer.TyperException as error:
        # Saying nothing at all asks for help, which has been printed by now.
        message = error.format_message()
        return _fail(f"{message.rstrip('.')}; see '{_command(error)} --help'") if message else 0
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except MemoryError:
        return _fail("not enough memory for this; try fewer ranks or chunks")
    except OSError as error:
        return _fail(f"{error.filename}: {error.strerror}" if error.filename else str(error))


def _command(error: typer.TyperException) -> str:
    context = getattr(error, "ctx", None)
    return context.command_path if context is not None else "stretto"


def _fail(message: str) -> int:
    """One line; what a file smuggled into the message neither floods the terminal nor commands it."""
    line = one_line(" ".join(message.split()))
    if len(line) > MAX_MESSAGE:
        line = f"{line[: MAX_MESSAGE // 2]} ... {line[-MAX_MESSAGE // 2 :]}"
    # Where standard error is full, the exit code still says it.
    with contextlib.suppress(OSError):
        say(f"stretto: error: {line}", error=True)
    return WRONG_INPUT
