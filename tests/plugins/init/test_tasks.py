"""`hvdtrain init --task`: each config trains on two ranks as on one, and its tasks and losses are what they say."""

import itertools
import re
from pathlib import Path
from types import ModuleType

import pytest
import torch
from trainings import Run, Trained, assert_same, saved_model, trains

from hvdtrain.plugins.init.__main__ import TASKS, main
from hvdtrain.settings import read_settings

TWO = Run("torch", "horovod", 2)
LOSS = {"ctc": "ctc", "transducer": "transducer"}


def written(task: str, folder: Path) -> Path:
    config = folder / f"{task}.py"
    assert main([str(config), "--task", task]) == 0
    return config


@trains(slow=[TWO])
def trainings(run: Run, folder: Path) -> dict[str, dict[str, object]]:
    """With a part of the data, so that it takes less than a second each."""
    folder.mkdir(parents=True, exist_ok=True)
    made: dict[str, dict[str, object]] = {}
    for task in TASKS:
        config = folder / f"{task}.py"
        if not config.exists():
            written(task, folder)
        sizes = {"train.size": 240, "dev.size": 20, "num_epochs": 2, "num_threads": 1}
        made[task] = {"configs": [config], **sizes}
        if task == "finetune":
            made[task]["callbacks"] = {"class": "hvdtrain:SavePretrained", "folder": str(folder / "adapters"), "part": "encoder"}
    return made


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
def test_a_config_learns_on_two_ranks(trained: Trained, task: str) -> None:
    results = trained(trainings, TWO)
    assert_same(results.weights(task, 0), results.weights(task, 1))
    first, last = results.scores(task)
    loss = f"dev_loss_{LOSS.get(task, 'ce')}"
    assert last[loss] < 0.995 * first[loss], (first, last)
    saved = saved_model(results.models[task], 2)
    assert ("encoder.base_model.model.embeddings.word_embeddings.weight" in saved) is False
    if task == "finetune":
        assert saved.keys() >= {"output.weight", "output.bias"}
        assert len([name for name in saved if "lora_" in name]) == 8
        assert {path.name for path in (results.folder / "adapters").iterdir()} >= {
            "adapter_config.json",
            "adapter_model.safetensors",
        }


@pytest.mark.parametrize("task", TASKS)
def test_the_keys_in_comments_are_keys(task: str, tmp_path: Path) -> None:
    config = written(task, tmp_path)
    text = config.read_text()
    assert re.search(r"\bCONFIG\b|\bNAME\b", text) is None
    lines = re.findall(r"^# (\w+ = .*)$", text, flags=re.MULTILINE)
    assert lines
    config.write_text(text + "\n" + "\n".join(lines))
    assert read_settings([config], {}).run.model == f"exp/{task}/model"


def module_of(task: str, folder: Path) -> ModuleType:
    module = ModuleType(task)
    exec(written(task, folder).read_text(), module.__dict__)
    return module


def test_the_transducer_adds_up_all_alignments(tmp_path: Path) -> None:
    config = module_of("transducer", tmp_path)
    torch.manual_seed(1)
    lengths = [(4, 2), (3, 3), (5, 0), (1, 1)]
    scores = torch.randn(4, 5, 4, 13, dtype=torch.float64).log_softmax(-1)
    labels = torch.randint(1, 13, (4, 3))
    frames, counts = (torch.tensor(column) for column in zip(*lengths, strict=True))
    found = config.transducer_losses(scores, labels, frames, counts)
    for number, (time, count) in enumerate(lengths):
        total = []
        # An alignment says in which frame each label is written, in order.
        for places in itertools.combinations_with_replacement(range(time), count):
            done, logs = 0, []
            for frame in range(time):
                while done < count and places[done] == frame:
                    logs.append(scores[number, frame, done, labels[number, done]])
                    done += 1
                logs.append(scores[number, frame, done, 0])
            total.append(torch.stack(logs).sum())
        torch.testing.assert_close(found[number], -torch.stack(total).logsumexp(0))


@pytest.mark.parametrize("task", ["ctc", "transducer", "seq2seq"])
def test_errors_are_edit_distances(task: str, tmp_path: Path) -> None:
    distance = module_of(task, tmp_path).edit_distance
    assert [distance([1, 2, 3], [1, 3]), distance([], [4, 5]), distance([1, 2], [2, 1]), distance([3], [3])] == [1, 2, 2, 0]


def test_padding_changes_nothing(tmp_path: Path) -> None:
    """The losses of a sequence do not depend on what else is in its batch."""
    ctc = module_of("ctc", tmp_path)
    model = ctc.get_model().eval()
    frames = torch.from_numpy(ctc.Utterances(1, 5)[0]["data"])[None]
    padded = torch.nn.functional.pad(frames, (0, 0, 0, 7))
    lengths = torch.tensor([frames.shape[1]])
    (alone, size), (beside, _) = model(frames, lengths), model(padded, lengths)
    torch.testing.assert_close(alone[:, : int(size)], beside[:, : int(size)], rtol=1e-4, atol=1e-5)
    transducer = module_of("transducer", tmp_path)
    encoder = transducer.get_model().eval()
    (alone, size), (beside, _) = encoder.encode(frames, lengths), encoder.encode(padded, lengths)
    torch.testing.assert_close(alone[:, : int(size)], beside[:, : int(size)], rtol=1e-4, atol=1e-5)
