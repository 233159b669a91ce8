# SPDX-License-Identifier: Apache-2.0
"""How trainers and servers divide a model: pipeline, tensor, expert and data parallelism, and FSDP2."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from math import gcd

from ..errors import InvalidInput, unknown
from ..resharding import Layout, Mesh, Spec
from ..resharding.placing import device_list
from .models import ModelShapes, ModelTensor

_MOST = 1 << 16


@dataclass(frozen=True, kw_only=True)
class ParallelDegrees:
    """The degrees of one side, which takes ``pp * dp * fsdp * tp`` devices, stage by stage, `tp` innermost.

    Expert parallelism lies over the devices of a stage: with `ep` > 1 every expert is whole on one of `ep` devices, and
    what is left of a stage holds copies, or with FSDP2 shards. With `ep` 1 experts are cut as other layers are.

    >>> side = ParallelDegrees.parse("pp=4,dp=32,ep=16")
    >>> side.size, str(side)
    (128, 'pp=4,dp=32,ep=16')
    """

    pp: int = 1
    dp: int = 1
    fsdp: int = 1
    tp: int = 1
    ep: int = 1
    devices: tuple[int, ...] = ()
    """The devices in order; empty takes the next free ones."""

    def __post_init__(self) -> None:
        for name in _DEGREES:
            if not 1 <= getattr(self, name) <= _MOST:
                raise InvalidInput(f"{name}: must be 1..{_MOST}, not {getattr(self, name)}")
        if self.stage % self.ep:
            raise InvalidInput(f"ep: {self.ep} does not divide the {self.stage} devices of a stage")
        if self.devices and len(self.devices) != self.size:
            raise InvalidInput(f"{self}: takes {self.size} devices, {len(self.devices)} are given")

    @classmethod
    def parse(cls, text: str) -> ParallelDegrees:
        """Read ``pp=4,dp=32,ep=16``, with devices ``tp=8,dp=8@64-127``."""
        degrees, _, where = text.strip().partition("@")
        found: dict[str, int] = {}
        for part in degrees.split(","):
            match = re.fullmatch(r"\s*([a-z]+)\s*=?\s*([0-9]{1,6})\s*", part)
            if match is None:
                raise InvalidInput(f"{text[:80]!r}: expected degrees such as fsdp=64 or pp=4,dp=32,ep=16")
            if match[1] not in _DEGREES:
                raise unknown("degree", match[1], _DEGREES)
            if match[1] in found:
                raise InvalidInput(f"{text[:80]!r}: names {match[1]} twice")
            found[match[1]] = int(match[2])
        return cls(**found, devices=device_list(where) if where else ())

    @property
    def stage(self) -> int:
        """The devices of one pipeline stage."""
        return self.dp * self.fsdp * self.tp

    @property
    def size(self) -> int:
        """The devices of all stages."""
        return self.pp * self.stage

    def __str__(self) -> str:
        return ",".join(f"{name}={getattr(self, name)}" for name in _DEGREES if getattr(self, name) > 1) or "tp=1"

    def stage_of(self, tensor: ModelTensor, model: ModelShapes) -> int:
        """The pipeline stage of a tensor: layers are divided evenly, the head is on the last stage."""
        if tensor.layer is not None:
            return tensor.layer * self.pp // model.num_layers
        return 0 if "embed" in tensor.name else self.pp - 1

    def layout(self, tensor: ModelTensor, stage: int) -> Layout:
        """The layout of one tensor of a stage."""
        devices = self.devices[stage * self.stage : (stage + 1) * self.stage]
        if tensor.role.startswith("expert") and self.ep > 1:
            return self._expert_layout(len(tensor.shape), devices)
        # Key-value heads are not cut: with more devices than heads several devices have the same head.
        parts = gcd(self.tp, tensor.heads) if tensor.role == "kv" else self.tp
        mesh = Mesh(shape=(self.dp, self.fsdp, parts, self.tp // parts), devices=devices)
        axes: list[tuple[int, ...]] = [() for _ in tensor.shape]
        by = {"column": 0, "kv": 0, "vocab": 0, "row": 1, "expert_column": 1, "expert_row": 2}.get(tensor.role)
        if by is not None and parts > 1:
            axes[by] = (2,)
        if self.fsdp > 1:
            axes[0] = (*axes[0], 1)
        return Layout(mesh=mesh, spec=Spec(axes=tuple(axes)))

    def _expert_layout(self, ndim: int, devices: tuple[int, ...]) -> Layout:
        """Experts over `ep`; FSDP2 cuts the rows of each expert over what is left of a stage, as torchtitan does."""
        rest = self.stage // self.ep
        shards = gcd(rest, self.fsdp)
        mesh = Mesh(shape=(rest // shards, shards, self.ep), devices=devices)
        axes: list[tuple[int, ...]] = [() for _ in range(ndim)]
        axes[0] = (2,)
        if shards > 1:
            axes[1] = (1,)
        return Layout(mesh=mesh, spec=Spec(axes=tuple(axes)))


_DEGREES = tuple(field.name for field in fields(ParallelDegrees) if field.name != "devices")
