"""The arguments of transformers' Trainer as keys: a train_step with its model and collator, and a forward_step that generates."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from transformers import DataCollatorWithPadding, GenerationConfig, PreTrainedTokenizerBase, ProcessorMixin, default_data_collator
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.trainer_pt_utils import LabelSmoother
from transformers.trainer_utils import align_special_tokens
from transformers.utils.generic import find_labels

import hvdtrain
from hvdtrain.config.check import did_you_mean
from hvdtrain.errors import ConfigError
from hvdtrain.plugins.other_trainer.trainer import OtherTrainer
from hvdtrain.plugins.transformers.arguments import IGNORED, KEY, Arguments, Extent, items_in_update, rates, refuse
from hvdtrain.plugins.transformers.checkpoint import CheckpointReader, Order
from hvdtrain.plugins.transformers.collators import Collate
from hvdtrain.plugins.transformers.metrics import Metrics, labels_of
from hvdtrain.plugins.transformers.pretrained import SavePretrained
from hvdtrain.training.callbacks import Training

SERVED = (
    "model", "model_init", "args", "data_collator", "train_dataset", "eval_dataset", "processing_class", "compute_loss_func",
    "compute_metrics", "preprocess_logits_for_metrics",
)  # fmt: skip
REFUSED = {
    "callbacks": "the key callbacks (early_stopping_patience in place of EarlyStoppingCallback)",
    "optimizers": "the keys optimizer and dynamic_learning_rate",
    "optimizer_cls_and_kwargs": "the key optimizer",
    "compute_loss": "compute_loss_func, a function of the outputs, the labels and num_items_in_batch (or a train_step)",
}
"""Arguments of a Trainer, and what there is instead."""

QUESTIONS = ["start_positions", "end_positions"]

USUAL_LENGTH = 20
"""How many tokens transformers generates at most, if nothing says how many."""


def keys_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that follow from `transformers_trainer`. Raises: ConfigError."""
    arguments = {name: value for name, value in values[KEY].items() if value is not None}
    for name in arguments:
        if name in REFUSED:
            raise ConfigError.of("unknown-key", f"{KEY}: expected {REFUSED[name]}, got {name}")
        if name not in SERVED:
            raise ConfigError.of(
                "unknown-key", f"{KEY}: expected arguments of a Trainer, got {name!r}{did_you_mean(name, SERVED)}"
            )
    args = Arguments(arguments.get("args"))
    maker = ModelMaker(arguments, args)
    processing = arguments.get("processing_class")
    pads = hasattr(processing, "pad")
    collator = arguments.get("data_collator") or (DataCollatorWithPadding(processing) if pads else default_data_collator)
    collate = Collate(collator, partial(maker.columns, args.label_names) if args.remove_unused_columns else None)
    metrics = None
    if "compute_metrics" in arguments:
        metrics = Metrics(arguments["compute_metrics"], arguments.get("preprocess_logits_for_metrics"))
    followed = args.keys | TrainStep(maker, args, arguments, metrics).keys()
    if metrics is not None:
        followed["epoch_scores"] = {"compute_metrics": metrics}
    train = arguments.get("train_dataset")
    dev = arguments.get("eval_dataset")
    size = hvdtrain.size()
    keys = {**args.keys, **{name: value for name, value in values.items() if value is not None}}
    if train is not None:
        if not hasattr(train, "__len__"):
            raise ConfigError.of("wrong-type", f"{KEY}.train_dataset: expected one with a length, got a {type(train).__name__}")
        extent = Extent(args, keys, len(train), size, values.get("num_epochs") is not None)
        order = _order(args, keys, train, processing, size)
        followed["train"] = {**collate.dataset(train), **extent.keys_of_train, "seq_ordering": order}
        followed["num_epochs"] = extent.num_epochs
        if values.get("learning_rate_schedule") is None:
            followed["dynamic_learning_rate"] = rates(args, extent)
    elif args.max_steps > 0:
        raise refuse("max_steps", f"-1 without {KEY}.train_dataset (num_train_epochs, or num_epochs)", args.max_steps)
    num_items = None if train is None else len(train)
    followed["checkpoint_reader"] = CheckpointReader(lambda: maker.model, args, keys, num_items, size)
    if type(dev) is dict:
        followed["eval_datasets"] = {name: collate.dataset(dataset) for name, dataset in dev.items()}
    elif dev is not None:
        followed["dev"] = collate.dataset(dev)
    if args.output_dir is not None:
        others = [] if processing is None else [processing]
        followed["callbacks"] = [SaveBest(SavePretrained(f"{args.output_dir}/best", others=others))]
    return followed


def _order(args: Arguments, keys: Mapping[str, Any], items: Any, processing: Any, size: int) -> str | Order:
    strategy = args.train_sampling_strategy
    if strategy == "sequential":
        return "default"
    if strategy not in ("random", "group_by_length"):
        raise refuse("train_sampling_strategy", "random, sequential or group_by_length", strategy)
    seed = int(keys["random_seed"] if args.data_seed is None else args.data_seed)
    column = "input_ids" if processing is None else processing.model_input_names[0]
    return Order(strategy, items, args, seed, column, items_in_update(keys, size))


class SaveBest:
    """The best model, written by its `save_pretrained`; a module without one is in hvdtrain's checkpoints only."""

    def __init__(self, saver: SavePretrained) -> None:
        self._saver = saver

    def on_save(self, training: Training) -> None:
        if hasattr(training.model, "save_pretrained"):
            self._saver.on_save(training)


class ModelMaker:
    def __init__(self, arguments: Mapping[str, Any], args: Arguments) -> None:
        self.model: Any = arguments.get("model")  # the one that was given out last
        self._init = arguments.get("model_init")
        self._args = args
        self._processing = arguments.get("processing_class")
        self._is_given_out = False
        if (self.model is None) == (self._init is None):
            got = "neither" if self.model is None else "both"
            raise ConfigError.of("conflict", f"{KEY}: expected either model or model_init, got {got}")

    def get(self, **_: Any) -> Any:
        """As the key get_model. Raises: ConfigError, if the one model is asked for a second time, when it is trained already."""
        if self._init is not None:
            self.model = self._init()
        elif self._is_given_out:
            raise ConfigError.of(
                "conflict", f"{KEY}.model: expected model_init, a function that makes it, to make it again, got the model itself"
            )
        self._is_given_out = True
        if getattr(self.model, "config", None) is not None:  # as the Trainer, where both have an effect on the loss
            self.model.config.use_cache = bool(self._args.use_cache)
            if isinstance(self._processing, (PreTrainedTokenizerBase, ProcessorMixin)):
                align_special_tokens(self.model, self._processing)
        if self._args.gradient_checkpointing:
            self.model.gradient_checkpointing_enable(self._args.gradient_checkpointing_kwargs)
        return self.model

    def columns(self, label_names: Sequence[str] | None) -> set[str]:
        """The columns of the data that the model, or a collator, takes."""
        model = inner_model(self.model if self.model is not None else self.get())
        labels = list(label_names or find_labels(type(model)))
        return {*inspect.signature(model.forward).parameters, "label", "label_ids", *labels}


def inner_model(model: Any) -> Any:
    """A model without PEFT's adapters around it."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


class Counting:
    """How the loss of a model's batch is the mean of its elements, and which these are.

    Attributes:
        shifts: the labels of a causal language model are those of the next token, so the first one has no loss. The Trainer knows
            it of models whose `loss_type` says so (not of GPT-2), and what it counts determines the weights.
        predicts_next: a loss with label smoothing is that of the next token.
        takes_count: forward has **kwargs, for the number of elements (`num_items_in_batch`).
        is_smoothed: `label_smoothing_factor` has an effect, unless each label may be one of several.
        is_sum: the loss is a sum over the sequences, as CTC's unless `config.ctc_loss_reduction` is "mean".

    Raises:
        ConfigError: the loss is that of several kinds of labels, and no single number of elements is right for it.
    """

    def __init__(self, model: Any, label_names: Sequence[str] | None) -> None:
        inner = inner_model(model)
        config = getattr(inner, "config", None)
        self.labels = list(label_names or find_labels(type(inner)))
        is_causal = LOSS_MAPPING.get(str(getattr(inner, "loss_type", ""))) is ForCausalLMLoss
        self.shifts = is_causal and not getattr(config, "is_encoder_decoder", False)
        self.predicts_next = type(inner).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
        kinds = [parameter.kind for parameter in inspect.signature(inner.forward).parameters.values()]
        self.takes_count = getattr(inner, "accepts_loss_kwargs", inspect.Parameter.VAR_KEYWORD in kinds)
        self.is_smoothed = getattr(config, "problem_type", None) != "multi_label_classification"
        self.is_ctc = type(inner).__name__.endswith("ForCTC")
        self._ignored = getattr(config, "semantic_loss_ignore_index", IGNORED)  # of pictures
        self.is_sum = self.is_ctc and getattr(config, "ctc_loss_reduction", "mean") == "sum"
        if self.labels not in ([], ["labels"]) and sorted(self.labels) != sorted(QUESTIONS):
            raise ConfigError.of(
                "wrong-result",
                f"{KEY}.model: expected a model with one kind of labels, got {type(inner).__name__} with "
                f"{', '.join(self.labels)}: the mean of its batches depends on the batches (write a train_step)",
            )

    def count(self, batch: Mapping[str, Any]) -> torch.Tensor:
        """The number of elements. Raises: ConfigError, if the batch has no labels."""
        if missing := [name for name in self.labels if name not in batch]:
            raise ConfigError.of(
                "wrong-result", f"{KEY}.data_collator: expected {missing[0]!r} in a batch, got {', '.join(batch)}"
            )
        if not self.labels:  # as of CLIP: the mean over items
            first = next(value for value in batch.values() if isinstance(value, torch.Tensor))
            return torch.full((), len(first), device=first.device)
        labels = batch[self.labels[0]]
        if not isinstance(labels, torch.Tensor):
            raise ConfigError.of(
                "wrong-result",
                f"{KEY}.data_collator: expected labels in a tensor, whose elements count, got a {type(labels).__name__} (for "
                "detection and the like, write a train_step)",
            )
        if self.is_ctc or self.labels != ["labels"]:
            return torch.full((), len(labels), device=labels.device)
        if "shift_labels" in batch:
            labels = batch["shift_labels"]
        elif self.shifts:
            labels = labels[..., 1:]
        if labels.is_floating_point():
            return torch.full((), labels.numel(), device=labels.device)
        number: torch.Tensor = (labels != (self._ignored if labels.ndim > 2 else IGNORED)).sum()
        return number


class TrainStep(OtherTrainer):
    """The loss of a batch, weighted by the number of its elements on all ranks and in all its batches."""

    def __init__(self, maker: ModelMaker, args: Arguments, arguments: Mapping[str, Any], metrics: Metrics | None) -> None:
        self.get_model = maker.get
        self.forward_step = partial(forward_step, args=args)
        self._args = args
        self._compute_loss = arguments.get("compute_loss_func")
        self._processing = arguments.get("processing_class")
        self._metrics = metrics
        self._smooth = LabelSmoother(args.label_smoothing_factor) if args.label_smoothing_factor else None
        self._counting: dict[Any, Counting] = {}  # by model

    def train(self, inputs: Any) -> None:
        model = self.model
        if model not in self._counting:
            self._counting = {model: Counting(model, self._args.label_names)}
        counting = self._counting[model]
        batch = dict(inputs)
        count = counting.count(batch)
        at_least_one = count.clamp(min=1)
        smooth = self._smooth if counting.is_smoothed else None
        takes_labels = self._compute_loss is None and smooth is None
        labels = None if takes_labels else batch.pop("labels", None)
        is_counted = counting.takes_count and bool(counting.labels)  # as there: models without labels count by themselves
        outputs = model(**batch, **({"num_items_in_batch": at_least_one} if is_counted else {}))
        if self._compute_loss is not None:
            loss = self._compute_loss(outputs, labels, num_items_in_batch=at_least_one)
        elif smooth is not None:
            loss = smooth(outputs, labels, shift_labels=counting.predicts_next, num_items_in_batch=at_least_one)
        else:
            loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs[0]
        if loss is None:
            raise ConfigError.of(
                "wrong-result",
                f"{KEY}.model: expected a loss from {type(inner_model(model)).__name__}, got {', '.join(outputs)} (models such "
                "as CLIP return one if the collator adds 'return_loss': True)",
            )
        context = hvdtrain.get_run_ctx()
        if counting.is_sum and takes_labels:
            context.mark_as_loss(loss, "loss", custom_inv_norm_factor=count)
        else:
            self.mark_mean("loss", loss, count)
        if self._metrics is not None and not context.train_flag:
            predictions: Any = outputs
            references = labels_of(inputs, counting.labels)
            if self._args.predict_with_generate:
                predictions, config = generate(model, batch, self._args)
                predictions, references = (self._filled(tokens, model, config) for tokens in (predictions, references))
            self._metrics.add(predictions, references, getattr(model, "config", None))

    def _filled(self, tokens: Any, model: Any, config: Any) -> Any:
        """Tokens or labels with padding up to the longest that may be generated, as compute_metrics gets them there."""
        if not isinstance(tokens, torch.Tensor) or tokens.ndim != 2:
            return tokens
        ids = [getattr(self._processing, name, None) for name in ("pad_token_id", "eos_token_id")]
        ids += [getattr(model.config, "pad_token_id", None), IGNORED]
        value = next(token for token in ids if token is not None)
        length = config.max_length or USUAL_LENGTH
        if tokens.shape[1] >= length:
            length = (config.max_new_tokens or 0) + 1
        return torch.nn.functional.pad(tokens, (0, max(0, length - tokens.shape[1])), value=value)


def forward_step(*, model: Any, extern_data: Any, args: Arguments, **_: Any) -> None:
    """What the model generates, if `predict_with_generate` says so, else its logits; and the labels."""
    context = hvdtrain.get_run_ctx()
    batch = dict(extern_data)
    labels = batch.pop("labels", None)
    mask = batch.get("attention_mask")
    inner = inner_model(model)
    if args.predict_with_generate:
        tokens, lengths = without_prompt(*generate(model, batch, args), model, batch)
        context.mark_as_output(tokens, "output", seq_lens=lengths)
    else:
        is_decoded = getattr(getattr(inner, "config", None), "is_encoder_decoder", False) and labels is not None
        logits = model(**extern_data).logits if is_decoded else model(**batch).logits
        lengths = None
        if is_decoded and logits.shape[:2] == labels.shape:
            lengths = (labels != IGNORED).sum(-1)
        elif mask is not None and hasattr(inner, "_get_feat_extract_output_lengths"):
            lengths = inner._get_feat_extract_output_lengths(mask.sum(-1))
        elif mask is not None and logits.shape[:2] == mask.shape:
            lengths = mask.sum(-1)
        context.mark_as_output(logits, "output", seq_lens=lengths)
    if labels is not None and labels.ndim == 2:
        context.mark_as_output(labels, "labels", seq_lens=(labels != IGNORED).sum(-1))


def generate(model: Any, batch: Mapping[str, Any], args: Arguments) -> tuple[torch.Tensor, Any]:
    """The generated tokens, after those of the prompt if the model is a decoder, and the GenerationConfig."""
    config = args.generation_config or model.generation_config
    if isinstance(config, str):
        config = GenerationConfig.from_pretrained(config)
    options = {"max_length": args.generation_max_length, "num_beams": args.generation_num_beams}
    options = {name: value for name, value in options.items() if value is not None}
    batch = {name: value for name, value in batch.items() if name != "labels" and not name.startswith("decoder_")}
    return model.generate(**batch, generation_config=config, **options), config


def without_prompt(tokens: torch.Tensor, config: Any, model: Any, batch: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens that follow a decoder's prompt, and how many there are up to the end of each sequence."""
    is_decoder = not getattr(model.config, "is_encoder_decoder", False)
    begin = batch["input_ids"].shape[1] if is_decoder and "input_ids" in batch else 0
    tokens = tokens[:, begin:]
    ends = config.eos_token_id
    if ends is None:
        return tokens, torch.full((len(tokens),), tokens.shape[1])
    is_end = torch.isin(tokens[:, 1:], torch.as_tensor(ends, device=tokens.device))  # the first may be the decoder's start
    length = torch.where(is_end.any(1), is_end.int().argmax(1) + 2, tokens.shape[1])
    return tokens, length.cpu()
