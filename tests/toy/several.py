"""Trainings and other tasks in one launch: `python several.py jobs.json`, a list of {"name", "folder", "configs", "overrides"}.

Every rank writes its final state to FOLDER/NAME.rank-RANK.npz, its output to FOLDER/NAME.out-RANK, the scores of a task other
than train to FOLDER/NAME.scores, and the names of the frameworks that it imported to FOLDER/frameworks. Rank 0 writes each
training's processor seconds to costs.json, next to jobs.json. A training that is stopped resumes at once, unless it has "once",
and so does one with "fails" after an error planted on all ranks. With "timeline", Horovod writes a timeline of this training. The
ranks connect anew if the transport differs from the previous one. On several ranks TensorFlow does not optimize its graphs.
"""

import json
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from itertools import groupby
from pathlib import Path

import numpy

from hvdtrain.config.large_imports import LargeImports
from hvdtrain.plugins.programs.restored import separate_imports
from hvdtrain.run import train
from hvdtrain.runtime.interrupt import Stopped
from hvdtrain.settings import read_settings
from hvdtrain.start_up.ranks import open_communicator
from hvdtrain.training import vote

LargeImports.install()  # as the program does
assert vote.INTERVAL > 0
assert vote.LOCAL_UPDATES_INTERVAL > 0
vote.INTERVAL = vote.LOCAL_UPDATES_INTERVAL = 0.0  # a stop comes two steps after its signal, even if steps are short


def arrays_of(learner):
    """A model's parameters and buffers as numpy arrays by name."""
    model = learner.model
    if hasattr(model, "layers_desc"):  # a network of RETURNN
        return dict(learner.state.contents({}).model)
    if hasattr(model, "state_dict"):
        return {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    from hvdtrain.plugins.tensorflow.tensors import variables_of

    return {name: numpy.asarray(variable) for name, variable in variables_of(model).by_name.items()}


def transport_of(job):
    """What of the overrides decides how the ranks connect."""
    return [name for name in ("use_horovod", "torch_distributed") if job["overrides"].get(name, "False") != "False"]


def run(comm, job):
    """Train until the end, with as many stops on the way as the job has planted."""
    task = job["overrides"].get("task", "train")
    if task != "train":
        from hvdtrain.plugins.forward.task import forward_all
        from hvdtrain.tasks.tasks import evaluate_all

        scores = (evaluate_all if task == "eval" else forward_all)(read_settings(job["configs"], job["overrides"]), comm)
        Path(job["folder"], f"{job['name']}.scores").write_text(json.dumps(scores))
        return
    while True:
        try:
            learner = train(read_settings(job["configs"], job["overrides"]), comm).learner
        except Stopped as stopped:
            if comm.rank == 0:
                print(f"{stopped}, status {stopped.status}")
            if job.get("once"):
                return
        except RuntimeError as error:
            if "fails" not in job or "planted" not in str(error):
                raise
            print(f"failed: {error}")
        else:
            numpy.savez(f"{job['folder']}/{job['name']}.rank-{comm.rank}.npz", **arrays_of(learner))
            return


@contextmanager
def timeline_of(job) -> Iterator[None]:
    if "timeline" not in job:
        yield
        return
    binding = sys.modules["horovod.torch" if "torch" in sys.modules else "horovod.tensorflow"]
    binding.start_timeline(job["timeline"])
    try:
        yield
    finally:
        binding.stop_timeline()


jobs = [job | {"configs": [Path(config) for config in job["configs"]]} for job in json.loads(Path(sys.argv[1]).read_text())]
costs = {}
for _, alike in groupby(jobs, transport_of):
    group = list(alike)
    with separate_imports(group[0]["configs"]):
        settings = read_settings(group[0]["configs"], group[0]["overrides"])
    with open_communicator(settings) as comm:
        if comm.size > 1 and (tensorflow := sys.modules.get("tensorflow")) is not None:
            # A quarter of the time of a small training; on one rank they are on.
            tensorflow.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
        for job in group:
            out = Path(job["folder"], f"{job['name']}.out-{comm.rank}")
            started = time.process_time()
            with out.open("a") as file, redirect_stdout(file), timeline_of(job), separate_imports(job["configs"]):
                try:
                    run(comm, job)
                except BaseException:
                    print(
                        f"rank {comm.rank}: {job['folder']}: {job['name']}\n{traceback.format_exc()}", file=sys.stderr, flush=True
                    )
                    raise
            costs[f"{Path(job['folder']).name}/{job['name']}"] = time.process_time() - started
        if comm.rank == 0:
            Path(sys.argv[1]).with_name("costs.json").write_text(json.dumps(costs))
imported = sorted({"torch", "tensorflow", "keras"} & sys.modules.keys())
for folder in {job["folder"] for job in jobs}:
    Path(folder, "frameworks").write_text(" ".join(imported))
