# SPDX-License-Identifier: Apache-2.0
"""How ranks reach the controller: unary gRPC calls over a Unix socket or TCP, with a token always and mTLS on demand.

The controller never calls a rank. A call has a deadline and a bounded size; a controller that is not there, or answers
nonsense, is `PeerLost` or `InvalidInput` to the caller and never more than that.
"""

from __future__ import annotations

import contextlib
import fcntl
import hmac
import ipaddress
import os
import secrets
import socket
import stat
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import InvalidInput, PeerLost
from ..files import read_text
from ..process_state import STATE, ProcessPart
from .messages import MAX_MESSAGE_BYTES

SERVICE = "stretto.Controller"
EXCHANGE, STATUS, PULSE, RECALL, HUSH = "Exchange", "Status", "Pulse", "Recall", "Hush"
MAX_SOCKET_PATH = 100
"""A Unix socket's name has 108 bytes, and gRPC adds a few while it binds."""
THREADS = 8
LEAST_TOKEN = 16
MAX_TOKEN = 4096
FORK_WAIT_S = 5.0
"""A fork waits so long for calls that are under way; a controller that has stopped must not hold it up for longer."""

Handler = Callable[[bytes], bytes]


@dataclass(frozen=True, kw_only=True)
class Tls:
    """Both sides show a certificate that the authority has signed."""

    certificate: Path
    key: Path
    authority: Path
    server_name: str = ""
    """What the server's certificate says, where that is not its address."""


def default_folder() -> Path:
    """Where the sockets and tokens of this user are: a folder that nobody else can enter."""
    base = os.environ.get("XDG_RUNTIME_DIR", "")
    folder = Path(base) / "stretto" if base else Path("/tmp") / f"stretto-{os.getuid()}"
    return private_folder(folder)


def private_folder(folder: Path) -> Path:
    """The folder, made for this user alone; refused when others could have put something there."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    about = folder.lstat()
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.getuid() or about.st_mode & 0o077:
        raise InvalidInput(f"{folder}: must be a folder of this user with mode 0700")
    return folder


def check_address(address: str) -> str:
    """The address, if it is one: ``unix:/path`` or ``HOST:PORT``."""
    if address.startswith("unix:"):
        path = address.removeprefix("unix:")
        if not path.startswith("/") or len(path.encode()) > MAX_SOCKET_PATH:
            raise InvalidInput(f"address {address!r}: the path must be absolute, {MAX_SOCKET_PATH} bytes at most")
        return address
    host, colon, port = address.rpartition(":")
    if not colon or not host or not (port.isascii() and port.isdecimal()) or int(port) > 65535:
        raise InvalidInput(f"address {address!r}: expected unix:/path or HOST:PORT")
    return address


def is_local(address: str) -> bool:
    """Whether only this machine can reach it."""
    if address.startswith("unix:"):
        return True
    host = address.rpartition(":")[0].strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def read_token(path: Path) -> str:
    """The secret that ranks and controller share; a file that others can read is none."""
    text = read_text(path, max_bytes=MAX_TOKEN).strip()
    if path.stat().st_mode & 0o077:
        raise InvalidInput(f"{path}: a token that others can read is no secret; chmod 600 it")
    if len(text) < LEAST_TOKEN or not text.isascii() or not text.isprintable():
        raise InvalidInput(f"{path}: a token has at least {LEAST_TOKEN} printable characters")
    return text


def make_token(path: Path) -> str:
    """The token in a file, which is made when it is missing or empty.

    Processes that start together get the same token: the file appears with its whole content, and only one of them
    makes it. An empty file is what a full disk leaves behind, and is replaced.
    """
    try:
        with _alone_in(path.parent):
            if not path.exists() or not path.stat().st_size:
                _write_token(path)
    except (OSError, ValueError) as error:
        raise InvalidInput(f"{path}: cannot make the token: {getattr(error, 'strerror', None) or error}") from None
    return read_token(path)


@contextlib.contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Keep other processes out that make a token in the same folder, where its file system knows locks."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _write_token(path: Path) -> None:
    """Write a token of its own to a temporary file, and move it into place once it is whole."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w") as file:
            file.write(f"{secrets.token_hex(32)}\n")
        if path.exists():
            os.replace(temporary, path)
        else:
            # Where there are no locks, this is refused to all but the first.
            with contextlib.suppress(FileExistsError):
                os.link(temporary, path)
    finally:
        Path(temporary).unlink(missing_ok=True)


class Server:
    """Listens from the start until `close`; `address` is where, with the port that was given for port 0."""

    def __init__(self, address: str, handlers: Mapping[str, Handler], *, token: str, tls: Tls | None = None) -> None:
        grpc = _grpc()
        check_address(address)
        if tls is None and not is_local(address):
            raise InvalidInput(
                f"address {address}: others can reach it, and the token would be readable on the way; give certificates"
            )
        methods = {name: grpc.unary_unary_rpc_method_handler(_checked(handle)) for name, handle in handlers.items()}
        self._server = grpc.server(
            ThreadPoolExecutor(THREADS, thread_name_prefix="stretto-controller"),
            handlers=(grpc.method_handlers_generic_handler(SERVICE, methods),),
            interceptors=(_guard(token),),
            maximum_concurrent_rpcs=None,
            options=[*_limits(), ("grpc.so_reuseport", 0)],
        )
        if address.startswith("unix:"):
            if _is_served(address.removeprefix("unix:")):
                # gRPC would take the name away from it, and its jobs would be asked by nobody.
                raise InvalidInput(f"address {address}: another controller listens there")
            # Nobody may connect between the moment the socket is there and a later chmod.
            before = os.umask(0o177)
            try:
                self._bind(address, tls)
            finally:
                os.umask(before)
            self.address = address
        else:
            self.address = f"{address.rpartition(':')[0]}:{self._bind(address, tls)}"
        self._server.start()

    def _bind(self, address: str, tls: Tls | None) -> int:
        try:
            if tls is None:
                port = self._server.add_insecure_port(address)
            else:
                grpc = _grpc()
                pair = (read_text(tls.key).encode(), read_text(tls.certificate).encode())
                authority = read_text(tls.authority).encode()
                credentials = grpc.ssl_server_credentials([pair], authority, require_client_auth=True)
                port = self._server.add_secure_port(address, credentials)
        except (RuntimeError, ValueError):
            port = 0
        if not port:
            raise InvalidInput(f"address {address}: cannot listen there (is another controller running?)")
        return int(port)

    def close(self) -> None:
        """Stop; calls under way get half a second."""
        self._server.stop(0.5).wait(5.0)


class ForkGate(ProcessPart):
    """Keeps forks of this process and calls of gRPC apart.

    gRPC prepares a forked child only while no thread is inside of gRPC. A child that was forked during a call may be
    ended by one of its checks, and with it the loader of data that the application forked.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._calls = 0

    def __enter__(self) -> None:
        with self._changed:
            self._calls += 1

    def __exit__(self, *raised: object) -> None:
        with self._changed:
            self._calls -= 1
            self._changed.notify_all()

    def before_fork(self) -> None:
        """Wait until no call is under way, and let none begin until the fork is over."""
        self._changed.acquire()
        self._changed.wait_for(lambda: not self._calls, timeout=FORK_WAIT_S)

    def after_fork_in_parent(self) -> None:
        """Let calls begin again."""
        self._changed.release()

    def after_fork(self) -> None:
        """No thread of the parent's is in the child, and none of its calls."""
        self._changed = threading.Condition()
        self._calls = 0


_FORK_GATE = STATE.part(ForkGate)


class ControllerConnection:
    """The way to a controller; the connection is made at the first call, and again after each loss."""

    def __init__(self, address: str, *, token: str, tls: Tls | None = None) -> None:
        self.address = check_address(address)
        self._token = token
        self._tls = tls
        self._channel: Any = None
        self._calls: dict[str, Any] = {}

    def call(self, method: str, message: bytes, *, timeout_s: float) -> bytes:
        """The controller's answer; raises `PeerLost` when there is none in time, `InvalidInput` when it refuses.

        Args:
            method: One of the names in `transport`.
            message: What to send.
            timeout_s: How long to wait for the answer.

        Returns:
            The answer.

        Raises:
            PeerLost: No answer came in time, or the connection was closed.
            InvalidInput: The controller refuses the message or the token.
        """
        grpc = _grpc()
        if self._channel is None:
            with _FORK_GATE:
                self._channel = self._open(grpc)
        if method not in self._calls:
            self._calls[method] = self._channel.unary_unary(f"/{SERVICE}/{method}")
        metadata = (("authorization", f"Bearer {self._token}"),)
        try:
            with _FORK_GATE:
                reply: bytes = self._calls[method](message, timeout=timeout_s, metadata=metadata, wait_for_ready=False)
            return reply
        except grpc.RpcError as error:
            code, details = error.code(), " ".join(str(error.details()).split())[:300]
            gone = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)
            if code in gone:
                # gRPC says the address three times before it comes to the reason.
                reason = details.rpartition("error: ")[2]
                raise PeerLost(f"controller at {self.address}: does not answer ({reason})") from None
            raise InvalidInput(f"controller at {self.address}: {details}") from None
        except ValueError:
            raise PeerLost(f"controller at {self.address}: the connection was closed") from None

    def close(self) -> None:
        """Let go of the connection."""
        if self._channel is not None:
            self._channel.close()

    def _open(self, grpc: Any) -> Any:
        options: list[tuple[str, int | str]] = [
            *_limits(),
            # A controller that comes back is found again within a second or two.
            ("grpc.initial_reconnect_backoff_ms", 200),
            ("grpc.min_reconnect_backoff_ms", 200),
            ("grpc.max_reconnect_backoff_ms", 2000),
            # Another connection of this process to the same address, which was lost, must not make this one wait.
            ("grpc.use_local_subchannel_pool", 1),
        ]
        if self._tls is None:
            return grpc.insecure_channel(self.address, options=options)
        if self._tls.server_name:
            options.append(("grpc.ssl_target_name_override", self._tls.server_name))
        credentials = grpc.ssl_channel_credentials(
            root_certificates=read_text(self._tls.authority).encode(),
            private_key=read_text(self._tls.key).encode(),
            certificate_chain=read_text(self._tls.certificate).encode(),
        )
        return grpc.secure_channel(self.address, credentials, options=options)


def from_environment(environment: Mapping[str, str] = os.environ) -> ControllerConnection | None:
    """The way to the controller that STRETTO_CONTROLLER names; None when it names none."""
    address = environment.get("STRETTO_CONTROLLER", "")
    if not address:
        return None
    check_address(address)
    token = environment.get("STRETTO_TOKEN_FILE", "")
    if not token:
        raise InvalidInput("STRETTO_TOKEN_FILE: must name the file with the controller's token")
    names = ("STRETTO_TLS_CERT", "STRETTO_TLS_KEY", "STRETTO_TLS_CA")
    files = [environment.get(name, "") for name in names]
    return ControllerConnection(
        address,
        token=read_token(Path(token)),
        tls=tls_of(files[0], files[1], files[2], environment.get("STRETTO_TLS_NAME", ""), names),
    )


def tls_of(
    certificate: str | Path | None, key: str | Path | None, authority: str | Path | None, server_name: str,
    names: tuple[str, str, str],
) -> Tls | None:  # fmt: skip
    """All three files, or none; `names` are what whoever gave them calls them.

    Args:
        certificate: The certificate to show.
        key: Its private key.
        authority: The certificates to trust.
        server_name: The name in the server's certificate, where that is not its address.
        names: What the caller's options for the three files are called, for errors.

    Returns:
        The files; None where none is given.

    Raises:
        InvalidInput: Some are given and others not.
    """
    files = (certificate, key, authority)
    if not any(files):
        return None
    missing = [name for name, file in zip(names, files, strict=True) if not file]
    if missing:
        raise InvalidInput(f"{missing[0]}: mTLS needs all of {', '.join(names)}")
    assert certificate and key and authority
    return Tls(certificate=Path(certificate), key=Path(key), authority=Path(authority), server_name=server_name)


def _is_served(path: str) -> bool:
    """Whether somebody listens at a Unix socket; a name that a killed process has left behind is nobody."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except (TimeoutError, BlockingIOError):
            # Somebody who is busy.
            return True
        except OSError:
            return False
    return True


def _limits() -> list[tuple[str, int]]:
    return [
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_metadata_size", 16 << 10),
        # A proxy for web pages is not the way to a controller.
        ("grpc.enable_http_proxy", 0),
    ]


def _checked(handle: Handler) -> Callable[[bytes, Any], bytes]:
    def call(message: bytes, context: Any) -> bytes:
        try:
            return handle(message)
        except InvalidInput as error:
            context.abort(_grpc().StatusCode.INVALID_ARGUMENT, str(error)[:300])
            raise AssertionError from None

    return call


def _guard(token: str) -> Any:
    """Refuses every call without the token, before its message is looked at."""
    grpc: Any = _grpc()
    expected = f"Bearer {token}".encode()

    def refuse(_: bytes, context: Any) -> None:
        context.abort(grpc.StatusCode.UNAUTHENTICATED, "the token is not this controller's")

    def intercept(_: object, proceed: Any, call: Any) -> Any:
        given = dict(call.invocation_metadata).get("authorization", "")
        right = hmac.compare_digest(given.encode() if isinstance(given, str) else given, expected)
        return proceed(call) if right else grpc.unary_unary_rpc_method_handler(refuse)

    # gRPC is imported late, so its base class is not there for a class statement at the top.
    return type("Guard", (grpc.ServerInterceptor,), {"intercept_service": intercept})()


def _grpc() -> Any:
    try:
        import grpc
    except ImportError:
        raise InvalidInput("the controller needs gRPC: pip install 'stretto[runtime]'") from None
    return grpc
