"""Names that recipes import from RETURNN, beside those of the installed RETURNN."""

import json
import random
from collections import Counter
from pathlib import Path

import numpy
import pytest
from returnn.datasets.util import vocabulary as theirs

from hvdtrain.errors import DataError
from hvdtrain.returnn_layer import datasets as ours
from hvdtrain.returnn_layer.adapter import with_older_arguments
from hvdtrain.returnn_layer.imports import Layer
from hvdtrain.run import train
from hvdtrain.settings import read_settings

IMPORTS = """
from returnn.torch.context import get_run_ctx, RunCtx
from returnn.torch.engine import ForwardCallbackIface, TrainCtx
from returnn.datasets.util.hdf import SimpleHDFWriter
from returnn.datasets.util.vocabulary import BytePairEncoding, CharacterTargets, Utf8ByteTargets, Vocabulary
from returnn.datasets.generating import Vocabulary as SameVocabulary
from returnn.util.basic import NotSpecified
from returnn.util.file_cache import CachedFile
import returnn.torch.context, returnn.frontend, returnn.datasets.hdf
"""


def test_names_of_recipes_and_of_older_versions(tmp_path: Path) -> None:
    """A config of today's names and of those that RETURNN has dropped, down to what they are."""
    (tmp_path / "my.config").write_text(
        IMPORTS
        + f"""
assert returnn.torch.context.get_run_ctx is get_run_ctx is returnn.frontend.get_run_ctx
assert TrainCtx is RunCtx and SimpleHDFWriter is returnn.datasets.hdf.SimpleHDFWriter and SameVocabulary is Vocabulary
assert get_run_ctx().stage == "init"
train = {{"class": "HDFDataset", "files": [CachedFile("a.hdf")]}}
model, task, learning_rate, max_seqs = {str(tmp_path / "model")!r}, "config:nothing", 0.1, 3
def get_model(**_): pass
def train_step(*, run_ctx: RunCtx, **_): pass
def nothing(): pass
"""
    )
    assert read_settings([tmp_path / "my.config"], {}).train.files == ("a.hdf",)
    assert not Layer().in_use


STEPS = """
from returnn.torch.context import RunCtx, get_run_ctx
import torch
train = {{"class": "Task12AXDataset", "num_seqs": 10}}
extern_data = {{"data": {{"dim": 9}}, "classes": {{"dim": 2, "sparse": True}}}}
model, learning_rate, max_seqs, num_epochs, num_threads = {model!r}, 0.1, 3, 1, 1
def get_model(**_):
    torch.manual_seed(1)
    return torch.nn.Linear(9, 2)
def losses(model, frames, sizes, classes):
    mask = torch.arange(frames.shape[1]) < sizes[:, None]
    return torch.nn.functional.cross_entropy(model(frames)[mask], classes[mask].long(), reduction="none")
"""

OLDER = """
def train_step(*, model: torch.nn.Module, data: dict, run_ctx: RunCtx, **kwargs):
    assert kwargs.keys() <= {"extern_data"} and run_ctx.device == "cpu" and run_ctx.epoch == 1
    assert run_ctx.stage == get_run_ctx().stage == "train_step"
    assert data["data:seq_len"] is data["data:size1"] and data["classes:size0"] == len(data["seq_tag"]) == len(data["data"])
    given = losses(model, data["data"], data["data:size1"], data["classes"])
    run_ctx.mark_as_loss(name="ce", loss=given.sum(), inv_norm_factor=torch.sum(data["classes:size1"]))
"""

TODAYS = """
def train_step(*, model, extern_data, **_):
    raw = extern_data.as_raw_tensor_dict()
    given = losses(model, raw["data"], raw["data:size1"], raw["classes"])
    get_run_ctx().mark_as_loss(given, "ce")
"""


def test_steps_of_the_older_form_train_as_those_of_today(tmp_path: Path) -> None:
    reports = []
    for name, step in {"older": OLDER, "todays": TODAYS}.items():
        config = tmp_path / f"{name}.config"
        config.write_text(STEPS.format(model=str(tmp_path / name / "model")) + step)
        train(read_settings([config], {}))
        reports.append(json.loads((tmp_path / name / "scores.jsonl").read_text())["scores"])
    assert reports[0] == pytest.approx(reports[1], rel=1e-5)
    assert 0.1 < reports[0]["train_loss_ce"] < 1.0


def test_steps_name_the_older_arguments_that_they_take() -> None:
    def only_data(*, model: object, data: object) -> None: ...
    def todays(*, model: object, extern_data: object, data: object = None) -> None: ...

    def with_step(*, extern_data: object, global_train_step: object) -> None: ...

    assert with_older_arguments(with_step) is not with_step
    assert with_older_arguments(only_data) is not only_data
    assert with_older_arguments(todays) is todays
    assert with_older_arguments(print) is print


def learned(words: list[str], count: int, end_is_apart: bool) -> list[tuple[str, str]]:
    """The merges of the most frequent pairs, one after the other, as subword-nmt learns them."""
    split = [[*word, "</w>"] if end_is_apart else [*word[:-1], word[-1] + "</w>"] for word in words]
    pairs = []
    for _ in range(count):
        found = Counter(pair for parts in split for pair in zip(parts, parts[1:], strict=False))
        if not found:
            break
        pairs.append(found.most_common(1)[0][0])
        split = [ours._merged(parts, pairs[-1]) for parts in split]
    return pairs


@pytest.mark.parametrize("seed", range(20))
def test_byte_pairs_are_those_of_returnn(tmp_path: Path, seed: int) -> None:
    """Of random words and merges, with a vocabulary that lacks some of them; and categories, which stay as they are."""
    chance = random.Random(seed)
    words = ["".join(chance.choices("abcd", k=chance.randint(1, 7))) for _ in range(40)]
    end_is_apart = seed % 2 == 0
    pairs = learned(words, 25, end_is_apart)
    merges = tmp_path / "merges"
    first_line = [] if end_is_apart else ["#version: 0.2"]
    merges.write_text("\n".join([*first_line, *(" ".join(pair) for pair in pairs)]) + "\n")
    parts = {first + second for first, second in pairs if chance.random() < 0.7} | set("abcd")
    texts = {part.replace("</w>", "") for part in parts} - {""}
    labels = [*sorted(texts), *sorted(f"{text}@@" for text in texts if chance.random() < 0.9), "UNK"]
    vocab = tmp_path / "labels"
    vocab.write_text("\n".join(labels) + "\n")
    options = {"vocab_file": str(vocab), "bpe_file": str(merges), "seq_postfix": [0]}
    one, other = ours.Vocabulary.create_vocab(**options), theirs.Vocabulary.create_vocab(**options)
    for _ in range(50):
        sentence = " ".join(chance.choice([*words, "$ab", "{", "}", "ab", "x", "abx"]) for _ in range(8))
        assert one.get_seq(sentence) == other.get_seq(sentence), sentence


def test_characters_and_bytes_are_those_of_returnn(tmp_path: Path) -> None:
    (tmp_path / "labels").write_text("a\nb\n \n@\n")
    for name, options in {"CharacterTargets": {"vocab_file": str(tmp_path / "labels")}, "Utf8ByteTargets": {}}.items():
        one, other = (module.Vocabulary.create_vocab(**{"class": name}, **options) for module in (ours, theirs))
        for text in ("ab ba", "axb"):
            assert one.get_seq(text) == other.get_seq(text)
            assert one.get_seq_labels(one.get_seq(text)) == other.get_seq_labels(numpy.array(one.get_seq(text)))
        assert one.num_labels == other.num_labels


@pytest.mark.parametrize("text", ["#version: 0.3\na b\n", "a b c\n", None])
def test_merges_that_are_none(tmp_path: Path, text: str | None) -> None:
    (tmp_path / "labels").write_text("a\nb\nUNK\n")
    if text is not None:
        (tmp_path / "merges").write_text(text)
    with pytest.raises(DataError, match="merges: expected a pair to merge per line"):
        ours.BytePairEncoding(tmp_path / "labels", tmp_path / "merges")
