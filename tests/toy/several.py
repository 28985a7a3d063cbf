"""Several trainings in one launch: `python several.py jobs.json`, a list of {"name", "folder", "overrides"}.

Each rank leaves what it ended with in FOLDER/NAME.rank-RANK.pt. A training that is stopped goes on at once, or with
"once": true is left as it is.
"""

import json
import sys
from pathlib import Path

import torch

from hvdtrain import ballot
from hvdtrain.interrupt import Stopped
from hvdtrain.run import open_communicator, train_with
from hvdtrain.settings import read_settings

ballot.INTERVAL = ballot.INTERVAL_APART = 0.0  # a stop comes two steps after its signal, however short the steps are
jobs = json.loads(Path(sys.argv[1]).read_text())
config = Path(__file__).parent / "config.py"
first = read_settings([config], jobs[0]["overrides"])
with open_communicator(first) as comm:
    for job in jobs:
        learner = None
        while learner is None:
            try:
                learner = train_with(comm, read_settings([config], job["overrides"]))
                torch.save(learner.model.state_dict(), f"{job['folder']}/{job['name']}.rank-{comm.rank}.pt")
            except Stopped as stopped:
                if comm.rank == 0:
                    print(f"{job['name']}: {stopped}, status {stopped.status}")
                if job.get("once"):
                    break
