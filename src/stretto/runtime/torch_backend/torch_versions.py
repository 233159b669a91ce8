# SPDX-License-Identifier: Apache-2.0
"""What differs between the versions of PyTorch that Stretto runs on; every such name is bridged here, and only here.

A feature is asked of PyTorch itself (has it this name, this parameter?) and not derived from a version number. Loading
this module with a version outside of the range is an `InvalidInput`.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ...errors import InvalidInput
from ...process_state import STATE
from .job_store import job_start

GroupClass = TypeVar("GroupClass", bound=type)
OLDEST, NEWEST = (2, 8), (2, 15)
"""The first and the last version, both included, whose tests pass; pyproject.toml has the same range."""

_GROUP_METHODS = {
    "all_gather_single": "_allgather_base",
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced",
    "reduce_scatter_single": "_reduce_scatter_base",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
    "all_to_all_single": "alltoall_base",
}
"""Methods of `ProcessGroup` by their newer names, with the older ones."""


def check_version(found: str = torch.__version__) -> None:
    """Raise `InvalidInput` where a version of PyTorch, by default the one that is loaded, is not in the range.

    >>> check_version("2.8.0+cpu")
    >>> check_version("2.16.0")
    Traceback (most recent call last):
    stretto.errors.InvalidInput: torch: is 2.16.0, but must be one of 2.8 to 2.15; pip install 'stretto[torch]'
    """
    major, minor = (int("".join(filter(str.isdigit, part))) for part in str(found).split(".")[:2])
    if not OLDEST <= (major, minor) <= NEWEST:
        lowest, highest = (f"{first}.{second}" for first, second in (OLDEST, NEWEST))
        raise InvalidInput(f"torch: is {found}, but must be one of {lowest} to {highest}; pip install 'stretto[torch]'")


check_version()


def group_method(name: str) -> str:
    """The name under which `ProcessGroup` has a method, given the newest of its names."""
    return name if hasattr(dist.ProcessGroup, name) else _GROUP_METHODS.get(name, name)


def with_older_names(group_class: GroupClass) -> GroupClass:
    """Give a subclass of `ProcessGroup` its methods under their older names, too; PyTorch calls either."""
    for name, older in _GROUP_METHODS.items():
        setattr(group_class, older, getattr(group_class, name))
    return group_class


def set_sequence_number(backend: Any) -> None:
    """Begin to count a backend's calls, where that is not done by itself; later versions warn of the call."""
    if hasattr(dist.ProcessGroup, "_set_sequence_number_for_group"):
        backend._set_sequence_number_for_group()


# Public functions of `torch.distributed`; the older names give a warning where there are newer ones.
_collectives: Any = dist
all_gather_single = getattr(_collectives, "all_gather_single", None) or _collectives.all_gather_into_tensor
reduce_scatter_single = getattr(_collectives, "reduce_scatter_single", None) or _collectives.reduce_scatter_tensor

_c10d: Any = dist.distributed_c10d
_KEEPS_ORDER = "sort_ranks" in inspect.signature(dist.new_group).parameters


def new_group_in_order(ranks: Sequence[int], **options: Any) -> Any:
    """`torch.distributed.new_group` in which the first of `ranks` is rank 0 of the group, and so on.

    Args:
        ranks: Ranks of the job, the same sequence on every rank.
        **options: Further arguments of `torch.distributed.new_group`.

    Returns:
        The group, or `GroupMember.NON_GROUP_MEMBER`.
    """
    if _KEEPS_ORDER:
        return dist.new_group(list(ranks), sort_ranks=False, **options)
    placed: list[Any] = [_RankAtPlace(rank, place) for place, rank in enumerate(ranks)]
    return dist.new_group(placed, **options)


def new_group_of_members(ranks: Sequence[int], backend: str) -> Any:
    """A process group that its members alone make together, the first of `ranks` as its rank 0.

    `torch.distributed.new_group` names such a group by the ranks and by how many groups a member has: members of
    different numbers of groups would wait for each other until the store's time is up, and a group that comes after
    one that was destroyed would find the addresses of that one.
    """
    number = STATE.number(("group of members", *ranks))
    name = f"stretto/members/{'.'.join(map(str, ranks))}/{number}/start{job_start()}"
    made, _ = _c10d._new_process_group_helper(
        len(ranks), ranks.index(dist.get_rank()), list(ranks), dist.Backend(backend), _c10d._get_default_store(), name,
        timeout=_c10d._get_default_timeout(dist.Backend(backend)),
    )  # fmt: skip
    _c10d._world.pg_group_ranks[made] = {rank: place for place, rank in enumerate(ranks)}
    return made


class _RankAtPlace(int):
    """A rank that `sorted` leaves at its place among others of this kind: an older `new_group` sorts what it gets."""

    place: int

    def __new__(cls, rank: int, place: int) -> _RankAtPlace:
        made = super().__new__(cls, rank)
        made.place = place
        return made

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        return int, (int(self),)  # A rank that was sent to another process is a plain number there.

    def __lt__(self, other: int) -> bool:
        return self.place < other.place if isinstance(other, _RankAtPlace) else int(self) < other


def pipeline_actions(rows: Sequence[Sequence[str]]) -> list[list[str]]:
    """The actions of a pipeline's ranks with communication (``0F1``, ``0SEND_F1``, ...) as this version writes them.

    The first versions reduce gradients by themselves, without an action; the last ones name every wait for what was
    begun: for a reduction here right behind it, for a send where PyTorch puts it in its own schedules.
    """
    from torch.distributed.pipelining import schedules

    library: Any = schedules
    if not hasattr(library, "REDUCE_GRAD"):
        return [[action for action in row if not action.endswith("REDUCE_GRAD")] for row in rows]
    written = [list(row) for row in rows]
    if hasattr(library, "WAIT_REDUCE_GRAD"):
        written = [[name for action in row for name in _with_wait(action)] for row in written]
    if hasattr(library, "_add_wait_send"):
        parsed = {rank: [library._Action.from_str(action) for action in row] for rank, row in enumerate(written)}
        written = [[str(action) for action in row] for row in library._add_wait_send(parsed).values()]
    return written


def _with_wait(action: str) -> tuple[str, ...]:
    stage, reduces, _ = action.partition("REDUCE_GRAD")
    return (action, f"{stage}WAIT_REDUCE_GRAD") if reduces else (action,)


def pipeline_runtime() -> Any:
    """The class of `torch.distributed.pipelining` that runs a given schedule and divides gradients by micro-batches."""
    from torch.distributed.pipelining import schedules

    usual: Any = schedules._PipelineScheduleRuntime
    if hasattr(schedules, "REDUCE_GRAD"):
        return usual

    class ScalingRuntime(usual):  # type: ignore[misc]
        """Divides at the end: older classes leave it out where a stage's last action is gradients of weights alone."""

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, scale_grads=False, **options)

        def _step_microbatches(self, *args: Any, **options: Any) -> Any:
            result = super()._step_microbatches(*args, **options)
            if self._has_backward:
                for stage in self._stages:
                    stage.scale_grads(self._n_microbatches)
            return result

    return ScalingRuntime
