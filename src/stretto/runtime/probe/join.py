# SPDX-License-Identifier: Apache-2.0
"""How a command that runs on every rank becomes a job: the environment of torchrun, its store, an executor."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta

from ...errors import InvalidInput, PeerLost, StrettoError
from ..executor.executor import Executor

JOIN_S = 60.0
NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
MAX_RANKS = 4096


def place(environment: Mapping[str, str] = os.environ, *, command: str = "probe") -> tuple[int, int]:
    """This process's rank and the number of ranks, as torchrun and the lab set them; errors quote the `command`.

    >>> place({"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "h0", "MASTER_PORT": "29500"})
    (1, 4)
    """
    missing = [name for name in NEEDED if not environment.get(name)]
    if missing:
        raise InvalidInput(
            f"{missing[0]} is not set: every rank runs this command, as in "
            f"'torchrun --nproc-per-node 4 -m stretto {command} ...' or 'stretto lab run -- stretto {command} ...'"
        )
    numbers = []
    for name, most in (("RANK", MAX_RANKS - 1), ("WORLD_SIZE", MAX_RANKS), ("MASTER_PORT", 65535)):
        text = environment[name]
        if not (text.isascii() and text.isdecimal() and len(text) < 6 and int(text) <= most):
            raise InvalidInput(f"{name}: must be a number up to {most}, not {text[:40]!r}")
        numbers.append(int(text))
    rank, world, _ = numbers
    if not rank < world:
        raise InvalidInput(f"RANK: must be 0..{world - 1}, not {rank}")
    if world < 2:
        raise InvalidInput("WORLD_SIZE: a job of one rank has no network to measure; start at least two ranks")
    return rank, world


@contextmanager
def joined(*, timeout_s: float = JOIN_S) -> Iterator[Executor]:
    """An executor among all ranks of the job that the environment describes; left again at the end."""
    rank, world = place()
    from ..torch_backend.engine import Job, missing
    from ..torch_backend.meeting import Meeting, card, meet

    patience = timedelta(seconds=timeout_s)
    try:
        from torch.distributed.rendezvous import rendezvous

        store, _, _ = next(iter(rendezvous("env://", rank, world, timeout=patience)))
        meeting = Meeting(store, rank, world)
        cards = meet(meeting, card(rank, executor=missing(), rules=""))
        job = Job.join(meeting, cards, range(world), patience)
    except (RuntimeError, ValueError, OSError) as error:
        # Torch's store has no errors of its own; whatever it says begins with what was wrong.
        raise PeerLost(f"the ranks did not meet: {str(error).splitlines()[0]}") from None
    if job.executor is None:
        raise StrettoError(f"no executor: {job.why}")
    with job.executor as executor:
        yield executor
