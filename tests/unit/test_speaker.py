"""The tool-calling model of the tests is taught what the chat template writes."""

from __future__ import annotations

import json
import random

from tests import speaker


def test_what_it_is_taught_is_what_the_template_writes() -> None:
    tokenizer, rng = speaker.make_tokenizer(), random.Random(1)
    tool = speaker.schema(rng, "price", {"item": str})
    asked = [{"role": "user", "content": "How much is the lamp?"}]

    def written(messages: list[dict], *, more: bool) -> str:
        return str(
            tokenizer.apply_chat_template(messages, tools=[tool], add_generation_prompt=more, tokenize=False)
        )

    call = {"name": "price", "arguments": {"item": "lamp"}}
    said = f"<tool_call>\n{json.dumps(call)}\n</tool_call>"
    messages = [
        *asked,
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]},
        {"role": "tool", "content": "42"},
    ]
    taught = written(asked, more=True) + f"{said}<|im_end|>" + speaker.results_text(["42"])
    assert taught == written(messages, more=True)
    messages += [{"role": "assistant", "content": "It costs 42."}, {"role": "user", "content": "Hello!"}]
    taught += "It costs 42.<|im_end|>" + speaker.asked_text("Hello!")
    assert taught == written(messages, more=True)


def test_the_folder_is_small_and_of_this_script() -> None:
    assert sum(path.stat().st_size for path in speaker.FOLDER.iterdir()) < 1.5e6
    kept = json.loads((speaker.FOLDER / "tokenizer.json").read_text())
    assert kept["model"]["vocab"] == speaker.make_tokenizer().get_vocab()
