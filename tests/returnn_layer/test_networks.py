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

TOY = str(ROOT / "tests" / "toy" / "network_config.py")
ATTENTION = str(ROOT / "tests" / "toy" / "network_attention.py")

TRAININGS: dict[str, dict[str, str]] = {
    "plain": {},
    "dropout": {"layers": "statistics", "gradient_clip_global_norm": "20.0"},
    "frames": {"layers": "frames", "batch_size": "100"},
    "adam": {"optimizer": "None", "adam": "True", "optimizer_epsilon": "1e-5", "gradient_clip_norm": "3.0", "losses": "several"},
    "rmsprop": {
        "optimizer": "None",
        "rmsprop": "True",
        "momentum": "0.5",
        "learning_rate": "0.0001",
        "gradient_clip": "5.0",
        "gradient_nan_inf_filter": "True",
    },
    "decoupled": {"decouple_constraints": "True", "decouple_constraints_factor": "0.05"},
    "attention": {"num_epochs": "1"},
    "untrained": {"learning_rate": "0.0", "num_epochs": "1"},
}
"""The overrides of each training, with both programs."""

OURS: dict[str, dict[str, str]] = {
    "nadam": {"optimizer": "None", "nadam": "True", "optimizer_epsilon": "1e-8"},
    "decoupled_apart": {**TRAININGS["decoupled"], "num_allowed_consec_invalid_gradient_steps": "3"},
}
"""With hvdtrain alone: what RETURNN cannot do, and in another way."""


FLAWS = {
    "class": r"network: layer 'conv' of class 'convolution' \(network_config.py, line \d+\): .*'convolution'",
    "from": r"network: layer '\w+'.* \(network_config.py, line \d+\): .*'lstn'",
    "target": r"network: layer 'data:phones' \(network_config.py, line \d+\): .*unknown key 'phones'",
    "key": r"network: expected the data key 'phones', which its layers use, got the keys data, classes",
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
def jobs(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    """What all jobs left; they are run in one start of Python."""
    folder = tmp_path_factory.mktemp("networks")

    def job(program: str, name: str, given: dict[str, str], saved_as: str | None = None) -> list[Any]:
        model = folder / program / (saved_as or name) / "model"
        overrides = {"corpus": str(corpus), "num_epochs": "2", "log_verbosity": "5", **given}
        if name != "attention":
            overrides["evaluated"] = "True"
        return [program, ATTENTION if name == "attention" else TOY, {**overrides, "model": str(model)}]

    wanted = [job(program, name, given) for name, given in TRAININGS.items() for program in ("returnn", "hvdtrain")]
    wanted += [job("hvdtrain", name, given) for name, given in OURS.items()]
    # Each goes on from the other's checkpoint, with a new optimizer.
    for program, other in (("returnn", "hvdtrain"), ("hvdtrain", "returnn")):
        start = {"import_model_train_epoch1": str(folder / other / "plain" / "model.002")}
        wanted.append(job(program, "imported", start))
    wanted.append(job("hvdtrain", "plain", {"num_epochs": "3"}))
    files = {"base": {"filename": str(folder / "returnn" / "plain" / "model.002"), "init_for_train": True}}
    wanted.append(job("hvdtrain", "preloaded", {"preload_from_files": repr(files), "learning_rate": "0.0", "num_epochs": "1"}))
    search = {"task": "search", "search_output_file_format": "py", "load": str(folder / "returnn" / "attention" / "model.001")}
    for program, data in (("returnn", "config:dev"), ("hvdtrain", "dev")):
        given = {**search, "search_data": data, "search_output_file": str(folder / program / "hypotheses.py")}
        wanted.append(job(program, "attention", given, "search"))
    forward = {"task": "forward", "forward_data": "dev", "forward_output_layer": "encoder", "load": search["load"]}
    wanted.append(job("hvdtrain", "attention", {**forward, "output_file": str(folder / "encoder.hdf")}, "forward"))
    wanted += [job("hvdtrain", f"flaw.{flaw}", {"flaw": flaw}) for flaw in FLAWS]
    (folder / "jobs.json").write_text(json.dumps(wanted))
    command = [sys.executable, str(ROOT / "tests" / "toy" / "network_jobs.py"), str(folder / "jobs.json")]
    subprocess.run(command, env=clean_environment() | {"OMP_NUM_THREADS": "1"}, cwd=ROOT, check=True, timeout=900)
    return Jobs(folder)


def test_initial_weights_are_the_same_bits(jobs: Jobs) -> None:
    ours, theirs = (jobs.weights(program, "untrained", 1) for program in ("hvdtrain", "returnn"))
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not numpy.array_equal(ours[name], theirs[name])] == []


@pytest.mark.parametrize("name", [name for name in TRAININGS if name != "untrained"])
def test_scores_are_those_of_returnn(jobs: Jobs, name: str) -> None:
    """Of training and of dev, dropout included, in every epoch."""
    epochs = 1 if name == "attention" else 2
    jobs.weights("returnn", name, epochs)
    jobs.weights("hvdtrain", name, epochs)
    expected, found = jobs.theirs(name), jobs.scores(name)[:epochs]
    assert len(expected) == epochs
    for theirs, ours in zip(expected, found, strict=True):
        assert {score: ours[score] for score in theirs} == pytest.approx(theirs, rel=3e-6, abs=1e-7)


def test_each_program_goes_on_from_the_other_ones_checkpoint(jobs: Jobs) -> None:
    [ours, theirs] = [jobs.weights(program, "imported") for program in ("hvdtrain", "returnn")]
    assert jobs.scores("imported")[0] == pytest.approx(jobs.theirs("imported")[0], rel=1e-5)
    assert (ours["global_step"], theirs["global_step"]) == (40, 80)  # RETURNN goes on counting


def test_nadam_trains_although_the_key_is_broken_in_returnn(jobs: Jobs) -> None:
    first, second = jobs.scores("nadam")
    assert second["train_loss_score"] < first["train_loss_score"] < 1.7


def test_constraints_that_wait_for_gradients_work_where_these_are_fed(jobs: Jobs) -> None:
    for apart, together in zip(jobs.scores("decoupled_apart"), jobs.scores("decoupled"), strict=True):
        assert apart == pytest.approx(together, rel=1e-6)


def test_training_goes_on_from_a_checkpoint_and_its_files_are_complete(jobs: Jobs) -> None:
    folder = jobs.folder / "hvdtrain" / "plain"
    assert "training goes on after epoch 2, step 40." in (folder / "out").read_text()
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


def test_the_outputs_of_a_layer_are_written_for_every_sequence(jobs: Jobs, corpus: Path) -> None:
    written, dev = (open_hdf([str(path)]) for path in (jobs.folder / "encoder.hdf", corpus / "dev.hdf"))
    assert written.num_sequences == dev.num_sequences == 101
    assert numpy.array_equal(written.lengths["data"], dev.lengths["data"])
    assert written.streams["data"].shape == (6,)
