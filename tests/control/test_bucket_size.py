# SPDX-License-Identifier: Apache-2.0
"""STRETTO_BUCKET_MB: buckets of scripts that ask for no size."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch.nn.parallel import DistributedDataParallel

from stretto.control.bucket_size import set_bucket_size
from stretto.errors import InvalidInput

MIB = 1 << 20


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=c10d.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_only_models_without_a_size_get_it(one_rank: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRETTO_BUCKET_MB", "1.5")
    usual = DistributedDataParallel.__init__
    undo = set_bucket_size()
    assert undo is not None
    layer = torch.nn.Linear(2, 2)
    sizes = [
        DistributedDataParallel(layer).bucket_bytes_cap,
        DistributedDataParallel(layer, bucket_cap_mb=3).bucket_bytes_cap,
        DistributedDataParallel(layer, None, None, 0, find_unused_parameters=True).bucket_bytes_cap,
    ]
    undo()
    assert sizes == [1.5 * MIB, 3 * MIB, 1.5 * MIB]
    assert DistributedDataParallel.__init__ is usual
    assert DistributedDataParallel(layer).bucket_bytes_cap == 25 * MIB


@pytest.mark.parametrize("said", ["0", "-1", "many", "inf", "nan"])
def test_what_is_no_size_is_refused(said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRETTO_BUCKET_MB", said)
    with pytest.raises(InvalidInput, match="STRETTO_BUCKET_MB: must be a number of MiB > 0 or auto"):
        set_bucket_size()
    monkeypatch.setenv("STRETTO_BUCKET_MB", "")
    assert set_bucket_size() is None


def test_all_ranks_take_what_rank_0_was_told(one_rank: None, monkeypatch: pytest.MonkeyPatch) -> None:
    store = c10d.HashStore()
    layer = torch.nn.Linear(2, 2)
    for rank, said in enumerate(("2", "", "5")):
        # Hosts may differ in their environment; a bucket that one rank alone has would never be summed.
        monkeypatch.setenv("STRETTO_BUCKET_MB", said)
        undo = set_bucket_size(store, rank)
        assert undo is not None
        assert DistributedDataParallel(layer).bucket_bytes_cap == 2 * MIB
        undo()
    monkeypatch.setenv("STRETTO_BUCKET_MB", "auto")
    assert set_bucket_size(c10d.HashStore(), 0) is None
