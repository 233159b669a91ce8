# SPDX-License-Identifier: Apache-2.0
"""The commands of ``stretto``, each loaded when it is first used."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import typer
import typer.main
from typer.core import TyperCommand

from .grammar import CommandGroup, StrettoCommand

BEGIN, LOOK, PLAN = "Begin", "Look", "Synthesize and plan"
RUN, TOOLS = "Run and measure", "Files and tools"


@dataclass(frozen=True, kw_only=True)
class CommandEntry:
    """A command or a group of commands: the module of this package that holds it, and its line in the list."""

    name: str
    panel: str
    about: str
    starts_job: bool = False
    """Whether the command starts another program, to which all options after its name belong."""
    module: str = ""
    """The module, where it is not called as the command."""

    def load(self) -> Any:
        """Import the module and make the command: its ``app``, or its function called as the command."""
        module = import_module(f".{self.module or self.name}", __package__)
        parent = typer.Typer(rich_markup_mode="rich", pretty_exceptions_enable=False)
        group = getattr(module, "app", None)
        if group is None:
            settings = {"allow_interspersed_args": False} if self.starts_job else None
            parent.command(self.name, cls=StrettoCommand, rich_help_panel=self.panel, context_settings=settings)(
                getattr(module, self.name)
            )
        else:
            for info in group.registered_commands:
                info.cls = StrettoCommand
            parent.add_typer(group, name=self.name, cls=CommandGroup, rich_help_panel=self.panel)
        return typer.main.get_group(parent).commands[self.name]

    def stub(self) -> TyperCommand:
        """A command that can be listed, but not run."""
        return TyperCommand(self.name, short_help=self.about, rich_help_panel=self.panel)


ENTRIES = (
    CommandEntry(name="demo", panel=BEGIN, about="The whole path once, in some seconds; leaves pictures and files."),
    CommandEntry(name="advise", panel=BEGIN, about="What a job would gain, and how: from a trace, or from the job."),
    CommandEntry(name="doctor", panel=BEGIN, about="What works on this machine, and what to do about the rest."),
    CommandEntry(name="selftest", panel=BEGIN, about="Every algorithm on your GPUs, checked, beside NCCL."),
    CommandEntry(name="help", panel=BEGIN, about="The help of a command."),
    CommandEntry(name="cluster", panel=LOOK, about="Hardware: list presets, draw, check and convert."),
    CommandEntry(name="workload", panel=LOOK, about="Training steps: list models, show, convert."),
    CommandEntry(name="collective", panel=LOOK, about="What a collective starts from and must achieve."),
    CommandEntry(name="algorithms", panel=LOOK, about="The algorithm library."),
    CommandEntry(name="simulate", panel=LOOK, about="How long a collective takes, and how far that is from the bound."),
    CommandEntry(name="bound", panel=LOOK, about="The least time that any algorithm could take, and why."),
    CommandEntry(name="plan", panel=PLAN, about="Decide how a training step communicates; show and compare plans."),
    CommandEntry(name="synth", panel=PLAN, about="Search the fastest program for a collective on a cluster."),
    CommandEntry(name="reshard", panel=PLAN, about="Bring a tensor from one device mesh and layout to another."),
    CommandEntry(name="weights", panel=PLAN, about="Weights of a model from trainers to servers: plan, explain."),
    CommandEntry(name="dims", panel=PLAN, about="Networks with several dimensions: schedule, compare, advise."),
    CommandEntry(name="pipeline", panel=PLAN, about="Pipeline schedules: draw, time, search, write for PyTorch."),
    CommandEntry(name="strategy", panel=PLAN, about="How each variable of a model is synchronised."),
    # The package has a function called run, which a module of that name would replace.
    CommandEntry(
        name="run",
        panel=RUN,
        about="A training job, unchanged: recorded, planned, faster.",
        starts_job=True,
        module="run_job",
    ),
    CommandEntry(name="tune", panel=RUN, about="Find a script's fastest strategy by running it.", starts_job=True),
    CommandEntry(name="probe", panel=RUN, about="Measure the network of a job and write it as a cluster."),
    CommandEntry(name="bench", panel=RUN, about="Measure what motifs cost on a job's ranks, for the planner."),
    CommandEntry(name="controller", panel=RUN, about="A controller for several jobs."),
    CommandEntry(name="status", panel=RUN, about="What a controller knows of its jobs."),
    CommandEntry(name="lab", panel=TOOLS, about="Hosts with slow uplinks on this machine, for real ranks."),
    CommandEntry(name="program", panel=TOOLS, about="Program files: prove, show, convert, run."),
    CommandEntry(name="runtime", panel=TOOLS, about="What the instructions of a runtime cost: list, show, fit."),
    CommandEntry(name="motif", panel=TOOLS, about="Rewrite collectives into motifs, each rewriting proved."),
)
"""In the order of the list that ``stretto --help`` prints."""


class LazyCommands(MutableMapping[str, Any]):
    """All commands by name; one is loaded when it is looked up."""

    def __init__(self) -> None:
        self._entries = {entry.name: entry for entry in ENTRIES}
        self._loaded: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._loaded:
            self._loaded[name] = self._entries[name].load()
        return self._loaded[name]

    def __setitem__(self, name: str, command: Any) -> None:
        self._loaded[name] = command

    def __delitem__(self, name: str) -> None:
        del self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


class LazyGroup(CommandGroup):
    """The group of all commands."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings | {"commands": None})
        self.commands = LazyCommands()

    def list_commands(self, ctx: Any) -> list[str]:
        """The names in order, without loading anything."""
        return list(self.commands)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the help without loading anything."""
        with self._listed():
            super().format_help(ctx, formatter)

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        """Complete a command's name without loading anything."""
        with self._listed():
            return super().shell_complete(ctx, incomplete)

    @contextmanager
    def _listed(self) -> Iterator[None]:
        commands, self.commands = self.commands, {entry.name: entry.stub() for entry in ENTRIES}
        try:
            yield
        finally:
            self.commands = commands
