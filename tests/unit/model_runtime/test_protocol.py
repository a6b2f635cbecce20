"""What the control API takes and refuses, before anything acts on it."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from model_runtime.protocol import AbortRequest, FinalizeRequest, GroupRequest, RewardRequest, SessionRequest

HALF_A_PAIR = "\ud800"


@pytest.mark.parametrize(
    ("request_type", "body"),
    [
        (RewardRequest, {"reward": 1, "component": HALF_A_PAIR}),
        (RewardRequest, {"reward": 1, "component": ""}),
        (RewardRequest, {"reward": 1, "component": "agent:success"}),
        (RewardRequest, {"reward": float("nan")}),
        (RewardRequest, {"reward": 1e150}),  # its square is infinite
        (RewardRequest, {"reward": 1, "agent": "searcher"}),
        (RewardRequest, {"reward": 1, "turn_index": 0}),
        (FinalizeRequest, {"rewards": 0.7}),
        (AbortRequest, {"reason": HALF_A_PAIR}),
        (GroupRequest, {"group_id": HALF_A_PAIR, "group_size": 2}),
        (GroupRequest, {"group_id": "g", "group_size": 2**33}),
        (SessionRequest, {"group_id": "g", "attempt": 2**40}),
        (SessionRequest, {"group_id": "g", "member_index": -1}),
    ],
)
def test_what_the_log_could_not_keep_or_nobody_would_read_is_refused(
    request_type: type[BaseModel], body: dict[str, Any]
) -> None:
    with pytest.raises(ValidationError):
        request_type.model_validate(body)
