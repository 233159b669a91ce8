# SPDX-License-Identifier: Apache-2.0
"""Stages between hosts of a program on GPUs, on the executor. Loads no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...programs.ir import Program
from ..executor.executor import Executor, LoadedProgram
from ..gpu.hosts_proxy import ProgressBoard

if TYPE_CHECKING:
    from ... import _executor


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

    def carrier(self, board: ProgressBoard, released: int, copied: int) -> _executor.Carrier:
        """The thread that runs legs once the GPU has copied what they need.

        Args:
            board: How far the ranks of this host are.
            released: The address of the word up to which the GPU may go on.
            copied: The address of the word up to which it has copied.

        Returns:
            The thread.
        """
        return self._executor.carrier(released, copied, board.address, board.me, board.size)

    def arguments(
        self, loaded: LoadedProgram, input: int, output: int, count: int, dtype: str, op: str
    ) -> tuple[_executor.Loaded, int, int, int, int, int]:
        """What the carrier takes; the same in the same order on all ranks.

        Args:
            loaded: What `load` made.
            input: The address of what this rank gives, in pinned memory.
            output: The address of what it takes.
            count: The elements of the larger buffer of any rank.
            dtype: Their type.
            op: The reduction.

        Returns:
            The program, both addresses, and numbers for the rest.
        """
        return self._executor.arguments(loaded, input, output, count, dtype, op)
