# SPDX-License-Identifier: Apache-2.0
"""A local Ray on a machine that may be too busy for Ray's own limit."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import TypeVar

import pytest

from stretto.errors import InvalidInput

T = TypeVar("T")
STARTS, GIVEN_UP = 3, "The current node timed out during startup"
"""How often Ray is started, and what it says where its own limit for that, which nobody can set, was too short."""


def started(stack: ExitStack, start: Callable[[], AbstractContextManager[T]]) -> T:
    """Enter what starts a Ray; where Ray gives up three times, skip the test with its reason.

    Args:
        stack: ends what was started.
        start: makes the context that starts a Ray.

    Returns:
        what the context gives.

    Raises:
        InvalidInput: Ray could not be started for another reason.
    """
    for _ in range(STARTS):
        try:
            return stack.enter_context(start())
        except InvalidInput as error:
            if GIVEN_UP not in str(error):
                raise
    pytest.skip(f"Ray has given up {STARTS} times: its limit of 30 s for a start is too short on this machine")
