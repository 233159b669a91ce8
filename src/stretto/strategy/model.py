# SPDX-License-Identifier: Apache-2.0
"""`ModelSpec`: the properties of a model that a strategy depends on: its trainable variables, and when each is used."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from functools import cached_property

import msgspec

from ..errors import InvalidInput, unknown

DTYPE_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
RUNTIMES = ("graph", "torch")
MAX_VARIABLES = 100_000
MAX_ELEMENTS = 1 << 50


@dataclass(frozen=True, kw_only=True)
class Variable:
    """A trainable parameter; `also` has further names of it (tied weights).

    `forward_us` and `backward_us` are the compute of the part of the model that the variable belongs to. The gradient
    of a `sparse` variable (an embedding) has about `rows` rows of the first axis per rank and step; a dense one has
    all.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    sparse: bool = False
    rows: int = 0
    forward_us: float = 0.0
    backward_us: float = 0.0
    also: tuple[str, ...] = ()
    factors: int = 0
    """Rows of the batch that make up a linear layer's gradient, which is the product of two matrices of that rank."""

    @property
    def elements(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole variable."""
        return self.elements * DTYPE_BYTES[self.dtype]

    @property
    def gradient_bytes(self) -> int:
        """Bytes of one rank's gradient; of a sparse one the touched rows and their 8-byte numbers."""
        if not self.sparse:
            return self.nbytes
        return self.rows * (self.nbytes // max(self.shape[0], 1) + 8)


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """The variables in the order in which the forward pass first uses them; the backward pass has the reverse order.

    >>> model = ModelSpec(name="two", variables=(Variable(name="w", shape=(4, 8)), Variable(name="b", shape=(8,))))
    >>> model.nbytes, model.variable("w").elements
    (160, 32)
    """

    name: str
    variables: tuple[Variable, ...]
    batch: int = 0
    runtime: str = "graph"
    """The runtime. ``graph`` (TensorFlow's): a forward pass takes each variable from its server when it needs it, and
    of a sparse table only the rows that it looks up. ``torch``: `optimizer.step()` ends when every rank has all
    variables, and ranks have a whole copy of each table, so all changed rows go to all ranks."""

    def __post_init__(self) -> None:
        if not self.variables:
            raise InvalidInput("variables: must not be empty: nothing is trained")
        if self.runtime not in RUNTIMES:
            raise InvalidInput(f"runtime: {unknown('runtime', self.runtime, RUNTIMES)}")
        if len(self.variables) > MAX_VARIABLES:
            raise InvalidInput(f"variables: at most {MAX_VARIABLES}, not {len(self.variables)}")
        seen: set[str] = set()
        for at, variable in enumerate(self.variables):
            where = f"variables[{at}] ({variable.name})"
            if variable.name in seen:
                raise InvalidInput(f"{where}.name: is there twice")
            seen.add(variable.name)
            if variable.dtype not in DTYPE_BYTES:
                raise InvalidInput(f"{where}.dtype: {unknown('dtype', variable.dtype, DTYPE_BYTES)}")
            if any(size < 1 for size in variable.shape) or variable.elements > MAX_ELEMENTS:
                raise InvalidInput(
                    f"{where}.shape: sizes must be > 0, {MAX_ELEMENTS} elements at most, not {variable.shape}"
                )
            if variable.sparse and not (variable.shape and 0 < variable.rows <= variable.shape[0]):
                raise InvalidInput(f"{where}.rows: must be 1..{variable.shape[0] if variable.shape else 0}")

    @cached_property
    def _by_name(self) -> dict[str, Variable]:
        return {variable.name: variable for variable in self.variables}

    def variable(self, name: str) -> Variable:
        """The variable with this name."""
        if name not in self._by_name:
            raise unknown("variable", name, self._by_name)
        return self._by_name[name]

    @property
    def nbytes(self) -> int:
        """Bytes of all variables."""
        return sum(variable.nbytes for variable in self.variables)

    @cached_property
    def digest(self) -> str:
        """A short hash of names, shapes, types and sparsity, which a strategy depends on; order
        and times are left out.
        """
        rows = sorted((v.name, v.shape, v.dtype, v.sparse) for v in self.variables)
        return hashlib.sha256(msgspec.json.encode(rows)).hexdigest()[:16]

    def __repr__(self) -> str:
        from ..units import format_bytes

        return f"<ModelSpec {self.name}: {len(self.variables)} variables, {format_bytes(self.nbytes)}>"
