#!/usr/bin/env bash
# Try README's two commands on a fresh Debian: as root, in a chroot that debootstrap makes from nothing. Prints the row of
# docs/status.md's table. For each release; not part of CI.
#
#   tools/try_fresh.sh trixie              bookworm, trixie or sid: about 10 minutes, and up to 10 GB in $TMPDIR
#   FOLDER=/big tools/try_fresh.sh sid     where the chroot is made (default: a temporary folder); it is removed afterwards
#   KEEP=yes tools/try_fresh.sh trixie     leave it there, to look into
#   MIRROR=http://... PIP_INDEX_URL=...    other sources; proxies, PIP_* and own certificates of this machine are passed on
#   SNAPSHOT=yes MIRROR=...                a mirror of an earlier day, whose Release file has expired
#   PIP_FIND_LINKS=/wheels ...             wheels on this machine that pip may use, such as a CPU build of torch
#   TESTS="tests/doctor tests/comm" ...    run these tests afterwards
#
# In it, `make train` runs as root. Then a user, who may not install Debian's packages, runs `make setup` in another checkout and
# README's example in one process and on two ranks; the dev score of the last epoch has to be README's.
set -euo pipefail
cd "$(dirname "$0")/.."
SUITE=${1:-}
MIRROR=${MIRROR:-http://deb.debian.org/debian}
case $SUITE in bookworm | trixie | sid) ;; *)
    echo "try_fresh.sh: expected bookworm, trixie or sid, got '$SUITE'" >&2
    exit 2
    ;;
esac
if [ "$(id -u)" != 0 ]; then echo "try_fresh.sh: expected to be run by root, which chroot needs" >&2 && exit 2; fi
for program in debootstrap unshare git; do
    command -v $program >/dev/null || { echo "try_fresh.sh: expected $program, got none: apt-get install $program" >&2 && exit 2; }
done
made=
if [ -z "${FOLDER:-}" ]; then made=yes && FOLDER=$(mktemp -d); fi
root=$FOLDER/$SUITE
if [ -e "$root" ]; then echo "try_fresh.sh: $root is there already: remove it, or name another FOLDER" >&2 && exit 2; fi
mkdir -p "$root"
log=$FOLDER/$SUITE.log

# /proc, /dev and /sys are mounted in a separate mount namespace: nothing is left to unmount, whatever ends this script.
inside() {
    # shellcheck disable=SC2016
    unshare --mount --pid --fork --kill-child --propagation private bash -c '
        root=$1; shift
        mount --rbind /dev "$root/dev"; mount -t proc proc "$root/proc"; mount --rbind /sys "$root/sys"
        mount -t tmpfs tmpfs "$root/dev/shm"
        if [ -d "$PIP_FIND_LINKS" ]; then mount --bind "$PIP_FIND_LINKS" "$root$PIP_FIND_LINKS"; fi
        exec chroot "$root" "$@"' _ "$root" env -i HOME=/root PATH=/usr/sbin:/usr/bin:/sbin:/bin LC_ALL=C.UTF-8 "${passed[@]}" "$@"
}
export PIP_FIND_LINKS=${PIP_FIND_LINKS:-} # a folder of wheels on this machine is there in the chroot, too
if [ -d "$PIP_FIND_LINKS" ]; then mkdir -p "$root$PIP_FIND_LINKS"; fi
passed=()
while IFS= read -r line; do passed+=("$line"); done < <(env | grep -iE '^(https?_proxy|no_proxy|PIP_[A-Z_]+|SSL_CERT_FILE)=' || true)

clean() {
    status=$?
    if [ "$status" != 0 ]; then
        tail -n 30 "$log" >&2 || true
        echo "try_fresh.sh: failed on $SUITE; the chroot: $root, the log: $log" >&2
    elif [ -z "${KEEP:-}" ]; then
        rm -rf --one-file-system "$root"
        if [ -n "$made" ]; then rm -rf "$FOLDER"; fi
    fi
}
trap clean EXIT

say() { echo "try_fresh.sh: $*" >&2; }
say "making $root"
debootstrap --variant=minbase --include=ca-certificates,make,git "$SUITE" "$root" "$MIRROR" >"$log" 2>&1
cp /etc/resolv.conf /etc/hosts "$root/etc/"
cp /usr/local/share/ca-certificates/*.crt "$root/usr/local/share/ca-certificates/" 2>/dev/null || true
if [ -n "${SNAPSHOT:-}" ]; then echo 'Acquire::Check-Valid-Until "false";' >"$root/etc/apt/apt.conf.d/snapshot"; fi
inside update-ca-certificates >>"$log" 2>&1
inside apt-get update -q >>"$log" 2>&1
mkdir "$root/hvdtrain"
git archive HEAD | tar x -C "$root/hvdtrain"

say "make train, as root"
started=$SECONDS
inside make -C /hvdtrain setup >>"$log" 2>&1
minutes=$(((SECONDS - started + 30) / 60))
inside env PIP_NO_INPUT=1 make -C /hvdtrain train >>"$log" 2>&1
grep -q "Finished training" "$log"

# score COMMAND...: the dev score of the last epoch that the command prints
score() { "$@" 2>&1 | tee -a "$log" | sed -n 's/^epoch 3\/3 .*dev ce \([0-9.]*\).*/\1/p'; }
readme=$(sed -n 's/^ *epoch 3\/3 .*dev ce \([0-9.]*\).*/\1/p' README.md | sort -u)
say "make setup and README's example, as a user"
inside useradd --create-home someone
mkdir "$root/home/someone/hvdtrain"
git archive HEAD | tar x -C "$root/home/someone/hvdtrain"
inside chown -R someone /home/someone
as_someone=(su someone -c)
inside "${as_someone[@]}" "cd ~/hvdtrain && make setup" >>"$log" 2>&1
one=$(score inside "${as_someone[@]}" "cd ~/hvdtrain && .venv/bin/python -m hvdtrain configs/smallest.py ++model exp/one/model")
two=$(score inside "${as_someone[@]}" "cd ~/hvdtrain && mpirun -np 2 --bind-to none --oversubscribe .venv/bin/python -m hvdtrain \
configs/smallest.py ++use_horovod 1 ++model exp/two/model")
if [ "$one" != "$readme" ] || [ "$two" != "$readme" ]; then
    say "expected a dev ce of $readme from README's example, got '$one' in one process and '$two' on two ranks"
    exit 1
fi
if [ -n "${TESTS:-}" ]; then
    say "the tests"
    # shellcheck disable=SC2086
    inside env OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMP_NUM_THREADS=1 \
        sh -c "cd /hvdtrain && make data data/returnn/demo-torch.config && .venv/bin/python -m pytest -n 3 --dist loadscope $TESTS" 2>&1 | tee -a "$log" >&2
fi

version() { inside /hvdtrain/.venv/bin/python -c "import importlib.metadata as m; print(m.version('$1'))" 2>/dev/null || echo none; }
tensorflow=$(version tensorflow-cpu)
if [ "$tensorflow" = none ]; then tensorflow=$(version tensorflow); fi
echo "| $(inside cat /etc/debian_version) ($SUITE) | $(inside gcc -dumpfullversion) | $(inside python3 -c 'import platform; print(platform.python_version())') | $(version torch) | $tensorflow | $(inside mpirun --version | sed -n 's/.*(Open MPI) //p') | $minutes | $(date +%F) |"
