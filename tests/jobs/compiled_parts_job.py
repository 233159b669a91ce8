# SPDX-License-Identifier: Apache-2.0
"""A model under DDP, compiled in parts, of which each loses PyTorch's flag for a first call on fake tensors.

``compiled_parts_job.py [with]``: with Stretto's backend loaded, or without. The flag goes where a guard of the part
before dies late. Says how many parts there were; a part that is called with fake tensors ends it.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C import _distributed_c10d as c10d
from torch._dynamo.backends.common import aot_autograd
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import FakeTensor

WIDTH = 600
PARTS: list[int] = []


class Net(nn.Module):
    """Three layers, each larger than a bucket."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One behind the other."""
        out: torch.Tensor = self.c(self.b(self.a(x).relu()).relu()).relu()
        return out


def compiler(graph: Any, inputs: Any) -> Any:
    """As Inductor: says the strides of outputs (it leaves them open), and its code needs memory."""
    context = TracingContext.try_get()
    if context is not None and context.output_strides is not None:
        outputs: Any = list(graph.graph.nodes)[-1].args[0]
        context.output_strides.extend([None] * len(outputs))

    def code(given: list[Any]) -> Any:
        assert not any(isinstance(one, FakeTensor) for one in given), "cannot access data pointer"
        return graph(*given)

    code._boxed_call = True  # type: ignore[attr-defined]
    return code


def backend(graph: Any, inputs: Any) -> Any:
    """A part."""
    PARTS.append(len(inputs))
    TracingContext.get().fakify_first_call = False
    return aot_autograd(fw_compiler=compiler)(graph, inputs)


def main() -> None:
    """Train for two steps, and compare with what is not compiled."""
    torch.set_num_threads(1)
    if "with" in sys.argv:
        import stretto.torch  # noqa: F401
    dist.init_process_group("gloo", store=c10d.HashStore(), rank=0, world_size=1)
    torch.manual_seed(0)
    net = nn.parallel.DistributedDataParallel(Net(), bucket_cap_mb=1)
    compiled: Any = torch.compile(net, backend=backend)
    for _ in range(2):
        x = torch.randn(4, WIDTH)
        found = compiled(x)
        assert torch.equal(found, net.module(x))
        found.sum().backward()
    print("parts", len(PARTS))


if __name__ == "__main__":
    main()
