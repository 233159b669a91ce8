# SPDX-License-Identifier: Apache-2.0
"""`stretto weights run`: the weights of a model between real processes, beside what they cost without a plan."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist

from ...errors import InvalidInput
from ...weights.models import ModelShapes
from ...weights.parallel import ParallelDegrees
from .. import Layout, Tensor
from .describe import AnyTensor, TensorPart
from .plain import GatherBroadcast, PlainMessages
from .weights import STAGING_BYTES, WeightSync

SYSTEMS = ("stretto", "send_recv", "gather_broadcast")
LEAD_S = 0.05
"""Between agreeing on the beginning of a run and the beginning."""
TRAINED = 256
"""The width of the matrices that a trainer multiplies while weights are sent."""


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


def run_weights(
    model: ModelShapes, *, trainer: ParallelDegrees | str, server: ParallelDegrees | str, runs: int = 3,
    systems: Sequence[str] = SYSTEMS, staging_bytes: int = STAGING_BYTES,
) -> WeightRun:  # fmt: skip
    """Move a model's weights, in bf16, between the ranks of the default process group; all of them call this.

    Args:
        model: the tensors.
        trainer: the trainers' degrees; they are the first ranks, unless they say which.
        server: the servers' degrees; they are the next ranks.
        runs: how often each system runs for the clock, after one run whose bits are compared.
        systems: which of `SYSTEMS`.
        staging_bytes: the most bytes that a rank packs at a time.

    Returns:
        The measurements, the same on all ranks.

    Raises:
        InvalidInput: there are too few ranks, or degrees that do not fit.
    """
    for name in systems:
        if name not in SYSTEMS:
            raise InvalidInput(f"systems: {name!r} is none of {', '.join(SYSTEMS)}")
    tensors = placed_model(model, trainer, server, dist.get_world_size())
    me = dist.get_rank()
    sources = [_filled(t, t.src, me) for t in tensors]
    targets = [_empty(t, t.dst, me) for t in tensors]
    sync = WeightSync(_parts(tensors, sources, 0) or None, _parts(tensors, targets, 1) or None,
                      staging_bytes=staging_bytes)  # fmt: skip
    root, wanting = tensors[0].src.mesh.devices[0], {d for t in tensors for d in t.dst.mesh.devices}
    group = dist.new_group(sorted({root, *wanting}), backend="gloo")
    ways: dict[str, Callable[[], object]] = {
        "stretto": sync.update, "send_recv": PlainMessages(tensors, sources, targets),
        "gather_broadcast": GatherBroadcast(tensors, sources, targets, group),
    }  # fmt: skip
    found = []
    for name in systems:
        for target in targets:
            if target is not None:
                target.zero_()
        ways[name]()
        with sync.read() as weights:
            held = [weights[t.name] if target is not None else None for t, target in zip(tensors, targets, strict=True)]
            fine = _exact(tensors, held if name == "stretto" else targets, me)
            stopped = _copied(held, targets) if name == "stretto" else 0.0
        times = [_timed(ways[name]) for _ in range(runs)]
        stopped = stopped if name == "stretto" else median(times) if times else 0.0
        found.append(WeightTimes(system=name, exact=fine, times_s=tuple(times), stopped_s=stopped))
    slowdown = _slowdown(sync, any(s is not None for s in sources))
    made = WeightRun(
        model=model, nbytes=sum(t.nbytes for t in tensors), bound_us=sync.bound_us, predicted_us=sync.predicted_us,
        systems=tuple(found), slowdown=slowdown,
    )  # fmt: skip
    sync.close()
    dist.destroy_process_group(group)
    return made


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


def _filled(tensor: Tensor, side: Layout, rank: int) -> torch.Tensor | None:
    """A rank's part, of numbers that tell where in the whole tensor they belong."""
    tile = _tile(tensor, side, rank)
    if tile is None:
        return None
    value = torch.zeros((1,) * len(tile), dtype=torch.int64)
    for dim, (begin, end) in enumerate(tile):
        steps = torch.arange(begin, end) * (2 * dim + 1) * 7919
        value = value * 31 + steps.view([-1 if d == dim else 1 for d in range(len(tile))])
    # Of bf16 only bit patterns of ordinary numbers.
    return (value % (0x7F00)).to(torch.int16).view(torch.bfloat16).contiguous()


def _empty(tensor: Tensor, side: Layout, rank: int) -> torch.Tensor | None:
    tile = _tile(tensor, side, rank)
    return None if tile is None else torch.zeros([b - a for a, b in tile], dtype=torch.bfloat16)


def _exact(tensors: Sequence[Tensor], held: Sequence[torch.Tensor | None], rank: int) -> bool:
    """Whether all ranks have what they should."""
    fine = True
    for tensor, mine in zip(tensors, held, strict=True):
        want = _filled(tensor, tensor.dst, rank)
        if mine is not None and want is not None:
            fine = fine and torch.equal(mine.view(torch.int16), want.view(torch.int16))
    word = torch.tensor([float(fine)])
    dist.all_reduce(word, dist.ReduceOp.MIN)
    return bool(word)


def _copied(held: Sequence[torch.Tensor | None], targets: Sequence[torch.Tensor | None]) -> float:
    """Seconds to copy a version into a server's memory: the longest of all ranks."""
    start = time.monotonic()
    for mine, target in zip(held, targets, strict=True):
        if mine is not None and target is not None:
            target.copy_(mine)
    return _latest(time.monotonic() - start)


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


def _slowdown(sync: WeightSync, trains: bool) -> float:
    """How much longer a trainer's step takes while weights are sent; the worst of all ranks."""
    x = torch.ones(TRAINED, TRAINED) if trains else torch.ones(1, 1)

    def steps(until: Callable[[int], bool]) -> float:
        start, count = time.monotonic(), 0
        while not until(count):
            x @ x
            count += 1
        return (time.monotonic() - start) / max(1, count)

    alone = steps(lambda count: count >= 8) if trains else 1.0
    _latest(0.0)
    failed: list[BaseException] = []

    def update() -> None:
        try:
            sync.update()
        except BaseException as error:
            failed.append(error)

    sending = threading.Thread(target=update)
    sending.start()
    during = steps(lambda count: not sending.is_alive() and count > 0) if trains else 1.0
    sending.join()
    if failed:
        raise failed[0]
    return _latest(during / alone)
