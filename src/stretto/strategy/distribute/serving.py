# SPDX-License-Identifier: Apache-2.0
"""Ranks that only serve: they do what the first rank that trains tells them, word by word, until it ends.

A rank that serves has no gradients of its own. Otherwise it takes its part in every message as any server does, so that
encoders, stations and sparse rows need nothing else here.
"""

from __future__ import annotations

import io
import pickle
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ...errors import StrettoError

if TYPE_CHECKING:
    from .groups import Groups
    from .optimizer import DistributedOptimizer

WORDS = ("push", "step", "clip", "state", "load", "weights", "end")


class Orders:
    """Words from the first training rank to all that serve, in order; each with what it needs."""

    def __init__(self, groups: Groups, servers: tuple[int, ...]) -> None:
        self._communicator = groups.separate()
        self._lead = groups.world[groups.lead]
        self._servers = [groups.world[rank] for rank in servers]

    def tell(self, word: str, given: Any = None) -> None:
        """Send a word to every rank that serves."""
        buffer = io.BytesIO()
        if given is not None:
            torch.save(given, buffer)
        text = torch.frombuffer(bytearray(buffer.getvalue()) or bytearray(1), dtype=torch.uint8)
        size = len(buffer.getvalue())
        head = torch.tensor([WORDS.index(word), size])
        for server in self._servers:
            dist.send(head, server, group=self._communicator)
            if size:
                dist.send(text, server, group=self._communicator)

    def hear(self) -> tuple[str, Any]:
        """Wait for the next word."""
        head = torch.zeros(2, dtype=torch.int64)
        dist.recv(head, self._lead, group=self._communicator)
        word, size = WORDS[int(head[0])], int(head[1])
        if not size:
            return word, None
        text = torch.empty(size, dtype=torch.uint8)
        dist.recv(text, self._lead, group=self._communicator)
        try:
            return word, torch.load(io.BytesIO(text.numpy().tobytes()), weights_only=True)
        except pickle.UnpicklingError as error:
            raise StrettoError(f"servers: what came with {word!r} is no data: {str(error).splitlines()[0]}") from None


def serve_until_end(optimizer: DistributedOptimizer) -> int:
    """Do what the first training rank says until it closes its optimizer; return the number of updates."""
    updates = 0
    while True:
        word, given = optimizer.hear()
        match word:
            case "push":
                optimizer.push_for_others()
            case "step":
                optimizer.update_for_others(given)
                updates += 1
            case "clip":
                optimizer.clip_grad_norm_(given)
            case "state":
                optimizer.state_dict()
            case "load":
                optimizer.load_state_dict(given)
            case "weights":
                optimizer.take_weights(given)
            case _:
                optimizer.close()
                return updates


def sendable(options: dict[str, Any]) -> dict[str, Any]:
    """The options of a parameter group that are plain numbers, words or small tensors."""
    return {key: value for key, value in options.items() if key != "params" and not callable(value)}
