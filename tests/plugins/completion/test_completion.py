"""Completion in the shell: bash asks the program itself, through argcomplete's function."""

import json
import os
import subprocess
import sys
from pathlib import Path

from launching import ROOT

ASK = """
eval "$("$FOLDER/register-python-argcomplete" hvdtrain)"
COMP_TYPE=9 COMP_KEY=9 COMP_LINE="$LINE" COMP_POINT=${#LINE}
_python_argcomplete "$FOLDER/hvdtrain"
printf '%s\\n' "${COMPREPLY[@]}"
"""
"""What bash does when somebody presses the tab key."""

ANSWER = """
import json, os, sys
from hvdtrain.cli import main
answers = []
for line in json.loads(sys.argv[1]):
    os.environ.update(_ARGCOMPLETE="1", _ARGCOMPLETE_IFS="\\n", _ARGCOMPLETE_STDOUT_FILENAME="answer")
    os.environ.update(COMP_LINE=line, COMP_POINT=str(len(line)))
    try:
        main([])
    except SystemExit:
        answers.append(open("answer").read().splitlines())
print(json.dumps(answers))
"""
"""What the program answers to several lines, in a process without pytest's open files, some of which argcomplete would close."""

CASES = [
    ("hvdtrain ", ["doctor", "submit", "my_config.py"], ["++max_seqs"]),
    ("hvdtrain my_config.py ++max_se", ["++max_seqs", "++max_seq_length"], ["++min_seq_length", "++batch_size"]),
    ("hvdtrain my_config.py ++backend ", ["torch", "tensorflow"], ["my_config.py"]),
    ("hvdtrain my_config.py ++max_seqs 4 ++train.seq_or", ["++train.seq_ordering"], ["++dev.seq_ordering"]),
    ("hvdtrain submit my_config.py --scheduler ", ["slurm", "kubernetes"], ["my_config.py"]),
    ("hvdtrain doctor my_config.py ++num_ep", ["++num_epochs"], []),
]
"""Lines, what is offered at their ends, and what is not."""


def printed(folder: Path, command: list[str], **environment: str) -> str:
    """What a program prints in a folder with a config."""
    (folder / "my_config.py").touch()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    ended = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_the_shell_gets_completions(tmp_path: Path) -> None:
    line = "hvdtrain my_config.py ++use_horovod="  # bash divides its last word
    offered = printed(tmp_path, ["bash", "-c", ASK], LINE=line, FOLDER=str(Path(sys.executable).parent))
    assert sorted(offered.split()) == ["false", "true"]


def test_what_is_offered(tmp_path: Path) -> None:
    answers = json.loads(printed(tmp_path, [sys.executable, "-c", ANSWER, json.dumps([line for line, *_ in CASES])]))
    for (line, there, not_there), answer in zip(CASES, answers, strict=True):
        offered = {word.strip() for word in answer}
        assert set(there) <= offered, (line, offered)
        assert not set(not_there) & offered, (line, offered)
