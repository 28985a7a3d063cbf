"""A sweep over keys as a job array: hvdtrain submit --sweep."""

import itertools
import json
import os
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
import yaml
from launching import ROOT, Finished

from hvdtrain.plugins.submit.__main__ import main
from hvdtrain.plugins.submit.schedulers import SCHEDULERS

INDEX = {name: scheduler.array_index or ("", 0) for name, scheduler in SCHEDULERS.items()}

G2P = "configs/g2p.py"
SIZE = ["--nodes", "2", "--tasks-per-node", "4"]
SWEEP = ["--sweep", "learning_rate=0.001,0.003", "--sweep", "optimizer={'class':'sgd'},{'class':'adam','eps':1e-8}"]
KUBERNETES = ["--scheduler", "kubernetes", "--image", "registry.example/hvdtrain:1"]
HOROVOD, TORCH = ["++use_horovod", "1"], ["++torch_distributed", "{}"]

MODELS = [
    f"data/g2p/exp/learning_rate={rate},optimizer={optimizer}/model"
    for rate, optimizer in itertools.product(("0.001", "0.003"), ("class_sgd", "class_adam_eps_1e-8"))
]


def submit(*arguments: object) -> Finished:
    """Run the command in this process."""
    with redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as err:
        status = main([*map(str, arguments)])
    return Finished(status, out.getvalue(), err.getvalue(), 0.0)


def runs_of(script: str, scheduler: str, numbers: range, tmp_path: Path) -> list[list[str]]:
    """What a script starts as each job of its array, found out by a stand-in for Python that writes down its arguments."""
    stand_in = tmp_path / "python"
    stand_in.write_text(f"#!/bin/bash\n{sys.executable} -c 'import json, sys; print(json.dumps(sys.argv[1:]))' \"$@\"\n")
    stand_in.chmod(0o755)
    found = []
    for number in numbers:
        path = tmp_path / "job.sh"
        path.write_text(script)
        environment = {**os.environ, INDEX[scheduler][0]: str(number)}
        done = subprocess.run(["bash", path], env=environment, capture_output=True, text=True, check=True)
        found.append(json.loads(done.stdout.splitlines()[-1]))
    return found


@pytest.mark.parametrize("scheduler", ["slurm", "sge", "pbs", "lsf", "kubernetes"])
def test_each_job_of_the_array_trains_its_run(tmp_path: Path, scheduler: str) -> None:
    more = [*KUBERNETES[2:], "--folder", ROOT] if scheduler == "kubernetes" else []
    options = ["--scheduler", scheduler, *more, "--no-requeue", "--python", tmp_path / "python"]
    written = submit(G2P, *options, *SWEEP, "++model", "data/g2p/exp/model")
    assert written.status == 0, written.err
    script, numbers = written.out, range(1, 5)
    if scheduler == "kubernetes":
        manifest = yaml.safe_load(script)
        assert manifest["spec"]["completionMode"] == "Indexed"
        assert manifest["spec"]["completions"] == manifest["spec"]["parallelism"] == 4
        script, numbers = manifest["spec"]["template"]["spec"]["containers"][0]["command"][2], range(4)
    array = {"slurm": "#SBATCH --array=1-4", "sge": "#$ -t 1-4", "pbs": "#PBS -J 1-4", "lsf": '#BSUB -J "g2p[1-4]"'}
    assert array.get(scheduler, "#!/bin/bash") in script.splitlines()
    started = runs_of(script, scheduler, numbers, tmp_path)
    keys = [dict(zip(words[5::2], words[6::2], strict=True)) for words in started]
    assert all(words[:5] == ["-m", "hvdtrain", G2P, "++model", "data/g2p/exp/model"] for words in started)
    assert [of_run["++model"] for of_run in keys] == MODELS  # the later one of two wins
    assert [of_run["++learning_rate"] for of_run in keys] == ["0.001", "0.001", "0.003", "0.003"]
    assert [of_run["++optimizer"] for of_run in keys] == ["{'class':'sgd'}", "{'class':'adam','eps':1e-8}"] * 2
    (tmp_path / "job.sh").write_text(script)
    environment = {name: value for name, value in os.environ.items() if name != INDEX[scheduler][0]}
    alone = subprocess.run(["bash", tmp_path / "job.sh"], env=environment, capture_output=True, text=True)
    assert alone.returncode == 2
    assert f"{INDEX[scheduler][0]}: expected a number from" in alone.stderr


@pytest.mark.parametrize(
    ("arguments", "key", "got"),
    [
        (["--scheduler", "mpi", *SWEEP], "--sweep", "mpi"),
        ([*KUBERNETES, *SIZE, *SWEEP, *HOROVOD], "--sweep", "kubernetes"),
        (["--scheduler", "pbs", *SWEEP], "--sweep", "--no-requeue"),
        (["--scheduler", "slurm", *SIZE, "--max-restarts", "2", *SWEEP, *TORCH], "--sweep", "--max-restarts, got 2"),
        (["--scheduler", "slurm", "--sweep", "learning_rate"], "--sweep", "'learning_rate'"),
        (["--scheduler", "slurm", "--sweep", "learning_rate=0.1,"], "--sweep", "'learning_rate=0.1,'"),
        (["--scheduler", "slurm", "--sweep", "learning_rate=0.1,0.1"], "--sweep", "'learning_rate=0.1,0.1'"),
        (["--scheduler", "slurm", "--sweep", "model=a/b,c/d"], "--sweep", "model"),
        (["--scheduler", "slurm", *SWEEP, *SWEEP[:2]], "--sweep", "learning_rate in --sweep"),
        (["--scheduler", "slurm", *SWEEP, "++learning_rate", "1"], "--sweep", "learning_rate in ++learning_rate"),
        (["--scheduler", "slurm", "--sweep", "learning_rat=1,2"], "learning_rat", "learning_rate?"),
        (["--scheduler", "slurm", "--sweep", "learning_rate=0.1,-1"], "learning_rate", "-1"),
    ],
)
def test_what_no_array_can_do_is_refused(arguments: list[str], key: str, got: str) -> None:
    refused = submit(G2P, *arguments)
    assert refused.status == 2
    assert refused.names(key, got), refused.err


def test_two_runs_never_share_a_folder() -> None:
    refused = submit(G2P, "--scheduler", "slurm", "--sweep", "optimizer=adam,'adam'")
    assert refused.status == 2
    assert refused.names("--sweep", "'optimizer=adam'")
