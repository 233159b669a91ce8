# SPDX-License-Identifier: Apache-2.0
"""Advice on a training step: how much of it waits for communication, and what each change would gain."""

from .advice import AdvisedChange, BackendTrial, InputKnowledge, StepAdvice
from .api import advise

__all__ = ["StepAdvice", "AdvisedChange", "BackendTrial", "InputKnowledge", "advise"]
