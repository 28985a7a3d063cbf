#!/usr/bin/env bash
# What the tests use besides `make setup`, from Debian's packages: Slurm, ssh and network tools for those on several hosts,
# which bring their own configuration, and a browser to look at reports. Where the packages cannot be installed it says so
# and succeeds: these tests are skipped then.
set -euo pipefail

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
log=${TMPDIR:-/tmp}/hvdtrain-setup-tests-$(id -u).log
printf 'setup-tests: installing %s ... ' "${packages[*]}"
started=$SECONDS
if apt-get update -q >"$log" 2>&1 && DEBIAN_FRONTEND=noninteractive \
    apt-get install -q -y --no-install-recommends "${packages[@]}" >>"$log" 2>&1; then
    printf '%d s\n' $((SECONDS - started))
else
    printf 'failed (the log: %s)\n' "$log"
fi
