"""The control API of runtimes and the parent, and what monitors read."""

from __future__ import annotations

from fastapi import APIRouter, Depends, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import PlainTextResponse, Response

from gateway.quoting import quoted
from gateway.routes.access import gateway_of, require_admin
from model_runtime.errors import ConflictError, InvalidRequestError
from model_runtime.protocol import (
    DesiredRequest,
    GatewayStatus,
    HoldAnswer,
    HoldRequest,
    ModelRenewal,
    RenewalAnswer,
    SignOfLife,
)

control = APIRouter(tags=["control"])
router = APIRouter(tags=["health"])


@control.put("/admin/models/{model_id}", dependencies=[Depends(require_admin)])
async def renew_model(request: Request, model_id: str, body: ModelRenewal) -> RenewalAnswer:
    """Register a model's runtime or renew its lease."""
    if body.model_id != model_id:
        raise InvalidRequestError(f"the path says {model_id!r}, the body {body.model_id!r}", param="model_id")
    return gateway_of(request).renew(body)


@control.put("/admin/desired", dependencies=[Depends(require_admin)])
async def set_desired(request: Request, body: DesiredRequest) -> DesiredRequest:
    """What the run is to do; `stop` is sticky. Answers the state in force."""
    return gateway_of(request).set_desired(body)


@control.post("/admin/alive", dependencies=[Depends(require_admin)])
async def note_sign_of_life(request: Request, body: SignOfLife) -> SignOfLife:
    """The parent or a driver lives and works; /admin/status says how long ago it said so."""
    gateway_of(request).note_alive(body)
    return body


@control.put("/admin/evaluations/{evaluation_id}", dependencies=[Depends(require_admin)])
async def hold_versions(request: Request, evaluation_id: str, body: HoldRequest) -> HoldAnswer:
    """Keep one version of each model in service for an evaluation, beside those that training needs. One
    evaluation at a time; ask again before `ttl_s` is over."""
    gateway = gateway_of(request)
    if body.run_id not in (None, gateway.run_id):
        raise ConflictError(f"this gateway serves run {gateway.run_id!r}, not {quoted(body.run_id)}")
    return gateway.holds.hold(evaluation_id, body)


@control.delete("/admin/evaluations/{evaluation_id}", dependencies=[Depends(require_admin)])
async def release_versions(request: Request, evaluation_id: str) -> HoldAnswer:
    """The evaluation is over: what it held may leave. Answers what it holds now, which is nothing."""
    gateway_of(request).holds.release(evaluation_id)
    return HoldAnswer(evaluation_id=evaluation_id, versions={})


@control.get("/admin/status", dependencies=[Depends(require_admin)])
async def status(request: Request) -> GatewayStatus:
    """Everything a dashboard shows, keys masked."""
    return gateway_of(request).status()


@router.get("/health")
async def health(request: Request) -> dict[str, str]:
    """Whether this process answers; what it can do is in /admin/status."""
    return {"status": "ok", "run_id": gateway_of(request).run_id}


@control.get("/metrics", response_class=PlainTextResponse)
async def metrics(request: Request) -> Response:
    """Prometheus metrics."""
    gateway = gateway_of(request)
    return Response(gateway.exposition(), media_type=CONTENT_TYPE_LATEST)
