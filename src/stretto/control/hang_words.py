# SPDX-License-Identifier: Apache-2.0
"""Ranks, calls and how far ranks got, in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .hang_messages import Pulse, PulseCall

OPS = {"allreduce": "all_reduce", "allgather": "all_gather", "alltoall": "all_to_all"}
MOST_WORDS = 8
"""Different standings of ranks that are told."""


def rank_words(ranks: Sequence[int]) -> str:
    """Ranks, runs of them shortened.

    >>> rank_words([3]), rank_words([0, 1, 2, 3, 7])
    ('rank 3', 'ranks 0-3, 7')
    """
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    text = ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)
    return f"rank{'s' if len(ranks) > 1 else ''} {text}"


def call_words(call: PulseCall | None) -> str:
    """A call with its size and place.

    >>> call_words(PulseCall(number=3, op="allreduce", nbytes=4000, place="train.py:40"))
    'all_reduce of 4000 bytes at train.py:40'
    """
    if call is None:
        return "nothing"
    size = f" of {call.nbytes} bytes" if call.nbytes else ""
    root = f" from root {call.root}" if call.root >= 0 and call.op in ("broadcast", "scatter") else ""
    root = f" to root {call.root}" if call.root >= 0 and call.op in ("reduce", "gather") else root
    return f"{OPS.get(call.op, call.op)}{size}{root}{f' at {call.place}' if call.place else ''}"


def how_far(
    pulses: Mapping[int, Pulse], states: Mapping[int, str], first: Sequence[int], calls: Mapping[int, int] | None = None
) -> str:
    """How far each rank got, ranks that are alike together.

    Args:
        pulses: What each rank said last.
        states: What has become of each.
        first: Ranks that are told of before the others.
        calls: How many calls each has made, where those of one group are meant.

    Returns:
        ``rank 2 has made 11 calls, the last ...; ranks 0, 1 ...``.
    """
    alike: dict[str, list[int]] = {}
    for rank in [*first, *(rank for rank in sorted(pulses) if rank not in first)]:
        alike.setdefault(_standing(pulses[rank], states[rank], None if calls is None else calls[rank]), []).append(rank)
    parts = [f"{rank_words(ranks)} {words}" for words, ranks in alike.items()]
    more = f"; and {len(parts) - MOST_WORDS} more" if len(parts) > MOST_WORDS else ""
    return "; ".join(parts[:MOST_WORDS]) + more


def _standing(pulse: Pulse, state: str, calls: int | None) -> str:
    made = sum(group.calls for group in pulse.groups) if calls is None else calls
    group = max(pulse.groups, key=lambda each: each.calls, default=None)
    last = group.recent[-1] if group is not None and group.recent else None
    text = f"made {made} calls" + (f", the last {call_words(last)}" if last is not None else "")
    if not pulse.groups and not made:
        text = "has told of no call"
    if state == "left":
        return f"{text}, and has ended{f' with {pulse.error}' if pulse.error else ''}"
    if state == "here" and pulse.place:
        return f"{text}, and is at {pulse.place}"
    return text
