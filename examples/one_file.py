import json
from pathlib import Path

from deployments.up import train
from model_runtime.config_file import parse_config

HERE = Path(__file__).resolve().parent
FORMS = {"how much is the {}?": "price", "where is the {}?": "aisle", "how heavy is the {}?": "weight"}
ITEMS = ("sofa", "lamp", "desk", "chair", "shelf", "rug", "mirror", "clock", "stove", "bed")


async def run(task, session):
    ask = [{"role": "system", "content": "plan the lookup"}, {"role": "user", "content": task["asked"]}]
    plan = await session.chat("planner_agent", ask, max_tokens=16)
    tell = [{"role": "system", "content": "look it up"}, {"role": "user", "content": plan.content}]
    call = await session.chat("search_agent", tell, max_tokens=16)
    return float(call.content == task["wanted"])


if __name__ == "__main__":
    tasks = [{"asked": f.format(i), "wanted": f"lookup({t}, {i})"} for f, t in FORMS.items() for i in ITEMS]
    (HERE / "one_file.jsonl").write_text("\n".join(map(json.dumps, tasks)))
    common = {"max_steps": 10, "trainer": {"learning_rate": 5e-3}}
    paths = {f"{n}_model": f"{HERE}/quickstart/models/{n}" for n in ("planner", "solver")}
    models = [{"model_id": name, "model_path": path} for name, path in paths.items()]
    agents = {"planner_agent": "planner_model", "search_agent": "solver_model"}
    work = {"function": "one_file:run", "tasks": f"{HERE}/one_file.jsonl", "epochs": 20}
    config = {"multi_model": {"models": [m | common for m in models]}, "agent_model_mapping": agents}
    config |= {"workflow": work | {"python_path": f"{HERE}"}, "store": {"url": f"{HERE}/runs"}}
    print(train(parse_config(config)).headline)
