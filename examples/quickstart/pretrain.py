"""Makes the two tiny policies of the quickstart, `models/planner` and `models/solver`.

Each is a Qwen3-architecture causal LM of about 0.4 million parameters with a byte-level BPE tokenizer
trained on the shop's own text and a ChatML template. Training has two stages:

  clean      right answers only, until the loss is nearly 0: the model learns the language of the shop, to
             copy names and numbers, and what every question means;
  imperfect  targets that are right with a fixed chance and otherwise mostly one habitual mistake: the
             model unlearns to act on what it knows. Its answers keep the right form.

What is left is a policy that is right in about 40 % of its samples and hardly ever when it decodes
greedily: the mistake is its most likely answer. Reinforcement learning has to turn that around from
rewards alone.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import shop
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

HERE = Path(__file__).resolve().parent

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MAX_MODEL_LEN = 512

Message = dict[str, str]
Speaker = Callable[[list[Message]], str]
"""Completes a conversation: what an agent says next."""


@dataclass(frozen=True, slots=True)
class Skill:
    """How often an imperfect teacher is right, and how often it makes its habitual mistake instead; what
    is left goes to other mistakes of the right form."""

    right: float
    habit: float


PLAN = Skill(right=0.40, habit=0.53)
FOLLOW = Skill(right=0.46, habit=0.54)
REPORT = Skill(right=0.44, habit=0.53)
ANSWER = Skill(right=0.40, habit=0.53)
CLEAN = Skill(right=1.0, habit=0.0)


# ---------------------------------------------------------------- conversations to learn from


def neighbour(table: str, steps: int = 1) -> str:
    """The table that is mistaken for `table`."""
    return shop.TABLES[(shop.TABLES.index(table) + steps) % len(shop.TABLES)]


def choose_table(table: str, skill: Skill, rng: random.Random) -> str:
    """`table`, its habitual neighbour, or another one."""
    draw = rng.random()
    if draw < skill.right:
        return table
    return neighbour(table) if draw < skill.right + skill.habit else neighbour(table, rng.choice((2, 3)))


def planner_conversation(rng: random.Random, *, clean: bool) -> list[Message]:
    """One question and the plan made of it."""
    wording, name = rng.randrange(len(shop.WORDINGS)), rng.choice(shop.NAMES)
    table = choose_table(shop.meant_table(wording), CLEAN if clean else PLAN, rng)
    return [
        {"role": "system", "content": shop.PLANNER_SYSTEM},
        {"role": "user", "content": shop.question(wording, name)},
        {"role": "assistant", "content": str(shop.Plan(table, name))},
    ]


def search_conversation(rng: random.Random, *, clean: bool) -> list[Message]:
    """A plan, the lookups it takes and the report. Names and numbers are drawn freely, so that they can
    only be copied, never remembered."""
    table, name, value = rng.choice(shop.TABLES), rng.choice(shop.NAMES), rng.randint(10, 99)
    messages = [
        {"role": "system", "content": shop.SEARCH_SYSTEM},
        {"role": "user", "content": str(shop.Plan(table, name))},
        {"role": "assistant", "content": shop.lookup_text(shop.Plan(table, name))},
    ]
    if name in shop.ALIASES:
        target = rng.choice(shop.ITEMS)
        messages.append({"role": "user", "content": f"see {target}"})
        if rng.random() >= (CLEAN if clean else FOLLOW).right:
            messages.append({"role": "assistant", "content": str(shop.Finding(table, None))})
            return messages
        messages.append({"role": "assistant", "content": shop.lookup_text(shop.Plan(table, target))})
    messages.append({"role": "user", "content": f"value {value}"})
    said = choose_table(table, CLEAN if clean else REPORT, rng)
    messages.append({"role": "assistant", "content": str(shop.Finding(said, value))})
    return messages


def answer_conversation(rng: random.Random, *, clean: bool) -> list[Message]:
    """A question, the number the book says, and the answer."""
    wording, name, value = rng.randrange(len(shop.WORDINGS)), rng.choice(shop.NAMES), rng.randint(10, 99)
    table = choose_table(shop.meant_table(wording), CLEAN if clean else ANSWER, rng)
    return [
        {"role": "system", "content": shop.ANSWER_SYSTEM},
        {"role": "user", "content": shop.answer_prompt(shop.question(wording, name), value)},
        {"role": "assistant", "content": shop.phrase(table, value)},
    ]


def solver_conversation(rng: random.Random, *, clean: bool) -> list[Message]:
    """The solver speaks for two agents: search_agent and answer_agent."""
    make = search_conversation if rng.random() < 0.6 else answer_conversation
    return make(rng, clean=clean)


# ---------------------------------------------------------------- tokenizer and model


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE of at most 1,024 entries: each word and each two-digit number is one token."""
    rng = random.Random(3)
    text = [m["content"] for _ in range(6000) for m in solver_conversation(rng, clean=True)]
    text += [m["content"] for _ in range(2000) for m in planner_conversation(rng, clean=True)]
    text += [f"{role}\n" for role in ("system", "user", "assistant", "tool") for _ in range(1000)]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore
    trainer = trainers.BpeTrainer(
        vocab_size=1024,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(text, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
        model_max_length=MAX_MODEL_LEN,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def make_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """A fresh Qwen3 of about 0.4 million parameters."""
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


def encode(tokenizer: PreTrainedTokenizerFast, messages: list[Message]) -> tuple[list[int], list[int]]:
    """Token ids of the conversation as the template renders it, and labels: −100 outside what the
    assistant says (its closing <|im_end|> is said too)."""
    ids: list[int] = []
    labels: list[int] = []
    for message in messages:
        head = tokenizer.encode(f"<|im_start|>{message['role']}\n", add_special_tokens=False)
        body = tokenizer.encode(f"{message['content']}<|im_end|>", add_special_tokens=False)
        tail = tokenizer.encode("\n", add_special_tokens=False)
        ids += head + body + tail
        spoken = body if message["role"] == "assistant" else [-100] * len(body)
        labels += [-100] * len(head) + spoken + [-100] * len(tail)
    return ids, labels


def batch_loss(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, conversations: list[list[Message]]
) -> torch.Tensor:
    """Mean cross-entropy of the assistant's tokens."""
    rows = [encode(tokenizer, messages) for messages in conversations]
    width = max(len(ids) for ids, _ in rows)
    pad = tokenizer.pad_token_id
    ids_BT = torch.tensor([ids + [pad] * (width - len(ids)) for ids, _ in rows])
    labels_BT = torch.tensor([labels + [-100] * (width - len(labels)) for _, labels in rows])
    logits_BTV = model(input_ids=ids_BT).logits  # right padding: causal attention never looks at it
    return torch.nn.functional.cross_entropy(logits_BTV[:, :-1].flatten(0, 1), labels_BT[:, 1:].flatten())


def train_stage(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    converse: Callable[..., list[Message]],
    *,
    clean: bool,
    steps: int,
    peak_lr: float,
    rng: random.Random,
    batch_size: int = 64,
) -> float:
    """AdamW with a cosine schedule; returns the mean loss of the last ten steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak_lr, weight_decay=0.01)
    losses: list[float] = []
    for step in range(steps):
        warm, cool = min(1.0, (step + 1) / 20), 0.5 * (1 + math.cos(math.pi * step / steps))
        for group in optimizer.param_groups:
            group["lr"] = peak_lr * warm * max(cool, 0.02)
        loss = batch_loss(model, tokenizer, [converse(rng, clean=clean) for _ in range(batch_size)])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return sum(losses[-10:]) / len(losses[-10:])


# ---------------------------------------------------------------- how often it is right


def speaker(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, *, temperature: float) -> Speaker:
    """An agent that samples from the model (greedily at temperature 0)."""

    def say(messages: list[Message]) -> str:
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")
        prompt = prompt["input_ids"] if not isinstance(prompt, torch.Tensor) else prompt
        how = (
            {"do_sample": True, "temperature": temperature, "top_k": 0}
            if temperature
            else {"do_sample": False}
        )
        out = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=16, **how)
        return tokenizer.decode(out[0, prompt.shape[1] :], skip_special_tokens=True)

    return say


def run_task(task: dict[str, object], planner: Speaker, solver: Speaker) -> dict[str, bool]:
    """The workflow without servers. Agents that were never asked are missing from the result."""
    table, asked = str(task["table"]), str(task["question"])
    plan = shop.parse_plan(
        planner([{"role": "system", "content": shop.PLANNER_SYSTEM}, {"role": "user", "content": asked}])
    )
    scores = {"planner_agent": plan == shop.Plan(table, str(task["name"])), "workflow": False}
    if plan is None:
        return scores
    messages = [{"role": "system", "content": shop.SEARCH_SYSTEM}, {"role": "user", "content": str(plan)}]
    finding = None
    for _ in range(shop.MAX_SEARCH_TURNS):
        said = solver(messages)
        messages.append({"role": "assistant", "content": said})
        call = shop.parse_lookup(said)
        if call is None:
            finding = shop.parse_finding(said)
            break
        messages.append({"role": "user", "content": shop.lookup(call)})
    wanted = shop.Finding(plan.table, shop.book_value(plan.table, plan.name))
    scores["search_agent"] = finding == wanted
    if finding is None or finding.value is None:
        return scores
    said = solver(
        [
            {"role": "system", "content": shop.ANSWER_SYSTEM},
            {"role": "user", "content": shop.answer_prompt(asked, finding.value)},
        ]
    )
    scores["answer_agent"] = said.strip() == shop.phrase(table, finding.value)
    scores["workflow"] = all(scores[agent] for agent in ("planner_agent", "search_agent", "answer_agent"))
    return scores


def success_rates(tasks: list[dict[str, object]], planner: Speaker, solver: Speaker) -> dict[str, float]:
    """Mean success by agent and of the workflow."""
    scores = [run_task(task, planner, solver) for task in tasks]
    names = ("planner_agent", "search_agent", "answer_agent", "workflow")
    values = {name: [s[name] for s in scores if name in s] for name in names}
    return {name: sum(v) / len(v) if v else 0.0 for name, v in values.items()}


# ---------------------------------------------------------------- the script


def make_policy(
    name: str,
    converse: Callable[..., list[Message]],
    tokenizer: PreTrainedTokenizerFast,
    args: argparse.Namespace,
) -> Qwen3ForCausalLM:
    """Both stages of one policy."""
    torch.manual_seed(args.seed)
    rng = random.Random(args.seed)
    model = make_model(tokenizer)
    started = time.monotonic()
    clean = train_stage(model, tokenizer, converse, clean=True, steps=args.clean_steps, peak_lr=3e-3, rng=rng)
    noisy = train_stage(
        model, tokenizer, converse, clean=False, steps=args.imperfect_steps, peak_lr=1e-3, rng=rng
    )
    print(
        f"{name}: {model.num_parameters():,} parameters, loss {clean:.4f} clean, {noisy:.4f} imperfect, "
        f"{time.monotonic() - started:.0f} s",
        flush=True,
    )
    return model.eval()


def save(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """A Hugging Face folder that transformers and vLLM load."""
    model.save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)
    tokenizer.save_pretrained(folder)


def write_tasks(folder: Path) -> None:
    """train.jsonl and held_out.jsonl."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, tasks in zip(("train", "held_out"), shop.split_tasks(), strict=True):
        lines = "".join(json.dumps(task) + "\n" for task in tasks)
        (folder / f"{name}.jsonl").write_text(lines, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0, help="the shipped models are those of seed 0")
    parser.add_argument("--clean-steps", type=int, default=400, help="steps of 64 right conversations")
    parser.add_argument("--imperfect-steps", type=int, default=300, help="steps of 64 imperfect ones")
    parser.add_argument("--out", type=Path, default=HERE, help="folder for models/ and tasks/")
    args = parser.parse_args()

    torch.set_num_threads(1)
    disable_progress_bar()
    write_tasks(args.out / "tasks")
    tokenizer = make_tokenizer()
    planner = make_policy("planner", planner_conversation, tokenizer, args)
    solver = make_policy("solver", solver_conversation, tokenizer, args)
    save(planner, tokenizer, args.out / "models" / "planner")
    save(solver, tokenizer, args.out / "models" / "solver")

    torch.manual_seed(args.seed + 1)
    with torch.no_grad():
        for temperature, repeats in ((1.0, 2), (0.0, 1)):
            speakers = [speaker(model, tokenizer, temperature=temperature) for model in (planner, solver)]
            rates = success_rates(shop.all_tasks() * repeats, *speakers)
            shown = "  ".join(f"{name} {rate:.2f}" for name, rate in rates.items())
            print(f"success at temperature {temperature:g}: {shown}", flush=True)


if __name__ == "__main__":
    main()
