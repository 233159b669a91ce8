# SPDX-License-Identifier: Apache-2.0
"""Under `stretto run`, `torch.compile` hears what collectives cost on the job's cluster."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..errors import StrettoError
from ..process_state import STATE, ProcessPart
from ..runtime.torch_backend.patches import COMPILE, apply

if TYPE_CHECKING:
    from ..cluster import Cluster

LOADED = "torch._inductor.config"


class CompileWatch(ProcessPart):
    """Whether this process waits for its first `torch.compile`."""

    def __init__(self) -> None:
        self.waits = False


_WATCH = STATE.part(CompileWatch)


def tell_inductor(cluster: Cluster | None = None) -> None:
    """Give Inductor the costs of a cluster that was found or, at the job's begin, of what STRETTO_CLUSTER names.

    Inductor is not loaded for it: where it is not there yet, the first `torch.compile` of the job does so.
    """
    known = cluster if cluster is not None else os.environ.get("STRETTO_CLUSTER", "")
    if not known:
        return
    if LOADED in sys.modules:
        _install(known)
    elif not _WATCH.waits:
        _WATCH.waits = True

        def watched(compile_: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(compile_)
            def first(*args: Any, **more: Any) -> Any:
                if _WATCH.waits:
                    _WATCH.waits = False
                    _install(known)
                return compile_(*args, **more)

            return first

        apply(COMPILE, watched)


def _install(known: Cluster | str) -> None:
    from ..runtime.torch_backend.inductor import inductor_costs

    # This PyTorch's Inductor takes no costs, or the cluster is not valid, which other parts of the run say.
    with contextlib.suppress(StrettoError):
        inductor_costs(known)
