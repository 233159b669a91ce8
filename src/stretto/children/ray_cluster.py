# SPDX-License-Identifier: Apache-2.0
"""Ray: the cluster that this process is connected to, one at an address, or a local one for a while."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from ..errors import InvalidInput

ADDRESS = "RAY_ADDRESS"
STORE_BYTES = 256 << 20
"""The size of a local Ray's object store, which holds results on their way from its workers."""
CONNECT_S = 5.0
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
"""The first bytes that a client sends to a gRPC service such as Ray's head, which answers with a SETTINGS frame: nine
bytes of which the fourth is 4."""
LONGEST_ROOT = 40
LOCAL = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # With this setting Ray listens on the loopback device only, which it otherwise does on Windows and macOS only.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
}
"""The environment variables that a local Ray is started with."""
REMOTE = {
    # A host that vanishes says nothing. By default Ray takes seven minutes to give up what was sent there.
    "RAY_grpc_client_keepalive_time_ms": "10000",
    "RAY_grpc_client_keepalive_timeout_ms": "10000",
}
"""The environment variables with which this process connects to a Ray elsewhere."""

log = logging.getLogger(__name__)


def check_installed(address: str | None) -> None:
    """Raise `InvalidInput` where Ray is not installed, or cannot serve at this address."""
    if find_spec("ray") is None:
        raise InvalidInput("backend ray: Ray is not installed; pip install 'stretto[ray]'")
    if address is not None and address.startswith("ray://"):
        raise InvalidInput(
            f"ray_address: {address} is for Ray's client, which cannot stream; use HOST:PORT of the head node"
        )


@contextlib.contextmanager
def connected(*, jobs: int, address: str | None = None) -> Iterator[Any]:
    """Connect to Ray: the cluster of this process if there is one, else the one at the address, else a local one.

    The address is `address` or ``$RAY_ADDRESS``. A Ray that was started or connected here is shut down in the end.
    Yields the module `ray`.
    """
    given = address or os.environ.get(ADDRESS) or "local"
    check_installed(given)
    with _environment(LOCAL if given == "local" else REMOTE):
        ray = ray_module()
        mine = not ray.is_initialized()
        folder: str | None = None
        if mine:
            options: dict[str, Any] = {}
            if given != "local":
                _check_listening(given)
            else:
                folder = _own_folder()
                options = {"num_cpus": jobs, "include_dashboard": False, "object_store_memory": STORE_BYTES}
                options |= {"_node_ip_address": "127.0.0.1", "_temp_dir": folder}
            try:
                _begin(ray, given, options)
            except Exception as error:  # Ray raises no special exception when one of its processes is slow.
                _remove(folder)
                line = " ".join(str(error).split())[:200]
                raise InvalidInput(f"ray_address: cannot use Ray at {given}: {line}") from None
            node = ray.util.get_node_ip_address()
            if given == "local" and not node.startswith("127."):
                log.warning("Ray was imported before stretto.synthesize and listens at %s, not only locally", node)
        elif address is not None:
            log.warning("ray_address %s is not used: this process is connected to a Ray already", address)
    try:
        yield ray
    finally:
        if mine:
            ray.shutdown()
        _remove(folder)


def _begin(ray: Any, address: str, options: dict[str, Any]) -> None:
    """Start a local Ray, or connect to one; starting a local one is tried twice, as it fails on a busy machine."""
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **options)
    except Exception:
        ray.shutdown()
        if address != "local":
            raise
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **options)


def _own_folder() -> str:
    """Make a folder for a local Ray's logs and sockets; its path is short, as the paths of sockets must be."""
    root = tempfile.gettempdir()
    return tempfile.mkdtemp(prefix="stretto-ray-", dir=root if len(root) <= LONGEST_ROOT else "/tmp")


def _remove(folder: str | None) -> None:
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)


def _check_listening(address: str) -> None:
    """Refuse an address at which no Ray answers: Ray itself would try to connect for many minutes."""
    host, _, port = address.rpartition(":")
    if not (port.isascii() and port.isdigit()):
        return  # The address is "auto".
    try:
        with socket.create_connection((host, int(port)), timeout=CONNECT_S) as connection:
            connection.sendall(PREFACE)
            answer = connection.recv(9)
    except TimeoutError:
        answer = b""
    except (OSError, OverflowError) as error:
        raise InvalidInput(f"ray_address: nothing answers at {address}: {error}") from None
    if answer[3:4] != b"\4":
        raise InvalidInput(f"ray_address: what listens at {address} is not Ray")


def ray_module() -> Any:
    """The module `ray`, as Any: its type annotations do not know tasks that stream."""
    return import_module("ray")


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """Set environment variables that are not set already, for the time of a with statement."""
    fresh = {key: value for key, value in values.items() if key not in os.environ}
    os.environ.update(fresh)
    try:
        yield
    finally:
        for key in fresh:
            os.environ.pop(key, None)
