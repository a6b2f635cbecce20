"""The gateway: its parts wired together, and the HTTP application around them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import SecretStr
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp

from gateway.admission import GroupAdmission
from gateway.bindings import GatewayBindingRegistry, ModelBinding
from gateway.holds import VersionHolds
from gateway.ingestor import TrajectoryIngestor
from gateway.journal import SessionJournal
from gateway.limits import BoundedRequests
from gateway.metrics import GatewayMetrics
from gateway.model_calls import ModelCallRoutes
from gateway.openapi import complete
from gateway.recovery import recover
from gateway.responses import error_response
from gateway.route_table import AgentModelRouteTable
from gateway.router import MultiModelGatewayRouter
from gateway.routes import admin as admin_routes
from gateway.routes import anthropic as anthropic_routes
from gateway.routes import openai as openai_routes
from gateway.routes import openai_responses as responses_routes
from gateway.routes import sessions as session_routes
from gateway.session import Session
from gateway.sessions import SessionRegistry
from gateway.settled_sessions import SettledRecords
from model_runtime.config import RunConfig
from model_runtime.documents import DesiredDocument, DesiredState
from model_runtime.errors import (
    InvalidRequestError,
    ModelNotReadyError,
    RepertoryError,
    StoreError,
    SupersededError,
    TooManyRequestsError,
)
from model_runtime.layout import RunLayout, number_in, writer_id
from model_runtime.protocol import (
    DesiredRequest,
    GatewayStatus,
    GroupAnswer,
    GroupRequest,
    ModelRenewal,
    ModelStatus,
    RenewalAnswer,
    SessionRequest,
    SignOfLife,
)
from model_runtime.store import Store
from model_runtime.tracing import open_traces

logger = logging.getLogger(__name__)

SWEEP_INTERVAL_S = 0.5
EPOCH_CHECK_INTERVAL_S = 3.0
# Of the 10 s a stopping gateway may take: what the ingestor gets to make finalized work durable.
FLUSH_TIMEOUT_S = 4.0

_APIS = (openai_routes, responses_routes, anthropic_routes)

_STATE_ORDER: dict[str, int] = {"run": 0, "drain": 1, "stop": 2}


class Gateway:
    """One life of a run's gateway: parts, background loops, and the control operations over them."""

    def __init__(
        self,
        config: RunConfig,
        *,
        run_id: str,
        store: Store,
        epoch: int,
        incarnation: int,
        admin_key: str,
        agents_url: str | None = None,
        journal: Path | None = None,
    ) -> None:
        """`agents_url` is where the base URLs of sessions begin. None: where they are opened. `journal` is a
        file of this machine, the same for every process of the epoch. None: open sessions end with this
        process."""
        self.config = config
        self.run_id = run_id
        self.epoch = epoch
        self.admin_key = admin_key
        self.agents_url = agents_url
        self.started_at = time.time()
        self.desired: DesiredState = "run"
        self.stopping = asyncio.Event()
        self.superseded: SupersededError | None = None
        self._store = store
        self._layout = RunLayout(run_id)
        self._writer = writer_id(epoch, incarnation)
        self.settled_records = SettledRecords(store)
        self._journal = SessionJournal(journal, run_id=run_id, epoch=epoch)
        self._traces = open_traces(config.tracing, run_id=run_id, process="gateway")
        self._background: list[asyncio.Task[None]] = []
        self._heard_at: dict[str, float] = {}  # role → when it last gave a sign of life

    async def start(self) -> None:
        """Raises SupersededError if a newer epoch leads the run."""
        await self.check_epoch()
        config, models = self.config, [m.model_id for m in self.config.models]
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), cookie_jar=aiohttp.DummyCookieJar()
        )
        self.routes = AgentModelRouteTable(config.agent_to_model)
        self.metrics = GatewayMetrics(models)
        self.bindings = GatewayBindingRegistry(
            models,
            store=self._store,
            lease_s=config.gateway.lease_s,
            http=self._http,
            max_concurrent={m.model_id: m.rollout.max_concurrent_requests for m in config.models},
        )
        self.holds = VersionHolds(config, self.bindings)
        self.admission = GroupAdmission(config, writer=self._writer, journal=self._journal)
        trainable = [m.model_id for m in config.trainable_models]
        self.ingestor = TrajectoryIngestor(
            self._store,
            self._layout,
            writer=self._writer,
            trainable_models=trainable,
            config=config.gateway,
            sessions=self._journal,
        )
        self.sessions = SessionRegistry(
            run_id=self.run_id,
            routes=self.routes,
            admission=self.admission,
            ingestor=self.ingestor,
            metrics=self.metrics,
            default_sampling={"temperature": config.workflow.temperature},
            default_timeout_s=config.workflow.execution_timeout_s,
            max_sessions=config.gateway.max_sessions,
            idle_s=config.gateway.session_idle_s,
            traces=self._traces,
            keeps_unfinished={
                m.model_id for m in config.trainable_models if m.objective.unfinished == "baseline"
            },
            journal=self._journal,
            allow_off_policy=config.gateway.allow_off_policy_sampling,
        )
        self.router = MultiModelGatewayRouter(
            config, routes=self.routes, bindings=self.bindings, metrics=self.metrics, traces=self._traces
        )
        await self.ingestor.start()
        await recover(self._journal, admission=self.admission, sessions=self.sessions, store=self._store)
        await self._read_desired()
        self._background = [
            asyncio.create_task(self._sweep_forever(), name="gateway sweep"),
            asyncio.create_task(self._watch_epoch(), name="gateway epoch watch"),
        ]

    async def close(self) -> None:
        """Flush what is finalized and let go of everything. Open sessions are the next process's."""
        self.stopping.set()
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        for session in self.sessions:
            await session.calls.stop_all()
        try:
            async with asyncio.timeout(FLUSH_TIMEOUT_S):
                await self.ingestor.close()
        except (TimeoutError, StoreError) as error:
            logger.error("finalized work could not be flushed within %g s: %s", FLUSH_TIMEOUT_S, error)
        await self._journal.close()
        await self.bindings.close()
        await self._http.close()
        if self._traces is not None:
            await asyncio.to_thread(self._traces.close)

    # -------------------------------------------------------------- control operations

    async def open_group(self, request: GroupRequest) -> GroupAnswer:
        """Raises ModelNotReadyError (503, to be asked again) when this gateway stops meanwhile."""
        opening = asyncio.ensure_future(self.admission.open(request))
        stopping = asyncio.ensure_future(self.stopping.wait())
        try:
            await asyncio.wait({opening, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if opening.done():
                answer = _or_ask_again(request, opening.result())
                await self._journal.durable()
                return answer
            raise ModelNotReadyError("the gateway is stopping; ask again")
        finally:
            opening.cancel()
            stopping.cancel()

    def renew(self, renewal: ModelRenewal) -> RenewalAnswer:
        """Take a runtime's renewal in and say what it is to do."""
        superseded = renewal.epoch < self.epoch or not self.bindings.renew(renewal)
        binding = self.bindings.get(renewal.model_id)
        if not superseded:
            self.admission.observe(renewal, waiting_calls=binding.waiting, running_calls=binding.running)
        return RenewalAnswer(
            desired="stop" if superseded else self._desired_of_runtimes(),
            epoch=self.epoch,
            superseded=superseded,
            oldest_open_version=self._oldest_open_version(binding),
            inflight_versions=self.holds.counted(binding),
        )

    async def open_session(self, request: SessionRequest) -> Session:
        """Raises ConflictError for versions that nobody holds, and as `SessionRegistry.open`."""
        if request.versions:
            if request.mode == "train":
                raise InvalidRequestError("versions are for evaluations", param="versions")
            self.holds.require_held(request.versions)
        if request.takes_over:
            await self.sessions.end_left_open(request.group_id, request.member_index)
        return self.sessions.open(request)

    def set_desired(self, request: DesiredRequest) -> DesiredRequest:
        """`stop` is sticky, and a drain is not undone."""
        if _STATE_ORDER[request.state] >= _STATE_ORDER[self.desired]:
            if request.state != self.desired:
                logger.info("the run is to %s: %s", request.state, request.reason or "no reason given")
            self.desired = request.state
        if self.desired != "run":
            self.admission.end()
        return DesiredRequest(state=self.desired, reason=request.reason)

    def note_alive(self, sign: SignOfLife) -> None:
        self._heard_at[sign.role] = time.monotonic()
        self.admission.models_failed(sign.failed_models)

    def exposition(self) -> bytes:
        """Its counters in Prometheus' text format."""
        self.metrics.observe_sessions(len(self.sessions), are_kept=self._journal.is_kept)
        admission = self.admission
        return self.metrics.exposition(self.bindings, used=admission.used, concurrency=admission.concurrency)

    def status(self) -> GatewayStatus:
        return GatewayStatus(
            run_id=self.run_id,
            epoch=self.epoch,
            desired=self.desired,
            models={binding.model_id: self._model_status(binding) for binding in self.bindings},
            open_groups=self.admission.num_open,
            waiting_groups=self.admission.num_waiting,
            open_sessions=len(self.sessions),
            settlements=dict(self.metrics.settlements),
            agent_rewards={agent: tally.summary() for agent, tally in self.metrics.rewards.items()},
            heard_s={role: time.monotonic() - at for role, at in self._heard_at.items()},
        )

    async def check_epoch(self) -> None:
        """Raises SupersededError if the store holds a higher epoch than this gateway's."""
        names = await asyncio.to_thread(self._store.children, self._layout.epochs())
        newest = max((number_in(name) for name in names if name.startswith("epoch-")), default=self.epoch)
        if newest > self.epoch:
            raise SupersededError(
                f"run {self.run_id} is led by epoch {newest}; this gateway is of {self.epoch}"
            )

    # -------------------------------------------------------------- inside

    def _desired_of_runtimes(self) -> DesiredState:
        """A trainer that drains takes its log for complete, so it hears of it when no group is open."""
        return "run" if self.desired == "drain" and self.admission.num_open else self.desired

    def _oldest_open_version(self, binding: ModelBinding) -> int | None:
        versions = [*binding.inflight_versions, *binding.kept_versions]
        recorded = self.sessions.oldest_open_version(binding.model_id)
        return min([*versions, *([] if recorded is None else [recorded])], default=None)

    def _model_status(self, binding: ModelBinding) -> ModelStatus:
        tally, renewal = self.metrics.models[binding.model_id], binding.renewal
        window = self.admission.concurrency.windows.get(binding.model_id)
        return ModelStatus(
            model_id=binding.model_id,
            ready=self.bindings.is_ready(binding.model_id),
            age_s=self.bindings.age_s(binding.model_id),
            renewal=None if renewal is None else _masked(renewal),
            used=self.admission.used(binding.model_id),
            waiting_requests=binding.waiting,
            waited_s=binding.waited_s,
            running_requests=binding.running,
            finalized_rows=tally.finalized_rows,
            sampled_tokens=tally.sampled_tokens,
            tokens_per_s=self.metrics.tokens_per_s(binding.model_id),
            window=window.groups if window else None,
            pressure=window.pressure if window else None,
            template_problem=binding.codec.splice_problem if binding.codec else None,
        )

    async def _read_desired(self) -> None:
        """What the parent of this epoch last asked for: it may not know that the gateway starts anew."""
        names = await asyncio.to_thread(self._store.children, self._layout.epochs())
        for seq in sorted(number_in(name) for name in names if name.startswith("desired-")):
            key = self._layout.desired(seq)
            document = DesiredDocument.parse(await asyncio.to_thread(self._store.get, key), source=key)
            if document.epoch == self.epoch:
                self.set_desired(DesiredRequest(state=document.state, reason=document.reason))

    async def _sweep_forever(self) -> None:
        sweeping: asyncio.Task[None] | None = None
        try:
            while True:
                await asyncio.sleep(SWEEP_INTERVAL_S)
                for model_id in self.bindings.newly_lost():
                    logger.warning("the lease of model %r ran out", model_id)
                    self.admission.lease_lost(model_id)
                # A store that is away holds a sweep up for minutes; leases are looked at meanwhile.
                if sweeping is None or sweeping.done():
                    sweeping = asyncio.create_task(self._sweep())
        finally:
            if sweeping is not None:
                sweeping.cancel()

    async def _sweep(self) -> None:
        try:
            await self.sessions.sweep()
        except Exception:  # one settlement that can't be written must not end all deadlines
            logger.exception("a settlement failed unexpectedly; the sweep goes on")

    async def _watch_epoch(self) -> None:
        while True:
            await asyncio.sleep(EPOCH_CHECK_INTERVAL_S)
            try:
                await self.check_epoch()
            except SupersededError as error:
                self.superseded = error
                self.stopping.set()
                return
            except StoreError as error:
                logger.warning("the run's epoch can't be read: %s", error)


def _or_ask_again(request: GroupRequest, answer: GroupAnswer) -> GroupAnswer:
    """Raises TooManyRequestsError for a driver that doesn't wait."""
    if answer.status == "waiting" and request.wait_s == 0:
        raise TooManyRequestsError(
            f"group {request.group_id!r} can't open now: there is no room; its place in the line is kept"
        )
    return answer


def _masked(renewal: ModelRenewal) -> ModelRenewal:
    hidden = [r.model_copy(update={"api_key": SecretStr("***")}) for r in renewal.replicas]
    return renewal.model_copy(update={"replicas": hidden})


def create_app(gateway: Gateway) -> ASGIApp:
    """The HTTP application of the control listener, which serves everything; it starts and closes the
    gateway with itself."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await gateway.start()
        try:
            yield
        finally:
            await gateway.close()

    app = FastAPI(title="Repertory gateway", lifespan=lifespan)
    app.include_router(session_routes.control)
    app.include_router(admin_routes.control)
    return _finished(app, gateway, takes_admin_key=True)


def create_agents_app(gateway: Gateway) -> ASGIApp:
    """The HTTP application of the agents' listener: only what a session's own key opens."""
    return _finished(
        FastAPI(title="Repertory gateway, for agents", docs_url=None, redoc_url=None),
        gateway,
        takes_admin_key=False,
    )


def _finished(app: FastAPI, gateway: Gateway, *, takes_admin_key: bool) -> ASGIApp:
    """With all routes. Requests are bounded before the application hears of them; model calls pass it by."""
    app.state.gateway = gateway
    app.state.takes_admin_key = takes_admin_key
    for api in _APIS:
        api.add_routes(app)
    app.include_router(session_routes.router)
    app.include_router(admin_routes.router)
    for kind in (RepertoryError, RequestValidationError, HTTPException, RecursionError, Exception):
        app.add_exception_handler(kind, _answer_error)
    _document(app)
    return BoundedRequests(
        ModelCallRoutes(app, on_error=error_response),
        config=gateway.config.gateway,
        on_refusal=lambda error: gateway.metrics.count_refusal(error.code),
    )


async def _answer_error(_: Request, error: Exception) -> Response:
    return error_response(error)


def _document(app: FastAPI) -> None:
    """Give the application its whole OpenAPI document."""
    generate = app.openapi
    made: list[dict[str, Any]] = []

    def openapi() -> dict[str, Any]:
        if not made:
            made.append(complete(generate(), *(api.openapi_paths() for api in _APIS)))
        return made[0]

    app.openapi = openapi  # type: ignore[method-assign]
