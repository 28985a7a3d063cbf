"""Three hosts with Slurm on them, and a folder with `config.py`, as the commands in docs/launching.md find it."""

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Generator, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from cluster.hosts import Hosts
from cluster.jobs import scores
from cluster.slurm import logs_of_slurm, start_slurm, wait_until_idle
from launching import TOY, hvdtrain

PROGRAMS = "munged slurmctld slurmd srun sshd ssh-keygen ip nsenter unshare mpirun ps".split()
HERE = Path(__file__).parent


def why_not() -> str | None:
    """What is missing for the tests of this folder."""
    if os.geteuid() != 0:
        return "they need root, to make namespaces"
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        return f"missing: {', '.join(missing)} (make setup-tests installs Debian's packages)"
    tried = subprocess.run(["unshare", "--net", "--mount", "--pid", "--fork", "true"], capture_output=True, text=True)
    return None if tried.returncode == 0 else f"namespaces cannot be made here: {tried.stderr.strip()}"


REASON = why_not()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The tests of this folder run only where they are asked for: make test-launchers."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.cluster)
            if REASON is not None:
                item.add_marker(pytest.mark.skip(f"the cluster's tests are skipped: {REASON}"))


@pytest.fixture(scope="session")
def hosts(request: pytest.FixtureRequest) -> Iterator[Hosts]:
    """host1, host2 and host3, nodes of a Slurm. Everything is gone when the tests end, however they end."""
    with ExitStack() as stack:
        # In /tmp, which all may enter, as munged insists.
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="hosts-", dir="/tmp"))
        started = stack.enter_context(Hosts(Path(folder), 3))
        start_slurm(started)
        yield started
        with request.config.pluginmanager.getplugin("times").counted_for("tests/cluster/conftest.py::hosts"):
            stack.close()  # here, all that Slurm has started is counted


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Slurm's messages are added to the report of a failure."""
    report = yield
    if report.failed and "hosts" in getattr(item, "funcargs", {}):
        report.sections.append(("Slurm", logs_of_slurm(item.funcargs["hosts"])))
    return report


@pytest.fixture(autouse=True)
def nothing_stays_behind(hosts: Hosts) -> Iterator[None]:
    """After a test no job is in the queue, and none of its processes on any host. What is left is ended, so that other tests do
    not suffer.
    """
    yield
    deadline = time.monotonic() + 15  # orted and slurmstepd outlive their jobs by a moment
    while True:
        jobs = hosts.run(["squeue", "--noheader"]).out.splitlines()
        left = hosts.processes("hvdtrain", "orted", "torchrun", "horovodrun", "slurmstepd")
        if not jobs and not left:
            return
        if time.monotonic() > deadline:
            hosts.run(["scancel", "--user=root"])
            hosts.run(["kill", f"-{signal.SIGKILL.value}", *(line.split()[0] for line in left)])
            wait_until_idle(hosts, patience=60)
            pytest.fail(f"left on the hosts: {jobs + left}")
        time.sleep(0.3)


@pytest.fixture
def work(tmp_path: Path, corpus: Path) -> Path:
    """A folder with config.py, the toy config, whose corpus is there and whose model goes to exp/."""
    for part in ("train.hdf", "dev.hdf"):
        (tmp_path / part).symlink_to(corpus / part)
    (tmp_path / "config.py").write_text(f"{TOY.read_text()}\nmodel = 'exp/model'\n")
    return tmp_path


@pytest.fixture(scope="session")
def alone(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    """The scores that one process reaches, without any launcher."""
    folder = tmp_path_factory.mktemp("alone")
    finished = hvdtrain(TOY, {"corpus": corpus, "model": folder / "model"})
    assert finished.status == 0, finished.err
    return scores(folder)
