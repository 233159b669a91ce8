# SPDX-License-Identifier: Apache-2.0
"""The part of the job's store that is ours, for this start of the job alone. Loads no torch."""

from __future__ import annotations

import os
from typing import Any

from ...process_state import STATE


def job_start() -> str:
    """The number of times that torchrun has started the ranks again, as text."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")


def job_store(name: str, *, apart: bool = False) -> Any:
    """A `c10d.PrefixStore` of the default process group's store, with keys that no earlier start of the job has set.

    torchrun starts failed ranks again on the store that they had. That store still has what the start before wrote:
    addresses of processes that are gone, and votes. All ranks call this function equally often for each name.

    With `apart` the store has a connection of its own, which threads beside the application's need: a thread that waits
    for a key blocks the connection for all others. Suppose that the agent of rank 0 waits for the address of rank 1,
    and the application of rank 1 waits in the store for the address of rank 0: on shared connections both wait for
    ever.
    """
    number = STATE.number(("job store", name))
    return start_store(f"{name}/{number}", apart=apart)


def start_store(name: str, *, apart: bool = False) -> Any:
    """The job's store under `name`, for calls that only some ranks make; these ranks number the name themselves."""
    import torch.distributed as dist
    from torch._C import _distributed_c10d as c10d

    store: Any = dist.distributed_c10d._get_default_store()
    # Only some versions of PyTorch and kinds of store can be cloned, which makes another connection.
    alone = apart and hasattr(store, "clone")
    return c10d.PrefixStore(f"{name}/start{job_start()}", store.clone() if alone else store)
