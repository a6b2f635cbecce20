"""Which groups may open, so that no model's trainer falls further behind than it is allowed.

A model's budget is `limit` groups that are untrained or trained but unpublished. What it has used:

    used = untrained + trained since its last publish + share × (groups open or settled but not yet read)

where `share` is the moving fraction of settled groups that fed this model. A group opens while every gating
model has `used < limit`; if only some have, it opens with `train=false` for the others, boundedly often. So
no model closes another's supply for good, and no two can wait for each other: half-open groups never fill a
budget, because members of an open group never wait.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from gateway.adaptive import AdaptiveConcurrency, Signals
from gateway.journal import Append, Forget, SessionJournal
from gateway.journal_events import GATES, GatesMoved, GroupClosed, GroupOpened, MemberSettled, of_group
from model_runtime.config import ModelConfig, RunConfig
from model_runtime.errors import AlreadyDoneError, ConflictError
from model_runtime.protocol import GroupAnswer, GroupRequest, ModelRenewal, QueueReport
from model_runtime.types import FINAL_STATUSES

# A waiting group nobody asked about for this long has lost its driver; it leaves the line.
_FORGET_AFTER_S = 120.0

# Settled groups whose names are remembered: new work must not take them.
MAX_REMEMBERED_GROUPS = 20_000


@dataclass(slots=True)
class OpenGroup:
    """A group whose members may run. `train` is fixed at opening."""

    group_id: str
    group_size: int
    train: dict[str, bool]
    opened_at: float
    deadline_at: float
    settled: dict[int, str] = field(default_factory=dict)  # member_index → status
    positions: dict[str, int] = field(default_factory=dict)  # writer → its newest shard with a settlement

    @property
    def is_settled(self) -> bool:
        return len(self.settled) == self.group_size

    @property
    def unsettled(self) -> list[int]:
        """Members without a final settlement, those never begun too."""
        return [i for i in range(self.group_size) if i not in self.settled]

    def take(self, end: MemberSettled) -> bool:
        """Note the end of an attempt. False: it was not the member's last."""
        if end.status not in FINAL_STATUSES:
            return False
        self.settled.setdefault(end.member_index, end.status)
        self.positions[end.writer] = max(self.positions.get(end.writer, -1), end.seq)
        return True


@dataclass(slots=True)
class _Gate:
    """What admission knows of one trainable model."""

    model: ModelConfig
    renewal: ModelRenewal | None = None
    queue: QueueReport = field(default_factory=QueueReport)
    has_lease: bool = False
    has_started: bool = False  # was ready once, or failed before it was
    is_given_up: bool = False  # by the parent: failed for good, whatever its last renewal said
    num_open: int = 0  # open groups that may train it
    # settled group → writer → shard its reader must pass
    unread: dict[str, dict[str, int]] = field(default_factory=dict)
    num_opened: int = 0  # groups opened with train=true
    num_surplus: int = 0  # groups opened with train=false because it was full

    @property
    def limit(self) -> int:
        return self.renewal.limit if self.renewal and self.renewal.limit else self.model.admission_limit

    @property
    def used(self) -> float:
        pending = self.queue.feed_share * self.num_in_flight
        return self.queue.untrained_groups + self.queue.trained_since_publish + pending

    @property
    def has_room(self) -> bool:
        return self.used < self.limit

    @property
    def num_in_flight(self) -> int:
        """Groups that may train it and are open, or settled and not read yet."""
        return self.num_open + len(self.unread)

    @property
    def is_done(self) -> bool:
        """Takes no more training data, for good: past its steps, drained, failed or stopped."""
        r = self.renewal
        is_over = r and (r.steps_left == 0 or r.trainer_state in ("finished", "drained", "no_signal"))
        return self.has_failed or bool(is_over)

    @property
    def has_failed(self) -> bool:
        said_so = self.renewal is not None and self.renewal.status in ("failed", "stopped")
        return self.is_given_up or said_so

    @property
    def is_gating(self) -> bool:
        if self.renewal is None or self.is_done or not self.has_lease:
            return False
        return self.renewal.trainer_state != "failed"

    def may_surplus(self, max_surplus_ratio: float) -> bool:
        """May one more group open without training this full model?"""
        if max_surplus_ratio == 0:
            return False
        required = self.model.batch_size * self.model.async_training.require_batches
        return self.num_surplus < max_surplus_ratio * self.num_opened + required

    def has_read(self, positions: Mapping[str, int]) -> bool:
        """Has the trainer read all these shards?"""
        read = self.queue.read_positions
        return all(seq < read.get(writer, 0) for writer, seq in positions.items())

    def observe(self, renewal: ModelRenewal) -> None:
        # A trainer that is loading has not read its log yet; what it knew before it died is still true.
        if renewal.trainer_state not in (None, "loading") or self.renewal is None:
            self.queue = renewal.queue
        self.renewal = renewal
        self.has_lease = True
        self.has_started = self.has_started or renewal.status != "starting"
        self.unread = {g: positions for g, positions in self.unread.items() if not self.has_read(positions)}


class AdmissionState:
    """The rules, without the waiting: every method returns at once."""

    def __init__(
        self,
        config: RunConfig,
        *,
        writer: str,
        clock: Callable[[], float],
        journal: SessionJournal | None = None,
    ) -> None:
        self._writer = writer
        self._clock = clock
        self._journal = journal or SessionJournal()
        self._max_surplus_ratio = config.gateway.max_surplus_ratio
        self._group_timeout_s = config.workflow.group_timeout_s
        self._gates = {m.model_id: _Gate(m) for m in config.trainable_models}
        self.concurrency = AdaptiveConcurrency(config, config.trainable_models)
        self._line: dict[str, tuple[GroupRequest, float]] = {}  # waiting, oldest first; when last asked for
        self._settled: dict[str, None] = {}  # the first to settle first
        self.open_groups: dict[str, OpenGroup] = {}
        self._ended = False

    # ------------------------------------------------------------------ what happened

    def observe(self, renewal: ModelRenewal, *, waiting_calls: int = 0, running_calls: int = 0) -> None:
        """`waiting_calls` and `running_calls` are the model's at the gateway."""
        if (gate := self._gates.get(renewal.model_id)) is None:
            return
        gate.observe(renewal)
        load = renewal.load
        signals = Signals(
            at=self._clock(),
            untrained_groups=gate.queue.untrained_groups,
            trainer_waits=renewal.trainer_state == "waiting",
            has_room=gate.has_room,
            num_in_flight=gate.num_in_flight,
            waiting_calls=waiting_calls + load.num_waiting,
            running_calls=running_calls,
            kv_cache_use=load.kv_cache_use,
            num_preemptions=load.num_preemptions,
        )
        self.concurrency.observe(renewal.model_id, signals)

    def lease_lost(self, model_id: str) -> None:
        if (gate := self._gates.get(model_id)) is not None:
            gate.has_lease = False

    def models_failed(self, model_ids: Iterable[str]) -> None:
        for gate in [self._gates[m] for m in model_ids if m in self._gates]:
            gate.is_given_up = gate.has_started = True

    def end(self) -> None:
        self._ended = True

    def join(self, request: GroupRequest) -> None:
        """Enter the line, or keep the place in it."""
        first, _ = self._line.get(request.group_id, (request, 0.0))
        self._line[request.group_id] = (first, self._clock())

    def member_settled(
        self,
        group_id: str,
        member_index: int,
        *,
        status: str,
        seq: int,
        attempt: int = 0,
        writer: str | None = None,
    ) -> None:
        group = self.open_groups.get(group_id)
        if group is None:
            return
        settled = MemberSettled(member_index, attempt, status, writer or self._writer, seq)
        self._journal.write(Append(of_group(group_id), settled))
        if not group.take(settled) or not group.is_settled:
            return
        del self.open_groups[group_id]
        unread: dict[str, dict[str, int]] = {}
        for model_id in (m for m, train in group.train.items() if train):
            gate = self._gates[model_id]
            gate.num_open -= 1
            if not gate.has_read(group.positions):
                unread[model_id] = gate.unread[group_id] = group.positions
        self._close(GroupClosed(group_id, unread))

    def _close(self, closed: GroupClosed) -> None:
        owner = of_group(closed.group_id)
        self._journal.write(Forget(owner), Append(owner, closed))
        self._settled[closed.group_id] = None
        if len(self._settled) > MAX_REMEMBERED_GROUPS:
            oldest = next(iter(self._settled))
            del self._settled[oldest]
            self._journal.write(Forget(of_group(oldest)))

    def restore(
        self, groups: Iterable[OpenGroup], closed: Iterable[GroupClosed], counts: GatesMoved | None
    ) -> None:
        """Take over what an earlier process of this epoch left."""
        for group in groups:
            self.open_groups[group.group_id] = group
            for model_id in (m for m, train in group.train.items() if train):
                self._gates[model_id].num_open += 1
        for end in closed:
            self._settled[end.group_id] = None
            for model_id, positions in end.unread.items():
                self._gates[model_id].unread[end.group_id] = positions
        for model_id, (opened, surplus) in (counts.counts if counts else {}).items():
            self._gates[model_id].num_opened, self._gates[model_id].num_surplus = opened, surplus

    # ------------------------------------------------------------------ what follows

    @property
    def has_ended(self) -> bool:
        """No group will open any more: told so, or every trainable model is past its steps. A failed model
        doesn't keep the run open, but if all have failed, ending it is not for admission to say."""
        gates = self._gates.values()
        nobody_left = all(g.is_done for g in gates) and not all(g.has_failed for g in gates)
        return self._ended or nobody_left

    @property
    def waiting(self) -> int:
        return len(self._line)

    def answer(self, request: GroupRequest) -> GroupAnswer:
        """What the driver is told now. Raises AlreadyDoneError for a group that is over, ConflictError for
        one that was opened with another size."""
        group_id = request.group_id
        if (group := self.open_groups.get(group_id)) is not None:
            if group.group_size != request.group_size:
                raise ConflictError(
                    f"group {group_id!r} is open with {group.group_size} members, not {request.group_size}"
                )
            return GroupAnswer(group_id=group_id, status="open", train=group.train)
        if self.is_over(group_id) or len(_members(request.settled_members, request)) == request.group_size:
            raise AlreadyDoneError(f"group {group_id!r} is settled; new work needs a group_id of its own")
        return GroupAnswer(group_id=group_id, status="ended" if self.has_ended else "waiting")

    def is_over(self, group_id: str) -> bool:
        return group_id in self._settled

    def admit(self, is_awaited: Callable[[str], bool]) -> list[OpenGroup]:
        """Open what may open, oldest first, passing over groups nobody is waiting for right now (they keep
        their place): a driver that died must not hold the others up."""
        opened = []
        if self.has_ended:
            self._line.clear()
        for group_id, (request, asked_at) in list(self._line.items()):
            if not is_awaited(group_id):
                if asked_at < self._clock() - _FORGET_AFTER_S:
                    del self._line[group_id]
                continue
            train = self._train_map()
            if train is None:
                break
            del self._line[group_id]
            opened.append(self._open(request, train))
        return opened

    def _train_map(self) -> dict[str, bool] | None:
        """Which models a group opened now may train; None: no group may open now."""
        gates = self._gates
        if not gates:
            return {}
        if not all(g.has_started or (g.renewal is not None and not g.has_lease) for g in gates.values()):
            return None
        gating = [g for g in gates.values() if g.is_gating]
        full = [g for g in gating if not self._takes_more(g)]
        if not gating or len(full) == len(gating):
            return None
        if not all(g.may_surplus(self._max_surplus_ratio) for g in full) and not self._feeds_a_hungry(gating):
            return None
        # A model whose lease or trainer was lost may come back; it is fed within its limit meanwhile.
        return {model_id: not g.is_done and self._takes_more(g) for model_id, g in gates.items()}

    def _takes_more(self, gate: _Gate) -> bool:
        return gate.has_room and self.concurrency.has_room(gate.model.model_id, gate.num_in_flight)

    def _feeds_a_hungry(self, gating: Iterable[_Gate]) -> bool:
        """Groups that a hungry model's window has room for may leave out full models however often: the
        window bounds them, and shrinks when servers can't keep up."""
        hungry = (g for g in gating if self.concurrency.is_hungry(g.model.model_id))
        return self._max_surplus_ratio > 0 and any(self._takes_more(g) for g in hungry)

    def _open(self, request: GroupRequest, train: dict[str, bool]) -> OpenGroup:
        now = self._clock()
        for model_id, may_train in train.items():
            gate = self._gates[model_id]
            gate.num_open += may_train
            gate.num_opened += may_train
            gate.num_surplus += not may_train and gate.is_gating
        group = OpenGroup(
            group_id=request.group_id,
            group_size=request.group_size,
            train=train,
            opened_at=now,
            deadline_at=now + (request.deadline_s or self._group_timeout_s),
            settled=dict.fromkeys(_members(request.settled_members, request), "finalized"),
        )
        self.open_groups[group.group_id] = group
        self._note_opening(group)
        return group

    def _note_opening(self, group: OpenGroup) -> None:
        wall_clock = time.time() - self._clock()
        opened = GroupOpened(
            group_id=group.group_id,
            group_size=group.group_size,
            train=group.train,
            opened_at=group.opened_at + wall_clock,
            deadline_at=group.deadline_at + wall_clock,
            settled=dict(group.settled),
        )
        counts = GatesMoved({m: (g.num_opened, g.num_surplus) for m, g in self._gates.items()})
        self._journal.write(Append(of_group(group.group_id), opened), Forget(GATES), Append(GATES, counts))

    def expired_groups(self) -> list[OpenGroup]:
        now = self._clock()
        return [g for g in self.open_groups.values() if g.deadline_at <= now]

    def used(self, model_id: str) -> float:
        """0 for a model that isn't trained."""
        gate = self._gates.get(model_id)
        return 0.0 if gate is None else gate.used


def _members(indices: list[int], request: GroupRequest) -> set[int]:
    return {i for i in indices if 0 <= i < request.group_size}


class GroupAdmission:
    """Opens groups for drivers that wait. All methods belong to one event loop."""

    def __init__(
        self,
        config: RunConfig,
        *,
        writer: str,
        clock: Callable[[], float] = time.monotonic,
        journal: SessionJournal | None = None,
    ) -> None:
        self._state = AdmissionState(config, writer=writer, clock=clock, journal=journal)
        self._waiters: dict[str, list[asyncio.Future[None]]] = {}

    # ------------------------------------------------------------------ events

    def observe(self, renewal: ModelRenewal, *, waiting_calls: int = 0, running_calls: int = 0) -> None:
        """A model's renewal that was accepted, and its calls at this gateway."""
        self._state.observe(renewal, waiting_calls=waiting_calls, running_calls=running_calls)
        self._pump()

    def lease_lost(self, model_id: str) -> None:
        """The model was not renewed in time; it gates again with its next renewal."""
        self._state.lease_lost(model_id)
        self._pump()

    def models_failed(self, model_ids: Iterable[str]) -> None:
        """The parent has given these models up: nobody waits for them any more."""
        self._state.models_failed(model_ids)
        self._pump()

    def end(self) -> None:
        """Drain or stop: nothing opens any more, open groups go on."""
        self._state.end()
        self._pump()

    def member_settled(
        self,
        group_id: str,
        member_index: int,
        *,
        status: str,
        seq: int,
        attempt: int = 0,
        writer: str | None = None,
    ) -> None:
        """A member's settlement is durable at `seq` of `writer` (None: this process). A `retried` one settles
        nothing; a group that isn't open is ignored."""
        self._state.member_settled(
            group_id, member_index, status=status, seq=seq, attempt=attempt, writer=writer
        )
        self._pump()

    def restore(
        self, groups: Iterable[OpenGroup], closed: Iterable[GroupClosed], counts: GatesMoved | None
    ) -> None:
        """Take over what the journal holds."""
        self._state.restore(groups, closed, counts)

    # ------------------------------------------------------------------ questions

    async def open(self, request: GroupRequest) -> GroupAnswer:
        """Open the group, waiting up to `wait_s` for room. Asking again keeps the place in the line, and an
        open group answers `open` again. Raises AlreadyDoneError for a group that is over."""
        answer = self._state.answer(request)
        if answer.status != "waiting":
            return answer
        self._state.join(request)
        decided = asyncio.get_running_loop().create_future()
        self._waiters.setdefault(request.group_id, []).append(decided)
        try:
            self._pump()
            async with asyncio.timeout(request.wait_s):
                await decided
        except TimeoutError:
            self._state.join(request)  # the driver was here until now
        finally:
            self._leave(request.group_id, decided)
        return self._state.answer(request)

    def is_open(self, group_id: str) -> bool:
        return group_id in self._state.open_groups

    def require_open(self, group_id: str) -> OpenGroup:
        """The open group. Raises AlreadyDoneError when it is over, ConflictError when it isn't open."""
        group = self._state.open_groups.get(group_id)
        if group is None and self._state.is_over(group_id):
            raise AlreadyDoneError(f"group {group_id!r} is settled")
        if group is None:
            raise ConflictError(f"group {group_id!r} is not open; open it with POST /groups first")
        return group

    def expired_groups(self) -> list[OpenGroup]:
        """Open groups past their deadline. They stay open until their members are settled."""
        return self._state.expired_groups()

    def used(self, model_id: str) -> float:
        """Groups that count against the model's limit now."""
        return self._state.used(model_id)

    @property
    def concurrency(self) -> AdaptiveConcurrency:
        return self._state.concurrency

    @property
    def num_open(self) -> int:
        return len(self._state.open_groups)

    @property
    def num_waiting(self) -> int:
        return self._state.waiting

    @property
    def has_ended(self) -> bool:
        return self._state.has_ended

    # ------------------------------------------------------------------ waiting

    def _pump(self) -> None:
        decided = [group.group_id for group in self._state.admit(self._waiters.__contains__)]
        if self._state.has_ended:
            decided = list(self._waiters)
        for group_id in decided:
            for future in self._waiters.get(group_id, ()):
                if not future.done():
                    future.set_result(None)

    def _leave(self, group_id: str, future: asyncio.Future[None]) -> None:
        waiters = self._waiters[group_id]
        waiters.remove(future)
        if not waiters:
            del self._waiters[group_id]
