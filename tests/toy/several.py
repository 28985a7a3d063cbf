"""Several trainings in one launch: `python several.py jobs.json [config.py]`, a list of {"name", "folder", "overrides"}.

Every rank writes its final state to FOLDER/NAME.rank-RANK.npz, and the names of the frameworks that it imported to
FOLDER/frameworks. A training that is stopped resumes at once, unless it has "once": true.
"""

import json
import sys
from pathlib import Path

import numpy

from hvdtrain.run import train
from hvdtrain.runtime.interrupt import Stopped
from hvdtrain.session import open_communicator
from hvdtrain.settings import read_settings
from hvdtrain.training import votes as ballot

ballot.INTERVAL = ballot.INTERVAL_APART = 0.0  # a stop comes two steps after its signal, even if steps are short


def arrays_of(model):
    """A model's parameters and buffers as numpy arrays by name."""
    if hasattr(model, "state_dict"):
        return {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    from hvdtrain.learner.tensorflow.variables import parts_of

    return {name: numpy.asarray(variable) for name, variable in parts_of(model).variables.items()}


jobs = json.loads(Path(sys.argv[1]).read_text())
config = Path(sys.argv[2]) if len(sys.argv) > 2 else Path(__file__).with_name("config.py")
first = read_settings([config], jobs[0]["overrides"])
with open_communicator(first) as comm:
    for job in jobs:
        learner = None
        while learner is None:
            try:
                learner = train(read_settings([config], job["overrides"]), comm)
                numpy.savez(f"{job['folder']}/{job['name']}.rank-{comm.rank}.npz", **arrays_of(learner.model))
            except Stopped as stopped:
                if comm.rank == 0:
                    print(f"{job['name']}: {stopped}, status {stopped.status}")
                if job.get("once"):
                    break
    imported = sorted({"torch", "tensorflow", "keras"} & sys.modules.keys())
    Path(jobs[0]["folder"], "frameworks").write_text(" ".join(imported))
