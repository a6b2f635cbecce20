"""One training step: a batch in, an updated adapter and its figures out. No queue, no store."""

from __future__ import annotations

import math
import os
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from model_runtime.adapters import Tensors
from model_runtime.batching import Row, micro_batches
from model_runtime.checkpoints import Arrays
from model_runtime.config import ModelConfig, TrainerConfig
from model_runtime.data_parallel import Ranks
from model_runtime.errors import ConfigError, TrainerError
from model_runtime.objective import BatchObjective, Frozen, needs_start
from model_runtime.packing import Segment
from model_runtime.policy import Policy

_OPTIMIZER_FIELDS = ("step", "exp_avg", "exp_avg_sq")


def prepare_torch(
    trainer: TrainerConfig, *, model_id: str, gpu_ids: Sequence[int], rank: int = 0
) -> torch.device:
    """Set threads, determinism and device memory for this process. Raises ConfigError for devices that
    are not there."""
    torch.set_num_threads(trainer.num_threads)
    if trainer.n_gpus == 0:
        torch.use_deterministic_algorithms(True)
        return torch.device("cpu")
    if gpu_ids:
        os.environ["CUDA_VISIBLE_DEVICES"] = str(gpu_ids[rank])  # read when CUDA starts, which is below
    if not torch.cuda.is_available():
        raise ConfigError(
            f"{model_id}.trainer.n_gpus is {trainer.n_gpus}, but torch {torch.__version__} sees no GPU here"
        )
    if trainer.gpu_memory_fraction is not None:
        torch.cuda.set_per_process_memory_fraction(trainer.gpu_memory_fraction)
    return torch.device("cuda", 0)


@dataclass(frozen=True, slots=True)
class _Pass:
    """A micro-batch on the device."""

    tensors: Mapping[str, Tensor]
    segments: tuple[Segment, ...] | None


class Learner:
    """The policy with its optimizer. Making one seeds every random generator of this process.

    With `ranks` of several processes, each of them calls `update` with the same rows, and rank 0 alone steps.
    """

    def __init__(
        self,
        model: ModelConfig,
        *,
        seed: int,
        device: torch.device | str = "cpu",
        policy: Policy | None = None,
    ) -> None:
        random.seed(seed)
        np.random.seed(seed % 2**32)
        self._model, self._seed = model, seed
        self.ranks = Ranks()
        self.policy = policy or Policy(model, seed=seed, device=device)
        self._optimizer = torch.optim.AdamW(
            self.policy.parameters.values(),
            lr=model.trainer.learning_rate,
            weight_decay=model.trainer.weight_decay,
        )

    def for_stage(self, model: ModelConfig) -> Learner:
        """A learner of the same policy with other settings and an optimizer of its own."""
        stage = Learner(model, seed=self._seed, policy=self.policy)
        stage.ranks = self.ranks
        return stage

    def work_on(self, model: ModelConfig) -> None:
        """Take other settings, as rank 0 has them."""
        self._model = model

    def learning_rate(self, step: int) -> float:
        """Of step 1, 2, …: grows linearly over the warm-up, then follows the schedule."""
        trainer = self._model.trainer
        warm = min(1.0, step / max(1, trainer.warmup_steps))
        return trainer.learning_rate * warm * self._share_left(step)

    def _share_left(self, step: int) -> float:
        """Of the peak learning rate: from 1 at the end of the warm-up to the final ratio at max_steps."""
        trainer, last = self._model.trainer, self._model.max_steps
        if trainer.learning_rate_schedule == "constant" or last is None:
            return 1.0
        first, final = trainer.warmup_steps, trainer.final_learning_rate_ratio
        progress = min(1.0, max(0.0, (step - first) / max(1, last - first)))
        if trainer.learning_rate_schedule == "linear":
            return 1.0 - (1.0 - final) * progress
        return final + (1.0 - final) * (1.0 + math.cos(math.pi * progress)) / 2

    def update(
        self,
        rows: Sequence[Row],
        *,
        step: int,
        proximal: Tensors | None = None,
        between_passes: Callable[[], None] = lambda: None,
    ) -> dict[str, float]:
        """One optimizer step on a batch; its figures by verl's names.

        `proximal` is the adapter this sync window began with; only `old_logprobs: proximal` asks for it.

        `between_passes` is called before every forward pass; what it raises abandons the step with nothing
        applied. Raises TrainerError, with nothing applied, when loss or gradient is not finite.
        """
        rows = [row for row in rows if row.loss_mask.any()]
        self._refuse_what_the_model_cannot_read(rows)
        parameters = list(self.policy.parameters.values())
        self.ranks.begin_update(self._model, rows, step=step, proximal=proximal, parameters=parameters)
        passes = self._passes(rows)
        if not passes:
            return {}
        self._optimizer.zero_grad(set_to_none=True)
        batch = BatchObjective(
            self._model.objective,
            rows,
            [one.tensors for one in passes],
            self._frozen_logprobs(passes, proximal, between_passes),
            scale_tokens=self._model.objective.aggregation_scale_tokens or self._model.max_response_tokens,
        )
        if not batch.num_kept_tokens:
            return batch.metrics()
        for index in self._mine(passes):
            if not batch.is_rejected(index):
                between_passes()
                logprobs_T, entropy_T = self._logprobs(passes[index])
                batch.add(index, logprobs_T, entropy_T).backward()
        self.ranks.sum_gradients(parameters)
        batch.join(self.ranks.gather(batch.seen()))
        return self._step(batch, step) if self.ranks.rank == 0 else {}

    def _refuse_what_the_model_cannot_read(self, rows: Sequence[Row]) -> None:
        vocab_size, max_positions = self.policy.vocab_size, self.policy.max_positions
        for row in rows:
            trajectory = row.trajectory
            who = f"{self._model.model_id}: row {trajectory.trajectory_id} of agent {trajectory.agent_id!r}"
            last_id = max(int(trajectory.prompt_ids.max()), int(trajectory.response_ids.max()))
            if last_id >= vocab_size:
                raise TrainerError(
                    f"{who} has token id {last_id}, the model in {self._model.model_path} has {vocab_size}: "
                    "model_path must be the model that sampled it"
                )
            if max_positions is not None and trajectory.num_tokens > max_positions:
                raise TrainerError(
                    f"{who} has {trajectory.num_tokens} tokens, the model in {self._model.model_path} has "
                    f"{max_positions} positions: set rollout.max_model_len (sft.max_tokens) to at most that"
                )

    def _mine(self, passes: Sequence[_Pass]) -> list[int]:
        """Which passes are this process's."""
        return self.ranks.mine([sum(t.numel() for t in one.tensors.values()) for one in passes])

    def _micro_batch_tokens(self, rows: Sequence[Row]) -> int:
        """Small enough that every process has something to do."""
        budget, size = self._model.trainer.micro_batch_tokens, self.ranks.size
        if size == 1:
            return budget
        return max(1, min(budget, sum(row.trajectory.num_tokens for row in rows) // size))

    def _step(self, batch: BatchObjective, step: int) -> dict[str, float]:
        loss = batch.pg_loss()
        grad_norm = torch.nn.utils.clip_grad_norm_(
            self.policy.parameters.values(), self._model.trainer.max_grad_norm
        ).item()
        for name, value in (("loss", loss), ("gradient norm", grad_norm)):
            if not math.isfinite(value):
                raise TrainerError(
                    f"{self._model.model_id}: the {name} of step {step} is {value}; the step was not applied"
                )
        learning_rate = self.learning_rate(step)
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._optimizer.step()
        figures = {"actor/pg_loss": loss, "actor/grad_norm": grad_norm, "actor/lr": learning_rate}
        return figures | batch.metrics()

    def _passes(self, rows: Sequence[Row]) -> list[_Pass]:
        budget, layout = self._micro_batch_tokens(rows), self.policy.row_layout
        return [
            _Pass(micro_batch.tensors(self.policy.device), micro_batch.segments)
            for micro_batch in micro_batches(rows, micro_batch_tokens=budget, layout=layout)
        ]

    def _logprobs(self, one: _Pass) -> tuple[Tensor, Tensor]:
        entropy_gradient = self._model.objective.entropy_coef > 0
        return self.policy.logprobs(one.tensors, one.segments, entropy_gradient=entropy_gradient)

    @torch.no_grad()
    def _frozen_logprobs(
        self,
        passes: Sequence[_Pass],
        proximal: Tensors | None,
        between_passes: Callable[[], None],
    ) -> list[Frozen]:
        """What the objective needs to know of the whole batch beforehand, at a forward pass each."""
        objective = self._model.objective

        def forward() -> list[Tensor]:
            found = {}
            for index in self._mine(passes):
                between_passes()
                found[index] = self._logprobs(passes[index])[0]
            return self.ranks.complete(found, [len(one.tensors["target_T"]) for one in passes])

        start: Sequence[Tensor | None] = [None] * len(passes)
        reference: Sequence[Tensor | None] = [None] * len(passes)
        if objective.old_logprobs == "proximal":
            if proximal is None:
                raise TrainerError(
                    f"{self._model.model_id}: old_logprobs is proximal, but the adapter that this sync "
                    "window began with is no longer in the store"
                )
            with self.policy.holding(proximal):
                start = forward()
        elif needs_start(objective):
            start = forward()
        if objective.kl_coef:
            with self.policy.holding(self.policy.reference(objective.kl_reference)):
                reference = forward()
        return [Frozen(*parts) for parts in zip(start, reference, strict=True)]

    # ------------------------------------------------------------------ state

    def optimizer_state(self) -> dict[str, np.ndarray]:
        """ "<parameter>.<field>" → array; empty before the first step."""
        return {
            f"{name}.{field}": self._optimizer.state[parameter][field].detach().to("cpu", copy=True).numpy()
            for name, parameter in self.policy.parameters.items()
            if parameter in self._optimizer.state
            for field in _OPTIMIZER_FIELDS
        }

    def load_optimizer_state(self, arrays: Arrays) -> None:
        self._optimizer.state.clear()
        for name, parameter in self.policy.parameters.items():
            if f"{name}.step" not in arrays:
                continue
            state = {
                field: torch.from_numpy(np.array(arrays[f"{name}.{field}"])) for field in _OPTIMIZER_FIELDS
            }
            # AdamW keeps its step counter on the host.
            self._optimizer.state[parameter] = {
                field: value if field == "step" else value.to(self.policy.device)
                for field, value in state.items()
            }

    def generator_state(self) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """(arrays, JSON values) of every random generator of this process."""
        _, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
        arrays = {"torch": torch.get_rng_state().numpy(), "numpy": np.asarray(keys)}
        if self.policy.device.type == "cuda":
            arrays["cuda"] = torch.cuda.get_rng_state(self.policy.device).numpy()
        version, internal, next_gauss = random.getstate()
        return arrays, {
            "python": [version, list(internal), next_gauss],
            "numpy": [int(position), int(has_gauss), float(gauss)],
        }

    def load_generator_state(self, arrays: Arrays, values: Mapping[str, Any]) -> None:
        torch.set_rng_state(torch.from_numpy(np.array(arrays["torch"])))
        if "cuda" in arrays and self.policy.device.type == "cuda":
            torch.cuda.set_rng_state(torch.from_numpy(np.array(arrays["cuda"])), self.policy.device)
        np.random.set_state(("MT19937", arrays["numpy"], *values["numpy"]))
        version, internal, next_gauss = values["python"]
        random.setstate((version, tuple(internal), next_gauss))
