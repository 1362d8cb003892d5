"""Python with the heavy libraries imported already: ``[*warm_python, "-m", "recsys_topk", "fit"]`` is a command.

One server per test session imports torch, Lightning and TorchRec and computes nothing. It forks one process per
command. The process is as fresh as a new interpreter and starts in a moment instead of five seconds. The command itself
is a small client: it passes its arguments, folder, environment and standard streams to the server, forwards signals
and exits with the status of the forked process. If the client is killed, the server kills the forked process.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
LARGEST_MESSAGE = 1 << 17
ROOT = Path(__file__).resolve().parents[1]
SERVERS: list[Any] = []  # not waited for: a server may outlive the process that started it


def connect(name: str) -> socket.socket:
    """Connect to the server of a session."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(f"\0{name}")
    return connection


def start(name: str) -> tuple[list[str], socket.socket]:
    """Start a server; return its command, and a lease: the server ends when all leases are closed."""
    import subprocess

    try:
        lease = connect(name)
    except ConnectionRefusedError:
        command = [sys.executable, "-m", "tests.warm_python", "server", name]
        process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
        SERVERS.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        lease = connect(name)
    lease.send(b"lease")
    return [sys.executable, "-I", "-S", __file__, "client", name], lease


def client(name: str, arguments: list[str]) -> int:
    """Run ``python ARGUMENTS`` in a process of the server and return its exit status."""
    connection = connect(name)
    early: list[int] = []
    for number in FORWARDED:
        signal.signal(number, lambda number, frame: early.append(number))
    request = {"arguments": arguments, "folder": str(Path.cwd()), "environment": dict(os.environ)}
    socket.send_fds(connection, [json.dumps(request).encode()], [0, 1, 2])
    child = int(connection.recv(64))
    for number in FORWARDED:
        signal.signal(number, lambda number, frame: os.kill(child, number))
    for number in early:
        os.kill(child, number)
    status = int(connection.recv(64))
    if status < 0:  # end as the forked process did
        if -status in FORWARDED:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    return status


class Server:
    """Forks a process for each request; `run` returns in the server when all leases are closed."""

    def __init__(self, name: str) -> None:
        import selectors

        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.listener.bind(f"\0{name}")  # a name, not a file: nothing is left behind
        self.listener.listen(64)
        self.woken, self.wake = socket.socketpair()
        self.wake.setblocking(False)
        signal.set_wakeup_fd(self.wake.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        self.leases: set[socket.socket] = set()
        self.running: dict[int, socket.socket] = {}
        self.selector = selectors.DefaultSelector()
        for readable in (self.listener, self.woken):
            self.selector.register(readable, selectors.EVENT_READ)

    def run(self) -> Callable[[], object] | None:
        """Serve; return None in the server, and what ``python ARGUMENTS`` runs in each forked process."""
        leased = False
        while not leased or self.leases or self.running:
            for key, events in self.selector.select():
                ready: Any = key.fileobj
                if ready is self.listener:
                    self.selector.register(self.listener.accept()[0], events)
                elif ready is self.woken:
                    self.report_ended()
                elif ready in self.leases:
                    self.leases.remove(ready)
                    self.close(ready)
                elif ready in self.running.values():  # clients send one message: this one has ended
                    self.kill(ready)
                else:
                    message, streams, _, _ = socket.recv_fds(ready, LARGEST_MESSAGE, 3)
                    if message == b"lease":
                        self.leases.add(ready)
                        leased = True
                    elif not message:
                        self.close(ready)
                    elif child := os.fork():
                        for stream in streams:
                            os.close(stream)
                        self.running[child] = ready
                        ready.send(str(child).encode())
                    else:
                        self.leave(ready, streams)
                        return as_python(**json.loads(message))
        return None

    def report_ended(self) -> None:
        """Tell the clients of ended processes their exit status."""
        self.woken.recv(4096)
        for child, connection in list(self.running.items()):
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                del self.running[child]
                connection.send(str(os.waitstatus_to_exitcode(status)).encode())
                self.close(connection)

    def kill(self, connection: socket.socket) -> None:
        """Kill the process of a client that was killed."""
        (child,) = (child for child, other in self.running.items() if other is connection)
        del self.running[child]
        self.close(connection)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)

    def close(self, connection: socket.socket) -> None:
        self.selector.unregister(connection)
        connection.close()

    def leave(self, own: socket.socket, streams: list[int]) -> None:
        """Make a forked process independent of the server."""
        os.setsid()
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGHUP):  # the tests may run under nohup, which ignores SIGHUP
            signal.signal(number, signal.SIG_DFL)
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        self.selector.close()
        for connection in (self.listener, self.woken, self.wake, own, *self.leases, *self.running.values()):
            connection.close()


def as_python(arguments: list[str], folder: str, environment: dict[str, str]) -> Callable[[], object]:
    """Return what ``python ARGUMENTS`` runs."""
    import runpy

    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[1:1] = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path not in sys.path]
    first, *rest = arguments
    if first == "-m":
        sys.path[0], sys.argv = folder, rest
        return lambda: runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    if first == "-c":
        sys.path[0], sys.argv = "", ["-c", *rest[1:]]
        sys.modules["__main__"] = types.ModuleType("__main__")
        return lambda: exec(compile(rest[0], "<string>", "exec"), vars(sys.modules["__main__"]))
    sys.path[0], sys.argv = str(Path(first).parent), arguments
    return lambda: runpy.run_path(first, run_name="__main__")


def end(command: Callable[[], object]) -> None:
    """Run a command and end the process as an interpreter does, but without clearing every module: that takes 2 s."""
    import atexit
    import threading

    status: Any = 0
    interrupted = False
    try:
        command()
    except SystemExit as stop:
        status = stop.code
    except BaseException as error:
        status, interrupted = 1, isinstance(error, KeyboardInterrupt)
        sys.excepthook(type(error), error, error.__traceback__)
    if isinstance(status, str):
        sys.stderr.write(f"{status}\n")
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
    except (OSError, ValueError):  # a closed pipe
        status = 120
    if interrupted:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(status if isinstance(status, int) else int(status is not None))


def main(role: str, name: str, *arguments: str) -> int:
    """Run the client or the server."""
    if role == "client":
        return client(name, list(arguments))
    import numba  # noqa: F401

    import recsys_topk.cascades.module
    import recsys_topk.datamodules.recflow.datamodule
    import recsys_topk.runs.lightning_cli  # noqa: F401

    server = Server(name)
    os.write(1, b"ready\n")
    command = server.run()
    if command is not None:
        end(command)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
