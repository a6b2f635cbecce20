"""One update of SmolLM2-135M, real weights, LoRA r=16, on 32 sequences of 64-512 tokens in groups that share
prompts: ours against TRL's GRPO loss on the same batch, and the floor that the machine's matrix products set.

    python examples/smollm2/fetch.py                                        # the model, once
    python -m venv trl-venv && trl-venv/bin/pip install -e '.[app]' trl==1.16.0
    python benchmarks/trainer_step.py --trl trl-venv/bin/python [--json]

Every variant runs in a process of its own with the same threads; their updates take turns, and the medians
count. The gradient of each is compared with plain padded transformers and PEFT in float32. TRL stays as it
comes: its defaults (gradient checkpointing, 8 sequences a device), its padding, its own trainer's loss.

Claims, in float32: 3 times TRL's non-pad tokens a second, 4 times with shared prompts read once; 2 times in
bfloat16; at most 0.4 of its peak memory; gradient norm within 1e-5 of the reference's. With TRL half an hour
on two cores; without `--trl` minutes, and only the last claim is judged.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.rig.step_variants import ALPHA, GROUP_SIZE, OURS, RANK, Sequence

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "examples" / "smollm2" / "model"
VARIANTS = ROOT / "benchmarks" / "rig" / "step_variants.py"
GROUPS = 4
DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True)
class Sample:
    """What one variant did, round by round."""

    name: str
    dtype: str
    wall_s: list[float]
    cpu_s: list[float]
    peak_bytes: int
    grad_norm_difference: float

    @property
    def seconds(self) -> float:
        return statistics.median(self.wall_s)


# ------------------------------------------------------------------ the batch


def make_batch(folder: Path, groups: int, threads: int) -> list[Sequence]:
    """Real text cut to random lengths; the sampler's logprobs are the model's own with a little noise."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(threads)
    rng = np.random.default_rng(0)
    pages = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", *sorted((ROOT / "model_runtime").glob("*.py"))]
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    ids = AutoTokenizer.from_pretrained(folder, model_max_length=10**9)(text)["input_ids"]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def cut(length: int) -> list[int]:
        start = int(rng.integers(0, len(ids) - length))
        return ids[start : start + length]

    batch = []
    for _ in range(groups):
        prompt = cut(int(rng.integers(48, 256)))
        for _ in range(GROUP_SIZE):
            total = int(rng.integers(max(64, len(prompt) + 16), 513))
            response = cut(total - len(prompt))
            with torch.no_grad():
                logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
            logprobs = torch.log_softmax(logits, -1).gather(1, torch.tensor(response)[:, None])[:, 0].numpy()
            behavior = np.minimum(logprobs + rng.normal(0, 0.05, len(response)), 0.0).astype(np.float32)
            batch.append(Sequence(prompt, response, behavior.tolist(), float(rng.normal())))
    return batch


def make_adapter(folder: Path, model: Path) -> None:
    """A PEFT adapter that has left its start: with B = 0 half of the gradient would be 0."""
    from model_runtime.config import ModelConfig
    from model_runtime.policy import Policy

    section = {"model_id": "m", "model_path": str(model), "lora": {"rank": RANK, "alpha": ALPHA}}
    policy = Policy(ModelConfig.model_validate(section), seed=0)
    rng = np.random.default_rng(1)
    policy.load(
        {
            name: t if "lora_A" in name else rng.normal(0, 0.01, t.shape).astype(np.float32)
            for name, t in policy.tensors().items()
        }
    )
    files = policy.adapter_files()
    folder.mkdir()
    (folder / "adapter_model.safetensors").write_bytes(files.weights)
    (folder / "adapter_config.json").write_bytes(files.config)


# ------------------------------------------------------------------ measuring


class Worker:
    """A variant's process, seen from here."""

    def __init__(self, python: str, spec: dict[str, Any], folder: Path) -> None:
        self.spec = spec | {"gradient": str(folder / f"{spec['name']}-{spec['dtype']}.npy")}
        self.figures: list[dict[str, Any]] = []
        self._log = (folder / f"{spec['name']}-{spec['dtype']}.log").open("w+")
        self._process = subprocess.Popen(
            [python, str(VARIANTS), json.dumps(self.spec)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        self._answer()

    def update(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        self.figures.append(self._answer())

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("@"):
                return json.loads(line[1:])
        self._log.seek(0)
        raise SystemExit(f"{self.spec['name']} ended:\n{self._log.read()[-3000:]}")

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)

    def sample(self, reference: np.ndarray) -> Sample:
        gradient = np.load(self.spec["gradient"])
        want = np.linalg.norm(reference)
        return Sample(
            name=self.spec["name"],
            dtype=self.spec["dtype"],
            wall_s=[f["wall_s"] for f in self.figures],
            cpu_s=[f["cpu_s"] for f in self.figures],
            peak_bytes=max(f["peak_bytes"] for f in self.figures),
            grad_norm_difference=float(abs(np.linalg.norm(gradient) - want) / want),
        )


def measure(arguments: argparse.Namespace, folder: Path) -> tuple[list[Sample], list[Sequence]]:
    batch = make_batch(arguments.model, arguments.groups, arguments.threads)
    (folder / "batch.json").write_text(json.dumps([asdict(s) for s in batch]))
    make_adapter(folder / "adapter", arguments.model)
    spec = {
        "model": str(arguments.model),
        "adapter": str(folder / "adapter"),
        "batch": str(folder / "batch.json"),
        "scratch": str(folder / "scratch"),
        "threads": arguments.threads,
        "micro_batch_tokens": arguments.micro_batch_tokens,
    }
    plain = Worker(sys.executable, spec | {"name": "reference", "dtype": "float32"}, folder)
    plain.update()
    plain.close()
    reference = np.load(plain.spec["gradient"])
    samples = [plain.sample(reference)]
    for dtype in arguments.dtype:
        workers = [Worker(sys.executable, spec | {"name": n, "dtype": dtype}, folder) for n in OURS]
        if arguments.trl:
            workers.append(Worker(arguments.trl, spec | {"name": "TRL", "dtype": dtype}, folder))
        for _ in range(arguments.rounds):
            for worker in workers:
                worker.update()
        for worker in workers:
            worker.close()
        samples += [worker.sample(reference) for worker in workers]
    return samples, batch


# ------------------------------------------------------------------ the floor


def matmul_flops_per_s(dtype: str, threads: int) -> float:
    """The best rate of the model's own largest products."""
    import torch

    torch.set_num_threads(threads)
    a = torch.randn(1024, 576, dtype=getattr(torch, dtype))
    b = torch.randn(576, 1536, dtype=getattr(torch, dtype))
    best = float("inf")
    for _ in range(50):
        began = time.perf_counter()
        for _ in range(4):
            a @ b
        best = min(best, (time.perf_counter() - began) / 4)
    return 2 * 1024 * 576 * 1536 / best


def flops(batch: list[Sequence], model: Path, *, prompts_once: bool) -> float:
    """Multiplications and additions an update can't do without: every layer forward and back through frozen
    weights, the adapter's three products, attention below the diagonal, the head at trained tokens."""
    config = json.loads((model / "config.json").read_text())
    hidden, inner, layers = (config[k] for k in ("hidden_size", "intermediate_size", "num_hidden_layers"))
    heads, head_dim = config["num_attention_heads"], config["head_dim"]
    kv = config["num_key_value_heads"] * head_dim
    shapes = [(hidden, heads * head_dim), (hidden, kv), (hidden, kv), (heads * head_dim, hidden)]
    shapes += [(hidden, inner), (hidden, inner), (inner, hidden)]
    per_token = sum(4 * i * o + 6 * RANK * (i + o) for i, o in shapes) * layers
    tokens, pairs, seen = 0, 0.0, set()
    for s in batch:
        prompt, response = len(s.prompt_ids), len(s.response_ids)
        known = prompts_once and tuple(s.prompt_ids) in seen
        seen.add(tuple(s.prompt_ids))
        tokens += response + (0 if known else prompt)
        pairs += ((prompt + response) ** 2 - (prompt**2 if known else 0)) / 2
    attention = 12 * heads * head_dim * layers * pairs  # 2 products forward, 4 back
    trained = sum(len(s.response_ids) for s in batch)
    return tokens * per_token + attention + 4 * config["vocab_size"] * hidden * trained


# ------------------------------------------------------------------ the table


def report(samples: list[Sample], batch: list[Sequence], arguments: argparse.Namespace) -> dict[str, Any]:
    tokens = sum(len(s.prompt_ids) + len(s.response_ids) for s in batch)
    rates = {dtype: matmul_flops_per_s(dtype, arguments.threads) for dtype in arguments.dtype}
    rows = []
    for sample in samples:
        base = next((s for s in samples if (s.name, s.dtype) == ("TRL", sample.dtype)), None)
        row: dict[str, Any] = asdict(sample) | {
            "tokens_per_s": tokens / sample.seconds,
            "tokens_per_cpu_s": tokens / statistics.median(sample.cpu_s),
        }
        if base is not None:
            row["speed_over_trl"] = base.seconds / sample.seconds
            row["memory_over_trl"] = sample.peak_bytes / base.peak_bytes
        rows.append(row)
    floors = [
        {
            "name": name,
            "dtype": dtype,
            "tokens_per_s": tokens * rate / flops(batch, arguments.model, prompts_once=once),
        }
        for dtype, rate in rates.items()
        for name, once in (("floor", False), ("floor, prompts once", True))
    ]
    return {
        "sequences": len(batch),
        "tokens": tokens,
        "prompts_once_tokens": tokens
        - (GROUP_SIZE - 1) * sum(len(s.prompt_ids) for s in batch[::GROUP_SIZE]),
        "threads": arguments.threads,
        "micro_batch_tokens": arguments.micro_batch_tokens,
        "matmul_gflops_per_s": {dtype: rate / 1e9 for dtype, rate in rates.items()},
        "rows": rows,
        "floors": floors,
    }


def show(found: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    columns = ("", "type", "tokens/s", "range", "per CPU s", "× TRL", "peak GB", "× TRL", "grad norm off by")
    table = Table(*columns)
    for row in found["rows"]:
        rates = sorted(found["tokens"] / s for s in row["wall_s"])
        table.add_row(
            row["name"],
            row["dtype"],
            f"{row['tokens_per_s']:.0f}",
            f"{rates[0]:.0f}-{rates[-1]:.0f}",
            f"{row['tokens_per_cpu_s']:.0f}",
            f"{row['speed_over_trl']:.2f}" if "speed_over_trl" in row else "",
            f"{row['peak_bytes'] / 1e9:.2f}",
            f"{row['memory_over_trl']:.2f}" if "memory_over_trl" in row else "",
            f"{row['grad_norm_difference']:.1e}",
        )
    for floor in found["floors"]:
        table.add_row(floor["name"], floor["dtype"], f"{floor['tokens_per_s']:.0f}")
    console = Console(width=120)
    console.print(
        f"{found['sequences']} sequences, {found['tokens']} tokens "
        f"({found['prompts_once_tokens']} with prompts once), {found['threads']} threads"
    )
    console.print(table)


def broken_claims(found: dict[str, Any]) -> list[str]:
    wanted = {
        ("packed", "float32"): 3.0,
        ("packed, prompts once", "float32"): 4.0,
        ("packed", "bfloat16"): 2.0,
        ("packed, prompts once", "bfloat16"): 2.0,
    }
    broken = []
    for row in found["rows"]:
        speed = wanted.get((row["name"], row["dtype"]))
        if speed is None:
            continue
        who = f"{row['name']}, {row['dtype']}"
        if row["dtype"] == "float32" and row["grad_norm_difference"] > 1e-5:
            broken.append(f"{who}: the gradient's norm is off by {row['grad_norm_difference']:.1e}")
        if row.get("speed_over_trl", speed) < speed:
            broken.append(f"{who}: {row['speed_over_trl']:.2f} × TRL's speed, not {speed}")
        if row.get("memory_over_trl", 0) > 0.4:
            broken.append(f"{who}: {row['memory_over_trl']:.2f} × TRL's memory, not 0.40")
    return broken


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=MODEL, help="model folder (default: that of smollm2)")
    parser.add_argument("--trl", help="a Python in which TRL and this application's packages are installed")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--micro-batch-tokens", type=int, default=1024)
    parser.add_argument("--dtype", action="append", choices=DTYPES, help="default: both")
    parser.add_argument("--json", action="store_true", help="figures instead of the table")
    parser.add_argument("--groups", type=int, default=GROUPS, help="fewer for a quick look; 8 sequences each")
    arguments = parser.parse_args()
    arguments.dtype = arguments.dtype or list(DTYPES)
    if not (arguments.model / "config.json").is_file():
        raise SystemExit(f"{arguments.model} holds no model; run examples/smollm2/fetch.py first")
    with tempfile.TemporaryDirectory() as folder:
        samples, batch = measure(arguments, Path(folder))
    found = report(samples, batch, arguments)
    print(json.dumps(found, indent=1)) if arguments.json else show(found)
    broken = broken_claims(found)
    for claim in broken:
        print(claim, file=sys.stderr)
    if not arguments.trl:
        print("without --trl nothing is compared with TRL; see --help", file=sys.stderr)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
