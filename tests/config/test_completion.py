"""Completion in the shell: bash asks the program itself, through argcomplete's function."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from launching import ROOT

ASK = """
eval "$("$FOLDER/register-python-argcomplete" hvdtrain)"
COMP_TYPE=9 COMP_KEY=9 COMP_LINE="$LINE" COMP_POINT=${#LINE}
_python_argcomplete "$FOLDER/hvdtrain"
printf '%s\\n' "${COMPREPLY[@]}"
"""
"""What bash does when somebody presses the tab key."""


def complete(line: str, folder: Path) -> list[str]:
    """What is offered at the end of a line, without the spaces that end words."""
    bin_folder = Path(sys.executable).parent
    environment = {**os.environ, "LINE": line, "FOLDER": str(bin_folder), "PYTHONPATH": str(ROOT)}
    asked = subprocess.run(["bash", "-c", ASK], env=environment, cwd=folder, capture_output=True, text=True, timeout=120)
    assert asked.returncode == 0, asked.stderr
    return [word.strip() for word in asked.stdout.splitlines()]


@pytest.mark.parametrize(
    ("line", "there", "not_there"),
    [
        ("hvdtrain ", ["doctor", "submit", "my_config.py"], ["++max_seqs"]),
        ("hvdtrain my_config.py ++max_se", ["++max_seqs", "++max_seq_length"], ["++min_seq_length", "++batch_size"]),
        ("hvdtrain my_config.py ++backend ", ["torch", "tensorflow"], ["my_config.py"]),
        ("hvdtrain my_config.py ++use_horovod=", ["true", "false"], []),
        ("hvdtrain my_config.py ++max_seqs 4 ++train.seq_or", ["++train.seq_ordering"], ["++dev.seq_ordering"]),
        ("hvdtrain submit my_config.py --scheduler ", ["slurm", "kubernetes"], ["my_config.py"]),
        ("hvdtrain doctor my_config.py ++num_ep", ["++num_epochs"], []),
    ],
)
def test_the_shell_gets_completions(line: str, there: list[str], not_there: list[str], tmp_path: Path) -> None:
    (tmp_path / "my_config.py").touch()
    offered = complete(line, tmp_path)
    assert set(there) <= set(offered), offered
    assert not set(not_there) & set(offered), offered
