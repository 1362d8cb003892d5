"""Dynamic batching: requests that arrive at about the same time are answered by one call of the models."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

Q = TypeVar("Q")
A = TypeVar("A")


class OverloadedError(RuntimeError):
    """The queue of waiting requests is full."""


@dataclass
class _Waiting(Generic[Q]):
    question: Q
    answer: asyncio.Future[Any] = field(repr=False)


class Batcher(Generic[Q, A]):
    """Collects questions for a short time and answers them by one call in another thread.

    `answer` returns one answer, or one exception, per question; a call gets at most `most` questions, and waits `wait`
    seconds for more after the first. `queue` questions may wait, further ones raise `OverloadedError`. `observe` is
    called with the number of questions of each call.
    """

    def __init__(
        self,
        answer: Callable[[Sequence[Q]], Sequence[A | BaseException]],
        *,
        most: int = 32,
        wait: float = 0.0,
        queue: int = 1024,
        workers: int = 1,
        observe: Callable[[int], object] = lambda number: None,
    ) -> None:
        self._answer = answer
        self._most, self._wait, self._observe = most, wait, observe
        self._queue: asyncio.Queue[_Waiting[Q]] = asyncio.Queue(queue)
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="recommend")
        self._free = asyncio.Semaphore(workers)
        self._calls: set[asyncio.Task[None]] = set()
        self._loop: asyncio.Task[None] | None = None

    @property
    def waiting(self) -> int:
        """Number of waiting questions."""
        return self._queue.qsize()

    def start(self) -> None:
        """Start answering. Call it inside the event loop."""
        self._loop = asyncio.create_task(self._run())

    async def ask(self, question: Q) -> A:
        """Return the answer to a question, or raise the exception that the call returned for it."""
        waiting = _Waiting(question, asyncio.get_running_loop().create_future())
        try:
            self._queue.put_nowait(waiting)
        except asyncio.QueueFull:
            raise OverloadedError("too many waiting requests; try again later") from None
        found: A = await waiting.answer
        return found

    async def stop(self) -> None:
        """Answer the waiting questions, then stop."""
        while self._queue.qsize() or self._calls:
            await asyncio.sleep(0.01)
        if self._loop is not None:
            self._loop.cancel()
        self._pool.shutdown(wait=True)

    async def _run(self) -> None:
        while True:
            await self._free.acquire()
            batch = [await self._queue.get()]
            if self._queue.qsize() < self._most - 1:
                await asyncio.sleep(self._wait)  # sleep(0) runs other tasks, which may ask further questions
            while self._queue.qsize() and len(batch) < self._most:
                batch.append(self._queue.get_nowait())
            call = asyncio.create_task(self._call(batch))
            self._calls.add(call)
            call.add_done_callback(self._calls.discard)

    async def _call(self, batch: Sequence[_Waiting[Q]]) -> None:
        # Skip questions that were cancelled in the meantime.
        batch = [one for one in batch if not one.answer.done()]
        try:
            if not batch:
                return
            self._observe(len(batch))
            questions = [one.question for one in batch]
            answers: Sequence[A | BaseException]
            try:
                answers = await asyncio.get_running_loop().run_in_executor(self._pool, self._answer, questions)
            except Exception as error:  # unlike an exception that is returned, not the fault of a question
                fault = RuntimeError(f"the call failed: {type(error).__name__}: {error}")
                fault.__cause__ = error
                answers = [fault] * len(batch)
            for one, answer in zip(batch, answers, strict=True):
                if one.answer.done():
                    continue
                if isinstance(answer, BaseException):
                    one.answer.set_exception(answer)
                else:
                    one.answer.set_result(answer)
        finally:
            self._free.release()
