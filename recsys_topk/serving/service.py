"""The HTTP service: recommendations, health, metrics, and a page that shows the funnel."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import math
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from importlib import resources
from pathlib import Path
from typing import Annotated, Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from pydantic import BaseModel, ConfigDict, Field

from recsys_topk import __version__
from recsys_topk.serving.batching import Batcher, OverloadedError
from recsys_topk.serving.current import CurrentExport
from recsys_topk.serving.limits import BodyLimits, Measured
from recsys_topk.serving.recommend import CascadeRecommender, UnknownUserError

log = logging.getLogger(__name__)

Name = Annotated[int, Field(strict=True)] | Annotated[str, Field(max_length=256)]
LONGEST_LIST = 10_000

# The page loads no external resources, and the policy forbids them.
PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:",
    "X-Content-Type-Options": "nosniff",
}


def _limit(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class ServiceOptions:
    """Limits of a service. The help of `recsys-topk serve` is that of the fields."""

    body_bytes: int = _limit(1 << 20, "largest body of a request, in bytes")
    users: int = _limit(64, "users per request")
    timeout: float = _limit(10.0, "seconds in which a body must arrive, and a request must be answered (else 504)")
    batch: int = _limit(32, "requests that are answered by one call of the models")
    batch_wait: float = _limit(0.0, "seconds that a request waits for others while no call is running")
    queue: int = _limit(1024, "requests that may wait; more are refused (503)")
    workers: int = _limit(1, "calls that may run at once")
    threads: int = _limit(1, "threads of one call of a model")
    watch: float = _limit(2.0, "seconds between two looks for a newer export; 0 = never")


class Ask(BaseModel):
    """A request for recommendations."""

    model_config = ConfigDict(extra="forbid")

    users: list[Name] | None = Field(None, min_length=1, description="Users of the export, by name")
    rows: list[dict[str, Any]] | None = Field(
        None, min_length=1, description="Features by name, and `history`: names of items, oldest first"
    )
    number: int | None = Field(None, ge=1, description="Items per user; by default the k of the cascade")
    exclude_seen: bool = Field(False, description="Exclude items that the user has seen")
    allowed: list[Name] | None = Field(None, max_length=LONGEST_LIST, description="Recommend only these items")
    blocked: list[Name] = Field(
        default_factory=list, max_length=LONGEST_LIST, description="Never recommend these items"
    )

    @property
    def who(self) -> list[Any]:
        """The users, as names or as rows of features."""
        return list(self.users if self.users is not None else self.rows or ())


class Scored(BaseModel):
    """A recommended item."""

    item: int | str
    rank: int
    scores: dict[str, float]


class Answer(BaseModel):
    """Recommendations, one list per user, in the order of the request."""

    export: str
    recommendations: list[list[Scored]]


class AskFunnel(BaseModel):
    """A request for the funnel of a user, with an optional item to explain."""

    model_config = ConfigDict(extra="forbid")

    user: Name
    exclude_seen: bool = False
    item: Name | None = None


class Telemetry:
    """The metrics of a service, in a separate registry."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "recsys_topk_requests_total", "Requests by path and status", ["path", "status"], registry=self.registry
        )
        self.seconds = Histogram(
            "recsys_topk_request_seconds",
            "Response time",
            ["path"],
            buckets=(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10),
            registry=self.registry,
        )
        self.batch = Histogram(
            "recsys_topk_batch_requests", "Requests per call", buckets=(1, 2, 4, 8, 16, 32, 64), registry=self.registry
        )
        self.waiting = Gauge("recsys_topk_waiting_requests", "Waiting requests", registry=self.registry)
        self.loads = Counter(
            "recsys_topk_export_loads_total", "Exports loaded, by outcome", ["outcome"], registry=self.registry
        )
        self.export = Gauge("recsys_topk_export_info", "The export in use", ["export"], registry=self.registry)

    def observe(self, path: str, status: int, seconds: float) -> None:
        """Count a request."""
        self.requests.labels(path, str(status)).inc()
        self.seconds.labels(path).observe(seconds)


def make_app(export: str | Path, index: str | Path | None = None, options: ServiceOptions | None = None) -> FastAPI:
    """Return the service as an ASGI application. The export is opened immediately, so errors show before it listens.

    The path of the export may be a symbolic link, which is followed again when it changes. Without an index, search is
    exact.
    """
    chosen = options or ServiceOptions()
    telemetry = Telemetry()
    current = CurrentExport(
        export, index, chosen.threads, lambda good: telemetry.loads.labels("loaded" if good else "failed").inc()
    )
    batcher: Batcher[tuple[Ask, CascadeRecommender], bytes] | None = None

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        nonlocal batcher
        batcher = Batcher(
            answer_together,
            most=chosen.batch,
            wait=chosen.batch_wait,
            queue=chosen.queue,
            workers=chosen.workers,
            observe=telemetry.batch.observe,
        )
        batcher.start()
        watcher = asyncio.create_task(_watch(current, chosen.watch)) if chosen.watch else None
        app.state.ready = True
        yield
        app.state.ready = False
        if watcher is not None:
            watcher.cancel()
        await batcher.stop()

    app = FastAPI(title="recsys_topk", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.current = current
    app.state.ready = False
    app.add_middleware(BodyLimits, most=chosen.body_bytes, seconds=chosen.timeout)

    app.add_middleware(Measured, observe=telemetry.observe)
    app.add_exception_handler(RequestValidationError, _validation_error)

    @app.post("/recommend", responses=_ERRORS, response_model=Answer)
    async def recommend(ask: Ask) -> Response:
        """Recommend items to users."""
        recommender = current.recommender
        _check(ask, recommender, chosen.users)
        assert batcher is not None
        with _http_errors("rows" if ask.rows is not None else "users", chosen.timeout):
            answer = await asyncio.wait_for(batcher.ask((ask, recommender)), chosen.timeout)
        return Response(answer, media_type="application/json")

    @app.post("/funnel", responses=_ERRORS)
    async def funnel(ask: AskFunnel) -> dict[str, Any]:
        """Return the items that each stage scores, keeps and drops for a user."""
        with _http_errors("item", chosen.timeout):
            stages = asyncio.to_thread(show_funnel, current.recommender, ask)
            return await asyncio.wait_for(stages, chosen.timeout)

    @app.get("/users")
    async def users(prefix: Annotated[str, Field(max_length=256)] = "") -> dict[str, list[int | str]]:
        """Return up to 50 users whose names start with a prefix."""
        return {"users": await asyncio.to_thread(_some_users, current.recommender, prefix)}

    @app.get("/health")
    async def health() -> dict[str, str]:
        """Return that the process is alive."""
        return {"status": "alive", "version": __version__}

    @app.get("/ready", responses={503: {"description": "Not ready"}})
    async def ready() -> dict[str, Any]:
        """Return the export in use, or the status 503 if the service is not ready."""
        if not app.state.ready:
            raise HTTPException(503, "starting or stopping")
        manifest = current.recommender.manifest
        stages = [{"name": stage.name, "quota": stage.quota} for stage in manifest.stages]
        return {"export": manifest.identity, "items": len(current.recommender.items.names), "stages": stages}

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Return metrics in the Prometheus format."""
        telemetry.waiting.set(0 if batcher is None else batcher.waiting)
        telemetry.export.clear()
        telemetry.export.labels(current.recommender.manifest.identity).set(1)
        return Response(generate_latest(telemetry.registry), media_type=CONTENT_TYPE_LATEST)

    @app.get("/", response_class=HTMLResponse, include_in_schema=False)
    async def page() -> HTMLResponse:
        text = resources.files("recsys_topk.serving").joinpath("page.html").read_text(encoding="utf-8")
        return HTMLResponse(text, headers=PAGE_HEADERS)

    return app


_ERRORS: dict[int | str, dict[str, Any]] = {
    404: {"description": "The export has no such user"},
    408: {"description": "The body did not arrive in time"},
    413: {"description": "The body is too large"},
    503: {"description": "Too many waiting requests"},
    504: {"description": "Not answered in time"},
}


def answer_together(asked: Sequence[tuple[Ask, CascadeRecommender]]) -> list[bytes | BaseException]:
    """Answer several requests. Requests with the same options and the same export share one model call."""
    groups: dict[tuple[Any, ...], list[int]] = {}
    for place, (ask, recommender) in enumerate(asked):
        options = (id(recommender), ask.users is None, ask.exclude_seen, str(ask.allowed), str(ask.blocked))
        groups.setdefault(options, []).append(place)
    answers: list[bytes | BaseException] = [RuntimeError("not answered")] * len(asked)
    for places in groups.values():
        for place, found in zip(places, _answer_group([asked[place] for place in places]), strict=True):
            answers[place] = found
    return answers


def _answer_group(asked: Sequence[tuple[Ask, CascadeRecommender]]) -> list[bytes | BaseException]:
    first, recommender = asked[0]
    try:
        found = recommender.recommend(
            [user for ask, _ in asked for user in ask.who],
            recommender.most,
            exclude_seen=first.exclude_seen,
            allowed=first.allowed,
            blocked=first.blocked,
        )
    except ValueError as error:
        if len(asked) == 1:
            return [error]
        # One request is invalid: answer each one separately, so that the others succeed.
        return [_answer_group([one])[0] for one in asked]
    answers: list[bytes | BaseException] = []
    lists = iter(found)
    for ask, _ in asked:
        number = recommender.check_number(ask.number)
        # This is the format of `Answer`. It contains no client input, so it is not validated again.
        own = [[vars(one) for one in next(lists)[:number]] for _ in ask.who]
        answer = {"export": recommender.identity, "recommendations": own}
        try:
            answers.append(json.dumps(answer, allow_nan=False).encode())
        except ValueError:
            answers.append(ValueError("the scores are not finite; check for very large feature values"))
    return answers


def show_funnel(recommender: CascadeRecommender, ask: AskFunnel) -> dict[str, Any]:
    """Return the items that each stage scored, kept and dropped for a user, and the explanation of `ask.item`."""
    passages = recommender.passages([ask.user], exclude_seen=ask.exclude_seen)[0]
    stages = [
        {
            "stage": one.stage,
            "quota": one.quota,
            "items": [
                {"item": recommender.items.names[row].item(), "score": float(score), "kept": place < one.quota}
                for place, (row, score) in enumerate(zip(one.rows, one.scores, strict=True))
            ],
        }
        for one in passages
    ]
    explained = None
    if ask.item is not None:
        verdicts = recommender.explain(ask.user, ask.item, exclude_seen=ask.exclude_seen)
        # The cut is infinite if no item is passed on, and JSON has no infinity.
        explained = [{**asdict(one), "cut": one.cut if math.isfinite(one.cut) else None} for one in verdicts]
    return {"user": ask.user, "catalogue": len(recommender.items.names), "stages": stages, "explained": explained}


def _some_users(recommender: CascadeRecommender, prefix: str, number: int = 50) -> list[int | str]:
    names = () if recommender.users is None else recommender.users.names
    matching = (name.item() for name in names if str(name).startswith(prefix))
    return list(itertools.islice(matching, number))


def _check(ask: Ask, recommender: CascadeRecommender, most_users: int) -> None:
    if (ask.users is None) == (ask.rows is None):
        raise _invalid("users", "give either users or rows")
    if len(ask.who) > most_users:
        raise _invalid("users" if ask.rows is None else "rows", f"at most {most_users} per request, got {len(ask.who)}")
    try:
        recommender.check_number(ask.number)
    except ValueError as error:
        raise _invalid("number", str(error)) from None


@contextlib.contextmanager
def _http_errors(field: str, seconds: float) -> Iterator[None]:
    """Convert errors inside this context to responses; `field` is the one that a ValueError is about."""
    try:
        yield
    except TimeoutError:
        raise HTTPException(504, f"not answered within {seconds:g} s") from None
    except OverloadedError as error:
        raise HTTPException(503, str(error), headers={"Retry-After": "1"}) from None
    except UnknownUserError as error:
        raise HTTPException(404, _clean(str(error))) from None
    except ValueError as error:
        raise _invalid(field, str(error)) from None


def _invalid(field: str, text: str) -> HTTPException:
    """Return the error of FastAPI for an invalid field."""
    return HTTPException(422, [{"loc": ["body", field], "msg": _clean(text), "type": "value_error"}])


async def _validation_error(request: Request, error: Exception) -> JSONResponse:
    """Return the status 422 with the names of the invalid fields, without their values, which may be invalid JSON."""
    found: Any = error.errors() if isinstance(error, RequestValidationError) else ()
    details = [
        {"loc": [_clean(str(part)) for part in one["loc"]], "msg": _clean(one["msg"]), "type": one["type"]}
        for one in found
    ]
    return JSONResponse({"detail": details}, status_code=422)


def _clean(text: str) -> str:
    """Return text with characters that cannot be encoded as UTF-8 replaced."""
    return text.encode("utf-8", "replace").decode()


async def _watch(current: CurrentExport, seconds: float) -> None:
    while True:
        await asyncio.sleep(seconds)
        if await asyncio.to_thread(current.refresh):
            log.info("now serving export %s", current.recommender.manifest.identity)
