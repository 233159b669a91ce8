# SPDX-License-Identifier: Apache-2.0
"""The kernel for one element type and operation: compiled by NVRTC, kept on disk, loaded into the CUDA context."""

from __future__ import annotations

import ctypes
import hashlib
import os
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any

from ...errors import InvalidInput, StrettoError, unknown
from ...files import cache_directory
from .encode import ELEMENT_BYTES, HEADER_WORDS, INLINE_WORDS, MAX_RANKS, QUIET_RANKS, REDUCTIONS

SOURCES = tuple(Path(__file__).with_name(f"{name}.cu") for name in ("kernel", "kernel_packets", "kernel_ends"))
"""Compiled as one text, in this order."""
ELEMENTS = {
    "float32": "float", "float16": "Half", "bfloat16": "Brain", "float64": "double", "int8": "signed char",
    "int16": "short", "int32": "int", "int64": "long long", "uint8": "unsigned char", "bool": "Truth",
}  # fmt: skip


class GpuLimits(ctypes.Structure):
    """How waits end; `Limits` in kernel.cu."""

    _fields_ = [
        ("abort", ctypes.c_uint64), ("host_abort", ctypes.c_uint64), ("report", ctypes.c_uint64),
        ("limit_ns", ctypes.c_uint64), ("number", ctypes.c_uint32), ("seed", ctypes.c_uint32),
    ]  # fmt: skip


class GpuParams(ctypes.Structure):
    """The kernel's one argument; `Params` in kernel.cu."""

    _fields_ = [
        ("limits", GpuLimits), ("stream", ctypes.c_uint64), ("state", ctypes.c_uint64),
        ("memory", ctypes.c_uint64 * MAX_RANKS), ("input", ctypes.c_uint64 * MAX_RANKS),
        ("output", ctypes.c_uint64 * MAX_RANKS), ("slots_at", ctypes.c_uint64), ("packets_at", ctypes.c_uint64),
        ("block_slots", ctypes.c_uint64), ("block_packets", ctypes.c_uint64), ("slot_bytes", ctypes.c_uint32),
        ("packet_bytes", ctypes.c_uint32), ("words", ctypes.c_uint32), ("unused", ctypes.c_uint32),
        ("header", ctypes.c_int32 * HEADER_WORDS), ("heard", ctypes.c_int32 * MAX_RANKS),
        ("inlined", ctypes.c_int32 * INLINE_WORDS),
    ]  # fmt: skip


class PacketParams(ctypes.Structure):
    """The parameters of the kernel for programs of packets alone; `PacketParams` in kernel_packets.cu."""

    _fields_ = [
        ("limits", GpuLimits), ("state", ctypes.c_uint64), ("memory", ctypes.c_uint64 * QUIET_RANKS),
        ("input", ctypes.c_uint64), ("output", ctypes.c_uint64), ("packets_at", ctypes.c_uint64),
        ("block_packets", ctypes.c_uint64), ("slot_bytes", ctypes.c_uint32), ("packet_bytes", ctypes.c_uint32),
        ("rank", ctypes.c_int32), ("ranks", ctypes.c_int32), ("rounds", ctypes.c_int32), ("steps", ctypes.c_int32),
        ("pending", ctypes.c_int32), ("unused", ctypes.c_int32), ("stream", ctypes.c_int32 * INLINE_WORDS),
    ]  # fmt: skip


class EndParams(ctypes.Structure):
    """The parameters of the kernel for programs whose ranks meet at both ends alone; `EndParams` in kernel_ends.cu."""

    _fields_ = [
        ("limits", GpuLimits), ("state", ctypes.c_uint64), ("memory", ctypes.c_uint64 * QUIET_RANKS),
        ("input", ctypes.c_uint64 * QUIET_RANKS), ("output", ctypes.c_uint64 * QUIET_RANKS),
        ("slot_bytes", ctypes.c_uint32), ("rank", ctypes.c_int32), ("ranks", ctypes.c_int32),
        ("steps", ctypes.c_int32), ("ready", ctypes.c_int32), ("tell_ready", ctypes.c_int32),
        ("done", ctypes.c_int32), ("tell_done", ctypes.c_int32), ("stream", ctypes.c_int32 * INLINE_WORDS),
    ]  # fmt: skip


KernelParams = GpuParams | PacketParams | EndParams
"""Arguments of the interpreter; other kernels have their own."""


@lru_cache
def kernel_source() -> str:
    """The kernel's text."""
    return "\n".join(path.read_text() for path in SOURCES)


def kernel_options(dtype: str, reduce: str, shapes: int, *, delays: bool = False) -> list[str]:
    """What the compiler is told of an element type and an operation.

    Args:
        dtype: An element type, as PyTorch names it.
        reduce: An operation.
        shapes: What programs need; see `kernel_shapes`.
        delays: Whether steps wait for random times, to shake out races.

    Returns:
        The options.

    Raises:
        InvalidInput: The type or the operation is not known.
    """
    if dtype not in ELEMENT_BYTES:
        raise unknown("dtype", dtype, ELEMENT_BYTES)
    if reduce not in REDUCTIONS:
        raise unknown("reduce", reduce, REDUCTIONS)
    options = [f"-DSTRETTO_ELEMENT={ELEMENTS[dtype]}", f"-DSTRETTO_OPERATION={reduce.upper()}"]
    options += [f"-DSTRETTO_SHAPES={shapes}", "--std=c++17"]
    return [*options, "-DSTRETTO_DELAYS"] if delays else options


def compiled(dtype: str, reduce: str, shapes: int, capability: tuple[int, int], *, delays: bool = False) -> bytes:
    """The kernel as a cubin, from the cache where it is there.

    Args:
        dtype: An element type, as PyTorch names it.
        reduce: An operation.
        shapes: What programs need; see `kernel_shapes`.
        capability: The GPU's compute capability.
        delays: Whether steps wait for random times.

    Returns:
        The cubin.

    Raises:
        StrettoError: NVRTC is not found, or does not compile the kernel.
    """
    options = [f"--gpu-architecture=sm_{capability[0]}{capability[1]}"]
    return cached_cubin(kernel_source(), options + kernel_options(dtype, reduce, shapes, delays=delays))


def cached_cubin(source: str, options: list[str]) -> bytes:
    """Compile CUDA code to a cubin, or take it from the cache.

    Args:
        source: The code.
        options: Options of NVRTC.

    Returns:
        The cubin.

    Raises:
        StrettoError: NVRTC is not found, or does not compile the code.
    """
    library = nvrtc()
    major, minor = ctypes.c_int(), ctypes.c_int()
    library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    key = hashlib.sha256("\0".join([source, *options, f"{major.value}.{minor.value}"]).encode()).hexdigest()
    file = cache_directory() / "gpu" / f"{key[:32]}.cubin"
    if file.is_file():
        return file.read_bytes()
    cubin = compile_cubin(library, source, options)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=file.parent, delete=False) as part:
            part.write(cubin)
        os.replace(part.name, file)
    except OSError:
        pass  # A cache that cannot be written costs a second per process, and nothing else.
    return cubin


def compile_cubin(library: ctypes.CDLL, source: str, options: list[str]) -> bytes:
    """Compile CUDA code with NVRTC.

    Args:
        library: NVRTC.
        source: The code.
        options: Options of NVRTC.

    Returns:
        The cubin.

    Raises:
        StrettoError: NVRTC does not compile it; the message has its log.
    """
    program = ctypes.c_void_p()
    _nvrtc_check(library, library.nvrtcCreateProgram(
        ctypes.byref(program), source.encode(), b"kernel.cu", 0, None, None))  # fmt: skip
    try:
        texts = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        failed = library.nvrtcCompileProgram(program, len(options), texts)
        size = ctypes.c_size_t()
        if failed:
            library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
            log = ctypes.create_string_buffer(size.value)
            library.nvrtcGetProgramLog(program, log)
            raise StrettoError(f"NVRTC does not compile the kernel: {log.value.decode(errors='replace')[:2000]}")
        _nvrtc_check(library, library.nvrtcGetCUBINSize(program, ctypes.byref(size)))
        cubin = ctypes.create_string_buffer(size.value)
        _nvrtc_check(library, library.nvrtcGetCUBIN(program, cubin))
        return cubin.raw
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _nvrtc_check(library: ctypes.CDLL, result: int) -> None:
    if result:
        library.nvrtcGetErrorString.restype = ctypes.c_char_p
        raise StrettoError(f"NVRTC: {library.nvrtcGetErrorString(result).decode()}")


@lru_cache
def nvrtc() -> ctypes.CDLL:
    """NVRTC as it comes with PyTorch, else the system's."""
    import torch

    version = (torch.version.cuda or "13").split(".")[0]
    tried = [f"libnvrtc.so.{version}", "libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"]
    for name in tried:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise InvalidInput(
        f"GPU programs need NVRTC, which comes with PyTorch for CUDA; none of {', '.join(tried)} is found"
    )


@lru_cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _check(result: int) -> None:
    if result:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(result, ctypes.byref(text))
        raise StrettoError(f"CUDA: {(text.value or b'unknown error').decode()}")


class GpuKernel:
    """A loaded kernel; `launch` puts it on a stream."""

    def __init__(self, cubin: bytes) -> None:
        module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        _check(_driver().cuModuleLoadData(ctypes.byref(module), cubin))
        _check(_driver().cuModuleGetFunction(ctypes.byref(self._function), module, b"stretto_run"))

    def launch(self, params: ctypes.Structure, *, blocks: int, threads: int, stream: Any) -> None:
        """Start the kernel on a CUDA stream (its handle).

        Args:
            params: The kernel's argument; it is copied.
            blocks: The number of blocks.
            threads: The threads of a block.
            stream: The handle of a CUDA stream.

        Raises:
            StrettoError: CUDA refuses the launch.
        """
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(params))
        stream = ctypes.c_void_p(int(stream))
        _check(_driver().cuLaunchKernel(self._function, blocks, 1, 1, threads, 1, 1, 0, stream, pointers, None))
