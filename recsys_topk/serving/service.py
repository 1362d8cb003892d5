"""The HTTP service: recommendations, health, metrics, and a page that shows the funnel."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import math
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple

from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel, ConfigDict, Field

from recsys_topk import __version__
from recsys_topk.serving.batching import Batcher, OverloadedError
from recsys_topk.serving.connections import ConnectionLimits
from recsys_topk.serving.current import CurrentExport
from recsys_topk.serving.feedback import add_feedback, open_logs
from recsys_topk.serving.funnel import Passage
from recsys_topk.serving.funnel_log import is_sampled, served
from recsys_topk.serving.limits import ACCESS_LOGS, BodyLimits, Measured
from recsys_topk.serving.recommend import CascadeRecommender, UnknownUserError
from recsys_topk.serving.rows import read_titles
from recsys_topk.serving.telemetry import Telemetry

Name = Annotated[int, Field(strict=True)] | Annotated[str, Field(max_length=256)]
LONGEST_LIST = 10_000

# The page loads no external resources, and the policy forbids them.
PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:",
    "X-Content-Type-Options": "nosniff",
}


def _limit(default: Any, text: str, choices: Sequence[str] | None = None) -> Any:
    return field(default=default, metadata={"help": text, "choices": choices})


@dataclass(frozen=True)
class ServiceOptions:
    """Limits of a service. The help of `recsys-topk serve` is that of the fields."""

    body_bytes: int = _limit(1 << 20, "largest body of a request, in bytes")
    users: int = _limit(64, "users per request")
    timeout: float = _limit(10.0, "seconds in which a body must arrive, and a request must be answered (else 504)")
    batch: int = _limit(32, "requests that are answered by one call of the models")
    batch_wait: float = _limit(0.0, "seconds that a request waits for others while no call is running")
    queue: int = _limit(1024, "requests that may wait; more are refused (503)")
    calls: int = _limit(1, "calls that may run at once, in each worker")
    threads: int = _limit(1, "threads of one call of a model")
    watch: float = _limit(2.0, "seconds between two looks for a newer export; 0 = never")
    connections: int = _limit(800, "open connections of each worker; more are refused (503)")
    header_seconds: float = _limit(10.0, "seconds in which the head of a request must arrive (else 408)")
    header_bytes: int = _limit(1 << 15, "largest head of a request, in bytes (else 431)")
    titles: str = _limit("", "file with columns item_id and title, which the page shows (Parquet, CSV, JSON lines)")
    access_log: str = _limit("off", "one line per request on standard output, as text or JSON", ACCESS_LOGS)
    log: str = _limit("", "folder of the funnel log, and with -feedback after its name of the feedback; empty = no log")
    log_share: float = _limit(0.05, "share of the requests to log")
    log_dropped: int = _limit(20, "items per list to log that the first stage dropped, drawn at random")
    log_queue: int = _limit(4096, "lists, and events, that may wait to be logged; more are dropped and counted")
    log_seconds: float = _limit(60.0, "seconds after which a file of the log is written")
    log_bytes: int = _limit(64 << 20, "size in memory at which a file of the log is written")

    def __post_init__(self) -> None:
        if not 0 <= self.log_share <= 1:
            raise ValueError(f"log_share must be between 0 and 1, got {self.log_share}")


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
    where: dict[str, list[Name]] | None = Field(
        None, max_length=16, description="Recommend only items with one of the values of each of these features"
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
    request: str
    recommendations: list[list[Scored]]
    warnings: list[str] = Field([], description="Names of the request that the export does not know")


class AskFunnel(BaseModel):
    """A request for the funnel of a user, with an optional item to explain."""

    model_config = ConfigDict(extra="forbid")

    user: Name
    exclude_seen: bool = False
    item: Name | None = None


def make_app(export: str | Path, index: str | Path | None = None, options: ServiceOptions | None = None) -> FastAPI:
    """Return the service as an ASGI application. The export is opened immediately, so errors show before it listens.

    The path of the export may be a symbolic link, which is followed again when it changes. Without an index, search is
    exact.
    """
    chosen = options or ServiceOptions()
    titles = read_titles(chosen.titles) if chosen.titles else {}
    telemetry = Telemetry()

    def loaded(success: bool) -> None:
        telemetry.loads.labels("loaded" if success else "failed").inc()
        telemetry.use(current.recommender.identity, not success)

    current = CurrentExport(export, index, chosen.threads, loaded)
    batcher: Batcher[Question, Answered] | None = None
    funnels, events = open_logs(chosen, current, telemetry.rows) if chosen.log else (None, None)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[dict[str, Any]]:
        nonlocal batcher
        batcher = Batcher(
            answer_together,
            most=chosen.batch,
            wait=chosen.batch_wait,
            queue=chosen.queue,
            workers=chosen.calls,
            observe=telemetry.batch.observe,
        )
        batcher.start()
        app.state.logs = logs = [one for one in (funnels, events) if one is not None]
        for one in logs:
            one.start()
        telemetry.use(current.recommender.identity)
        watcher = asyncio.create_task(current.watch(chosen.watch)) if chosen.watch else None
        app.state.ready = True
        limits = ConnectionLimits(
            chosen.connections,
            chosen.header_seconds,
            chosen.header_bytes,
            lambda limit: telemetry.cut.labels(limit).inc(),
        )
        yield {ConnectionLimits.STATE: limits}
        app.state.ready = False
        if watcher is not None:
            watcher.cancel()
        await batcher.stop()
        for one in logs:
            await asyncio.to_thread(one.stop)

    app = FastAPI(title="recsys_topk", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.current = current
    app.state.ready = False
    app.add_middleware(BodyLimits, most=chosen.body_bytes, seconds=chosen.timeout)
    app.add_middleware(Measured, observe=telemetry.observe, access=chosen.access_log)
    app.add_exception_handler(RequestValidationError, _validation_error)

    @app.post("/recommend", responses=_ERRORS, response_model=Answer)
    async def recommend(ask: Ask, request: Request) -> Response:
        """Recommend items to users."""
        recommender, name = current.recommender, request.state.request_id
        _check(ask, recommender, chosen.users)
        assert batcher is not None
        with _http_errors("rows" if ask.rows is not None else "users", chosen.timeout):
            answer = await asyncio.wait_for(batcher.ask((ask, recommender, name)), chosen.timeout)
        if funnels is not None and is_sampled(name, chosen.log_share):
            funnels.add(served(name, ask.who, answer.passages, recommender.check_number(ask.number), recommender))
        return Response(answer.content, media_type="application/json")

    if events is not None:
        add_feedback(app, current, events)

    @app.post("/funnel", responses=_ERRORS)
    async def funnel(ask: AskFunnel) -> dict[str, Any]:
        """Return the items that each stage scores, keeps and drops for a user."""
        with _http_errors("item", chosen.timeout):
            stages = asyncio.to_thread(show_funnel, current.recommender, ask, titles)
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
        found = {"export": manifest.identity, "items": len(current.recommender.items.names), "stages": stages}
        return {**found, "failed_load": current.failed}

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Return metrics in the Prometheus format."""
        telemetry.waiting.set(0 if batcher is None else batcher.waiting)
        return Response(await asyncio.to_thread(telemetry.text), media_type=CONTENT_TYPE_LATEST)

    @app.get("/", response_class=HTMLResponse, include_in_schema=False)
    async def page() -> HTMLResponse:
        text = resources.files("recsys_topk.serving").joinpath("page.html").read_text(encoding="utf-8")
        return HTMLResponse(text, headers=PAGE_HEADERS)

    return app


_ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"description": "The body is not text in UTF-8"},
    404: {"description": "The export has no such user"},
    408: {"description": "The body did not arrive in time"},
    413: {"description": "The body is too large"},
    500: {"description": "A model or the service failed; the answer has the id of the request"},
    503: {"description": "Too many waiting requests"},
    504: {"description": "Not answered in time"},
}


Question = tuple[Ask, CascadeRecommender, str]
"""A request, the recommender that answers it, and the id of the request."""


class Answered(NamedTuple):
    """The content of a response, and the results of all stages for each of its lists."""

    content: bytes
    passages: list[list[Passage]]


def answer_together(asked: Sequence[Question]) -> list[Answered | BaseException]:
    """Answer several requests. Requests with the same options and the same export share one model call."""
    groups: dict[tuple[Any, ...], list[int]] = {}
    for place, (ask, recommender, _) in enumerate(asked):
        limits = (str(ask.allowed), str(ask.blocked), str(ask.where))
        groups.setdefault((id(recommender), ask.users is None, ask.exclude_seen, *limits), []).append(place)
    answers: list[Answered | BaseException] = [RuntimeError("not answered")] * len(asked)
    for places in groups.values():
        for place, found in zip(places, _answer_group([asked[place] for place in places]), strict=True):
            answers[place] = found
    return answers


def _answer_group(asked: Sequence[Question]) -> list[Answered | BaseException]:
    first, recommender, _ = asked[0]
    try:
        found = recommender.passages(
            [user for ask, *_ in asked for user in ask.who],
            exclude_seen=first.exclude_seen,
            allowed=first.allowed,
            blocked=first.blocked,
            where=first.where,
        )
    except Exception as error:
        if len(asked) == 1:
            return [error]
        # One request is invalid or fails: answer each one separately, so that the others succeed.
        return [_answer_group([one])[0] for one in asked]
    answers: list[Answered | BaseException] = []
    lists = iter(found)
    for ask, _, name in asked:
        number = recommender.check_number(ask.number)
        passages = [next(lists) for _ in ask.who]
        # This is the format of `Answer`. Of the client's input it contains only the id, so it is not validated again.
        own = [[vars(one) for one in recommender.recommendations(stages, number)] for stages in passages]
        warnings = recommender.unknown(ask.who, ask.allowed, ask.blocked)
        answer = {"export": recommender.identity, "request": name, "recommendations": own, "warnings": warnings}
        answers.append(Answered(json.dumps(answer, allow_nan=False).encode(), passages))
    return answers


def show_funnel(
    recommender: CascadeRecommender, ask: AskFunnel, titles: Mapping[str, str] = MappingProxyType({})
) -> dict[str, Any]:
    """Return the items that each stage scored, kept and dropped for a user, and the explanation of `ask.item`.

    The titles of items, by name, are added where there are any.
    """
    names = recommender.items.names
    passages = recommender.passages([ask.user], exclude_seen=ask.exclude_seen)[0]
    stages = [
        {
            "stage": one.stage,
            "quota": one.quota,
            "items": [
                {"item": name, "title": titles.get(str(name)), "score": float(score), "kept": place < one.quota}
                for place, (name, score) in enumerate(zip(names[one.rows].tolist(), one.scores, strict=True))
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
    kind = request.headers.get("content-type", "")
    if request.method == "POST" and "json" not in kind:
        text = f"send the header 'Content-Type: application/json' with a JSON body, got {_clean(kind)!r}"
        details = [{"loc": ["header", "content-type"], "msg": text, "type": "value_error"}]
    return JSONResponse({"detail": details}, status_code=422)


def _clean(text: str) -> str:
    """Return text with characters that cannot be encoded as UTF-8 replaced."""
    return text.encode("utf-8", "replace").decode()
