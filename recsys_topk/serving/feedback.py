"""`POST /feedback`: what users did with items that were shown, logged beside the funnel."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import pyarrow as pa
from fastapi import FastAPI, HTTPException
from prometheus_client import Counter
from pydantic import BaseModel, ConfigDict, Field

from recsys_topk.serving.current import CurrentExport
from recsys_topk.serving.funnel_log import TIME, Served, ServedTables, column_of
from recsys_topk.serving.row_log import RowLog
from recsys_topk.tabular.export_tables import as_integer


class Event(BaseModel):
    """What a user did with an item that was shown."""

    model_config = ConfigDict(extra="forbid")

    request: str = Field(max_length=160, description="`request` of the answer; of its list n of several: request/n")
    item: Annotated[int, Field(strict=True)] | Annotated[str, Field(max_length=256)]
    event: str = Field(min_length=1, max_length=64, description="The kind of event, e.g. click")
    value: float | None = Field(None, allow_inf_nan=False)


class Told(BaseModel):
    """Events to log."""

    model_config = ConfigDict(extra="forbid")

    events: list[Event] = Field(min_length=1, max_length=10_000)


def add_feedback(app: FastAPI, current: CurrentExport, log: RowLog[tuple[Event, int]]) -> None:
    """Add the path to a service. Events are logged with their time, in microseconds."""

    @app.post("/feedback", responses={503: {"description": "Too many waiting events; try again"}})
    async def feedback(told: Told) -> dict[str, int]:
        """Log what users did with items that were shown."""
        now, integers = time.time_ns() // 1000, current.recommender.items.index.are_integers
        wrong = [one.item for one in told.events if integers and as_integer(one.item) is None]
        if wrong:
            text = f"the items of this export are integers, got {wrong[0]!r:.60}"
            raise HTTPException(422, [{"loc": ["body", "events"], "msg": text, "type": "value_error"}])
        if not log.add([(one, now) for one in told.events]):
            raise HTTPException(503, "too many waiting events; try again later", headers={"Retry-After": "1"})
        return {"accepted": len(told.events)}


def open_logs(options: Any, current: CurrentExport, rows: Counter) -> tuple[RowLog[Served], RowLog[tuple[Event, int]]]:
    """Return the logs of requests and of events, given the `ServiceOptions`. Outcomes are counted in `rows`."""
    item = pa.int64() if current.recommender.items.index.are_integers else pa.string()

    def tables(told: Sequence[tuple[Event, int]]) -> Iterator[Any]:
        yield pa.table({
            "request_id": column_of([one.request for one, _ in told], pa.string()),
            "item_id": column_of([one.item for one, _ in told], item),
            "event": column_of([one.event for one, _ in told], pa.string()),
            "value": column_of([one.value for one, _ in told], pa.float64()),
            "timestamp": pa.array([at for _, at in told], pa.int64()).cast(TIME),
        })  # fmt: skip

    def opened(name: str, folder: Path, make: Any) -> RowLog[Any]:
        written = {outcome: rows.labels(name, outcome) for outcome in ("written", "dropped")}
        limits = {"queue": options.log_queue, "seconds": options.log_seconds, "nbytes": options.log_bytes}
        return RowLog(folder, make, lambda outcome, number: written[outcome].inc(number), **limits)

    folder = Path(options.log)
    lists = opened("requests", folder, ServedTables(options.log_share, options.log_dropped))
    return lists, opened("feedback", folder.with_name(f"{folder.name}-feedback"), tables)
