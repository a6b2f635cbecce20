"""A live gateway whose model `plan` speaks with tools, and what it samples to call one."""

from __future__ import annotations

from typing import Any

from model_runtime.config_file import parse_config
from model_runtime.layout import RunLayout
from tests.fakes import make_tokenizer_document
from tests.gateway_harness import RUN_ID, GatewayHarness, make_config
from tests.tool_use import TOOL_TEMPLATE

SAMPLED_CALL = '<tool_call>\n{"name": "search", "arguments": {"query": "tea"}}\n</tool_call>'
COMPACT_CALL = '<tool_call>{"name":"search","arguments":{"query":"tea"}}</tool_call>'


def tool_config(*, partial_rollout: bool = False, **rollout: Any) -> Any:
    raw = make_config().model_dump(mode="json")
    raw["multi_model"]["models"][0]["max_response_tokens"] = 256
    raw["multi_model"]["models"][0]["async_training"]["partial_rollout"] = partial_rollout
    raw["multi_model"]["models"][0]["rollout"].update({"tool_call_parser": "hermes"} | rollout)
    return parse_config(raw)


def prepare(harness: GatewayHarness) -> GatewayHarness:
    """The model `plan` speaks with tools."""
    harness.start_afresh()
    uri = RunLayout(RUN_ID).model("plan").tokenizer("tools")
    harness.store.put(uri, make_tokenizer_document(chat_template=TOOL_TEMPLATE).to_bytes())
    harness.defaults["plan"] = {"tokenizer_uri": uri}
    harness.renew("plan")
    harness.wait_for_tokenizer("plan", uri)
    return harness


def num_breaks(harness: GatewayHarness) -> float:
    text = harness.http.get("/metrics").text
    lines = [line for line in text.splitlines() if line.startswith("repertory_gateway_chain_breaks_total{")]
    return sum(float(line.split()[-1]) for line in lines)
