"""Traces as a collector receives them: every process's spans of one execution in one tree."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any, cast

import pytest

from model_runtime.errors import ConfigError
from model_runtime.store import Store
from model_runtime.tracing import Traces, TracingConfig, open_traces
from model_runtime.training_queue import Batch
from model_runtime.training_trace import TrainingTrace
from tests.gateway_harness import RUN_ID, GatewayHarness, live_gateway, make_config

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="OpenTelemetry is not installed")


class Collector:
    """An OTLP/HTTP receiver."""

    def __init__(self) -> None:
        self.url = ""
        self.spans: list[Any] = []
        self.processes: dict[bytes, str] = {}  # span id → service

    def take(self, body: bytes) -> None:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            named = {a.key: a.value.string_value for a in resource.resource.attributes}
            for scope in resource.scope_spans:
                self.spans += scope.spans
                self.processes |= {span.span_id: named["service.name"] for span in scope.spans}

    def named(self, name: str) -> Any:
        (span,) = [span for span in self.spans if span.name == name]
        return span

    def above(self, name: str) -> str:
        """Name of the span that a span of this name is under."""
        (above,) = [s for s in self.spans if s.span_id == self.named(name).parent_span_id]
        return above.name


@pytest.fixture
def collector() -> Iterator[Collector]:
    found = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                import gzip

                body = gzip.decompress(body)
            found.take(body)
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    found.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield found
    server.shutdown()
    thread.join()
    server.server_close()


def traced(harness: GatewayHarness, question: str) -> str:
    """One execution with one call, finalized; its workflow id."""
    harness.make_ready()
    harness.open_group()
    session = harness.open_session()
    assert session.chat(question).status_code == 200
    session.finalize(1.0)
    return session.workflow_id


def test_an_executions_life_is_one_trace_across_gateway_trainer_and_runtime(
    collector: Collector, local_store: Store
) -> None:
    config = make_config()
    config = config.model_copy(update={"tracing": TracingConfig(endpoint=collector.url)})
    with live_gateway(local_store, config=config) as harness:
        workflow_id = traced(harness, "a question that no trace may hold")
        rows = harness.rows("plan")
    trainer = TrainingTrace(open_traces(config.tracing, run_id=RUN_ID, process="trainer"), model_id="plan")
    batch = SimpleNamespace(step=5, rows=[SimpleNamespace(trajectory=row) for row in rows])
    trainer.step(cast(Batch, batch), seconds=0.5)
    trainer.version(6, seconds=0.1)
    trainer.close()
    runtime = open_traces(config.tracing, run_id=RUN_ID, process="model-runtime")
    assert runtime is not None
    runtime.publication("plan", 6, started_at=1.0, ended_at=2.0, error="")
    runtime.close()

    assert collector.above("chat planner") == "execution"
    assert collector.above("generate") == "chat planner"
    assert collector.above("finalize") == "execution"
    assert collector.above("shard") == "finalize"
    assert collector.above("train step 5") == "execution"
    assert collector.above("version v6") == "execution"
    published = collector.named("publish v6")
    (link,) = collector.named("version v6").links
    assert (link.trace_id, link.span_id) == (published.trace_id, published.span_id)
    life = [span for span in collector.spans if span is not published]
    assert len({span.trace_id for span in life}) == 1
    assert len(life) == len({span.span_id for span in life}) == 7
    assert all(span.start_time_unix_nano <= span.end_time_unix_nano for span in life)
    services = {collector.processes[span.span_id] for span in collector.spans}
    assert services == {"repertory-gateway", "repertory-trainer", "repertory-model-runtime"}
    root = {a.key: a.value.string_value for a in collector.named("execution").attributes}
    assert root["repertory.workflow_id"] == workflow_id
    assert "no trace may hold" not in str(collector.spans)


def test_a_server_that_failed_is_a_span_with_its_error_beside_the_one_that_answered(
    collector: Collector, local_store: Store
) -> None:
    config = make_config().model_copy(update={"tracing": TracingConfig(endpoint=collector.url)})
    with live_gateway(local_store, config=config) as harness:
        harness.server.fail_next = [503]
        traced(harness, "hello")
    tries = [span for span in collector.spans if span.name == "generate"]
    assert sorted(span.status.message for span in tries) == ["", "BackendUnavailableError"]
    assert len({span.parent_span_id for span in tries}) == 1


def test_every_process_chooses_the_same_share_of_executions() -> None:
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    chosen = []
    for process in ("gateway", "trainer"):
        exporter = InMemorySpanExporter()
        traces = Traces(exporter, run_id="run", process=process, share=0.3)
        for n in range(400):
            traces.span("x", f"g{n}/0/0", started_at=1.0, ended_at=2.0, attributes={})
        traces.close()
        chosen.append({span.context.trace_id for span in exporter.get_finished_spans() if span.context})
    assert chosen[0] == chosen[1]
    assert 80 < len(chosen[0]) < 160


def test_a_collector_that_is_away_costs_the_agents_nothing(local_store: Store) -> None:
    config = make_config().model_copy(update={"tracing": TracingConfig(endpoint="http://127.0.0.1:9")})
    with live_gateway(local_store, config=config) as harness:
        traced(harness, "hello")
        assert len(harness.rows("plan")) == 1


def test_without_an_endpoint_nothing_of_opentelemetry_is_made(local_store: Store) -> None:
    with live_gateway(local_store) as harness:
        assert harness.gateway.router._traces is None
        assert harness.gateway.router._sampler._ask == harness.gateway.router._sampler._generate


def test_an_endpoint_without_the_packages_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    config = TracingConfig(endpoint="http://127.0.0.1:4318")
    with pytest.raises(ConfigError, match=r"pip install opentelemetry-sdk opentelemetry-exporter"):
        open_traces(config, run_id="run", process="gateway")


def test_an_endpoint_that_is_no_address_is_refused() -> None:
    with pytest.raises(ValueError, match="must be an OTLP/HTTP address"):
        TracingConfig(endpoint="collector:4317")
