"""The configs that plug-ins bring, for models of other trainers: the same weights on any number of ranks, which are alike."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from inside import run_inside
from trainings import Run, Trained, assert_alike, assert_same, trains

from hvdtrain.plugins.init.__main__ import main

PACKAGES = {"espnet": "espnet2", "lightning": "lightning", "speechbrain": "speechbrain", "transformers": "transformers"}
NAMES = [name for name, package in PACKAGES.items() if find_spec(package) is not None]
"""Those whose package is installed."""

MORE = ("speechbrain_normalized", "speechbrain_global", "lightning_counted", "lightning_manual")
VARIATIONS = [*NAMES, *[name for name in MORE if name.partition("_")[0] in NAMES]]

NORMALIZED = {
    '"modules": {': '"modules": {"normalize": speechbrain.processing.features.InputNormalization(), ',
    "output(sound)": "output(self.modules.normalize(sound, lengths))",
    "sentences(300": "sentences(37",
}
"""A Brain with statistics of all batches, and a rank alone in the last step of an epoch."""

GLOBAL = {
    '"modules": {': '"modules": {"normalize": speechbrain.processing.features.GlobalNorm(length_dim=1), ',
    "output(sound)": "output(self.modules.normalize(sound, lengths, skip_update=stage != speechbrain.Stage.TRAIN))",
    "        words, word_lengths = batch.words\n": (
        "        words, word_lengths = batch.words\n        self.lengths.append(batch.id, lengths)\n"
    ),
    "        self.wer = ": (
        "        self.lengths = speechbrain.utils.metric_stats.MultiMetricStats(lambda one: {'mean': one}, batch_eval=True)\n"
        "        self.wer = "
    ),
    "sentences(300": "sentences(37",
}
COUNTED = {
    'average="micro")\n': (
        'average="micro")\n        self.num_trained, self.mean = torchmetrics.SumMetric(), torchmetrics.MeanMetric()\n'
        """
    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.num_trained.update(torch.ones(len(batch[0])))

    def on_train_epoch_end(self):
        self.log("num_trained", self.num_trained)

    def on_validation_epoch_start(self):
        self.mean.reset()

    def on_validation_epoch_end(self):
        self.log("mean", self.mean.compute())
"""
    ),
    "        self.accuracy(scores, classes)\n": "        self.accuracy(scores, classes)\n        self.mean.update(scores)\n"
    "        self.num_trained.update(torch.ones(len(scores)))\n",
    "import torch\n": "import torch\nimport torchmetrics\n",
    "lightning_module =": 'lightning_trainer = {"val_check_interval": 3, "max_epochs": 2}\nlightning_module =',
    "self.loader(400": "self.loader(37",
}
"""Metrics that hooks update, reset and compute, one of them in training and validation, with evaluations within an epoch, and a
rank alone in its last step."""

MANUAL = {
    "        self.accuracy = ": "        self.automatic_optimization = False\n        self.accuracy = ",
    "        return loss\n": (
        "        self.optimizers().zero_grad()\n        self.manual_backward(loss)\n        self.optimizers().step()\n"
    ),
    "self.loader(400": "self.loader(48",
}
"""A module that steps its optimizer itself."""

CHANGES = {
    "speechbrain_normalized": NORMALIZED,
    "speechbrain_global": GLOBAL,
    "lightning_counted": COUNTED,
    "lightning_manual": MANUAL,
}
SCORES = {
    "speechbrain_global": ["dev_loss_lengths_mean"],
    "lightning_counted": ["train_loss_num_trained", "dev_loss_mean"],
}

TWO, THREE = Run("torch", "horovod", 2), Run("torch", "horovod", 3)


@trains(slow=[TWO.alone, TWO, THREE], apart=True)  # these packages import TensorFlow where they find it
def trainings(run: Run, folder: Path) -> dict[str, dict[str, object]]:
    folder.mkdir(parents=True, exist_ok=True)
    made: dict[str, dict[str, object]] = {}
    for name in VARIATIONS:
        config = folder / f"my_{name}.py"
        if not config.exists():
            assert main([str(config), f"--{name.partition('_')[0]}"]) == 0
            text = config.read_text()
            for before, after in CHANGES.get(name, {}).items():
                assert before in text
                text = text.replace(before, after)
            config.write_text(text)
        made[name] = {"configs": [config], "max_seqs": 12 // run.size, "num_epochs": 2, "num_threads": 1}
    return made


@pytest.mark.slow
@pytest.mark.parametrize("of", [TWO, THREE], ids=str)
@pytest.mark.parametrize("name", VARIATIONS)
def test_several_ranks_are_one(trained: Trained, name: str, of: Run) -> None:
    alone, together = trained(trainings, of.alone), trained(trainings, of)
    assert_same(together.weights(name, 0), together.weights(name, of.size - 1))
    assert_alike(alone.weights(name), together.weights(name))
    for score in SCORES.get(name, []):
        [wanted, found] = [each.scores(name)[-1][score] for each in (alone, together)]
        assert found == pytest.approx(wanted)
    if name == "lightning_counted":
        [wanted, found] = [each.evaluations(name)[-1]["scores"]["dev_loss_mean"] for each in (alone, together)]
        assert found == pytest.approx(wanted)


KILLED = """
import os

class Killed:
    def on_step_end(self, training):
        if training.step == config.int("killed_after", 0):
            os.kill(os.getpid(), 9)

callbacks = [Killed()]
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_killed_training_ends_with_the_same_weights(name: str, tmp_path: Path) -> None:
    config = tmp_path / "config.py"
    assert main([str(config), f"--{name}"]) == 0
    config.write_text(config.read_text() + KILLED)
    options = ["++num_epochs", "2", "++num_threads", "1", "++save_interval_steps", "4", "++model"]
    killed = [sys.executable, "-m", "hvdtrain", str(config), *options, str(tmp_path / "killed"), "++killed_after", "10"]
    assert subprocess.run(killed, cwd=tmp_path, capture_output=True).returncode == -9
    assert (tmp_path / "killed.001.step-8.pt").exists()
    found = []
    for model in (tmp_path / "killed", tmp_path / "whole"):
        finished = run_inside([config, *options, model])
        assert finished.status == 0, finished.err
        found.append(torch.load(f"{model}.002.pt", weights_only=True)["model"])
    assert all(torch.equal(found[0][key], found[1][key]) for key in found[1])
