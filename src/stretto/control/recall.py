# SPDX-License-Identifier: Apache-2.0
"""One rank's side of a plan that an earlier start of the job has left: what it calls, and whether that is the step.

The first iterations of a job are watched. If the last two were alike, what ranks called names the step, and rank 0 asks
the controller for it. What comes back is used only where every rank finds its own calls in it.
"""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from ..errors import StrettoError
from ..runtime.capture.tape import VARYING
from ..runtime.torch_backend.own_backend import OWN_BACKEND
from ..runtime.torch_backend.watch import WATCH, SubmittedCall
from .messages import RecallReply, RecallRequest, decode, decode_captured, encode
from .own_costs import OwnTime
from .transport import RECALL, ControllerConnection

if TYPE_CHECKING:
    from ..cluster import Cluster
    from ..workload import Workload
    from .aside import SideGroup

CALL_S = 5.0
MAX_CALLS = 1 << 15
"""The most calls of an iteration; no plan is kept for a step with more."""
MESSAGES = ("send", "recv")
ROOTED = ("broadcast", "reduce", "gather", "scatter")
ONE_SIDED = ("gather", "scatter")
NETWORK = (
    "STRETTO_CLUSTER", "STRETTO_CHANNELS", "STRETTO_CARRIER", "STRETTO_EARLY_GATHERS", "STRETTO_LAB_RATES",
    "GLOO_SOCKET_IFNAME", "UCX_NET_DEVICES", "STRETTO_PLUGINS",
)  # fmt: skip
"""Variables that say what a job runs on, and what it may run: a plan names algorithms of plug-ins."""
SCRIPT, CALLS = "script", "calls of an iteration"
RANKS_OF_HOSTS, NAMES = "ranks of each host", "names of the hosts"
MAX_TEXT, MAX_SHOWN = 2000, 120


@dataclass(frozen=True, kw_only=True)
class Recalled:
    """What an earlier start knew, the same on all ranks."""

    workload: Workload
    cluster: Cluster
    motif_us: float
    on_own: bool
    own_times: tuple[OwnTime, ...] = ()


class StepTally:
    """Notes the collectives of each iteration, between `begin` and `end`."""

    def __init__(self) -> None:
        self._now: list[SubmittedCall] = []
        self._last: tuple[SubmittedCall, ...] = ()
        self._alike = False

    def begin(self) -> None:
        """Watch, unless the script records by itself."""
        if WATCH.current is None:
            WATCH.current = self

    def end(self) -> None:
        """Stop watching calls."""
        if WATCH.current is self:
            WATCH.current = None

    def seen(self, what: SubmittedCall, run: Callable[[], Any]) -> Any:
        """Note a call of the current iteration."""
        if what.op not in MESSAGES and len(what.ranks) > 1:
            self._now.append(what)
            if len(self._now) > MAX_CALLS:
                self.end()
                self._now, self._alike = [], False
        return run()

    def cut(self) -> None:
        """Compare the calls of the iteration that ends with the recorded step."""
        if WATCH.current is not self:
            return
        ended, self._now = tuple(self._now), []
        self._alike = [_said(call) for call in ended] == [_said(call) for call in self._last]
        self._last = ended

    @property
    def calls(self) -> tuple[SubmittedCall, ...]:
        """The calls of an iteration, where the last two were alike; else none."""
        return self._last if self._alike else ()


def fits(calls: Sequence[SubmittedCall], workload: Workload, rank: int) -> bool:
    """Whether a rank's calls of an iteration are those of a recorded step.

    Args:
        calls: The rank's calls of one iteration.
        workload: The recorded step.
        rank: The rank.

    Returns:
        True where each call is the op that comes next.
    """
    from ..runtime.enforcer.prepared import ExpectedOps

    expected = ExpectedOps(workload, rank).ops if rank < workload.num_ranks else []
    return bool(calls) and len(calls) == len(expected) and all(
        call.ranks == group
        and ("all_reduce" if call.op == "barrier" else call.op) == op.kind
        and (op.kind not in ROOTED or call.root == op.root)
        and (call.op == "barrier" or op.at_most or call.splits or op.kind in ONE_SIDED or _nbytes(call) == op.nbytes)
        for call, (_, op, group) in zip(calls, expected, strict=True)
    )  # fmt: skip


def identity_of(
    calls: Sequence[SubmittedCall], aside: SideGroup, script: str, rank: int, hosts: Sequence[str]
) -> dict[str, str]:
    """What has to be the same for a kept plan to be of use; all ranks call this together.

    Of hosts it is which ranks share one, and their names. What else tells processes of two hosts apart (the number of a
    network namespace, or of a machine's start) changes with every start of a container, or of a lab.

    Args:
        calls: Of this rank's iteration; none where iterations were not alike.
        aside: To talk to the other ranks.
        script: The job's script.
        rank: This rank.
        hosts: Every rank's host; equal where ranks share one.

    Returns:
        By what each of these is called; empty on all ranks where one of them has no calls. Variables are this rank's
        own, and what rank 0 finds counts.
    """
    mine = [_number((rank, [_said(call) for call in calls])), _number((rank, socket.gethostname())), not calls]
    together, names, without = aside.sums(mine)
    if without:
        return {}
    import torch

    from .. import __version__

    known = list(dict.fromkeys(hosts))
    return {
        SCRIPT: script, "stretto": __version__, "PyTorch": str(torch.__version__), "backend": OWN_BACKEND.asked,
        RANKS_OF_HOSTS: " ".join(str(known.index(host)) for host in hosts)[:MAX_TEXT], NAMES: f"{names:x}",
        CALLS: f"{together:x}", **{name: os.environ.get(name, "")[:MAX_TEXT] for name in NETWORK},
    }  # fmt: skip


def key_of(identity: Mapping[str, str]) -> str:
    """The name of a job's step: of the file in which its plan is kept; empty for an empty identity."""
    return hashlib.sha256(repr(list(identity.items())).encode()).hexdigest()[:32] if identity else ""


def difference(then: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """What of an identity is another one now, in words.

    >>> difference({"PyTorch": "2.9", CALLS: "1f"}, {"PyTorch": "2.10", CALLS: "2f"})
    ['PyTorch (2.9 then, 2.10 now)', 'calls of an iteration']
    """
    found = []
    for name in now:
        before, after = then.get(name, ""), now[name]
        if before != after:
            values = f" ({before or 'not set'} then, {after or 'not set'} now)"
            found.append(name if name in (CALLS, NAMES) or len(values) > MAX_SHOWN else name + values)
    return found


def recall(
    identity: Mapping[str, str], calls: Sequence[SubmittedCall], link: ControllerConnection, store: Any,
    aside: SideGroup, rank: int, given: Cluster | None,
) -> tuple[Recalled | None, str]:  # fmt: skip
    """Ask for what an earlier start has left; all ranks call this together.

    Args:
        identity: What has to be the same.
        calls: Of this rank's iteration.
        link: Rank 0's way to the controller.
        store: A part of the job's store of its own.
        aside: To talk to the other ranks.
        rank: This rank.
        given: The cluster that the job says it runs on, if it does.

    Returns:
        What was left, if all ranks find their calls in it; else why there is nothing to begin with, in words.
    """
    if rank == 0:
        try:
            request = RecallRequest(key=key_of(identity), identity=dict(identity))
            said = link.call(RECALL, encode(request), timeout_s=CALL_S)
        except StrettoError:
            said = encode(RecallReply(why="the controller did not answer"))
        except Exception as error:
            # The other ranks wait for this answer, whatever becomes of the question.
            said = encode(RecallReply(why=f"{type(error).__name__}: {error}"[:MAX_TEXT]))
        store.set("reply", said)
    found, why = None, "the controller's answer cannot be read"
    try:
        reply = decode(store.get("reply"), RecallReply)
        why = reply.why
        if reply.captured is not None:
            workload, cluster = decode_captured(reply.captured)
            why = "the plan of an earlier start is for another step, or another cluster"
            if fits(calls, workload, rank) and (given is None or given.digest == cluster.digest):
                found = Recalled(
                    workload=workload, cluster=cluster, motif_us=reply.captured.motif_us, on_own=reply.on_own,
                    own_times=reply.captured.own_times,
                )  # fmt: skip
    except (StrettoError, msgspec.MsgspecError):
        found = None
    missing = aside.sums([found is None])[0]
    return (None, why) if missing else (found, "")


def _number(what: object) -> int:
    """A number that stands for a value, as good as random."""
    return int.from_bytes(hashlib.sha256(repr(what).encode()).digest()[:8])


def _nbytes(call: SubmittedCall) -> int:
    """The size of a call as a recorded workload counts it."""
    return max(1, call.nbytes)


def _said(call: SubmittedCall) -> tuple[object, ...]:
    """What a call is, apart from sizes that may follow the data."""
    root = call.root if call.op in ROOTED else 0
    return call.op, call.ranks, root, 0 if call.op in VARYING or call.splits else call.nbytes
