"""The command line, `repertory`."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from deployments.home import known_runs, new_run_id, recall_run
from deployments.terminal import command, console
from model_runtime.config import RunConfig
from model_runtime.config_file import load_config, parse_store
from model_runtime.errors import ConfigError, RepertoryError, RunFailedError

if TYPE_CHECKING:
    from rich.console import Console

    from model_runtime.documents import RunDocument
    from model_runtime.store import Store
    from model_runtime.summary import RunSummary

RUN_ID_PATTERN = r"[a-z0-9][a-z0-9_.-]{0,62}"
EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130

app = typer.Typer(
    name="repertory",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    help="""Trains several LLM policies at once from the work of a multi-agent system.

**Examples**

- `repertory up examples/quickstart/config.yaml` – two tiny policies learn together, in minutes, on a CPU
- `repertory up config.yaml --resume RUN_ID` – go on with a run that was stopped
- `repertory validate config.yaml` – is the file right?
- `repertory doctor config.yaml` – can this machine run it?
- `repertory deploy config.yaml --pool NAME` – register it on your own Prefect server and its workers
- `repertory status` – what has run here, and what runs now
- `repertory runs`, `repertory history MODEL` – what a store knows, with `--store URL` from any machine
- `repertory export RUN_ID MODEL --to DIR` – the trained adapter, as PEFT and vLLM read it
""",
)

ConfigArgument = Annotated[Path, typer.Argument(help="YAML file of the run.", metavar="CONFIG")]
RunArgument = Annotated[str, typer.Argument(help="Id of the run, as `status` lists it.", metavar="RUN_ID")]
StoreOption = Annotated[
    str | None, typer.Option(help="Store of the run or runs: s3://… or a folder.", metavar="URL")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON on stdout, and nothing else there.")]


@app.command()
def up(
    config: Annotated[
        Path | None,
        typer.Argument(help="YAML file of the run; may be left out with --resume.", metavar="CONFIG"),
    ] = None,
    run_id: Annotated[str | None, typer.Option(help="Name the new run yourself.", metavar="RUN_ID")] = None,
    resume: Annotated[
        str | None, typer.Option(help="Go on with this run, from its last checkpoint.", metavar="RUN_ID")
    ] = None,
    json: JsonOption = False,
    ui: Annotated[bool, typer.Option("--ui/--no-ui", help="Serve Prefect's dashboard.")] = True,
    keep_ui: Annotated[bool, typer.Option("--keep-ui", help="Leave the dashboard up after the run.")] = False,
) -> None:
    """Start Prefect, serve the deployments, run, follow it live, print the result.

    Ctrl-C stops every process and leaves a run that can be resumed; a second one does not wait.
    """
    screen = console(stderr=json)
    settings, path, name = _what_to_run(config, run_id, resume)
    for warning in settings.warnings():
        screen.print(f"[yellow]warning:[/yellow] {warning}", highlight=False, soft_wrap=True)
    _require_machine(settings)
    before = _require_run(settings, name, resume=resume is not None, given=run_id is not None)
    if (finished := _finished(settings, before)) is not None:
        _show_summary(screen, finished, json=json)
        where = path or "its config"
        how = f"raise max_steps or workflow.epochs in {where} and resume it with that file"
        screen.print(f"{name} is complete; to train on, {how}", highlight=False, soft_wrap=True)
        return
    again = f"{command()} up {path or ''}".rstrip() + f" --resume {name}"
    _follow_run(screen, settings, path, name, again, json=json, ui=ui, keep_ui=keep_ui)


def _require_machine(settings: RunConfig) -> None:
    """Raise ConfigError naming everything this machine lacks for the run, before anything is started."""
    from deployments.doctor import run_checks

    lacking = [check for check in run_checks(settings) if not check.ok]
    if lacking:
        lines = (f"  {c.name}: {c.detail}" + (f"\n    → {c.fix}" if c.fix else "") for c in lacking)
        raise ConfigError("this machine can't run it:\n" + "\n".join(lines))


def _require_run(settings: RunConfig, name: str, *, resume: bool, given: bool) -> RunDocument | None:
    """The run's document, None for a new run. Raises ConfigError for a new run under a name that is taken,
    and for an old one that isn't there or can't go on under this config."""
    from model_runtime.coordinator import refuse_unsafe_resume
    from model_runtime.layout import RunLayout
    from model_runtime.store import open_store

    before = refuse_unsafe_resume(open_store(settings.store), RunLayout(name), settings)
    if resume and before is None:
        raise ConfigError(f"--resume: no run {name!r} in {settings.store.url}")
    if given and before is not None:
        raise ConfigError(f"--run-id: {name!r} exists in {settings.store.url}; go on with it by --resume")
    return before


def _finished(settings: RunConfig, before: RunDocument | None) -> RunSummary | None:
    """The summary of a run that completed under these very settings: nothing is left of it to do. None also
    when its last life was lost before it had written one: it is resumed, and writes it."""
    if before is None or before.state != "completed" or before.config != settings.model_dump(mode="json"):
        return None
    from model_runtime.layout import RunLayout
    from model_runtime.store import open_store
    from model_runtime.summary import read_summary

    summary = read_summary(open_store(settings.store), RunLayout(before.run_id))
    return summary if summary is not None and summary.epoch == before.epoch else None


def _what_to_run(
    config: Path | None, run_id: str | None, resume: str | None
) -> tuple[RunConfig, str | None, str]:
    """(settings, path of their file, run id), from a file, from what this home remembers, or both."""
    if run_id and resume:
        raise ConfigError("--run-id names a new run, --resume goes on with an old one: give one of them")
    if config is None and resume is None:
        raise ConfigError("give a CONFIG file, or --resume RUN_ID")
    if config is None:
        assert resume is not None
        record = recall_run(resume)
        return record.config, record.config_path, resume
    settings = load_config(config)
    name = resume or run_id or new_run_id(settings.name)
    if not re.fullmatch(RUN_ID_PATTERN, name):
        raise ConfigError(f"--run-id: {name!r} must match {RUN_ID_PATTERN}")
    return settings, str(config), name


def _follow_run(
    screen: Console,
    settings: RunConfig,
    path: str | None,
    name: str,
    again: str,
    *,
    json: bool,
    ui: bool,
    keep_ui: bool,
) -> None:
    screen.print(f"run {name}: starting (Ctrl-C stops it; it can be resumed)", highlight=False)
    from deployments.local import Launch  # Prefect's client: a second or more to import
    from deployments.up import Interrupted, TerminalView, run_interruptible, run_to_end

    def show_and_stay(summary: RunSummary) -> None:
        view.close()
        _show_summary(screen, summary, json=json)
        screen.print(f"the dashboard stays at {launch.stack.api.ui_url} until Ctrl-C", highlight=False)

    view = TerminalView(screen, run_id=name)
    launch = Launch(settings, name, view.say, ui=ui, config_path=path)
    try:
        with view:
            stay = show_and_stay if keep_ui else None
            summary = run_interruptible(lambda: run_to_end(launch, view, keep_until_interrupted=stay))
    except Interrupted:
        screen.print(
            f"stopped; no process is left. Go on with:\n  {again}",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )
        raise typer.Exit(EXIT_INTERRUPTED) from None
    except RunFailedError as error:
        _say_error(str(error))
        screen.print(f"Go on with:\n  {again}", highlight=False, markup=False, soft_wrap=True)
        raise typer.Exit(EXIT_FAILED) from None
    if not keep_ui:
        _show_summary(screen, summary, json=json)


def _show_summary(screen: Console, summary: RunSummary, *, json: bool) -> None:
    if json:
        sys.stdout.write(summary.model_dump_json(indent=1) + "\n")
        sys.stdout.flush()
        return
    from deployments.summary_view import print_summary

    print_summary(screen, summary)
    path_of_it = summary.summary_uri.removeprefix("file://")
    screen.print(path_of_it, highlight=False, markup=False, soft_wrap=True)


@app.command()
def validate(config: ConfigArgument) -> None:
    """Check a file: wrong fields with their values and what is allowed. Paths are looked at by `doctor`."""
    settings = load_config(config)
    if settings.evaluation.cron is not None:
        from deployments.registration import cron_schedule  # Prefect's own reading: a second or two to import

        cron_schedule(settings.evaluation.cron)
    screen = console()
    for model in settings.models:
        agents = [agent for agent, model_id in settings.agent_to_model.items() if model_id == model.model_id]
        screen.print(f"{model.model_id} ({model.kind}): {', '.join(agents)}", highlight=False)
    for warning in settings.warnings():
        screen.print(f"[yellow]warning:[/yellow] {warning}", highlight=False)
    screen.print(f"{config}: valid")


@app.command()
def doctor(
    config: Annotated[Path | None, typer.Argument(help="YAML file of the run.", metavar="CONFIG")] = None,
) -> None:
    """Say what this machine lacks, for everything or for one run, and how to get it."""
    from deployments.doctor import run_checks

    settings = load_config(config) if config else None
    screen = console()
    checks = run_checks(settings)
    for check in checks:
        mark = "[green]ok[/green]     " if check.ok else "[red]missing[/red]"
        screen.print(f"{mark} {check.name}: {_escaped(check.detail)}", highlight=False, soft_wrap=True)
        if not check.ok and check.fix:
            screen.print(f"        → {_escaped(check.fix)}", highlight=False, soft_wrap=True)
    if not all(check.ok for check in checks):
        raise typer.Exit(EXIT_FAILED)


@app.command()
def deploy(
    config: ConfigArgument,
    pool: Annotated[
        str, typer.Option(help="Work pool whose workers run the flows; it must exist.", metavar="NAME")
    ],
    queue: Annotated[
        str | None, typer.Option(help="Work queue of the pool; its default if left out.", metavar="NAME")
    ] = None,
    models_pool: Annotated[
        str | None,
        typer.Option(
            help="Work pool of the models, as on machines with GPUs; that of --pool if left out.",
            metavar="NAME",
        ),
    ] = None,
    image: Annotated[
        str,
        typer.Option(
            help="Image of the application, for pools of containers; of models: with -vllm after its name.",
            metavar="NAME",
        ),
    ] = "repertory",
    json: JsonOption = False,
) -> None:
    """Register the config on your Prefect server (PREFECT_API_URL), to be run by the workers of a pool.

    Run it again after a change of the config: it updates in place, and models that left are retired. Then
    start runs from the dashboard, or with `prefect deployment run multi-model-training/NAME`.
    """
    import asyncio
    import dataclasses
    import json as json_format
    import uuid

    from deployments.deploy import deploy as register
    from deployments.registration import deployments_of

    settings = load_config(config)
    version = uuid.uuid4().hex[:12]
    wanted = deployments_of(
        settings,
        version=version,
        scheduled=True,
        models_pool=models_pool,
        work_pool_name=pool,
        work_queue_name=queue,
    )
    done = asyncio.run(register(settings, wanted, image=image))
    if json:
        sys.stdout.write(json_format.dumps(dataclasses.asdict(done), indent=1, default=str) + "\n")
        return
    screen = console()
    for what, names in (
        ("registered", done.registered),
        ("retired", done.retired),
        ("automation", done.automations.names),
        ("retired automation", done.automations.retired),
    ):
        for name in names:
            screen.print(f"{what} {name}", highlight=False, soft_wrap=True)
    if done.pool_type in ("docker", "kubernetes"):
        screen.print(f"docs/cluster.md says what a {done.pool_type} pool needs.", highlight=False)
        return
    pools = dict.fromkeys((done.work_pool, done.models_pool))
    workers = "\n".join(f"  prefect worker start --pool {name}" for name in pools)
    screen.print(
        f"Each worker of {' and '.join(map(repr, pools))} ({done.pool_type}) needs Repertory installed and "
        f"REPERTORY_ADMIN_KEY set to one secret of at least 16 characters:\n{workers}\n"
        f"Start a run with:\n  prefect deployment run multi-model-training/{settings.name}",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )


@app.command()
def status(
    run_id: Annotated[str | None, typer.Argument(metavar="RUN_ID")] = None,
    store: StoreOption = None,
    json: JsonOption = False,
) -> None:
    """The state of a run, live if it runs; without RUN_ID, every run launched from here.

    From another machine, name its store, and set REPERTORY_ADMIN_KEY to the run's key to see it live.
    """
    from deployments.run_status import list_runs, show_run

    if store is not None:
        if run_id is None:
            raise ConfigError("--store: name the run too; `runs` lists those of a store")
        from deployments.history import show_stored_run
        from model_runtime.protocol import ADMIN_KEY_ENV

        key = os.environ.get(ADMIN_KEY_ENV)
        show_stored_run(_opened(store), run_id, console(), as_json=json, key=key)
    elif run_id is None:
        list_runs(known_runs(), console(), as_json=json)
    else:
        show_run(recall_run(run_id), console(), as_json=json)


@app.command()
def runs(
    store: StoreOption = None,
    sizes: Annotated[bool, typer.Option("--sizes", help="Also what each takes in the store.")] = False,
    json: JsonOption = False,
) -> None:
    """The runs of a store, whoever launched them; of the newest run's here if none is named."""
    from deployments.history import show_runs

    show_runs(_opened(store), console(), sizes=sizes, as_json=json)


@app.command()
def history(
    model: Annotated[str, typer.Argument(help="Model id.", metavar="MODEL")],
    run: Annotated[str | None, typer.Option(help="Only this run.", metavar="RUN_ID")] = None,
    store: StoreOption = None,
    json: JsonOption = False,
) -> None:
    """A model through its runs: versions, steps, checkpoints, rewards, evaluations."""
    from deployments.history import show_history

    show_history(_opened(store), model, console(), run_id=run, as_json=json)


def _opened(url: str | None) -> Store:
    """The store of this URL; None: that of the newest run launched from here."""
    from model_runtime.store import open_store

    if url is not None:
        return open_store(parse_store(url))
    known = known_runs()
    if not known:
        raise ConfigError("no run has been launched from here: name a store with --store URL")
    return open_store(known[-1].config.store)


@app.command()
def stop(run_id: RunArgument) -> None:
    """Stop a run so that it can be resumed. Waits until its processes are down."""
    from deployments.run_status import stop_run

    stop_run(recall_run(run_id), console())


@app.command()
def export(
    run_id: RunArgument,
    model: Annotated[str, typer.Argument(help="Model id.", metavar="MODEL")],
    to: Annotated[Path, typer.Option(help="Folder to write the adapter to.", metavar="DIR")],
    version: Annotated[int | None, typer.Option(help="Version; the newest if left out.", metavar="N")] = None,
    store: Annotated[
        str | None,
        typer.Option(
            help="Store of the run, if it was launched from elsewhere: s3://… or a folder.", metavar="URL"
        ),
    ] = None,
) -> None:
    """Fetch an adapter: `peft.PeftModel.from_pretrained` and vLLM load the folder."""
    from model_runtime import adapters
    from model_runtime.coordinator import read_run
    from model_runtime.layout import RunLayout
    from model_runtime.store import open_store

    if store is None:
        config = recall_run(run_id).config
        settings = config.store
        config.model(model)  # an unknown one is refused by name
    else:
        settings = parse_store(store)
    opened = open_store(settings)
    if read_run(opened, RunLayout(run_id)) is None:
        raise ConfigError(
            f"no run {run_id!r} in {opened.url}: --store names the folder or prefix that holds it"
        )
    document = adapters.export(opened, run_id, model, version, to)
    console().print(
        f"{model} v{document.version} (step {document.step}): {to}", highlight=False, soft_wrap=True
    )


def _say_error(message: str) -> None:
    console(stderr=True).print(f"[red]error:[/red] {_escaped(message)}", highlight=False, soft_wrap=True)


def _escaped(message: str) -> str:
    return message.replace("[", "\\[")


def main() -> NoReturn:
    """Entry point: every error raised on purpose is one message, without a traceback."""
    try:
        app(standalone_mode=True)
    except RepertoryError as error:
        _say_error(str(error))
        code = EXIT_USAGE
    except KeyboardInterrupt:  # before anything was started
        code = EXIT_INTERRUPTED
    else:
        code = 0
    sys.stdout.flush()
    sys.exit(code)


if __name__ == "__main__":
    main()
