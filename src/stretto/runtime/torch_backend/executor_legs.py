# SPDX-License-Identifier: Apache-2.0
"""Stages between hosts of a program on GPUs, on the executor. Loads no torch."""

from __future__ import annotations

from collections.abc import Sequence

from ...programs.ir import Program
from ..executor.executor import Executor, LoadedProgram, ProgramWork


class ExecutorLegs:
    """Legs between hosts on the executor, under a communicator that nothing else uses."""

    def __init__(self, executor: Executor, ranks: Sequence[int], communicator: int) -> None:
        """`ranks` are the group's ranks in the executor's job."""
        self._executor, self._ranks, self._communicator = executor, tuple(ranks), communicator
        self._loaded: dict[int, tuple[LoadedProgram, Program]] = {}

    def load(self, program: Program) -> LoadedProgram:
        """Verify and lower a program, once."""
        if id(program) not in self._loaded:
            loaded = self._executor.load(program, ranks=self._ranks, communicator=self._communicator)
            self._loaded[id(program)] = loaded, program
        return self._loaded[id(program)][0]

    def start(
        self, loaded: LoadedProgram, input: int, output: int, count: int, dtype: str, op: str, *, timeout_s: float
    ) -> ProgramWork:
        """Begin to run it on pinned memory; the same works in the same order on all ranks.

        Args:
            loaded: What `load` made.
            input: The address of what this rank gives.
            output: The address of what it takes.
            count: The elements of the larger buffer of any rank.
            dtype: Their type.
            op: The reduction.
            timeout_s: How long it may take.

        Returns:
            The work under way.
        """
        return self._executor.start(loaded, input, output, count, dtype, op, timeout_s=timeout_s)
