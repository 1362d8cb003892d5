"""Commands of the server that tests start processes with behave like commands of a new interpreter."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

CODE = """
import os, sys
print(sys.argv, os.getcwd(), os.environ["ASKED"], sys.stdin.read(), flush=True)
print("torchrec" in sys.modules, file=sys.stderr)
sys.exit(7)
"""
WAITS = """
import os, sys, time
open(sys.argv[1], "w").write(str(os.getpid()))
time.sleep(60)
"""


def run(command: list[str], folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*command, *arguments], cwd=folder, env={**os.environ, "ASKED": "for"}, input="given", capture_output=True,
        text=True, check=False,
    )  # fmt: skip


def test_code_scripts_and_modules_see_what_a_new_interpreter_gives_them(warm_python: list[str], tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(CODE)
    for arguments in (("-c", CODE, "a", "b c"), ("script.py", "a"), ("-m", "script", "a")):
        warm, cold = (run(command, tmp_path, *arguments) for command in (warm_python, [sys.executable]))
        assert warm.returncode == cold.returncode == 7, warm.stderr
        assert warm.stdout == cold.stdout
        assert (warm.stderr, cold.stderr) == ("True\n", "False\n")
    failed = run(warm_python, tmp_path, "-c", "raise ValueError('wrong')")
    assert failed.returncode == 1
    assert failed.stderr.endswith("ValueError: wrong\n")


def test_signals_reach_the_process(warm_python: list[str], tmp_path: Path) -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGKILL):
        file = tmp_path / number.name
        with subprocess.Popen([*warm_python, "-c", WAITS, str(file)], stderr=subprocess.DEVNULL) as process:
            while not file.is_file() or not file.read_text():
                time.sleep(0.01)
            process.send_signal(number)
            assert process.wait(60) == -number
        end = time.monotonic() + 60  # the server kills the process of a killed client a moment later
        while Path(f"/proc/{file.read_text()}").exists() and time.monotonic() < end:
            time.sleep(0.01)
        assert not Path(f"/proc/{file.read_text()}").exists()
