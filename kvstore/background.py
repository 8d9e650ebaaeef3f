"""Work of the daemon that may wait for a file system, beside its event loop."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress
from threading import Thread
from typing import Any, TypeVar

T = TypeVar("T")

CLOSE_SECONDS = 5.0
"""What work that is under way gets to end."""
_log = logging.getLogger(__name__)


async def in_thread(work: Callable[[], T]) -> T:
    """What `work` returns, run in a thread of its own: one that hangs in a file system must not keep the process."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(setter: Callable[[Any], None], value: object) -> None:
        if not future.done():
            setter(value)

    def run() -> None:
        try:
            outcome: tuple[Callable[[Any], None], object] = future.set_result, work()
        except BaseException as error:
            outcome = future.set_exception, error
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(settle, *outcome)

    Thread(target=run, daemon=True).start()
    return await future


@asynccontextmanager
async def periodic(seconds: float, work: Callable[[], object]) -> AsyncGenerator[None, None]:
    """Inside, `work` runs again and again in a thread, with a pause of `seconds` between.

    What it raises is logged, once while it stays the same. At the end it is waited for, but not for long.
    """
    stop = asyncio.Event()

    async def repeat() -> None:
        said = ""
        while not stop.is_set():
            try:
                await in_thread(work)
                said = ""
            except Exception as error:  # one namespace's trouble must not end the service of the others
                if repr(error) != said:
                    said = repr(error)
                    _log.warning("%s: it is tried again", error, exc_info=not isinstance(error, OSError))
            with suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), seconds)

    task = asyncio.create_task(repeat())
    try:
        yield
    finally:
        stop.set()
        await asyncio.wait({task}, timeout=CLOSE_SECONDS)
        task.cancel()
