"""Models of ESPnet2, and others whose forward returns loss, stats and weight."""

import inspect
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from inside import run_inside
from opened_data import opened
from other_trainers import check_resume, difference, state_of, train
from speech_files import write_folder

import hvdtrain
from hvdtrain.errors import ConfigError

Batch = dict[str, torch.Tensor]


class Recognizer(torch.nn.Module):
    """As ESPnet's models: speech and text with their lengths, padded with 0 and -1."""

    def __init__(self) -> None:
        super().__init__()
        self.output = torch.nn.Linear(3, 7)

    def forward(self, speech: Any, speech_lengths: Any, text: Any, text_lengths: Any, **_: Any) -> Any:
        assert (text.min() == -1) == (int(text_lengths.min()) < text.shape[1])
        scores = self.output(speech).log_softmax(-1).transpose(0, 1)
        losses = torch.nn.functional.ctc_loss(scores, text.clamp(min=0), speech_lengths, text_lengths, reduction="none")
        loss = losses.mean()
        stats = {"loss": loss.detach(), "cer": None, "longest": speech_lengths.max().float()}
        if len(speech) < 4:
            stats["longest"] = torch.tensor(float("nan"))  # is left out, as ESPnet's reporter does
        return loss[None], stats, torch.tensor([len(speech)])

    def collect_feats(self, speech: Any, speech_lengths: Any, **_: Any) -> Batch:
        return {"feats": speech * 2, "feats_lengths": speech_lengths}


class Synthesizer(torch.nn.Module):
    """As ESPnet's TTS and enhancement models: inputs without lengths, and others of any name."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.voice = torch.nn.Embedding(7, 3), torch.nn.Linear(4, 3)

    def forward(self, text: Any, text_lengths: Any, sids: Any = None, spembs: Any = None, **more: Any) -> Any:
        assert more.keys() == {"speech_ref1", "speech_ref1_lengths", "utt_id"}
        assert (len(more["utt_id"]), sids.shape, spembs.shape) == (len(text), (len(text), 1), (len(text), 4))
        assert text.min() >= 0  # padded with 0
        outputs = self.words(text).sum(1) + self.voice(spembs) * sids
        loss = (outputs - more["speech_ref1"].sum(1) / more["speech_ref1_lengths"][:, None]).square().mean()
        return {"loss": loss, "stats": {"loss": loss.detach()}, "weight": len(text)}


class Speech:
    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> dict[str, Any]:
        generator = numpy.random.default_rng(index)
        speech = generator.standard_normal((9 + index % 4, 3)).astype(numpy.float32)
        return {"data": speech, "classes": generator.integers(1, 7, 2 + index % 3).astype(numpy.int32)}


class Text(Speech):
    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"text": super().__getitem__(index)["classes"]}


class Voices(Speech):
    def __getitem__(self, index: int) -> dict[str, Any]:
        item = super().__getitem__(index)
        voice = numpy.arange(4, dtype=numpy.float32) / (1 + index)
        return {"text": item["classes"], "sids": numpy.array([index % 3]), "spembs": voice, "speech_ref1": item["data"]}


def synthesizer() -> torch.nn.Module:
    torch.manual_seed(1)
    return Synthesizer()


def recognizer() -> torch.nn.Module:
    torch.manual_seed(1)
    return Recognizer()


def language_model() -> torch.nn.Module:
    model = pytest.importorskip("espnet2.lm.espnet_model")
    lm = pytest.importorskip("espnet2.lm.seq_rnn_lm")
    torch.manual_seed(1)
    return model.ESPnetLanguageModel(lm.SequentialRNNLM(7, unit=8, nlayers=1, dropout_rate=0.0), 7)  # type: ignore[no-any-return]


def plain_loop(model: torch.nn.Module, items: Any, padding: int, epochs: int = 2) -> float:
    """What ESPnet's trainer does with a batch, in order; returns the last epoch's loss as its reporter computes it."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    without_lengths = inspect.signature(model.forward).parameters.keys() & {"sids", "spembs"}
    total = weights = 0.0
    for epoch in range(epochs):
        for begin in range(0, len(items), 4):
            batch: dict[str, Any] = {}
            several = [items[number] for number in range(begin, min(begin + 4, len(items)))]
            for key in several[0]:
                name = {"data": "speech", "classes": "text"}.get(key, key)
                values = [torch.as_tensor(item[key]) for item in several]
                values = [value if value.is_floating_point() else value.long() for value in values]
                batch[name] = torch.nn.utils.rnn.pad_sequence(values, True, 0.0 if values[0].is_floating_point() else padding)
                if name not in without_lengths:
                    batch[f"{name}_lengths"] = torch.tensor([len(value) for value in values])
            result = model(**batch, utt_id=[f"seq-{number}" for number in range(len(several))])
            loss, _, weight = (result["loss"], {}, result["weight"]) if isinstance(result, dict) else result
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
            if epoch == epochs - 1:
                weight = len(several) if weight is None else weight
                total, weights = total + float(loss.detach() * weight), weights + float(weight)
    return total / weights


def keys(make: Any, items: Any) -> dict[str, Any]:
    return {
        "espnet_model": make,
        "train": {"class": items, "seq_ordering": "default"},
        "dev": {"class": items},
        "max_seqs": 4,
        "num_epochs": 2,
        "optimizer": {"class": "sgd", "momentum": 0.9},
        "learning_rate": 0.1,
        "gradient_clip_global_norm": 5.0,
    }


class Joined(torch.nn.Module):
    """As EnhS2T, whose recognizer says what the text is padded with."""

    __module__ = "espnet2.enh.espnet_enh_s2t_model"

    def __init__(self) -> None:
        super().__init__()
        self.enhancer, self.recognizer = torch.nn.Linear(3, 3), Recognizer()
        self.recognizer.ignore_id = -1  # type: ignore[assignment]

    def forward(self, speech: Any, speech_lengths: Any, **more: Any) -> Any:
        loss, _, weight = self.recognizer(self.enhancer(speech), speech_lengths, **more)
        return loss, None, None if weight[0] < 4 else weight


def joined() -> torch.nn.Module:
    torch.manual_seed(1)
    return Joined()


JOINED = {"model": joined, "inputs": {"speech": "data", "text": "classes"}}
SYNTHESIS = {"model": synthesizer, "int_pad_value": 0}


@pytest.mark.parametrize(
    ("make", "items", "padding"),
    [(recognizer, Speech, -1), (JOINED, Speech, -1), (language_model, Text, 0), (SYNTHESIS, Voices, 0)],
)
def test_the_weights_are_those_of_a_plain_loop(make: Any, items: Any, padding: int, tmp_path: Path) -> None:
    model = make["model"]() if isinstance(make, dict) else make()
    start = state_of(model)
    loss = plain_loop(model, items(), padding)
    result = hvdtrain.train({**keys(make, items), "model": str(tmp_path / "model"), "num_threads": 1})
    weights = state_of(result.model)
    assert difference(weights, state_of(model), start) < 1e-6
    assert result.scores["train_loss_loss"] == pytest.approx(loss, rel=1e-6)
    assert result.scores.get("train_loss_longest") == (12.0 if make is recognizer else None)
    check_resume(lambda: keys(make, items), tmp_path, 4, weights)


def test_a_model_of_theirs_is_trained_on_a_folder_of_theirs(tmp_path: Path) -> None:
    espnet_model = pytest.importorskip("espnet2.asr.espnet_model")
    from espnet2.asr.ctc import CTC
    from espnet2.asr.encoder.transformer_encoder import TransformerEncoder

    write_folder(tmp_path / "train", count=10)
    tokens = ["<blank>", *"abehnortw", "<space>", "<sos/eos>"]

    def make() -> Any:
        torch.manual_seed(1)
        rates = dict.fromkeys(("dropout_rate", "positional_dropout_rate", "attention_dropout_rate"), 0.0)
        encoder = TransformerEncoder(8, 8, 2, linear_units=8, num_blocks=1, input_layer="linear", **rates)
        nothing = dict.fromkeys(("frontend", "specaug", "normalize", "preencoder", "postencoder", "decoder", "joint_network"))
        nothing |= {"report_cer": False, "report_wer": False}
        return espnet_model.ESPnetASRModel(
            vocab_size=len(tokens), token_list=tokens, encoder=encoder, ctc=CTC(len(tokens), 8), ctc_weight=1.0, **nothing
        )

    folder = {"class": "KaldiFolder", "folder": str(tmp_path / "train"), "features": "fbank", "log_mel": {"num_mels": 8}}
    folder["vocabulary"] = tokens
    read = opened(folder)
    model, start = make(), state_of(make())
    plain_loop(model, [read.sequence(number) for number in range(10)], -1)
    config = {**keys(make, None), "train": {**folder, "seq_ordering": "default"}, "dev": folder}
    result = hvdtrain.train({**config, "model": str(tmp_path / "model"), "num_threads": 1})
    assert difference(state_of(result.model), state_of(model), start) < 1e-6
    assert "dev_loss_loss_ctc" in result.scores
    task = {**config, "forward_data": folder, "output_file": str(tmp_path / "feats.hdf"), "num_threads": 1}
    hvdtrain.forward(task, checkpoint=str(tmp_path / "model.002.pt"), model=str(tmp_path / "model"))
    feats = opened({"class": "HDFDataset", "files": [str(tmp_path / "feats.hdf")]})
    rows = {feats.tags([number])[0]: feats.sequence(number)["data"] for number in range(10)}
    assert numpy.array_equal(rows["utt03"], read.sequence(3)["data"])


def test_collect_feats_is_what_forward_writes(tmp_path: Path) -> None:
    train(keys(recognizer, Speech), tmp_path / "model", num_epochs=1)
    features: dict[str, Any] = {}

    class Callback:
        def init(self, *, model: Any) -> None: ...
        def process_seq(self, *, seq_tag: str, outputs: Any) -> None:
            features[seq_tag] = outputs["output"].raw_tensor

        def finish(self) -> None: ...

    config = {**keys(recognizer, Speech), "forward_data": {"class": Speech}, "forward_callback": Callback, "num_threads": 1}
    hvdtrain.forward(config, checkpoint=str(tmp_path / "model.001.pt"), model=str(tmp_path / "model"))
    assert len(features) == 10
    assert numpy.array_equal(features["seq-3"], 2 * Speech()[3]["data"])


def test_what_does_not_fit_is_refused_by_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Heard(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.output = torch.nn.Linear(3, 1)

        def forward(self, speech: Any, speech_lengths: Any) -> Any:
            return self.output(speech).square().mean(), None, None

    class Several(Recognizer):
        def forward(self, speech: Any, speech_lengths: Any, **_: Any) -> Any:  # type: ignore[override]
            return {"loss": speech.sum(), "stats": {}, "weight": 1, "optim_idx": 1}

    class Bare(Recognizer):
        def forward(self, speech: Any, speech_lengths: Any, **_: Any) -> Any:  # type: ignore[override]
            return speech.sum()

    for make, expected in {
        Several: "expected a model with one optimizer",
        Bare: r"expected forward to return \(loss, stats, weight\)",
        lambda: recognizer(): "expected a data key for each input of forward .speech, text.",
    }.items():
        items = Text if not isinstance(make, type) else Speech
        with pytest.raises(ConfigError, match=expected):
            train(keys(make, items), tmp_path / expected[:12])
    with pytest.raises(ConfigError, match="expected a function that makes the model, or a dict"):
        train(keys({"model": recognizer, "input": {}}, Speech), tmp_path / "no")
    train({**keys(lambda: Heard(), Speech), "num_epochs": 1}, tmp_path / "unused")
    assert "expected data keys that are inputs of forward (speech, speech_lengths), got classes, which is not used" in caplog.text


def test_init_writes_a_config_that_trains(tmp_path: Path) -> None:
    pytest.importorskip("espnet2.lm.espnet_model")
    config = tmp_path / "mine.py"
    assert run_inside(["init", config, "--espnet"]).status == 0
    finished = run_inside([config, "++model", tmp_path / "model", "++num_epochs", 2, "++num_threads", 1])
    assert finished.status == 0, finished.err
