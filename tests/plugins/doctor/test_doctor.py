"""The doctor, in surroundings that are healthy and in some that were broken for real."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from inside import run_inside
from launching import ROOT, TOY, Finished, launch
from terminal import Terminal, screen

from hvdtrain.plugins.doctor import host as doctor_config
from hvdtrain.plugins.doctor.__main__ import main
from hvdtrain.plugins.doctor.findings import Finding
from hvdtrain.plugins.doctor.host import check_environment
from hvdtrain.plugins.doctor.network import read_interfaces
from hvdtrain.plugins.doctor.packages import AT_LEAST
from hvdtrain.settings import read_settings

DOCTOR = ["-m", "hvdtrain", "doctor"]

as_root = pytest.mark.skipif(
    os.geteuid() != 0 or subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode != 0,
    reason="mounting takes root",
)


@pytest.fixture(scope="module")
def toy(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The arguments for a config of torch: TensorFlow, which takes seconds, is not looked at then."""
    model = tmp_path_factory.mktemp("doctor") / "model"
    return [
        str(argument)
        for argument in (
            TOY,
            "++corpus",
            corpus,
            "++model",
            model,
            "++use_horovod",
            "1",
        )
    ]


def doctor_of(*arguments: object) -> Finished:
    return run_inside(["doctor", *arguments])


def lines_about(finished: Finished, about: str) -> list[str]:
    """The level of every line about something, and the line."""
    return [line for line in finished.out.splitlines() if re.match(rf"\w+ +{re.escape(about)}: ", line)]


def levels(finished: Finished) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for line in finished.out.splitlines()[:-1]:
        level, about = re.match(r"(\w+) +(.*?): ", line).groups()
        found.setdefault(about, set()).add(level)
    return found


@pytest.mark.slow
def test_a_healthy_host_and_config(toy: list[str], corpus: Path) -> None:
    finished = doctor_of("--json", *toy, "++evaluated", "True")
    assert finished.status == 0, finished.out + finished.err
    [report] = json.loads(finished.out)
    assert report["host"] == socket.gethostname()
    texts = {finding["about"]: finding["text"] for finding in report["findings"]}
    assert all(finding["level"] != "problem" for finding in report["findings"])
    assert re.match(r"built with MPI, Gloo", texts["Horovod for torch"])
    assert re.match(r"mpirun of Open MPI (\d)\S+, Horovod of Open MPI \1\S+, mpi4py of Open MPI \1", texts["MPI"])
    assert texts["data"].startswith("dev: 101 sequences")
    assert report["facts"]["Python"] == sys.version.split()[0]
    assert report["facts"][str(corpus / "train.hdf")] == doctor_config.fingerprint(corpus / "train.hdf")
    assert "Horovod for tensorflow" not in texts  # the config is of torch


@pytest.mark.slow
def test_mistakes_in_the_config_and_its_data(corpus: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut.hdf"
    cut.write_bytes((corpus / "train.hdf").read_bytes()[:5000])
    shutil.copy(corpus / "dev.hdf", tmp_path)
    toy = [TOY, "++corpus", tmp_path, "++model", tmp_path / "model", "++evaluated", "True"]
    broken = doctor_of(*toy, "++part", "cut.hdf")
    assert broken.status == 2, broken.out
    [line] = [line for line in lines_about(broken, "data") if line.startswith("problem")]
    assert str(cut) in line
    assert broken.out.splitlines()[-1].startswith("1 problem, ")
    given = {"corpus": str(tmp_path), "model": str(tmp_path / "model"), "learning_rat": "0.1", "max_seqs": "few"}
    settings, found = doctor_config.read_config([TOY], given)
    assert settings is None
    assert [(one.level, one.about) for one in found] == [("problem", "config")] * 2
    assert "did you mean learning_rate?" in found[0].text + found[1].text


@pytest.mark.slow
@as_root
def test_a_host_where_nothing_is_right(toy: list[str], tmp_path: Path) -> None:
    """A small /dev/shm, a full disk, one core, few open files, a taken port, interfaces that are not there."""
    script = tmp_path / "broken.sh"
    script.write_text(
        "mount -t tmpfs -o size=2m tmpfs /dev/shm\n"
        f"mkdir {tmp_path}/full && mount -t tmpfs -o size=1m tmpfs {tmp_path}/full\n"
        f"cat /dev/zero >{tmp_path}/full/zeros 2>/dev/null\n"
        "ulimit -n 256\n"
        f"exec taskset -c 0 {sys.executable} -m hvdtrain.plugins.doctor {' '.join(toy)}\n"
    )
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        environment = {
            "TMPDIR": f"{tmp_path}/full",
            "NCCL_SOCKET_IFNAME": "nosuch",
            "HOROVOD_GLOO_IFACE": "nope0",
            "OMPI_MCA_btl_tcp_if_include": "10.255.1.0/24",
            "MASTER_ADDR": "nowhere.invalid",
            "MASTER_PORT": str(port),
            "WORLD_SIZE": "4",
        }
        done = subprocess.run(
            ["unshare", "-m", "--propagation", "slave", "bash", str(script)],
            env={**os.environ, **environment},
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=240,
        )
    finished = Finished(done.returncode, done.stdout, done.stderr, 0.0)
    assert finished.status == 2, finished.out + finished.err
    found = levels(finished)
    for about in (
        "shared memory",
        "disk for temporary files",
        "NCCL_SOCKET_IFNAME",
        "HOROVOD_GLOO_IFACE",
        "MASTER_ADDR",
        "MASTER_PORT",
    ):
        assert "problem" in found[about], about
    assert found["OMPI_MCA_btl_tcp_if_include"] == {"problem"}
    for about in ("open files", "WORLD_SIZE"):
        assert found[about] == {"warning"}, about
    if (os.cpu_count() or 1) > 1:
        assert found["cores"] == {"warning"}
    assert found["packages"] == {"ok"}


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("mpirun.mpich"), reason="MPICH is not installed")
def test_an_mpirun_of_another_mpi(toy: list[str], tmp_path: Path) -> None:
    """A real MPICH: found before it is used, and found when it has started two processes that do not see each other."""
    (tmp_path / "mpirun").symlink_to(shutil.which("mpirun.mpich"))
    path = f"{tmp_path}:{os.environ['PATH']}"
    alone = launch([*DOCTOR, *toy], environment={"PATH": path})
    assert alone.status == 2
    [line] = lines_about(alone, "MPI")
    assert re.match(r"problem +MPI: expected one MPI, got mpirun of MPICH 4\S+, Horovod of Open MPI 4", line)
    command = ["mpirun.mpich", "-np", "2", sys.executable, *DOCTOR, "--no-measure", *toy]
    started = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert started.returncode == 2, started.stdout + started.stderr
    assert re.search(r"problem +ranks: .* expected the 2 processes that mpirun started, got 1 from Horovod", started.stdout)
    assert started.stdout.count(" packages: ") == 1  # told once


@pytest.mark.slow
def test_two_ranks_measure_what_is_between_them(toy: list[str]) -> None:
    finished = launch([*DOCTOR, "--seconds", "0.3", "--predict", "2,8:4", *toy], ranks=2, timeout=240)
    assert finished.status == 0, finished.out + finished.err
    [speed] = lines_about(finished, "all-reduce")
    latency, bandwidth = map(int, re.search(r"(\d+) us for 4 bytes, (\d+) MB/s through each rank for 64.0 MB", speed).groups())
    assert 1 <= latency < 5e6
    assert 1 <= bandwidth < 1e6
    [step] = lines_about(finished, "training step")
    alone, together, share = re.search(r": ([\d.]+) ms without exchange, ([\d.]+) ms with it, which is (\d+)%", step).groups()
    assert int(share) == pytest.approx(max(0.0, 100 * (1 - float(alone) / float(together))), abs=25)  # of rounded numbers
    assert lines_about(finished, "ranks") == ["ok       ranks: OMPI_COMM_WORLD_SIZE = 2"]
    predicted = finished.out[finished.out.index("prediction: ") :].splitlines()[:-1]
    assert int(re.search(r"(\d+) ok$", finished.out).group(1)) < 25, "the prediction counts as one finding"
    assert re.search(r"measured on 2 ranks on 1 host of \d+ cores?: a step computes [\d.e-]+ ms", predicted[0])
    assert re.search(r"[\d.e-]+ ms for 2.0 MB; \d+ bytes of gradients travel in [\d.e-]+ ms and make a step ", predicted[1])
    assert [line.split()[0] for line in predicted[3:11]] == ["2", *["2"] * 3, *["8:4*"] * 4]
    assert any(
        re.search(r"8:4 ranks: .* is as fast as any: [\d.e+-]+ times the speed of one rank, limited by ", line)
        for line in predicted
    )
    assert any("between hosts, the network will be slower" in line for line in predicted)
    assert not list(Path(toy[4]).parent.iterdir())  # nothing was trained


@pytest.mark.slow
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="one core is all there is")
def test_ranks_on_one_core(toy: list[str]) -> None:
    """As with an mpirun that binds all ranks to the first core of a host; here they inherit it from taskset."""
    command = ["taskset", "-c", "1", "mpirun", "-np", "2", "--bind-to", "none", "--oversubscribe", sys.executable, *DOCTOR]
    environment = {**os.environ, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    done = subprocess.run(
        [*command, "--no-measure", *toy], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 2, done.stdout + done.stderr
    assert re.search(rf"problem +cores: rank 0, rank 1 share 1 core \(1\) of {os.cpu_count()}", done.stdout)


@pytest.mark.slow
def test_ranks_that_do_not_find_each_other_end_with_a_report(toy: list[str], tmp_path: Path) -> None:
    """Rank 1 sleeps instead of connecting, as behind a firewall."""
    late = tmp_path / "late.py"
    late.write_text(
        "import os, runpy, sys, time\n"
        "if os.environ['OMPI_COMM_WORLD_RANK'] == '1':\n"
        "    time.sleep(200)\n"
        "sys.argv[0] = 'doctor'\n"
        "runpy.run_module('hvdtrain.plugins.doctor', run_name='__main__')\n"
    )
    finished = launch([str(late), "--patience", "4", *toy], ranks=2, timeout=150, environment={"PYTHONPATH": str(ROOT)})
    assert finished.status == 2, finished.out + finished.err
    assert re.search(r"problem +ranks: expected 2 ranks to find each other within 4 s, got no answer", finished.out)
    assert " packages: " in finished.out


def test_a_prediction_needs_a_config() -> None:
    finished = doctor_of("--predict", "2")
    assert (finished.status, finished.err) == (2, "predict_ranks: expected a config, got none\n")


def test_the_help_tells_the_exit_statuses_and_a_mistake_in_the_command_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["--help"])
    assert "exit status, for job scripts" in capsys.readouterr().out
    wrong = doctor_of("++max_seqs", "3")
    assert wrong.status == 2
    assert "expected a config file first" in wrong.err


# What the environment looks like in the how-to texts that people start from, and where it deceives.
SNIPPETS = {
    "torchrun on one host": ({"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "localhost"}, []),
    "a node's number taken for a rank": ({"RANK": "2", "WORLD_SIZE": "2", "LOCAL_RANK": "3"}, ["problem RANK"]),
    "local_rank in lower case": ({"RANK": "0", "WORLD_SIZE": "2", "local_rank": "0"}, ["warning local_rank"]),
    "srun, with a stale MASTER_ADDR": (
        {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "1", "MASTER_ADDR": "old"},
        [],
    ),
    "a stale MASTER_ADDR alone": ({"MASTER_ADDR": "old"}, ["warning MASTER_ADDR"]),
    "a script that only half became a Slurm task": ({"SLURM_PROCID": "1", "WORLD_SIZE": "8"}, ["warning WORLD_SIZE"]),
    "mpirun inside torchrun's environment": (
        {"RANK": "0", "WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "8"},
        ["problem launchers"],
    ),
    "torchrun with restarts": ({"RANK": "0", "WORLD_SIZE": "2", "TORCHELASTIC_MAX_RESTARTS": "3"}, ["warning torchrun"]),
    "mpirun across hosts without keepalive": (
        {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "8", "OMPI_MCA_orte_num_nodes": "2"},
        ["warning mpirun"],
    ),
    "a rank that is no number": ({"RANK": "SLURM_PROCID", "WORLD_SIZE": "4"}, ["problem RANK"]),
}


@pytest.mark.parametrize("name", SNIPPETS)
def test_environments_of_the_texts(name: str) -> None:
    environ, expected = SNIPPETS[name]
    found = check_environment(environ)
    assert [f"{each.level} {each.about}" for each in found if each.level != "ok"] == expected
    assert all(each.fix for each in found if each.level != "ok")


def test_a_used_rendezvous_file_is_found(tmp_path: Path) -> None:
    used = tmp_path / "init"
    environ = {"DIST_INIT_METHOD": f"file://{used}"}
    assert check_environment(environ) == []
    used.touch()
    assert check_environment(environ) == [
        Finding(
            "warning", "DIST_INIT_METHOD", f"{used} is left over from an earlier run", f"rm {used}, or a new name for every run"
        )
    ]


def test_interfaces_are_those_of_the_kernel() -> None:
    names = [each.name for each in read_interfaces()]
    assert names == [name for _, name in socket.if_nameindex()]
    [loopback] = [each for each in read_interfaces() if each.name == "lo"]
    assert loopback.address == "127.0.0.1/8"
    assert not loopback.leads_out


def test_oldest_versions_are_those_of_the_extras() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    for package, oldest in AT_LEAST.items():
        assert re.search(rf'"{package}[>=]=([\d.]+)"', text)[1] == oldest, package


def test_files_of_nested_datasets(corpus: Path, tmp_path: Path) -> None:
    train, dev, even = (str(corpus / f"{name}.hdf") for name in ("train", "dev", "even"))
    overrides = {
        "corpus": str(corpus),
        "model": str(tmp_path / "model"),
        "train": repr({"class": "ConcatDataset", "datasets": [{"class": "HDFDataset", "files": [train]}, {"files": dev}]}),
        "dev": even,
    }
    settings = read_settings([TOY], overrides)
    assert [str(path) for path in doctor_config.hdf_files(settings)] == [train, dev, even]


@pytest.mark.slow
def test_in_a_terminal_lines_are_broken_between_words(toy: list[str], tmp_path: Path) -> None:
    terminal = Terminal(tmp_path, [*DOCTOR, *toy], columns=60)
    assert terminal.read_to_end() in (0, 2), terminal.text
    report = screen(terminal.text)
    [packages] = [number for number, line in enumerate(report) if line.startswith("ok       packages: ")]
    assert len(report[packages]) <= 60
    assert re.match(r" {9}\S", report[packages + 1])
