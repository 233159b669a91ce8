# SPDX-License-Identifier: Apache-2.0
"""``stretto controller``: plans for running jobs, from outside of them."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Annotated

import typer

from ..errors import InvalidInput
from .options import BudgetOption, PlansOption
from .outputs import output


def controller(
    listen: Annotated[
        str, typer.Option(metavar="unix:PATH|HOST:PORT", help="Where to listen; this user's own socket by default.")
    ] = "",
    token_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The secret that ranks must know; made when it is not there.")
    ] = None,
    state: Annotated[
        Path | None, typer.Option(metavar="FILE", callback=output(), help="Where the last plan's number is kept.")
    ] = None,
    budget: BudgetOption = 5.0,
    plans: PlansOption = "",
    metrics: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Serve counters for Prometheus there, to this machine alone.")
    ] = "",
    tls_cert: Annotated[Path | None, typer.Option(metavar="PEM", help="This controller's certificate.")] = None,
    tls_key: Annotated[Path | None, typer.Option(metavar="PEM", help="Its key.")] = None,
    tls_ca: Annotated[Path | None, typer.Option(metavar="PEM", help="Who signs the ranks' certificates.")] = None,
) -> None:
    """Run a controller until it is interrupted: it captures, plans, commits and replans for the jobs that ask it.

    \b
    Ranks reach it with STRETTO_CONTROLLER (its address) and STRETTO_TOKEN_FILE
    in their environment. It may die and come back at any time; training goes
    on. Only this machine can reach it unless certificates are given.

    \b
    Examples:
      stretto controller
      stretto controller --listen 127.0.0.1:7077 --token-file token
      stretto controller --metrics 127.0.0.1:9464
      stretto controller --listen 10.0.0.1:7077 --tls-cert c.pem \\
          --tls-key k.pem --tls-ca ca.pem
    """
    # gRPC would print lines of its own beside our one.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    from ..control.controller import Controller
    from ..control.kept_plans import plans_folder
    from ..control.metrics import MetricsServer
    from ..control.transport import check_address, default_folder, make_token, tls_of

    if not 0 < budget < 86400:
        raise InvalidInput(f"--budget: must be more than 0 and less than 86400 seconds, not {budget:g}")
    tls = tls_of(tls_cert, tls_key, tls_ca, "", ("--tls-cert", "--tls-key", "--tls-ca"))
    folder = default_folder()
    address = check_address(listen) if listen else f"unix:{folder / 'controller.sock'}"
    token_path = token_file or folder / "token"
    token = make_token(token_path)
    ending = threading.Event()
    before = {number: signal.signal(number, lambda *_: ending.set()) for number in (signal.SIGTERM, signal.SIGINT)}
    running = Controller(memory=state or folder / "state.json", budget_s=budget, plans=plans_folder(plans))
    try:
        server = running.serve(address, token=token, tls=tls)
        print(f"STRETTO_CONTROLLER={server.address}\nSTRETTO_TOKEN_FILE={token_path.absolute()}", flush=True)
        counters = None
        try:
            counters = MetricsServer(metrics, running.status) if metrics else None
            ending.wait()
        finally:
            if counters is not None:
                counters.close()
            server.close()
    finally:
        running.close()
        for number, handler in before.items():
            signal.signal(number, handler)
