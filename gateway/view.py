"""A session's trajectories as one page for people: turns, roles, what is trained on, logprobs, versions.

The page is complete in itself: no script, no font, no image comes from anywhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Protocol

from model_runtime.types import Rewards, Trajectory, Turn

# Of a page: sampled tokens, which are shown one by one, and those of context. What comes after is left out.
MAX_SAMPLED_TOKENS = 20_000
MAX_CONTEXT_TOKENS = 200_000
# What no browser may do with the page: it holds text that models and tools wrote.
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
}
_ROLES = ("system", "developer", "user", "assistant", "tool", "model", "ipython")
_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:64rem;margin:1.5rem auto;padding:0 1rem;color:#1b1f24}
h1{font-size:1.25rem}h2{font-size:1.05rem;margin:1.8rem 0 .4rem}
dl{display:grid;grid-template-columns:max-content 1fr;gap:.1rem 1rem;margin:.4rem 0}dt{color:#667}dd{margin:0}
section{border:1px solid #d5dae0;border-radius:6px;margin:.5rem 0;padding:.4rem .8rem}
section.turn{border-left:5px solid #2f855a}section.context{background:#f6f7f9}
header{color:#556;font-size:.85rem;margin-bottom:.25rem}
header b{color:#1b1f24}
pre{margin:0;white-space:pre-wrap;overflow-wrap:anywhere;
font:13px/1.55 ui-monospace,monospace}
.special{color:#8a94a3}
.role{display:inline-block;background:#e3e8ef;border-radius:4px;padding:0 .4rem;margin-top:.3rem}
.p0{background:#e6f5ec}.p1{background:#d3edc9}.p2{background:#f2efb0}
.p3{background:#f9d79b}.p4{background:#f5b199}
.key span{padding:0 .4rem;margin-right:.3rem}
"""
_SHADES = ((0.9, "over 90 %"), (0.5, "50–90 %"), (0.1, "10–50 %"), (0.01, "1–10 %"), (0.0, "under 1 %"))


@dataclass(slots=True)
class _Room:
    """Tokens the page still has room for."""

    sampled: int = MAX_SAMPLED_TOKENS
    context: int = MAX_CONTEXT_TOKENS

    def take_context(self, ids: list[int]) -> list[int]:
        """As many of them as there is room for."""
        shown = ids[: self.context]
        self.context -= len(shown)
        return shown

    def take_turn(self, num_tokens: int) -> bool:
        self.sampled -= num_tokens
        return self.sampled >= 0


class TokenTexts(Protocol):
    def token_texts(self, ids: Sequence[int]) -> list[str]: ...

    def special_token_id(self, text: str) -> int | None: ...


def page(title: str, facts: Iterable[tuple[str, str]], rows: Sequence[tuple[Trajectory, TokenTexts]]) -> str:
    """The whole document. `facts` are shown at its head."""
    key = "".join(f'<span class="p{i}">{escape(text)}</span>' for i, (_, text) in enumerate(_SHADES))
    room = _Room()
    body = (
        "".join(_trajectory(row, texts, room) for row, texts in rows) or "<p>There is no recorded turn.</p>"
    )
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{_STYLE}</style></head><body><h1>{escape(title)}</h1>{_facts(facts)}"
        f'<p class="key">Sampled tokens by probability: {key} Grey sections are context: not trained on.</p>'
        f"{body}</body></html>"
    )


def _facts(facts: Iterable[tuple[str, str]]) -> str:
    return "<dl>" + "".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in facts) + "</dl>"


def _trajectory(row: Trajectory, texts: TokenTexts, room: _Room) -> str:
    trained = "trained on" if row.train else "not trained on"
    facts = [
        ("model", row.model_id),
        ("versions", _span(row.policy_version, row.policy_version_max)),
        ("tokens", f"{len(row.prompt_ids)} prompt, {row.num_sampled_tokens} sampled ({trained})"),
        ("agent's rewards", rewards_text(row.agent_rewards)),
    ]
    head = f"<h2>{escape(row.agent_id)}, conversation {row.chain_index + 1}</h2>{_facts(facts)}"
    parts = [_context("prompt", row.prompt_ids.tolist(), texts, room)]
    end = 0
    for turn in row.turns:
        if turn.start > end:
            parts.append(_context("context", row.response_ids[end : turn.start].tolist(), texts, room))
        end = turn.end
        if not room.take_turn(turn.end - turn.start):
            parts.append(f"<p>Later turns are left out: over {MAX_SAMPLED_TOKENS} sampled tokens.</p>")
            break
        parts.append(_turn(row, turn, texts))
    return head + "".join(parts)


def _context(kind: str, ids: list[int], texts: TokenTexts, room: _Room) -> str:
    """Text the policy did not sample, by the roles its template wrote."""
    shown = room.take_context(ids)
    header = f"<header><b>{kind}</b>, {len(ids)} tokens, mask 0</header>"
    body = "".join(_markup(text, special) for text, special in _runs(texts.token_texts(shown), texts))
    if len(shown) < len(ids):
        body += f"\n… {len(ids) - len(shown)} tokens are left out"
    return f'<section class="context">{header}<pre>{body}</pre></section>'


def _runs(pieces: Iterable[str], texts: TokenTexts) -> Iterator[tuple[str, bool]]:
    """Ordinary text in one piece, special tokens one by one."""
    pending = ""
    for piece in pieces:
        if texts.special_token_id(piece) is None:
            pending += piece
            continue
        if pending:
            yield pending, False
            pending = ""
        yield piece, True
    if pending:
        yield pending, False


def _markup(text: str, special: bool) -> str:
    if special:
        return f'<span class="special">{escape(text)}</span>'
    role = next((r for r in _ROLES if text.startswith(r) and text[len(r) : len(r) + 1] in ("", "\n")), None)
    if role is None:
        return escape(text)
    return f'<span class="role">{role}</span>{escape(text[len(role) :])}'


def _turn(row: Trajectory, turn: Turn, texts: TokenTexts) -> str:
    ids = row.response_ids[turn.start : turn.end].tolist()
    logprobs = row.behavior_logprobs[turn.start : turn.end].tolist()
    versions = row.token_versions[turn.start : turn.end].tolist()
    tokens = "".join(map(_token, texts.token_texts(ids), logprobs, versions))
    facts = [
        f"<b>turn {turn.turn_index + 1}</b>",
        '<span class="role">assistant</span>',
        f"{len(ids)} tokens, mask 1",
        f"version {_span(turn.version_min, turn.version_max)}",
        f"ended by {escape(turn.finish_reason)}",
        f"temperature {turn.temperature:g}",
        f"{turn.ended_at - turn.started_at:.2f} s",
        f"mean logprob {sum(logprobs) / len(logprobs):.3f}",
        f"rewards {escape(rewards_text(turn.rewards))}",
        f"call {escape(turn.request_id)}",
    ]
    return f'<section class="turn"><header>{" · ".join(facts)}</header><pre>{tokens}</pre></section>'


def _token(text: str, logprob: float, version: int) -> str:
    probability = math.exp(min(logprob, 0.0))
    shade = next(i for i, (least, _) in enumerate(_SHADES) if probability >= least)
    hint = f"logprob {logprob:.4f}, p {probability:.3f}, version {version}"
    return f'<span class="p{shade}" title="{hint}">{escape(text)}</span>'


def _span(low: int, high: int) -> str:
    return f"v{low}" if low == high else f"v{low} to v{high}"


def rewards_text(rewards: Rewards) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in rewards.items() if value is not None) or "none"
