# SPDX-License-Identifier: Apache-2.0
"""The one exception tree. The CLI turns any of these into one line and exit code 2."""

from __future__ import annotations

from collections.abc import Iterable

MAX_CHOICES = 12
"""Beside a name that was probably meant, more choices than these are not listed."""
MAX_NAME = 100
"""Characters of a misspelled name that are compared with the choices."""


class StrettoError(Exception):
    """The base class of every error that Stretto raises on purpose."""


class InvalidInput(StrettoError):
    """A file, an option or an argument is wrong; the message names the field and the valid choices."""


class Infeasible(StrettoError):
    """The request has no solution; the message names the constraint that fails."""


class SearchTimeout(StrettoError):
    """A search ended without any answer inside its budget."""


class VerificationError(StrettoError):
    """A program does not do what its collective asks; the message names rank, chunk and transfer."""


class CannotJudge(InvalidInput):
    """A program file does not say what the program is to do, so that it can be neither right nor wrong."""


class PlanMismatch(StrettoError):
    """A plan belongs to another model, cluster or version."""


class PeerLost(StrettoError):
    """A rank of the job is gone; the message names it."""


def unknown(what: str, name: object, choices: Iterable[object]) -> InvalidInput:
    """Build (not raise) the error for a name that is not known, with the name that was probably meant.

    Args:
        what: The kind of thing that was named, as the message shall call it ("preset").
        name: The unknown name as the user gave it.
        choices: The valid names, in the order in which the message lists them.

    Returns:
        The `InvalidInput` for the caller to raise.

    >>> str(unknown("preset", "dgx9", ["dgx2", "ndv2"]))
    "unknown preset 'dgx9'; choose from: dgx2, ndv2; did you mean 'dgx2'?"
    """
    known = [str(choice) for choice in choices]
    meant = probably_meant(str(name), known)
    listed = ", ".join(known)
    if meant and len(known) > MAX_CHOICES:
        listed = f"{', '.join(known[:MAX_CHOICES])}, ... ({len(known)} in all)"
    return InvalidInput(f"unknown {what} {str(name)!r}; choose from: {listed}{meant}")


def probably_meant(name: str, choices: Iterable[str]) -> str:
    """A question, to end a message, that names the choice nearest to a misspelled name; empty where none is near.

    Case, and the difference between ``-``, ``_`` and a space, do not count.

    >>> probably_meant("All-Gahter", ["all_gather", "all_reduce"])
    "; did you mean 'all_gather'?"
    """
    from difflib import get_close_matches

    by_shape = {_shape(choice): choice for choice in reversed(list(choices))}
    near = get_close_matches(_shape(name)[:MAX_NAME], by_shape, n=1, cutoff=0.6)
    return f"; did you mean {by_shape[near[0]]!r}?" if near else ""


def _shape(name: str) -> str:
    return name.lower().replace("-", "_").replace(" ", "_")
