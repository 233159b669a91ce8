# SPDX-License-Identifier: Apache-2.0
"""What the HTTP servers of this package share: they listen on this machine alone, and say nothing of who asks."""

from __future__ import annotations

from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from ..errors import InvalidInput
from .transport import check_address, is_local


class QuietHandler(BaseHTTPRequestHandler):
    """Answers with a whole text, and logs nothing: a path can be a secret."""

    def answer(self, code: int, content: str, text: str, *more: tuple[str, str]) -> None:
        """Send a response.

        Args:
            code: The HTTP status.
            content: The Content-Type.
            text: The body.
            *more: Further headers, as (name, value).
        """
        body = text.encode()
        self.send_response(code)
        for name, value in (("Content-Type", content), ("Content-Length", str(len(body))), *more):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Do nothing, where the base class would print a line for each request."""


def listen_locally(option: str, address: str, handler: type[QuietHandler]) -> tuple[ThreadingHTTPServer, str]:
    """Listen on an address of this machine; nothing is answered before `serve_forever`.

    Args:
        option: The option that gives the address, for errors.
        address: HOST:PORT; port 0 is any that is free.
        handler: Answers requests, each in a thread of its own.

    Returns:
        The server, and HOST:PORT with the port that it got.

    Raises:
        InvalidInput: The address is not one of this machine, or taken.
    """
    host, _, port = check_address(address).rpartition(":")
    if address.startswith("unix:") or not is_local(address):
        raise InvalidInput(f"{option} {address}: must be HOST:PORT of this machine alone, as 127.0.0.1:8080")
    try:
        server = ThreadingHTTPServer((host.strip("[]"), int(port)), handler)
    except OSError as error:
        raise InvalidInput(f"{option} {address}: cannot listen there: {error.strerror}") from None
    server.daemon_threads = True
    return server, f"{host}:{server.server_port}"
