"""Several trainings in one launch: `python several.py jobs.json`, a list of {"name", "folder", "overrides"}.

Each rank leaves what it ended with in FOLDER/NAME.rank-RANK.pt.
"""

import json
import sys
from pathlib import Path

import torch

from hvdtrain.run import open_communicator, train_with
from hvdtrain.settings import read_settings

jobs = json.loads(Path(sys.argv[1]).read_text())
config = Path(__file__).parent / "config.py"
first = read_settings([config], jobs[0]["overrides"])
with open_communicator(first) as comm:
    for job in jobs:
        learner = train_with(comm, read_settings([config], job["overrides"]))
        torch.save(learner.model.state_dict(), f"{job['folder']}/{job['name']}.rank-{comm.rank}.pt")
