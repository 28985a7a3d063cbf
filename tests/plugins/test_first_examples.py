"""The first examples of the pages about plug-ins, typed in as they stand, with what the reader has: a model and data."""

import ast
from importlib.util import find_spec
from pathlib import Path

import pytest
from documented import blocks_of, page_text
from inside import run_inside
from launching import Finished
from speech_files import write_folder

LENGTHS = ["++num_epochs", "1", "++num_threads", "1"]

QUADRANTS = """
import torch
from lightning.pytorch import LightningModule

class Quadrants(LightningModule):
    def __init__(self, hidden=32, lr=0.01):
        super().__init__()
        self.save_hyperparameters()
        self.net = torch.nn.Sequential(torch.nn.Linear(2, hidden), torch.nn.ReLU(), torch.nn.Linear(hidden, 4))

    def loss(self, batch):
        points, quadrants = batch
        return torch.nn.functional.cross_entropy(self.net(points), quadrants)

    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)

    def points(self, size):
        points = torch.randn(size, 2, generator=torch.Generator().manual_seed(size))
        return torch.utils.data.TensorDataset(points, (points[:, 0] > 0).long() + 2 * (points[:, 1] > 0).long())

    def train_dataloader(self):
        return torch.utils.data.DataLoader(self.points(200), batch_size=10, shuffle=True)

    def val_dataloader(self):
        return torch.utils.data.DataLoader(self.points(50), batch_size=10)
"""

RECIPE = """
import speechbrain
import torch
from speechbrain.dataio.dataset import DynamicItemDataset

class ASR(speechbrain.Brain):
    def compute_forward(self, batch, stage):
        sound, lengths = batch.sig
        return self.modules.output(sound).log_softmax(-1), lengths

    def compute_objectives(self, predictions, batch, stage):
        (scores, lengths), (words, word_lengths) = predictions, batch.words
        return speechbrain.nnet.losses.ctc_loss(scores, words, lengths, word_lengths, blank_index=0)

def dataio_prepare(hparams):
    def items(size):
        return DynamicItemDataset(
            {str(number): {"sig": torch.randn(9 + number % 3, 6), "words": torch.randint(1, 6, (3,))} for number in range(size)},
            output_keys=["id", "sig", "words"],
        )

    return items(20), items(8), items(4)
"""

HPARAMS = """
lr: 0.1
output: !new:torch.nn.Linear
    in_features: 6
    out_features: 6
modules:
    output: !ref <output>
opt_class: !name:torch.optim.SGD
    lr: !ref <lr>
train_dataloader_opts:
    batch_size: 4
"""

TASK = """
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

BASE = "base"
words = Tokenizer(models.WordLevel({"<pad>": 0, "</s>": 1, **{str(n): n for n in range(2, 30)}}, unk_token="<pad>"))
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="</s>")
train_dataset = [{"input_ids": [n, n + 1, 1], "labels": [n + 2] * (1 + n % 3)} for n in range(2, 20)]
eval_dataset = train_dataset[:5]

def compute_metrics(prediction):
    return {"labels": float((prediction.label_ids != -100).sum())}
"""


def needs(*packages: str) -> None:
    """Skip the test where one is not installed. They are imported inside the run, as they change the environment."""
    if missing := [name for name in packages if find_spec(name) is None]:
        pytest.skip(f"no package {missing[0]}")


def run(folder: Path, config: str, *more: str) -> Finished:
    (folder / "config.py").write_text(config)
    finished = run_inside(["config.py", *LENGTHS, *more], folder)
    assert finished.status == 0, finished.err
    return finished


def examples(page: str) -> list[str]:
    return [block.code for block in blocks_of(page_text(page)) if block.language == "python"]


@pytest.mark.slow
def test_of_lightning(tmp_path: Path) -> None:
    needs("lightning")
    shown, config = examples("lightning.md")[:2]
    (tmp_path / "quadrants.py").write_text(QUADRANTS)
    assert signatures(shown) <= signatures(QUADRANTS)
    assert "dev val_loss" in run(tmp_path, config).out
    assert (tmp_path / "exp/quadrants/model.001.pt").exists()


def signatures(code: str) -> set[str]:
    """What functions a class has, and their arguments."""
    return {f"{node.name}({ast.unparse(node.args)})" for node in ast.walk(ast.parse(code)) if isinstance(node, ast.FunctionDef)}


@pytest.mark.slow
def test_of_speechbrain(tmp_path: Path) -> None:
    needs("speechbrain", "hyperpyyaml")
    (tmp_path / "my_recipe.py").write_text(RECIPE)
    (tmp_path / "hparams.yaml").write_text(HPARAMS)
    assert "lr 1e-3" in run(tmp_path, examples("speechbrain.md")[0]).out
    assert (tmp_path / "exp/asr/model.001.pt").exists()


def test_of_transformers(tmp_path: Path) -> None:
    needs("transformers", "accelerate")
    import transformers

    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2, "decoder_start_token_id": 0}
    transformers.T5ForConditionalGeneration(transformers.T5Config(vocab_size=30, **sizes)).save_pretrained(tmp_path / "base")
    (tmp_path / "my_task.py").write_text(TASK)
    assert "dev loss" in run(tmp_path, examples("transformers.md")[0]).out
    assert (tmp_path / "exp/t5/model.001.pt").exists()
    assert (tmp_path / "exp/t5/best/tokenizer.json").exists()


ESPNET = """
from espnet2.asr.ctc import CTC
from espnet2.asr.encoder.transformer_encoder import TransformerEncoder
from espnet2.asr.frontend.abs_frontend import AbsFrontend

class Frames(AbsFrontend):
    def output_size(self):
        return 8

    def forward(self, speech, lengths):
        return speech.unfold(1, 8, 8), lengths // 8

"""


def test_of_espnet(tmp_path: Path) -> None:
    needs("espnet2")
    model, config = examples("espnet.md")[:2]
    made = (
        "30, list(map(str, range(30))), Frames(), None, None, None, "
        "TransformerEncoder(8, 8, 2, 16, 1, input_layer='linear'), None, None, CTC(30, 8), None, ctc_weight=1.0"
    )
    model = model.replace("...", made)
    write_folder(tmp_path / "dump/raw/train")
    (tmp_path / "tokens.txt").write_text("\n".join(" abcdefghijklmnopqrstuvwxyz"))
    assert "train loss" in run(tmp_path, ESPNET + model + config, "++max_seqs", "3", "++learning_rate", "0.1", "++model", "m").out


SPEECH_MODEL = """
import torch
import hvdtrain

max_seqs, learning_rate, model = 4, 0.01, "exp/model"

def get_model(**_):
    return torch.nn.Linear(80, 20)

def train_step(*, model, extern_data, **_):
    data, classes = extern_data["data"], extern_data["classes"]
    scores = model(data.raw_tensor).log_softmax(-1).transpose(0, 1)
    losses = torch.nn.functional.ctc_loss(
        scores, classes.raw_tensor.long(), data.seq_lens.long(), classes.seq_lens.long(), reduction="none", blank=19
    )
    hvdtrain.get_run_ctx().mark_as_loss(losses, "ctc", custom_inv_norm_factor=classes.seq_lens.sum())
"""


def test_of_speech(tmp_path: Path) -> None:
    for name in ("train", "dev"):
        write_folder(tmp_path / "data" / name, shortest=4000)
    assert "dev ctc" in run(tmp_path, examples("speech.md")[0] + SPEECH_MODEL).out


TENSORFLOW = """
import numpy
import tensorflow as tf
import hvdtrain

max_seqs, learning_rate, model = 4, 0.01, "exp/model"
train = [{"data": numpy.ones((n, 40), "float32"), "classes": numpy.arange(n, dtype="int32")} for n in range(3, 9)]

class MyKerasModel(tf.keras.Model):
    def __init__(self):
        super().__init__()
        self.output_layer = tf.keras.layers.Dense(10)

    def call(self, data, mask, training=False):
        return self.output_layer(data)

"""


@pytest.mark.slow
def test_of_tensorflow(tmp_path: Path) -> None:
    needs("tensorflow")
    assert "train ce" in run(tmp_path, TENSORFLOW + "\n".join(examples("tensorflow.md")[:2])).out
