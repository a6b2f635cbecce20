from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from model_runtime.config import WorkflowConfig
from model_runtime.errors import ConfigError
from model_runtime.workflow_tasks import evaluation_groups, load_workflow, read_tasks, training_groups


def write_tasks(folder: Path, *lines: str) -> Path:
    path = folder / "tasks.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def workflow_config(folder: Path, function: str) -> WorkflowConfig:
    return WorkflowConfig(function=function, python_path=str(folder), tasks="tasks.jsonl")


# ---------------------------------------------------------------- task files


def test_blank_lines_are_passed_over(tmp_path: Path) -> None:
    path = write_tasks(tmp_path, '{"n": 1}', "", '  {"n": 2}', "")
    assert [t.fresh() for t in read_tasks(path, setting="workflow.tasks")] == [{"n": 1}, {"n": 2}]


def test_every_bad_line_is_named_with_its_number(tmp_path: Path) -> None:
    path = write_tasks(tmp_path, '{"n": 1}', "{broken", "[1]", '{"n": 2}')
    with pytest.raises(ConfigError) as caught:
        read_tasks(path, setting="workflow.tasks")
    message = str(caught.value)
    assert f"{path}:2: not a JSON object" in message
    assert f"{path}:3: not a JSON object" in message
    assert f"{path}:1" not in message
    assert f"{path}:4" not in message


@pytest.mark.parametrize(("lines", "said"), [((), "holds no task"), (("",), "holds no task")])
def test_a_file_without_tasks_is_refused(tmp_path: Path, lines: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read_tasks(write_tasks(tmp_path, *lines), setting="workflow.tasks")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"workflow\.tasks: .*absent\.jsonl can't be read: No such file"):
        read_tasks(tmp_path / "absent.jsonl", setting="workflow.tasks")


def test_each_pass_has_an_order_of_its_own_that_the_seed_fixes(tmp_path: Path) -> None:
    tasks = read_tasks(write_tasks(tmp_path, *(f'{{"n": {n}}}' for n in range(20))), setting="workflow.tasks")

    def order(**how: Any) -> list[int]:
        return [
            g.task.index for g in training_groups(tasks, **({"epochs": 2, "shuffle": True, "seed": 0} | how))
        ]

    first, second = order()[:20], order()[20:]
    assert sorted(first) == sorted(second) == list(range(20))
    assert first != second
    assert order() == first + second
    assert order(seed=1)[:20] != first
    assert order(shuffle=False) == [*range(20), *range(20)]


def test_group_ids_tell_passes_tasks_and_changed_tasks_apart(tmp_path: Path) -> None:
    def ids(*lines: str) -> list[str]:
        tasks = read_tasks(write_tasks(tmp_path, *lines), setting="workflow.tasks")
        return [g.group_id for g in training_groups(tasks, epochs=2, shuffle=False, seed=0)]

    before, after = ids('{"n": 1}', '{"n": 2}'), ids('{"n": 1}', '{"n": 3}')
    assert len(set(before)) == 4
    assert [a == b for a, b in zip(before, after, strict=True)] == [True, False, True, False]


def test_evaluation_takes_every_task_once_in_order(tmp_path: Path) -> None:
    tasks = read_tasks(write_tasks(tmp_path, '{"n": 1}', '{"n": 2}'), setting="workflow.held_out_tasks")
    groups = evaluation_groups(tasks)
    assert [g.task.index for g in groups] == [0, 1]
    assert not {g.group_id for g in groups} & {
        g.group_id for g in training_groups(tasks, epochs=1, shuffle=False, seed=0)
    }


# ---------------------------------------------------------------- the user's function


def test_a_workflow_is_imported_from_its_folder_with_its_neighbours(tmp_path: Path) -> None:
    (tmp_path / "neighbour_of_w1.py").write_text("ANSWER = 42\n")
    (tmp_path / "w1.py").write_text(
        "from neighbour_of_w1 import ANSWER\nasync def run(task, session):\n    return ANSWER\n"
    )
    function = load_workflow(workflow_config(tmp_path, "w1:run"))
    assert function.__module__ == "w1"


def test_modules_of_one_name_in_two_folders_are_told_apart(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "same_name.py").write_text(f"async def run(task, session):\n    return {name!r}\n")
    functions = [load_workflow(workflow_config(tmp_path / name, "same_name:run")) for name in ("a", "b")]
    assert functions[0].__code__.co_filename != functions[1].__code__.co_filename


@pytest.mark.parametrize(
    ("source", "function", "said"),
    [
        ("", "absent_module_x:run", "importing 'absent_module_x' below"),
        ("", "w2:run", "has no 'run'"),
        ("def run(task, session):\n    return 1\n", "w3:run", "must be an `async def`"),
        ("async def run(task):\n    return 1\n", "w4:run", r"must take \(task, session\)"),
        ("import absent_library_x\n", "w5:run", "No module named 'absent_library_x'"),
        ("1 / 0\n", "w6:run", "failed with ZeroDivisionError: division by zero"),
        ("def broken(:\n", "w7:run", "failed with SyntaxError"),
        ("raise SystemExit(2)\n", "w8:run", "failed with SystemExit: 2"),
    ],
)
def test_a_workflow_that_can_t_be_used_says_why(
    tmp_path: Path, source: str, function: str, said: str
) -> None:
    if not function.startswith("absent"):
        (tmp_path / f"{function.split(':')[0]}.py").write_text(source)
    with pytest.raises(ConfigError, match=said):
        load_workflow(workflow_config(tmp_path, function))


def test_no_function_and_no_folder_say_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"workflow\.function is not set"):
        load_workflow(WorkflowConfig())
    with pytest.raises(ConfigError, match=r"python_path: .*nowhere is not a folder"):
        load_workflow(workflow_config(tmp_path / "nowhere", "w:run"))
