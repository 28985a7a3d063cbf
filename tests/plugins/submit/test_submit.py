"""Job scripts: written for every scheduler and launcher, read by the shell, and the plain one run for real."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

import jsonschema
import pytest
import yaml
from launching import ROOT, TOY, Finished, refused

from hvdtrain.plugins.submit.__main__ import main
from hvdtrain.plugins.submit.job import choose_launcher, parse_seconds
from hvdtrain.version import __version__

G2P = "configs/g2p.py"
TORCH = ["++torch_distributed", "{}"]
HOROVOD = ["++use_horovod", "1"]
SIZE = ["--nodes", "2", "--tasks-per-node", "4"]
RICH = [
    *SIZE,
    *"--gpus-per-node 4 --cpus-per-task 8 --memory 64G --time 1-12:00:00 --interface eth0 --queue gpu --account me".split(),
]

SWEEP = ["--sweep", "learning_rate=0.001,0.003", "--sweep", "optimizer={'class':'sgd'},{'class':'adam','eps':1e-8}"]

# What sbatch and qsub document, of what we use: a script with another option would be refused.
SBATCH = "job-name nodes ntasks-per-node cpus-per-task gpus-per-node mem time partition account output".split()
SBATCH += "signal requeue open-mode no-kill array".split()
QSUB = "-S -N -wd -j -o -pe -l -q -A -notify -r -t".split()
PBS = "-S -N -l -q -A -o -j -k -r -J".split()
BSUB = "-J -n -R -gpu -W -q -P -o -r -Q".split()

KUBERNETES = ["--scheduler", "kubernetes", "--image", "registry.example/hvdtrain:1"]
SCHEMAS = json.loads((ROOT / "tests/plugins/submit/kubeflow_schemas.json").read_text())


OF_A_USER = {**os.environ, "OMPI_MCA_rmaps_base_oversubscribe": "1", "OMP_NUM_THREADS": "1"}
OF_A_USER |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def submit(*arguments: object) -> Finished:
    """Run the tool in this process, which has the frameworks already that configs import."""
    with redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as err:
        status = main([*map(str, arguments)])
    return Finished(status, out.getvalue(), err.getvalue(), 0.0)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--scheduler", "slurm", *RICH, "--doctor", *HOROVOD],
        ["--scheduler", "slurm", *RICH, "--launcher", "srun", *HOROVOD],
        ["--scheduler", "slurm", "--time", "30"],
        ["--scheduler", "slurm", *SIZE, "--no-requeue", "--setup", "module load openmpi", "--option=--constraint=h100", *HOROVOD],
        ["--scheduler", "slurm", *RICH, "--max-restarts", "3", *TORCH],
        ["--scheduler", "slurm", "--tasks-per-node", "4", "--max-restarts", "3", *TORCH],
        ["--scheduler", "slurm", *RICH, "--doctor", *SWEEP, *HOROVOD],
        ["--scheduler", "slurm", "--tasks-per-node", "2", *SWEEP, *TORCH],
        ["--scheduler", "sge", *RICH, *SWEEP, *HOROVOD],
        ["--scheduler", "pbs", *SIZE, "--no-requeue", *SWEEP, *HOROVOD],
        ["--scheduler", "lsf", *SIZE, *SWEEP, *HOROVOD],
        ["--scheduler", "sge", *RICH, "--doctor", *HOROVOD],
        ["--scheduler", "sge", *SIZE, "--no-requeue", *HOROVOD],
        ["--scheduler", "pbs", *RICH, "--doctor", *HOROVOD],
        ["--scheduler", "pbs", "--time", "30"],
        ["--scheduler", "pbs", *SIZE, "--launcher", "mpirun", "--no-requeue", *TORCH],
        ["--scheduler", "lsf", *RICH, "--doctor", *HOROVOD],
        ["--scheduler", "lsf", "--tasks-per-node", "4", "--no-requeue", "--time", "30", *TORCH],
        ["--scheduler", "mpi", *SIZE, "--cpus-per-task", "8", "--interface", "eth0", "--hosts", "h1,h2", *HOROVOD],
        ["--scheduler", "mpi", "--tasks-per-node", "2", "--doctor", *HOROVOD],
        ["--scheduler", "mpi", "--tasks-per-node", "2", *HOROVOD, "++model", "a folder/it's $HOME/model"],
    ],
    ids=lambda arguments: "_".join(re.sub(r"\W", "", word) for word in arguments)[:60],
)
def test_scripts_that_the_shell_and_the_schedulers_read(arguments: list[str], tmp_path: Path) -> None:
    written = submit(G2P, *arguments)
    assert written.status == 0, written.err
    script = written.out
    assert f"hvdtrain {G2P}" in script
    (tmp_path / "job.sh").write_text(script)
    read = subprocess.run(["bash", "-n", tmp_path / "job.sh"], capture_output=True, text=True)
    assert read.returncode == 0, read.stderr
    if shutil.which("shellcheck"):
        checked = subprocess.run(["shellcheck", "-S", "warning", tmp_path / "job.sh"], capture_output=True, text=True)
        assert checked.returncode == 0, checked.stdout
    for option in re.findall(r"^#SBATCH --([\w-]+)", script, flags=re.MULTILINE):
        assert option in [*SBATCH, "constraint"], option
    for option in re.findall(r"^#\$ (-\w+)", script, flags=re.MULTILINE):
        assert option in QSUB, option
    for option in re.findall(r"^#PBS (-\w+)", script, flags=re.MULTILINE):
        assert option in PBS, option
    for option in re.findall(r"^#BSUB (-\w+)", script, flags=re.MULTILINE):
        assert option in BSUB, option
    across_hosts = "--nodes" in arguments and "mpirun" in script
    assert ("keepalive" in script) == across_hosts


def test_slurm_scripts_say_what_a_person_would_have_said() -> None:
    script = submit(G2P, "--scheduler", "slurm", *RICH, *HOROVOD).out
    for line in (
        "#SBATCH --nodes=2",
        "#SBATCH --ntasks-per-node=4",
        "#SBATCH --gpus-per-node=4",
        "#SBATCH --cpus-per-task=8",
        "#SBATCH --time=36:00:00",
        "#SBATCH --partition=gpu",
        f"cd {ROOT} || exit",
    ):
        assert line in script.splitlines()
    for part in (
        "#SBATCH --signal=B:USR1@300",
        "#SBATCH --requeue",
        "#SBATCH --open-mode=append",
        "export OMP_NUM_THREADS=8",
        "export NCCL_SOCKET_IFNAME=eth0",
        "mpirun -np 8 -bind-to none -map-by slot",
        "-x OMP_NUM_THREADS -x NCCL_SOCKET_IFNAME",
        "--mca oob_tcp_keepalive_time 5",
        f"{sys.executable} -m hvdtrain {G2P} ++use_horovod 1 &",
        'scontrol requeue "$SLURM_JOB_ID"',
    ):
        assert part in script
    torchrun = submit(G2P, "--scheduler", "slurm", *SIZE, "--doctor", *TORCH).out
    assert 'master=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)' in torchrun.splitlines()
    assert f"-m hvdtrain doctor --no-measure {G2P} ++torch_distributed '{{}}' || exit" in torchrun
    assert "no-kill" not in torchrun
    elastic = submit(G2P, "--scheduler", "slurm", *SIZE, "--max-restarts", "3", *TORCH).out
    assert "#SBATCH --no-kill  # the other nodes continue if one is lost" in elastic.splitlines()
    for part in (
        "srun --no-kill --ntasks=2 --ntasks-per-node=1",
        "--nnodes=1:2 --nproc-per-node=4 --max-restarts=3",
        "--rdzv-conf=",
    ):
        assert part in elastic.replace(" \\\n        ", " ")  # lines are broken where the paths in them ask for it
    assert "srun --mpi=pmix" in submit(G2P, "--scheduler", "slurm", "--launcher", "srun", *SIZE, *HOROVOD).out


def test_the_same_options_mean_the_same_to_every_scheduler() -> None:
    """64G of memory, 4 GPUs and 4 ranks with 8 cores each on each of 2 hosts; 36 hours."""

    def head(scheduler: str, *more: str) -> list[str]:
        written = submit(G2P, "--scheduler", scheduler, *RICH, *more, *HOROVOD)
        assert written.status == 0, written.err
        return written.out.splitlines()

    expected = {
        "slurm": ["#SBATCH --mem=64G", "#SBATCH --cpus-per-task=8", "#SBATCH --ntasks-per-node=4", "#SBATCH --gpus-per-node=4"],
        "sge": ["#$ -pe mpi 64", "#$ -l h_vmem=2G", "#$ -l h_rt=36:00:00 -l s_rt=35:55:00"],  # 32 slots a host, 2G each
        "pbs": ["#PBS -l select=2:ncpus=32:mpiprocs=4:ngpus=4:mem=64gb", "#PBS -l place=scatter", "#PBS -l walltime=36:00:00"],
        "lsf": ["#BSUB -n 64", '#BSUB -R "span[ptile=32]"', '#BSUB -R "rusage[mem=64GB/host]"', "#BSUB -W 36:00"],
    }
    for scheduler, lines in expected.items():
        written = head(scheduler)
        assert not [line for line in lines if line not in written], scheduler
        assert "export OMP_NUM_THREADS=8  # per rank" in written
    assert '#BSUB -gpu "num=4/host:j_exclusive=yes"' in head("lsf")
    pod = yaml.safe_load(submit(G2P, *KUBERNETES, *RICH, *HOROVOD).out)["spec"]["mpiReplicaSpecs"]["Worker"]["template"]["spec"]
    assert pod["containers"][0]["resources"]["limits"] == {"cpu": 32, "memory": "64Gi", "nvidia.com/gpu": 4}
    for scheduler, line in (
        ("slurm", "#SBATCH --cpus-per-task=2"),
        ("sge", "#$ -pe mpi 8"),  # a slot for each rank
        ("pbs", "#PBS -l select=2:ncpus=8:mpiprocs=4"),
        ("lsf", '#BSUB -R "span[ptile=8]"'),
    ):
        assert line in submit(G2P, "--scheduler", scheduler, *SIZE, *HOROVOD).out.splitlines()  # cores are always written


def test_manifests_are_what_the_published_schemas_allow(tmp_path: Path) -> None:
    """Kubeflow's own schemas, without fields that they do not know: Kubernetes would drop those, or refuse the manifest."""

    def strict(schema: object) -> object:
        if isinstance(schema, list):
            return [strict(each) for each in schema]
        if not isinstance(schema, dict):
            return schema
        closed = {"additionalProperties": False} if "properties" in schema else {}
        return {**closed, **{name: strict(each) for name, each in schema.items()}}

    volume = ["--volume", "data:/data", "--folder", "/data/my training"]
    for arguments, kind in (
        ([*RICH, *volume, "--doctor", *HOROVOD], "MPIJob"),
        ([*SIZE, "--no-requeue", "--setup", "export A='b: c # d'", *HOROVOD], "MPIJob"),
        ([*SIZE, "--launcher", "mpirun", *TORCH], "MPIJob"),
        ([*RICH, *volume, *TORCH], "PyTorchJob"),
        (["--tasks-per-node", "2", "--name", "Two_ranks.v1", "--no-requeue", *TORCH], "PyTorchJob"),
    ):
        written = submit(G2P, *KUBERNETES, *arguments)
        assert written.status == 0, written.err
        manifest = yaml.safe_load(written.out)
        assert (manifest["kind"], manifest["apiVersion"]) == (kind, SCHEMAS[kind]["apiVersion"])
        jsonschema.Draft202012Validator(strict(SCHEMAS[kind]["schema"])).validate(manifest)
        assert re.fullmatch(r"[a-z][a-z0-9-]{0,39}", manifest["metadata"]["name"])
        specs = next(value for name, value in manifest["spec"].items() if name.endswith("ReplicaSpecs"))
        for role, spec in specs.items():
            command = spec["template"]["spec"]["containers"][0].get("command")
            assert (command is None) == (role == "Worker" and kind == "MPIJob")  # the operator starts sshd there
            if command is not None:
                (tmp_path / "run.sh").write_text(command[2])
                assert subprocess.run(["bash", "-n", tmp_path / "run.sh"]).returncode == 0
    manifest["spec"]["pytorchReplicaSpecs"]["Master"]["replica"] = 1
    with pytest.raises(jsonschema.ValidationError, match="'replica' was unexpected"):
        jsonschema.Draft202012Validator(strict(SCHEMAS[kind]["schema"])).validate(manifest)
    alone = yaml.safe_load(submit(G2P, *KUBERNETES, "--time", "60").out)
    assert (alone["kind"], alone["apiVersion"], alone["spec"]["activeDeadlineSeconds"]) == ("Job", "batch/v1", 3300)
    assert "python -m hvdtrain configs/g2p.py &" in alone["spec"]["template"]["spec"]["containers"][0]["command"][2]


def test_mistakes_are_reported_before_anything_is_submitted(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = submit(G2P, "--scheduler", "slurm", "--submit", *SIZE, "++learning_rat", "1", "++num_epochs", "none")
    assert wrong.status == 2
    assert wrong.out == ""
    assert wrong.names("learning_rat", "learning_rate?")
    assert wrong.names("num_epochs", "None")
    options = submit(
        G2P, *"--scheduler mpi --nodes 2 --tasks-per-node 4 --gpus-per-node 2 --time soon --hosts h1 --launcher srun".split()
    )
    assert options.status == 2
    wrong_options = ("--gpus-per-node", "2"), ("--time", "'soon'"), ("--time", "mpi"), ("--hosts", "h1"), ("--launcher", "srun")
    for key, got in (*wrong_options, ("use_horovod", "8 ranks")):
        assert options.names(key, got), key
    for arguments, problems in {
        ("--scheduler mpi --memory much --queue gpu", ()): {"--memory": "'much'", "--queue": "mpi"},
        ("--scheduler kubernetes --nodes 2 --volume data --option x", tuple(TORCH)): {"--image": "none", "--volume": "data"},
        ("--scheduler pbs --nodes 2", tuple(TORCH)): {"--scheduler": "pbs"},
        ("--scheduler slurm --nodes 2 --max-restarts 2", tuple(HOROVOD)): {"--max-restarts": "mpirun and slurm"},
        ("--scheduler slurm --time 5 --stop-before 300", ()): {"--stop-before": "300"},
        ("--scheduler slurm --name j#b --hosts h1;h2", ("--setup", "a\nb")): {
            "--name": "'j#b'",
            "--hosts": "'h1;h2'",
            "--setup": "'a\\nb'",
        },
        ("--scheduler slurm", ("++model", '[1,\n"$(b)"]')): {"++model": "'[1,\\n\"$(b)\"]'"},
    }.items():
        refused = submit(G2P, *arguments[0].split(), *arguments[1])
        assert refused.status == 2
        for key, got in problems.items():
            assert refused.names(key, got), refused.err
    monkeypatch.setenv("PATH", "/nowhere")
    nowhere = submit(G2P, "--scheduler", "sge", "--submit")
    assert nowhere.status == 1
    assert "--submit: expected qsub in PATH, got none" in nowhere.err


def test_launchers_go_with_the_keys() -> None:
    assert choose_launcher(None, 1, use_horovod=True, torch_distributed=False) == "python"
    assert choose_launcher("srun", 4, use_horovod=True, torch_distributed=False) == "srun"
    assert choose_launcher("mpirun", 4, use_horovod=False, torch_distributed=True) == "mpirun"
    with refused("--launcher: conflict"):
        choose_launcher("torchrun", 4, use_horovod=True, torch_distributed=False)
    with refused("--launcher: conflict"):
        choose_launcher("python", 4, use_horovod=True, torch_distributed=False)
    for text in ("soon", "0", "1:2:3:4", "-5"):
        with pytest.raises(ValueError, match=re.escape(text)):
            parse_seconds(text)


@pytest.mark.parametrize("scheduler", ["pbs", "lsf"])
def test_scripts_stop_the_training_before_the_limit(tmp_path: Path, scheduler: str) -> None:
    """Neither PBS nor LSF signals a script in time, so it signals itself. A stand-in for Python ends as the trainer does."""
    trainer = tmp_path / "python"
    trainer.write_text("#!/bin/bash\ntrap 'kill $!; exit 75' USR1\ntouch started; sleep 1000 & wait\n")
    (tmp_path / "qsub").write_text(f'#!/bin/bash\necho "$@" > {tmp_path}/resubmitted\n')
    for program in (trainer, tmp_path / "qsub"):
        program.chmod(0o755)
    written = submit(G2P, "--scheduler", scheduler, "--time", "30", "--python", trainer, "--folder", tmp_path)
    (tmp_path / "job.sh").write_text(written.out.replace("sleep 1500 &", "(until [ -e started ]; do sleep 0.1; done) &"))
    assert "sleep 1500 &" in written.out
    path = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", tmp_path / "job.sh"], env=path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 75, done.stderr  # LSF requeues a job with this status
    if scheduler == "pbs":
        assert (tmp_path / "resubmitted").read_text() == f"{tmp_path}/job.sh\n"


@pytest.mark.slow
def test_the_plain_script_trains(corpus: Path, tmp_path: Path) -> None:
    """mpirun on this host, the doctor before it; the script is run as somebody would run it."""
    written = submit(
        *[TOY, "--scheduler", "mpi", "--tasks-per-node", "2", "--doctor", "--out", tmp_path / "job.sh"],
        *["++corpus", corpus, "++model", tmp_path / "model", *HOROVOD],
    )
    assert written.out == f"wrote {tmp_path}/job.sh\n"
    done = subprocess.run(["bash", tmp_path / "job.sh"], env=OF_A_USER, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 problems" in done.stdout
    assert f"hvdtrain {__version__}, torch: 2 ranks, 2 on" in done.stdout
    assert (tmp_path / "model.001.pt").exists()


@pytest.mark.slow
def test_the_plain_script_stops_with_a_checkpoint(corpus: Path, tmp_path: Path) -> None:
    """SIGTERM to the script, as from a host that shuts down, becomes what mpirun passes on; the script's status is 75."""
    submit(
        *[TOY, "--scheduler", "mpi", "--tasks-per-node", "2", "--out", tmp_path / "job.sh"],
        *["++corpus", corpus, "++model", tmp_path / "model", "++num_epochs", "4000", *HOROVOD],
    )
    script = subprocess.Popen(["bash", tmp_path / "job.sh"], env=OF_A_USER, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 100
    while not (tmp_path / "scores.jsonl").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    script.terminate()
    _, err = script.communicate(timeout=60)
    assert script.returncode == 75, err
    assert "stopped by SIGUSR1 in epoch" in err
