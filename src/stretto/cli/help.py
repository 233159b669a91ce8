# SPDX-License-Identifier: Apache-2.0
"""``stretto help``: the help of a command."""

from __future__ import annotations

from typing import Annotated

import typer


def help(
    context: typer.Context,
    words: Annotated[list[str] | None, typer.Argument(metavar="[COMMAND...]", help="Default: all commands.")] = None,
) -> None:
    """Print the help of a command, as its --help does.

    \b
    Examples:
      stretto help
      stretto help simulate
      stretto help plan show
    """
    whole = context.find_root().command
    whole.main(args=[*(words or []), "--help"], prog_name="stretto", standalone_mode=False)
