# SPDX-License-Identifier: Apache-2.0
"""The options of the gloo backends that we make."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from .own_backend import OWN_BACKEND


def gloo_options(timeout: timedelta) -> Any:
    """As gloo makes them itself, but with one worker, unless it is what the job asked for: then as the job has it.

    Each worker writes the name of what it has ended into one string, without a lock. Two of them can free its memory
    twice where a name is long, as that of a sparse all-reduce is, which only the wrapped backend can do.
    """
    kind: Any = dist.ProcessGroupGloo
    options = kind._Options()
    interfaces = os.environ.get("GLOO_SOCKET_IFNAME", "")
    options._devices = (
        [kind.create_device(interface=name) for name in interfaces.split(",")]
        if interfaces else [kind.create_default_device()]
    )  # fmt: skip
    if not OWN_BACKEND.asked:
        options._threads = 1
    options._timeout = timeout
    return options
