"""procrastinate on PostgreSQL: defer a job, its worker runs and finishes it; the finished jobs are kept."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

from async_rounds import Opening, run  # type: ignore[import-not-found]  # a script's neighbour
from procrastinate import App, PsycopgConnector  # type: ignore[import-not-found]  # lives in the separate environment
from rounds import PAYLOAD  # type: ignore[import-not-found]


@asynccontextmanager
async def open_queue(url: str, callers: int) -> Opening:
    app = App(connector=PsycopgConnector(conninfo=url, min_size=callers, max_size=callers))
    waiting: dict[int, asyncio.Future[None]] = {}

    @app.task(name="work")  # type: ignore[untyped-decorator]  # it lives in the separate environment
    async def work(text: str, number: int) -> None:
        del text
        done = waiting.pop(number, None)
        if done is not None:
            done.set_result(None)

    async with app.open_async():
        if not await app.check_connection_async():
            await app.schema_manager.apply_schema_async()
        worker = asyncio.create_task(
            app.run_worker_async(concurrency=callers, install_signal_handlers=False, delete_jobs="never")
        )
        numbers = iter(range(1 << 60))

        async def cycle() -> None:
            number = next(numbers)
            waiting[number] = asyncio.get_running_loop().create_future()
            done = waiting[number]
            await work.defer_async(text=PAYLOAD, number=number)
            await done

        yield cycle
        worker.cancel()
        await asyncio.wait((worker,))


run(open_queue)
