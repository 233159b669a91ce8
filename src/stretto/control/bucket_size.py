# SPDX-License-Identifier: Apache-2.0
"""The size of DDP's buckets in scripts that ask for none, as `stretto plan --buckets` has found it."""

from __future__ import annotations

import functools
import inspect
import math
import os
from collections.abc import Callable
from typing import Any

from ..errors import InvalidInput
from ..runtime.torch_backend.patches import DDP_INIT, Undo, apply

OPTION, AUTO = "STRETTO_BUCKET_MB", "auto"
PARAMETERS = ("bucket_cap_mb", "bucket_cap_mb_list")
"""The parameters of DDP by which a script asks for a size; older versions of PyTorch have only the first."""


def set_bucket_size(store: Any = None, rank: int = 0) -> Undo | None:
    """Give models that DDP wraps from here on buckets of STRETTO_BUCKET_MB, unless their script says a size.

    Args:
        store: Where ranks find what rank 0 was told: buckets that differ between ranks would never be summed. None:
            this process alone counts.
        rank: This rank.

    Returns:
        What ends it; None where the variable is not set, or leaves the choice to `stretto run`, which has made none.

    Raises:
        InvalidInput: The variable is neither a positive number nor auto.
    """
    said = os.environ.get(OPTION, "")
    if store is not None:
        if rank == 0:
            store.set("bucket_mb", said)
        said = store.get("bucket_mb").decode()
    if not said or said.strip().lower() == AUTO:
        return None
    try:
        size = float(said)
    except ValueError:
        size = 0.0
    if not 0 < size < math.inf:
        raise InvalidInput(f"{OPTION}: must be a number of MiB > 0 or auto, not {said[:40]!r}")

    def wrap(usual: Callable[..., None]) -> Callable[..., None]:
        known = inspect.signature(usual)

        @functools.wraps(usual)
        def init(model: Any, *args: Any, **more: Any) -> None:
            given = known.bind_partial(model, *args, **more).arguments
            if all(given.get(name) is None for name in PARAMETERS):
                more = {**more, PARAMETERS[0]: size} if len(args) < _position(known) else more
            usual(model, *args, **more)

        return init

    return apply(DDP_INIT, wrap)


def _position(signature: inspect.Signature) -> int:
    """How many arguments behind the model's own come before the size."""
    return list(signature.parameters).index(PARAMETERS[0]) - 1
