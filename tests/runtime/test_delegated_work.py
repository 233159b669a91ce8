# SPDX-License-Identifier: Apache-2.0
"""Waiting for what the wrapped backend runs: once below, as often as anybody likes above."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch

from stretto.runtime.torch_backend.work import NO_TIMEOUT, DelegatedWork


class Below:
    """A message of gloo's: whoever waits for it a second time waits forever, here with an error."""

    def __init__(self, wrong: str = "", ends: bool = True) -> None:
        self.waits = 0
        self.wrong, self.ends = wrong, ends

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        self.waits += 1
        if self.wrong:
            raise RuntimeError(self.wrong)
        assert self.waits == 1, "this would hang"
        return True

    def is_completed(self) -> bool:
        return self.ends

    def _source_rank(self) -> int:
        return 3


def work(below: Below, *, message: bool = True) -> DelegatedWork:
    inner: Any = below
    return DelegatedWork(inner, [torch.zeros(1)], lambda error: error, message=message)


def test_a_second_waiter_that_comes_before_the_first_has_tidied_up_does_not_wait_again() -> None:
    below = Below()
    one = work(below)
    assert one._block(NO_TIMEOUT) and one._block(NO_TIMEOUT) and one.wait() and one.wait()
    assert below.waits == 1
    assert one.source_rank() == 3


def test_both_waiters_get_the_error() -> None:
    below = Below(wrong="Connection closed by peer")
    one = work(below)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="Connection closed"):
            one._block(NO_TIMEOUT)
    assert below.waits == 1


def test_a_collective_that_takes_too_long_can_be_waited_for_again_and_a_message_cannot() -> None:
    below = Below(wrong="Operation timed out!", ends=False)
    collective = work(below, message=False)
    with pytest.raises(TimeoutError):
        collective.wait(timedelta(seconds=0.01))
    below.wrong = ""
    below.waits = 0
    assert collective.wait()
    message = work(Below(wrong="Timed out waiting 10ms", ends=False))
    for _ in range(2):
        with pytest.raises(TimeoutError, match="gloo has given it up"):
            message.wait(timedelta(seconds=0.01))
