"""Values that would be commands if they were not quoted: scripts made of them are refused, or run as if they were harmless.

The scripts are executed, with stand-ins for all programs that a cluster has, which write down how they were called.
"""

import random
import re
import shlex
import subprocess
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import yaml
from fuzzing import SEED, cases
from launching import Finished

from hvdtrain.plugins.submit.__main__ import main
from hvdtrain.plugins.submit.texts import has_forbidden_characters

pytestmark = pytest.mark.fuzz

CONFIG = """
train = {"class": "Task12AXDataset", "num_seqs": 4}
max_seqs, num_epochs, learning_rate = 4, 1, 0.1


def get_model(**_):
    pass


def train_step(**_):
    pass
"""

SEEN = ["a", "B7", "it's", '"', "$(pwned)", "`pwned`", "; pwned;", "&& pwned", "| pwned", "#", "\\", "%j", "$HOME", "'; pwned; '"]
SEEN += [
    '"; pwned; "',
    "ü",
    "\N{GRINNING FACE}",
    ": ",
    "- ",
    "{}",
    "> x",
    "*",
    "~",
    "!",
    "=",
    "--x",
    "<(pwned)",
    "${x:-$(pwned)}",
    " ",
]
UNSEEN = ["\n pwned\n", '{"a": 1,\n"pwned": 2}', "\r", "\t", "\x1b[2J", "\x85pwned", "\u2028", "\udcff", "\ufffe", "\x7f"]

STAND_IN = """#!/bin/bash
{ printf '%s\\0' "${0##*/}" "$@"; printf '\\1'; } >> "$CALLED"
if [ "${@: -1}" = agent ]; then SLURM_NODEID=0 bash -c agent; fi
"""
PROGRAMS = "pwned mpirun srun scontrol sinfo scancel qsub blaunch python".split()

PREFIX = {"slurm": "#SBATCH ", "sge": "#$ ", "pbs": "#PBS ", "lsf": "#BSUB "}
OPTIONS = {
    "slurm": {"--queue": "--partition={}", "--account": "--account={}", "--name": "--job-name={}"},
    "sge": {"--queue": "-q {}", "--account": "-A {}", "--name": "-N {}", "--folder": "-wd {}", "--output": "-o {}/"},
    "pbs": {"--queue": "-q {}", "--account": "-A {}", "--name": "-N {}", "--output": "-o {}/"},
    "lsf": {"--queue": "-q {}", "--account": "-P {}", "--name": "-J {}"},
}


def nasty(generator: random.Random) -> str:
    """A text without NUL and slashes, sometimes one with what no script may have."""
    pieces = SEEN if generator.random() < 0.9 else [*SEEN, *UNSEEN]
    return "".join(generator.choices(pieces, k=generator.randrange(1, 5)))


def submit(arguments: list[str]) -> Finished:
    with redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as err:
        status = main(arguments)
    return Finished(status, out.getvalue(), err.getvalue(), 0.0)


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the stand-ins."""
    folder = tmp_path_factory.mktemp("programs")
    for name in PROGRAMS:
        (folder / name).write_text(STAND_IN)
        (folder / name).chmod(0o755)
    return folder


def calls_of(script: str, programs: Path, folder: Path) -> list[list[str]]:
    """Run a script; the commands that it called, without the shell's and those that print something."""
    (folder / "job.sh").write_text(script, encoding="utf-8")
    read = subprocess.run(["bash", "-n", folder / "job.sh"], capture_output=True, text=True)
    assert read.returncode == 0, read.stderr + script
    called = folder / "called"
    called.write_bytes(b"")
    (folder / "hosts").write_text("h1\nh2\n")
    job = {
        "SLURM_JOB_ID": "1",
        "SLURM_JOB_NODELIST": "n",
        "PBS_NODEFILE": folder / "hosts",
        "LSB_DJOB_HOSTFILE": folder / "hosts",
    }
    environment = {"PATH": f"{programs}:/usr/bin:/bin", "HOME": str(folder), "CALLED": str(called)} | {
        k: str(v) for k, v in job.items()
    }
    done = subprocess.run(["bash", folder / "job.sh"], env=environment, cwd=folder, capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr.decode(errors="replace") + script
    return [[word.decode() for word in call.split(b"\0")[:-1]] for call in called.read_bytes().split(b"\1")[:-1]]


def drawn(generator: random.Random, folder: Path, programs: Path) -> tuple[str, dict[str, str], list[str], list[str]]:
    """A scheduler, its options, overrides, and the config that they are for."""
    scheduler = generator.choice(["slurm", "sge", "pbs", "lsf", "kubernetes", "mpi"])

    chosen = generator.sample(["work", "config", "model", "eth0", "gpu", "me", "logs", "data", "h1", "job", "NCCL_DEBUG"], 2)
    chosen += generator.sample(["work", "config", "model"], 1)  # which have no form that they could be refused for

    def value(plain: str) -> str:
        return nasty(generator) if plain in chosen else plain

    work = folder / value("work").removeprefix(".")
    work.mkdir(parents=True, exist_ok=True)
    python = work / "python"
    if not python.exists():
        python.symlink_to(programs / "python")
    config = work / f"{value('config')}.py"
    config.write_text(CONFIG)
    options = {"--folder": str(work), "--python": str(python), "--name": value("job"), "--interface": value("eth0")}
    options["--export"] = value("NCCL_DEBUG")
    if scheduler != "mpi":
        options |= {"--queue": value("gpu"), "--account": value("me")}
    if scheduler not in ("mpi", "kubernetes"):
        options |= {"--output": value("logs"), "--option": generator.choice([*9 * ["--exclusive"], "--exclusive\npwned"])}
    if scheduler == "kubernetes":
        del options["--export"]
        options |= {"--image": value("data"), "--volume": f"{value('data')}:/{value('data')}"}
    if generator.random() < 0.2:
        options["--setup"] = generator.choice(["export A=b", "export A=b\npwned"])
    overrides = [f"++model={value('model')}"]
    launcher = generator.choice(["python", "mpirun", "torchrun"])
    if launcher != "python":
        options |= {
            "--tasks-per-node": "2",
            "--nodes": "1" if launcher == "torchrun" and scheduler in ("sge", "pbs", "lsf", "mpi") else "2",
        }
        overrides += ["++torch_distributed", "{}"] if launcher == "torchrun" else ["++use_horovod", "1"]
        if scheduler == "mpi" and options["--nodes"] == "2":
            options["--hosts"] = f"{value('h1')},{value('h2')}"
    return scheduler, options, overrides, [str(config)]


def test_scripts_of_nasty_values(tmp_path: Path, programs: Path) -> None:
    generator = random.Random(SEED)
    accepted = refused = 0
    for case in range(cases(40)):
        folder = tmp_path / str(case)
        scheduler, options, overrides, configs = drawn(generator, folder, programs)
        arguments = [*configs, "--scheduler", scheduler, *(f"{name}={value}" for name, value in options.items()), *overrides]
        written = submit(arguments)
        bad = [
            name
            for name, value in [*options.items(), ("++model", overrides[0]), ("CONFIG", configs[0])]
            if has_forbidden_characters(value)
        ]
        if written.status != 0:
            refused += 1
            assert written.status == 2, written.err
            assert written.out == ""
            assert re.search(r"(--[a-z-]+|\+\+model|\+\+KEY|CONFIG): expected ", written.err), written.err
            assert all(name in written.err for name in bad if name != "++model"), (bad, written.err)
            continue
        assert not bad, (bad, arguments)
        accepted += 1
        assert_harmless(written.out, scheduler, options, [*configs, *overrides], programs, folder)
    assert min(accepted, refused) > cases(40) // 10, (accepted, refused)


def assert_harmless(script: str, scheduler: str, options: dict[str, str], given: list[str], programs: Path, folder: Path) -> None:
    if scheduler == "kubernetes":
        manifest = yaml.safe_load(script)
        assert manifest["metadata"].get("namespace") == options["--account"]
        runs = []
        for pod in pods_of(manifest):
            [container] = pod["containers"]
            claim, _, path = options["--volume"].partition(":")
            assert (container["image"], container["volumeMounts"][1]["mountPath"]) == (options["--image"], path)
            assert pod["volumes"][1]["persistentVolumeClaim"]["claimName"] == claim
            runs += [container["command"][2]] if "command" in container else []
        script = runs[0]
    elif scheduler != "mpi":
        lines = [line.removeprefix(PREFIX[scheduler]) for line in script.splitlines() if line.startswith(PREFIX[scheduler])]
        words = [" ".join(shlex.split(line, comments=True)) for line in lines]
        for name, form in OPTIONS[scheduler].items():
            assert form.format(options[name]) in words, (name, options[name], lines)
    calls = calls_of(script, programs, folder)
    assert not [call for call in calls if call[0] == "pwned"], (script, calls)
    config = given[0] if given[0].startswith("/") else f"./{given[0]}"
    trains = [call for call in calls if call[-len(given) - 2 :] == ["-m", "hvdtrain", config, *given[1:]]]
    assert len(trains) == 1, (calls, given, script)
    if trains[0][0] == "mpirun":
        exported = [after for word, after in zip(trains[0], trains[0][1:], strict=False) if word == "-x"]
        assert "NCCL_SOCKET_IFNAME" in exported
        assert options.get("--export", "PATH") in exported
        assert options["--python"] in trains[0]
    if "--hosts" in options:
        assert trains[0][trains[0].index("-H") + 1] == ",".join(f"{host}:2" for host in options["--hosts"].split(","))


def pods_of(value: Any) -> list[dict[str, Any]]:
    """All specifications of pods within a manifest."""
    if not isinstance(value, dict):
        return []
    return ([value] if "containers" in value else []) + [pod for inner in value.values() for pod in pods_of(inner)]
