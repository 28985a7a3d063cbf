"""RETURNN's networks with RETURNN's engine and with hvdtrain: the same initial weights, scores and checkpoints."""

import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import pytest
import tensorflow as tf
from launching import ROOT, clean_environment

from hvdtrain.data.hdf.dataset import open_hdf
from hvdtrain.plugins.schedules.file import read_learning_rate_file
from hvdtrain.runtime.scores import text

pytestmark = pytest.mark.slow

TOY = str(ROOT / "tests" / "toy" / "network_config.py")
ATTENTION = str(ROOT / "tests" / "toy" / "network_attention.py")

TRAININGS: dict[str, dict[str, str]] = {
    "plain": {},
    "dropout": {"layers": "statistics", "gradient_clip_global_norm": "20.0"},
    "frames": {"layers": "frames", "batch_size": "100", "num_epochs": "1"},
    "context": {"layers": "context", "chunking": "20:10", "num_epochs": "1"},
    "adam": {
        "optimizer": "None",
        "adam": "True",
        "optimizer_epsilon": "1e-5",
        "gradient_clip_norm": "3.0",
        "losses": "several",
        "num_epochs": "1",
    },
    "rmsprop": {
        "optimizer": "None",
        "rmsprop": "True",
        "momentum": "0.5",
        "learning_rate": "0.0001",
        "gradient_clip": "5.0",
        "gradient_nan_inf_filter": "True",
    },
    "decoupled": {"decouple_constraints": "True", "decouple_constraints_factor": "0.05"},
    "best": {
        "use_last_best_model": "True",
        "learning_rates": "0.01,5.0,0.01",
        "layers": "dropout",
        "num_epochs": "3",
    },
    "attention": {"num_epochs": "1"},
    "untrained": {"learning_rate": "0.0", "num_epochs": "1", "layers": "plain"},
}
"""The overrides of each training, with both programs."""

AGAIN = ("rmsprop", "decoupled", "decoupled_apart")
"""Those that prove again what another one proves, or prove it for a key that is rare."""

OURS: dict[str, dict[str, str]] = {
    "nadam": {"optimizer": "None", "nadam": "True", "optimizer_epsilon": "1e-8", "shuffled": "True", "layers": "plain"},
    "decoupled_apart": {**TRAININGS["decoupled"], "num_allowed_consec_invalid_gradient_steps": "3"},
}
"""With hvdtrain alone: what RETURNN cannot do, and in another way."""


FLAWS = {
    "class": r"network: layer 'conv' of class 'convolution' \(network_config.py, line \d+\): .*'convolution'",
    "from": r"network: layer '\w+'.* \(network_config.py, line \d+\): .*'lstn'",
    "target": r"network: layer 'data:phones' \(network_config.py, line \d+\): .*unknown key 'phones'",
    "state": r"network: expected layers that begin anew with every batch, got initial_state = 'keep_over_epoch'",
    "axis": r"extern_data.classes: expected one value for each sequence, .* got sequences of up to \d+ frames",
    "key": r"network: expected the data key 'phones', which its layers use, got the keys data, classes",
    "optimizer": r"optimizer: expected one that RETURNN can build, got .*'SGD'.* \(RETURNN cannot use today's classes of Keras",
}
"""A mistake in the network, and what the program says."""


@dataclass(frozen=True)
class Jobs:
    """What the trainings left. Attributes: folder: PROGRAM/NAME/model..."""

    folder: Path

    def weights(self, program: str, name: str, epoch: int = 2) -> dict[str, numpy.ndarray]:
        """The variables in a checkpoint."""
        prefix = self.folder / program / name / f"model.{epoch:03d}"
        assert prefix.with_name(f"{prefix.name}.index").exists(), (prefix.parent / "out").read_text()[-6000:]
        reader = tf.train.load_checkpoint(str(prefix))
        return {one: reader.get_tensor(one) for one in reader.get_variable_to_shape_map()}

    def scores(self, name: str) -> list[dict[str, float]]:
        """hvdtrain's scores of each epoch."""
        lines = (self.folder / "hvdtrain" / name / "scores.jsonl").read_text().splitlines()
        return [json.loads(line)["scores"] for line in lines]

    def theirs(self, name: str) -> list[dict[str, float]]:
        """RETURNN's, under the same names."""
        found: list[dict[str, float]] = []
        for line in (self.folder / "returnn" / name / "out").read_text().splitlines():
            if match := re.match(r"epoch \d+ score: (.*) error: (.*) elapsed", line):
                found.append(_named("train_loss_score", match[1]) | _named("train_loss_error", match[2]))
            elif match := re.match(r"dev: score (.*) error (.*)", line):
                found[-1] |= _named("dev_loss_score", match[1]) | _named("dev_loss_error", match[2])
        return found


def _named(start: str, text: str) -> dict[str, float]:
    """'0.5' as one score, 'output 0.5 other 0.6' as several."""
    parts = text.split()
    if len(parts) == 1:
        return {start: float(parts[0])}
    return {f"{start}_{name}": float(value) for name, value in zip(parts[::2], parts[1::2], strict=True)}


@pytest.fixture(scope="module")
def jobs(corpus: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Jobs:
    """What all jobs left; they are run in one start of Python."""
    folder = tmp_path_factory.mktemp("networks")

    def job(program: str, name: str, given: dict[str, str], saved_as: str | None = None) -> list[Any]:
        model = folder / program / (saved_as or name) / "model"
        # Without its cache, RETURNN never trains on what its other thread has not read yet: labels of -1, on an idle machine.
        small = {"corpus": str(corpus), "part": "dev.hdf", "num_epochs": "2"}  # epochs of 9 steps
        overrides = {**small, "log_verbosity": "5", "cache_size": "0", **given}
        if program == "returnn":
            overrides["learning_rate_file"] = str(model.with_name("learning_rates"))
        if name != "attention":
            overrides = {"evaluated": "True", "layers": "conv", **overrides}
        return [program, ATTENTION if name == "attention" else TOY, {**overrides, "model": str(model)}]

    chosen = [name for name in TRAININGS | OURS if name not in AGAIN or request.config.getoption("--soak")]
    both = [(name, given) for name, given in TRAININGS.items() if name in chosen]
    wanted = [job(program, name, given) for name, given in both for program in ("returnn", "hvdtrain")]
    wanted += [job("hvdtrain", name, given) for name, given in OURS.items() if name in chosen]
    # Each continues from the other's checkpoint, with a new optimizer.
    for program, other in (("returnn", "hvdtrain"), ("hvdtrain", "returnn")):
        start = {"import_model_train_epoch1": str(folder / other / "plain" / "model.002")}
        wanted.append(job(program, "imported", start))
    wanted.append(job("hvdtrain", "plain", {"num_epochs": "3"}))
    theirs = {"load": str(folder / "returnn" / "plain" / "model.002")}
    newbob = {"learning_rate_control": "newbob", "newbob_relative_error_threshold": "-0.5", "num_epochs": "4"}
    rates = {"learning_rate_file": str(folder / "returnn" / "plain" / "learning_rates")}
    wanted.append(job("hvdtrain", "taken_over", {**theirs, **newbob, **rates}))
    wanted.append(job("hvdtrain", "evaluation", {**theirs, "task": "eval"}))
    files = {"base": {"filename": str(folder / "returnn" / "plain" / "model.002"), "init_for_train": True}}
    wanted.append(job("hvdtrain", "preloaded", {"preload_from_files": repr(files), "learning_rate": "0.0", "num_epochs": "1"}))
    search = {"task": "search", "search_output_file_format": "py", "load": str(folder / "returnn" / "attention" / "model.001")}
    for program, data in (("returnn", "config:dev"), ("hvdtrain", "dev")):
        given = {**search, "search_data": data, "search_output_file": str(folder / program / "hypotheses.py")}
        wanted.append(job(program, "attention", given, "search"))
    forward = {"task": "forward", "forward_data": "dev", "forward_output_layer": "encoder", "load": search["load"]}
    for program, data in (("returnn", {"forward_batch_size": "100000"}), ("hvdtrain", {})):
        given = {**forward, **data, "output_file": str(folder / program / "encoder.hdf")}
        wanted.append(job(program, "attention", given, "forward"))
    optimizers = {"optimizer": {"optimizer": "{'class': 'sgd'}"}}
    wanted += [job("hvdtrain", f"flaw.{flaw}", {"flaw": flaw, "layers": "plain", **optimizers.get(flaw, {})}) for flaw in FLAWS]
    (folder / "jobs.json").write_text(json.dumps(wanted))
    command = [sys.executable, str(ROOT / "tests" / "toy" / "network_jobs.py"), str(folder / "jobs.json")]
    subprocess.run(command, env=clean_environment() | {"OMP_NUM_THREADS": "1"}, cwd=ROOT, check=True, timeout=900)
    return Jobs(folder)


def test_initial_weights_are_the_same_bits(jobs: Jobs) -> None:
    ours, theirs = (jobs.weights(program, "untrained", 1) for program in ("hvdtrain", "returnn"))
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not numpy.array_equal(ours[name], theirs[name])] == []


COMPARED = [
    pytest.param(name, marks=pytest.mark.again) if name in AGAIN else name
    for name in TRAININGS
    if name not in ("untrained", "best")
]


@pytest.mark.parametrize("name", COMPARED)
def test_scores_are_those_of_returnn(jobs: Jobs, name: str) -> None:
    """Of training and of dev, dropout included, in every epoch."""
    epochs = int(TRAININGS[name].get("num_epochs", "2"))
    jobs.weights("returnn", name, epochs)
    jobs.weights("hvdtrain", name, epochs)
    expected, found = jobs.theirs(name), jobs.scores(name)[:epochs]
    assert len(expected) == epochs
    for theirs, ours in zip(expected, found, strict=True):
        assert {score: ours[score] for score in theirs} == pytest.approx(theirs, rel=3e-6, abs=1e-7)


def test_an_epoch_begins_with_the_best_model_as_with_returnn(jobs: Jobs) -> None:
    """Its scores show that the weights are the same, the optimizer is new, and the random numbers go on."""
    ours, theirs = ((jobs.folder / program / "best" / "out").read_text() for program in ("hvdtrain", "returnn"))
    assert re.search(r"Last epoch 2 .* is not the optimal model but epoch 1 has better score", theirs)
    [line] = re.findall("^epoch . begins with the model of .*$", ours, re.M)
    assert line.startswith("epoch 3 begins with the model of epoch 1 and a new optimizer: dev_loss_score ")
    _, _, expected = jobs.theirs("best")
    first, second, third = jobs.scores("best")  # the second one, in which the training diverges, multiplies what is rounded
    assert {score: third[score] for score in expected} == pytest.approx(expected, rel=3e-6)
    assert third["dev_loss_score"] < first["dev_loss_score"] < second["dev_loss_score"]


def test_each_program_goes_on_from_the_other_ones_checkpoint(jobs: Jobs) -> None:
    [ours, theirs] = [jobs.weights(program, "imported") for program in ("hvdtrain", "returnn")]
    assert jobs.scores("imported")[0] == pytest.approx(jobs.theirs("imported")[0], rel=1e-5)
    assert ours["global_step"] == theirs["global_step"] == 36  # both continue counting


def test_learning_rate_control_goes_on_with_the_scores_in_returnns_file(jobs: Jobs) -> None:
    """In epoch 3 with two epochs of RETURNN, in epoch 4 with one of each program; the file then has the names of one."""
    folder = jobs.folder / "hvdtrain" / "taken_over"
    reports = [json.loads(line) for line in (folder / "scores.jsonl").read_text().splitlines()]
    assert [(report["epoch"], report["learning_rate"]) for report in reports] == [(3, 0.005), (4, 0.0025)]
    records = read_learning_rate_file(jobs.folder / "returnn" / "plain" / "learning_rates")
    theirs = jobs.theirs("plain")
    assert [record.scores for record in records[:2]] == [pytest.approx(scores, rel=1e-5) for scores in theirs]
    assert [set(record.scores) for record in records] == 4 * [set(theirs[0])]


def test_the_task_eval_computes_the_scores_of_a_model_of_returnn(jobs: Jobs) -> None:
    [found] = re.findall("^epoch 2 evaluation: (.*)$", (jobs.folder / "hvdtrain" / "evaluation" / "out").read_text(), re.M)
    theirs = jobs.theirs("plain")[1]
    assert found == f"dev: {text({name: theirs[f'dev_loss_{name}'] for name in ('error', 'score')})}"


def test_nadam_trains_although_the_key_is_broken_in_returnn(jobs: Jobs) -> None:
    first, second = jobs.scores("nadam")
    assert second["train_loss_score"] < first["train_loss_score"] < 1.7


def test_random_numbers_that_a_checkpoint_does_not_have_are_named(jobs: Jobs) -> None:
    """Once, and in no other training: dropout and noise are in it."""
    outs = {path.parent.name: path.read_text() for path in (jobs.folder / "hvdtrain").glob("*/out")}
    warned = {name: re.findall("the random numbers of (.*) start anew", out) for name, out in outs.items()}
    assert {name: found for name, found in warned.items() if found} == {"nadam": ["RandomShuffle"]}


@pytest.mark.again
def test_constraints_that_wait_for_gradients_work_where_these_are_fed(jobs: Jobs) -> None:
    for apart, together in zip(jobs.scores("decoupled_apart"), jobs.scores("decoupled"), strict=True):
        assert apart == pytest.approx(together, rel=1e-6)


def test_training_goes_on_from_a_checkpoint_and_its_files_are_complete(jobs: Jobs) -> None:
    folder = jobs.folder / "hvdtrain" / "plain"
    assert "training continues after epoch 2, step 18." in (folder / "out").read_text()
    assert {path.name for path in folder.glob("model.003.*")} == {
        "model.003.index", "model.003.meta", "model.003.data-00000-of-00001", "model.003.progress", "model.003.opt.returnn.npz",
    }  # fmt: skip
    assert not list(folder.glob("*unfinished*"))


def test_preload_from_files_reads_a_checkpoint_of_tensorflow(jobs: Jobs) -> None:
    ours, theirs = jobs.weights("hvdtrain", "preloaded", 1), jobs.weights("returnn", "plain")
    assert [name for name in theirs if name != "global_step" and not numpy.array_equal(ours[name], theirs[name])] == []


@pytest.mark.parametrize("flaw", FLAWS)
def test_a_mistake_in_a_network_is_an_error_with_the_layer_and_its_line(jobs: Jobs, flaw: str) -> None:
    folder = jobs.folder / "hvdtrain" / f"flaw.{flaw}"
    out = (folder / "out").read_text()
    assert (folder / "status").read_text() == "2", out[-3000:]
    assert re.search(FLAWS[flaw], out), out[-3000:]
    assert "Traceback" not in out


def test_a_search_finds_the_hypotheses_that_returnn_finds(jobs: Jobs) -> None:
    """The same texts with the same scores, for every sequence of dev, in its order."""
    (theirs, ours) = (
        eval((jobs.folder / program / "hypotheses.py").read_text(), {"np": numpy}) for program in ("returnn", "hvdtrain")
    )
    assert list(ours) == [f"seq-{number}" for number in range(101)]
    assert ours.keys() == theirs.keys()
    for tag, hypotheses in ours.items():
        assert [text for _, text in hypotheses] == [text for _, text in theirs[tag]]
        assert [score for score, _ in hypotheses] == pytest.approx([float(score) for score, _ in theirs[tag]], rel=1e-5)


def test_a_search_has_the_scores_that_returnn_prints(jobs: Jobs) -> None:
    """The edit distance of the best hypotheses among them."""
    theirs, ours = ((jobs.folder / program / "search" / "out").read_text() for program in ("returnn", "hvdtrain"))
    [(score, error)] = re.findall("^Search done. Num steps .*, Final: score (.*) error (.*)$", theirs, re.M)
    assert score == "None"
    assert f"epoch 1 search: search_data: {text({'error': float(error)})}\n" in ours


def test_the_outputs_of_a_layer_are_written_for_every_sequence(jobs: Jobs, corpus: Path) -> None:
    """The same sequences as RETURNN writes, with the same names and values, but in the dataset's order."""
    files = (jobs.folder / "hvdtrain" / "encoder.hdf", jobs.folder / "returnn" / "encoder.hdf", corpus / "dev.hdf")
    written, theirs, dev = (open_hdf([str(path)]) for path in files)
    assert written.num_sequences == theirs.num_sequences == dev.num_sequences == 101
    assert numpy.array_equal(written.lengths["data"], dev.lengths["data"])
    assert written.streams["data"].shape == (6,)
    assert written.tags(range(101)) == dev.tags(range(101))
    places = {tag: place for place, tag in enumerate(theirs.tags(range(101)))}
    for number, tag in enumerate(dev.tags(range(101))):
        found, expected = written.sequence(number)["data"], theirs.sequence(places[tag])["data"]
        numpy.testing.assert_allclose(found, expected, rtol=2e-5, atol=1e-6)
