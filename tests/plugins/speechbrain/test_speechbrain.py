"""A Brain against SpeechBrain's own `fit` on one process."""

from pathlib import Path
from typing import Any

import pytest
import torch
from inside import run_inside
from other_trainers import check_resume, difference, state_of, train

import hvdtrain
from hvdtrain.errors import ConfigError

speechbrain = pytest.importorskip("speechbrain")
hyperpyyaml = pytest.importorskip("hyperpyyaml")

HPARAMS = """
seed: 7
__set_seed: !apply:torch.manual_seed [!ref <seed>]
lr: 0.05
save: !PLACEHOLDER
encoder: !new:speechbrain.nnet.containers.Sequential
    input_shape: [null, null, 6]
    linear1: !name:speechbrain.nnet.linear.Linear
        n_neurons: 8
    linear2: !name:speechbrain.nnet.linear.Linear
        n_neurons: 6
modules:
    encoder: !ref <encoder>
opt_class: !name:torch.optim.SGD
    lr: !ref <lr>
    momentum: 0.9
annealing: !new:speechbrain.nnet.schedulers.NewBobScheduler
    initial_value: !ref <lr>
    improvement_threshold: 0.5
number_of_epochs: 2
epoch_counter: !new:speechbrain.utils.epoch_loop.EpochCounter
    limit: !ref <number_of_epochs>
checkpointer: !new:speechbrain.utils.checkpoints.Checkpointer
    checkpoints_dir: !ref <save>
    recoverables:
        encoder: !ref <encoder>
        annealing: !ref <annealing>
        counter: !ref <epoch_counter>
train_dataloader_opts:
    batch_size: 4
valid_dataloader_opts:
    batch_size: 4
"""


class Recognizer(speechbrain.Brain):  # type: ignore[misc, name-defined]
    def compute_forward(self, batch: Any, stage: Any) -> Any:
        sound, lengths = batch.sig
        return self.modules.encoder(sound).log_softmax(-1), lengths

    def compute_objectives(self, predictions: Any, batch: Any, stage: Any) -> torch.Tensor:
        (scores, lengths), (words, word_lengths) = predictions, batch.words
        decoded = speechbrain.decoders.ctc_greedy_decode(scores, lengths, blank_id=0)
        self.wer.append(batch.id, decoded, words, target_len=word_lengths)
        return speechbrain.nnet.losses.ctc_loss(scores, words, lengths, word_lengths, blank_index=0)

    def on_stage_start(self, stage: Any, epoch: Any = None) -> None:
        self.wer = speechbrain.utils.metric_stats.ErrorRateStats()

    def on_stage_end(self, stage: Any, stage_loss: float, epoch: Any = None) -> None:
        self.seen = [*getattr(self, "seen", []), (stage.name, epoch, self.wer.summarize("error_rate"), len(self.wer.ids))]
        if stage == speechbrain.Stage.VALID:
            _, rate = self.hparams.annealing(self.wer.summarize("error_rate"))
            speechbrain.nnet.schedulers.update_learning_rate(self.optimizer, rate)
            self.checkpointer.save_and_keep_only(meta={"wer": self.wer.summary["WER"]}, min_keys=["wer"])


class EachStep(Recognizer):
    def on_fit_batch_end(self, batch: Any, outputs: Any, loss: Any, should_step: bool) -> None:
        assert should_step == (self.step % self.grad_accumulation_factor == 0)
        if should_step:
            speechbrain.nnet.schedulers.update_learning_rate(self.optimizer, self.optimizer.param_groups[0]["lr"] * 0.9)

    def on_stage_end(self, stage: Any, stage_loss: float, epoch: Any = None) -> None:
        self.seen = [*getattr(self, "seen", []), (stage.name, epoch, self.wer.summarize("error_rate"), len(self.wer.ids))]


class Accumulating(EachStep):
    RUN_OPTS = {"grad_accumulation_factor": 3, "max_grad_norm": 0.5, "remove_vector_weight_decay": True}

    def on_fit_batch_end(self, batch: Any, outputs: Any, loss: Any, should_step: bool) -> None:
        if should_step:
            super().on_fit_batch_end(batch, outputs, loss, should_step)
        rounded = round(float(self.avg_train_loss), 4)
        self.seen = [*getattr(self, "seen", []), (self.step, self.optimizer_step, rounded, should_step)]


class Several(EachStep):
    """An optimizer that is frozen, and two with rates of their own."""

    RUN_OPTS = {"max_grad_norm": 0.5}

    def init_optimizers(self) -> None:
        layers = self.modules.encoder
        self.first = torch.optim.SGD(layers.linear1.parameters(), 0.02)
        self.optimizer = torch.optim.Adam([layers.linear2.w.weight], 0.01)
        self.last = torch.optim.SGD([layers.linear2.w.bias], 0.5)
        self.optimizers_dict = {"first": self.first, "second": self.optimizer, "last": self.last}

    def freeze_optimizers(self, optimizers: Any) -> Any:
        return {name: optimizer for name, optimizer in optimizers.items() if name != "last"}

    def on_stage_end(self, stage: Any, stage_loss: float, epoch: Any = None) -> None:
        self.metrics["of_frames"].summarize("average")
        super().on_stage_end(stage, stage_loss, epoch)
        self.seen[-1] += self.step, self.optimizer_step, self.hparams.multi.summarize("average")

    def on_stage_start(self, stage: Any, epoch: Any = None) -> None:
        super().on_stage_start(stage, epoch)
        self.metrics = {"of_frames": speechbrain.utils.metric_stats.MetricStats(torch.clone)}
        self.hparams.multi = speechbrain.utils.metric_stats.MultiMetricStats(lambda a: {"twice": 2 * a}, batch_eval=True)

    def compute_objectives(self, predictions: Any, batch: Any, stage: Any) -> torch.Tensor:
        self.metrics["of_frames"].append(batch.id, batch.sig.lengths)
        self.hparams.multi.append(batch.id, batch.words.lengths)
        return super().compute_objectives(predictions, batch, stage)


class SeveralAccumulating(Several):
    RUN_OPTS = {"max_grad_norm": 0.5, "grad_accumulation_factor": 3}


def sentences(size: int) -> Any:
    generator = torch.Generator().manual_seed(size)
    items = {}
    for number in range(size):
        words = torch.randint(1, 6, (3 + number % 4,), generator=generator)
        sound = torch.randn((3 * len(words), 6), generator=generator)
        items[f"{number:02}"] = {"sig": sound, "words": words}
    return speechbrain.dataio.dataset.DynamicItemDataset(items, output_keys=["id", "sig", "words"])


def options(kind: type) -> dict[str, Any]:
    return {"device": "cpu", **getattr(kind, "RUN_OPTS", {})}


def keys(folder: Path, kind: type = Recognizer, **more: Any) -> dict[str, Any]:
    file = folder / "hparams.yaml"
    file.write_text(HPARAMS)
    entries = {"class": kind, "hparams": file, "overrides": {"save": str(folder / "ours")}, "run_opts": options(kind), **more}
    return {"brain": {"datasets": lambda hparams: (sentences(12), sentences(8)), **entries}}


def fitted(folder: Path, kind: type) -> Any:
    """A Brain that SpeechBrain has trained, and its weights before."""
    hparams = hyperpyyaml.load_hyperpyyaml(HPARAMS, {"save": str(folder / "theirs")})
    brain = kind(hparams["modules"], hparams["opt_class"], hparams, options(kind), hparams["checkpointer"])  # type: ignore[call-arg]
    start = state_of(brain.modules)  # type: ignore[attr-defined]
    loader = hparams["train_dataloader_opts"]
    brain.fit(  # type: ignore[attr-defined]
        hparams["epoch_counter"], sentences(12), sentences(8), False, {**loader, "shuffle": False}, {**loader}
    )
    return brain, start


@pytest.mark.parametrize("kind", [Recognizer, EachStep, Accumulating, Several, SeveralAccumulating])
def test_the_weights_rates_and_statistics_are_those_of_fit(kind: type, tmp_path: Path) -> None:
    brain, start = fitted(tmp_path, kind)
    brains: list[Any] = []

    class Keeps(kind):  # type: ignore[misc, valid-type]
        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **named)
            brains.append(self)

    result = hvdtrain.train(keys(tmp_path, Keeps), model=str(tmp_path / "model"), num_threads=1)
    weights = state_of(result.model)
    assert difference(weights, state_of(brain.modules), start) < 1e-6
    assert [str(entry) for entry in brains[-1].seen] == [str(entry) for entry in brain.seen]
    assert brains[-1].optimizer.param_groups[0]["lr"] == brain.optimizer.param_groups[0]["lr"] != 0.05
    assert result.scores["dev_loss_wer"] == brain.seen[-1][2]
    for step in (3, 4):  # after the last batch of an epoch, and within the next one
        folder = tmp_path / str(step)
        folder.mkdir()
        check_resume(lambda folder=folder: keys(folder, Keeps), folder, step, weights)  # type: ignore[misc]
        seen = brains[-1].seen
        assert [str(entry) for entry in seen] == [str(entry) for entry in brain.seen[-len(seen) :]]


def test_a_scheduler_goes_on_with_what_hooks_have_added_to_it(tmp_path: Path) -> None:
    """The rate of a CyclicLRScheduler, which is in none of its files, after the last batch of an epoch."""

    class Cyclic(EachStep):
        def on_fit_batch_end(self, batch: Any, outputs: Any, loss: Any, should_step: bool) -> None:
            self.hparams.annealing.on_batch_end(self.optimizer)

        def on_stage_end(self, stage: Any, stage_loss: float, epoch: Any = None) -> None:
            speechbrain.nnet.schedulers.update_learning_rate(self.optimizer, self.hparams.annealing(epoch)[1])

    def new_keys() -> dict[str, Any]:
        config = keys(tmp_path, Cyclic)
        before = "NewBobScheduler\n    initial_value: !ref <lr>\n    improvement_threshold: 0.5"
        assert before in HPARAMS
        config["brain"]["hparams"].write_text(HPARAMS.replace(before, "CyclicLRScheduler\n    step_size: 4"))
        return config

    check_resume(new_keys, tmp_path, 3, train(new_keys(), tmp_path / "model"))


def test_the_epoch_counter_may_stop(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Stops(EachStep):
        def on_evaluate_start(self, max_key: Any = None, min_key: Any = None) -> None: ...

        def on_stage_end(self, stage: Any, stage_loss: float, epoch: Any = None) -> None:
            if stage == speechbrain.Stage.VALID:
                self.hparams.epoch_counter.update_metric(-epoch)

    config = keys(tmp_path, Stops)
    stopper = "EpochCounterWithStopper\n    limit_to_stop: 1\n    limit_warmup: 0\n    direction: max"
    config["brain"]["hparams"].write_text(HPARAMS.replace("EpochCounter", stopper).replace("epochs: 2", "epochs: 5"))
    assert len(hvdtrain.train(config, model=str(tmp_path / "model"), num_threads=1).history) == 2
    hvdtrain.evaluate(config, checkpoint=2, model=str(tmp_path / "model"), num_threads=1)
    assert "brain: on_evaluate_start of Stops is not called" in caplog.text


def test_a_statistic_of_an_earlier_stage_is_no_score(tmp_path: Path) -> None:
    class OfValid(EachStep):
        def on_stage_start(self, stage: Any, epoch: Any = None) -> None:
            self.unused = speechbrain.utils.metric_stats.ErrorRateStats()
            if stage != speechbrain.Stage.TRAIN:
                self.wer = self.of_valid = speechbrain.utils.metric_stats.ErrorRateStats()
            else:
                self.wer = self.__dict__.get("ever", self.unused)  # goes on over the epochs
                self.ever = self.wer

    result = hvdtrain.train(keys(tmp_path, OfValid), model=str(tmp_path / "model"), num_threads=1)
    assert "dev_loss_of_valid" in result.scores
    assert "train_loss_of_valid" not in result.scores


def test_a_checkpoint_of_theirs_is_continued_with_its_optimizer(tmp_path: Path) -> None:
    brain, _ = fitted(tmp_path, Recognizer)
    brain.checkpointer.recover_if_possible(min_key="wer")
    [folder] = (tmp_path / "theirs").glob("CKPT+*")
    begun = state_of(brain.modules)
    weights = state_of(hvdtrain.load_model(tmp_path / "theirs", keys(tmp_path), model="none", num_threads=1))
    assert all(torch.equal(weights[name], begun[name]) for name in begun)
    loader = brain.hparams.train_dataloader_opts
    epochs = brain.hparams.epoch_counter
    epochs.limit = epochs.current + 2
    brain.fit(epochs, sentences(12), sentences(8), False, {**loader, "shuffle": False}, loader)
    weights = train(keys(tmp_path), tmp_path / "model", load=str(folder), num_epochs=epochs.limit)
    assert difference(weights, state_of(brain.modules), begun) < 1e-6
    (folder / "encoder.ckpt").unlink()
    with pytest.raises(hvdtrain.HvdtrainError, match="expected a file encoder.ckpt, got none"):
        train(keys(tmp_path), tmp_path / "other", load=str(folder))


def test_a_checkpoint_from_within_an_epoch_is_continued(tmp_path: Path) -> None:
    """In the order of SpeechBrain's sampler."""
    shuffled = HPARAMS.replace("    batch_size: 4\nvalid", "    batch_size: 4\n    shuffle: True\nvalid")
    hparams = hyperpyyaml.load_hyperpyyaml(shuffled, {"save": str(tmp_path / "theirs")})
    brain = EachStep(
        hparams["modules"], hparams["opt_class"], hparams, {"device": "cpu", "ckpt_interval_steps": 2}, hparams["checkpointer"]
    )
    start = state_of(brain.modules)
    brain.fit(hparams["epoch_counter"], sentences(12), sentences(8), False, {**hparams["train_dataloader_opts"]})
    config = keys(tmp_path, EachStep)
    config["brain"]["hparams"].write_text(shuffled)
    assert difference(train(config, tmp_path / "whole"), state_of(brain.modules), start) < 1e-6
    weights = train(config, tmp_path / "model", load=str(tmp_path / "theirs"))
    assert difference(weights, state_of(brain.modules), start) < 1e-6
    with pytest.raises(hvdtrain.HvdtrainError, match="expected a checkpoint from the end of an epoch, .* after 2 batches"):
        train(config, tmp_path / "other", load=str(tmp_path / "theirs"), max_seqs=3)


def test_a_module_with_a_state_of_its_own_is_resumed(tmp_path: Path) -> None:
    class Normalized(Recognizer):
        def compute_forward(self, batch: Any, stage: Any) -> Any:
            sound, lengths = batch.sig
            return self.modules.encoder(self.modules.normalize(sound, lengths)).log_softmax(-1), lengths

    def new_keys() -> dict[str, Any]:
        config = keys(tmp_path, Normalized)
        normalize = "    normalize: !new:speechbrain.processing.features.InputNormalization\n        norm_type: global\n"
        config["brain"]["hparams"].write_text(HPARAMS.replace("modules:\n", "modules:\n" + normalize))
        return config

    check_resume(new_keys, tmp_path, 4, train(new_keys(), tmp_path / "model"))
    with pytest.raises(ConfigError, match="expected modules whose state is in the model's file, got normalize"):
        hvdtrain.evaluate(new_keys(), checkpoint=2, model=str(tmp_path / "model"), num_threads=1)


def test_batches_of_a_sampler_are_those_of_fit(tmp_path: Path) -> None:
    """As a recipe returns them, after its datasets; on one process, SpeechBrain does not tell it the epoch."""

    def samplers(random: str) -> list[Any]:
        return [
            speechbrain.dataio.sampler.DynamicBatchSampler(
                sentences(size), 60, 3, lengths_list=[9 + 3 * (number % 4) for number in range(size)], batch_ordering=random
            )
            for size in (12, 8)
        ]

    hparams = hyperpyyaml.load_hyperpyyaml(HPARAMS, {"save": str(tmp_path / "theirs")})
    brain = Several(hparams["modules"], hparams["opt_class"], hparams, options(Several), hparams["checkpointer"])
    start = state_of(brain.modules)
    train_batches, valid_batches = samplers("random")
    assert len({len(batch) for batch in train_batches._batches}) > 1
    brain.fit(
        hparams["epoch_counter"],
        *(sentences(12), sentences(8), False),
        *({"batch_sampler": train_batches}, {"batch_sampler": valid_batches}),
    )
    config = keys(
        tmp_path, Several, datasets=lambda _: (sentences(12), sentences(8), {"clean": sentences(2)}, *samplers("random"))
    )
    weights = train(config, tmp_path / "model")
    assert difference(weights, state_of(brain.modules), start) < 1e-6
    check_resume(lambda: config, tmp_path, 3, weights)


def renamed() -> dict[str, Any]:
    return {"modules": {"encoder": torch.nn.Linear(6, 6)}, "opt_class": torch.optim.Adam, "my_loader": {"batch_size": 4}}


class OwnLoop(Recognizer):
    def fit_batch(self, batch: Any) -> Any: ...


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ({"class": OwnLoop}, "expected a Brain with SpeechBrain's own fit_batch, got that of OwnLoop"),
        ({"run_opts": {"jit": True, "device": "cpu"}}, "expected the key torch_compile, got jit = True"),
        ({"hparam": 1}, "expected a function, or a dict of .*, got 'hparam'"),
        ({"hparams": {}}, "expected a hyperpyyaml file, or a function that makes them, got {}"),
        ({"hparams": renamed}, "expected the options of loaders as train_dataloader_opts, or dataloader_options, got my_loader"),
        ({"datasets": lambda hparams: {"validation": sentences(2)}}, "expected train, valid, test, got 'validation'"),
    ],
)
def test_what_has_no_counterpart_is_refused(entries: dict[str, Any], expected: str, tmp_path: Path) -> None:
    with pytest.raises(hvdtrain.HvdtrainError, match=expected):
        train(keys(tmp_path, **entries) if "class" not in entries else keys(tmp_path, entries["class"]), tmp_path / "model")


def test_evaluations_within_an_epoch_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected evaluations after epochs only"):
        train(keys(tmp_path), tmp_path / "model", eval_interval_steps=1)


def test_init_writes_a_config_that_trains(tmp_path: Path) -> None:
    config = tmp_path / "mine.py"
    assert run_inside(["init", config, "--speechbrain"]).status == 0
    finished = run_inside([config, "++model", tmp_path / "model", "++num_epochs", 2, "++num_threads", 1])
    assert finished.status == 0, finished.err
