# SPDX-License-Identifier: Apache-2.0
"""What the training examples share: the command line, and how they join and leave their job."""

import argparse
import sys

import torch
import torch.distributed as dist


def arguments(text: str | None) -> argparse.ArgumentParser:
    """The options that every example has."""
    parser = argparse.ArgumentParser(description=text)
    parser.add_argument("--backend", choices=["gloo", "stretto"], default="stretto")
    parser.add_argument("--iterations", type=int, default=10)
    parser.add_argument("--batch", type=int, default=8, help="samples of each rank")
    parser.add_argument("--width", type=int, default=128, help="of the model's layers")
    parser.add_argument("--shuffle", type=int, default=0, help="deal the data out in another order, by this seed")
    parser.add_argument("--choices", action="store_true", help="print which program ran for which calls")
    return parser


def join(backend: str) -> None:
    """Join the job that torchrun (or the lab) has set up in the environment."""
    if backend == "stretto":
        import stretto.torch  # noqa: F401  registers the backend
    torch.set_num_threads(1)
    dist.init_process_group(backend)
    torch.manual_seed(0)


def leave(choices: bool) -> None:
    """End the job, after the model has gone: a DDP model that outlives its group may wait for gloo for ever."""
    if choices and dist.get_rank() == 0 and dist.get_backend() == "stretto":
        print(*sys.modules["stretto.torch"].choices(), sep="\n")
    dist.barrier()
    dist.destroy_process_group()
