"""However a step is computed (in micro-batches, padded, packed, shared, checkpointed, by two processes,
compiled), loss and gradient are those of the plain way, over random batches."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from model_runtime.data_parallel import LeadingRank, start_ranks
from model_runtime.learner import Learner
from tests.plain_step import PlainStep, assert_same, computed_by, config, section
from tests.random_batches import LONGEST, batch_of, masks
from tests.tiny_models import make_adapter, make_model
from tests.training_log import MODEL_ID, TrainingFolder

pytestmark = pytest.mark.integration

BUDGETS = (48, 4096)  # tokens a micro-batch
LAYOUTS = {
    "padded": {"packing": "off"},
    "packed": {"packing": "on", "share_prefixes": False},
    "shared": {"packing": "on"},
    "checkpointed": {"packing": "on", "gradient_checkpointing": True},
}
COMPILED = {"padded": {"packing": "off", "compile": True}, "shared": {"packing": "on", "compile": True}}
NO_COMPILER = "torch.compile needs a C++ compiler (g++ or clang++), and none is on the PATH"

Ways = dict[str, Learner]


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A base and an adapter that is away from B = 0, where half of the gradient is 0."""
    root = tmp_path_factory.mktemp("start")
    base = make_model(root / "base", max_position_embeddings=LONGEST)
    return base, make_adapter(root / "adapter", base=base, seed=3)


@pytest.fixture(scope="module")
def plain(start: tuple[Path, Path]) -> PlainStep:
    return PlainStep(*start)


@pytest.fixture(scope="module")
def ways(start: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ways]:
    """Every way but the compiled ones. Two processes: a real second rank, over gloo."""
    folder = TrainingFolder(tmp_path_factory.mktemp("ranks"), start[0])
    folder.model = section(*start, micro_batch_tokens=64) | {"model_id": MODEL_ID}
    started, ranks = start_ranks(folder.spec, 2), None
    try:
        found = {
            f"{name}, {budget} tokens": Learner(config(*start, micro_batch_tokens=budget, **layout), seed=0)
            for name, layout in LAYOUTS.items()
            for budget in BUDGETS
        }
        together = Learner(folder.config.model(MODEL_ID), seed=0)
        together.ranks = ranks = LeadingRank(started, device=torch.device("cpu"))
        yield found | {"two processes": together}
    finally:
        started.end() if ranks is None else ranks.close()
        if dist.is_initialized():
            dist.destroy_process_group()


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Ways, PlainStep]]:
    """Of a model with more layers than torch compiles one function anew, which fails here where it would only
    go on uncompiled: layers must share what is compiled."""
    if not any(map(shutil.which, ("c++", "g++", "clang++"))):
        pytest.skip(NO_COMPILER)
    root = tmp_path_factory.mktemp("deep")
    base = make_model(root / "base", max_position_embeddings=LONGEST, num_layers=12)
    start = base, make_adapter(root / "adapter", base=base, seed=3, scale=0.03)
    torch.compiler.reset()
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        ways = {f"{name}, compiled": Learner(config(*start, **way), seed=0) for name, way in COMPILED.items()}
        yield ways, PlainStep(*start)


def over_random_batches(max_examples: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """The property's batches, and one that has everything at once."""
    given_batches = given(
        prompt_tokens=st.lists(st.integers(1, 40), min_size=1, max_size=3),
        masks=masks,
        longest=st.booleans(),
        seed=st.integers(0, 10**6),
    )
    everything = example(
        prompt_tokens=[30, 5], masks=[[], [0, 0], [1], [1] * 40, [1, 1, 0, 1], [1]], longest=True, seed=1
    )
    bounds = settings(
        deadline=None, max_examples=max_examples, suppress_health_check=[HealthCheck.function_scoped_fixture]
    )
    return lambda test: bounds(everything(given_batches(test)))


def hold_to_the_plain_way(
    ways: Ways, plain: PlainStep, prompt_tokens: list[int], masks: list[Any], longest: bool, seed: int
) -> None:
    rows = batch_of(prompt_tokens, [*masks, [1, 0, 1], *(["longest"] if longest else [])], seed)
    want = plain(rows)
    for way, learner in ways.items():
        assert_same(computed_by(learner, rows), want, way=way)


@over_random_batches(12)
def test_neither_split_nor_layout_nor_processes_change_loss_or_gradient(
    ways: Ways, plain: PlainStep, **batch: Any
) -> None:
    hold_to_the_plain_way(ways, plain, **batch)


@pytest.mark.filterwarnings("ignore")  # torch's tracer warns of what it does itself
@pytest.mark.timeout(900)
@pytest.mark.slow
@over_random_batches(60)
def test_nor_do_compiled_layers_in_shapes_of_any_kind(compiled: tuple[Ways, PlainStep], **batch: Any) -> None:
    hold_to_the_plain_way(*compiled, **batch)


@pytest.mark.timeout(900)
@pytest.mark.slow
@over_random_batches(150)
def test_nor_does_any_of_them_over_many_more_batches(ways: Ways, plain: PlainStep, **batch: Any) -> None:
    hold_to_the_plain_way(ways, plain, **batch)
