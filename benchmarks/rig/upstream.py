"""A rollout server that has every answer ready: vLLM's response shapes, 128 tokens each."""

from __future__ import annotations

import json
import time
from typing import Any

from aiohttp import web

from tests.fakes import make_tokenizer

NUM_TOKENS = 128
GENERATE = "/inference/v1/generate"
CHAT = "/v1/chat/completions"


def serve_upstream(port: int) -> None:
    """Both of vLLM's ways to ask: by token ids, as the gateway does, and as OpenAI's API."""
    text, ids = _answer()
    app = web.Application(client_max_size=2**28)
    app.router.add_post(GENERATE, _fixed(_generate_answer(ids)))
    app.router.add_post(CHAT, _fixed(_chat_answer(text, ids)))
    app.router.add_get("/v1/models", _fixed({"object": "list", "data": [{"id": "m", "object": "model"}]}))
    web.run_app(app, host="127.0.0.1", port=port, print=None, access_log=None)


def _answer() -> tuple[str, list[int]]:
    """Text of exactly so many tokens, as a model would write it, and its ids."""
    tokenizer = make_tokenizer()
    words = ["the", "question", "asks", "for", "a", "number", "and", "its", "answer", "is", "a", "sum"]
    ids: list[int] = []
    while len(ids) < NUM_TOKENS:
        ids += tokenizer.encode(" " + words[len(ids) % len(words)], add_special_tokens=False).ids
    ids = ids[: NUM_TOKENS - 1]
    return tokenizer.decode(ids), [*ids, tokenizer.token_to_id("<|im_end|>")]


def _fixed(body: dict[str, Any]) -> Any:
    data = json.dumps(body).encode()

    async def handle(request: web.Request) -> web.Response:
        await request.read()
        return web.Response(body=data, content_type="application/json")

    return handle


def _usage() -> dict[str, int]:
    return {"prompt_tokens": 0, "completion_tokens": NUM_TOKENS, "total_tokens": NUM_TOKENS}


def _generate_answer(ids: list[int]) -> dict[str, Any]:
    content = [_entry(id_) | {"token_id": id_} for id_ in ids]
    choice = {
        "index": 0,
        "finish_reason": "stop",
        "stop_reason": None,
        "token_ids": ids,
        "logprobs": {"content": content},
        "weight_versions": None,
    }
    return {
        "request_id": "generate-tokens-0",
        "model": None,
        "created": int(time.time()),
        "choices": [choice],
        "usage": _usage(),
        "prompt_logprobs": None,
        "prompt_token_ids": None,
    }


def _chat_answer(text: str, ids: list[int]) -> dict[str, Any]:
    content = [_entry(id_) | {"token": f"token_id:{id_}", "bytes": [97, 98, 99]} for id_ in ids]
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": text, "refusal": None},
        "finish_reason": "stop",
        "stop_reason": None,
        "token_ids": ids,
        "logprobs": {"content": content},
    }
    return {
        "id": "chatcmpl-0",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": "m",
        "choices": [choice],
        "usage": _usage(),
        "prompt_token_ids": None,
    }


def _entry(id_: int) -> dict[str, Any]:
    return {"logprob": -0.5000123 - id_ / 1e4, "rank": 1, "top_logprobs": []}
