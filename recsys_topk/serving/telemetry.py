"""The metrics of a service in the Prometheus format, summed over its worker processes."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead

FOLDER = "PROMETHEUS_MULTIPROC_DIR"
"""The variable of the environment with the folder in which prometheus_client collects the metrics of all workers."""


class Telemetry:
    """The metrics of a service, in a separate registry."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        counter, histogram = partial(Counter, registry=self.registry), partial(Histogram, registry=self.registry)
        live = partial(Gauge, registry=self.registry, multiprocess_mode="livesum")
        self.requests = counter("recsys_topk_requests_total", "Requests by path and status", ["path", "status"])
        times = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)
        self.seconds = histogram("recsys_topk_request_seconds", "Response time", ["path"], buckets=times)
        sizes = (1, 2, 4, 8, 16, 32, 64)
        self.batch = histogram("recsys_topk_batch_requests", "Requests per call", buckets=sizes)
        self.waiting = live("recsys_topk_waiting_requests", "Waiting requests")
        self.loads = counter("recsys_topk_export_loads_total", "Exports loaded, by outcome", ["outcome"])
        self.export = live("recsys_topk_export_info", "Workers that use an export", ["export"])
        self.failed = live("recsys_topk_export_load_failed", "Workers that could not load the newest export")
        self.cut = counter("recsys_topk_connections_cut_total", "Connections cut by a limit", ["limit"])
        self.rows = counter("recsys_topk_log_rows_total", "Rows of the log by outcome", ["log", "outcome"])
        self._export = ""

    def observe(self, path: str, status: int, seconds: float) -> None:
        """Count a request."""
        self.requests.labels(path, str(status)).inc()
        self.seconds.labels(path).observe(seconds)

    def use(self, export: str, failed: bool = False) -> None:
        """Note the export in use, and whether a newer one could not be loaded."""
        if self._export not in ("", export):
            self.export.labels(self._export).set(0)
        self._export = export
        self.export.labels(export).set(1)
        self.failed.set(failed)

    def text(self) -> bytes:
        """Return the metrics of all workers."""
        if FOLDER not in os.environ:
            return generate_latest(self.registry)
        for path in Path(os.environ[FOLDER]).glob("gauge_live*.db"):
            worker = int(path.stem.rpartition("_")[2])
            if not Path(f"/proc/{worker}").exists():
                mark_process_dead(worker)  # type: ignore[no-untyped-call]
        registry = CollectorRegistry()
        MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
        return generate_latest(registry)
