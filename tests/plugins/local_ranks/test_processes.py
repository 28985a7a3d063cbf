"""Processes that hvdtrain itself starts: what its launcher says of those that ended without a word."""

from pathlib import Path

import pytest
from launching import clean_environment

from hvdtrain.comm.launchers import Place
from hvdtrain.plugins.local_ranks.processes import launch

CUT_OFF = """
import os, signal, sys, time
from pathlib import Path
from hvdtrain.comm import this_process
from hvdtrain.data.files import Unchanged
folder, rank = Path(sys.argv[1]), this_process.place().rank
files = [Unchanged([str(folder / name)]) for name in ("whole.hdf", "cut.hdf")]
this_process.launcher().leave_checks(files)
(folder / f"opened-{rank}").touch()
while not all((folder / f"opened-{other}").exists() for other in range(2)):
    time.sleep(0.01)
os.truncate(folder / "cut.hdf", 5)
if str(rank) in sys.argv[2]:
    os.kill(os.getpid(), signal.SIGBUS)
time.sleep(60)
"""


@pytest.mark.parametrize("ended", ["0", "1", "01"])
def test_a_file_that_was_cut_off_is_named_whichever_ranks_are_ended(tmp_path: Path, ended: str) -> None:
    for name in ("whole.hdf", "cut.hdf"):
        (tmp_path / name).write_bytes(bytes(10))
    reported: list[str] = []
    wanted = [Place("hvdtrain", rank, 2, rank, 2) for rank in range(2)]
    program = ("-c", CUT_OFF)
    status = launch(wanted, [str(tmp_path), ended], clean_environment(), program=program, report=reported.append)
    assert status == 135
    named = f"{tmp_path}/cut.hdf: expected the file that was opened at the start, got one of 5 bytes instead of 10 ("
    assert reported[-1].startswith(named), reported
    assert sorted(line[:13] for line in reported[:-1]) == [f"rank {rank} of 2: " for rank in ended]
