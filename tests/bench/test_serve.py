"""The serving benchmark measures every part on a small world; no timing is asserted."""

from __future__ import annotations

import json
from pathlib import Path

from recsys_topk.cli.main import main


def test_searches_requests_and_reload_are_measured_without_an_error(tmp_path: Path) -> None:
    assert main(["bench", "serve", "--quick", "--kinds", "ivf,hnsw", "--json", str(tmp_path / "found.json")]) == 0
    rows = {row["part"]: row for row in json.loads((tmp_path / "found.json").read_text())["rows"]}
    assert rows["search, exact"]["recall"] == 1
    assert 0.5 < rows["search, ivf"]["recall"] <= 1
    assert 0.5 < rows["search, hnsw"]["recall"] <= 1
    loads = {part: row for part, row in rows.items() if part.startswith("service")}
    assert list(loads) == ["service, 1 at once", "service, 4 at once", "service, 4 at once, reload"]
    for row in loads.values():
        assert row["errors"] == 0
        assert 0 < row["p50 ms"] <= row["p95 ms"] <= row["p99 ms"]
    assert [row["exports"] for row in loads.values()] == [1, 1, 2]
