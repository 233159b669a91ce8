# SPDX-License-Identifier: Apache-2.0
"""The part of the job's store that is ours, for this start of the job alone. Loads no torch."""

from __future__ import annotations

import os
from typing import Any

from ...process_state import STATE


def job_start() -> str:
    """How often torchrun has started the ranks again."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")


def job_store(name: str, *, apart: bool = False) -> Any:
    """A `c10d.PrefixStore` of the default process group's store, with keys that no earlier start of the job has set.

    torchrun starts failed ranks again on the store that they had, in which everything of the start before is still to
    be found: addresses of processes that are gone, and votes. All ranks call this equally often for each name.

    With `apart` it has a connection of its own, as threads beside the application's need: who waits for a key keeps all
    others off the connection. A rank whose agent waits for a second one's address, while the application of that one
    waits in the store for the first one's, would wait for ever.
    """
    number = STATE.number(("job store", name))
    return start_store(f"{name}/{number}", apart=apart)


def start_store(name: str, *, apart: bool = False) -> Any:
    """The job's store under a name that ranks number themselves, where only some ranks ask for it."""
    import torch.distributed as dist
    from torch._C import _distributed_c10d as c10d

    store: Any = dist.distributed_c10d._get_default_store()
    # Only some versions of PyTorch and kinds of store can be cloned, which makes another connection.
    alone = apart and hasattr(store, "clone")
    return c10d.PrefixStore(f"{name}/start{job_start()}", store.clone() if alone else store)
