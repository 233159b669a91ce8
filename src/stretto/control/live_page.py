# SPDX-License-Identifier: Apache-2.0
"""Serves a page that is made anew whenever it is asked for, at an address of this machine and under a secret path."""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Callable

from ..errors import StrettoError
from .local_http import QuietHandler, listen_locally


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
        self._path = f"/{secrets.token_urlsafe(16)}/"
        live = self

        class Handler(QuietHandler):
            def do_GET(self) -> None:
                known = hmac.compare_digest(self.path.encode(), live._path.encode())
                if not known or self.headers.get("Host") != live.host:
                    self.send_error(404)
                    return
                try:
                    code, kind, text = 200, "html", page()
                except StrettoError as error:
                    code, kind, text = 503, "plain", str(error)
                self.answer(
                    code, f"text/{kind}; charset=utf-8", text,
                    ("Cache-Control", "no-store"), ("Referrer-Policy", "no-referrer"),
                )  # fmt: skip

        self._server, self.host = listen_locally("--serve", address, Handler)

    @property
    def url(self) -> str:
        """Where a browser finds the page."""
        return f"http://{self.host}{self._path}"

    def serve(self) -> None:
        """Answer until `close`, or until the process is interrupted."""
        self._server.serve_forever()

    def close(self) -> None:
        """Stop serving the page."""
        self._server.shutdown()
        self._server.server_close()
