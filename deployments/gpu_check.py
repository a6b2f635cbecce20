"""What only a machine with an NVIDIA GPU can show, in one script of at most 8 minutes (`make gpu-check`).

Starts the CUDA build of vLLM on a tiny model and checks, with a trainer on the same GPU, that versions are
served exactly, that a request spanning a swap finishes on the old weights, that one training step changes
the adapter, and that the step's version is served. Prints PASS or FAIL for each; exit code 0: all passed,
1: something failed, 2: there is no GPU to check.

`--cpu` runs the same script against the CPU build of vLLM, to check the script itself.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np

from model_runtime.adapters import AdapterFiles
from model_runtime.config import ModelConfig
from model_runtime.devices import visible_gpus
from model_runtime.errors import RepertoryError
from model_runtime.layout import served_name
from model_runtime.learner import Learner, prepare_torch
from model_runtime.llm_client import Generation, LLMServerClient
from model_runtime.policy import Policy
from model_runtime.rollout_server import RolloutRuntime
from model_runtime.training_queue import TrainingRow
from model_runtime.types import MemberKey, Trajectory, Turn, trajectory_id
from model_runtime.vllm_environment import check_build, find_vllm

ROOT = Path(__file__).resolve().parents[1]
TINY_MODEL = ROOT / "examples" / "quickstart" / "models" / "planner"
LIMIT_S = 480.0
MODEL_ID = "gpu-check"
NUM_TOKENS = 64
SPANNING_TOKENS = 400

# float32 on both sides. vLLM's GPU kernels multiply in TF32 in places, the CPU build does not.
TOLERANCE = {"cuda": 2e-2, "cpu": 1e-4}
# Versions must differ by more than this, or serving the wrong one would go unseen.
MIN_EFFECT = 0.1


class CheckFailed(RepertoryError, AssertionError):
    """One check did not hold. The message says what was found."""


class Report:
    """Runs checks one after the other and prints their outcome."""

    def __init__(self) -> None:
        self.failures = 0
        self._began = time.monotonic()

    async def check(self, name: str, action: Callable[[], Awaitable[str]]) -> bool:
        began = time.monotonic()
        try:
            detail, passed = await action(), True
        except RepertoryError as error:
            detail, passed = f"{type(error).__name__}: {error}", False
        self.failures += not passed
        took = time.monotonic() - began
        print(f"{'PASS' if passed else 'FAIL'}  {name}: {detail} [{took:.1f} s]", flush=True)
        return passed

    def end(self) -> int:
        took = time.monotonic() - self._began
        print(
            f"{'FAILED' if self.failures else 'PASSED'}: {self.failures} failures in {took:.0f} s", flush=True
        )
        return 1 if self.failures else 0


class GpuCheck:
    """The servers, the trainer and the versions that the checks share."""

    def __init__(self, model: ModelConfig, *, device: str, folder: Path) -> None:
        self.model = model
        self.tolerance = TOLERANCE[device]
        self.servers = RolloutRuntime(model, logs=folder / "logs", gpu_ids=[0] if device == "cuda" else [])
        self._folder = folder
        self._learner: Learner | None = None
        self._versions: dict[int, dict[str, np.ndarray]] = {}

    @property
    def client(self) -> LLMServerClient:
        return self.servers.replicas[0].client

    @property
    def learner(self) -> Learner:
        if self._learner is None:
            raise CheckFailed("the trainer was not loaded")
        return self._learner

    @property
    def policy(self) -> Policy:
        return self.learner.policy

    # -------------------------------------------------------------- the checks

    async def trainer_loads(self) -> str:
        device = prepare_torch(self.model.trainer, model_id=MODEL_ID, gpu_ids=[0])
        self._learner = await asyncio.to_thread(Learner, self.model, seed=0, device=device)
        shapes = self.policy.tensors()
        for version in (1, 2):
            rng = np.random.default_rng(version)
            self._versions[version] = {
                name: rng.normal(0.0, 0.1, tensor.shape).astype(np.float32) for name, tensor in shapes.items()
            }
        return f"{len(shapes)} adapter tensors on {device}"

    async def server_starts(self) -> str:
        await self.servers.start()
        return f"{find_vllm().build} vLLM {find_vllm().version} generates"

    async def versions_are_served_exactly(self) -> str:
        for version in (1, 2):
            await self._load(version, self._files(version))
        answers = await asyncio.gather(*(self._sample(version) for version in (1, 2, 1, 2)))
        errors = [self._error(v, answer) for v, answer in zip((1, 2, 1, 2), answers, strict=True)]
        effect = self._error(2, answers[0])
        if max(errors) > self.tolerance:
            raise CheckFailed(f"logprobs differ by {max(errors):.2g} from transformers, > {self.tolerance:g}")
        if effect < MIN_EFFECT:
            raise CheckFailed(f"the versions differ by {effect:.2g} only, so this proves nothing")
        return (
            f"two versions in one batch within {max(errors):.2g} of transformers + PEFT (apart: {effect:.2g})"
        )

    async def swap_keeps_requests_in_flight(self) -> str:
        before = await self.client.num_tokens_processed()
        spanning = asyncio.create_task(self._sample(1, num_tokens=SPANNING_TOKENS))
        while await self.client.num_tokens_processed() == before and not spanning.done():  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        began = time.monotonic()
        await self._load(3, self._files(2), name=served_name(MODEL_ID, 3))
        took = time.monotonic() - began
        await self.client.unload_adapter(served_name(MODEL_ID, 1))
        spans = not spanning.done()
        error = self._error(1, await spanning)
        if error > self.tolerance:
            raise CheckFailed(f"the request in flight differs by {error:.2g} from the version it began with")
        if not spans:
            raise CheckFailed(f"{SPANNING_TOKENS} tokens ended before the swap; nothing was in flight")
        return (
            f"loaded in {1000 * took:.0f} ms; the request in flight stayed within {error:.2g} of its version"
        )

    async def a_step_trains(self) -> str:
        self.policy.load(self._versions[2])
        answers = await asyncio.gather(*(self._sample(2) for _ in range(4)))
        rows = [self._row(i, answer, advantage=1.0 if i % 2 else -1.0) for i, answer in enumerate(answers)]
        metrics = await asyncio.to_thread(self.learner.update, rows, step=1)
        after = self.policy.tensors()
        moved = max(float(np.abs(after[name] - self._versions[2][name]).max()) for name in after)
        if not moved > 0 or not all(np.isfinite(tensor).all() for tensor in after.values()):
            raise CheckFailed(f"after the step the adapter moved by {moved}")
        self._versions[4] = after
        loss, norm = metrics["actor/pg_loss"], metrics["actor/grad_norm"]
        return f"loss {loss:.3g}, gradient {norm:.3g}, moved {moved:.2g}"

    async def the_step_is_served(self) -> str:
        await self._load(4, self._files(4))
        answer = await self._sample(4)
        error = self._error(4, answer)
        if error > self.tolerance:
            raise CheckFailed(f"logprobs of the trained version differ by {error:.2g}, > {self.tolerance:g}")
        listed = await self.client.list_models()
        if served_name(MODEL_ID, 4) not in listed:
            raise CheckFailed(f"the server lists {listed}")
        return f"within {error:.2g} of the trainer's"

    # -------------------------------------------------------------- parts

    def _files(self, version: int) -> AdapterFiles:
        self.policy.load(self._versions[version])
        return self.policy.adapter_files()

    async def _load(self, version: int, files: AdapterFiles, *, name: str | None = None) -> None:
        folder = self._folder / "adapters" / f"v{version}"
        await asyncio.to_thread(_write_adapter, folder, files)
        await self.client.load_adapter(name or served_name(MODEL_ID, version), str(folder), timeout_s=60)

    async def _sample(self, version: int, *, num_tokens: int = NUM_TOKENS) -> Generation:
        return await self.client.generate(
            model=served_name(MODEL_ID, version),
            token_ids=self._prompt(),
            sampling={"max_tokens": num_tokens, "temperature": 1.0, "ignore_eos": True},
            request_id=f"check-{time.monotonic_ns()}",
            timeout_s=120,
        )

    def _prompt(self) -> list[int]:
        rng = np.random.default_rng(0)
        return rng.integers(3, self.policy.vocab_size, 24).tolist()

    def _error(self, version: int, answer: Generation) -> float:
        """Largest difference between served logprobs and those of the version by the trainer's policy."""
        self.policy.load(self._versions[version])
        ids, prompt = answer.token_ids.tolist(), self._prompt()
        wanted = [self.policy.next_token_logprobs(prompt + ids[:i])[ids[i]] for i in range(len(ids))]
        return float(np.abs(np.asarray(wanted) - answer.logprobs).max())

    def _row(self, index: int, answer: Generation, *, advantage: float) -> TrainingRow:
        member = MemberKey(group_id="check", group_size=4, member_index=index, attempt=0)
        size = len(answer.token_ids)
        turn = Turn(
            turn_index=0,
            start=0,
            end=size,
            request_id=f"r{index}",
            version_min=2,
            version_max=2,
            finish_reason="length",
            temperature=1.0,
            top_p=1.0,
            top_k=0,
            logprobs_mode="processed_logprobs",
            rewards={},
            started_at=0.0,
            ended_at=0.0,
        )
        trajectory = Trajectory(
            trajectory_id=trajectory_id("check", member, "agent", 0),
            run_id="check",
            member=member,
            session_id=f"s{index}",
            agent_id="agent",
            model_id=MODEL_ID,
            chain_index=0,
            parent_trajectory_id=None,
            request_id=turn.request_id,
            policy_version=2,
            policy_version_max=2,
            partner_versions={},
            prompt_ids=np.asarray(self._prompt(), dtype=np.int32),
            response_ids=answer.token_ids,
            response_mask=np.ones(size, dtype=np.int8),
            behavior_logprobs=answer.logprobs,
            token_versions=np.full(size, 2, dtype=np.int32),
            turns=(turn,),
            workflow_rewards={"reward": float(index % 2)},
            agent_rewards={},
            train=True,
            created_at=0.0,
        )
        return TrainingRow(trajectory, float(index % 2), advantage, trajectory.response_mask)


def _write_adapter(folder: Path, files: AdapterFiles) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_model.safetensors").write_bytes(files.weights)
    (folder / "adapter_config.json").write_bytes(files.config)


def _model_config(model_path: Path, *, device: str) -> ModelConfig:
    on_gpu = device == "cuda"
    share = {"n_gpus": 1, "gpu_memory_fraction": 0.3} if on_gpu else {}
    rollout = {"max_live_versions": 4, "kv_cache_bytes": 64 * 2**20, "max_num_seqs": 16}
    return ModelConfig.model_validate(
        {
            "model_id": MODEL_ID,
            "model_path": str(model_path),
            "lora": {"rank": 8, "alpha": 16},
            "trainer": share | {"learning_rate": 1e-3},
            "rollout": share | rollout,
        }
    )


async def _run(model: ModelConfig, *, device: str) -> int:
    report = Report()
    with tempfile.TemporaryDirectory(prefix="repertory-gpu-check-") as folder:
        check = GpuCheck(model, device=device, folder=Path(folder))
        try:
            async with asyncio.timeout(LIMIT_S):
                if await report.check("trainer loads", check.trainer_loads) and await report.check(
                    "server starts", check.server_starts
                ):
                    await report.check("versions are exact", check.versions_are_served_exactly)
                    await report.check("swap", check.swap_keeps_requests_in_flight)
                    if await report.check("training step", check.a_step_trains):
                        await report.check("trained version", check.the_step_is_served)
        except TimeoutError:
            print(f"FAIL  the whole check took more than {LIMIT_S:.0f} s", flush=True)
            report.failures += 1
        finally:
            await check.servers.stop()
    return report.end()


def _require(device: str) -> str | None:
    """Why the check can't run here, or None."""
    if device == "cuda" and visible_gpus() == 0:
        return "no NVIDIA GPU is visible here, so there is nothing to check (--cpu checks the script itself)"
    try:
        check_build(find_vllm(), model_id=MODEL_ID, num_gpus=int(device == "cuda"))
    except RepertoryError as error:
        return str(error)
    return None


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="gpu_check", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", type=Path, default=TINY_MODEL, help="folder of a small model")
    parser.add_argument("--cpu", action="store_true", help="check this script, on the CPU")
    options = parser.parse_args(argv)
    device = "cpu" if options.cpu else "cuda"
    reason = _require(device)
    if reason is not None:
        print(f"gpu-check: {reason}", file=sys.stderr)
        return 2
    return asyncio.run(_run(_model_config(options.model, device=device), device=device))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
