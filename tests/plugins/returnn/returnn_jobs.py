"""Runs RETURNN several times in one start of Python: `python returnn_jobs.py JOBS.json`, a list of command lines.

Each is run by a separate child process, as RETURNN keeps much in globals. PyTorch and RETURNN are imported once.
"""

import json
import os
import sys
from pathlib import Path

import returnn.frontend
import returnn.torch.engine  # noqa: F401  # the children have it then
import torch
from returnn.__main__ import main as run_returnn


def main() -> None:
    for arguments in json.loads(Path(sys.argv[1]).read_text()):
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            torch.set_num_threads(1)
            os.chdir(Path(sys.argv[1]).parent)  # where it may leave files
            run_returnn(["returnn", *arguments])
            sys.stdout.flush()
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if status != 0:
            sys.exit(f"{arguments}: status {status}")


if __name__ == "__main__":
    main()
