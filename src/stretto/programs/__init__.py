# SPDX-License-Identifier: Apache-2.0
"""Algorithms as programs: the IR, the verifier, lowering, the interpreter and the file formats."""

from .ir import LOWER, VERIFY, Program
from .lowered import VERIFY_LOWERED, Lowered
from .symmetry import SymmetricProgram
from .verify import VerificationReport, verify_lowered
from .verify import verify as _verify

__all__ = ["Lowered", "Program", "SymmetricProgram", "VerificationReport", "formats", "interpret"]

VERIFY.supply(_verify)
LOWER.supply_from(f"{__name__}.lower", "lower")
VERIFY_LOWERED.supply(verify_lowered)
