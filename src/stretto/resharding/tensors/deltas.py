# SPDX-License-Identifier: Apache-2.0
"""Which tensors have changed since they were sent, and which content each of a server's two sets has."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import msgspec
import torch

from ...errors import InvalidInput
from .describe import AnyTensor, local_of

AUTO = "auto"
Changed = Collection[str] | str | None
"""Names of tensors, `AUTO` to compare with what was sent last, or None for all tensors."""


class Said(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank says about the next update: the names that changed there, or that it needs everything."""

    everything: bool
    names: tuple[str, ...] = ()


class ChangeLog:
    """One rank's knowledge of what has changed.

    A set of tensors that an update writes to is two versions old: tensors that have not changed since are copied from
    the other set, on the server itself.
    """

    def __init__(self) -> None:
        self.whole = False
        """Whether all tensors have been sent once."""
        self._sent: dict[str, torch.Tensor] | None = None
        self._content: list[dict[str, int]] = [{}, {}]

    def said(self, changed: Changed, source: Mapping[str, AnyTensor], *, behind: bool) -> Said:
        """What this rank says about an update.

        Args:
            changed: as given to the update.
            source: what this rank sends.
            behind: whether this rank lacks the newest version.

        Returns:
            The names that this rank would send, or everything.

        Raises:
            InvalidInput: a name is not one of this rank's.
        """
        if isinstance(changed, str) and changed != AUTO:
            raise InvalidInput(f"changed: must be names of tensors or {AUTO!r}, not {changed!r}")
        found: Collection[str] = ()
        if changed == AUTO:
            found = self._compared(source)
        elif changed is not None:
            found = list(changed)
            for name in found:
                # A rank names what has changed in the model; other ranks may hold it.
                if not isinstance(name, str):
                    raise InvalidInput(f"changed: {name!r} is no name")
        return Said(everything=behind or not self.whole, names=tuple(sorted(found)))

    def _compared(self, source: Mapping[str, AnyTensor]) -> list[str]:
        """The names of tensors that differ from what was sent last; the copies to compare with are made here."""
        before, found = self._sent or {}, []
        self._sent = {}
        for name, tensor in source.items():
            local, old = local_of(tensor), before.get(name)
            if old is None:
                old = local.clone()
                found.append(name)
            elif not _same_bits(local, old):
                old.copy_(local)
                found.append(name)
            self._sent[name] = old
        return found

    def refreshed(
        self, sets: list[dict[str, torch.Tensor]], to: int, names: Collection[str] | None, number: int
    ) -> None:
        """Bring the tensors of a set that are not sent to the state of the other set; note what the set then has.

        Args:
            sets: both sets of this rank's target tensors.
            to: the set that the update writes.
            names: the names that are sent; None for all.
            number: the version.
        """
        other = 1 - to
        for name, tensor in sets[to].items():
            if names is None or name in names:
                self._content[to][name] = number
                continue
            held = self._content[other].get(name)
            if sets[to] is not sets[other] and self._content[to].get(name) != held:
                local_of(tensor).copy_(local_of(sets[other][name]))
                self._content[to][name] = held or 0


def union(said: Collection[Said]) -> frozenset[str] | None:
    """The names that any rank says; None if one needs everything."""
    if any(one.everything for one in said):
        return None
    return frozenset(name for one in said for name in one.names)


def _same_bits(one: torch.Tensor, two: torch.Tensor) -> bool:
    """Whether two tensors are equal bit by bit: a value that is not a number equals itself."""
    kind: Any = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(one.element_size())
    if kind is None or not one.is_contiguous() or not two.is_contiguous():
        return False
    return torch.equal(one.view(-1).view(kind), two.view(-1).view(kind))
