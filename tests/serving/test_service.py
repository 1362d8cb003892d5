"""The HTTP service, in a process without torch: statuses, load, reload, shutdown, and the OpenAPI document."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from recsys_topk.serving.manifest import read_manifest, write_manifest
from recsys_topk.serving.recommend import CascadeRecommender
from tests.serving.conftest import serving_commands
from tests.serving.running import Running, run_blocked, serving


@pytest.fixture(scope="module")
def exports(export: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A link to an export with k = 5, and another export with k = 3."""
    folder = tmp_path_factory.mktemp("published")
    other = folder / "second"
    shutil.copytree(export, other)
    manifest = read_manifest(other)
    write_manifest(other, manifest.schema, manifest.stages, 3, manifest.facts)
    link = folder / "current"
    link.symlink_to(export)
    return link, other


@pytest.fixture(scope="module")
def service(exports: tuple[Path, Path]) -> Iterator[Running]:
    with serving(exports[0], "--timeout", "2", "--watch", "0.1") as running:
        yield running


@pytest.fixture(scope="module")
def user(recommender: CascadeRecommender) -> Any:
    assert recommender.users is not None
    return recommender.users.names[4].item()


def test_service_answers_like_the_recommender(service: Running, recommender: CascadeRecommender, user: Any) -> None:
    status, answer = service.call("/recommend", {"users": [user, user + 0], "number": 7, "exclude_seen": True})
    assert status == 200
    assert answer["export"] == recommender.identity
    for own in answer["recommendations"]:
        wanted = recommender.recommend([user], 7, exclude_seen=True)[0]
        assert [(one["item"], one["rank"]) for one in own] == [(one.item, one.rank) for one in wanted]
        assert own[0]["scores"] == pytest.approx(wanted[0].scores, rel=1e-5)
    assert service.call("/health")[0] == 200
    assert service.call("/ready")[1]["items"] == 285
    assert len(service.call("/users?prefix=1")[1]["users"]) > 0
    status, metrics = service.call("/metrics")
    assert 'recsys_topk_requests_total{path="/recommend",status="200"} 1.0' in metrics
    assert f'recsys_topk_export_info{{export="{recommender.identity}"}} 1.0' in metrics


def test_invalid_requests_get_an_error_status_and_the_service_stays_up(service: Running, user: Any) -> None:
    cases: list[tuple[Any, int, str]] = [
        ({"users": ["nobody"]}, 404, "no user"),
        ({"users": [10**30]}, 404, "no user"),
        ({}, 422, "users"),
        ({"users": [user], "rows": [{}]}, 422, "users"),
        ({"users": []}, 422, "users"),
        ({"users": [True]}, 422, "users"),
        ({"users": [user] * 65}, 422, "at most 64"),
        ({"users": [user], "number": 0}, 422, "number"),
        ({"users": [user], "number": 11}, 422, "number"),
        ({"users": [user], "colour": 1}, 422, "colour"),
        ({"users": [user], "blocked": list(range(10_001))}, 422, "blocked"),
        ({"rows": [{"history": "abc"}]}, 422, "rows"),
        ({"rows": [{"history": [[1], [2]]}]}, 422, "rows"),
        ({"rows": [{"user_id": {"a": 1}}]}, 422, "rows"),
        ({"rows": [{"user_id": 2**70}, {"user_id": "x"}]}, 422, "rows"),
        ([1], 422, "body"),
    ]
    for body, wanted, text in cases:
        status, answer = service.call("/recommend", body)
        assert (status, text in json.dumps(answer)) == (wanted, True), (str(body)[:80], status, answer)
    for raw in (b"{", b"", b"\xff", b"[" * 100_000, b'{"users": [NaN]}', b'{"users": ["\\ud800"]}'):
        assert service.call("/recommend", raw=raw)[0] in (400, 422), raw[:20]
    assert service.call("/recommend", raw=b'{"rows": [{"history": ["\\ud800"]}]}')[0] in (200, 422)
    assert service.call("/recommend", {"rows": [{}]})[0] == 200
    assert service.call("/recommend", {"rows": [{"history": [-5, 10**25]}]})[0] == 200
    assert service.call("/nowhere")[0] == 404
    assert service.call("/recommend")[0] == 405
    assert service.call("/recommend", {"users": [user]})[0] == 200


@pytest.mark.parametrize("announced", [True, False])
def test_body_of_ten_megabytes_gets_413(service: Running, announced: bool) -> None:
    connection = service.connect()
    chunks = (b"x" * 65536 for _ in range(160))
    headers = {"Content-Length": str(160 * 65536)} if announced else {"Transfer-Encoding": "chunked"}
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the service closes the connection early
        connection.request("POST", "/recommend", chunks, headers, encode_chunked=not announced)
    try:
        assert connection.getresponse().status == 413
    except (BrokenPipeError, ConnectionResetError):
        assert not announced or service.call("/health")[0] == 200
    connection.close()


def test_slow_client_gets_408(service: Running) -> None:
    with socket.create_connection(("127.0.0.1", service.port), timeout=60) as slow:
        slow.sendall(b"POST /recommend HTTP/1.1\r\nHost: x\r\nContent-Length: 90\r\n\r\n{")
        assert slow.recv(100).startswith(b"HTTP/1.1 408")


async def _post_recommend(port: int, body: bytes) -> int:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST /recommend HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n"
    writer.write(head.encode() + b"Content-Type: application/json\r\n\r\n" + body)
    answer = await reader.read()
    writer.close()
    return int(answer.split(b" ", 2)[1])


def test_500_concurrent_connections_are_all_answered(exports: tuple[Path, Path], user: Any) -> None:
    body = json.dumps({"users": [user]}).encode()

    async def all_at_once(port: int) -> list[int]:
        return await asyncio.gather(*(_post_recommend(port, body) for _ in range(500)))

    with serving(exports[0], "--timeout", "60") as running:
        statuses = asyncio.run(all_at_once(running.port))
        assert set(statuses) == {200}
        assert running.call("/health")[0] == 200
        batches = running.call("/metrics")[1]
    calls = next(line for line in batches.splitlines() if line.startswith("recsys_topk_batch_requests_count"))
    assert float(calls.split()[1]) < 250  # requests were batched


def test_new_export_is_loaded_without_a_failed_request(exports: tuple[Path, Path], service: Running, user: Any) -> None:
    link, other = exports
    old, new = read_manifest(link).identity, read_manifest(other).identity
    answers: list[tuple[int, Any]] = []
    stop = threading.Event()

    def ask() -> None:
        while not stop.is_set():
            answers.append(service.call("/recommend", {"users": [user]}))

    thread = threading.Thread(target=ask)
    thread.start()
    fresh = link.with_name("fresh")
    fresh.symlink_to(other)
    fresh.rename(link)
    for _ in range(600):
        if answers and answers[-1][1].get("export") == new:
            break
        time.sleep(0.1)
    stop.set()
    thread.join()
    assert {status for status, _ in answers} == {200}
    assert {answer["export"] for _, answer in answers} <= {old, new}
    assert answers[-1][1]["export"] == new
    assert len(answers[-1][1]["recommendations"][0]) == 3
    # A damaged export does not replace the loaded one.
    broken = link.with_name("broken")
    shutil.copytree(other, broken)
    (broken / "items.arrow").write_bytes(b"?")
    fresh.symlink_to(broken)
    fresh.rename(link)
    for _ in range(600):
        if 'outcome="failed"} 1.0' in service.call("/metrics")[1]:
            break
        time.sleep(0.1)
    assert service.call("/recommend", {"users": [user]})[1]["export"] == new


def test_stopped_service_finishes_its_requests(export: Path, user: Any) -> None:
    found: list[int] = []
    # Each batch waits one second for more requests, so all requests are open when the signal arrives.
    with serving(export, "--batch-wait", "1") as running:
        threads = [
            threading.Thread(target=lambda: found.append(running.call("/recommend", {"users": [user]})[0]))
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        time.sleep(0.5)
        running.process.send_signal(signal.SIGTERM)
        for thread in threads:
            thread.join()
        assert running.process.wait(60) in (0, -signal.SIGTERM)
    assert found == [200] * 4


def test_commands_of_the_serving_page_run_without_torch(
    export: Path, tmp_path: Path, user: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "users.csv").write_text("user_id,history\n3,\n4,7 8 9\n")
    _, index, recommend, serve = serving_commands(**{"export": str(export), "7": str(user)})
    from_file = ["recommend", "--export", str(export), "--users", "users.csv", "--out", "found.jsonl"]
    outputs = {}
    for arguments in (index, recommend, from_file):
        process = run_blocked(*arguments)
        outputs[len(outputs)], errors = process.communicate(timeout=240)
        assert process.returncode == 0, errors
    assert "recall 1.0000 against exact search" in outputs[0]
    assert len(json.loads(outputs[1])["items"]) == 5
    assert len((tmp_path / "found.jsonl").read_text().splitlines()) == 2
    assert serve[0] == "serve"
    with serving(export, *serve[3:]) as running:
        status, answer = running.call("/recommend", {"users": [user]})
    assert status == 200
    assert [one["item"] for one in answer["recommendations"][0]] == [
        one["item"] for one in json.loads(outputs[1])["items"]
    ]


@pytest.mark.filterwarnings("ignore")
def test_random_requests_conform_to_the_openapi_document(service: Running) -> None:
    import schemathesis
    from hypothesis import HealthCheck, Phase, given, settings
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi.checks import (
        content_type_conformance,
        response_schema_conformance,
        status_code_conformance,
    )

    # The valid names depend on the export, so requests that fit the document may still get an error status.
    checks = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
    schema = schemathesis.openapi.from_url(f"{service.url}/openapi.json")
    requests_sent = 0
    for operation in schema.get_all_operations():

        @settings(max_examples=15, deadline=None, derandomize=True, database=None, phases=[Phase.generate],
                  suppress_health_check=list(HealthCheck))  # fmt: skip
        @given(case=operation.ok().as_strategy())
        def check(case: Any) -> None:
            nonlocal requests_sent
            requests_sent += 1
            case.call_and_validate(checks=checks)

        check()
    assert requests_sent > 30
