"""The configs of docs/coming_from.md train, and learn."""

import json
import re
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from documented import example
from inside import run_inside
from launching import ROOT, hvdtrain
from tutorial import normal

from hvdtrain.plugins.hdf_tools.writer import HDFWriter
from hvdtrain.settings import all_keys

PAGE = (ROOT / "docs" / "coming_from.md").read_text(encoding="utf-8")
SECTIONS = {
    section.partition("\n")[0]: re.findall(r"```python\n(.*?)```", section, flags=re.DOTALL) for section in PAGE.split("\n## ")
}
[SHARED] = SECTIONS.pop("The examples")
CONFIGS = {name: codes[0] for name, codes in SECTIONS.items() if codes}
SHOWN = {name: re.findall(r"```text\n(.*?)```", PAGE.split(f"\n## {name}\n")[1].split("\n## ")[0], re.DOTALL) for name in CONFIGS}


def test_every_trainer_has_a_config() -> None:
    assert list(CONFIGS) == [
        "Lightning",
        "Accelerate",
        "Hugging Face's Trainer",
        "A hand-written loop",
        "ESPnet2",
        "SpeechBrain",
    ]


@pytest.mark.parametrize("name", CONFIGS)
def test_the_config_of_a_section_learns(name: str, tmp_path: Path) -> None:
    files = [tmp_path / "words.py", tmp_path / "config.py"]
    for file, code in zip(files, (SHARED, CONFIGS[name]), strict=True):
        file.write_text(code, encoding="utf-8")
    ended = run_inside([*files, "++model", tmp_path / "model", "++num_threads", 1, "++log", tmp_path / "log"])
    assert ended.status == 0, ended.err
    scores = [json.loads(line)["scores"] for line in (tmp_path / "scores.jsonl").read_text().splitlines()]
    assert len(scores) == 6
    assert scores[-1]["dev_loss_ce"] < (0.8 if "label_smoothing" in CONFIGS[name] else 0.2)
    for shown in SHOWN.get(name, []):
        assert set(normal(shown).splitlines()) <= set(normal(ended.out).splitlines())


def test_the_tables_name_keys_that_exist() -> None:
    """Where they set one, such as `num_epochs = 6`."""
    ours = re.findall(r"^\|[^|]*\|(.*)\|$", PAGE[PAGE.index("\n## Lightning") :], re.MULTILINE)
    names = {name for text in ours for name in re.findall(r"`(\w+) = ", text)}
    assert len(names) > 20
    assert names - {"hidden"} <= {name for key in all_keys() for name in key.names}  # hidden is a name of an example


TWO_SEQUENCES = """
import torch
from torch import nn

import hvdtrain

pairs = [([2 + n % 9], [2 + (n + step) % 9 for step in range(1, 5)]) for n in range(220)]
max_seqs = 20
num_epochs = 3
learning_rate = 0.02
hidden = 32


class Net(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.embedding = nn.Embedding(11, hidden)
        self.decoder = nn.GRU(hidden, hidden, batch_first=True)
        self.output = nn.Linear(hidden, 11)

    def forward(self, source, mask, written):
        state = self.embedding(source)[:, 0][None]
        return self.output(self.decoder(self.embedding(written), state)[0])


def get_model(**_):
    return Net(hidden)
"""


def test_what_a_collate_fn_does_and_scripts_that_exchange_weights(tmp_path: Path) -> None:
    """The examples of docs/datasets.md and of docs/resuming.md."""
    config = tmp_path / "config.py"
    config.write_text(TWO_SEQUENCES + example("datasets.md", "BEGIN, END = 0, 1") + "\ntrain, dev = items[20:], items[:20]\n")

    def train(folder: str) -> list[float]:
        ended = run_inside([config, "++model", tmp_path / folder / "model", "++num_threads", 1])
        assert ended.status == 0, ended.err
        scores = (tmp_path / folder / "scores.jsonl").read_text().splitlines()
        return [json.loads(line)["scores"]["dev_loss_ce"] for line in scores]

    first, _, last = train("exp")
    assert last < 0.2 < first

    values: dict[str, Any] = {}
    exec(TWO_SEQUENCES, values)
    script = example("resuming.md", "import torch\n\nsaved").replace("exp/model.003.pt", str(tmp_path / "exp" / "model.003.pt"))
    exec(script, values)
    torch.save(values["net"].state_dict(), tmp_path / "start.pt")
    with config.open("a") as file:
        file.write(example("resuming.md", 'preload_from_files = {"start"').replace("start.pt", str(tmp_path / "start.pt")))
    assert train("again")[0] < last


@pytest.mark.again
def test_the_config_of_returnn_trains_as_it_is(tmp_path: Path) -> None:
    for part, count in (("train", 60), ("dev", 7)):
        with HDFWriter(tmp_path / f"{part}.hdf", dims={"data": 27}) as writer:
            for number in range(count):
                writer.add(f"{part}-{number}", {"data": numpy.arange(number % 5, number % 5 + 4, dtype=numpy.int32)})
    places = {"PEERS_TRAIN": "train.hdf", "PEERS_DEV": "dev.hdf", "PEERS_FOLDER": "checkpoints"}
    environment = {name: str(tmp_path / place) for name, place in places.items()} | {"OMP_NUM_THREADS": "1"}
    config = ROOT / "benchmarks" / "peers" / "with_returnn.config"
    ended = hvdtrain(config, {"max_seqs": 20}, environment=environment)
    assert ended.status == 0, ended.err
    first, last = [json.loads(line)["scores"] for line in (tmp_path / "checkpoints" / "scores.jsonl").read_text().splitlines()]
    assert last["dev_loss_ce"] < first["dev_loss_ce"]
