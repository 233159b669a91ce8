# SPDX-License-Identifier: Apache-2.0
"""The command ``stretto``: one module per command, one line and exit code 2 for anything wrong."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from .. import __version__
from ..errors import StrettoError
from .commands import LazyGroup
from .common import one_line, say
from .outputs import open_standard_streams, quiet_stdout
from .session import INTERRUPTED, SESSION

WRONG_INPUT = 2
MAX_MESSAGE = 1500

app = typer.Typer(
    name="stretto",
    cls=LazyGroup,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"stretto {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Print only results and errors; here or among a command's options.")
    ] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Print what the library logs, too; here or there.")
    ] = False,
) -> None:
    """A communication compiler for distributed training.

    \b
    Examples:
      stretto demo
      stretto cluster show dgx2:2
      stretto simulate all -c dgx2:2 -b 1K..1G
      stretto synth allgather -c dgx2:2 -b 64M -o ag.xml
      stretto plan -w dlrm:A2 -c hgx2:16 -o plan.json --html plan.html
      stretto run -- torchrun --nproc-per-node 4 train.py
    """
    SESSION.quiet = SESSION.quiet or quiet
    if verbose:
        SESSION.be_verbose()


def main() -> None:
    """The entry point of the command."""
    open_standard_streams()
    quiet_stdout()
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code; wrong input is one line on stderr."""
    SESSION.begin()
    try:
        code = app(args=list(arguments), prog_name="stretto", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except StrettoError as error:
        return _fail(str(error))
    except typer.TyperException as error:
        # Saying nothing at all asks for help, which has been printed by now.
        message = error.format_message()
        return (
            _fail(f"{message.rstrip('.')}{'' if message[-1] == '?' else ';'} see '{_command(error)} --help'")
            if message
            else 0
        )
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
