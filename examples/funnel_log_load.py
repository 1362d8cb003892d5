"""What the funnel log costs: the same load on a service with and without it, in turns.

    python examples/funnel_log_load.py --requests 100000 --rounds 10

It prints errors, the rows that were written and dropped, and the ratios of the latencies. Client and services share the
machine. The export has random weights; quotas 200 and 30.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import numpy as np

from recsys_topk.bench.load import HOST, Service, put_load
from recsys_topk.bench.serve import make_export
from recsys_topk.serving.index import build_index


def start(*options: str) -> tuple[subprocess.Popen[str], Service]:
    """Start a service and return its process and address."""
    command = [sys.executable, "-m", "recsys_topk", "serve", "--port", "0", "--timeout", "60", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    port = re.search(rf"{HOST}:(\d+)", process.stdout.readline())
    assert port is not None, "the service did not start"
    return process, Service(int(port[1]), process.pid)


def rows(service: Service) -> dict[str, int]:
    """Return the rows of the log by outcome."""
    with urllib.request.urlopen(f"http://{HOST}:{service.port}/metrics") as answer:
        text = answer.read().decode()
    found = re.findall(r'log_rows_total\{log="requests",outcome="(\w+)"\} (\S+)', text)
    return {outcome: int(float(number)) for outcome, number in found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=5000, help="requests to each service")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--connections", type=int, default=32)
    parser.add_argument("--items", type=int, default=20_000)
    parser.add_argument("--folder", type=Path, help="keep the export, the index and the log here")
    args = parser.parse_args()
    folder = args.folder or Path(tempfile.mkdtemp())
    export, index, users = folder / "export", folder / "index", 2000
    if not export.is_dir():
        make_export(export, args.items, users)
        build_index(export, index, "ivf")
    common = ("--export", str(export), "--index", str(index))
    log = ("--log", str(folder / "log"), "--log-share", "1.0", "--log-seconds", "5")
    services = {"without": start(*common), "with": start(*common, *log)}
    times: dict[str, list[float]] = {name: [] for name in services}
    p99: dict[str, list[float]] = {name: [] for name in services}
    errors = dict.fromkeys(services, 0)
    try:
        for _, service in services.values():
            put_load(service, users, 1, 50, 60)
        warm = 50
        for number in range(args.rounds):
            for name in sorted(services, reverse=bool(number % 2)):
                load = put_load(services[name][1], users, args.connections, args.requests // args.rounds, 3600)
                times[name] += load.latencies
                p99[name].append(load.percentile(99))
                errors[name] += load.errors
        sent, counted = warm + len(times["with"]), rows(services["with"][1])
        while sum(counted.values()) < sent:
            time.sleep(1)
            counted = rows(services["with"][1])
    finally:
        for process, _ in services.values():
            process.terminate()
            process.wait(60)
    for name, seconds in times.items():
        shares = np.percentile(seconds, [50, 95, 99]) * 1000
        print(f"{name} the log: {len(seconds):,} answers, {errors[name]} errors, p50/p95/p99 ms {np.round(shares, 1)}")
    print(f"rows: {counted} of {sent:,}; dropped {counted.get('dropped', 0) / sent:.3%}")
    ratios = [one / other for one, other in zip(p99["with"], p99["without"], strict=True)]
    pooled = np.percentile(times["with"], 99) / np.percentile(times["without"], 99)
    print(f"p99 with / without: {pooled:.2f} pooled; by round: {', '.join(f'{ratio:.2f}' for ratio in ratios)}")


if __name__ == "__main__":
    main()
