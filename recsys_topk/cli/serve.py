"""`recsys-topk serve`: an HTTP service for an export."""

from __future__ import annotations

import dataclasses

from recsys_topk.cli.console import echo, make_parser


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
    from recsys_topk.serving.service import ServiceOptions, make_app

    for field in dataclasses.fields(ServiceOptions):
        name, text = f"--{field.name.replace('_', '-')}", f"{field.metadata['help']} (default: %(default)s)"
        parser.add_argument(name, type=type(field.default), default=field.default, help=text)
    options = vars(parser.parse_args(argv))
    export, index, host, port = (options.pop(name) for name in ("export", "index", "host", "port"))
    import uvicorn

    app = make_app(export, index, ServiceOptions(**options))
    config = uvicorn.Config(
        app, host, port, log_level="warning", access_log=False, timeout_keep_alive=30, timeout_graceful_shutdown=30
    )
    socket = config.bind_socket()
    socket.listen(config.backlog)  # before the address is printed, so that clients can connect
    address = socket.getsockname()
    echo(f"serving {export} on http://{address[0]}:{address[1]}/ (Ctrl-C stops after the running requests)")
    uvicorn.Server(config).run([socket])
    return 0
