"""Several hosts on one machine: namespaces with a host name, an address, a /dev/shm and an sshd each.

All hosts live inside an outer set of namespaces, a process namespace among them. When its first process ends, because the
tests are done or because they died, the kernel ends every process in it and forgets its networks and mounts: nothing stays
behind, and nothing outside is ever written to, /etc and /dev/shm included. Files are shared, as on a cluster's file system.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from launching import ROOT, TOY, Finished
from trainings import take_naps

HEAD = "head"
NETWORK = "10.77.0"
PATIENCE = 10.0

INIT = """\
set -e
hostname head
mount -t tmpfs tmpfs /dev/shm
mount -t tmpfs tmpfs /run
mkdir /run/sshd
mount --bind hosts /etc/hosts
mount --bind ssh_config /etc/ssh/ssh_config
ip link set lo up
ip link add eth0 type bridge
ip addr add {network}.1/24 dev eth0
ip link set eth0 up
echo ready
cat >/dev/null  # until the tests close this end of the pipe, or die
"""

HOST = """\
set -e
hostname {name}
mount -t tmpfs tmpfs /dev/shm
ip link set lo up
ip link add eth0 type veth peer name to-{name} netns 1  # the other end of the cable is in the head's network
ip addr add {address}/24 dev eth0
ip link set eth0 up
nsenter -t 1 -n ip link set to-{name} master eth0 up
/usr/sbin/sshd -f sshd_config -E {name}.sshd.log
echo $$ >{name}.pid.new
mv {name}.pid.new {name}.pid
exec sleep infinity
"""

# SetEnv: what a user's shell would set on every host.
SSHD_CONFIG = """\
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/user_key.pub
PermitRootLogin prohibit-password
StrictModes no
UsePAM no
UseDNS no
PidFile none
MaxStartups 100
SetEnv {environment}
"""

# ServerAlive: without it, ssh never learns that a cable was pulled, nor does a process that waits for it.
SSH_CONFIG = """\
Host *
    IdentityFile {folder}/user_key
    StrictHostKeyChecking no
    UserKnownHostsFile /dev/null
    LogLevel ERROR
    BatchMode yes
    ConnectTimeout 5
    ServerAliveInterval 3
    ServerAliveCountMax 3
"""


@dataclass(frozen=True)
class Started:
    """A command that runs on a host."""

    process: subprocess.Popen[bytes]
    out: IO[bytes]
    err: IO[bytes]
    began: float

    def finish(self, timeout: float) -> Finished:
        """Wait for its end."""
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.process.kill()
            printed = "".join(_all_of(file)[-3000:] for file in (self.out, self.err))
            raise AssertionError(f"{shlex.join(self.process.args)} still ran after {timeout:g} s:\n{printed}") from None  # type: ignore[arg-type]
        return Finished(self.process.returncode, _all_of(self.out), _all_of(self.err), time.monotonic() - self.began)


def _all_of(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


class Hosts:
    """The hosts host1 to hostN, and `head`, from which they can be reached. A context manager.

    Args:
        folder: for keys, configs and logs. Must be short: sockets' paths may have 107 characters.
    """

    def __init__(self, folder: Path, number: int) -> None:
        self.folder = folder
        self.names = [f"host{i + 1}" for i in range(number)]
        self._holders: list[subprocess.Popen[str]] = []
        self.environment = {"TMPDIR": str(folder)}  # where Open MPI leaves what a killed job could not tidy up
        """What every command gets to see besides `environment_of_a_user`."""

    def __enter__(self) -> Hosts:
        self._write_files()
        # Its end of the pipe is ours: when the tests end, however they do, `cat` reads an end of file.
        self._outer = subprocess.Popen(
            ["unshare", "--net", "--uts", "--ipc", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
            + ["sh", "-c", INIT.format(network=NETWORK)],
            cwd=self.folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            if self._outer.stdout is None or self._outer.stdout.readline() != "ready\n":
                raise RuntimeError(f"the head did not start: status {self._outer.wait(PATIENCE)}")
            self._init = int(Path(f"/proc/{self._outer.pid}/task/{self._outer.pid}/children").read_text())
            self._holders = [self._start_host(name) for name in self.names]
            self._pids = {name: wait_for_file(self.folder / f"{name}.pid") for name in self.names}
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self._end()

    def run(
        self,
        command: str | Sequence[object],
        host: str = HEAD,
        timeout: float = 120,
        environment: Mapping[str, str] | None = None,
        folder: Path = ROOT,
    ) -> Finished:
        """Run a command (text is for the shell) on a host and wait for its end."""
        return self.start(command, host, environment, folder).finish(timeout)

    def start(
        self,
        command: str | Sequence[object],
        host: str = HEAD,
        environment: Mapping[str, str] | None = None,
        folder: Path = ROOT,
    ) -> Started:
        """Start a command on a host."""
        words = ["sh", "-c", command] if isinstance(command, str) else [str(word) for word in command]
        # Into files: a pipe would be held open by whatever a launcher leaves behind.
        out, err = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115  they live as long as the command
        process = subprocess.Popen(
            [*self._enter(host, folder), *words],
            env=environment_of_a_user() | self.environment | dict(environment or {}),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
        )
        return Started(process, out, err, time.monotonic())

    def pull_cable(self, host: str) -> None:
        """Take a host off the network, without its noticing."""
        self._must("ip", "link", "set", f"to-{host}", "down")

    def plug_cable(self, host: str) -> None:
        """Put a host back on the network."""
        self._must("ip", "link", "set", f"to-{host}", "up")

    def processes(self, *words: str) -> list[str]:
        """The command lines of processes on all hosts, as pid and words, in which one of the words stands."""
        lines = self.run(["ps", "-e", "-o", "pid,stat,args", "-ww", "--no-headers"], folder=self.folder).out.splitlines()
        alive = [line for line in lines if line.split()[1][0] != "Z" and "ps -e -o" not in line]
        return [line.strip() for line in alive if any(word in line for word in words)]

    def daemon(self, command: Sequence[object], host: str = HEAD) -> None:
        """Run something that puts itself into the background."""
        # Its output goes to files: a pipe would be held open by what stays in the background.
        log = self.folder / f"{Path(str(command[0])).name}.{host}.start.log"
        with log.open("w") as output:
            words = [*self._enter(host, self.folder), *map(str, command)]
            done = subprocess.run(
                words, env=environment_of_a_user() | self.environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )
        if done.returncode != 0:
            raise RuntimeError(f"{shlex.join(map(str, command))}: status {done.returncode}\n{log.read_text()}")

    def address(self, name: str) -> str:
        """A host's address."""
        return f"{NETWORK}.{11 + self.names.index(name) if name in self.names else 1}"

    def _write_files(self) -> None:
        self.folder.chmod(0o755)  # munged insists
        for key in ("host_key", "user_key"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", self.folder / key], check=True)
        self.environment |= take_naps(self.folder)  # ranks of MPI whose host is lost would else compute until they are ended
        mine = environment_of_a_user() | self.environment
        named = ("PYTHONPATH", "OMP_NUM_THREADS", "OMPI_MCA_mpi_yield_when_idle", "OMPI_MCA_rmaps_base_oversubscribe")
        (self.folder / "sshd_config").write_text(
            SSHD_CONFIG.format(
                folder=self.folder, environment=" ".join(f"{name}={mine[name]}" for name in (*self.environment, *named))
            )
        )
        (self.folder / "ssh_config").write_text(SSH_CONFIG.format(folder=self.folder))
        lines = ["127.0.0.1 localhost", *(f"{self.address(name)} {name}" for name in [HEAD, *self.names])]
        (self.folder / "hosts").write_text("\n".join(lines) + "\n")

    def _start_host(self, name: str) -> subprocess.Popen[str]:
        words = ["unshare", "--net", "--uts", "--ipc", "--mount", "sh", "-c", HOST.format(name=name, address=self.address(name))]
        with (self.folder / f"{name}.log").open("w") as log:
            return subprocess.Popen(
                [*self._enter(HEAD, self.folder), *words], stdin=subprocess.DEVNULL, stdout=log, stderr=log, text=True
            )

    def _enter(self, host: str, folder: Path) -> list[str]:
        words = ["nsenter", "-t", str(self._init), "-a", f"--wd={folder}", "--"]
        if host != HEAD:
            words += ["nsenter", "-t", self._pids[host], "-n", "-u", "-i", "-m", f"--wd={folder}", "--"]
        return words

    def _must(self, *command: str) -> None:
        subprocess.run([*self._enter(HEAD, self.folder), *command], check=True, stdin=subprocess.DEVNULL)

    def _end(self) -> None:
        self._outer.stdin.close()  # type: ignore[union-attr]
        try:
            self._outer.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self._outer.kill()
            self._outer.wait()
        for holder in self._holders:
            holder.wait(PATIENCE)


def environment_of_a_user() -> dict[str, str]:
    """This process's environment without what a launcher put there, with the tests' Python first in PATH."""
    launchers = ("OMPI_", "PMI_", "PMIX_", "HOROVOD_", "SLURM_")
    mine = {name: value for name, value in os.environ.items() if not name.startswith(launchers)}
    mine["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), "/usr/local/bin", "/usr/bin", "/bin", "/usr/sbin", "/sbin"])
    mine["PYTHONPATH"] = f"{ROOT}:{TOY.with_name('late')}"
    # The hosts share the cores of one machine.
    mine |= {"OMP_NUM_THREADS": "1", "OMPI_MCA_mpi_yield_when_idle": "1", "OMPI_MCA_rmaps_base_oversubscribe": "1"}
    mine |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return mine


def wait_for_file(path: Path, patience: float = PATIENCE) -> str:
    """What stands in a file, as soon as there is one."""
    deadline = time.monotonic() + patience
    while not path.exists():
        if time.monotonic() > deadline:
            log = path.with_suffix(".log")
            raise RuntimeError(f"{path}: not there after {patience:g} s\n{log.read_text() if log.exists() else ''}")
        time.sleep(0.01)
    return path.read_text().strip()
