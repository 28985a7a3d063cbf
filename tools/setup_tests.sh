#!/usr/bin/env bash
# What the tests use besides `make setup`. Python's packages, also for formatting, types and documents, in .venv; with the argument
# `python` only these. From Debian: Slurm, ssh and network tools for tests on several hosts, which bring their own configuration, and
# a browser to look at reports. Where Debian's packages cannot be installed it says so and succeeds: these tests are skipped then.
set -euo pipefail
cd "$(dirname "$0")/.."

# run WHAT LOG COMMAND...: one line while it runs, and the seconds when it is done; its status.
run() {
    local what=$1 log=$2 started=$SECONDS
    shift 2
    printf 'setup-tests: installing %s ... ' "$what"
    if "$@" >"$log" 2>&1; then
        printf '%d s\n' $((SECONDS - started))
    else
        printf 'failed (the log: %s)\n' "$log"
        tail -n 15 "$log" >&2
        return 1
    fi
}

extras=hdf,safetensors,huggingface,returnn,wandb,mlflow,export,pretrained,optimizers,remote,arrow,kaldi,lhotse,lightning,speechbrain,transformers,text,docs,dev
stamp=.venv/setup-tests-complete
wanted=$(cat tools/setup_tests.sh pyproject.toml | sha256sum | cut -d' ' -f1)
if [ ! -f $stamp ] || [ "$(cat $stamp)" != "$wanted" ]; then
    mkdir -p .venv/setup-logs
    run "Python's packages" .venv/setup-logs/tests.log \
        .venv/bin/python -m pip --disable-pip-version-check install --no-build-isolation -e ".[$extras]" || exit 1
    # espnet needs packages that pin old versions of others; what is tested needs two of them.
    run "espnet" .venv/setup-logs/espnet.log .venv/bin/python -m pip --disable-pip-version-check install --no-deps \
        espnet typeguard humanfriendly || exit 1
    # PyPI's torchaudio, which speechbrain imports, is built for CUDA. With a CPU build of torch its extension cannot be loaded, which is
    # an error; without the file, torchaudio does without it.
    .venv/bin/python -c "import sys, torch; sys.exit(torch.version.cuda is None)" ||
        rm -f .venv/lib/python3*/site-packages/torchaudio/lib/*.so
    echo "$wanted" >$stamp
fi
[ "${1:-}" != python ] || exit 0

packages=()
command -v slurmctld >/dev/null || packages+=(slurm-wlm)
command -v munged >/dev/null || packages+=(munge)
command -v sshd >/dev/null || [ -x /usr/sbin/sshd ] || packages+=(openssh-server)
command -v ssh >/dev/null || packages+=(openssh-client)
command -v ip >/dev/null || packages+=(iproute2)
command -v iptables >/dev/null || [ -x /usr/sbin/iptables ] || packages+=(iptables)
command -v ps >/dev/null || packages+=(procps)
command -v chromium >/dev/null || packages+=(chromium)
[ ${#packages[@]} -gt 0 ] || exit 0

if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "setup-tests: missing for some tests, and installing them takes root and Debian: ${packages[*]}"
    exit 0
fi
install() {
    apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends "${packages[@]}"
}
run "${packages[*]}" "${TMPDIR:-/tmp}/hvdtrain-setup-tests-$(id -u).log" install || true
