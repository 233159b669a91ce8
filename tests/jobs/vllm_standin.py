# SPDX-License-Identifier: Apache-2.0
"""The parts of vLLM's and verl's interfaces that the plug-ins use, for machines without the packages: our own words.

`plugins_job.py` takes the real packages where they can be imported.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import torch


@dataclass
class Info:
    pass


@dataclass
class TrainerInfo:
    backend: ClassVar[str]
    rank: int = field(kw_only=True)

    @property
    def is_sender(self) -> bool:
        return self.rank == 0


class Worker:
    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        self.config, self.device, self.model = config, device, model
        self.parallel_config, self.model_config = vllm_config.parallel_config, vllm_config.model_config

    def parse_init_info(self, given: dict[str, Any]) -> Any:
        return self.init_info_cls(**given)  # type: ignore[attr-defined]

    def parse_update_info(self, given: dict[str, Any]) -> Any:
        return self.update_info_cls(**given)  # type: ignore[attr-defined]


class Trainer:
    def __init__(self, *, client: Any, source: Any = None, is_sender: bool = True, rank: int = 0) -> None:
        self.client, self.source, self.is_sender, self.rank = client, source, is_sender, rank


@dataclass(frozen=True)
class Meta:
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    owners: tuple[int, ...] | None = None
    mesh_shape: tuple[int, ...] | None = None
    placements: tuple[Any, ...] | None = None


class ModuleSource:
    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module

    @cached_property
    def metadata(self) -> list[Meta]:
        found = []
        for name, p in self._module.named_parameters():
            mesh: Any = getattr(p, "device_mesh", None)
            more = {}
            if mesh is not None:
                cut: Any = p
                more = {"owners": tuple(mesh.mesh.flatten().tolist()), "mesh_shape": tuple(mesh.mesh.shape)}
                more["placements"] = tuple(cut.placements)
            found.append(Meta(name, p.dtype, tuple(p.shape), **more))
        return found

    def implements_iter_local(self) -> bool:
        return True

    def iter_local(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, p in self._module.named_parameters():
            yield name, p.to_local() if hasattr(p, "to_local") else p


def factory() -> type:
    class Factory:
        _registry: ClassVar[dict[str, tuple[str, str]]] = {}

        @classmethod
        def register_engine(cls, name: str, module: str, kind: str) -> None:
            cls._registry[name] = (module, kind)

        @classmethod
        def _kind(cls, name: str) -> Any:
            module, kind = cls._registry[name]
            return getattr(__import__(module, fromlist=[kind]), kind)

        @classmethod
        def create_engine(cls, config: Any, vllm_config: Any, device: Any, model: Any) -> Any:
            return cls._kind(config.backend)(config, vllm_config, device, model)

        @classmethod
        def trainer_init(cls, init_info: Any, *, client: Any, source: Any = None) -> Any:
            return cls._kind(init_info.backend).trainer_init(init_info=init_info, client=client, source=source)

    return Factory


@dataclass
class Chunk:
    name: str
    shape: torch.Size
    dtype: torch.dtype
    chunk_offset: int
    chunk_size: int
    offset: int


class Registry:
    kinds: ClassVar[dict[str, Any]] = {}

    @staticmethod
    def register(name: str) -> Any:
        return lambda kind: Registry.kinds.setdefault(name, kind)

    @classmethod
    def new(cls, name: str, *args: Any, **more: Any) -> Any:
        return cls.kinds[name](*args, **more)


async def merged(chunks: Any, bucket_size: int) -> Any:
    whole: Any = None
    async for meta, chunk in chunks:
        if whole is None:
            whole = torch.empty(meta.shape, dtype=meta.dtype)
        flat = whole.view(-1).view(torch.uint8)
        flat[meta.chunk_offset : meta.chunk_offset + meta.chunk_size] = chunk
        if meta.chunk_offset + meta.chunk_size == len(flat):
            yield meta.name, whole
            whole = None


async def each(pairs: Any) -> Any:
    for pair in pairs:
        yield pair


def install(package: str) -> None:
    """Put a stand-in of one package into `sys.modules`."""
    parts: dict[str, dict[str, Any]] = {
        "vllm.distributed.weight_transfer.base": {
            "TrainerInitInfo": TrainerInfo, "TrainerWeightTransferEngine": Trainer, "WeightTransferEngine": Worker,
            "WeightTransferInitInfo": Info, "WeightTransferUpdateInfo": Info, "ModuleSource": ModuleSource,
        },
        "vllm.distributed.weight_transfer.factory": {
            "WeightTransferEngineFactory": factory(), "WeightTransferTrainerFactory": factory(),
        },
        "verl.checkpoint_engine.base": {
            "CheckpointEngine": type("CheckpointEngine", (), {}), "CheckpointEngineRegistry": Registry,
            "TensorMeta": Chunk, "merge_weight_chunks": merged,
        },
        "verl.workers.rollout.utils": {"ensure_async_iterator": each},
    }  # fmt: skip
    for name, inside in parts.items():
        words = name.split(".")
        if words[0] != package:
            continue
        for length in range(1, len(words) + 1):
            sys.modules.setdefault(".".join(words[:length]), types.ModuleType(".".join(words[:length])))
        for key, value in inside.items():
            setattr(sys.modules[name], key, value)
