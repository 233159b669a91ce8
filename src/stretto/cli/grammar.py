# SPDX-License-Identifier: Apache-2.0
"""The grammar that all commands share: quiet and verbose anywhere, old names of options, errors that name options."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from typing import Any

import typer
import typer.rich_utils
from typer.core import TyperCommand, TyperGroup

from ..errors import InvalidInput
from .common import say
from .old_names import OLD_FLAGS, OLD_NAMES, OUTPUT_ARGUMENTS
from .session import SESSION

QUIET = ("-q", "--quiet")
VERBOSE = ("-v", "--verbose")
OUTPUT = ("-o", "--output")
UNITS = ("_s", "_us", "_bytes", "_gb_per_s")
"""Endings of parameters of the library that the names of options do not have."""


class _Grammar:
    """What commands and groups of commands do before and after what Typer does."""

    params: list[Any]

    def get_params(self, ctx: Any) -> list[Any]:
        """All parameters; flags take no value, so the help shows no type of theirs."""
        found: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for param in found:
            if getattr(param, "is_flag", False) and param.metavar is None:
                param.metavar = ""
        return found

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        """Read the arguments, after `understood`; an error knows its command, and what comes after ``--``."""
        try:
            return super().parse_args(ctx, understood(ctx, self.params, args))  # type: ignore[misc]
        except typer.TyperException as error:
            if getattr(error, "ctx", None) is None:
                error.ctx = ctx  # type: ignore[attr-defined]
            if (
                not getattr(error, "possibilities", True)
                and ctx.info_name != "stretto"
                and not ctx.allow_interspersed_args
            ):
                error.message += "; what starts the job comes after --"
            raise

    def invoke(self, ctx: Any) -> Any:
        """Run the command; an error about a parameter names the option that the user typed."""
        try:
            return super().invoke(ctx)  # type: ignore[misc]
        except InvalidInput as error:
            raise InvalidInput(named_by_option(str(error), ctx)) from error

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the help, plain where NO_COLOR asks for it."""
        # Rich leaves out colors by itself, but not bold and dim.
        if os.environ.get("NO_COLOR"):
            typer.rich_utils.COLOR_SYSTEM = None
        super().format_help(ctx, formatter)  # type: ignore[misc]


class StrettoCommand(_Grammar, TyperCommand):
    """A command in the grammar of all commands."""


class CommandGroup(_Grammar, TyperGroup):
    """A group of commands in the grammar of all commands."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command that the first word names; where the group itself takes inputs, an error says how."""
        try:
            return super().resolve_command(ctx, args)
        except typer.TyperException as error:
            if any("--workload" in param.opts for param in self.params) and "Did you mean" not in str(error.message):
                error.message = f"{error.message.rstrip('.')} (a workload comes after -w, a cluster after -c)"
            raise


def understood(ctx: typer.Context, params: Sequence[Any], args: Iterable[str]) -> list[str]:
    """Arguments of a command as its parameters know them.

    ``-q`` and ``-v`` are taken out and obeyed; old names of options become the new ones, with a warning. What belongs
    to another program (after ``--``, or after the first word of a command that starts one) is left alone.

    Args:
        ctx: The command's context.
        params: The command's parameters.
        args: What the user typed after the command's name.

    Returns:
        The arguments for the parser.
    """
    command = ctx.command_path.partition(" ")[2]
    own = {name: param for param in params for name in (*param.opts, *param.secondary_opts)}
    left, found, last = list(args), [], []
    while left:
        word = left.pop(0)
        if word == "--" or not word.startswith("-") or word == "-":
            found.append(word)
            if word == "--" or not ctx.allow_interspersed_args:
                break
        elif word in (*QUIET, *VERBOSE) and word not in own:
            _obey(word)
        elif word in OUTPUT and command in OUTPUT_ARGUMENTS and left:
            last = [left.pop(0)]
        else:
            name, equals, value = word.partition("=")
            name = _new_name(command, name)
            found.append(f"{name}{equals}{value}")
            if not equals and name in own and not getattr(own[name], "is_flag", False):
                found += _value_of(command, name, left)
    return found + left + last


def _obey(word: str) -> None:
    if word in QUIET:
        SESSION.quiet = True
    else:
        SESSION.be_verbose()


def _new_name(command: str, name: str) -> str:
    new = OLD_NAMES.get(command, {}).get(name)
    if new is None:
        return name
    say(f"stretto: warning: {name} is now {new}; the old name goes with the next release", error=True)
    return new


def _value_of(command: str, name: str, left: list[str]) -> list[str]:
    """The next argument, as the value of an option; for one that used to be a flag, its value if it has none."""
    if name in OLD_FLAGS.get(command, {}) and (not left or (left[0].startswith("-") and left[0] != "-")):
        value = OLD_FLAGS[command][name]
        say(f"stretto: warning: {name} is now {name} {value} (or a file)", error=True)
        return [value]
    return [left.pop(0)] if left else []


def named_by_option(message: str, ctx: typer.Context) -> str:
    """A message about a parameter of the library (``budget_s: ...``) with the name of the option that set it.

    Args:
        message: What the library says.
        ctx: The context of the command.

    Returns:
        The message with the option's name, if the user gave such an option; else the message as it is.
    """
    match = re.match(r"([a-z][a-z0-9_]*)( '[^']*')?: ", message)
    if match is None:
        return message
    names = {match[1], *(match[1].removesuffix(unit) for unit in UNITS)}
    for param in ctx.command.params:
        if str(getattr(ctx.get_parameter_source(param.name or ""), "name", "")) != "COMMANDLINE":
            continue
        option = max(param.opts, key=len)
        if option.startswith("--") and option[2:].replace("-", "_") in names:
            return f"{option}{match[2] or ''}: {message[match.end() :]}"
    return message
