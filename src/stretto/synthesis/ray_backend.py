"""Tasks on a Ray cluster: the cluster that this process is connected to, one at an address, or a local one.

A task is a Ray generator of the messages that a worker process would write to its pipe. Each task runs in a Ray worker
that does nothing else before or after, so that the libraries of one maker (HiGHS, for example) never meet those of
another. The nodes of a cluster need this package, in the same version.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import shutil
import socket
import tempfile
import threading
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from ..errors import InvalidInput
from .attempts import Attempt
from .worker import Message, Start, Tell, work

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
def connected(*, jobs: int, address: str | None = None) -> Iterator[Start]:
    """Connect to Ray: the cluster of this process if there is one, else the one at the address, else a local one.

    The address is `address` or ``$RAY_ADDRESS``. A Ray that was started or connected here is shut down in the end.
    """
    given = address or os.environ.get(ADDRESS) or "local"
    check_installed(given)
    with _environment(LOCAL if given == "local" else {}):
        ray = _ray()
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
        yield _RayTask
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


def _ray() -> Any:
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


class _RayTask:
    """A task on the Ray cluster (an `ActiveTask`)."""

    def __init__(self, request: bytes, tell: Tell) -> None:
        ray = _ray()
        # Each Ray worker serves one call, and a call is not retried: a task that was ended stays ended.
        remote = ray.remote(num_cpus=1, max_calls=1, max_retries=0)(_messages)
        self.stream = remote.remote(request)
        self.failure = "its Ray task ended without a result"
        threading.Thread(target=self._listen, args=(tell,), daemon=True).start()

    def end(self) -> None:
        ray = _ray()
        with contextlib.suppress(ray.exceptions.RayError):
            ray.cancel(self.stream, force=True)

    def reason(self) -> str:
        return self.failure

    def _listen(self, tell: Tell) -> None:
        ray = _ray()
        last: Message = None
        try:
            for item in self.stream:
                last = ray.get(item)
                tell(last)
        except Exception as error:  # This includes errors of the task itself, such as a node without this package.
            cause = getattr(error, "cause", None) or error
            self.failure = f"its Ray task failed: {type(cause).__name__}: {' '.join(str(cause).split())[:200]}"
        if last is None or isinstance(last, str):
            tell(None)


def _messages(request: bytes) -> Iterator[str | Attempt]:
    """The generator that runs on the cluster: it yields lines of progress, and then the result."""
    said: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def run() -> None:
        try:
            said.put(work(request, said.put))
        except BaseException as error:
            said.put(error)

    threading.Thread(target=run, daemon=True).start()
    while isinstance(message := said.get(), str):
        yield message
    if isinstance(message, BaseException):
        raise message
    yield message
