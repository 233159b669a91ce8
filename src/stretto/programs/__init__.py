"""Algorithms as programs: the IR, the verifier, lowering, the interpreter and the file formats."""

from .ir import Program
from .lowered import Lowered
from .symmetry import SymmetricProgram
from .verify import VerificationReport

__all__ = ["Lowered", "Program", "VerificationReport", "SymmetricProgram"]
