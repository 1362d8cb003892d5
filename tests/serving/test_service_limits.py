"""In-process tests of the service with a slow or instrumented recommender: timeouts, a full queue, memory."""

from __future__ import annotations

import asyncio
import json
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from recsys_topk.serving import service
from recsys_topk.serving.recommend import CascadeRecommender
from recsys_topk.serving.service import ServiceOptions, make_app


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Delays all answers until the event is set."""
    gate = threading.Event()
    answer = service.answer_together

    def late(requests: Sequence[Any]) -> Any:
        gate.wait(60)
        return answer(requests)

    monkeypatch.setattr(service, "answer_together", late)
    return gate


def test_request_that_times_out_gets_504(export: Path, slow: threading.Event) -> None:
    with TestClient(make_app(export, options=ServiceOptions(timeout=0.3, watch=0))) as client:
        assert client.post("/recommend", json={"rows": [{}]}).status_code == 504
        slow.set()


def test_requests_beyond_a_full_queue_get_503_and_the_others_are_answered(export: Path, slow: threading.Event) -> None:
    options = ServiceOptions(timeout=60, queue=2, batch=1, batch_wait=0, watch=0)
    found: list[tuple[int, str | None]] = []

    def ask() -> None:
        response = client.post("/recommend", json={"rows": [{}]})
        found.append((response.status_code, response.headers.get("Retry-After")))

    with TestClient(make_app(export, options=options)) as client:
        threads = [threading.Thread(target=ask) for _ in range(9)]
        for thread in threads:
            thread.start()
        for _ in range(600):
            if len(found) >= 4:
                break
            time.sleep(0.05)
        refused = list(found)
        slow.set()
        for thread in threads:
            thread.join()
    assert set(refused) == {(503, "1")}
    statuses = [status for status, _ in found]
    assert statuses.count(200) >= 3
    assert statuses.count(200) + statuses.count(503) == 9


@pytest.mark.parametrize(("first", "then"), [(500, 2000), pytest.param(2000, 8000, marks=pytest.mark.long)])
def test_memory_does_not_grow_over_thousands_of_requests(
    export: Path, recommender: CascadeRecommender, first: int, then: int
) -> None:
    assert recommender.users is not None
    names = recommender.users.names.tolist()
    app = make_app(export, options=ServiceOptions(batch=64, watch=0))
    scope = {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
             "path": "/recommend", "raw_path": b"/recommend", "query_string": b"", "root_path": "",
             "headers": [(b"content-type", b"application/json")], "client": ("127.0.0.1", 1),
             "server": ("127.0.0.1", 2)}  # fmt: skip

    async def ask(number: int) -> None:
        body = json.dumps({"users": [names[number % len(names)]]}).encode()
        statuses = []

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: Any) -> None:
            statuses.append(message.get("status"))

        await app(dict(scope), receive, send)
        assert statuses[0] == 200

    async def run() -> tuple[int, int]:
        async with app.router.lifespan_context(app):
            sizes = []
            for rounds in (first, then):
                for start in range(0, rounds, 250):
                    await asyncio.gather(*(ask(start + one) for one in range(250)))
                sizes.append(_resident_bytes())
            return sizes[0], sizes[1]

    before, after = asyncio.run(run())
    assert after - before < 8 << 20


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
