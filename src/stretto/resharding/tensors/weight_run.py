# SPDX-License-Identifier: Apache-2.0
"""`stretto weights run`: the weights of a model between real processes, beside what they cost without a plan."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from ...errors import InvalidInput, unknown
from ...weights.models import ModelShapes
from ...weights.parallel import ParallelDegrees
from .. import Layout, Tensor
from .describe import AnyTensor, TensorPart
from .plain import GatherBroadcast, Locals, PlainMessages
from .weights import STAGING_BYTES, WeightSync

SYSTEMS = ("stretto", "send_recv", "gather_broadcast")
NCCL_SYSTEMS = ("nccl_send_recv", "nccl_gather_broadcast")
"""On GPUs the first three run on our executor, with their own plans, and these two by NCCL."""
LEAD_S = 0.05
"""Between agreeing on the beginning of a run and the beginning."""
TRAINED = {"cpu": 256, "cuda": 4096}
"""The width of the matrices that a trainer multiplies while weights are sent."""
STEPS = 8
"""The steps of a trainer that are timed alone."""


@dataclass(frozen=True, kw_only=True)
class WeightTimes:
    """What one system took."""

    system: str
    exact: bool
    """Whether every server had exactly the trainers' bits."""
    times_s: tuple[float, ...]
    """From the agreed beginning until the last rank's end, of each run."""
    stopped_s: float
    """How long a server cannot serve: while its memory is written."""

    @property
    def time_s(self) -> float:
        """The median."""
        return median(self.times_s)


@dataclass(frozen=True, kw_only=True)
class WeightRun:
    """What `run_weights` has measured."""

    model: ModelShapes
    nbytes: int
    bound_us: float
    predicted_us: float
    systems: tuple[WeightTimes, ...]
    slowdown: float
    """The time of a trainer's step while weights are sent over that of one alone."""
    route: str = "executor"
    """How ours moved the bytes: by the executor, on GPU memory, through pinned memory, or by messages."""
    copied_us: float = 0.0
    """On a GPU: how long it takes to copy what servers get once, on all of them at the same time."""


def run_weights(
    model: ModelShapes, *, trainer: ParallelDegrees | str, server: ParallelDegrees | str, runs: int = 3,
    systems: Sequence[str] = SYSTEMS, staging_bytes: int = STAGING_BYTES, device: str = "cpu",
) -> WeightRun:  # fmt: skip
    """Move a model's weights, in bf16, between the ranks of the default process group; all of them call this.

    Args:
        model: the tensors.
        trainer: the trainers' degrees; they are the first ranks, unless they say which.
        server: the servers' degrees; they are the next ranks.
        runs: how often each system runs for the clock, after one run whose bits are compared.
        systems: which of `SYSTEMS`.
        staging_bytes: the most bytes that a rank packs at a time.
        device: "cpu" or "cuda", where every rank uses its current GPU.

    Returns:
        The measurements, the same on all ranks.

    Raises:
        InvalidInput: there are too few ranks, or degrees that do not fit.
    """
    known = SYSTEMS + (NCCL_SYSTEMS if device == "cuda" else ())
    for name in systems:
        if name not in known:
            raise InvalidInput(f"systems: {name!r} is none of {', '.join(known)}")
    if device not in TRAINED:
        raise unknown("device", device, TRAINED)
    tensors = placed_model(model, trainer, server, dist.get_world_size())
    me = dist.get_rank()
    sources = [_filled(t, t.src, me, device) for t in tensors]
    targets = [_empty(t, t.dst, me, device) for t in tensors]
    given, wanted = _parts(tensors, sources, 0) or None, _parts(tensors, targets, 1) or None
    sync = WeightSync(given, wanted, staging_bytes=staging_bytes)
    if device == "cuda":
        torch.cuda.empty_cache()
    found = []
    for name in systems:
        for target in targets:
            if target is not None:
                target.zero_()
        run, close = _way(name, sync, tensors, sources, targets, staging_bytes)
        run()
        with sync.read() as weights:
            held = [weights[t.name] if target is not None else None for t, target in zip(tensors, targets, strict=True)]
            fine = _exact(tensors, held if name == "stretto" else targets, me, device)
            stopped = _copied(held, targets) if name == "stretto" else 0.0
        times = [_timed(run) for _ in range(runs)]
        close()
        stopped = stopped if name == "stretto" else median(times) if times else 0.0
        found.append(WeightTimes(system=name, exact=fine, times_s=tuple(times), stopped_s=stopped))
    slowdown = _slowdown(sync, any(s is not None for s in sources), device)
    made = WeightRun(
        model=model, nbytes=sum(t.nbytes for t in tensors), bound_us=sync.bound_us, predicted_us=sync.predicted_us,
        systems=tuple(found), slowdown=slowdown, route=sync.route,
        copied_us=_copy_us(targets) if device == "cuda" else 0.0,
    )  # fmt: skip
    sync.close()
    return made


def _way(
    name: str, sync: WeightSync, tensors: Sequence[Tensor], sources: Locals, targets: Locals, staging_bytes: int
) -> tuple[Callable[[], object], Callable[[], object]]:
    """A function that moves everything once, and one that ends what it used."""
    if name == "stretto":
        return sync.update, lambda: None
    on_gpu = any(t is not None and t.is_cuda for t in (*sources, *targets))
    on_gpu = bool(_latest(float(on_gpu)))
    if on_gpu and name in SYSTEMS:
        planned = PlannedBaseline(name, tensors, sources, targets, staging_bytes)
        return planned, planned.close
    if name.endswith("send_recv"):
        return PlainMessages(tensors, sources, targets), lambda: None
    root, wanting = tensors[0].src.mesh.devices[0], {d for t in tensors for d in t.dst.mesh.devices}
    group = dist.new_group(sorted({root, *wanting}), backend="nccl" if on_gpu else "gloo")
    return GatherBroadcast(tensors, sources, targets, group), lambda: dist.destroy_process_group(group)


class PlannedBaseline:
    """Plain messages, or gather and broadcast, on the executor that ours runs on: only the plan is another."""

    def __init__(
        self, name: str, tensors: Sequence[Tensor], sources: Locals, targets: Locals, staging_bytes: int
    ) -> None:
        self._tensors, self._targets, self._me = tensors, targets, dist.get_rank()
        given, wanted = _parts(tensors, sources, 0) or None, _parts(tensors, targets, 1) or None
        self._full: dict[str, torch.Tensor] = {}
        if name == "send_recv":
            self._syncs = [WeightSync(given, wanted, staging_bytes=staging_bytes, copies=1, _strategy=name)]
            return
        root = tensors[0].src.mesh.devices[0]
        servers = sorted({d for t in tensors for d in t.dst.mesh.devices})
        mine: Any = next((t for t in (*sources, *targets) if t is not None), None)
        if self._me == root or self._me in servers:
            where = mine.device if mine is not None else None
            self._full = {t.name: torch.empty(t.shape, dtype=torch.bfloat16, device=where) for t in tensors}
        whole: dict[str, AnyTensor] | None = dict(self._full) or None
        first = WeightSync(given, whole if self._me == root else None, staging_bytes=staging_bytes, copies=1)
        copies = {
            name: TensorPart.of(full, ranks=servers, placements=["R"]) for name, full in self._full.items()
        } if self._me in servers else None  # fmt: skip
        second = WeightSync(whole if self._me == root else None, copies, staging_bytes=staging_bytes, copies=1)
        self._syncs = [first, second]

    def __call__(self) -> None:
        """Move everything once; all ranks call this."""
        for sync in self._syncs:
            sync.update()
        for tensor, target in zip(self._tensors, self._targets, strict=True):
            if self._full and target is not None:
                tile = _tile(tensor, tensor.dst, self._me)
                assert tile is not None
                target.copy_(self._full[tensor.name][tuple(slice(a, b) for a, b in tile)])
        _sync_device(self._targets)

    def close(self) -> None:
        """End the process groups."""
        for sync in self._syncs:
            sync.close()


def placed_model(
    model: ModelShapes, trainer: ParallelDegrees | str, server: ParallelDegrees | str, ranks: int
) -> list[Tensor]:
    """The tensors of a model on the first ranks and on the next ones.

    Args:
        model: the tensors.
        trainer: the trainers' degrees.
        server: the servers' degrees.
        ranks: the number of ranks of the job.

    Returns:
        One tensor for each of the model's.

    Raises:
        InvalidInput: degrees that do not fit, or ranks that there are not.
    """
    sides: list[ParallelDegrees] = []
    free = 0
    for what, given in (("trainer", trainer), ("server", server)):
        side = ParallelDegrees.parse(given) if isinstance(given, str) else given
        devices = side.devices or tuple(range(free, free + side.size))
        free = max(free, max(devices) + 1)
        if max(devices) >= ranks:
            raise InvalidInput(f"{what}: {side} needs ranks up to {max(devices)}; the job has {ranks}")
        sides.append(ParallelDegrees(**{**vars(side), "devices": devices}))
    layouts = [[side.layout(t, side.stage_of(t, model)) for side in sides] for t in model.tensors]
    return [
        Tensor(name=t.name, shape=t.shape, dtype_bytes=2, src=src, dst=dst)
        for t, (src, dst) in zip(model.tensors, layouts, strict=True)
    ]


def part_of(local: torch.Tensor, layout: Layout, shape: Sequence[int]) -> TensorPart:
    """A rank's part of a tensor in a layout.

    The axes of a mesh are put into an order in which a dimension that several of them cut is cut by them in turn.

    Args:
        local: the part's memory.
        layout: the layout, with ranks as devices.
        shape: sizes of the whole tensor.

    Returns:
        The part.
    """
    cut = {axis: dim for dim, axes in enumerate(layout.spec.axes) for axis in axes}
    order = [axis for axes in layout.spec.axes for axis in axes]
    order += [axis for axis in range(len(layout.mesh.shape)) if axis not in cut]
    grid = torch.tensor(layout.mesh.devices).view(layout.mesh.shape).permute(order)
    placements = [f"S({cut[axis]})" if axis in cut else "R" for axis in order]
    return TensorPart.of(
        local, ranks=grid.flatten().tolist(), mesh_shape=tuple(grid.shape), placements=placements, shape=shape
    )


def _parts(tensors: Sequence[Tensor], locals_: Sequence[torch.Tensor | None], side: int) -> dict[str, AnyTensor]:
    return {
        t.name: part_of(local, (t.src, t.dst)[side], t.shape)
        for t, local in zip(tensors, locals_, strict=True)
        if local is not None
    }


def _tile(tensor: Tensor, side: Layout, rank: int) -> list[tuple[int, int]] | None:
    if rank not in side.mesh.devices:
        return None
    return [(int(a), int(b)) for a, b in side.tiles(tensor.shape)[side.mesh.devices.index(rank)]]


def _filled(tensor: Tensor, side: Layout, rank: int, device: str) -> torch.Tensor | None:
    """A rank's part, of numbers that tell where in the whole tensor they belong."""
    tile = _tile(tensor, side, rank)
    if tile is None:
        return None
    value = torch.zeros((1,) * len(tile), dtype=torch.int64, device=device)
    for dim, (begin, end) in enumerate(tile):
        steps = torch.arange(begin, end, device=device) * (2 * dim + 1) * 7919
        value = value * 31 + steps.view([-1 if d == dim else 1 for d in range(len(tile))])
    # Of bf16 only bit patterns of ordinary numbers.
    return (value % (0x7F00)).to(torch.int16).view(torch.bfloat16).contiguous()


def _empty(tensor: Tensor, side: Layout, rank: int, device: str) -> torch.Tensor | None:
    tile = _tile(tensor, side, rank)
    return None if tile is None else torch.zeros([b - a for a, b in tile], dtype=torch.bfloat16, device=device)


def _exact(tensors: Sequence[Tensor], held: Locals, rank: int, device: str) -> bool:
    """Whether all ranks have what they should."""
    fine = True
    for tensor, mine in zip(tensors, held, strict=True):
        want = _filled(tensor, tensor.dst, rank, device)
        if mine is not None and want is not None:
            fine = fine and torch.equal(mine.view(torch.int16), want.view(torch.int16))
        del want
    if device == "cuda":
        torch.cuda.empty_cache()
    word = torch.tensor([float(fine)])
    dist.all_reduce(word, dist.ReduceOp.MIN)
    return bool(word)


def _copied(held: Locals, targets: Locals) -> float:
    """Seconds to copy a version into a server's memory: the longest of all ranks."""
    _sync_device(targets)
    start = time.monotonic()
    for mine, target in zip(held, targets, strict=True):
        if mine is not None and target is not None:
            target.copy_(mine)
    _sync_device(targets)
    return _latest(time.monotonic() - start)


def _copy_us(targets: Locals) -> float:
    """Microseconds to copy what servers get once, all of them at the same time; the least of three."""
    mine = [t for t in targets if t is not None]
    goals = [torch.empty_like(t) for t in mine]

    def copy() -> None:
        for goal, target in zip(goals, mine, strict=True):
            goal.copy_(target)
        _sync_device(targets)

    copy()
    return 1e6 * min(_timed(copy) for _ in range(3))


def _sync_device(tensors: Locals) -> None:
    if any(t is not None and t.is_cuda for t in tensors):
        torch.cuda.synchronize()


def _timed(run: Callable[[], object]) -> float:
    """Seconds from a beginning that all ranks agree on until the last has ended; ranks share a clock."""
    start = _latest(time.monotonic() + LEAD_S)
    time.sleep(max(0.0, start - time.monotonic()))
    run()
    return _latest(time.monotonic()) - start


def _latest(value: float) -> float:
    word = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(word, dist.ReduceOp.MAX)
    return float(word)


def _slowdown(sync: WeightSync, trains: bool, device: str) -> float:
    """How much longer a trainer's step takes while weights are sent; the worst of all ranks."""
    size = TRAINED[device] if trains else 1
    x = torch.ones(size, size, device=device)

    def steps(until: Callable[[int], bool]) -> float:
        start, count = time.monotonic(), 0
        while not until(count):
            x @ x
            _sync_device([x])
            count += 1
        return (time.monotonic() - start) / max(1, count)

    alone = 1.0
    if trains:
        steps(lambda count: count >= 2)
        alone = steps(lambda count: count >= STEPS)
    _latest(0.0)
    sending = sync.update_async()
    during = steps(lambda count: sending.done and count > 0) if trains else 1.0
    sending.wait()
    return _latest(during / alone)
