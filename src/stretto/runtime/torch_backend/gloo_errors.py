# SPDX-License-Identifier: Apache-2.0
"""What a failure of gloo means: gloo raises plain `RuntimeError`s, so its text is all that tells one kind from another.

This is the only module that reads such texts. A text that is not known here stays the error that it was.
"""

from __future__ import annotations

import enum

_PEER_GONE = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Connection refused")
_TIMED_OUT = ("Timed out", "Application timeout")


class GlooFailure(enum.Enum):
    """Why a call of gloo's failed."""

    PEER_GONE = enum.auto()
    """The process at the other end of a connection is not there any more."""
    TIMED_OUT = enum.auto()
    """Nothing came in time."""
    OTHER = enum.auto()
    """Anything else, which says nothing of another rank."""


def gloo_failure(error: Exception) -> GlooFailure:
    """Why gloo failed with this error.

    >>> gloo_failure(RuntimeError("[pair.cc:553] Connection closed by peer [127.0.0.1]:21"))
    <GlooFailure.PEER_GONE: 1>
    >>> gloo_failure(ValueError("Timed out waiting for nobody"))
    <GlooFailure.OTHER: 3>
    """
    if not isinstance(error, RuntimeError):
        return GlooFailure.OTHER
    text = str(error)
    if any(sign in text for sign in _PEER_GONE):
        return GlooFailure.PEER_GONE
    return GlooFailure.TIMED_OUT if any(sign in text for sign in _TIMED_OUT) else GlooFailure.OTHER
