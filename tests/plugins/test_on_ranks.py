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

MORE = (
    *("speechbrain_normalized", "speechbrain_global", "lightning_counted", "lightning_manual", "lightning_elements"),
    *("transformers_short", "transformers_masked", "espnet_short"),
)
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

ELEMENTS = {
    "loss = torch.nn.functional.cross_entropy(self.net(points), classes)": (
        "losses = torch.nn.functional.cross_entropy(self.net(points), classes, reduction='none')\n"
        "        loss, number = (losses * classes).sum() / classes.sum().clamp(min=1), classes.sum()"
    ),
    "        return loss\n": "        return {'loss': loss, 'num_elements': number}\n",
    "self.loader(400": "self.loader(37",
}
"""A loss that is a mean over something else than the items, which the module says."""

SHORT = {"words(600": "words(37"}
MASKED = {
    **SHORT,
    "from transformers import": "import transformers\nfrom transformers import",
    "early_stopping_measure": (
        "def masked():\n"
        "    sizes = {'hidden_size': 16, 'num_hidden_layers': 1, 'num_attention_heads': 2, 'intermediate_size': 32}\n"
        "    dropout = dict.fromkeys(['hidden_dropout_prob', 'attention_probs_dropout_prob'], 0.0)\n"
        "    model = transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=13, **sizes, **dropout))\n"
        "    model.bert.encoder.layer[0].attention.self.key.bias.requires_grad_(False)  # its gradient is 0, but for noise\n"
        "    return model\n\n"
        "TOKENIZER.add_special_tokens({'mask_token': '<mask>'})\n"
        "collator = transformers.DataCollatorForLanguageModeling(TOKENIZER, mlm_probability=0.5)\n"
        "del transformers_trainer['compute_metrics']\n"
        "transformers_trainer |= {'model_init': masked, 'data_collator': collator}\n"
        "early_stopping_measure"
    ),
    ', "labels": [*one[::-1], 1]}': "}",
}
"""Random masks, which belong to the items, and a rank alone in the last step of an epoch."""

CHANGES = {
    "lightning_elements": ELEMENTS,
    "transformers": {"0, **sizes))": "0, **sizes)).double()"},  # in float32, rounding may put a ReLU on its other side
    "transformers_short": SHORT,
    "transformers_masked": MASKED,
    "espnet_short": {'"size": 500': '"size": 37'},
    "speechbrain_normalized": NORMALIZED,
    "speechbrain_global": GLOBAL,
    "lightning_counted": COUNTED,
    "lightning_manual": MANUAL,
}
SCORES = {
    "speechbrain_global": ["dev_loss_lengths_mean"],
    "lightning_counted": ["train_loss_num_trained", "dev_loss_mean"],
    **dict.fromkeys(("lightning_elements", "transformers_short", "transformers_masked", "espnet_short"), ["train_loss_loss"]),
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
