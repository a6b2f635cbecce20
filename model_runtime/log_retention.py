"""What of a model's log may go: shards that every checkpoint a resume may start from is past, and that are
more or older than the config keeps.

What is left of them is written first (removed_log.py), then they are deleted; a removal that broke off in
between is finished by the next one, and readers never see the difference. The newest shard of each writer
stays, so that its next number can be read from its folder.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from model_runtime.checkpoints import checkpoint_steps, find_manifest
from model_runtime.errors import CorruptObjectError, ObjectExistsError, ObjectNotFoundError
from model_runtime.layout import ModelLayout, number_in
from model_runtime.log_reader import Position, decode_log_shard, is_below
from model_runtime.removed_log import Removal, ShardRecord, last_removal
from model_runtime.replay import first_replayed
from model_runtime.store import Store
from model_runtime.training_config import RetentionConfig
from model_runtime.trajectory_log import decode_shard
from model_runtime.types import Shard

logger = logging.getLogger(__name__)

MIN_CHECKPOINTS = 2  # a damaged one is replaced by the one before it
MAX_BYTES_AT_ONCE = 256 * 2**20
# Removals are made in portions of a tenth of what is kept, so that their number stays small.
_PORTION = 0.1


def remove_log(
    store: Store,
    layout: ModelLayout,
    settings: RetentionConfig,
    *,
    epoch: int,
    now: float,
    require_leading: Callable[[], None],
) -> int:
    """Remove what may go; the bytes of the shards that went. Finishes what an earlier removal left undone.

    Raises CorruptObjectError when what an earlier removal left can't be read."""
    if not settings.bounds_log:
        return 0
    last = last_removal(store, layout)
    sizes = _sizes(store, layout.log_writers())
    _delete(store, layout, [p for p in sizes if _is_removed(p, last)])
    sizes = {p: num_bytes for p, num_bytes in sizes.items() if not is_below(p, last.floor)}
    limits = _limits(store, layout, settings.keep_last or MIN_CHECKPOINTS)
    chosen = _Choice(settings, now=now, num_bytes=sum(sizes.values()))
    for writer in sorted({writer for writer, _ in sizes}):
        newest = max(seq for of, seq in sizes if of == writer)
        end = min(limits.get(writer, 0), newest)
        _choose(store, layout, chosen, sizes, writer, range(last.floor.get(writer, 0), end))
    if not chosen.records:
        return 0
    removal = chosen.removal(last, epoch=epoch)
    require_leading()
    try:
        store.put_if_absent(layout.removal(removal.number), removal.to_bytes())
    except ObjectExistsError:  # another parent's; whoever leads goes on from there
        return 0
    _delete(store, layout, [p for p in sizes if _is_removed(p, removal)])
    logger.info(
        "%s: removed %d shards of %d bytes", store.uri(layout.root), len(chosen.records), chosen.freed_bytes
    )
    return chosen.freed_bytes


def remove_evaluation_rows(
    store: Store,
    layout: ModelLayout,
    settings: RetentionConfig,
    *,
    now: float,
    require_leading: Callable[[], None],
) -> int:
    """The same of the rows of evaluations, which nobody needs, damaged ones too: what evaluations found is in
    documents of its own. The bytes of the shards that went."""
    if not settings.bounds_log:
        return 0
    sizes = _sizes(store, layout.eval_writers())
    chosen = _Choice(settings, now=now, num_bytes=sum(sizes.values()))
    gone: list[str] = []
    passed: set[str] = set()  # writers whose next shard is to stay
    for (writer, seq), num_bytes in sizes.items():
        key = layout.eval_shard(writer, seq)
        if chosen.is_over or writer in passed or (writer, seq + 1) not in sizes:
            continue
        shard = _read(store, key, decode_shard)
        if shard is None or chosen.wants(shard):
            chosen.freed_bytes += num_bytes
            gone.append(key)
        else:
            passed.add(writer)
    if gone:
        require_leading()
    for key in gone:
        store.delete(key)
    return chosen.freed_bytes


def _sizes(store: Store, writers: str) -> dict[Position, int]:
    """Bytes of every shard in this folder of writers, in the log's order."""
    found: dict[Position, int] = {}
    for key, num_bytes in store.sizes(writers).items():
        writer, _, name = key.removeprefix(f"{writers}/").partition("/")
        found[writer, number_in(name)] = num_bytes
    return dict(sorted(found.items()))


def _is_removed(position: Position, removal: Removal) -> bool:
    return is_below(position, removal.floor) and position not in removal.damaged


def _delete(store: Store, layout: ModelLayout, positions: list[Position]) -> None:
    for position in positions:
        store.delete(layout.log_shard(*position))


def _limits(store: Store, layout: ModelLayout, num_checkpoints: int) -> dict[str, int]:
    """Writer → seq below which no resume needs a shard any more: nothing while there are fewer than two
    checkpoints, or when one of them can't be read."""
    checkpoints = [
        find_manifest(store, layout, step) for step in checkpoint_steps(store, layout)[:num_checkpoints]
    ]
    known = [checkpoint for checkpoint in checkpoints if checkpoint is not None]
    if len(known) < max(MIN_CHECKPOINTS, len(checkpoints)):
        return {}
    writers = set.intersection(*(set(checkpoint.low_water) for checkpoint in known))
    replayed = [first_replayed(checkpoint) for checkpoint in known]
    return {
        writer: min(
            *(checkpoint.low_water[writer] for checkpoint in known),
            *(first[writer] for first in replayed if writer in first),
        )
        for writer in writers
    }


@dataclass(slots=True)
class _Choice:
    """Shards that go, as the config bounds the log."""

    settings: RetentionConfig
    now: float
    num_bytes: int  # of the log as it stands
    records: list[ShardRecord] = field(default_factory=list)
    damaged: list[Position] = field(default_factory=list)
    floor: dict[str, int] = field(default_factory=dict)
    freed_bytes: int = 0
    excess_bytes: float = 0.0

    def __post_init__(self) -> None:
        limit = self.settings.max_log_bytes
        if limit is not None and self.num_bytes > limit:
            self.excess_bytes = self.num_bytes - (1 - _PORTION) * limit

    @property
    def is_over(self) -> bool:
        """Neither bytes nor age want anything more, or it is enough for once."""
        wants = self.settings.max_log_age_s is not None or self.freed_bytes < self.excess_bytes
        return not wants or self.freed_bytes >= MAX_BYTES_AT_ONCE

    def wants(self, shard: Shard) -> bool:
        ends = [s.settled_at for s in shard.settlements] or [t.created_at for t in shard.trajectories]
        age_s = self.now - max(ends, default=self.now)
        if age_s < self.settings.min_age_s:
            return False
        if self.freed_bytes < self.excess_bytes:
            return True
        limit_s = self.settings.max_log_age_s
        return limit_s is not None and age_s > limit_s * (1 if self.freed_bytes else 1 + _PORTION)

    def take(self, position: Position, shard: Shard | None, num_bytes: int) -> None:
        """None: it can't be read. Then it is passed over, and stays where it is."""
        writer, seq = position
        self.floor[writer] = seq + 1
        if shard is None:
            self.damaged.append(position)
        else:
            self.records.append(ShardRecord.of(writer, seq, shard))
            self.freed_bytes += num_bytes

    def removal(self, last: Removal, *, epoch: int) -> Removal:
        return Removal(
            number=last.number + 1,
            epoch=epoch,
            created_at=self.now,
            floor={**last.floor, **self.floor},
            damaged=[*last.damaged, *self.damaged],
            num_shards=last.num_shards + len(self.records),
            num_trajectories=last.num_trajectories + sum(len(record.rows) for record in self.records),
            num_bytes=last.num_bytes + self.freed_bytes,
            shards=self.records,
        )


def _choose(
    store: Store,
    layout: ModelLayout,
    chosen: _Choice,
    sizes: Mapping[Position, int],
    writer: str,
    removable: range,
) -> None:
    """From the oldest of this writer's removable shards on, up to the first that is to stay."""
    for seq in removable:
        position = (writer, seq)
        if chosen.is_over or position not in sizes:
            return
        shard = _read(store, layout.log_shard(*position), decode_log_shard)
        if shard is not None and not chosen.wants(shard):
            return
        chosen.take(position, shard, sizes[position])


def _read(store: Store, key: str, decode: Callable[..., Shard]) -> Shard | None:
    """None when it is damaged, also on a second look: the damage may have been on the way here."""
    for _ in range(2):
        try:
            return decode(store.get(key), source=store.uri(key))
        except (CorruptObjectError, ObjectNotFoundError) as error:
            logger.warning("retention can't read a shard: %s", error)
    return None
