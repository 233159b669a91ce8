# SPDX-License-Identifier: Apache-2.0
"""Send/receive and uneven all-to-all in place: what comes in takes the room of what went out."""

from __future__ import annotations

import numpy as np
import pytest

from stretto import Program, algorithm
from stretto.programs.formats import text
from stretto.programs.interpret import check


def prove(program: Program) -> None:
    program.verify()
    lowered = program.lower()
    for depth in range(lowered.verify().fifo_depth, 3):
        check(lowered, fifo_depth=depth)
    assert text.loads(text.dumps(program)) == program


@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("n", [2, 3, 5])
def test_permutations(n: int, chunks: int) -> None:
    for pairs in ([(r, (r + 1) % n) for r in range(n)], [(0, 1)], [(0, 1), (1, 0)]):
        prove(algorithm("direct", "permute", n, pairs=pairs, chunks=chunks, in_place=True))


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("n", [2, 4, 5])
def test_symmetric_counts(n: int, chunks: int) -> None:
    half = np.random.default_rng(n).integers(0, 4, (n, n))
    counts = (half + half.T).tolist()
    prove(algorithm("direct", "all_to_all_v", n, counts=counts, chunks=chunks, in_place=True))
