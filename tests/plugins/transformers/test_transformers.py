"""Models of transformers, tiny and random, against its own Trainer on one process."""

import copy
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from inside import run_inside
from other_trainers import check_resume, difference, state_of, train

import hvdtrain
from hvdtrain.errors import CheckpointError, ConfigError

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
tokenizers = pytest.importorskip("tokenizers")
from transformers.trainer_pt_utils import LengthGroupedSampler  # noqa: E402

from hvdtrain.plugins.transformers.arguments import Arguments  # noqa: E402
from hvdtrain.plugins.transformers.collators import Collate  # noqa: E402

SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
NO_DROPOUT_OF_SOUND = dict.fromkeys(
    ["hidden_dropout", "attention_dropout", "activation_dropout", "feat_proj_dropout", "final_dropout", "layerdrop"], 0.0
)
CONVOLUTIONS = {
    "conv_dim": (8, 8), "conv_stride": (4, 2), "conv_kernel": (8, 4), "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2, "feat_extract_norm": "layer", "do_stable_layer_norm": True, "mask_time_prob": 0.0,
}  # fmt: skip


class Own(torch.nn.Module):
    """A module that is none of transformers': it has neither a config nor a save_pretrained."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.output = torch.nn.Embedding(30, 8), torch.nn.Linear(8, 3)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.output(self.embedding(input_ids).mean(1))
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


def make(kind: str) -> Any:
    torch.manual_seed(3)
    if kind == "own":
        return Own()
    if kind == "gpt2":
        dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        config = transformers.GPT2Config(vocab_size=30, n_embd=16, n_layer=1, n_head=2, n_positions=32, **dropout)
        return transformers.GPT2LMHeadModel(config)
    if kind == "classes":
        dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "num_labels": 3}
        config = transformers.GPT2Config(vocab_size=30, n_embd=16, n_layer=1, n_head=2, n_positions=32, **dropout)
        return transformers.GPT2ForSequenceClassification(config)
    if kind == "llama":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=30, **SIZES))
    if kind == "t5":
        sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2, "dropout_rate": 0.0}
        return transformers.T5ForConditionalGeneration(
            transformers.T5Config(vocab_size=30, decoder_start_token_id=0, pad_token_id=0, **sizes)
        )
    if kind == "clip":
        sizes = {**SIZES, "projection_dim": 8}
        text, vision = {"vocab_size": 30, **sizes}, {"image_size": 8, "patch_size": 4, **sizes}
        return transformers.CLIPModel(transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=8))
    if kind == "bert":
        config = transformers.BertConfig(vocab_size=30, num_labels=3, **SIZES, **NO_DROPOUT)
        return transformers.BertForSequenceClassification(config)
    if kind == "masked":
        return transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=30, **SIZES, **NO_DROPOUT))
    reduction = {"ctc_loss_reduction": kind.removeprefix("wav2vec2 "), "pad_token_id": 0, "vocab_size": 6}
    config = transformers.Wav2Vec2Config(**SIZES, **CONVOLUTIONS, **NO_DROPOUT_OF_SOUND, **reduction)
    return transformers.Wav2Vec2ForCTC(config).double()  # in float32, its noise alone can be more than 1e-6 of the change


def pads() -> Any:
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<pad>": 7}, unk_token="<pad>"))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>")


def items_of(kind: str) -> list[dict[str, Any]]:
    generator = numpy.random.default_rng(0)
    items: list[dict[str, Any]] = []
    for number in range(10):
        size = int(generator.integers(3, 9))
        tokens = generator.integers(3, 30, size).tolist()
        item: dict[str, Any] = {"input_ids": tokens, "attention_mask": [1] * size, "name": f"item {number}"}
        if kind in ("gpt2", "llama"):
            item["labels"] = tokens
        elif kind == "t5":
            item["labels"] = generator.integers(3, 30, int(generator.integers(2, 6))).tolist()
        elif kind in ("bert", "own", "classes"):
            item["labels"] = int(generator.integers(3))
        elif kind == "clip":
            item |= {"input_ids": [*tokens, 29], "attention_mask": [1] * (size + 1)}
            item["pixel_values"] = generator.standard_normal((3, 8, 8)).astype(numpy.float32)
        else:
            sound = generator.standard_normal(60 * size).tolist()
            item = {"input_values": sound, "attention_mask": [1] * len(sound), "labels": generator.integers(1, 6, 2).tolist()}
        items.append(item)
    return items


def collate(items: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    assert "name" not in items[0]  # the model does not take it (remove_unused_columns)
    padding = {"labels": -100}
    batch = {}
    for name in items[0]:
        values = [torch.tensor(item[name], dtype=torch.float64 if name == "input_values" else None) for item in items]
        is_padded = values[0].ndim == 1
        batch[name] = torch.nn.utils.rnn.pad_sequence(values, True, padding.get(name, 0)) if is_padded else torch.stack(values)
    return {**batch, "return_loss": True} if "pixel_values" in batch else batch


ARGUMENTS: dict[str, Any] = {
    "learning_rate": 0.01, "num_train_epochs": 2, "per_device_train_batch_size": 4, "per_device_eval_batch_size": 4,
    "weight_decay": 0.1, "warmup_steps": 2, "optim": "adamw_torch", "adam_epsilon": 1e-3, "train_sampling_strategy": "sequential",
}  # fmt: skip


def keys(kind: str, arguments: dict[str, Any], **more: Any) -> dict[str, Any]:
    trainer = {"model_init": lambda: make(kind), "args": arguments, "data_collator": collate, **more}
    return {"transformers_trainer": {"train_dataset": items_of(kind), "eval_dataset": items_of(kind)[:7], **trainer}}


def trainer(model: Any, kind: str, folder: Path, arguments: dict[str, Any], **more: Any) -> Any:
    quiet = {"save_strategy": "no", "report_to": "none", "use_cpu": True, "disable_tqdm": True}
    args = transformers.Seq2SeqTrainingArguments(output_dir=str(folder), **{**quiet, **arguments})
    return transformers.Seq2SeqTrainer(
        model=model,
        args=args,
        train_dataset=items_of(kind),
        eval_dataset=items_of(kind)[:7],
        **{"data_collator": collate, **more},
    )


def metrics(prediction: Any) -> dict[str, float]:
    logits = prediction.predictions[0] if isinstance(prediction.predictions, tuple) else prediction.predictions
    labels = numpy.asarray(prediction.label_ids) if numpy.ndim(prediction.label_ids) else numpy.zeros(0)  # CLIP has none
    return {"labels": float((labels != -100).sum()), "highest": float(logits.max())}


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("gpt2", {"gradient_accumulation_steps": 2, "lr_scheduler_type": "cosine"}),
        ("gpt2", {"label_smoothing_factor": 0.1}),
        ("t5", {"optim": "sgd", "max_grad_norm": 0.0, "learning_rate": 0.02}),
        ("bert", {"max_steps": 5, "lr_scheduler_type": "cosine"}),
        ("own", {"num_train_epochs": 1.5}),
        ("clip", {}),  # without labels
        ("wav2vec2 sum", {"gradient_accumulation_steps": 2, "learning_rate": 0.001}),
        ("wav2vec2 mean", {"learning_rate": 0.001}),
    ],
)
def test_the_weights_rates_and_metrics_are_the_trainers(kind: str, changes: dict[str, Any], tmp_path: Path) -> None:
    arguments, model, theirs, ours = {**ARGUMENTS, **changes}, make(kind), list[float](), list[float]()
    start = state_of(model)

    class Rates(transformers.TrainerCallback):  # type: ignore[misc]
        def on_pre_optimizer_step(self, *_: Any, optimizer: Any, **__: Any) -> None:
            theirs.append(optimizer.param_groups[0]["lr"])

    class OurRates:
        def on_step_end(self, training: Any) -> None:
            ours.append(training.learning_rate)

    its = trainer(model, kind, tmp_path, arguments, callbacks=[Rates()], compute_metrics=metrics)
    its.train()
    evaluated = its.evaluate()
    saving = {**arguments, "output_dir": str(tmp_path / "saved")}
    config = {**keys(kind, saving, compute_metrics=metrics), "callbacks": [OurRates()], "num_threads": 1}
    result = hvdtrain.train({**config, "model": str(tmp_path / "model")})
    weights = state_of(result.model)
    assert difference(weights, state_of(model), start) < 1e-6
    assert (tmp_path / "saved/best").exists() == (kind != "own")
    steps = arguments.get("gradient_accumulation_steps", 1)
    assert [
        *ours[steps - 1 : 3 : steps],
        *ours[2:3][: steps - 1],
        *ours[3 + steps - 1 :: steps],
        *ours[5:][: steps - 1],
    ] == theirs
    assert result.scores["dev_loss_labels"] == evaluated["eval_labels"]
    assert result.scores["dev_loss_highest"] == pytest.approx(evaluated["eval_highest"], rel=1e-5)
    check_resume(lambda: keys(kind, arguments, compute_metrics=metrics), tmp_path, len(ours) - 2, weights)


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("classes", {"processing_class": pads(), "data_collator": None}),  # whose padding the Trainer tells the model
        ("llama", {"data_collator": transformers.DataCollatorWithFlattening()}),  # which a model with use_cache does not see
    ],
)
def test_a_model_is_prepared_as_there(kind: str, more: dict[str, Any], tmp_path: Path) -> None:
    model = make(kind)
    start = state_of(model)
    trainer(model, kind, tmp_path, ARGUMENTS, **more).train()
    assert difference(train(keys(kind, ARGUMENTS, **more), tmp_path / "model"), state_of(model), start) < 1e-6


def test_masks_are_those_of_the_items(tmp_path: Path) -> None:
    """Not of the batches, so that they are alike on any number of ranks; also with the collator's own seed."""
    tokenizer = pads()
    tokenizer.add_special_tokens({"mask_token": "<mask>"})

    def config(size: int = 4) -> dict[str, Any]:
        collator = transformers.DataCollatorForLanguageModeling(tokenizer, seed=5, mlm_probability=0.5)
        items = [{"input_ids": item["input_ids"], "attention_mask": item["attention_mask"]} for item in items_of("gpt2")]
        arguments = {**ARGUMENTS, "per_device_train_batch_size": size, "gradient_accumulation_steps": 4 // size}
        return keys("masked", arguments, data_collator=collator, train_dataset=items, eval_dataset=items)

    weights = train(config(), tmp_path / "model")
    check_resume(config, tmp_path, 4, weights)
    of_parts = train(config(2), tmp_path / "parts")
    assert difference(of_parts, weights, state_of(make("masked"))) < 1e-5
    tokenizer.padding_side = "left"
    two = [{name: torch.tensor(values) for name in ("input_ids", "labels")} for values in ([1], [2, 3])]
    padded = Collate(transformers.DataCollatorForLanguageModeling(tokenizer), None).pad(two)
    assert [padded[name].tolist() for name in ("input_ids", "labels")] == [[[7, 1], [2, 3]], [[-100, 1], [2, 3]]]


@pytest.mark.parametrize(
    ("kind", "changes", "steps"),
    [
        (
            "gpt2",
            {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2},
            [3, 5, 10],
        ),  # within, at the end of epochs
        ("bert", {"train_sampling_strategy": "random", "seed": 5}, [1, 3]),
    ],
)
def test_a_checkpoint_of_the_trainers_is_continued_as_there(
    kind: str, changes: dict[str, Any], steps: list[int], tmp_path: Path
) -> None:
    arguments = {**ARGUMENTS, **changes}
    model = make(kind)
    start = state_of(model)
    its = trainer(model, kind, tmp_path / "theirs", {**arguments, "save_strategy": "steps", "save_steps": 1})
    its.train()
    for step in steps:
        keys_of = {**keys(kind, arguments), "load": str(tmp_path / f"theirs/checkpoint-{step}")}
        assert difference(train(keys_of, tmp_path / str(step) / "model"), state_of(model), start) < 1e-6
    with pytest.raises(CheckpointError, match=r"expected the learning_rate of scheduler.pt, 0.01, .* got 0.02"):
        train({**keys_of, "learning_rate": 0.02}, tmp_path / "other/model")
    folder = tmp_path / "theirs/checkpoint-1"
    with pytest.raises(
        CheckpointError, match="expected the batches and updates of this config, got epoch 0.[0-9]* after 1 updates"
    ):
        train({**keys_of, "load": str(folder), "max_seqs": 3}, tmp_path / "other/model")
    (folder / "optimizer.pt").unlink()
    with pytest.raises(CheckpointError, match="expected optimizer.pt and scheduler.pt, got no optimizer.pt"):
        train({**keys_of, "load": str(folder)}, tmp_path / "other/model")
    assert hvdtrain.load_model(folder, keys(kind, arguments), model="none", num_threads=1) is not None
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="expected a checkpoint of transformers' Trainer, or .* got no model.safetensors"):
        train({**keys_of, "load": str(folder)}, tmp_path / "other/model")


def test_items_are_grouped_by_length_as_there(tmp_path: Path) -> None:
    """Where the Trainer draws its order from the process-wide generator, ours is drawn from the seed and the epoch."""
    arguments, model = {**ARGUMENTS, "train_sampling_strategy": "group_by_length"}, make("gpt2")
    start = state_of(model)

    class Sampler(LengthGroupedSampler):  # type: ignore[misc]
        epoch = 0

        def __iter__(self) -> Any:
            self.generator = torch.Generator().manual_seed(42 + self.epoch)
            self.epoch += 1
            return super().__iter__()

    its = trainer(model, "gpt2", tmp_path, arguments)
    sampler = Sampler(4, items_of("gpt2"))
    its._get_train_sampler = lambda *_: sampler
    its.train()
    assert difference(train(keys("gpt2", arguments), tmp_path / "model"), state_of(model), start) < 1e-6


def test_arguments_may_be_an_object(tmp_path: Path) -> None:
    """Of which only what differs from the defaults counts: the class itself fills in some values."""
    wanted = train(keys("bert", ARGUMENTS), tmp_path / "dict")
    args = transformers.TrainingArguments(output_dir=str(tmp_path / "out"), eval_strategy="epoch", use_cpu=True, **ARGUMENTS)
    weights = train(keys("bert", args), tmp_path / "object")  # type: ignore[arg-type]
    assert all(torch.equal(weights[name], wanted[name]) for name in wanted)
    assert Arguments({"warmup_ratio": 0.1}).warmup_ratio == 0.1  # which newer classes do not have any more
    args.neftune_noise_alpha = 3.0
    with pytest.raises(ConfigError, match="got neftune_noise_alpha = 3.0"):
        train(keys("bert", args), tmp_path / "refused")  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["gpt2", "t5", "bert", "wav2vec2 mean"])
def test_accumulated_batches_are_the_trainers_one_larger_batch(kind: str, tmp_path: Path) -> None:
    """Where the Trainer's accumulated batches are not: it adds up the means of models that do not use num_items_in_batch."""
    whole = {**ARGUMENTS, "optim": "sgd", "max_grad_norm": 0.0, "learning_rate": 0.001}
    parts = {**whole, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    start, theirs = state_of(make(kind)), list[dict[str, torch.Tensor]]()
    for arguments in (whole, parts):
        model = make(kind)
        trainer(model, kind, tmp_path, arguments).train()
        theirs.append(state_of(model))
    assert difference(train(keys(kind, parts), tmp_path / "model"), theirs[0], start) < 1e-5
    assert (difference(theirs[1], theirs[0], start) < 1e-5) == (kind == "gpt2")


def test_generate_is_that_of_predict_and_the_best_model_is_one_of_transformers(tmp_path: Path) -> None:
    arguments = {**ARGUMENTS, "predict_with_generate": True, "generation_max_length": 6, "output_dir": str(tmp_path)}
    seen: list[Any] = []

    def noting(prediction: Any) -> dict[str, float]:
        seen.append((prediction.predictions.tolist(), prediction.label_ids.tolist()))
        return {}

    result = hvdtrain.train(keys("t5", arguments, compute_metrics=noting), num_threads=1)
    theirs = {name: value for name, value in arguments.items() if name != "output_dir"}
    its = trainer(copy.deepcopy(result.model), "t5", tmp_path, theirs, compute_metrics=noting)
    its.evaluate()
    assert seen[-1] == seen[-2]
    predicted = its.predict(items_of("t5")[:7], max_length=6).predictions
    outputs: dict[str, Any] = {}

    class Callback:
        def init(self, *, model: Any) -> None: ...
        def process_seq(self, *, seq_tag: str, outputs: Any) -> None:
            collected[seq_tag] = outputs

        def finish(self) -> None: ...

    collected = outputs
    config = {**keys("t5", arguments), "forward_data": "dev", "forward_callback": Callback, "num_threads": 1}
    hvdtrain.forward(config, checkpoint=2)
    for number, tokens in enumerate(predicted):
        mine = outputs[f"seq-{number}"]["output"].raw_tensor
        assert mine.tolist() == tokens[: len(mine)].tolist()
        assert outputs[f"seq-{number}"]["labels"].raw_tensor.tolist() == items_of("t5")[number]["labels"]
    arguments["predict_with_generate"] = False  # the logits for the labels
    hvdtrain.forward({**config, **keys("t5", arguments)}, checkpoint=2)
    assert [len(outputs[f"seq-{number}"]["output"].raw_tensor) for number in range(7)] == [
        len(item["labels"]) for item in items_of("t5")[:7]
    ]
    best = transformers.T5ForConditionalGeneration.from_pretrained(tmp_path / "best")
    saved = torch.load(tmp_path / f"model.{result.best.epoch:03}.pt", weights_only=True)["model"]
    assert torch.equal(best.state_dict()["shared.weight"], saved["shared.weight"])


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"callbacks": [1]}, "expected the key callbacks .early_stopping_patience .*, got callbacks"),
        ({"datacollator": collate}, "expected arguments of a Trainer, got .datacollator. .did you mean data_collator"),
        ({"model": torch.nn.Linear(1, 1)}, "expected either model or model_init, got both"),
        ({"args": {"max_steps": 5}, "train_dataset": None}, "max_steps: expected -1 without .*train_dataset .*, got 5"),
        ({"args": {"deepspeed": "zero.json"}}, "expected arguments that hvdtrain serves, got deepspeed = 'zero.json'"),
        ({"args": {"lerning_rate": 1}}, "expected arguments that hvdtrain serves, got lerning_rate = 1"),
        ({"args": {"dataloader_drop_last": True}}, "dataloader_drop_last: expected False"),
        ({"args": {"lr_scheduler_type": "reduce_lr_on_plateau"}}, "lr_scheduler_type: expected one whose rate follows"),
    ],
)
def test_what_has_no_counterpart_is_refused(arguments: dict[str, Any], expected: str, tmp_path: Path) -> None:
    values = keys("bert", ARGUMENTS)["transformers_trainer"]
    with pytest.raises(ConfigError, match=expected):
        train({"transformers_trainer": {**values, **arguments}}, tmp_path / "model")


def test_wrong_values_are_told_before_anything_follows_from_them(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="^1 problem in the config:\n  transformers_trainer: expected a dict or None, got"):
        train({"transformers_trainer": object()}, tmp_path / "model")
    given = keys("bert", ARGUMENTS)
    with pytest.raises(ConfigError, match="max_seqs: expected a number with transformers_trainer, got <function"):
        train({**given, "max_seqs": lambda *, epoch, **_: epoch}, tmp_path / "model")


def test_a_model_with_several_losses_is_refused(tmp_path: Path) -> None:
    model = transformers.BertForPreTraining(transformers.BertConfig(vocab_size=30, **SIZES))
    arguments = {"model": model, "data_collator": collate, "train_dataset": items_of("gpt2")}
    with pytest.raises(ConfigError, match="expected a model with one kind of labels, got BertForPreTraining with labels, next_"):
        train({"transformers_trainer": arguments}, tmp_path / "model")
    arguments |= {"model": make("clip"), "data_collator": lambda items: collate(items) | {"return_loss": False}}
    arguments["train_dataset"] = items_of("clip")
    with pytest.raises(ConfigError, match="expected a loss from CLIPModel, got .* 'return_loss': True"):
        train({"transformers_trainer": arguments}, tmp_path / "clip")


def test_init_writes_a_config_that_learns(tmp_path: Path) -> None:
    config = tmp_path / "mine.py"
    assert run_inside(["init", config, "--transformers"]).status == 0
    finished = run_inside([config, "++model", tmp_path / "model", "++num_epochs", 2, "++num_threads", 1])
    assert finished.status == 0, finished.err
