"""The life of the server process, from its listening socket to its exit code.

    bind -> vocabulary -> HTTP answers (/readyz 503) -> workers load -> serving
    signal -> pool.begin_drain: new requests get 503 -> running ones end within drain_s, the rest get an error -> exit 0
    second signal -> the same, at once

The socket is bound before anything else is done: a port in use must not cost a model load, nor leave a worker behind.
During the drain HTTP goes on answering, so that probers see readiness go; uvicorn is only told to exit when all is
over, because it closes its listeners first and waits afterwards.
"""

import asyncio
import contextlib
import errno
import logging
import resource
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Iterator

import uvicorn
import uvloop

from server.app import build_app
from server.backend import Backend
from server.config import Config
from server.connection import ConnectionLimits, limited
from server.service import Service, new_service
from server.tokenizer import Tokenizer
from shm.board import WorkerState
from workers.snapshot import WorkerSnapshot

logger = logging.getLogger("ringfence.server")

BACKLOG = 2048
KEEP_ALIVE_S = 75
"""An idle connection stays open for longer than the 5 s of httpx (and so of OpenAI's SDK) and the 60 s of proxies: they
close theirs first, and no request meets a connection that is just being closed here. Where connections run out, idle ones
make room."""
ANSWERS_S = 2.0  # after the drain: time in which the last answers and error events leave
AT_ONCE_S = 1.5  # after a second signal: time that the pool has; what it leaves dies with this process
SWITCH_S = 0.001  # the event loop gets the interpreter back from a text thread this soon (Python's default is 5 ms)
_PROGRESS_S = 0.25
_SPARE_FILES = 1024
_UNSETTLED = (WorkerState.STARTING, WorkerState.LOADING, WorkerState.BACKOFF)


class BindError(Exception):
    """The address can't be listened on; the text is for the operator."""


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. Raises BindError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise BindError(
            f"`host` {host!r} can't be resolved: {error.strerror}. Give an address of this machine."
        ) from None
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise BindError(f"Can't listen on {host}:{port}: {_bind_reason(error)}") from None
    return listener


def _bind_reason(error: OSError) -> str:
    reasons = {
        errno.EADDRINUSE: "another program does. Stop it, or choose another `port`.",
        errno.EACCES: "it needs more rights. Choose a `port` from 1024 upwards.",
        errno.EADDRNOTAVAIL: "it is no address of this machine. Choose another `host`; 0.0.0.0 is all of them.",
    }
    return reasons.get(error.errno or 0, f"{error.strerror}. Choose another `host` or `port`.")


def raise_file_limit(connections: int) -> int:
    """Let this process have a file for each connection and some more. Returns how many it may have now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + _SPARE_FILES
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        return wanted
    return soft


class HTTPServer(uvicorn.Server):
    """uvicorn without its signal handlers, and without waking ten times a second."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._exit = asyncio.Event()
        self.ready = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.ready.set()

    async def main_loop(self) -> None:
        """Once a second for the Date header, until told to exit."""
        while not self._exit.is_set():
            await self.on_tick(0)
            try:
                async with asyncio.timeout(1.0):
                    await self._exit.wait()
            except TimeoutError:
                pass

    def exit(self) -> None:
        self.should_exit = True
        self._exit.set()


def http_server(service: Service) -> HTTPServer:
    """uvicorn over the application, with every bound of the configuration."""
    config = service.config
    limits = ConnectionLimits(
        connections=config.connection_limit,
        header_bytes=config.header_limit,
        header_timeout_s=config.header_timeout_s,
    )
    service.metrics.watch_connections(limits)
    return HTTPServer(
        uvicorn.Config(
            build_app(service),
            http=limited(limits),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=int(ANSWERS_S),
            backlog=BACKLOG,
        )
    )


class Serving:
    """One run of the server: a pool, its HTTP side, and the signals between them."""

    def __init__(self, config: Config, pool: Backend, tokenizer: Tokenizer, listener: socket.socket) -> None:
        self._config = config
        self._pool = pool
        self._listener = listener
        self.service = new_service(config, pool, tokenizer)
        self._signals = 0
        self._signalled = asyncio.Event()
        self._again = asyncio.Event()

    async def run(self) -> int:
        """Serve until a signal comes. Returns the exit code."""
        server = http_server(self.service)
        self._take_signals()
        http = asyncio.create_task(server.serve(sockets=[self._listener]), name="http")
        await _first(http, server.ready.wait())
        if http.done():
            logger.error("event=http_failed", exc_info=http.exception())
            return 1
        logger.info("event=listening %s model=%s", _address(self._listener), self.service.model_name)
        progress = asyncio.create_task(self._report_progress(), name="progress")
        try:
            await self._pool.start()
            await _first(http, self._signalled.wait())
        finally:
            progress.cancel()
            await self._stop(server, http)
        return 0 if self._signals else 1

    def stop(self) -> None:
        """What a signal does: begin the drain; the second time, end it."""
        self._signals += 1
        (self._signalled if self._signals == 1 else self._again).set()

    def _take_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop)

    async def _stop(self, server: HTTPServer, http: asyncio.Task[None]) -> None:
        logger.info("event=draining requests=%d limit_s=%g", len(self.service.live), self._config.drain_s)
        self._pool.begin_drain()
        pool = asyncio.create_task(self._pool.stop(drain_s=self._config.drain_s), name="pool-stop")
        await _first(pool, self._again.wait())
        if not pool.done():
            logger.info("event=stopping_at_once requests=%d", len(self.service.live))
            self._pool.stop_now()
            server.force_exit = True
            await asyncio.wait([pool], timeout=AT_ONCE_S)
        if pool.done() and pool.exception() is not None:
            logger.error("event=pool_stop_failed", exc_info=pool.exception())
        await self._answered()
        server.exit()
        await asyncio.wait([http])
        self.service.threads.shutdown(wait=False, cancel_futures=True)
        logger.info("event=stopped")

    async def _answered(self) -> None:
        """Let the last events leave. Clients that don't read keep nobody waiting."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + (0.2 if self._again.is_set() else ANSWERS_S)
        while self.service.live and loop.time() < until_s:  # noqa: ASYNC110 a short end phase
            await asyncio.sleep(0.02)

    async def _report_progress(self) -> None:
        """A log line for each tenth of the way that a decoder has loaded. (The pool logs the changes of state.)"""
        seen: dict[int, int] = {}
        while True:
            workers = self._pool.snapshot().workers
            for worker in workers:
                tenths = _percent(worker) // 10
                if worker.state is WorkerState.LOADING and tenths > seen.get(worker.index, 0):
                    seen[worker.index] = tenths
                    logger.info("event=loading worker=%d percent=%d", worker.index, _percent(worker))
            if workers and all(worker.state not in _UNSETTLED for worker in workers):
                logger.info("event=loaded serving=%d workers=%d", sum(w.is_serving for w in workers), len(workers))
                return
            await asyncio.sleep(_PROGRESS_S)


def _percent(worker: WorkerSnapshot) -> int:
    return worker.board.load_percent if worker.board is not None else 0


async def _first(task: "asyncio.Task[None]", event: Awaitable[object]) -> None:
    """Wait for the task or the event, whichever is first."""
    waiter = asyncio.ensure_future(event)
    try:
        await asyncio.wait([task, waiter], return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiter.cancel()


def _address(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    return f"url=http://{shown}:{port}"


def run(config: Config, new_pool: Callable[[], Backend], tokenizer: Tokenizer, listener: socket.socket) -> int:
    """Serve in a new event loop, in which the pool is made too. Returns the exit code."""

    async def main() -> int:
        return await Serving(config, new_pool(), tokenizer, listener).run()

    sys.setswitchinterval(SWITCH_S)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main())
