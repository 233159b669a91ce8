# SPDX-License-Identifier: Apache-2.0
"""Whoever takes the future of a work in a backward pass is made to wait where that ends."""

from __future__ import annotations

from typing import Any

import torch

from stretto.runtime.enforcer import futures


class _Work:
    def __init__(self, seen: list[str], error: Exception | None = None) -> None:
        self.seen, self.error = seen, error

    def wait(self) -> bool:
        self.seen.append("waited")
        if self.error is not None:
            raise self.error
        return True


def _backward(*works: _Work, seen: list[str]) -> None:
    x = torch.ones(2, requires_grad=True)
    y: Any = x * 2

    def taking(grad: torch.Tensor) -> torch.Tensor:
        for work in works:
            futures.taken(work)
        # As DDP does: its own callback comes later than the first bucket's.
        torch.autograd.Variable._execution_engine.queue_callback(lambda: seen.append("ddp"))
        seen.append("submitted")
        return grad

    y.register_hook(taking)
    y.sum().backward()


def test_all_are_waited_for_before_those_who_queue_later() -> None:
    seen: list[str] = []
    _backward(_Work(seen), _Work(seen), seen=seen)
    _backward(_Work(seen), seen=seen)
    assert seen == ["submitted", "waited", "waited", "ddp", "submitted", "waited", "ddp"]


def test_an_error_is_left_to_the_future() -> None:
    seen: list[str] = []
    _backward(_Work(seen, RuntimeError("lost")), _Work(seen), seen=seen)
    assert seen == ["submitted", "waited", "waited", "ddp"]


def test_outside_of_a_backward_pass_nobody_waits() -> None:
    seen: list[str] = []
    futures.taken(_Work(seen))
    _backward(seen=seen)
    assert seen == ["submitted", "ddp"]
