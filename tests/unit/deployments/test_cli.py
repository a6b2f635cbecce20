"""The command line: what it teaches, what it refuses, and how it says so."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from deployments import cli
from deployments.home import RunRecord, remember_run
from model_runtime.config import RunConfig
from model_runtime.config_file import load_config
from model_runtime.coordinator import begin_run, update_run
from model_runtime.errors import ConfigError
from model_runtime.layout import RunLayout
from model_runtime.removed_log import NOTHING_REMOVED
from model_runtime.store import open_store
from model_runtime.summary import summarize

GOOD = """
multi_model:
  models: [{model_id: planner_model, model_path: models/planner}]
agent_model_mapping: {planner_agent: planner_model}
"""

runner = CliRunner()


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("REPERTORY_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "200")
    return tmp_path / "home"


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(GOOD)
    return path


def known_run(config_file: Path, run_id: str = "run-1") -> RunConfig:
    config = load_config(config_file)
    remember_run(
        RunRecord(
            run_id=run_id,
            config=config,
            config_path=str(config_file),
            api_url="http://127.0.0.1:1/api",
            launched_at=1.0,
        )
    )
    return config


def run_main(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *argv: str
) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of the real entry point."""
    monkeypatch.setattr("sys.argv", ["repertory", *argv])
    with pytest.raises(SystemExit) as leaving:
        cli.main()
    out, err = capsys.readouterr()
    code = leaving.value.code
    return (code if isinstance(code, int) else 0), out, err


def test_help_teaches_with_examples() -> None:
    text = runner.invoke(cli.app, ["--help"]).output
    for word in (
        "examples/quickstart/config.yaml",
        "--resume",
        "validate",
        "doctor",
        "status",
        "stop",
        "export",
    ):
        assert word in text


def test_a_good_file_is_valid(config_file: Path) -> None:
    result = runner.invoke(cli.app, ["validate", str(config_file)])
    assert result.exit_code == 0
    assert "planner_model (trainable): planner_agent" in result.output
    assert "workflow.function is not set" in result.output


def test_a_wrong_field_is_named_with_its_value_and_no_traceback(
    config_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config_file.write_text(GOOD.replace("planner_agent: planner_model", "planner_agent: other"))
    code, out, err = run_main(monkeypatch, capsys, "validate", str(config_file))
    assert (code, out) == (2, "")
    assert "agent_model_mapping.planner_agent: unknown model 'other'; models are ['planner_model']" in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["up"], "give a CONFIG file, or --resume RUN_ID"),
        (["up", "missing.yaml"], "missing.yaml: can't be read"),
        (["up", "--resume", "nobody"], "no run 'nobody'"),
        (["up", "x.yaml", "--run-id", "a", "--resume", "b"], "give one of them"),
        (["status", "nobody"], "runs here: none yet"),
        (["stop", "nobody"], "no run 'nobody'"),
        (["export", "nobody", "m", "--to", "d"], "no run 'nobody'"),
    ],
)
def test_what_cannot_be_done_is_one_message_and_exit_code_2(
    argv: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = run_main(monkeypatch, capsys, *argv)
    assert code == 2
    assert message in " ".join(err.split())
    assert "Traceback" not in err


def test_a_run_id_that_is_no_name_is_refused_before_anything_starts(
    config_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = run_main(monkeypatch, capsys, "up", str(config_file), "--run-id", "../etc")
    assert code == 2
    assert "'../etc'" in err


def test_status_lists_the_runs_of_this_home(config_file: Path) -> None:
    config = known_run(config_file)
    store, layout = open_store(config.store), RunLayout("run-1")
    assert "not started" in runner.invoke(cli.app, ["status"]).output
    begin_run(store, layout, config, epoch=1)
    assert "interrupted" in runner.invoke(cli.app, ["status"]).output
    update_run(store, layout, epoch=1, state="completed")
    listed = json.loads(runner.invoke(cli.app, ["status", "--json"]).output)
    assert [(run["run_id"], run["state"]) for run in listed] == [("run-1", "completed")]


def test_status_of_one_run_as_json(config_file: Path) -> None:
    known_run(config_file)
    shown = json.loads(runner.invoke(cli.app, ["status", "run-1", "--json"]).output)
    assert shown == {
        "run_id": "run-1",
        "state": "not started",
        "live": None,
        "summary": None,
        "store_bytes": {},
        "removed_log_bytes": 0,
    }


def test_status_of_a_run_says_what_it_takes_and_what_retention_removed(config_file: Path) -> None:
    config = known_run(config_file)
    store, layout = open_store(config.store), RunLayout("run-1")
    begin_run(store, layout, config, epoch=1)
    model = layout.model(config.models[0].model_id)
    store.put(model.log_shard("e00001-00001", 7), bytes(2_000_000))
    removal = msgspec.structs.replace(NOTHING_REMOVED, number=1, num_bytes=40_000_000)
    store.put(model.removal(1), removal.to_bytes())
    output = runner.invoke(cli.app, ["status", "run-1"]).output
    assert "in the store: 2.0 MB (log 2.0, " in output
    assert output.rstrip().endswith("; 40.0 MB of logs removed")
    shown = json.loads(runner.invoke(cli.app, ["status", "run-1", "--json"]).output)
    assert (shown["store_bytes"]["log"], shown["removed_log_bytes"]) == (2_000_000, 40_000_000)


def test_stopping_a_run_that_does_not_run_says_so_and_how_to_go_on(config_file: Path) -> None:
    known_run(config_file)
    result = runner.invoke(cli.app, ["stop", "run-1"])
    assert "run-1: was not running" in result.output
    assert f"repertory up {config_file} --resume run-1" in result.output


def test_stopping_a_run_that_is_complete_offers_nothing_to_go_on_with(config_file: Path) -> None:
    config, layout = known_run(config_file), RunLayout("run-1")
    store = open_store(config.store)
    begin_run(store, layout, config, epoch=1)
    update_run(store, layout, epoch=1, state="completed")
    result = runner.invoke(cli.app, ["stop", "run-1"])
    assert "run-1: was not running" in result.output
    assert "--resume" not in result.output


def test_export_names_the_models_it_knows(
    config_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    known_run(config_file)
    code, _, err = run_main(monkeypatch, capsys, "export", "run-1", "other", "--to", str(tmp_path / "out"))
    assert code == 2
    assert "unknown model 'other'; models are ['planner_model']" in " ".join(err.split())


def test_export_from_a_store_without_the_run_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = (
        "export",
        "run-1",
        "m",
        "--to",
        str(tmp_path / "out"),
        "--store",
        str(tmp_path / "elsewhere"),
    )
    code, _, err = run_main(monkeypatch, capsys, *arguments)
    assert code == 2
    assert "no run 'run-1' in" in err
    assert "elsewhere" in err


def test_going_on_needs_no_file(config_file: Path) -> None:
    config = known_run(config_file)
    assert cli._what_to_run(None, None, "run-1") == (config, str(config_file), "run-1")


def test_a_new_run_gets_a_name_of_its_own(config_file: Path) -> None:
    first, second = (cli._what_to_run(config_file, None, None)[2] for _ in range(2))
    assert first != second
    assert first.startswith("default-")


def test_a_name_that_is_taken_and_one_that_is_not_there_are_told_apart(config_file: Path) -> None:
    config = known_run(config_file)
    with pytest.raises(ConfigError, match="--resume: no run 'run-1' in"):
        cli._require_run(config, "run-1", resume=True, given=False)
    begin_run(open_store(config.store), RunLayout("run-1"), config, epoch=1)
    cli._require_run(config, "run-1", resume=True, given=False)
    with pytest.raises(ConfigError, match="--run-id: 'run-1' exists"):
        cli._require_run(config, "run-1", resume=False, given=True)


def test_a_run_that_is_complete_is_shown_and_not_started_again(
    config_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, layout = known_run(config_file), RunLayout("run-1")
    store = open_store(config.store)
    begin_run(store, layout, config, epoch=1)
    monkeypatch.setattr(cli, "_require_machine", lambda settings: None)
    monkeypatch.setattr(cli, "_follow_run", lambda *_, **__: print("started"))

    def resumed() -> str:
        return runner.invoke(cli.app, ["up", str(config_file), "--resume", "run-1"]).output

    assert "started" in resumed()
    summary = summarize(store, layout, config, started_at=1.0, failures={})
    store.put(layout.summary(), summary.model_dump_json().encode())
    update_run(store, layout, epoch=1, state="completed")
    assert "run-1 is complete; to train on, raise max_steps or workflow.epochs" in resumed()
    assert "started" not in resumed()
    config_file.write_text(GOOD.replace("models/planner", "models/planner, max_steps: 2000"))
    assert "started" in resumed()


def test_a_complete_run_whose_last_life_left_no_summary_is_started_again(
    config_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, layout = known_run(config_file), RunLayout("run-1")
    store = open_store(config.store)
    begin_run(store, layout, config, epoch=1)
    failed = summarize(store, layout, config, started_at=1.0, failures={"planner": "out of memory"})
    store.put(layout.summary(), failed.model_dump_json().encode())
    begin_run(store, layout, config, epoch=2)
    update_run(store, layout, epoch=2, state="completed")
    monkeypatch.setattr(cli, "_require_machine", lambda settings: None)
    monkeypatch.setattr(cli, "_follow_run", lambda *_, **__: print("started"))
    output = runner.invoke(cli.app, ["up", str(config_file), "--resume", "run-1"]).output
    assert "started" in output
    assert "out of memory" not in output


def test_validate_refuses_what_is_no_cron_expression(
    config_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config_file.write_text(GOOD + "evaluation: {cron: now and then}\nworkflow: {held_out_tasks: t.jsonl}\n")
    code, _, err = run_main(monkeypatch, capsys, "validate", str(config_file))
    assert code == 2
    assert "evaluation.cron: 'now and then' is no cron expression" in err
