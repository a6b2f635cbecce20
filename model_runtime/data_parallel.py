"""One training step on several processes: each takes its part of the forward and backward passes.

Rank 0 is the trainer. It alone has the queue, the store, the mailbox and the optimizer; the others have the
model, get each batch with the current adapter, and give back gradients and figures. The denominators are
those of the whole batch on every rank, so the result doesn't depend on how many there are. CPUs speak gloo,
GPUs NCCL with gloo beside it for what is no tensor.

A rank that dies takes the step down: its peers' next exchange fails, rank 0 ends with an error, the others
with it, and the runtime starts all of them again from the last manifest.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from model_runtime.adapters import Tensors
from model_runtime.batching import Row
from model_runtime.config import ModelConfig
from model_runtime.errors import TrainerError
from model_runtime.protocol import TrainerSpec

JOIN_S = 600.0  # for every rank to have loaded its model
EXCHANGE_S = 280.0  # one exchange: the longest that one rank may be behind another
END_S = 10.0  # for a rank to end by itself
# Ranks are on one machine: their sockets stay on it.
_LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
_UPDATE = b"update\n"

logger = logging.getLogger(__name__)


class Ranks:
    """One process: it does everything, and there is nobody to exchange with."""

    rank = 0
    size = 1

    def begin_update(
        self,
        model: ModelConfig,
        rows: Sequence[Row],
        *,
        step: int,
        proximal: Tensors | None,
        parameters: Sequence[nn.Parameter],
    ) -> None:
        """Rank 0 tells the others what to work on."""

    def mine(self, costs: Sequence[int]) -> list[int]:
        """Which of the passes are this rank's; every rank knows all of them."""
        return list(range(len(costs)))

    def complete(self, found: Mapping[int, Tensor], sizes: Sequence[int]) -> list[Tensor]:
        """Values per pass, of every pass, from those of this rank's own."""
        return [found[index] for index in range(len(sizes))]

    def sum_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Add up the gradients of all ranks."""

    def gather(self, own: Any) -> list[Any]:
        """What every rank brings, in their order; on rank 0 only."""
        return [own]

    def close(self) -> None:
        """End the other ranks."""


class ProcessGroup(Ranks):
    """This process as one of several. `own_group` exchanges what is no tensor on the device."""

    def __init__(self, *, store: Any, rank: int, size: int, device: torch.device) -> None:
        self.rank, self.size = rank, size
        self._device = device
        backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
        with _told(f"rank {rank} of {size} could not join the others"):
            store.set_timeout(timedelta(seconds=JOIN_S))
            dist.init_process_group(
                backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=EXCHANGE_S)
            )
            self._objects: Any = dist.new_group(backend="gloo", timeout=timedelta(seconds=EXCHANGE_S))

    def share_update(
        self, parameters: Sequence[nn.Parameter], work: tuple[Any, ...] | None = None
    ) -> tuple[Any, ...]:
        """Rank 0's work and adapter, on every rank."""
        with _told("the batch could not be handed out"):
            box = [work]
            dist.broadcast_object_list(box, src=0, group=self._objects, device=torch.device("cpu"))
            flat = torch.cat([p.detach().reshape(-1) for p in parameters])
            dist.broadcast(flat, src=0)
            if self.rank:
                for parameter, values in zip(parameters, _split(flat, parameters), strict=True):
                    parameter.detach().copy_(values)
        assert box[0] is not None
        return box[0]

    def mine(self, costs: Sequence[int]) -> list[int]:
        """The costliest pass goes to whoever has least; all ranks come to the same shares."""
        loads = [0] * self.size
        shares: list[list[int]] = [[] for _ in range(self.size)]
        for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
            rank = loads.index(min(loads))
            loads[rank] += costs[index]
            shares[rank].append(index)
        return sorted(shares[self.rank])

    def complete(self, found: Mapping[int, Tensor], sizes: Sequence[int]) -> list[Tensor]:
        flat = torch.zeros(sum(sizes), device=self._device)
        parts = list(flat.split(list(sizes)))
        for index, values in found.items():
            parts[index].copy_(values)
        with _told("logprobs could not be exchanged"):
            dist.all_reduce(flat)  # of each value all but one are 0
        return parts

    def sum_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        flat = torch.cat(
            [(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in parameters]
        )
        with _told("gradients could not be exchanged"):
            dist.all_reduce(flat)
        for parameter, values in zip(parameters, _split(flat, parameters), strict=True):
            parameter.grad = values.clone()

    def gather(self, own: Any) -> list[Any]:
        found: list[Any] | None = [None] * self.size if self.rank == 0 else None
        with _told("figures could not be gathered"):
            dist.gather_object(own, found, dst=0, group=self._objects)
        return found if found is not None else []


@dataclass(frozen=True, slots=True)
class StartedRanks:
    """Processes that are loading, and the folder in which they and rank 0 will find each other."""

    folder: Path
    workers: Sequence[subprocess.Popen[bytes]]

    def end(self) -> None:
        """End them. Their standard input ends too when this process dies: nothing outlives rank 0."""
        _end_workers(self.workers)
        shutil.rmtree(self.folder, ignore_errors=True)


class LeadingRank(ProcessGroup):
    """Rank 0. Joins the ranks that were started."""

    def __init__(self, started: StartedRanks, *, device: torch.device) -> None:
        self._started, self._workers = started, started.workers
        self._closing = False
        size = len(started.workers) + 1
        super().__init__(store=meeting_point(started.folder, size), rank=0, size=size, device=device)
        if device.type == "cuda":
            # A collective on a GPU does not fail when a peer is gone, it waits.
            threading.Thread(target=self._watch, name="ranks", daemon=True).start()

    def begin_update(
        self,
        model: ModelConfig,
        rows: Sequence[Row],
        *,
        step: int,
        proximal: Tensors | None,
        parameters: Sequence[nn.Parameter],
    ) -> None:
        for rank, worker in enumerate(self._workers, 1):
            assert worker.stdin is not None
            try:
                worker.stdin.write(_UPDATE)
                worker.stdin.flush()
            except OSError as error:
                raise TrainerError(
                    f"rank {rank} (pid {worker.pid}) has ended with code {worker.poll()}"
                ) from error
        self.share_update(parameters, (model, list(rows), step, proximal))

    def _watch(self) -> None:
        while not self._closing:
            for rank, worker in enumerate(self._workers, 1):
                with contextlib.suppress(subprocess.TimeoutExpired):
                    code = worker.wait(timeout=1.0)
                    if not self._closing:
                        logger.error("rank %d (pid %d) ended with code %d", rank, worker.pid, code)
                        os._exit(1)

    def close(self) -> None:
        self._closing = True
        self._started.end()


def start_ranks(spec: TrainerSpec, size: int) -> StartedRanks:
    """Start the processes of the ranks above 0; they load their models while rank 0 loads its own."""
    folder = Path(tempfile.mkdtemp(prefix="repertory-ranks-"))
    (folder / "spec.json").write_text(spec.model_dump_json(), encoding="utf-8")
    workers = [
        subprocess.Popen(
            [sys.executable, "-m", "model_runtime.trainer_rank", str(folder), str(rank), str(size)],
            stdin=subprocess.PIPE,
            env=os.environ | _LOOPBACK,
        )
        for rank in range(1, size)
    ]
    os.environ.update(_LOOPBACK)
    return StartedRanks(folder, workers)


def meeting_point(folder: Path, size: int) -> Any:
    """Where ranks find each other: a file, so that nothing listens to strangers."""
    return dist.FileStore(str(folder / "ranks"), size)  # pyright: ignore[reportPrivateImportUsage]


def _end_workers(workers: Sequence[subprocess.Popen[bytes]]) -> None:
    for worker in workers:
        assert worker.stdin is not None
        with contextlib.suppress(OSError):
            worker.stdin.close()
    for worker in workers:
        try:
            worker.wait(END_S)
        except subprocess.TimeoutExpired:
            worker.kill()
            worker.wait()


def _split(flat: Tensor, like: Sequence[nn.Parameter]) -> Iterator[Tensor]:
    parts = flat.split([p.numel() for p in like])
    return (part.view(p.shape) for part, p in zip(parts, like, strict=True))


@contextlib.contextmanager
def _told(what: str) -> Iterator[None]:
    """A lost peer as an error of the trainer."""
    try:
        yield
    except (RuntimeError, dist.DistError) as error:
        raise TrainerError(f"data-parallel training: {what}: {error}") from error
