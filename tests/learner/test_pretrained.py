"""Models of transformers and adapters of PEFT, tiny and random: trained, saved, resumed, and read by their own libraries."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import hvdtrain
from hvdtrain.errors import ConfigError

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")


class Bert(nn.Module):
    """A text classifier: a frozen BERT with LoRA, and a layer of its own."""

    def __init__(self) -> None:
        super().__init__()
        config = transformers.BertConfig(
            vocab_size=30, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32
        )
        encoder = of_seed(lambda: transformers.BertModel(config, add_pooling_layer=False))
        self.encoder = peft.get_peft_model(encoder, peft.LoraConfig(r=2, target_modules=["query", "value"], lora_dropout=0.1))
        self.output = nn.Linear(16, 3)

    def forward(self, data: Any, targets: Any) -> torch.Tensor:
        hidden = self.encoder(input_ids=data.raw_tensor.long(), attention_mask=data.mask.long()).last_hidden_state
        scores = self.output(hidden[:, 0])
        return nn.functional.cross_entropy(scores, targets.raw_tensor[:, 0].long(), reduction="none")


class Wav2Vec2(nn.Module):
    """Speech recognition with CTC, from raw audio; only the layer norms and the output are trained."""

    def __init__(self) -> None:
        super().__init__()
        config = transformers.Wav2Vec2Config(
            vocab_size=6, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, conv_dim=(8, 8),
            conv_stride=(4, 2), conv_kernel=(8, 4), num_feat_extract_layers=2, num_conv_pos_embeddings=4,
            num_conv_pos_embedding_groups=2, feat_extract_norm="layer", do_stable_layer_norm=True, mask_time_prob=0.0,
        )  # fmt: skip
        self.inner = of_seed(lambda: transformers.Wav2Vec2ForCTC(config))
        for name, parameter in self.inner.named_parameters():
            parameter.requires_grad_("layer_norm" in name or name.startswith("lm_head"))

    def forward(self, data: Any, targets: Any) -> torch.Tensor:
        scores = self.inner(data.raw_tensor[:, :, 0], attention_mask=data.mask.long()).logits.log_softmax(-1)
        lengths = self.inner._get_feat_extract_output_lengths(data.seq_lens)
        return nn.functional.ctc_loss(
            scores.transpose(0, 1), targets.raw_tensor.long(), lengths.long(), targets.seq_lens.long(), reduction="none"
        )


class Whisper(nn.Module):
    """An encoder-decoder for speech, with the encoder frozen."""

    def __init__(self) -> None:
        super().__init__()
        config = transformers.WhisperConfig(
            vocab_size=12, num_mel_bins=4, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
            decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, max_source_positions=40, max_target_positions=16,
            pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
        )  # fmt: skip
        self.inner = of_seed(lambda: transformers.WhisperForConditionalGeneration(config))
        self.inner.model.encoder.requires_grad_(False)

    def forward(self, data: Any, targets: Any) -> torch.Tensor:
        frames = nn.functional.pad(data.raw_tensor.expand(-1, -1, 4), (0, 0, 0, 80 - data.raw_tensor.shape[1]))
        labels = targets.raw_tensor.long()
        inputs = nn.functional.pad(labels[:, :-1], (1, 0), value=1)
        scores = self.inner(input_features=frames.transpose(1, 2), decoder_input_ids=inputs).logits
        return nn.functional.cross_entropy(scores[targets.mask], labels[targets.mask], reduction="none")


def of_seed(make: Callable[[], nn.Module]) -> Any:
    """The same weights in every start, as those of a pretrained model are."""
    with torch.random.fork_rng():
        torch.manual_seed(7)
        return make()


def train_step(*, model: nn.Module, extern_data: Any, **_: Any) -> None:
    losses = model(extern_data["data"], extern_data["targets"])
    hvdtrain.get_run_ctx().mark_as_loss(losses, "loss", use_normalized_loss=True)


def item(number: int, of_text: bool) -> dict[str, Any]:
    generator = numpy.random.default_rng(number)
    if of_text:
        data = generator.integers(1, 30, size=generator.integers(4, 9)).astype(numpy.int32)
        return {"data": data, "targets": numpy.array([number % 3], numpy.int32)}
    audio = generator.normal(size=(generator.integers(60, 80), 1)).astype(numpy.float32)
    return {"data": audio, "targets": generator.integers(3, 6, size=3).astype(numpy.int32)}


def train(folder: Path, kind: type[nn.Module], num_epochs: int = 2, **more: Any) -> Any:
    items = [item(number, kind is Bert) for number in range(12)]
    keys = {"train": items[:8], "dev": items[8:], "max_seqs": 2, "num_epochs": num_epochs, "num_threads": 1}
    keys |= {"optimizer": {"class": "adamw"}, "learning_rate": 0.01, "train_step": train_step}
    keys |= {"model": str(folder / "model"), "get_model": lambda **_: kind(), "save_parameters": "trained"}
    return hvdtrain.train(keys | more)


def trained_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: one.detach() for name, one in model.named_parameters() if one.requires_grad}


@pytest.mark.parametrize("kind", [Bert, Wav2Vec2, Whisper])
def test_a_model_goes_on_exactly_from_what_was_trained(kind: type[nn.Module], tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", kind)
    first = train(tmp_path / "stopped", kind, num_epochs=1)
    stored = torch.load(first.checkpoint, weights_only=True)
    buffers = {name for name, _ in kind().named_buffers()}
    named = kind().named_parameters(remove_duplicate=False)  # Whisper has a matrix under two names
    assert stored["model"].keys() - buffers == {name for name, one in named if one.requires_grad}
    frozen = sum(one.numel() for one in kind().parameters()) - sum(one.numel() for one in trained_of(kind()).values())
    assert stored["base"]["parameters"] == frozen > 0
    last = train(tmp_path / "stopped", kind)
    assert [epoch.scores for epoch in last.history] == [epoch.scores for epoch in whole.history]
    expected, found = whole.model.state_dict(), last.model.state_dict()
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    assert all(not torch.equal(one, trained_of(kind())[name]) for name, one in trained_of(last.model).items() if "lora_A" in name)


@pytest.mark.parametrize("which", ["best", "last"])
def test_peft_loads_what_the_callback_writes(which: str, tmp_path: Path) -> None:
    """The averaged weights, as in the checkpoint, of the best epoch, or within it, or of the last one."""
    adapters = tmp_path / "adapters"
    save = hvdtrain.SavePretrained(adapters, which=which, part="encoder")  # type: ignore[arg-type]
    keys = {"ema_decay": 0.8, "learning_rate": 0.3, "eval_interval_steps": 3}
    result = train(tmp_path, Bert, num_epochs=4, callbacks=save, **keys)
    best = json.loads((tmp_path / "best.json").read_text())
    assert "step" in best, "the test wants a best model within an epoch"
    expected = torch.load(tmp_path / (best["file"] if which == "best" else "model.004.pt"), weights_only=True)["model"]
    model = Bert()
    loaded = peft.PeftModel.from_pretrained(model.encoder.unload(), adapters).state_dict()
    ours = {name.removeprefix("encoder."): one for name, one in expected.items() if "lora_" in name}
    assert len(ours) == 8
    assert all(torch.equal(loaded[name], one) for name, one in ours.items())
    assert not (tmp_path / "adapters.unfinished").exists()
    assert result.best is not None


def test_transformers_loads_a_whole_model(tmp_path: Path) -> None:
    save = {"class": "hvdtrain:SavePretrained", "folder": str(tmp_path / "whisper"), "part": "inner", "which": "last"}
    result = train(tmp_path, Whisper, num_epochs=1, callbacks=save)
    loaded = transformers.WhisperForConditionalGeneration.from_pretrained(tmp_path / "whisper").state_dict()
    assert all(torch.equal(loaded[name.removeprefix("inner.")], one) for name, one in result.model.state_dict().items())
    for part, message in (("", "got '', which is a Whisper"), ("outer", "has no attribute 'outer'")):
        with pytest.raises(ConfigError, match=message):
            train(tmp_path / "wrong", Whisper, callbacks=hvdtrain.SavePretrained(tmp_path / "x", part=part))
    with pytest.raises(ConfigError, match="expected 'best' or 'last', got 'all'"):
        hvdtrain.SavePretrained(tmp_path, which="all")  # type: ignore[arg-type]
