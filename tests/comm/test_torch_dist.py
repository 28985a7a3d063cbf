"""Connecting over torch.distributed while another rank is killed."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
from launching import clean_environment

from hvdtrain.comm.launchers import Place
from hvdtrain.comm.meeting_point import HVDTRAIN_INIT_METHOD
from hvdtrain.plugins.local_ranks.reports import variables

RANK = """
import sys
from pathlib import Path
from hvdtrain.comm import this_process, torch_rendezvous
from hvdtrain.comm.torch_dist import open_torch_distributed
from hvdtrain.errors import PeerFailure
check_in = torch_rendezvous._check_in
def touch_and_check_in(*arguments):
    Path(sys.argv[1]).touch()
    check_in(*arguments)
torch_rendezvous._check_in = touch_and_check_in
this_process.launcher()
try:
    open_torch_distributed("gloo", None, 60)
except PeerFailure as error:
    print(error)
"""


@pytest.mark.slow
def test_rank_zero_is_killed_while_the_ranks_meet(tmp_path: Path) -> None:
    """The store, which it serves, has gone: the others say that, and do not fail by themselves, so that they are restarted."""
    ranks: list[subprocess.Popen[str]] = []
    try:
        for rank in (0, 1):  # of 3, so that both wait
            environ = clean_environment() | {HVDTRAIN_INIT_METHOD: f"file://{tmp_path}/place"}
            environ |= variables(Place("hvdtrain", rank, 3, rank, 3))
            command = [sys.executable, "-c", RANK, str(tmp_path / f"meets-{rank}")]
            ranks.append(subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        deadline = time.monotonic() + 60
        while len(list(tmp_path.glob("meets-*"))) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        time.sleep(0.2)
        ranks[0].kill()
        out, err = ranks[1].communicate(timeout=60)
        assert (out, ranks[1].returncode) == ("stopped, because another rank failed\n", 0), err
    finally:
        for process in ranks:
            process.kill()
            process.communicate()
