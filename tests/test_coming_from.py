"""The configs of docs/coming_from.md train, and learn."""

import json
import re
from pathlib import Path

import numpy
import pytest
from inside import run_inside
from launching import ROOT, hvdtrain

from hvdtrain.data.hdf.writer import HDFWriter

PAGE = (ROOT / "docs" / "coming_from.md").read_text(encoding="utf-8")
SECTIONS = {
    section.partition("\n")[0]: re.findall(r"```python\n(.*?)```", section, flags=re.DOTALL) for section in PAGE.split("\n## ")
}
[SHARED] = SECTIONS.pop("The examples")
CONFIGS = {name: codes[0] for name, codes in SECTIONS.items() if codes}


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
    first, last = [json.loads(line)["scores"] for line in (tmp_path / "scores.jsonl").read_text().splitlines()]
    assert last["train_loss_ce"] < first["train_loss_ce"]
    assert last["dev_loss_ce"] < first["dev_loss_ce"]


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
