"""Versions kept in service for an evaluation while training goes on.

One evaluation at a time holds, of each model, one version beside those that training needs: the runtime
hears of it as of a version with requests in flight. A hold that nobody renews ends by itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from gateway.bindings import GatewayBindingRegistry, ModelBinding
from model_runtime.config import RunConfig
from model_runtime.errors import ConflictError, LimitExceededError, ModelNotReadyError
from model_runtime.protocol import HoldAnswer, HoldRequest

MIN_LIVE_VERSIONS = 3
"""The one that serves, the one that comes, and the one that is held."""


@dataclass(slots=True)
class _Hold:
    evaluation_id: str
    versions: dict[str, int]
    until: float


class VersionHolds:
    """What evaluations hold. All methods belong to one event loop."""

    def __init__(
        self,
        config: RunConfig,
        bindings: GatewayBindingRegistry,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._models = {model.model_id: model for model in config.models}
        self._bindings = bindings
        self._clock = clock
        self._hold: _Hold | None = None

    def hold(self, evaluation_id: str, request: HoldRequest) -> HoldAnswer:
        """Hold the published versions, or those asked for; again renews what is held.

        Raises ConflictError while another evaluation holds some, and for a version that is not in service or
        has left it, LimitExceededError where a server has no room for one more, ModelNotReadyError before a
        model is ready."""
        current = self._current()
        if current is not None and current.evaluation_id != evaluation_id:
            left_s = current.until - self._clock()
            raise ConflictError(
                f"evaluation {current.evaluation_id!r} holds versions for {left_s:.0f} s or until its end"
            )
        if current is None or not request.versions.items() <= current.versions.items():
            versions = {
                b.model_id: self._version(b, request.versions.get(b.model_id)) for b in self._bindings
            }
        else:
            versions = current.versions
            for binding in self._bindings:
                self._require_served(binding, versions[binding.model_id])
        self._hold = _Hold(evaluation_id, versions, self._clock() + request.ttl_s)
        return HoldAnswer(evaluation_id=evaluation_id, versions=versions)

    def release(self, evaluation_id: str) -> None:
        """Let go. An evaluation that holds nothing may be released too."""
        if self._hold is not None and self._hold.evaluation_id == evaluation_id:
            self._hold = None

    def require_held(self, versions: Mapping[str, int]) -> None:
        """Raises ConflictError for a session that asks for a version nobody keeps in service."""
        held = self.versions
        for model_id, version in versions.items():
            if held.get(model_id) != version:
                raise ConflictError(
                    f"version {version} of model {model_id!r} is not held; held are {held or 'none'}: "
                    "PUT /admin/evaluations/{evaluation_id} first"
                )

    @property
    def versions(self) -> dict[str, int]:
        """Model → the version that is held."""
        current = self._current()
        return dict(current.versions) if current is not None else {}

    def counted(self, binding: ModelBinding) -> dict[int, int]:
        """Version → requests in flight, as the runtime hears of it: a held version has one at least."""
        counts = dict(binding.inflight_versions)
        held = self.versions.get(binding.model_id)
        if held is not None:
            counts[held] = counts.get(held, 0) + 1
        return counts

    def _current(self) -> _Hold | None:
        if self._hold is not None and self._hold.until <= self._clock():
            self._hold = None
        return self._hold

    def _require_served(self, binding: ModelBinding, version: int) -> None:
        if binding.renewal is not None and binding.has_lost(version):
            raise ConflictError(
                f"version {version} of model {binding.model_id!r} is not in service; "
                f"live are {sorted(binding.renewal.live_versions)}"
            )

    def _version(self, binding: ModelBinding, wanted: int | None) -> int:
        model, renewal = self._models[binding.model_id], binding.renewal
        if renewal is None or renewal.published_version is None:
            raise ModelNotReadyError(
                f"model {model.model_id!r} is not ready: it has no published version yet"
            )
        version = renewal.published_version if wanted is None else wanted
        self._require_served(binding, version)
        if model.kind == "trainable" and model.rollout.max_live_versions < MIN_LIVE_VERSIONS:
            raise LimitExceededError(
                f"model {model.model_id!r} has no room for a version to be held: rollout.max_live_versions "
                f"is {model.rollout.max_live_versions}, {MIN_LIVE_VERSIONS} are needed"
            )
        return version
