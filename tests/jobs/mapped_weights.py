# SPDX-License-Identifier: Apache-2.0
"""Drawn models between drawn trainers (pipeline stages, FSDP2, tensor and expert parallel) and servers (tensor and
expert parallel, copies), with a mapping; the judge cuts every server's tensor out of whole ones by hand.
"""

from __future__ import annotations

import random
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from stretto.resharding.tensors.describe import TensorPart
from stretto.resharding.tensors.mapped import MappedSync
from stretto.weights import WeightMapping

WIDTH, INNER, EXPERTS, VOCABULARY, PADDED, BLOCK, LAYERS = 12, 24, 6, 50, 60, 4, 2
RULES = [
    {"to": "l.{n}.qkv", "from": ["l.{n}.q", "l.{n}.k", "l.{n}.v"], "concat": 0, "sizes": [2, 1, 1]},
    {"to": "l.{n}.w13", "from": ["l.{n}.e.{e}.gate", "l.{n}.e.{e}.up"], "concat": 0, "sizes": [1, 1], "stack": True},
    {"to": "l.{n}.w2", "from": "l.{n}.e.{e}.down", "stack": True, "transpose": True},
    {"to": "l.{n}.o", "from": "l.{n}.out", "transpose": True},
    {"to": "l.{n}.small", "from": "l.{n}.big", "scale": "l.{n}.small_scale", "block": BLOCK},
    {"to": "vocabulary", "from": "embed", "rows": VOCABULARY},
    {"to": "head", "from": "embed", "rows": VOCABULARY},
]
MAPPING = WeightMapping.parse(
    {"version": 1, "kind": "weight_mapping", "ignore": ["*.inv_freq"], "rules": RULES}
)  # fmt: skip


def shapes() -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {"embed": (VOCABULARY, WIDTH), "norm": (WIDTH,)}
    for n in range(LAYERS):
        found |= {f"l.{n}.q": (2 * WIDTH, WIDTH), f"l.{n}.k": (WIDTH, WIDTH), f"l.{n}.v": (WIDTH, WIDTH)}
        found |= {f"l.{n}.out": (WIDTH, INNER), f"l.{n}.big": (INNER, INNER), f"l.{n}.inv_freq": (4,)}
        for e in range(EXPERTS):
            found |= {f"l.{n}.e.{e}.{half}": (INNER, WIDTH) for half in ("gate", "up")}
            found[f"l.{n}.e.{e}.down"] = (WIDTH, INNER)
    return found


def whole(version: int, device: str) -> dict[str, torch.Tensor]:
    """All tensors of a version, the same on every rank."""
    made = torch.Generator().manual_seed(version)
    return {name: torch.randn(shape, generator=made).bfloat16().to(device) for name, shape in shapes().items()}


class DrawnSync:
    """One drawn pair of sides, the same on all ranks."""

    def __init__(self, seed: int, device: str) -> None:
        self.rng, self.device, self.rank, size = random.Random(seed), device, dist.get_rank(), dist.get_world_size()
        rng = self.rng
        first = rng.randint(1, size - 1)
        self.trainers, self.servers = list(range(first)), list(range(first, size))
        stages = rng.choice([1, 2]) if first > 1 else 1
        self.stages = [self.trainers[at * first // stages : (at + 1) * first // stages] for at in range(stages)]
        self.expert_parallel = rng.random() < 0.6
        self.cuts = {name: rng.choice([None, *range(len(shape))]) for name, shape in shapes().items()}
        self.whole = False
        ways = len(self.servers)
        grids = [(ways,)] + ([(2, ways // 2)] if ways % 2 == 0 else [])
        self.grid = rng.choice(grids)
        kinds = {"qkv": [None, 0, 1], "w13": [None, 0, 1, 2], "w2": [None, 0, 1, 2], "o": [None, 0, 1]}
        kinds |= {"small": [None, 0, 1], "vocabulary": [None, 0], "head": [None, 0, 1], "norm": [None]}
        self.ways: dict[str, list[int | None]] = {}
        for kind, dims in kinds.items():
            how = [rng.choice(dims) for _ in self.grid]
            # Blocks of scales and experts are not cut twice over here; 24 rows in shards of whole blocks.
            if kind == "small" and self.grid != (2,) and self.grid != (3,):
                how = [None for _ in self.grid]
            self.ways[kind] = how

    def source(self, version: int) -> dict[str, torch.Tensor] | None:
        if self.rank not in self.trainers:
            return None
        full, found = whole(version, self.device), {}
        for at, (name, tensor) in enumerate(full.items()):
            layer = int(name.split(".")[1]) if name.startswith("l.") else LAYERS - 1 if name == "norm" else 0
            stage = self.stages[layer * len(self.stages) // LAYERS]
            if self.rank not in stage:
                continue
            if ".e." in name and self.expert_parallel:
                if stage[at // 3 % len(stage)] == self.rank:
                    found[name] = tensor
                continue
            cut = self.cuts[name]
            mesh = DeviceMesh(self.device, stage, _init_backend=False)
            found[name] = distribute_tensor(
                tensor, mesh, [Replicate() if cut is None else Shard(cut)], src_data_rank=None
            )  # fmt: skip
        return found

    def sliced(self, kind: str, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's part as DTensor cuts, perhaps an empty one."""
        if self.whole:
            return tensor
        at = (torch.tensor(self.servers).view(self.grid) == self.rank).nonzero()[0].tolist()
        for axis, dim in enumerate(self.ways[kind]):
            if dim is not None:
                size = -(-tensor.shape[dim] // self.grid[axis])
                begin = min(size * at[axis], tensor.shape[dim])
                tensor = tensor.narrow(dim, begin, min(size, tensor.shape[dim] - begin))
        return tensor

    def expected(self, version: int) -> dict[str, torch.Tensor]:
        """This rank's tensors of a version, cut out of whole ones."""
        full = whole(version, self.device)
        padded = torch.cat([full["embed"], full["embed"].new_zeros(PADDED - VOCABULARY, WIDTH)])
        found = {kind: self.sliced(kind, padded) for kind in ("vocabulary", "head")}
        found["norm"] = full["norm"]
        for n in range(LAYERS):
            pieces = [self.sliced("qkv", full[f"l.{n}.{which}"]) for which in "qkv"]
            found[f"l.{n}.qkv"] = torch.cat(pieces)
            stacks = {
                half: torch.stack([full[f"l.{n}.e.{e}.{half}"] for e in range(EXPERTS)])
                for half in ("gate", "up", "down")
            }
            found[f"l.{n}.w13"] = torch.cat([self.sliced("w13", stacks[half]) for half in ("gate", "up")], dim=1)
            found[f"l.{n}.w2"] = self.sliced("w2", stacks["down"].transpose(1, 2))
            found[f"l.{n}.o"] = self.sliced("o", full[f"l.{n}.out"].t())
            big = self.sliced("small", full[f"l.{n}.big"]).float()
            rows, columns = big.shape[0] // BLOCK, big.shape[1] // BLOCK
            blocks = big.view(rows, BLOCK, columns, BLOCK)
            scales = blocks.abs().amax((1, 3)) / torch.finfo(torch.float8_e4m3fn).max
            found[f"l.{n}.small_scale"] = scales
            found[f"l.{n}.small"] = (blocks / scales[:, None, :, None]).view(big.shape).to(torch.float8_e4m3fn)
        return {name: tensor.contiguous() for name, tensor in found.items()}

    def target(self) -> dict[str, Any] | None:
        if self.rank not in self.servers:
            return None
        found = {}
        self.whole = True
        shapes = {name: value.shape for name, value in self.expected(0).items()}
        self.whole = False
        for name, value in self.expected(0).items():
            kind = name.split(".")[-1].removesuffix("_scale")
            placements = ["R" if dim is None else f"S({dim})" for dim in self.ways[kind]]
            found[name] = TensorPart.of(
                torch.empty_like(value), ranks=self.servers, mesh_shape=self.grid, placements=placements,
                shape=shapes[name],
            )  # fmt: skip
        return found


def mapped(seed: int, device: str) -> Any:
    """Versions of drawn models through a mapping; returns what is wrong."""
    wrong: list[Any] = []
    for trial in range(4):
        drawn = DrawnSync(1000 * seed + trial, device)
        source = drawn.source(1)
        with MappedSync(source, drawn.target(), mapping=MAPPING, staging_bytes=60_000) as sync:
            for version in (1, 2):
                for name, tensor in (drawn.source(version) or {}).items():
                    mine: Any = (source or {})[name]
                    new: Any = tensor
                    (mine.to_local() if hasattr(mine, "to_local") else mine).copy_(
                        new.to_local() if hasattr(new, "to_local") else new
                    )
                sync.update(checksums=version == 2)
                if drawn.rank in drawn.servers:
                    want = drawn.expected(version)
                    with sync.read() as weights:
                        same = {
                            name: torch.equal(weights[name].view(torch.uint8), value.view(torch.uint8))
                            for name, value in want.items()
                        }
                    wrong += [[trial, version, name] for name, fine in same.items() if not fine]
    return {"wrong": wrong}
