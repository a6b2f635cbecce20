from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from model_runtime.config import LORA_RANKS, RunConfig, artifact_slug
from model_runtime.config_file import load_config, parse_config
from model_runtime.errors import ConfigError

# Section 8 of the RFC, word for word.
RFC_EXAMPLE = """
multi_model:
  enable: true

  models:
    - model_id: planner_model
      model_path: /path/to/planner
      trainer:
        n_gpus: 4
      rollout:
        n_gpus: 4
      async_training:
        trigger_parameter_sync_step: 4
        staleness_threshold: 0.5
        partial_rollout: true

    - model_id: solver_model
      model_path: /path/to/solver
      trainer:
        n_gpus: 4
      rollout:
        n_gpus: 4
      async_training:
        trigger_parameter_sync_step: 8
        staleness_threshold: 0.5
        partial_rollout: true

gateway:
  mode: multi_model_router

agent_model_mapping:
  planner_agent: planner_model
  search_agent: solver_model
  answer_agent: solver_model
"""

FIRST = ("multi_model", "models", 0)


def changed(*changes: tuple[tuple[str | int, ...], Any]) -> dict[str, Any]:
    """The RFC's example with each value put at its path."""
    raw = yaml.safe_load(RFC_EXAMPLE)
    for path, value in changes:
        at: Any = raw
        for part in path[:-1]:
            at = at.setdefault(part, {}) if isinstance(at, dict) else at[part]
        at[path[-1]] = copy.deepcopy(value)
    return raw


def test_the_rfc_s_example_is_valid_as_it_stands_and_means_what_the_rfc_says(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(RFC_EXAMPLE, encoding="utf-8")
    config = load_config(path)

    assert [m.model_id for m in config.trainable_models] == ["planner_model", "solver_model"]
    assert config.agent_to_model == {
        "planner_agent": "planner_model",
        "search_agent": "solver_model",
        "answer_agent": "solver_model",
    }
    planner, solver = config.models
    assert planner.model_path == "/path/to/planner"
    assert (planner.trainer.n_gpus, planner.rollout.n_gpus, planner.rollout.num_replicas) == (4, 4, 4)
    assert planner.async_training.trigger_parameter_sync_step == 4
    assert solver.async_training.trigger_parameter_sync_step == 8
    assert solver.async_training.staleness_threshold == 0.5
    assert solver.async_training.partial_rollout
    # int(batch_size × require_batches × (1 + staleness_threshold) × trigger_parameter_sync_step)
    assert planner.admission_limit == 8 * 1 * 1.5 * 4
    assert solver.admission_limit == 8 * 1 * 1.5 * 8


def test_what_is_not_built_yet_is_said() -> None:
    warnings = parse_config(changed()).warnings()
    assert any("workflow.function is not set" in w for w in warnings)


def test_a_loss_that_clips_nothing_and_one_out_of_its_element_are_warned_of() -> None:
    raw = changed(
        ((*FIRST, "objective"), {"loss": "reinforce"}),
        (("multi_model", "models", 1, "objective"), {"loss": "gspo"}),
    )
    warnings = parse_config(raw).warnings()
    assert any("loss reinforce clips nothing; only importance weights up to 2.0" in w for w in warnings)
    assert any("loss gspo is defined with aggregation seq-mean-token-mean" in w for w in warnings)


@pytest.mark.parametrize(
    ("objective", "said"),
    [
        (
            {"importance_weight_floor": 0.5},
            "importance_weight_floor change nothing with old_logprobs behavior",
        ),
        ({"importance_weight_level": "sequence"}, "importance_weight_level change nothing"),
        (
            {"old_logprobs": "proximal", "importance_weight_cap": None},
            "old_logprobs proximal without importance_weight_cap and rejection: nothing corrects",
        ),
        ({"loss": "gspo"}, "clip_ratio_low 0.2 and clip_ratio_high 0.2 hardly ever act; published are 3e-4"),
        (
            {"aggregation_scale_tokens": 9},
            "aggregation_scale_tokens 9 changes nothing with aggregation token-mean",
        ),
    ],
)
def test_settings_that_change_nothing_are_warned_of(objective: dict[str, Any], said: str) -> None:
    (warning,) = [
        w for w in parse_config(changed(((*FIRST, "objective"), objective))).warnings() if said in w
    ]
    assert warning.startswith("planner_model.objective: ")


@pytest.mark.parametrize(
    "objective",
    [
        {"old_logprobs": "recomputed", "importance_weight_floor": 0.5},
        {"loss": "reinforce", "importance_weight_normalize": True},
        {
            "old_logprobs": "recomputed",
            "importance_weight_cap": None,
            "rejection": [{"statistic": "token_k1", "high": 2}],
        },
        {
            "loss": "gspo",
            "aggregation": "seq-mean-token-mean",
            "clip_ratio_low": 3e-4,
            "clip_ratio_high": 4e-4,
        },
        {"aggregation": "seq-mean-token-sum-norm", "aggregation_scale_tokens": 9},
    ],
)
def test_settings_that_act_are_not(objective: dict[str, Any]) -> None:
    warnings = parse_config(changed(((*FIRST, "objective"), objective))).warnings()
    assert not any("nothing with" in w or "nothing corrects" in w or "hardly" in w for w in warnings)


# What is wrong → path of the field, its value, what is allowed.
BAD: dict[str, tuple[list[tuple[tuple[str | int, ...], Any]], list[str]]] = {
    "unknown advantage": (
        [((*FIRST, "objective"), {"advantage": "gae"})],
        ["objective.advantage", "'gae'", "'grpo'", "'gdpo'"],
    ),
    "batch deviation of another estimator": (
        [((*FIRST, "objective"), {"advantage": "rloo", "normalize_by_std": "batch"})],
        ["objective: normalize_by_std: batch", "not rloo"],
    ),
    "no reward at all": (
        [((*FIRST, "objective"), {"reward_weights": {"reward": 0}})],
        ["objective: reward_weights", "other than 0"],
    ),
    "unknown loss": (
        [((*FIRST, "objective"), {"loss": "dpo"})],
        ["objective.loss", "'dpo'", "'ppo_clip'", "'reinforce'"],
    ),
    "floor above the cap": (
        [((*FIRST, "objective"), {"importance_weight_floor": 3.0})],
        ["objective: importance_weight_floor 3.0", "not 2.0"],
    ),
    "lower bound of a k3 rule": (
        [((*FIRST, "objective"), {"rejection": [{"statistic": "token_k3", "high": 1, "low": 0.5}]})],
        ["objective.rejection[0]: low goes with k1 only"],
    ),
    "empty k1 band": (
        [((*FIRST, "objective"), {"rejection": [{"statistic": "token_k1", "high": 0.5}]})],
        ["objective.rejection[0]: token_k1: low is above high 0.5"],
    ),
    "reward of a level there is not": (
        [((*FIRST, "objective"), {"reward_weights": {"task:reward": 1}})],
        ["objective.reward_weights: 'task:reward' must read", "`turn:name`"],
    ),
    "unknown baseline": (
        [((*FIRST, "objective"), {"baseline_key": "turn"})],
        ["objective.baseline_key", "'turn'", "'group_agent', 'group' or 'group_agent_turn'"],
    ),
    "turn rewards with an estimator of whole executions": (
        [((*FIRST, "objective"), {"advantage": "opo", "reward_weights": {"turn:format": 1}})],
        ["objective: turn rewards", "advantage grpo or rloo", "not with opo"],
    ),
    "turns of agents that share a baseline": (
        [((*FIRST, "objective"), {"baseline_key": "group", "turn_discount": 0.5})],
        ["baseline_key can't be group"],
    ),
    "replay that never comes": (
        [((*FIRST, "replay"), {"max_groups": 8})],
        ["replay fills up late batches", "async_training.max_wait_s"],
    ),
    "replay on policy": (
        [
            ((*FIRST, "replay"), {"max_groups": 8}),
            (
                (*FIRST, "async_training"),
                {
                    "strict_on_policy": True,
                    "trigger_parameter_sync_step": 1,
                    "staleness_threshold": 0,
                    "max_wait_s": 1,
                },
            ),
        ],
        ["replay trains on older versions' tokens", "strict_on_policy"],
    ),
    "processes beside GPUs": (
        [((*FIRST, "trainer"), {"n_gpus": 2, "n_processes": 2})],
        ["trainer: n_processes is 2, but n_gpus is 2", "one process for each GPU"],
    ),
    "warm-up of a frozen model": (
        [((*FIRST, "kind"), "frozen"), ((*FIRST, "sft"), {"data": "chat.jsonl"})],
        ["a frozen model is not trained: leave sft out"],
    ),
    "warm-up without data": ([((*FIRST, "sft"), {"epochs": 2})], ["sft.data", "Field required"]),
    "discount above 1": (
        [((*FIRST, "objective"), {"turn_discount": 1.5})],
        ["objective.turn_discount", "less than or equal to 1"],
    ),
    "a reward for executions that are dropped": (
        [((*FIRST, "objective"), {"unfinished_reward": -1.0})],
        ["unfinished_reward -1 goes with unfinished: baseline", "not drop"],
    ),
    "an unknown fate of unfinished executions": (
        [((*FIRST, "objective"), {"unfinished": "zero"})],
        ["objective.unfinished", "'zero'", "'drop' or 'baseline'"],
    ),
    "no room at all": (
        [((*FIRST, "rollout", "max_concurrent_requests"), 0)],
        ["rollout.max_concurrent_requests", "greater than or equal to 1"],
    ),
    "an attempt without time": (
        [(("gateway", "attempt_timeout_s"), 0)],
        ["gateway.attempt_timeout_s", "greater than 0"],
    ),
    "duplicate model id": (
        [((*FIRST, "model_id"), "solver_model")],
        ["multi_model.models", "model_id 'solver_model'", "more than once"],
    ),
    "duplicate agent": (
        [(("agent_model_mapping",), [{"agent_id": "a", "model_id": "planner_model"}] * 2)],
        ["agent_model_mapping", "agent_id 'a'", "more than once"],
    ),
    "agent of an unknown model": (
        [(("agent_model_mapping", "critic_agent"), "critic_model")],
        ["agent_model_mapping.critic_agent", "'critic_model'", "['planner_model', 'solver_model']"],
    ),
    "model no agent uses": (
        [(("agent_model_mapping", "planner_agent"), "solver_model")],
        ["multi_model.models", "['planner_model']", "agent_model_mapping"],
    ),
    "LoRA rank vLLM doesn't accept": (
        [((*FIRST, "lora", "rank"), 12)],
        ["multi_model.models[0].lora.rank", "got 12", "1, 8, 16, 32, 64, 128, 256, 320 or 512"],
    ),
    "negative staleness": (
        [((*FIRST, "async_training", "staleness_threshold"), -0.1)],
        [
            "multi_model.models[0].async_training.staleness_threshold",
            "got -0.1",
            "greater than or equal to 0",
        ],
    ),
    "negative version lag": (
        [((*FIRST, "async_training", "max_staleness"), -1)],
        ["multi_model.models[0].async_training.max_staleness", "got -1", "greater than or equal to 0"],
    ),
    "output head": (
        [((*FIRST, "lora", "target_modules"), ["q_proj", "model.lm_head"])],
        ["multi_model.models[0].lora.target_modules", "'model.lm_head'", "no embedding or output-head"],
    ),
    "unknown setting": (
        [((*FIRST, "trainer", "n_gpu"), 4)],
        ["multi_model.models[0].trainer.n_gpu", "unknown setting", "got 4"],
    ),
    "unknown section": (
        [(("trainer",), {})],
        ["trainer: unknown setting; did you mean multi_model.models[].trainer?"],
    ),
    "misspelt setting": (
        [((*FIRST, "batchsize"), 8)],
        ["multi_model.models[0].batchsize: unknown setting; did you mean batch_size? (got 8)"],
    ),
    "setting of the models beside them": (
        [(("batch_size",), 8)],
        ["batch_size: unknown setting; did you mean multi_model.models[].batch_size"],
    ),
    "a model that is only named": (
        [(FIRST, "planner_model")],
        ["multi_model.models[0]: must be a section, a mapping of settings (got 'planner_model')"],
    ),
    "setting of another section": (
        [(("workflow",), {"max_concurrent": 8})],
        ["workflow.max_concurrent: unknown setting; did you mean", "sync.max_concurrent?"],
    ),
    "setting of an optional section": (
        [((*FIRST, "sft"), {"data": "d.jsonl", "epoch": 2})],
        ["multi_model.models[0].sft.epoch: unknown setting; did you mean epochs? (got 2)"],
    ),
    "setting like no other": (
        [((*FIRST, "lora"), {"quux": 1})],
        ["multi_model.models[0].lora.quux: unknown setting; this section takes rank, alpha, target_modules"],
    ),
    "model id": (
        [((*FIRST, "model_id"), "Planner Model")],
        ["multi_model.models[0].model_id", "got 'Planner Model'", "[a-z0-9]"],
    ),
    "artifact slug": (
        [((*FIRST, "model_id"), "solver.model"), (("agent_model_mapping", "planner_agent"), "solver.model")],
        ["multi_model.models", "['solver.model', 'solver_model']", "'solver-model'"],
    ),
    "no models": ([(("multi_model", "models"), [])], ["multi_model.models", "at least 1"]),
    "no agents": ([(("agent_model_mapping",), {})], ["agent_model_mapping", "at least 1"]),
    "disabled": ([(("multi_model", "enable"), False)], ["multi_model.enable", "got False", "must be true"]),
    "idle sessions": (
        [(("gateway", "session_idle_s"), 0)],
        ["gateway.session_idle_s", "got 0", "greater than 0"],
    ),
    "gateway mode": ([(("gateway", "mode"), "x")], ["gateway.mode", "got 'x'", "multi_model_router"]),
    "off policy": (
        [(("gateway", "allow_off_policy_sampling"), "often")],
        ["gateway.allow_off_policy_sampling", "got 'often'"],
    ),
    "port": ([(("gateway", "port"), 70000)], ["gateway.port", "got 70000", "65535"]),
    "one port twice": (
        [(("gateway",), {"port": 8000, "admin_port": 8000})],
        ["gateway", "port and admin_port are both 8000"],
    ),
    "public URL": (
        [(("gateway", "public_url"), "gateway.example")],
        ["gateway.public_url", "got 'gateway.example'", "http(s)://host[:port][/path]"],
    ),
    "a certificate without its key": (
        [(("gateway", "tls_certificate"), "cert.pem")],
        ["gateway", "tls_certificate and tls_key go together"],
    ),
    "bound on bodies": (
        [(("gateway", "max_request_bytes"), 10)],
        ["gateway.max_request_bytes", "got 10", "1024"],
    ),
    "log format": ([(("gateway", "log_format"), "xml")], ["gateway.log_format", "got 'xml'", "'json'"]),
    "rollout servers for everybody": (
        [((*FIRST, "rollout", "host"), "0.0.0.0")],
        ["multi_model.models[0].rollout.host", "got '0.0.0.0'", "loopback or of the private network"],
    ),
    "rollout servers on a public address": (
        [((*FIRST, "rollout", "host"), "8.8.8.8")],
        ["multi_model.models[0].rollout.host", "got '8.8.8.8'", "load and unload its adapters"],
    ),
    "rollout servers on a name": (
        [((*FIRST, "rollout", "host"), "gpu-7.example")],
        ["multi_model.models[0].rollout.host", "got 'gpu-7.example'", "must be an address"],
    ),
    "model kind": (
        [((*FIRST, "kind"), "external")],
        ["multi_model.models[0].kind", "got 'external'", "'trainable' or 'frozen'"],
    ),
    "trained frozen model": (
        [((*FIRST, "kind"), "frozen")],
        ["multi_model.models[0]", "trainer.n_gpus"],
    ),
    "replicas and GPUs": (
        [((*FIRST, "rollout", "tensor_parallel_size"), 3)],
        ["multi_model.models[0].rollout", "n_gpus is 4", "replicas × tensor_parallel_size is 1 × 3"],
    ),
    "tensor parallelism on the CPU": (
        [((*FIRST, "rollout"), {"tensor_parallel_size": 2})],
        ["multi_model.models[0].rollout", "needs n_gpus"],
    ),
    "number of GPU ids": (
        [((*FIRST, "trainer", "gpu_ids"), [0, 1])],
        ["planner_model.trainer", "names 2 devices", "n_gpus is 4"],
    ),
    "trainer and replica on one GPU": (
        [((*FIRST, part), {"n_gpus": 1, "gpu_ids": [0]}) for part in ("trainer", "rollout")],
        ["GPU 0", "['planner_model.trainer', 'planner_model.rollout']", "set gpu_memory_fraction"],
    ),
    "a GPU given out more than once over": (
        [
            ((*FIRST, part), {"n_gpus": 1, "gpu_ids": [0], "gpu_memory_fraction": 0.6})
            for part in ("trainer", "rollout")
        ],
        ["GPU 0", "sums to 1.20", "at most 1"],
    ),
    "strict on-policy": (
        [((*FIRST, "async_training", "strict_on_policy"), True)],
        ["multi_model.models[0].async_training", "trigger_parameter_sync_step: 1", "got 4 and 0.5"],
    ),
    "a falling learning rate without an end": (
        [((*FIRST, "trainer", "learning_rate_schedule"), "linear")],
        ["multi_model.models[0]", "learning_rate_schedule 'linear'", "needs max_steps"],
    ),
    "flash attention without what it needs": (
        [((*FIRST, "trainer", "attention"), "flash"), ((*FIRST, "trainer", "packing"), "off")],
        ["multi_model.models[0].trainer", "needs", "bfloat16 (dtype or autocast) and packed rows (packing)"],
    ),
    "GPU kernels without a GPU": (
        [((*FIRST, "trainer", "kernels"), "liger"), ((*FIRST, "trainer", "n_gpus"), 0)],
        ["multi_model.models[0].trainer", "kernels: liger needs a GPU", "n_gpus"],
    ),
    "store scheme": ([(("store", "url"), "gs://b/x")], ["store.url", "got 'gs://b/x'", "s3://bucket/prefix"]),
    "a bound of the log that is none": (
        [(("retention",), {"max_log_bytes": -1, "max_log_age_s": -0.5})],
        [
            "retention.max_log_bytes",
            "got -1",
            "retention.max_log_age_s",
            "got -0.5",
            "greater than or equal to 0",
        ],
    ),
    "store outage": (
        [(("store", "max_outage_s"), -1)],
        ["store.max_outage_s", "got -1", "greater than or equal to 0"],
    ),
    "store by a variable": (
        [(("store", "url"), "s3://${BUCKET}/runs")],
        ["store.url", "got 's3://${BUCKET}/runs'", "variables are not filled in"],
    ),
    "store with one slash": (
        [(("store", "url"), "s3:/bucket/runs")],
        ["store.url", "got 's3:/bucket/runs'", "two slashes follow the colon"],
    ),
    "store bucket": ([(("store", "url"), "s3:///x")], ["store.url", "got 's3:///x'", "names no bucket"]),
    "workflow function": (
        [(("workflow",), {"function": "my.module", "tasks": "t.jsonl"})],
        ["workflow.function", "got 'my.module'", "module:function"],
    ),
    "workflow without tasks": ([(("workflow", "function"), "m:f")], ["workflow", "needs `tasks`"]),
    "group of one": ([(("workflow", "group_size"), 1)], ["workflow.group_size", "got 1", "2"]),
    "not a number": (
        [((*FIRST, "trainer", "learning_rate"), "high")],
        ["multi_model.models[0].trainer.learning_rate", "got 'high'", "number"],
    ),
    "NaN": (
        [((*FIRST, "trainer", "learning_rate"), float("nan"))],
        ["multi_model.models[0].trainer.learning_rate", "got nan", "finite"],
    ),
    "infinity": (
        [((*FIRST, "trainer", "learning_rate"), float("inf"))],
        ["multi_model.models[0].trainer.learning_rate", "got inf", "finite"],
    ),
}


@pytest.mark.parametrize(("changes", "said"), BAD.values(), ids=BAD.keys())
def test_a_mistake_names_its_place_its_value_and_what_is_allowed(changes: Any, said: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(changed(*changes), source="run.yaml")
    message = str(caught.value)
    assert message.startswith("run.yaml:\n  ")
    assert [part for part in said if part not in message] == [], message


def test_all_mistakes_are_told_at_once() -> None:
    raw = changed(((*FIRST, "batch_size"), 0), (("gateway", "mode"), "x"), (("extra",), 1))
    with pytest.raises(ConfigError) as caught:
        parse_config(raw)
    assert len(str(caught.value).splitlines()) == 4


def test_what_models_and_agents_say_of_one_another_is_told_beside_other_mistakes() -> None:
    raw = changed(
        ((*FIRST, "batchsize"), 4),
        (("gateway", "mode"), "x"),
        (("agent_model_mapping", "critic_agent"), "critic_model"),
        (("agent_model_mapping", "judge_agent"), "judge_model"),
    )
    with pytest.raises(ConfigError) as caught:
        parse_config(raw)
    lines = str(caught.value).splitlines()
    assert [line.split(":")[0].strip() for line in lines[1:]] == [
        "multi_model.models[0].batchsize",
        "gateway.mode",
        "agent_model_mapping.critic_agent",
        "agent_model_mapping.judge_agent",
    ]


@pytest.mark.parametrize("other", [(), ((("gateway", "mode"), "x"),)], ids=["alone", "beside another"])
def test_a_misspelt_route_does_not_count_its_model_as_idle_too(other: Any) -> None:
    raw = changed((("agent_model_mapping", "planner_agent"), "planer_model"), *other)
    with pytest.raises(ConfigError, match="unknown model 'planer_model'") as caught:
        parse_config(raw)
    assert "no agent uses" not in str(caught.value)


def test_agents_of_models_whose_names_are_wrong_are_not_called_unknown() -> None:
    raw = changed(((*FIRST, "model_id"), "Planner Model"), (("multi_model", "models", 1, "batch_size"), 0))
    with pytest.raises(ConfigError) as caught:
        parse_config(raw)
    assert len(str(caught.value).splitlines()) == 3
    assert "unknown model" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "can't be read: No such file"),
        ("a:\n\tb: 1\n", r":2:1: not valid YAML: .*indent with spaces, not tabs$"),
        ("a: [", "not valid YAML"),
        ("- 1", "must be a mapping with multi_model and agent_model_mapping"),
        ("{}", "multi_model: Field required"),
    ],
)
def test_a_file_that_is_no_config_is_named(tmp_path: Path, text: str | None, said: str) -> None:
    path = tmp_path / "run.yaml"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=said) as caught:
        load_config(path)
    assert str(path) in str(caught.value)


def test_relative_paths_are_taken_from_the_file_s_folder(tmp_path: Path) -> None:
    raw = changed(
        ((*FIRST, "model_path"), "models/planner"),
        ((*FIRST, "adapter_path"), "../adapter"),
        (("workflow",), {"function": "m:f", "tasks": "t.jsonl", "held_out_tasks": "h.jsonl"}),
        (("store",), {"url": "runs"}),
        (("gateway",), {"tls_certificate": "tls/cert.pem", "tls_key": "/etc/key.pem"}),
    )
    path = tmp_path / "conf" / "run.yaml"
    path.parent.mkdir()
    path.write_text(yaml.safe_dump(raw), encoding="utf-8")

    config = load_config(path)

    assert config.models[0].model_path == str(tmp_path / "conf/models/planner")
    assert config.models[0].adapter_path == str(tmp_path / "adapter")
    assert config.models[1].adapter_path is None
    assert config.workflow.tasks == str(tmp_path / "conf/t.jsonl")
    assert config.workflow.held_out_tasks == str(tmp_path / "conf/h.jsonl")
    assert config.workflow.python_path == str(tmp_path / "conf")
    assert config.store.url == str(tmp_path / "conf/runs")
    assert config.gateway.tls_certificate == str(tmp_path / "conf/tls/cert.pem")
    assert config.gateway.tls_key == "/etc/key.pem"


def test_urls_stay_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(changed((("store", "url"), "s3://bucket/runs"))), encoding="utf-8")
    assert load_config(path).store.url == "s3://bucket/runs"


def test_a_config_survives_json_as_a_flow_parameter() -> None:
    config = parse_config(changed())
    assert RunConfig.model_validate_json(config.model_dump_json()) == config


def test_a_config_can_t_be_changed() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        parse_config(changed()).seed = 1  # type: ignore[misc]


def test_one_gpu_is_shared_by_fractions() -> None:
    sections = {"trainer": 0.5, "rollout": 0.25}
    config = parse_config(
        changed(
            *(
                ((*FIRST, part), {"n_gpus": 1, "gpu_ids": [0], "gpu_memory_fraction": fraction})
                for part, fraction in sections.items()
            )
        )
    )
    assert config.model("planner_model").rollout.gpu_memory_fraction == 0.25


@pytest.mark.parametrize("rank", LORA_RANKS)
def test_every_rank_vllm_serves_is_accepted(rank: int) -> None:
    assert parse_config(changed(((*FIRST, "lora", "rank"), rank))).models[0].lora.rank == rank


def test_a_frozen_model_is_served_and_not_trained() -> None:
    raw = changed(((*FIRST, "kind"), "frozen"), ((*FIRST, "trainer", "n_gpus"), 0))
    config = parse_config(raw)
    assert [m.model_id for m in config.trainable_models] == ["solver_model"]


def test_the_admission_limit_never_falls_below_one_step() -> None:
    raw = changed(
        (
            (*FIRST, "async_training"),
            {"trigger_parameter_sync_step": 1, "staleness_threshold": 0, "require_batches": 3},
        )
    )
    assert parse_config(raw).models[0].admission_limit == 3 * 8


def test_an_unknown_model_is_named_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"'x'; models are \['planner_model', 'solver_model'\]"):
        parse_config(changed()).model("x")


def test_artifact_slugs_hold_only_what_prefect_allows() -> None:
    assert artifact_slug("solver_model.v2") == "solver-model-v2"


def test_every_setting_is_described_in_the_schema() -> None:
    """The schema draws the form in the UI."""
    schema = RunConfig.model_json_schema()
    sections = {"RunConfig": schema, **schema["$defs"]}
    silent = [
        f"{name}.{field}"
        for name, section in sections.items()
        for field, properties in section.get("properties", {}).items()
        if len(properties.get("description", "")) < 8
    ]
    assert silent == []
    assert len(sections) >= 12


def test_a_key_given_twice_is_a_mistake_and_a_merged_one_is_not(tmp_path: Path) -> None:
    twice = tmp_path / "twice.yaml"
    twice.write_text(RFC_EXAMPLE + "gateway:\n  mode: multi_model_router\n")
    with pytest.raises(ConfigError, match=r"twice\.yaml:\d+:1: not valid YAML: key 'gateway' is given more"):
        load_config(twice)
    merged = tmp_path / "merged.yaml"
    merged.write_text(
        RFC_EXAMPLE.replace("trainer:\n        n_gpus: 4", "trainer: &t\n        n_gpus: 4", 1).replace(
            "trainer:\n        n_gpus: 4", "trainer:\n        <<: *t\n        n_gpus: 2", 1
        )
    )
    assert [model.trainer.n_gpus for model in load_config(merged).models] == [4, 2]


@pytest.mark.parametrize(
    ("content", "message"), [(b"\xff\xfe\x00", "not UTF-8 text"), (b"[" * 5000, "nested too deeply")]
)
def test_a_file_that_is_no_yaml_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "odd.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=f"odd.yaml: {message}"):
        load_config(path)
