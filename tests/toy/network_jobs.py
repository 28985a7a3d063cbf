"""Runs trainings of RETURNN and of hvdtrain in one start of Python: `python network_jobs.py JOBS.json`.

A job is [program, config, overrides], with the program "returnn" or "hvdtrain". Each is run by a separate child process, whose
output goes to the file `out` next to the model. TensorFlow and RETURNN are imported once.
"""

import getpass
import json
import os
import sys
from pathlib import Path

import returnn.tf.engine  # noqa: F401  # the children have it then
import tensorflow as tf
from returnn.__main__ import main as run_returnn
from returnn.tf.native_op import OpMaker

from hvdtrain.cli import main as run_hvdtrain
from hvdtrain.plugins.returnn.network import learner  # noqa: F401


def run(program: str, config: str, overrides: dict[str, str]) -> None:
    """One training, in a child process."""
    arguments = [part for name, value in overrides.items() for part in (f"++{name}", value)]
    Path(overrides["model"]).parent.mkdir(parents=True, exist_ok=True)
    out = os.open(Path(overrides["model"]).with_name("out"), os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    if program == "returnn":
        os.chdir(Path(overrides["model"]).parent)  # where it may leave files
        run_returnn(["returnn", config, *arguments])
    else:
        sys.argv = ["hvdtrain", config, *arguments]
        sys.exit(run_hvdtrain([config, *arguments]))


def main() -> None:
    os.getlogin = getpass.getuser  # some configs ask for the user of the terminal, and tests may have none
    OpMaker.with_cuda = False
    tf.config.set_visible_devices([], "GPU")
    for program, config, overrides in json.loads(Path(sys.argv[1]).read_text()):
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            try:
                run(program, config, overrides)
            except SystemExit as end:
                sys.stdout.flush()
                os._exit(end.code if isinstance(end.code, int) else int(end.code is not None))
            sys.stdout.flush()
            os._exit(0)
        _, status = os.waitpid(child, 0)  # what is missing is for the tests to find
        Path(overrides["model"]).with_name("status").write_text(str(os.waitstatus_to_exitcode(status)))


if __name__ == "__main__":
    main()
