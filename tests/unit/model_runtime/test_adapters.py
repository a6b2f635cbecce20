"""Adapter versions: committed whole, never under a number that means something else, verified on arrival."""

import json

import numpy as np
import pytest

from model_runtime.adapters import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    AdapterFiles,
    check_adapter,
    export,
    latest_version,
    next_free_version,
    pack,
    read_folder,
    read_version,
    refuse_unserved_modules,
    version_document,
    write_version,
)
from model_runtime.config import StoreConfig
from model_runtime.documents import CanaryProbe
from model_runtime.errors import ConfigError, CorruptObjectError, ObjectExistsError, ObjectNotFoundError
from model_runtime.layout import RunLayout
from model_runtime.store import open_store

LAYOUT = RunLayout("run").model("planner")
MODULES = ("model.layers.0.self_attn.q_proj", "model.layers.0.mlp.up_proj")
CONFIG = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "none", "target_modules": list(MODULES)}


@pytest.fixture
def store(tmp_path):
    return open_store(StoreConfig(url=str(tmp_path / "store")))


def tensors(seed=0, modules=MODULES):
    rng = np.random.default_rng(seed)
    found = {}
    for module in modules:
        found[f"base_model.model.{module}.lora_A.weight"] = rng.normal(size=(4, 6)).astype(np.float32)
        found[f"base_model.model.{module}.lora_B.weight"] = rng.normal(size=(5, 4)).astype(np.float32)
    return found


def adapter(seed=0):
    return pack(tensors(seed), CONFIG)


def commit(store, version, seed=0):
    return write_version(store, LAYOUT, adapter(seed), version=version, step=version * 2, epoch=1)


def test_a_committed_version_is_brought_here_whole(store, tmp_path):
    probe = CanaryProbe(prompt_ids=[1], token_ids=[2], logprobs=[-0.5])
    written = write_version(store, LAYOUT, adapter(), version=0, step=0, epoch=1, canary=[probe])
    assert read_version(store, LAYOUT, 0, tmp_path / "here") == written
    assert read_folder(tmp_path / "here" / "v0") == adapter()
    assert written.canary == [probe]
    assert written.num_tensors == 4


def test_the_same_tensors_give_the_same_bytes_in_any_order():
    backwards = dict(reversed(list(tensors().items())))
    assert pack(backwards, dict(reversed(list(CONFIG.items())))) == adapter()


def test_the_same_adapter_again_keeps_its_number(store):
    first = commit(store, 1)
    assert write_version(store, LAYOUT, adapter(), version=1, step=99, epoch=7) == first


def test_a_number_never_stands_for_two_adapters(store):
    commit(store, 1)
    with pytest.raises(ObjectExistsError, match="already another adapter"):
        commit(store, 1, seed=1)
    assert version_document(store, LAYOUT, 1).sha256 == adapter().sha256


def test_only_the_marker_commits(store):
    commit(store, 0)
    store.put(f"{LAYOUT.version(1)}/{WEIGHTS_FILE}", adapter(1).weights)
    assert latest_version(store, LAYOUT) == 0
    assert next_free_version(store, LAYOUT) == 2


def test_a_write_cut_off_before_the_marker_is_completed(store):
    store.put(f"{LAYOUT.version(0)}/{WEIGHTS_FILE}", adapter().weights)
    commit(store, 0)
    assert latest_version(store, LAYOUT) == 0


def test_versions_are_ordered_by_number(store):
    assert latest_version(store, LAYOUT) is None
    assert next_free_version(store, LAYOUT) == 0
    for version in (2, 10, 9):
        commit(store, version, seed=version)
    assert latest_version(store, LAYOUT) == 10


def test_a_version_that_is_not_committed_is_not_found(store, tmp_path):
    with pytest.raises(ObjectNotFoundError, match="v3"):
        read_version(store, LAYOUT, 3, tmp_path)


@pytest.mark.parametrize("name", [WEIGHTS_FILE, CONFIG_FILE])
def test_flipped_bytes_are_refused_by_name(store, tmp_path, name):
    commit(store, 0)
    key = f"{LAYOUT.version(0)}/{name}"
    data = bytearray(store.get(key))
    data[-1] ^= 1
    store.put(key, bytes(data))
    with pytest.raises(CorruptObjectError, match=name):
        read_version(store, LAYOUT, 0, tmp_path / "here")
    assert not (tmp_path / "here" / "v0").exists()


def test_a_right_local_copy_is_left_alone(store, tmp_path):
    commit(store, 0)
    read_version(store, LAYOUT, 0, tmp_path)
    before = (tmp_path / "v0" / WEIGHTS_FILE).stat()
    read_version(store, LAYOUT, 0, tmp_path)
    after = (tmp_path / "v0" / WEIGHTS_FILE).stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)


def test_a_wrong_local_copy_is_replaced(store, tmp_path):
    commit(store, 0)
    read_version(store, LAYOUT, 0, tmp_path)
    (tmp_path / "v0" / WEIGHTS_FILE).write_bytes(b"half")
    read_version(store, LAYOUT, 0, tmp_path)
    assert read_folder(tmp_path / "v0") == adapter()
    assert [path.name for path in tmp_path.iterdir() if path.name != "store"] == ["v0"]


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("use_dora", True),
        ("bias", "all"),
        ("modules_to_save", ["lm_head"]),
        ("peft_type", "LOHA"),
        ("rank_pattern", {"q_proj": 8}),
    ],
)
def test_other_kinds_of_adapter_are_refused_by_setting(setting, value):
    with pytest.raises(ConfigError, match=setting):
        check_adapter(pack(tensors(), CONFIG | {setting: value}), source="here")


@pytest.mark.parametrize("module", ["lm_head", "model.embed_tokens", "transformer.wte"])
def test_embeddings_and_the_head_are_refused(module):
    with pytest.raises(ConfigError, match=module):
        refuse_unserved_modules([module], source="here")
    config = CONFIG | {"target_modules": [module]}
    with pytest.raises(ConfigError, match=module):
        check_adapter(pack(tensors(modules=[module]), config), source="here")


def test_a_missing_module_is_named():
    files = pack(tensors(modules=MODULES[:1]), CONFIG)
    with pytest.raises(CorruptObjectError, match="up_proj"):
        check_adapter(files, source="here")


def test_suffixes_and_patterns_name_targets_as_in_peft():
    for targets in (["q_proj", "up_proj"], r".*\.(q|up)_proj", "all-linear"):
        check_adapter(pack(tensors(), CONFIG | {"target_modules": targets}), source="here")


def test_half_a_pair_is_refused():
    half = tensors()
    del half[f"base_model.model.{MODULES[0]}.lora_B.weight"]
    with pytest.raises(CorruptObjectError, match="lora_A only"):
        check_adapter(pack(half, CONFIG), source="here")


def test_a_rank_other_than_the_config_is_refused():
    with pytest.raises(CorruptObjectError, match="rank is 8"):
        check_adapter(pack(tensors(), CONFIG | {"r": 8}), source="here")


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("lora_alpha", float("nan")),
        ("lora_alpha", 0),
        ("target_modules", 7),
        ("target_modules", [1, 2]),
        ("target_modules", []),
        ("r", "8"),
        ("r", None),
    ],
)
def test_a_setting_that_cannot_be_is_named(setting, value):
    with pytest.raises(CorruptObjectError, match=f"adapter_config.json: {setting} is "):
        check_adapter(pack(tensors(), CONFIG | {setting: value}), source="here")


def test_values_that_are_not_finite_are_refused():
    bad = tensors()
    next(iter(bad.values()))[0, 0] = np.nan
    with pytest.raises(CorruptObjectError, match="not finite"):
        check_adapter(pack(bad, CONFIG), source="here")


def test_bfloat16_adapters_are_read():
    values = np.array([[1.5, -2.0, 0.0078125, 3.0]], dtype=np.float32)
    half = (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    header = json.dumps(
        {
            "base_model.model.q_proj.lora_A.weight": {
                "dtype": "BF16",
                "shape": [1, 4],
                "data_offsets": [0, 8],
            },
            "base_model.model.q_proj.lora_B.weight": {
                "dtype": "BF16",
                "shape": [4, 1],
                "data_offsets": [8, 16],
            },
        }
    ).encode()
    weights = len(header).to_bytes(8, "little") + header + half + half
    config = json.dumps({"peft_type": "LORA", "r": 1, "target_modules": ["q_proj"]}).encode()
    read = check_adapter(AdapterFiles(weights, config), source="here")
    np.testing.assert_array_equal(read["base_model.model.q_proj.lora_A.weight"], values)


def test_export_writes_the_newest_and_keeps_other_folders(store, tmp_path):
    commit(store, 0)
    commit(store, 1, seed=1)
    assert export(store, "run", "planner", None, tmp_path / "out").version == 1
    assert read_folder(tmp_path / "out") == adapter(1)
    assert export(store, "run", "planner", 1, tmp_path / "out").version == 1
    with pytest.raises(ConfigError, match="not empty"):
        export(store, "run", "planner", 0, tmp_path / "out")


def test_export_says_which_versions_there_are(store, tmp_path):
    with pytest.raises(ConfigError, match=r"no version in .* committed: \[\]"):
        export(store, "run", "planner", None, tmp_path / "out")
    commit(store, 0)
    with pytest.raises(ConfigError, match=r"no version 5 .* committed: \[0\]"):
        export(store, "run", "planner", 5, tmp_path / "out")


def test_a_folder_without_an_adapter_is_a_config_error(tmp_path):
    with pytest.raises(ConfigError, match=r"adapter_model\.safetensors"):
        read_folder(tmp_path)
