"""Algorithms as programs: the IR, the verifier, lowering, the interpreter and the file formats."""

from .ir import Program
from .lowered import Lowered

__all__ = ["Lowered", "Program"]
