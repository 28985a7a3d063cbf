#!/usr/bin/env bash
# Everything that training needs, from a bare Debian 12: system packages, .venv, the frameworks and Horovod built against
# them. Instant when nothing is missing. Logs: .venv/setup-logs/. `make setup-dev` adds what tests use.
#
#   PYTHON=python3.12 make setup     another interpreter (3.11 or newer)
#   WHEEL=/shared/wheels make setup  Horovod's wheel from there, built on another machine; then no compiler is needed
#   WHEEL_DIR=/shared make setup     where the built wheel of Horovod is kept and looked for (default: ~/.cache/hvdtrain/wheels)
#   DEVICE=cuda make setup           frameworks with CUDA, or cpu: without (default: cuda where nvidia-smi lists a GPU)
#   EXTRAS=mpi,hdf make setup        extras of pyproject.toml other than those that the demo and the report need
set -euo pipefail
cd "$(dirname "$0")/.."

VENV=.venv
LOGS=$VENV/setup-logs
STAMP=$VENV/setup-complete
PYTHON=${PYTHON:-python3}
TORCH_VERSION=2.13.0
TENSORFLOW_VERSION=2.21.0

# What the stamp must say for the environment to be up to date: this script, the package list, how Horovod is compiled.
wanted=$(cat tools/setup.sh pyproject.toml setup.py hvdtrain/plugins/doctor/horovod_recipe.py hvdtrain/plugins/doctor/horovod.cmake | sha256sum | cut -d' ' -f1)
if [ -f "$STAMP" ] && [ "$(cat "$STAMP")" = "$wanted" ] && command -v mpirun >/dev/null && [ -x "$VENV/bin/python" ]; then
    exit 0
fi

# run NAME WHAT COMMAND...: one line while it runs, the seconds when it is done, the log's end when it fails.
# Until the virtual environment exists its log folder does not either, so the first steps log to a temporary file.
run() {
    local name=$1 what=$2 log started=$SECONDS
    shift 2
    if [ -d "$LOGS" ]; then log=$LOGS/$name.log; else log=${TMPDIR:-/tmp}/hvdtrain-setup-$(id -u)-$name.log; fi
    printf 'setup: %s ... ' "$what"
    if "$@" >"$log" 2>&1; then
        printf '%d s\n' $((SECONDS - started))
    else
        local status=$?
        printf 'failed after %d s\n' $((SECONDS - started))
        tail -n 15 "$log" >&2
        printf '\nsetup: %s failed (exit status %d); the whole log: %s\n' "$what" "$status" "$log" >&2
        exit 1
    fi
}

# --- system packages -------------------------------------------------------------------------------------------------
packages=()
command -v mpirun >/dev/null || packages+=(openmpi-bin)
if [ -z "${WHEEL:-}" ]; then
    command -v mpicxx >/dev/null || packages+=(libopenmpi-dev)
    command -v g++ >/dev/null || packages+=(g++)
    command -v cmake >/dev/null || packages+=(cmake)
    command -v make >/dev/null || packages+=(make)
fi
if ! command -v "$PYTHON" >/dev/null; then
    packages+=(python3 python3-venv python3-dev)
else
    "$PYTHON" -c 'import ensurepip, venv' 2>/dev/null || packages+=(python3-venv)
    "$PYTHON" -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))' ||
        packages+=(python3-dev)
fi
if [ ${#packages[@]} -gt 0 ]; then
    as_root=()
    if [ "$(id -u)" != 0 ]; then as_root=(sudo -n); fi
    if ! command -v apt-get >/dev/null || ! "${as_root[@]}" true 2>/dev/null; then
        echo "setup: these Debian packages are missing and installing them takes root: ${packages[*]}" >&2
        echo "setup: run   sudo apt-get install ${packages[*]}   and then   make setup   again" >&2
        exit 1
    fi
    run apt-update "reading Debian's package lists" "${as_root[@]}" apt-get update -q
    run apt-install "installing ${packages[*]}" "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive \
        apt-get install -q -y --no-install-recommends "${packages[@]}"
fi
if ! "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    echo "setup: expected Python 3.11 or newer, got $("$PYTHON" --version) from $PYTHON (PYTHON=... names another one)" >&2
    exit 1
fi

# --- Python packages -------------------------------------------------------------------------------------------------
rm -f "$STAMP"
new=
[ -x $VENV/bin/python ] || new=yes
[ -z "$new" ] || run venv "creating $VENV" "$PYTHON" -m venv $VENV
mkdir -p $LOGS
pip() { $VENV/bin/python -m pip --disable-pip-version-check "$@"; }
run pip "updating pip, setuptools, wheel" pip install -q --upgrade pip setuptools wheel

if [ -z "${DEVICE:-}" ]; then
    DEVICE=cpu
    if command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; then DEVICE=cuda; fi
fi
case $DEVICE in cpu | cuda) ;; *) echo "setup: DEVICE: expected cpu or cuda, got $DEVICE" >&2 && exit 1 ;; esac
if [ "$DEVICE" = cuda ]; then
    echo "setup: for NVIDIA GPUs: frameworks with CUDA"
    tensorflow="tensorflow[and-cuda]==$TENSORFLOW_VERSION"
    torch_index=()
    new= # no download in advance: these packages are gigabytes, which would be on the disk twice
else
    tensorflow=tensorflow-cpu==$TENSORFLOW_VERSION
    # PyPI's torch for Linux carries gigabytes of CUDA. PyTorch's own index has a CPU build; where it can't be reached,
    # pip's ordinary sources decide (the CUDA build runs on a CPU, too).
    torch_index=()
    cpu_index=https://download.pytorch.org/whl/cpu
    if "$PYTHON" -c "import urllib.request; urllib.request.urlopen('$cpu_index/torch/', timeout=5)" 2>/dev/null; then
        torch_index=(--extra-index-url "$cpu_index")
    fi
fi

# A process in the background downloads what is installed later while other packages are installed and Horovod is built. It
# does not install: it could replace a package that Horovod's build imports at that moment. If a download fails, pip install
# tries again and reports the error.
others=(cffi cloudpickle packaging psutil pyyaml)
extras=".[${EXTRAS:-mpi,demo,report,completion}]"
fetched=$VENV/fetched
fetch() {
    pip download -q --dest $fetched/tensorflow "$tensorflow"
    touch $fetched/tensorflow-is-here
    pip download -q --dest $fetched/others --no-build-isolation "${others[@]}" "$extras"
}
# Wait for the download of what is installed next, so that it is not downloaded twice.
until_fetched() {
    while [ ! -e "$fetched/$1" ] && kill -0 $fetching 2>/dev/null; do sleep 0.2; done
}
rm -rf $fetched
mkdir -p $fetched/tensorflow $fetched/others
set -m # a separate process group, so that pip ends with it
if [ -n "$new" ]; then fetch; fi >$LOGS/fetch.log 2>&1 & # an older environment has most of it
set +m
fetching=$!
trap 'kill -- -$fetching 2>/dev/null || true; rm -rf $fetched' EXIT
# Say it before the download, which takes minutes and disk space.
if [ "$DEVICE" = cpu ] && [ ${#torch_index[@]} = 0 ] && [ "$(uname -m)" = x86_64 ] &&
    ! $VENV/bin/python -c "import importlib.metadata as m, sys; sys.exit(m.version('torch').split('+')[0] != '$TORCH_VERSION')" 2>/dev/null &&
    ! pip index versions torch 2>/dev/null | grep -qF "$TORCH_VERSION+cpu"; then
    echo "setup: pip finds no CPU build of torch $TORCH_VERSION, and $cpu_index cannot be reached: PyPI's build"
    echo "setup: is installed, which works on CPUs, too, but downloads gigabytes of CUDA. To avoid that: stop here, download"
    echo "setup: torch-$TORCH_VERSION+cpu for $("$PYTHON" --version) from $cpu_index/torch/ into a folder, and run"
    echo "setup:     PIP_FIND_LINKS=FOLDER make setup"
fi
run torch "installing torch $TORCH_VERSION" pip install "torch==$TORCH_VERSION" ${torch_index[@]+"${torch_index[@]}"}
# A new Python has PyTorch before it has TensorFlow. If the index cannot be read, pip says so below.
name=${tensorflow%%[\[=]*}
if ! $VENV/bin/python -c "import importlib.metadata as m; m.version('$name')" 2>/dev/null &&
    versions=$(pip index versions --pre "$name" 2>/dev/null) && ! grep -qwF "$TENSORFLOW_VERSION" <<<"$versions"; then
    echo "setup: there is no $tensorflow for $("$PYTHON" --version): the environment has PyTorch only. make train works, and"
    echo "setup: make test does not. PYTHON=... make setup takes another interpreter"
    run tensorflow "installing ${others[*]}" pip install "${others[@]}"
else
    until_fetched tensorflow-is-here
    run tensorflow "installing ${tensorflow}" pip install --find-links $fetched/tensorflow "$tensorflow" "${others[@]}"
fi

# --- Horovod ---------------------------------------------------------------------------------------------------------
$VENV/bin/python -m hvdtrain build-horovod --log $LOGS/horovod.log ${WHEEL:+--install "$WHEEL"} ${WHEEL_DIR:+--wheel-dir "$WHEEL_DIR"}

# --- the other packages ----------------------------------------------------------------------------------------------
wait $fetching || true
trap 'rm -rf $fetched' EXIT
run packages "installing hvdtrain's other packages" pip install --find-links $fetched/others --no-build-isolation -e "$extras"

echo "$wanted" >$STAMP
echo "setup: complete"
