# SPDX-License-Identifier: Apache-2.0
"""Serves a page that is made anew whenever it is asked for, at an address of this machine and under a secret path."""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from ..errors import InvalidInput, StrettoError
from .transport import check_address, is_local


class LivePage:
    """A server for one page, on an address of this machine only.

    Others on this machine can reach the port, too: so the page lies under a path that only who started it knows, and
    a request must name this address as its host, which a page of somebody else's in the same browser cannot do.
    """

    def __init__(self, address: str, page: Callable[[], str]) -> None:
        """Listen; nothing is served before `serve`.

        Args:
            address: HOST:PORT of this machine; port 0 is any that is free.
            page: Makes the page; a `StrettoError` that it raises is shown in its place.

        Raises:
            InvalidInput: The address is not one of this machine, or taken.
        """
        host, _, port = check_address(address).rpartition(":")
        if address.startswith("unix:") or not is_local(address):
            raise InvalidInput(f"--serve {address}: must be HOST:PORT of this machine alone, as 127.0.0.1:8080")
        self._path = f"/{secrets.token_urlsafe(16)}/"
        live = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                known = hmac.compare_digest(self.path.encode(), live._path.encode())
                if not known or self.headers.get("Host") != live.host:
                    self.send_error(404)
                    return
                try:
                    code, text = 200, page()
                except StrettoError as error:
                    code, text = 503, str(error)
                body = text.encode()
                self.send_response(code)
                self.send_header("Content-Type", f"text/{'html' if code == 200 else 'plain'}; charset=utf-8")
                self.send_header("Content-Length", str(len(body)))
                self.send_header("Cache-Control", "no-store")
                self.send_header("Referrer-Policy", "no-referrer")
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                """Nothing is said of who asks: the path is a secret."""

        try:
            self._server = ThreadingHTTPServer((host.strip("[]"), int(port)), Handler)
        except OSError as error:
            raise InvalidInput(f"--serve {address}: cannot listen there: {error.strerror}") from None
        self._server.daemon_threads = True
        self.host = f"{host}:{self._server.server_port}"

    @property
    def url(self) -> str:
        """Where a browser finds the page."""
        return f"http://{self.host}{self._path}"

    def serve(self) -> None:
        """Answer until `close`, or until the process is interrupted."""
        self._server.serve_forever()

    def close(self) -> None:
        """Stop."""
        self._server.shutdown()
        self._server.server_close()
