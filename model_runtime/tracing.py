"""OpenTelemetry traces: one of each execution, from its first model call to the version it was trained into.

Processes that never speak to each other write into one trace: the ids of a trace and of the spans others
refer to are digests of names all of them know. Spans are written when what they tell of is over, so nothing
is carried along while it lasts. Names and numbers go into them, never texts or tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, cast

from pydantic import Field, field_validator

from model_runtime.config_section import Section
from model_runtime.errors import ConfigError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

EXPORT_LIMIT_S = 5
"""Longest one batch of spans may take to be handed over; what fails is dropped."""
Attributes = Mapping[str, str | int | float]


class TracingConfig(Section):
    """OpenTelemetry traces of executions."""

    endpoint: str | None = None
    """OTLP/HTTP address of a collector, as http://collector:4318. Its headers come from the environment
    (OTEL_EXPORTER_OTLP_HEADERS). Needs the packages opentelemetry-sdk and
    opentelemetry-exporter-otlp-proto-http. None: no traces."""
    share: float = Field(default=1.0, gt=0, le=1)
    """Share of the executions that are traced, chosen by their names."""

    @field_validator("endpoint")
    @classmethod
    def _is_http(cls, endpoint: str | None) -> str | None:
        if endpoint is not None and not endpoint.startswith(("http://", "https://")):
            raise ValueError("must be an OTLP/HTTP address: http://host:4318 or https://…")
        return endpoint


class Traces:
    """Writes one process's spans. Thread-safe; never waits for the collector."""

    def __init__(self, exporter: SpanExporter, *, run_id: str, process: str, share: float = 1.0) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ALWAYS_ON

        self.run_id = run_id
        self._share = share
        self._ids = _GivenIds()
        resource = Resource.create({"service.name": f"repertory-{process}", "repertory.run_id": run_id})
        self._provider = TracerProvider(
            sampler=ALWAYS_ON, resource=resource, id_generator=cast(Any, self._ids), shutdown_on_exit=False
        )
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("repertory")

    def execution(
        self, workflow_id: str, *, started_at: float, ended_at: float, attributes: Attributes
    ) -> None:
        """The whole execution, above all that belongs to it."""
        trace = self._trace_of(workflow_id)
        if trace is not None:
            named = {"repertory.workflow_id": workflow_id, **attributes}
            self._write("execution", started_at, ended_at, named, trace_id=trace, span_id=_root_of(trace))

    def span(
        self,
        name: str,
        workflow_id: str,
        *,
        started_at: float,
        ended_at: float,
        attributes: Attributes,
        key: str | None = None,
        under: str | None = None,
        error: str = "",
        published: tuple[str, int] | None = None,
    ) -> None:
        """A part of an execution. `key` names it for those that are `under` it; `published`: the (model,
        version) whose publication it is linked to."""
        trace = self._trace_of(workflow_id)
        if trace is None:
            return
        links = () if published is None else (self._publication(*published),)
        self._write(
            name,
            started_at,
            ended_at,
            attributes,
            trace_id=trace,
            span_id=None if key is None else _digest(self.run_id, key, num_bytes=8),
            parent_id=_root_of(trace) if under is None else _digest(self.run_id, under, num_bytes=8),
            error=error,
            links=links,
        )

    def publication(
        self, model_id: str, version: int, *, started_at: float, ended_at: float, error: str
    ) -> None:
        """A version's way into service: a trace of its own, to which what was trained into it is linked."""
        trace_id, span_id = self._publication(model_id, version)
        named: Attributes = {"repertory.model_id": model_id, "repertory.version": version}
        self._write(
            f"publish v{version}",
            started_at,
            ended_at,
            named,
            trace_id=trace_id,
            span_id=span_id,
            error=error,
        )

    def close(self) -> None:
        """Hand over what is left, for a few seconds at most."""
        self._provider.force_flush(EXPORT_LIMIT_S * 1000)
        self._provider.shutdown()

    def _publication(self, model_id: str, version: int) -> tuple[int, int]:
        trace_id = _digest(self.run_id, model_id, f"v{version}", num_bytes=16)
        return trace_id, _root_of(trace_id)

    def _trace_of(self, workflow_id: str) -> int | None:
        """None: this execution is none of the share."""
        trace_id = _digest(self.run_id, workflow_id, num_bytes=16)
        return trace_id if trace_id < self._share * 2**128 else None

    def _write(
        self,
        name: str,
        started_at: float,
        ended_at: float,
        attributes: Attributes,
        *,
        trace_id: int,
        span_id: int | None,
        parent_id: int | None = None,
        error: str = "",
        links: Iterable[tuple[int, int]] = (),
    ) -> None:
        from opentelemetry import trace

        def known(trace_id: int, span_id: int) -> trace.SpanContext:
            flags = trace.TraceFlags(trace.TraceFlags.SAMPLED)
            return trace.SpanContext(trace_id, span_id, is_remote=True, trace_flags=flags)

        above = trace.INVALID_SPAN
        if parent_id is not None:
            above = trace.NonRecordingSpan(known(trace_id, parent_id))
        with self._ids.given(trace_id, span_id):
            span = self._tracer.start_span(
                name,
                context=trace.set_span_in_context(above),
                attributes=dict(attributes),
                links=[trace.Link(known(*link)) for link in links],
                start_time=int(started_at * 1e9),
            )
        if error:
            span.set_status(trace.StatusCode.ERROR, error)
        span.end(int(ended_at * 1e9))


def check_tracing() -> None:
    """Raises ConfigError when the packages that traces take are missing."""
    try:
        import opentelemetry.exporter.otlp.proto.http.trace_exporter
        import opentelemetry.sdk.trace  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"tracing.endpoint: {error}: `.venv/bin/python -m pip install opentelemetry-sdk "
            "opentelemetry-exporter-otlp-proto-http`, or leave it out"
        ) from None


def open_traces(config: TracingConfig, *, run_id: str, process: str) -> Traces | None:
    """None when nothing is traced. Raises ConfigError when the packages it takes are missing."""
    if config.endpoint is None:
        return None
    check_tracing()
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    exporter: Any = OTLPSpanExporter(f"{config.endpoint.rstrip('/')}/v1/traces", timeout=EXPORT_LIMIT_S)
    return Traces(exporter, run_id=run_id, process=process, share=config.share)


def _digest(*names: str, num_bytes: int) -> int:
    """Never 0, which stands for no id."""
    digest = hashlib.blake2b("\0".join(names).encode(), digest_size=num_bytes).digest()
    return int.from_bytes(digest, "big") or 1


def _root_of(trace_id: int) -> int:
    return (trace_id & (2**64 - 1)) or 1


class _GivenIds:
    """An id generator that makes the ids it was given, else random ones. One thread at a time."""

    def __init__(self) -> None:
        import threading

        from opentelemetry.sdk.trace.id_generator import RandomIdGenerator

        self._random = RandomIdGenerator()
        self._lock = threading.Lock()
        self._trace_id, self._span_id = 0, 0

    def given(self, trace_id: int, span_id: int | None) -> _GivenIds:
        self._lock.acquire()
        self._trace_id, self._span_id = trace_id, span_id or 0
        return self

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def generate_trace_id(self) -> int:
        return self._trace_id or self._random.generate_trace_id()

    def generate_span_id(self) -> int:
        return self._span_id or self._random.generate_span_id()

    def is_trace_id_random(self) -> bool:
        return True
