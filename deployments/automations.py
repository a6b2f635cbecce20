"""Automations of one config on a Prefect server: what is watched for, and who is told.

Deploying again replaces what an automation watches for, and leaves its actions and its switch as the user
has set them. One that is not wanted any more is switched off and tagged `retired`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from uuid import UUID

from prefect.blocks.notifications import CustomWebhookNotificationBlock
from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.objects import StateType
from prefect.events.actions import ActionTypes, ChangeFlowRunState, SendNotification
from prefect.events.schemas.automations import Automation, AutomationCore, EventTrigger, Posture
from prefect.events.schemas.events import ResourceSpecification
from prefect.exceptions import ObjectNotFound

from deployments.registration import RETIRED, config_tag
from model_runtime.alerts_config import DEFAULT_BLOCK
from model_runtime.config import RunConfig
from model_runtime.errors import ConfigError

KINDS = ("zombie runs", "model failed", "no progress", "reward collapsed", "evaluation regressed")
NO_ADDRESS = "https://fill-in-the-address.invalid/"
"""Where the block made here sends to until its owner says where."""

_ABOUT_MODEL = (
    "{{ event.resource['prefect.resource.name'] }} of run {{ event.resource['repertory.run-id'] }}"
    "{% if event.payload.reason %}: {{ event.payload.reason }}{% endif %}"
)


@dataclass(frozen=True, slots=True)
class Alert:
    """One automation: what it waits for, what it says, and what it does beside saying it."""

    kind: str
    description: str
    trigger: EventTrigger
    body: str
    first: tuple[ActionTypes, ...] = ()


@dataclass(frozen=True, slots=True)
class Automated:
    """What `deploy` did about automations."""

    names: tuple[str, ...]
    retired: tuple[str, ...]
    block: str
    block_id: UUID


def alerts_of(config: RunConfig) -> Iterator[Alert]:
    """The automations a config wants."""
    alerts = config.alerts
    models = ResourceSpecification.model_validate(
        {
            "prefect.resource.id": [f"repertory.model.{model.model_id}" for model in config.models],
            "repertory.config": config.name,
        }
    )
    if alerts.zombie_after_s is not None:
        yield Alert(
            "zombie runs",
            f"No sign of life for {alerts.zombie_after_s:g} s: the flow run is set to Crashed.",
            zombie_trigger(config.name, after_s=alerts.zombie_after_s),
            "A flow run of this config gave no sign of life and was set to Crashed: "
            "{{ firing.triggering_labels['prefect.resource.id'] }}",
            (
                ChangeFlowRunState(
                    name="Crashed",
                    state=StateType.CRASHED,
                    message=f"no sign of life for {alerts.zombie_after_s:g} s",
                    force=False,
                ),
            ),
        )
    if alerts.no_progress_minutes is not None:
        yield Alert(
            "no progress",
            f"No training step of a model ended for {alerts.no_progress_minutes:g} minutes.",
            EventTrigger(
                after={"training.progress"},
                expect={"training.progress", "training.ended"},
                match=models,
                for_each={"prefect.resource.id", "repertory.run-id"},
                posture=Posture.Proactive,
                threshold=1,
                within=timedelta(minutes=alerts.no_progress_minutes),
            ),
            "{{ firing.triggering_labels['prefect.resource.id'] }} of run "
            f"{{{{ firing.triggering_labels['repertory.run-id'] }}}}: no training step ended for "
            f"{alerts.no_progress_minutes:g} minutes",
        )
    for kind, event, wanted, description in (
        ("model failed", "model.failed", alerts.model_failed, "A model's runtime ended with an error."),
        (
            "reward collapsed",
            "reward.collapsed",
            alerts.reward_drop is not None,
            "A model's mean reward fell far below its best, or is not a number.",
        ),
        (
            "evaluation regressed",
            "evaluation.regressed",
            alerts.evaluation_drop is not None,
            "An evaluation came out worse than the one before.",
        ),
    ):
        if wanted:
            trigger = EventTrigger(
                expect={event}, match=models, posture=Posture.Reactive, threshold=1, within=timedelta(0)
            )
            yield Alert(kind, description, trigger, _ABOUT_MODEL)


def zombie_trigger(name: str, *, after_s: float) -> EventTrigger:
    """A flow run of the config that gave a sign of life, then none, and did not end either."""
    return EventTrigger(
        after={"prefect.flow-run.heartbeat"},
        expect={"prefect.flow-run.*"},
        match=ResourceSpecification.model_validate({"prefect.resource.id": "prefect.flow-run.*"}),
        match_related=ResourceSpecification.model_validate(
            {"prefect.resource.role": "tag", "prefect.resource.id": f"prefect.tag.{config_tag(name)}"}
        ),
        for_each={"prefect.resource.id"},
        posture=Posture.Proactive,
        threshold=1,
        within=timedelta(seconds=after_s),
    )


async def automate(client: PrefectClient, config: RunConfig) -> Automated:
    """Make, update and retire the automations of a config. Raises ConfigError for an unknown block."""
    block_id = await _block(client, config.alerts.block)
    wanted = {alert.kind: alert for alert in alerts_of(config)}
    names, retired = [], []
    for kind in KINDS:
        name = f"{config.name}: {kind}"
        found = await client.read_automations_by_name(name)
        if kind in wanted:
            await _put(client, name, wanted[kind], found[0] if found else None, block_id, config)
            names.append(name)
        elif found and RETIRED not in found[0].tags:
            tags = [*found[0].tags, RETIRED]
            await client.update_automation(found[0].id, _core(found[0], enabled=False, tags=tags))
            retired.append(name)
    return Automated(tuple(names), tuple(retired), config.alerts.block, block_id)


async def _put(
    client: PrefectClient,
    name: str,
    alert: Alert,
    before: Automation | None,
    block_id: UUID,
    config: RunConfig,
) -> None:
    notify = SendNotification(block_document_id=block_id, subject=f"Repertory: {name}", body=alert.body)
    core = AutomationCore(
        name=name,
        description=alert.description,
        tags=[config_tag(config.name)],
        trigger=alert.trigger,
        actions=[*alert.first, notify],
    )
    if before is None:
        await client.create_automation(core)
        return
    told = {getattr(action, "block_document_id", None) for action in before.actions}
    await client.update_automation(
        before.id,
        core.model_copy(
            update={
                "actions": before.actions if block_id in told else core.actions,
                "enabled": before.enabled or RETIRED in before.tags,
            }
        ),
    )


def _core(automation: Automation, **changes: object) -> AutomationCore:
    # The server makes an automation's owner, and refuses to be told of it.
    kept = automation.model_dump(include=set(AutomationCore.model_fields) - {"owner_resource"})
    return AutomationCore.model_validate(kept | changes)


async def _block(client: PrefectClient, wanted: str) -> UUID:
    """Id of the notification block; the default one is made when it is not there, and never touched again."""
    kind, _, name = wanted.partition("/")
    try:
        return (await client.read_block_document_by_name(name, kind)).id
    except ObjectNotFound:
        if wanted != DEFAULT_BLOCK:
            raise ConfigError(
                f"alerts.block: no block {wanted!r} is on the server; make it on the dashboard's page Blocks"
            ) from None
    block = CustomWebhookNotificationBlock(
        name="Repertory",
        url=NO_ADDRESS,
        json_data={"text": "{{subject}}\n{{body}}"},
        headers=None,
        cookies=None,
    )
    await block.asave(name, client=client)
    return (await client.read_block_document_by_name(name, kind)).id
