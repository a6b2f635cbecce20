"""The parts of the fake rollout server that stream answers and parse them."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

# What the fake takes for a tool call, as vLLM's hermes parser does.
_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)


async def sampled_in_time(server: Any, answer: dict[str, Any], number: int) -> bool:
    """Takes as long as a token does; False when the request was told to end, which the server waits for
    after the first `hold_after` tokens."""
    if number == server.hold_after:
        server.hold_after = -1
        await server.told_to_end[answer["request_id"].removeprefix("generate-tokens-")].wait()
        return False
    if not server.token_delay_s:
        return True
    ended = server.told_to_end[answer["request_id"].removeprefix("generate-tokens-")]
    try:
        async with asyncio.timeout(server.token_delay_s):
            await ended.wait()
    except TimeoutError:
        return True
    return False


def cut(server: Any, answer: dict[str, Any], length: int) -> dict[str, Any]:
    """What vLLM answers of a request that was aborted after so many tokens."""
    [choice] = answer["choices"]
    server.gave[answer["request_id"].removeprefix("generate-tokens-")] = choice["token_ids"][:length]
    kept = {"token_ids": choice["token_ids"][:length], "finish_reason": "abort"}
    kept["logprobs"] = {"content": choice["logprobs"]["content"][:length]}
    usage = {**answer["usage"], "completion_tokens": length}
    return {**answer, "choices": [{**choice, **kept}], "usage": usage}


async def whole_answer(server: Any, answer: dict[str, Any]) -> dict[str, Any]:
    """The answer at once, after the time its tokens take."""
    for i in range(len(answer["choices"][0]["token_ids"])):
        if not await sampled_in_time(server, answer, i):
            return cut(server, answer, i)
    return answer


async def stream_answer(server: Any, request: Any, answer: dict[str, Any]) -> Any:
    """The answer as vLLM streams it, a token an event, with the server's `token_delay_s` between them.

    After `break_after` tokens it breaks off, once: `break_by` "drop" closes the connection, "error" sends an
    error event, "end" ends the body without [DONE], "abort" says that the server ended it, and "stall" sends
    nothing more. `fail_after_break` is what the next requests are answered."""
    from aiohttp import web

    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)

    async def send(body: Any) -> None:
        await response.write(
            b"data: " + (body if isinstance(body, bytes) else json.dumps(body).encode()) + b"\n\n"
        )

    [choice] = answer["choices"]
    ids, entries = choice["token_ids"], choice["logprobs"]["content"]
    try:
        for i, (id_, entry) in enumerate(zip(ids, entries, strict=True)):
            if i == server.break_after:
                answer, server.break_after = cut(server, answer, i), -1
                server.fail_next = list(server.fail_after_break)
                if server.break_by == "drop":
                    request.transport.abort()
                elif server.break_by == "error":
                    await send({"error": {"message": "the engine died", "type": "x", "code": 500}})
                elif server.break_by == "stall":
                    await asyncio.sleep(60)
                elif server.break_by == "abort":
                    break
                return response
            last = i == len(ids) - 1 and choice["finish_reason"] != "abort"
            reason = choice["finish_reason"] if last else None
            delta = {
                "index": 0,
                "token_ids": [id_],
                "logprobs": {"content": [entry]},
                "finish_reason": reason,
                "stop_reason": choice["stop_reason"] if reason else None,
            }
            await send({"request_id": answer["request_id"], "choices": [delta], "usage": None})
            if not await sampled_in_time(server, answer, i + 1):
                answer = cut(server, answer, i + 1)
                break
        if answer["choices"][0]["finish_reason"] == "abort":  # said in an event of its own
            end = {"index": 0, "token_ids": [], "logprobs": None, "finish_reason": "abort"}
            await send({"request_id": answer["request_id"], "choices": [end], "usage": None})
        await send({"request_id": answer["request_id"], "choices": [], "usage": answer["usage"]})
        await send(b"[DONE]")
    except (asyncio.CancelledError, ConnectionError):
        server.aborted.append(answer["request_id"].removeprefix("generate-tokens-"))
        raise
    return response


def until_stop(server: Any, ids: list[int], stops: list[str]) -> tuple[list[int], str | None]:
    """The ids up to the token that completes a stop string, and that string."""
    for end in range(1, len(ids) + 1):
        text = server.tokenizer.decode(ids[:end])
        for stop in stops:
            if stop in text:
                return ids[:end], stop
    return ids, None


def top_logprobs(id_: int, logprob: float, count: int) -> list[dict[str, Any]]:
    """As vLLM lists them: the sampled token first, then the likeliest ones, here of made-up ids."""
    likeliest = [{"token_id": 10 + i, "logprob": -0.01 * (i + 1), "rank": i + 1} for i in range(count)]
    return [{"token_id": id_, "logprob": logprob, "rank": count + 1}, *likeliest]


def derender_piece(server: Any, body: dict[str, Any]) -> dict[str, Any]:
    """What a further piece adds to reasoning and text, found again from all ids so far, as vLLM does it."""
    ids = list((body["stream_state"] or {}).get("output_token_ids", ()))
    before = _seen(server, ids)
    for choice in body["generate_chunk"]["choices"]:
        ids += choice["token_ids"]
    after = _seen(server, ids)
    delta: dict[str, Any] = {
        "content": after[1][len(before[1]) :] or None,
        "reasoning": after[0][len(before[0]) :] or None,
        "tool_calls": [],
    }
    if after[2] and not before[2] and body["chat_request"].get("tools"):
        delta["tool_calls"] = [{"index": 0, "id": "chatcmpl-tool-0", "function": {"name": "?"}}]
    choice = {"index": 0, "delta": delta, "finish_reason": None}
    return {"chunk": {"choices": [choice]}, "stream_state": {"output_token_ids": ids}}


def _seen(server: Any, ids: list[int]) -> tuple[str, str, bool]:
    """(reasoning, text, whether a call has begun) of the beginning of an answer."""
    text = server.tokenizer.decode(ids, skip_special_tokens=False).rstrip("\ufffd")
    reasoning = ""
    if text.startswith("<think>"):
        reasoning, closed, text = text.removeprefix("<think>").partition("</think>")
        reasoning = reasoning if closed else _without_begun(reasoning, "</think>")
    elif "<think>".startswith(text):
        text = ""  # not known yet
    text, begun, _ = text.partition("<tool_call>")
    return reasoning, text if begun else _without_begun(text, "<tool_call>"), bool(begun)


def _without_begun(text: str, mark: str) -> str:
    cut = max((n for n in range(1, len(mark)) if text.endswith(mark[:n])), default=0)
    return text[: len(text) - cut]


def derender(server: Any, body: dict[str, Any]) -> dict[str, Any]:
    """The chat completion that a generation amounts to: reasoning and calls apart, as hermes finds them."""
    [choice] = body["generate_response"]["choices"]
    text = server.tokenizer.decode(choice["token_ids"], skip_special_tokens=False)
    reasoning = None
    if "</think>" in text:
        reasoning, text = text.removeprefix("<think>").split("</think>", 1)
    calls = []
    if body["chat_request"].get("tools"):
        try:
            found = [json.loads(call) for call in _CALL.findall(text)]
            calls = [
                {
                    "id": f"chatcmpl-tool-{i}",
                    "type": "function",
                    "function": {"name": call["name"], "arguments": json.dumps(call["arguments"])},
                }
                for i, call in enumerate(found)
            ]
        except (ValueError, KeyError):
            calls = []
    content = text.split("<tool_call>")[0] if calls else text
    message = {"role": "assistant", "content": content or None, "reasoning": reasoning, "tool_calls": calls}
    return {"choices": [{"index": 0, "message": message, "finish_reason": choice["finish_reason"]}]}
