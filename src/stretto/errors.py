"""The one exception tree. The CLI turns any of these into one line and exit code 2."""

from __future__ import annotations

from collections.abc import Iterable


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


class PlanMismatch(StrettoError):
    """A plan belongs to another model, cluster or version."""


class PeerLost(StrettoError):
    """A rank of the job is gone; the message names it."""


def unknown(what: str, name: object, choices: Iterable[object]) -> InvalidInput:
    """Build (not raise) the error for a name that is not known, listing the names that are.

    Args:
        what: The kind of thing that was named, as the message shall call it ("preset").
        name: The unknown name as the user gave it.
        choices: The valid names, in the order in which the message lists them.

    Returns:
        The `InvalidInput` for the caller to raise.

    >>> str(unknown("preset", "dgx9", ["dgx2", "ndv2"]))
    "unknown preset 'dgx9'; choose from: dgx2, ndv2"
    """
    return InvalidInput(f"unknown {what} {str(name)!r}; choose from: {', '.join(str(c) for c in choices)}")
