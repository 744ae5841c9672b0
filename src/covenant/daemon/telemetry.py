"""Telemetry of a daemon: log lines on stderr, and spans through OpenTelemetry.

A log line is an event: a name and fields, as text or as JSON. Modules below the daemon use the standard library, with
their fields in `extra`. One event has at most `LINES_MAX` lines a minute, so that nobody can fill a disk with it.

OpenTelemetry is imported only if one of `TRACE_VARIABLES` is set, or if the process has a provider already, as under
`opentelemetry-instrument`. The SDK and its exporters read their other variables themselves.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import Any, Final, TextIO

import covenant
from covenant.daemon.settings import LogFormat, LogLevel, TelemetrySettings
from covenant.doors.metrics import Meter
from covenant.exchange.frame_log import FrameLog
from covenant.exchange.task_logs import TURN, TaskLogs
from covenant.model.extras import install_command
from covenant.model.tracing import OFF, Span, SpanKind, Trace, Tracer, Value

ROOT: Final = "covenant"
_RECORD_FIELDS: Final = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "fields", "taskName"}
LINES_MAX: Final = 300
"""The most lines of one event in a window."""
WINDOW_S: Final = 60.0
EVENTS_MAX: Final = 1_000
TRACE_VARIABLES: Final = ("OTEL_TRACES_EXPORTER", "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
PROTOCOLS: Final = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
EXPORTERS: Final = "opentelemetry_traces_exporter"
SERVICE: Final = "covenant"
FLUSH_S: Final = 5.0
INSTALL: Final = install_command("otel")


class Log:
    """`log.info("ledger.opened", replayed=3)`."""

    def __init__(self) -> None:
        self._logger = logging.getLogger(ROOT)

    def debug(self, event: str, **fields: object) -> None:
        self._logger.debug(event, extra={"fields": fields})

    def info(self, event: str, **fields: object) -> None:
        self._logger.info(event, extra={"fields": fields})

    def warning(self, event: str, **fields: object) -> None:
        self._logger.warning(event, extra={"fields": fields})

    def exception(self, event: str, **fields: object) -> None:
        self._logger.error(event, extra={"fields": fields}, exc_info=True)  # noqa: LOG014  (the caller handles it)


class Throttle(logging.Filter):
    """Leaves lines out and counts them; the first line of the next window says how many, as `left_out`."""

    def __init__(self, monotonic_s: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._monotonic_s = monotonic_s
        self._windows: dict[str, tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        now_s, event = self._monotonic_s(), str(record.msg)
        since_s, count = self._windows.get(event, (now_s, 0))
        if now_s - since_s >= WINDOW_S:
            if count > LINES_MAX:
                record.left_out = count - LINES_MAX
            since_s, count = now_s, 0
        elif not count and len(self._windows) >= EVENTS_MAX:
            self._windows.clear()
        self._windows[event] = (since_s, count + 1)
        return count < LINES_MAX


class _TextFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        stamp = f"{seconds}.{int(record.msecs):03d}Z"
        words = [stamp, record.levelname.lower(), record.getMessage()]
        words += [f"{name}={_quoted(value)}" for name, value in fields_of(record).items()]
        line = " ".join(words)
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        row: dict[str, Any] = {
            "ts_ms": int(record.created * 1000),
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **fields_of(record),
        }
        if record.exc_info:
            row["traceback"] = self.formatException(record.exc_info)
        return json.dumps(row, ensure_ascii=False, default=str)


def fields_of(record: logging.LogRecord) -> dict[str, object]:
    extra = {name: value for name, value in record.__dict__.items() if name not in _RECORD_FIELDS}
    return extra | getattr(record, "fields", {})


def _quoted(value: object) -> str:
    # A line break in a value must not look like another event.
    text = str(value)
    plain = text.isprintable() and text and not any(character in text for character in ' "=')
    return text if plain else json.dumps(text, ensure_ascii=False)


def start_logging(kind: LogFormat, level: LogLevel, stream: TextIO | None = None) -> None:
    """Sends log lines to stderr: of other libraries and of agents only warnings, whose other lines are in task logs."""
    lines = logging.StreamHandler(stream or sys.stderr)
    lowest = logging.getLevelNamesMapping()[level.upper()]
    for condition in (_StderrFilter(lowest), Throttle()):
        lines.addFilter(condition)
    lines.setFormatter(_JsonFormatter() if kind == "json" else _TextFormatter())
    root = logging.getLogger()
    root.handlers[:] = [lines]
    root.setLevel(logging.INFO)
    logging.getLogger(ROOT).setLevel(min(lowest, logging.INFO))


class _StderrFilter(logging.Filter):
    """Decides which lines go to stderr. A line that an agent logs within a turn gets the id of its task."""

    def __init__(self, lowest: int) -> None:
        super().__init__()
        self._lowest = lowest

    def filter(self, record: logging.LogRecord) -> bool:
        if record.name.partition(".")[0] == ROOT:
            return record.levelno >= self._lowest
        turn = TURN.get()
        if turn is not None and not hasattr(record, "task_id"):
            record.task_id = turn.task.id
        return record.levelno >= logging.WARNING


@dataclass(frozen=True, slots=True)
class Telemetry:
    log: Log
    task_logs: TaskLogs
    tracer: Tracer = OFF
    frames: FrameLog | None = None
    """None: switched off."""
    meter: Meter = field(default_factory=Meter)


@asynccontextmanager
async def open_tracer(settings: TelemetrySettings, variables: Mapping[str, str], log: Log) -> AsyncIterator[Tracer]:
    """Spans that are not sent yet get a moment when this is closed."""
    provider, ours = _provider(settings, variables, log)
    if provider is None:
        yield OFF
        return
    log.info("telemetry.on", content=settings.content)
    try:
        yield OtelTracer(provider, content=settings.content)
    finally:
        if ours:
            try:
                async with asyncio.timeout(FLUSH_S):
                    await asyncio.to_thread(provider.shutdown)
            except TimeoutError:
                log.warning("telemetry.not_flushed")


def _provider(settings: TelemetrySettings, variables: Mapping[str, str], log: Log) -> tuple[Any, bool]:
    """The provider to use, and whether it is ours to shut down. None: spans are off."""
    if settings.traces == "off" or variables.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None, False
    if "opentelemetry.sdk.trace" in sys.modules:
        from opentelemetry import trace  # noqa: PLC0415  (70 ms, for those who want spans)
        from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415

        known = trace.get_tracer_provider()
        if isinstance(known, TracerProvider):
            return known, False
    if (
        not any(variables.get(name) for name in TRACE_VARIABLES)
        or variables.get(TRACE_VARIABLES[0], "").lower() == "none"
    ):
        return None, False
    try:
        return _new_provider(variables), True
    except (ImportError, LookupError) as missing:
        # Many programs share an environment, so its variables may be meant for others.
        log.warning("telemetry.not_installed", why=str(missing), install=INSTALL)
        return None, False


def _new_provider(variables: Mapping[str, str]) -> Any:
    from opentelemetry import trace  # noqa: PLC0415  (as above)
    from opentelemetry.sdk.resources import Resource  # noqa: PLC0415
    from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415
    from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415

    exporters = [_exporter(name) for name in _exporter_names(variables)]
    own = {"service.version": covenant.__version__}
    if not variables.get("OTEL_SERVICE_NAME") and "service.name=" not in variables.get("OTEL_RESOURCE_ATTRIBUTES", ""):
        own["service.name"] = SERVICE
    provider = TracerProvider(resource=Resource.create(own), shutdown_on_exit=False)
    for exporter in exporters:
        provider.add_span_processor(BatchSpanProcessor(exporter))
    # For agents and libraries that begin spans of their own.
    trace.set_tracer_provider(provider)
    return provider


def _exporter_names(variables: Mapping[str, str]) -> Iterator[str]:
    for word in (variables.get(TRACE_VARIABLES[0]) or "otlp").split(","):
        name = word.strip()
        if name == "otlp":
            protocol = next((variables[each] for each in PROTOCOLS if variables.get(each)), "http/protobuf")
            name = "otlp_proto_grpc" if protocol == "grpc" else "otlp_proto_http"
        if name and name != "none":
            yield name


def _exporter(name: str) -> Any:
    for found in entry_points(group=EXPORTERS, name=name):
        return found.load()()
    raise LookupError(f"no span exporter {name!r} is installed")


class OtelTracer:
    def __init__(self, provider: Any, *, content: bool = False) -> None:
        from opentelemetry import trace  # noqa: PLC0415  (as above)
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator  # noqa: PLC0415

        self._tracer = provider.get_tracer(SERVICE, covenant.__version__)
        self._propagator = TraceContextTextMapPropagator()
        self._kinds = {
            "server": trace.SpanKind.SERVER,
            "client": trace.SpanKind.CLIENT,
            "internal": trace.SpanKind.INTERNAL,
        }
        self._content = content

    @property
    def on(self) -> bool:
        return True

    @property
    def content(self) -> bool:
        return self._content

    def begin(
        self,
        name: str,
        kind: SpanKind,
        attributes: Mapping[str, Value],
        *,
        parent: Trace | None = None,
        at_ms: int | None = None,
    ) -> Span:
        context = None if parent is None else self._context(parent)
        start_ns = None if at_ms is None else at_ms * 1_000_000
        span = self._tracer.start_span(
            name, context=context, kind=self._kinds[kind], attributes=dict(attributes), start_time=start_ns
        )
        return OtelSpan(span, self._propagator)

    @contextmanager
    def within(self, trace: Trace) -> Iterator[None]:
        from opentelemetry.context import attach, detach  # noqa: PLC0415  (as above)

        before = attach(self._context(trace))
        try:
            yield
        finally:
            detach(before)

    def _context(self, trace: Trace) -> Any:
        carrier = {"traceparent": trace.traceparent}
        if trace.tracestate is not None:
            carrier["tracestate"] = trace.tracestate
        return self._propagator.extract(carrier)


class OtelSpan:
    def __init__(self, span: Any, propagator: Any) -> None:
        self._span = span
        self._propagator = propagator

    @property
    def trace(self) -> Trace | None:
        from opentelemetry.trace import set_span_in_context  # noqa: PLC0415  (as above)

        carrier: dict[str, str] = {}
        self._propagator.inject(carrier, set_span_in_context(self._span))
        parent = carrier.get("traceparent")
        return None if parent is None else Trace(parent, carrier.get("tracestate"))

    def note(self, attributes: Mapping[str, Value]) -> None:
        self._span.set_attributes(dict(attributes))

    def end(self, *, failed: str | None = None, at_ms: int | None = None) -> None:
        if failed is not None:
            from opentelemetry.trace import StatusCode  # noqa: PLC0415  (as above)

            self._span.set_attribute("error.type", failed)
            self._span.set_status(StatusCode.ERROR)
        self._span.end(None if at_ms is None else at_ms * 1_000_000)

    def current(self) -> AbstractContextManager[object]:
        from opentelemetry.trace import use_span  # noqa: PLC0415  (as above)

        # The error's own text is not recorded: `end` is given a code that says what went wrong.
        return use_span(self._span, end_on_exit=False, record_exception=False, set_status_on_exception=False)
