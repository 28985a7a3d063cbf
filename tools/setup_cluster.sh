#!/usr/bin/env bash
# What `make test-cluster` needs besides `make setup`: Slurm, ssh and network tools from Debian's packages. The tests
# bring their own configuration. Where the packages cannot be installed it says so and succeeds: the
# tests are skipped then.
set -euo pipefail

packages=()
command -v slurmctld >/dev/null || packages+=(slurm-wlm)
command -v munged >/dev/null || packages+=(munge)
command -v sshd >/dev/null || [ -x /usr/sbin/sshd ] || packages+=(openssh-server)
command -v ssh >/dev/null || packages+=(openssh-client)
command -v ip >/dev/null || packages+=(iproute2)
command -v ps >/dev/null || packages+=(procps)
[ ${#packages[@]} -gt 0 ] || exit 0

if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "setup-cluster: missing for the tests on several hosts, which need root and Debian: ${packages[*]}"
    exit 0
fi
log=${TMPDIR:-/tmp}/hvdtrain-setup-cluster.log
printf 'setup-cluster: installing %s ... ' "${packages[*]}"
started=$SECONDS
if apt-get update -q >"$log" 2>&1 && DEBIAN_FRONTEND=noninteractive \
    apt-get install -q -y --no-install-recommends "${packages[@]}" >>"$log" 2>&1; then
    printf '%d s\n' $((SECONDS - started))
else
    printf 'failed (the log: %s)\n' "$log"
fi
