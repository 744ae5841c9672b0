"""Spans in a daemon: OpenTelemetry's, where an operator has installed its SDK and said where spans go.

Nothing of it is imported unless one of the standard variables asks for it (`OTEL_TRACES_EXPORTER`,
`OTEL_EXPORTER_OTLP_ENDPOINT`, `OTEL_EXPORTER_OTLP_TRACES_ENDPOINT`), or whoever started the process has set up a
provider of its own, as `opentelemetry-instrument` does. The SDK and its exporters read their other variables.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import Any, Final

import covenant
from covenant.daemon.logs import Log
from covenant.daemon.settings import TelemetrySettings
from covenant.doors.metrics import Meter
from covenant.model.tracing import OFF, Span, SpanKind, Trace, Tracer, Value

ASKING: Final = ("OTEL_TRACES_EXPORTER", "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
PROTOCOLS: Final = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
EXPORTERS: Final = "opentelemetry_traces_exporter"
SERVICE: Final = "covenant"
FLUSH_S: Final = 5.0
INSTALL: Final = "pip install 'covenant[otel]'"


@dataclass(frozen=True, slots=True)
class Telemetry:
    """What the parts of a daemon tell of themselves: log lines, spans and numbers."""

    log: Log
    tracer: Tracer = OFF
    meter: Meter = field(default_factory=Meter)


@asynccontextmanager
async def open_telemetry(
    settings: TelemetrySettings, variables: Mapping[str, str], log: Log
) -> AsyncIterator[Telemetry]:
    async with open_tracer(settings, variables, log) as tracer:
        yield Telemetry(log, tracer)


@asynccontextmanager
async def open_tracer(settings: TelemetrySettings, variables: Mapping[str, str], log: Log) -> AsyncIterator[Tracer]:
    """What is still to be sent when it is closed gets a moment for that."""
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
    if not any(variables.get(name) for name in ASKING) or variables.get(ASKING[0], "").lower() == "none":
        return None, False
    try:
        return _made(variables), True
    except (ImportError, LookupError) as missing:
        # An environment is shared by many programs: it may ask for what was never meant for this one.
        log.warning("telemetry.not_installed", why=str(missing), install=INSTALL)
        return None, False


def _made(variables: Mapping[str, str]) -> Any:
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
    # For agents that begin spans of their own, and for libraries that do.
    trace.set_tracer_provider(provider)
    return provider


def _exporter_names(variables: Mapping[str, str]) -> Iterator[str]:
    for given in (variables.get(ASKING[0]) or "otlp").split(","):
        name = given.strip()
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
    """Over a provider of the OpenTelemetry SDK, or anything else that speaks its API."""

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

        return use_span(self._span, end_on_exit=False)
