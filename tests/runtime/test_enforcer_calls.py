# SPDX-License-Identifier: Apache-2.0
"""Motifs as calls of a library: what is read reaches the library, wherever the result is to lie."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from stretto.runtime.enforcer.calls import run
from stretto.runtime.enforcer.memory import StagedBuffers


class Twins:
    """A communicator whose other rank gives the same, so that a sum is twice this rank's data."""

    def allreduce(self, buffers: list[torch.Tensor], options: Any) -> None:
        buffers[0].mul_(2)

    reduce = allreduce

    def broadcast(self, buffers: list[torch.Tensor], options: Any) -> None:
        pass


@pytest.mark.parametrize(("kind", "times"), [("AR", 2), ("RE", 2), ("BC", 1)])
@pytest.mark.parametrize("apart", [False, True], ids=["in place", "apart"])
def test_a_result_that_lies_elsewhere_is_made_of_what_was_read(kind: str, times: int, apart: bool) -> None:
    # A program that a plan brings along may not work in place: its result is then staged in memory of no value.
    source = torch.arange(6.0)
    target = torch.full((6,), float("nan")) if apart else source
    leaf: Any = SimpleNamespace(kind=kind, ranks=(0, 1), root=0)
    layout: Any = None
    staged = StagedBuffers((source, 1, 5), (target, 1, 5), layout)
    run(Twins(), leaf, 0, staged, "sum", nothing=torch.empty(0), in_place=False)
    assert target[1:5].tolist() == [times * value for value in (1.0, 2.0, 3.0, 4.0)]
    assert not apart or source.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
