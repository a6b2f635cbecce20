"""A rank above 0 of a data-parallel trainer: `python -m model_runtime.trainer_rank FOLDER RANK SIZE`.

Waits on its standard input for rank 0's word that an update begins. When that input ends, so does this
process, at once and wherever it is: rank 0 is gone or wants it to.
"""

from __future__ import annotations

import logging
import os
import queue
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from model_runtime.config_file import parse_config
from model_runtime.data_parallel import ProcessGroup, meeting_point
from model_runtime.errors import RepertoryError
from model_runtime.learner import Learner, prepare_torch
from model_runtime.protocol import TrainerSpec

logger = logging.getLogger(__name__)


def main(argv: Sequence[str]) -> int:
    folder, rank, size = Path(argv[0]), int(argv[1]), int(argv[2])
    spec = TrainerSpec.model_validate_json((folder / "spec.json").read_bytes())
    logging.basicConfig(
        level=logging.INFO, stream=sys.stdout, format=f"%(asctime)s rank {rank} %(levelname)s: %(message)s"
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # a signal to the whole group: rank 0 decides
    orders: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read_orders, args=(orders,), name="orders", daemon=True).start()
    try:
        _serve(spec, folder, rank, size, orders)
    except RepertoryError as error:
        logger.error("%s", error)
        return 1
    return 0


def _serve(spec: TrainerSpec, folder: Path, rank: int, size: int, orders: queue.SimpleQueue[bytes]) -> None:
    config = parse_config(spec.config, source=f"spec of {spec.model_id}")
    model = config.model(spec.model_id)
    device = prepare_torch(model.trainer, model_id=spec.model_id, gpu_ids=spec.gpu_ids, rank=rank)
    learner = Learner(model, seed=config.seed, device=device)
    ranks = ProcessGroup(store=meeting_point(folder, size), rank=rank, size=size, device=device)
    learner.ranks = ranks
    while True:
        orders.get()
        parameters = list(learner.policy.parameters.values())
        settings, rows, step, proximal = ranks.share_update(parameters)
        learner.work_on(settings)
        learner.update(rows, step=step, proximal=proximal)


def _read_orders(orders: queue.SimpleQueue[bytes]) -> None:
    for line in sys.stdin.buffer:
        orders.put(line)
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
