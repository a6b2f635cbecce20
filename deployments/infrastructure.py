"""What a flow run's process, container or pod needs, by the type of the work pool that makes it."""

from __future__ import annotations

from typing import Any

from model_runtime.config import RunConfig

ENVIRONMENT = {
    "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30",  # signs of life, for the automation of zombie runs
    "PREFECT_LOGGING_EXTRA_LOGGERS": "flows,tasks,model_runtime",
    "PREFECT_TELEMETRY_ENABLE_RESOURCE_METRICS": "false",
    "DO_NOT_TRACK": "1",
}
GRAPH_LIMIT = {"PREFECT_SERVER_FLOW_RUN_GRAPH_MAX_NODES": "300"}
"""Of a Prefect server: a browser draws the graph of a thousand tasks for seconds before the run's page shows
anything else. Of more tasks than this, it draws none."""
DEFAULT_IMAGE = "repertory"
MODEL_FLOWS = ("model-runtime",)


def job_variables(
    pool_type: str, config: RunConfig, *, flow_name: str, name: str, image: str = DEFAULT_IMAGE
) -> dict[str, Any]:
    """Job variables of one deployment. Those of `docker` and `kubernetes` are the variables of Prefect's own
    base job template and of deployments/kubernetes/base-job-template.json."""
    variables: dict[str, Any] = {"env": dict(ENVIRONMENT)}
    if pool_type not in ("docker", "kubernetes"):
        return variables
    serves = flow_name in MODEL_FLOWS
    variables["image"] = vllm_image(image) if serves else image
    gpus = num_gpus(config, name) if serves else 0
    if pool_type == "kubernetes":
        return variables | {"gpus": gpus, "role": flow_name}
    if gpus:
        request = {"Driver": "nvidia", "Count": gpus, "Capabilities": [["gpu"]]}
        variables["container_create_kwargs"] = {"device_requests": [request]}
    return variables


def num_gpus(config: RunConfig, model_id: str) -> int:
    """GPUs of a model's trainer and servers, which are one pod. For `default`, the most any model has."""
    needs = {m.model_id: m.rollout.n_gpus + m.trainer.n_gpus for m in config.models}
    return needs.get(model_id, max(needs.values()))


def vllm_image(image: str) -> str:
    """`registry:5000/repertory:1.0` → `registry:5000/repertory-vllm:1.0`."""
    folder, slash, last = image.rpartition("/")
    name, colon, tag = last.partition(":")
    return f"{folder}{slash}{name}-vllm{colon}{tag}"
