"""Supervised warm-up: the adapter learns from given conversations before the first version is committed.

The same learner and the same checkpoints as reinforcement learning, under `sft/` beside the run's own, so
that a warm-up goes on where it was killed. Its last checkpoint is what the run starts from: version 0, and
the reference of `kl_reference: start`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from model_runtime.batch_rows import TrainingRow
from model_runtime.checkpoints import Checkpoint, TrainingState, load_latest_checkpoint, save_checkpoint
from model_runtime.config import ModelConfig
from model_runtime.errors import ConfigError
from model_runtime.layout import ModelLayout
from model_runtime.learner import Learner
from model_runtime.mailbox import StopRequested
from model_runtime.metrics import MetricsWriter
from model_runtime.objective_config import ObjectiveConfig
from model_runtime.store import Store
from model_runtime.supervised_data import read_conversations
from model_runtime.training_queue import QueueProgress

# −logprob, mean over all trained tokens.
_LOSS = ObjectiveConfig(loss="reinforce", importance_weight_cap=None, aggregation="token-mean")
_NOTHING_READ = QueueProgress(low_water={}, consumed=[], closed_groups=[], totals={}, replay=[])
_FIGURES = {"actor/pg_loss": "sft/loss", "actor/grad_norm": "sft/grad_norm", "actor/lr": "sft/lr",
            "actor/entropy": "sft/entropy"}  # fmt: skip

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Orders:
    """What the stage asks of the trainer that runs it."""

    obey: Callable[[], None]  # raises StopRequested
    may_write: Callable[[], None]  # raises SupersededError
    say: Callable[[str], None]  # what the trainer is doing


class WarmUp:
    """The stage `sft` of one model."""

    def __init__(
        self,
        model: ModelConfig,
        store: Store,
        layout: ModelLayout,
        *,
        seed: int,
        epoch: int,
        incarnation: int,
    ) -> None:
        assert model.sft is not None
        self._model, self._settings = model, model.sft
        self._store, self._layout = store, ModelLayout(f"{layout.root}/sft")
        self._seed, self._epoch, self._incarnation = seed, epoch, incarnation

    def run(self, learner: Learner, orders: Orders) -> None:
        """Leave the learner's policy warmed up. At once when that was done before."""
        checkpoint = load_latest_checkpoint(self._store, self._layout)
        if checkpoint is None or not checkpoint.state.values["finished"]:
            self._train(learner, checkpoint, orders)
            checkpoint = load_latest_checkpoint(self._store, self._layout)
            assert checkpoint is not None
        learner.policy.begin_from(checkpoint.state.adapter)

    def _train(self, learner: Learner, checkpoint: Checkpoint | None, orders: Orders) -> None:
        orders.say("supervised warm-up: reading the conversations")
        rows = read_conversations(self._model)
        num_steps = self._num_steps(len(rows))
        stage = learner.for_stage(self._stage_model(num_steps))
        step = self._resume(stage, checkpoint)
        metrics = MetricsWriter(
            self._store, self._layout, "steps", epoch=self._epoch, incarnation=self._incarnation
        )
        saved = step
        try:
            while step < num_steps:
                orders.say(f"supervised warm-up: step {step + 1} of {num_steps}")
                orders.obey()
                figures = stage.update(self._batch(rows, step), step=step + 1, between_passes=orders.obey)
                step += 1
                orders.may_write()
                named = {ours: figures[name] for name, ours in _FIGURES.items() if name in figures}
                metrics.append({"step": step, "model_id": self._model.model_id, "time": time.time(), **named})
                if step % self._model.save_every == 0 and step < num_steps:
                    self._save(stage, step, num_steps)
                    saved = step
        except StopRequested:
            if step > saved:
                self._save(stage, step, num_steps)
            raise
        orders.may_write()
        self._save(stage, step, num_steps)
        logger.info("%s: warmed up in %d steps", self._model.model_id, num_steps)

    def _num_steps(self, num_rows: int) -> int:
        if self._settings.max_steps is not None:
            return self._settings.max_steps
        return self._settings.epochs * -(-num_rows // self._settings.batch_size)

    def _batch(self, rows: Sequence[TrainingRow], steps_done: int) -> list[TrainingRow]:
        """Every epoch has an order of its own, from the seed; its last batch may be smaller."""
        per_epoch = -(-len(rows) // self._settings.batch_size)
        epoch, place = divmod(steps_done, per_epoch)
        order = np.random.default_rng([self._seed, epoch]).permutation(len(rows))
        size = self._settings.batch_size
        return [rows[i] for i in order[place * size : (place + 1) * size].tolist()]

    def _stage_model(self, num_steps: int) -> ModelConfig:
        trainer = self._model.trainer.model_copy(
            update={
                "learning_rate": self._settings.learning_rate,
                "warmup_steps": self._settings.warmup_steps,
                "learning_rate_schedule": self._settings.learning_rate_schedule,
            }
        )
        return self._model.model_copy(update={"objective": _LOSS, "trainer": trainer, "max_steps": num_steps})

    # ------------------------------------------------------------------ state

    def _resume(self, stage: Learner, checkpoint: Checkpoint | None) -> int:
        if checkpoint is None:
            return 0
        document, state = checkpoint.document, checkpoint.state
        if document.seed != self._seed:
            raise ConfigError(f"seed is {self._seed}, but this warm-up was begun with {document.seed}")
        stage.policy.load(state.adapter)
        stage.load_optimizer_state(state.optimizer)
        stage.load_generator_state(state.generators, state.values["generators"])
        logger.info("%s: warm-up resumed at step %d", self._model.model_id, document.step)
        return document.step

    def _save(self, stage: Learner, step: int, num_steps: int) -> None:
        arrays, generators = stage.generator_state()
        state = TrainingState(
            adapter=stage.policy.tensors(),
            optimizer=stage.optimizer_state(),
            generators=arrays,
            values={"generators": generators, "finished": step == num_steps},
        )
        save_checkpoint(
            self._store, self._layout, state,
            step=step, epoch=self._epoch, version=-1, seed=self._seed, progress=_NOTHING_READ,
        )  # fmt: skip
