"""The Dockerfile, as far as it can be checked without Docker: its files, its packages, its commands and sshd's settings."""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from launching import ROOT

from hvdtrain.version import __version__

INSTRUCTIONS = re.sub(r"\\\n|^#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE).splitlines()
INSTRUCTIONS = [line for line in INSTRUCTIONS if line.strip()]


def arguments_of(instruction: str) -> list[str]:
    """What stands behind an instruction, for each of its lines."""
    return [line.removeprefix(instruction).strip() for line in INSTRUCTIONS if line.startswith(f"{instruction} ")]


def test_what_is_copied_is_there_and_enough(tmp_path: Path) -> None:
    known = {"ARG", "FROM", "RUN", "WORKDIR", "COPY", "ENV", "CMD"}
    assert {line.split()[0] for line in INSTRUCTIONS} == known
    kept = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    copied = [line.split() for line in arguments_of("COPY") if not line.startswith("--from")]
    for *sources, target in copied:
        for source in sources:
            assert source in kept, f"{source} is not sent to Docker"
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, tmp_path / target, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                (tmp_path / target).mkdir(exist_ok=True)
                shutil.copy(ROOT / source, tmp_path / target)
    described = subprocess.run([sys.executable, "setup.py", "--name", "--version"], cwd=tmp_path, capture_output=True, text=True)
    assert described.stdout.splitlines()[-2:] == ["hvdtrain", __version__], described.stderr
    recipe = (tmp_path / "tools/setup.sh").read_text()
    for name in re.findall(r"(?<=\s)(?:hvdtrain|tools)/[\w./]+", recipe):
        assert (tmp_path / name).exists(), f"tools/setup.sh reads {name}"


def test_the_packages_are_those_of_the_setup_script() -> None:
    wanted = set(re.findall(r"packages\+?=\(([^)]*)\)", (ROOT / "tools/setup.sh").read_text()))
    needed = {name for names in wanted for name in names.split()}
    build, final = (set(run.split()) for run in arguments_of("RUN") if "apt-get install" in run)
    assert needed <= build
    assert {"openmpi-bin", "python3", "openssh-server"} <= final
    extras = re.search(r"EXTRAS=(\S+)", "\n".join(arguments_of("ARG")))
    assert extras is not None
    assert not [name for name in extras[1].split(",") if f"\n{name} = [" not in (ROOT / "pyproject.toml").read_text()]


def test_what_is_set_up_for_training_and_for_tests_is_every_extra() -> None:
    """But those of the frameworks, which are installed by their versions, and of comparisons with other trainers."""
    training, tests = ((ROOT / "tools" / name).read_text() for name in ("setup.sh", "setup_tests.sh"))
    found = re.findall(r"EXTRAS:-(\S+?)}", training) + re.findall(r"^extras=(\S+)$", tests, re.MULTILINE)
    every = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    names = ",".join(found).split(",")
    assert sorted(names) == sorted(every - {"torch", "tensorflow", "horovod", "benchmark", "peers"})


def test_its_commands_and_sshds_settings(tmp_path: Path) -> None:
    for run in arguments_of("RUN"):
        command = re.sub(r"^(--mount=\S+\s+)+", "", run)
        assert subprocess.run(["bash", "-n", "-c", command]).returncode == 0, run
    [settings] = [run for run in arguments_of("RUN") if "sshd_config.d" in run]
    here = settings.replace("/etc/ssh/", f"{tmp_path}/")
    for folder in ("sshd_config.d", "ssh_config.d"):
        (tmp_path / folder).mkdir()
    subprocess.run(["sh", "-c", here], check=True)
    sshd = shutil.which("sshd", path="/usr/sbin:/usr/local/sbin")
    if sshd is None or shutil.which("ssh-keygen") is None:
        pytest.skip("OpenSSH is not installed")
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / "key"], check=True)
    read = subprocess.run(
        [sshd, "-T", "-f", tmp_path / "sshd_config.d/hvdtrain.conf", "-h", tmp_path / "key"], capture_output=True, text=True
    )
    if "privilege separation" in read.stderr:
        pytest.skip("sshd has never been started here")
    assert "strictmodes no" in read.stdout.splitlines(), read.stderr
    asked = subprocess.run(["ssh", "-G", "-F", tmp_path / "ssh_config.d/hvdtrain.conf", "host"], capture_output=True, text=True)
    assert "userknownhostsfile /dev/null" in asked.stdout.splitlines(), asked.stderr


def section(name: str) -> list[str]:
    """The lines of a section of Apptainer's definition file."""
    text = (ROOT / "apptainer.def").read_text().partition(f"\n%{name}\n")[2]
    return [line.strip() for line in re.split(r"\n%\w+\n", text)[0].splitlines() if line.strip()]


def test_apptainers_definition_has_the_same_files_packages_and_extras(tmp_path: Path) -> None:
    copied = {source for line in arguments_of("COPY") if not line.startswith("--from") for source in line.split()[:-1]}
    files = dict(line.split() for line in section("files"))
    assert set(files) == copied
    assert files == {source: f"/opt/hvdtrain/{source}" for source in files}
    commands = "\n".join(section("post"))
    [packages] = re.findall(r"--no-install-recommends \\\n(.*)", commands)
    build, _ = (run for run in arguments_of("RUN") if "apt-get install" in run)
    assert set(packages.split()) < set(build.split())
    assert (
        f"ARG {next(line for line in section('arguments') if line.startswith('extras')).replace('extras', 'EXTRAS')}"
        in INSTRUCTIONS
    )
    names = {line.partition("=")[0] for line in section("arguments")}
    assert set(re.findall(r"{{ (\w+) }}", (ROOT / "apptainer.def").read_text())) == names
    for part in ("post", "environment", "runscript", "test"):
        assert subprocess.run(["sh", "-n", "-c", "\n".join(section(part))]).returncode == 0


def test_a_wheel_that_is_there_needs_no_compiler() -> None:
    """Of tools/setup.sh: with WHEEL, the compiler's packages are not asked for, and the wheel is installed."""
    text = (ROOT / "tools/setup.sh").read_text()
    [compilers] = re.findall(r'if \[ -z "\${WHEEL:-}" \]; then\n(.*?)\nfi\n', text, re.DOTALL)
    assert set(re.findall(r"packages\+=\((.*?)\)", compilers)) == {"libopenmpi-dev", "g++", "cmake", "make"}
    assert '${WHEEL:+--install "$WHEEL"}' in text
