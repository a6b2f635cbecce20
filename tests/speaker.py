"""Makes tests/data/speaker: a tiny model that really speaks with tools, for tests of real clients.

    python -m tests.speaker            # minutes on one core; the folder that is there came from seed 0

It is the clerk of a furniture shop, a Qwen3 of 0.4 million parameters. Asked for a price or for what is left
of an item, it calls `price` or `stock` (twice at once for two items), and tells what came back; as a triage
agent it hands on to the clerk. It knows no client: system prompts, descriptions and schemas are drawn at
random. Where it has a choice of words (a sentence before the call, how JSON is spaced, how the answer is put)
it takes each as often as it was taught, so that at temperature 1 there is something to be exact about.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from tests.tiny_models import SPECIAL_TOKENS
from tests.tool_use import TOOL_TEMPLATE

FOLDER = Path(__file__).parent / "data" / "speaker"
MAX_MODEL_LEN = 1024

ITEMS = (
    *("lamp", "desk", "sofa", "chair", "shelf", "rug", "mirror", "clock"),
    *("stove", "bed", "vase", "bench", "stool", "piano", "drum", "couch"),
)
QUESTIONS = {
    "price": ("How much is the {}?", "What does the {} cost?", "Tell me the price of the {}."),
    "stock": ("How many of the {} are left?", "Is the {} in stock?"),
}
ANSWERS = {
    "price": ("The {} costs {}.", "It costs {1}.", "That is {1}."),
    "stock": ("There are {1} left.", "{1} of the {0} are left."),
}
TWO_ITEMS = "How much are the {} and the {}?"
TWO_ANSWERS = ("The {} costs {} and the {} costs {}.", "{1} and {3}.")
GREETINGS = ("Hello!", "Good day.", "Hi there!")
WELCOMES = ("Hello! Ask me for the price of an item, or how many are left.", "Good day! What may I look up?")
NO_TOOLS = ("I can't look that up.", "Sorry, I have no tools for that.")
PREAMBLE = "Let me look.\n"
HANDOFF = "transfer_to_clerk"
HANDED_OVER = '{"assistant": "clerk"}'

_SYSTEM_WORDS = (
    "You are the clerk of a shop. Answer with the tools you have. Be brief, helpful and polite. "
    "Send every customer on to the right agent. Always look things up."
)
_DESCRIPTIONS = (
    *("What an item costs.", "How many of an item are left.", "The price of an item"),
    *("Look it up in the book", "Handoff to the clerk agent to handle the request."),
    *("Number of pieces in stock.", None, ""),
)

Piece = tuple[str, bool]
"""Text, and whether the model says it."""
Exchange = tuple[str, list[Piece]]
"""A question, and what follows it."""


# ------------------------------------------------------------------ conversations to learn from


def schema(rng: random.Random, name: str, parameters: dict[str, Any]) -> dict[str, Any]:
    """A function with parameters that are all strings, as one of many clients would write it."""
    properties: dict[str, Any] = {}
    titled = rng.random() < 0.4
    for key in parameters:
        entries: list[tuple[str, Any]] = [("type", "string")]
        if titled:
            entries.append(("title", key.title()))
        if rng.random() < 0.3:
            entries.append(("description", rng.choice(_DESCRIPTIONS) or "name"))
        rng.shuffle(entries)
        properties[key] = dict(entries)
    fields: list[tuple[str, Any]] = [("type", "object"), ("properties", properties)]
    if properties or rng.random() < 0.5:
        fields.append(("required", list(properties)))
    if titled:
        fields.append(("title", f"{name}_args"))
    if rng.random() < 0.4:
        fields.append(("additionalProperties", False))
    rng.shuffle(fields)
    function: dict[str, Any] = {"name": name, "description": rng.choice(_DESCRIPTIONS)}
    function["parameters"] = dict(fields)
    if rng.random() < 0.3:
        function["strict"] = rng.random() < 0.8
    return {"type": "function", "function": function}


def call_text(rng: random.Random, name: str, arguments: dict[str, str]) -> str:
    call = {"name": name, "arguments": arguments}
    compact = rng.random() < 0.15
    written = json.dumps(call, separators=(",", ":") if compact else None)
    return f"<tool_call>\n{written}\n</tool_call>"


def results_text(results: list[str]) -> str:
    shown = "".join(f"\n<tool_response>\n{text}\n</tool_response>" for text in results)
    return f"\n<|im_start|>user{shown}<|im_end|>\n<|im_start|>assistant\n"


def asked_text(question: str) -> str:
    return f"\n<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"


def exchange(rng: random.Random, kind: str) -> Exchange:
    """A question; calls, their results, the answer."""
    if kind == "greeting":
        return rng.choice(GREETINGS), [(rng.choice(WELCOMES), True)]
    names = rng.sample(ITEMS, 2)
    values = [str(rng.randint(10, 99)) for _ in names]
    if kind == "two":
        calls = "\n".join(call_text(rng, "price", {"item": name}) for name in names)
        pairs = (names[0], values[0], names[1], values[1])
        question, answer = TWO_ITEMS.format(*names), rng.choice(TWO_ANSWERS).format(*pairs)
    else:
        names, values = names[:1], values[:1]
        calls = call_text(rng, kind, {"item": names[0]})
        question = rng.choice(QUESTIONS[kind]).format(names[0])
        answer = rng.choice(ANSWERS[kind]).format(names[0], values[0])
    said = (PREAMBLE if rng.random() < 0.2 else "") + calls
    return question, [(said, True), (results_text(values), False), (answer, True)]


def conversation(tokenizer: PreTrainedTokenizerFast, rng: random.Random, *, short: bool) -> list[Piece]:
    """Pieces in turn: context, what the model says, context, … Short ones show no tools."""
    tools = [schema(rng, name, {"item": str}) for name in ("price", "stock")]
    kinds = ["greeting", *["price"] * 4, *["stock"] * 3, *["two"] * 2]
    num_exchanges = 1 if short else rng.choice((1, 1, 2, 3))
    exchanges = [exchange(rng, rng.choice(kinds)) for _ in range(num_exchanges)]
    if not short:
        tools, exchanges = vary(rng, tools, exchanges)
    rng.shuffle(tools)
    question, pieces = exchanges[0]
    messages = [{"role": "user", "content": question}]
    if not short and rng.random() < 0.6:
        words = rng.choices(_SYSTEM_WORDS.split(), k=rng.randint(2, 16))
        messages.insert(0, {"role": "system", "content": " ".join(words)})
    shown = None if short else tools or None
    opening = tokenizer.apply_chat_template(messages, tools=shown, add_generation_prompt=True, tokenize=False)
    pieces = [(str(opening), False), *pieces]
    for question, more in exchanges[1:]:
        pieces += [(asked_text(question), False), *more]
    return pieces


def vary(
    rng: random.Random, tools: list[dict[str, Any]], exchanges: list[Exchange]
) -> tuple[list[dict[str, Any]], list[Exchange]]:
    """Some conversations are had without tools, with only those that are needed, by a triage agent, or by the
    clerk it handed on to."""
    (question, pieces), *later = exchanges
    draw = rng.random()
    if draw < 0.08:
        answers = WELCOMES if question in GREETINGS else NO_TOOLS
        return [], [(question, [(rng.choice(answers), True)])]
    if draw >= 0.45 or question in GREETINGS:
        return tools, exchanges
    if draw >= 0.2:
        about_prices = {"How much" in q or "cost" in q or "price" in q for q, _ in exchanges}
        needed = {"price" if about_price else "stock" for about_price in about_prices}
        return [tool for tool in tools if tool["function"]["name"] in needed], exchanges
    handing_on = call_text(random.Random(0), HANDOFF, {})
    if rng.random() < 0.5:
        return [schema(rng, HANDOFF, {})], [(question, [(handing_on, True)])]
    handed_on = f"{handing_on}<|im_end|>{results_text([HANDED_OVER])}"
    return tools, [(question, [(handed_on, False), *pieces]), *later]


# ------------------------------------------------------------------ tokenizer and model


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE; digits stand apart, so that a number is one token wherever it stands."""
    tokenizer = Tokenizer(models.BPE())
    split = [pre_tokenizers.Digits(individual_digits=False), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(split)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
        model_max_length=MAX_MODEL_LEN,
    )
    fast.chat_template = TOOL_TEMPLATE
    rng = random.Random(3)
    texts = ["".join(text for text, _ in conversation(fast, rng, short=False)) for _ in range(1500)]
    numbers = " ".join(str(n) for n in range(10, 100))
    trainer = trainers.BpeTrainer(
        vocab_size=768,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*texts, *[numbers] * 400], trainer)
    trained = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
        model_max_length=MAX_MODEL_LEN,
    )
    trained.chat_template = TOOL_TEMPLATE
    return trained


def make_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    eos, pad = (tokenizer.convert_tokens_to_ids(t) for t in ("<|im_end|>", "<|endoftext|>"))
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=MAX_MODEL_LEN,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=eos,
        pad_token_id=pad,
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config.eos_token_id = eos
    model.generation_config.pad_token_id = pad
    return model


def encode(tokenizer: PreTrainedTokenizerFast, pieces: list[Piece]) -> tuple[list[int], list[int]]:
    """Token ids, and labels: −100 outside what the model says (its closing <|im_end|> is said too)."""
    ids: list[int] = []
    labels: list[int] = []
    for text, said in pieces:
        more = tokenizer.encode(text + "<|im_end|>" * said, add_special_tokens=False)
        ids += more
        labels += more if said else [-100] * len(more)
    return ids, labels


def batch_loss(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, conversations: list[list[Piece]]
) -> torch.Tensor:
    """Mean cross-entropy of what the model says."""
    rows = [encode(tokenizer, pieces) for pieces in conversations]
    width = max(len(ids) for ids, _ in rows)
    pad = tokenizer.pad_token_id
    ids_BT = torch.tensor([ids + [pad] * (width - len(ids)) for ids, _ in rows])
    labels_BT = torch.tensor([labels + [-100] * (width - len(labels)) for _, labels in rows])
    hidden_BTH = model.model(input_ids=ids_BT).last_hidden_state  # padded right: nothing looks at it
    said = labels_BT[:, 1:] != -100
    logits = model.lm_head(hidden_BTH[:, :-1][said])
    return torch.nn.functional.cross_entropy(logits, labels_BT[:, 1:][said])


def train(args: argparse.Namespace) -> tuple[Qwen3ForCausalLM, PreTrainedTokenizerFast]:
    """Short conversations until it can copy, then whole ones. AdamW, one cosine over both."""
    torch.manual_seed(args.seed)
    rng, tokenizer = random.Random(args.seed), make_tokenizer()
    model = make_model(tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.peak_lr, weight_decay=0.01)
    num_steps, started, losses = args.short_steps + args.steps, time.monotonic(), []
    print(f"{model.num_parameters():,} parameters, {len(tokenizer)} tokens", flush=True)
    for step in range(num_steps):
        short = step < args.short_steps
        rate = min(1.0, (step + 1) / 30) * max(0.5 * (1 + math.cos(math.pi * step / num_steps)), 0.01)
        for group in optimizer.param_groups:
            group["lr"] = args.peak_lr * rate
        batch = [conversation(tokenizer, rng, short=short) for _ in range(64 if short else 16)]
        loss = batch_loss(model, tokenizer, batch)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        if step % 50 == 49:
            print(
                f"step {step + 1}: {sum(losses[-50:]) / 50:.4f}, {time.monotonic() - started:.0f} s",
                flush=True,
            )
    return model.eval(), tokenizer


def save(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """A Hugging Face folder. Weights are rounded to bfloat16, half the size, and read as float32."""
    model.to(torch.bfloat16).save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)
    tokenizer.save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description="Makes tests/data/speaker.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--short-steps", type=int, default=600)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--peak-lr", type=float, default=3e-3)
    parser.add_argument("--out", type=Path, default=FOLDER)
    args = parser.parse_args()
    torch.set_num_threads(1)
    save(*train(args), args.out)


if __name__ == "__main__":
    main()
