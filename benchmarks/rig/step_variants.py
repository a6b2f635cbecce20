"""The variants of benchmarks/trainer_step.py, each run in a process of its own:

    python benchmarks/rig/step_variants.py SPEC

SPEC is JSON. Every line on stdin asks for one update; every line on stdout that begins with @ answers with
its figures; the first update's gradient is left in a file.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

GROUP_SIZE = 8
RANK, ALPHA = 16, 32
CLIP = 0.2
OURS = {  # variant → settings of the trainer section
    "packed": {"packing": "on", "share_prefixes": False},
    "packed, prompts once": {"packing": "on", "share_prefixes": True},
}


@dataclass(frozen=True)
class Sequence:
    prompt_ids: list[int]
    response_ids: list[int]
    behavior_logprobs: list[float]
    advantage: float


class Ours:
    """model_runtime's learner, as the trainer process calls it."""

    def __init__(self, spec: dict[str, Any], batch: list[Sequence]) -> None:
        from model_runtime.config import ModelConfig
        from model_runtime.learner import Learner, prepare_torch

        half = spec["dtype"] == "bfloat16"
        trainer = {
            **OURS[spec["name"]],
            **({"dtype": "bfloat16", "autocast": "bfloat16"} if half else {}),
            **{"num_threads": spec["threads"], "micro_batch_tokens": spec["micro_batch_tokens"]},
            **{"learning_rate": 1e-5, "max_grad_norm": 1e9},
        }
        objective = {
            **{"loss": "ppo_clip", "clip_ratio_low": CLIP, "clip_ratio_high": CLIP, "clip_ratio_c": 1e9},
            **{"importance_weight_cap": None, "aggregation": "token-mean"},
        }
        model = ModelConfig.model_validate(
            {
                **{"model_id": "m", "model_path": spec["model"], "adapter_path": spec["adapter"]},
                **{"lora": {"rank": RANK}, "trainer": trainer, "objective": objective},
            }
        )
        prepare_torch(model.trainer, model_id="m", gpu_ids=[])
        self._learner = Learner(model, seed=0)
        self._rows = [_row(i, sequence) for i, sequence in enumerate(batch)]

    def update(self) -> None:
        self._learner.update(self._rows, step=1)

    def gradient(self) -> dict[str, Any]:
        return dict(self._learner.policy.parameters)


def _row(index: int, sequence: Sequence) -> Any:
    from types import SimpleNamespace

    from tests.fakes import make_trajectory

    mask = np.ones(len(sequence.response_ids), dtype=np.int8)
    trajectory = make_trajectory(
        member_index=index,
        group_size=index + 1,
        mask=mask,
        prompt_ids=np.asarray(sequence.prompt_ids, dtype=np.int32),
        response_ids=np.asarray(sequence.response_ids, dtype=np.int32),
        behavior_logprobs=np.asarray(sequence.behavior_logprobs, dtype=np.float32),
    )
    return SimpleNamespace(
        trajectory=trajectory, advantage=sequence.advantage, loss_mask=mask, turn_advantages=None
    )


def padded(lists: list[list[Any]], *, left: bool, fill: float = 0) -> Any:
    import torch

    longest = max(map(len, lists))
    rows = [
        [fill] * (longest - len(one)) + one if left else one + [fill] * (longest - len(one)) for one in lists
    ]
    return torch.tensor(rows)


class Plain:
    """The reference: transformers and PEFT as they come, padded, float32, all logits."""

    def __init__(self, spec: dict[str, Any], batch: list[Sequence]) -> None:
        import torch
        from peft import PeftModel
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(spec["threads"])
        base = AutoModelForCausalLM.from_pretrained(spec["model"], dtype=torch.float32)
        self._model = PeftModel.from_pretrained(base, spec["adapter"], is_trainable=True).eval()
        self._batch = batch

    def update(self) -> None:
        import torch

        self._model.zero_grad()
        denominator = sum(len(s.response_ids) for s in self._batch)
        for start in range(0, len(self._batch), 4):  # all 32 at once would be 3 GB of logits
            part = self._batch[start : start + 4]
            ids = padded([s.prompt_ids + s.response_ids for s in part], left=False)
            mask = padded([[1] * len(s.prompt_ids + s.response_ids) for s in part], left=False)
            logprobs = torch.log_softmax(self._model(input_ids=ids, attention_mask=mask).logits[:, :-1], -1)
            logprobs = logprobs.gather(-1, ids[:, 1:, None])[..., 0]
            loss = torch.zeros(())
            for i, s in enumerate(part):
                first = len(s.prompt_ids) - 1
                ratio = logprobs[i, first : first + len(s.response_ids)] - torch.tensor(s.behavior_logprobs)
                ratio = ratio.exp()
                bounded = ratio.clamp(1 - CLIP, 1 + CLIP)
                loss = loss + torch.maximum(-s.advantage * ratio, -s.advantage * bounded).sum()
            (loss / denominator).backward()

    def gradient(self) -> dict[str, Any]:
        return {n.replace(".default", ""): p for n, p in self._model.named_parameters() if p.requires_grad}


class Trl:
    """TRL's GRPO trainer with its defaults, given the batch it would have made of these sequences."""

    def __init__(self, spec: dict[str, Any], batch: list[Sequence]) -> None:
        import torch
        from datasets import Dataset
        from peft import LoraConfig, set_peft_model_state_dict
        from safetensors.torch import load_file
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from trl import GRPOConfig, GRPOTrainer

        torch.set_num_threads(spec["threads"])
        half = spec["dtype"] == "bfloat16"
        arguments = GRPOConfig(
            output_dir=spec["scratch"],
            per_device_train_batch_size=GROUP_SIZE,
            gradient_accumulation_steps=len(batch) // GROUP_SIZE,
            num_generations=GROUP_SIZE,
            max_completion_length=512,
            epsilon=CLIP,
            use_cpu=True,
            bf16=half,
            report_to="none",
        )
        lora = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules="all-linear", task_type="CAUSAL_LM")
        self._trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(spec["model"], dtype=getattr(torch, spec["dtype"])),
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            args=arguments,
            train_dataset=Dataset.from_list([{"prompt": "a"}] * len(batch)),
            processing_class=AutoTokenizer.from_pretrained(spec["model"]),
            peft_config=lora,
        )
        self._model = self._trainer.model
        state = load_file(Path(spec["adapter"]) / "adapter_model.safetensors")
        set_peft_model_state_dict(self._model, state)
        self._model.train()
        if arguments.gradient_checkpointing:  # as Trainer.train does
            self._model.gradient_checkpointing_enable(arguments.gradient_checkpointing_kwargs)
        self._trainer.current_gradient_accumulation_steps = len(batch) // GROUP_SIZE
        self._optimizer = torch.optim.AdamW([p for p in self._model.parameters() if p.requires_grad], lr=1e-5)
        whole = {
            "prompt_ids": padded([s.prompt_ids for s in batch], left=True),
            "prompt_mask": padded([[1] * len(s.prompt_ids) for s in batch], left=True),
            "completion_ids": padded([s.response_ids for s in batch], left=False),
            "completion_mask": padded([[1] * len(s.response_ids) for s in batch], left=False),
            "advantages": torch.tensor([s.advantage for s in batch]),
            "old_per_token_logps": padded([s.behavior_logprobs for s in batch], left=False, fill=0.0),
        }
        tokens = torch.tensor(sum(len(s.response_ids) for s in batch))
        self._parts = [
            {name: t[start : start + GROUP_SIZE] for name, t in whole.items()}
            | {"num_items_in_batch": tokens}
            for start in range(0, len(batch), GROUP_SIZE)
        ]

    def update(self) -> None:
        import torch

        self._optimizer.zero_grad()
        for part in self._parts:
            loss = self._trainer.compute_loss(self._model, part)
            self._trainer.accelerator.backward(loss)
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1e9)
        self._optimizer.step()

    def gradient(self) -> dict[str, Any]:
        return {n.replace(".default", ""): p for n, p in self._model.named_parameters() if p.requires_grad}


def work(spec: dict[str, Any]) -> None:
    """A variant's process: one line in, one update, one line of figures out."""
    batch = [Sequence(**one) for one in json.loads(Path(spec["batch"]).read_text())]
    make = {"reference": Plain, "TRL": Trl}.get(spec["name"], Ours)
    variant = make(spec, batch)
    answer({"ready": True})
    for number, _ in enumerate(sys.stdin):
        wall, cpu = time.perf_counter(), time.process_time()
        variant.update()
        figures = {"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu}
        if number == 0:
            gradient = variant.gradient()
            flat = [gradient[name].grad.float().flatten().numpy() for name in sorted(gradient)]
            np.save(spec["gradient"], np.concatenate(flat))
        answer(figures | {"peak_bytes": peak_bytes()})


def peak_bytes() -> int:
    """Most memory this program ever had, imports and all. Not getrusage's figure, which a process inherits
    from whoever started it."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def answer(figures: dict[str, Any]) -> None:
    print("@" + json.dumps(figures), flush=True)  # libraries print to the same stream


if __name__ == "__main__":
    work(json.loads(sys.argv[1]))
