# SPDX-License-Identifier: Apache-2.0
"""Small timelines made by hand, so that what is written can be checked by eye."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from stretto.simulator import Timeline


def _make(spans: list[tuple[int, int, int, float, float, float]], total_us: float, **rest: object) -> Timeline:
    """Spans as (rank, stream, name, start_us, end_us, nbytes)."""
    table = np.array(spans, np.float64).reshape(-1, 6)
    defaults: dict[str, object] = {"streams": ("nvlink", "rdma"), "names": ("copy", "reduce")}
    return Timeline(
        total_us=total_us,
        rank=table[:, 0].astype(np.int32),
        stream=table[:, 1].astype(np.int32),
        name=table[:, 2].astype(np.int32),
        start_us=table[:, 3].copy(),
        end_us=table[:, 4].copy(),
        nbytes=table[:, 5].copy(),
        **(defaults | rest),  # type: ignore[arg-type]
    )


@pytest.fixture
def timeline() -> Timeline:
    """Two ranks; on rank 0 two transfers overlap on nvlink."""
    return _make(
        [
            (0, 0, 0, 0.0, 2.0, 4000.0),
            (0, 0, 1, 1.0, 3.0, 4000.0),
            (0, 0, 0, 2.0, 4.0, 4000.0),
            (1, 0, 0, 0.5, 1.25, 1000.0),
            (1, 1, 1, 3.0, 5.0, 9000.0),
        ],
        5.0,
        link_names=("gpu0>gpu1", "gpu1>gpu0"),
        link_busy_us=np.array([4.0, 2.75]),
        link_bytes=np.array([12000.0, 10000.0]),
        critical_path=np.array([0, 2, 4], np.int32),
        facts=(("program", "ring"), ("cluster", "pair")),
    )


def _random(spans: int, ranks: int, seed: int = 0) -> Timeline:
    """Spans that overlap at random."""
    rng = np.random.default_rng(seed)
    start = rng.uniform(0, 1000, spans)
    return Timeline(
        total_us=1100.0,
        rank=rng.integers(0, ranks, spans).astype(np.int32),
        stream=rng.integers(0, 2, spans).astype(np.int32),
        name=rng.integers(0, 3, spans).astype(np.int32),
        start_us=start,
        end_us=start + rng.exponential(20, spans).clip(0, 100),
        nbytes=rng.integers(1, 1 << 20, spans).astype(np.float64),
        streams=("nvlink", "rdma"),
        names=("copy", "reduce", "send"),
    )


@pytest.fixture
def make_timeline() -> Callable[..., Timeline]:
    """Builds a timeline from rows."""
    return _make


@pytest.fixture
def random_timeline() -> Callable[..., Timeline]:
    """Builds a timeline of ``(spans, ranks)``."""
    return _random
