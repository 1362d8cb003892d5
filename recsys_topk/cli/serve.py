"""`recsys-topk serve`: an HTTP service for an export."""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import socket
import tempfile
from typing import Any

from recsys_topk.cli.console import echo, make_parser

_BACKLOG = 128


def make_worker(*arguments: Any) -> Any:
    """Return the application (`make_app`), with a log on standard error."""
    from recsys_topk.serving.service import make_app

    logging.getLogger("faiss").setLevel(logging.WARNING)  # it reports every CPU feature that it has no build for
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.INFO)
    return make_app(*arguments)


def main(argv: list[str]) -> int:
    """Run the command."""
    parser = make_parser(
        "serve",
        "Serve recommendations of an export over HTTP: POST /recommend, GET /health, /ready, /metrics, /openapi.json, "
        "and a page at /. A new export is loaded when the link --export points elsewhere. Needs no torch.",
    )
    parser.add_argument("--export", required=True, help="folder that `recsys-topk export` wrote, or a link to it")
    parser.add_argument("--index", help="folder that `recsys-topk index` wrote, or a link (default: exact search)")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s, this machine)")
    parser.add_argument("--port", type=int, default=8000, help="port; 0 = any that is free (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=1, help="processes, each with the export (default: %(default)s)")
    from recsys_topk.serving.service import ServiceOptions

    for field in dataclasses.fields(ServiceOptions):
        name, text = f"--{field.name.replace('_', '-')}", f"{field.metadata['help']} (default: %(default)s)"
        choices = field.metadata["choices"]
        parser.add_argument(name, type=type(field.default), default=field.default, choices=choices, help=text)
    options = vars(parser.parse_args(argv))
    export, index, host, port, workers = (options.pop(name) for name in ("export", "index", "host", "port", "workers"))
    if workers < 1:
        raise ValueError(f"--workers must be at least 1, got {workers}")
    import uvicorn
    from uvicorn.supervisors import Multiprocess

    from recsys_topk.serving.connections import LimitedConnection
    from recsys_topk.serving.telemetry import FOLDER

    make = functools.partial(make_worker, export, index, ServiceOptions(**options))
    app = make()  # errors show before the service listens
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:  # listens before the address is printed, so that clients can connect
        listening = socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except (OSError, OverflowError) as error:
        what = getattr(error, "strerror", None) or error
        raise ValueError(f"cannot listen on {host}:{port} ({what}); choose another --host or --port") from error
    listening.set_inheritable(True)
    config = uvicorn.Config(
        app, http=LimitedConnection, ws="none", workers=workers, backlog=_BACKLOG, log_config=None, log_level="warning",
        access_log=False, timeout_keep_alive=30, timeout_graceful_shutdown=30, timeout_worker_healthcheck=120,
    )  # fmt: skip
    address = listening.getsockname()
    echo(f"serving {export} on http://{address[0]}:{address[1]}/ (Ctrl-C stops after the running requests)")
    if workers == 1:
        uvicorn.Server(config).run([listening])
        return 0
    config.app, config.factory = make, True
    del app
    with tempfile.TemporaryDirectory(prefix="recsys-topk-metrics-") as folder:
        os.environ[FOLDER] = folder
        Multiprocess(config, [listening]).run()
    return 0
