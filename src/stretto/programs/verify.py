"""The verifier: every postcondition holds exactly once, no race, no deadlock with bounded FIFOs.

Programs and lowered programs are both turned into events on memory locations and checked by the same
native kernel (`native/check.cpp`).
"""

from __future__ import annotations

from dataclasses import dataclass

from .ir import Program
from .lowered import Lowered


@dataclass(frozen=True, kw_only=True)
class Report:
    """What was proved."""

    subject: str
    fifo_depth: int
    """The least FIFO depth (1 or 2) at which it cannot deadlock."""
    warnings: tuple[str, ...] = ()


def verify(program: Program) -> Report:
    """Prove a program right, or raise `VerificationError` naming rank, chunk and transfer."""
    raise AssertionError("being written")


def verify_lowered(lowered: Lowered) -> Report:
    """Prove instruction streams right, or raise `VerificationError` naming rank, threadblock and step."""
    raise AssertionError("being written")
