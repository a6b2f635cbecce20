"""A stand-in for the trainer process, without torch: commits versions and speaks through the mailbox.

Steered by files in its mailbox folder: `versions` (how many it commits; default 1), `fail` (reports that
text and exits 1), `crash` (exits 9 without a word, and removes the file), `hang` (stops beating),
`supersede` (exits 3), `outage` (reports that text and exits as one whose store stayed away). It drains when
told to. After SIGTERM it ends at once, or in as many
seconds as the file `slow` says.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from model_runtime.adapters import latest_version, write_version
from model_runtime.config_file import parse_config
from model_runtime.documents import CanaryProbe
from model_runtime.layout import RunLayout
from model_runtime.mailbox import TrainerMailbox
from model_runtime.protocol import STORE_OUTAGE_EXIT_CODE, QueueReport, TrainerSpec
from model_runtime.store import open_store
from tests.fake_servers import make_adapter_files


def main(spec: TrainerSpec) -> int:
    folder = Path(spec.mailbox)
    signal.signal(signal.SIGTERM, lambda *_: end(folder))
    store = open_store(parse_config(spec.config).store)
    layout = RunLayout(spec.run_id).model(spec.model_id)
    with TrainerMailbox(folder) as mailbox:
        mailbox.working(for_s=3600)
        newest = latest_version(store, layout)
        newest = -1 if newest is None else newest
        while True:
            if (folder / "crash").exists():
                (folder / "crash").unlink()
                os._exit(9)
            if (folder / "fail").exists():
                mailbox.report(state="failed", reason=(folder / "fail").read_text())
                print("the last words", flush=True)
                return 1
            if (folder / "supersede").exists():
                mailbox.report(state="failed", reason="epoch 9 leads")
                return 3
            if (folder / "outage").exists():
                mailbox.report(state="failed", reason=(folder / "outage").read_text())
                return STORE_OUTAGE_EXIT_CODE
            if (folder / "hang").exists():
                mailbox.working(for_s=-1)
            control = mailbox.control()
            if control.desired == "stop":
                return 0
            published = -1 if control.published_version is None else control.published_version
            wanted = int((folder / "versions").read_text()) if (folder / "versions").exists() else 1
            if newest + 1 < wanted and newest <= published:
                newest += 1
                commit(store, layout, newest, epoch=spec.epoch)
            state = "drained" if control.desired == "drain" and newest == published else "running"
            mailbox.report(
                state=state,
                committed_version=newest if newest >= 0 else None,
                checkpoint_step=10 * max(newest, 0),
                step=10 * max(newest, 0),
                queue=QueueReport(untrained_groups=3),
            )
            if state == "drained":
                return 0
            time.sleep(0.02)


def end(folder: Path) -> None:
    slow = folder / "slow"
    time.sleep(float(slow.read_text()) if slow.exists() else 0.0)
    os._exit(128 + signal.SIGTERM)


def commit(store, layout, version: int, *, epoch: int) -> None:
    # tests/fake_vllm.py gives every token asked for this logprob
    canary = [CanaryProbe(prompt_ids=[1, 2], token_ids=[3, 4], logprobs=[-2.0, -2.0])]
    files = make_adapter_files(version)
    write_version(store, layout, files, version=version, step=10 * version, epoch=epoch, canary=canary)


if __name__ == "__main__":
    sys.exit(main(TrainerSpec.model_validate_json(Path(sys.argv[1]).read_bytes())))
