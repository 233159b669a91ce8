# SPDX-License-Identifier: Apache-2.0
"""Tests of what a search finds within some seconds, on a machine that may give it a tenth of them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from stretto.errors import SearchTimeout

FACTORS = (1.0, 4.0, 16.0)
"""By what budgets are multiplied, until what is asked of the result holds."""


def patient(test: Callable[..., None]) -> Callable[..., None]:
    """Give a test its parameter `patience`: 1, and where it fails with that, as on a busy machine, 4 and then 16.

    The test multiplies its budgets by it. A search that cannot find what is asked for fails with all three.
    """

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        for patience in FACTORS[:-1]:
            try:
                test(*args, patience=patience, **kwargs)
            except (AssertionError, SearchTimeout):
                continue
            return
        test(*args, patience=FACTORS[-1], **kwargs)

    signature = inspect.signature(test)
    kept = [parameter for name, parameter in signature.parameters.items() if name != "patience"]
    run.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
    return run
