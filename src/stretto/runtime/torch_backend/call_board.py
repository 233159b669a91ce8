# SPDX-License-Identifier: Apache-2.0
"""What the ranks of a group on one host say about their GPU calls, in a page of memory that they share.

A kernel that waits for another rank knows nothing of what that rank runs. So every rank writes down, before it launches
a call, what the call is; whoever comes later compares. A rank that gives up writes down why, and the others read it.
Loads no torch.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

NUMBER_BYTES = 8
RECORD_BYTES = 128
RECORDS = 1024
"""Calls of one rank that are kept; the GPU's own queue of launches is not longer."""
TEXT_BYTES = 1024
RANK_BYTES = TEXT_BYTES + (RECORDS + 1) * RECORD_BYTES
"""A rank's bytes on the board: why it has given up, its calls, and at the very end whether it has left."""
SHARED = Path("/dev/shm")


class CallBoard:
    """The calls of all ranks of one group, by number from 1 on, and why a rank has given up."""

    def __init__(self, path: str, rank: int, size: int, names: Sequence[int] = ()) -> None:
        """Open a file that `make_board_file` has made; raises `OSError`. `names` are the ranks where not 0..size-1."""
        self.rank, self.size, self.kept = rank, size, RECORDS
        self._names = list(names) or list(range(size))
        with Path(path).open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), RANK_BYTES * size)

    def post(self, number: int, text: str) -> None:
        """Say what this rank's call of this number is."""
        at = self._at(self.rank, number)
        words = text.encode(errors="replace")[: RECORD_BYTES - NUMBER_BYTES]
        # The number last: a reader that finds it finds the words, too (stores stay in order on x86 and in a lock).
        self._memory[at : at + NUMBER_BYTES] = bytes(NUMBER_BYTES)
        self._memory[at + NUMBER_BYTES : at + RECORD_BYTES] = words.ljust(RECORD_BYTES - NUMBER_BYTES, b"\0")
        self._memory[at : at + NUMBER_BYTES] = number.to_bytes(NUMBER_BYTES, "little")

    def call_of(self, rank: int, number: int) -> str | None:
        """What a rank's call of this number is; None where it has not come to it, or is far beyond it."""
        at = self._at(rank, number)
        if int.from_bytes(self._memory[at : at + NUMBER_BYTES], "little") != number:
            return None
        words = self._memory[at + NUMBER_BYTES : at + RECORD_BYTES]
        if int.from_bytes(self._memory[at : at + NUMBER_BYTES], "little") != number:
            return None
        return words.rstrip(b"\0").decode(errors="replace")

    def mismatch(self, number: int) -> str:
        """Which two ranks run different calls of this number, as far as is known; empty where none do."""
        mine = self.call_of(self.rank, number)
        if mine is None:
            return ""
        at = self._at(self.rank, number)
        record = self._memory[at : at + RECORD_BYTES]
        for rank in range(self.size):
            at = self._at(rank, number)
            if self._memory[at : at + RECORD_BYTES] == record:
                continue
            theirs = self.call_of(rank, number)
            if theirs is not None and theirs != mine:
                (one, first), (two, second) = sorted([(self._names[self.rank], mine), (self._names[rank], theirs)])
                return f"call {number} on GPUs: rank {one} runs {first}, rank {two} runs {second}"
        return ""

    def missing(self, number: int) -> list[int]:
        """The ranks that have not come to the call of this number."""
        return [self._names[rank] for rank in range(self.size) if self.call_of(rank, number) is None]

    def give_up(self, kind: str, why: str) -> None:
        """Say that this rank will not go on, and why; the first reason stays."""
        at = self.rank * RANK_BYTES
        if self._memory[at + NUMBER_BYTES]:
            return
        words = f"{kind}\n{why}".encode(errors="replace")[: TEXT_BYTES - NUMBER_BYTES - 1]
        self._memory[at + NUMBER_BYTES : at + NUMBER_BYTES + len(words)] = words
        self._memory[at : at + NUMBER_BYTES] = len(words).to_bytes(NUMBER_BYTES, "little")

    def given_up(self) -> tuple[str, str] | None:
        """The kind of error and the reason of the first rank, by number, that has given up."""
        for rank in range(self.size):
            at = rank * RANK_BYTES
            length = int.from_bytes(self._memory[at : at + NUMBER_BYTES], "little")
            if 0 < length < TEXT_BYTES:
                words = self._memory[at + NUMBER_BYTES : at + NUMBER_BYTES + length].decode(errors="replace")
                kind, _, why = words.partition("\n")
                return kind, why
        return None

    def leave(self) -> None:
        """Say that this rank has made its last call, and that the GPU is done with all of them."""
        self._memory[(self.rank + 1) * RANK_BYTES - 1] = 1

    def has_left(self, rank: int) -> bool:
        """Whether a rank has said that it is done."""
        return rank in self._names and self._memory[(self._names.index(rank) + 1) * RANK_BYTES - 1] == 1

    def close(self) -> None:
        """Let go of the memory."""
        self._memory.close()

    def _at(self, rank: int, number: int) -> int:
        return rank * RANK_BYTES + TEXT_BYTES + number % RECORDS * RECORD_BYTES


def make_board_file(size: int) -> str:
    """A new file for a board of so many ranks; who makes it removes it once all ranks have opened it."""
    handle, path = tempfile.mkstemp(prefix="stretto-gpu-", dir=SHARED if SHARED.is_dir() else None)
    try:
        os.ftruncate(handle, RANK_BYTES * size)
    finally:
        os.close(handle)
    return path
