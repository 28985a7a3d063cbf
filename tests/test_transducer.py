"""configs/g2p_transducer.py: its loss is the sum over all ways through the lattice, and it trains on real words."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from launching import ROOT, hvdtrain
from words import words_in

CONFIG = ROOT / "configs" / "g2p_transducer.py"


@pytest.fixture(scope="module")
def config() -> dict[str, Any]:
    class Values:
        def int(self, name: str, default: int) -> int:
            return default

    names: dict[str, Any] = {"__file__": str(CONFIG), "config": Values()}
    exec(compile(CONFIG.read_text(), str(CONFIG), "exec"), names)
    return names


def probability(log_probs: torch.Tensor, phones: list[int], blank: int) -> torch.Tensor:
    """The sum over all placements of the phones among the frames."""
    total = torch.zeros((), dtype=log_probs.dtype)
    for frames in itertools.combinations_with_replacement(range(len(log_probs)), len(phones)):
        way = torch.zeros((), dtype=log_probs.dtype)
        done = 0
        for frame in range(len(log_probs)):
            for _ in range(frames.count(frame)):
                way = way + log_probs[frame, done, phones[done]]
                done += 1
            way = way + log_probs[frame, done, blank]
        total = total + way.exp()
    return total


def test_the_loss_sums_over_all_ways(config: dict[str, Any]) -> None:
    torch.manual_seed(1)
    phones, num_frames, num_phones = (
        torch.tensor([[3, 7, 3], [5, 0, 0], [2, 9, 0]]),
        torch.tensor([4, 2, 3]),
        torch.tensor([3, 1, 2]),
    )
    log_probs = torch.randn(3, 4, 4, 40, dtype=torch.float64).log_softmax(-1).requires_grad_()
    found = config["transducer_loss"](log_probs, phones, num_frames, num_phones)
    ways = [
        -probability(log_probs[i, : num_frames[i]], phones[i, : num_phones[i]].tolist(), config["BLANK"]).log() for i in range(3)
    ]
    torch.testing.assert_close(found, torch.stack(ways))
    gradients = [torch.autograd.grad(total, log_probs, retain_graph=True)[0] for total in (found.sum(), torch.stack(ways).sum())]
    torch.testing.assert_close(*gradients)


@pytest.mark.slow
def test_it_trains_on_words(tmp_path: Path) -> None:
    words = words_in(tmp_path, {"train": 479, "dev": 59, "test": 59})
    files = {f"{part}.files": words / f"{part if part != 'eval' else 'test'}.hdf" for part in ("train", "dev", "eval")}
    keys = {"model": tmp_path / "model", "log": tmp_path / "log", "num_epochs": 2, "num_threads": 1, "max_seqs_total": 32}
    ended = hvdtrain(CONFIG, {**files, **keys, "average_checkpoints": "{'best': 2}"}, timeout=300)
    assert ended.status == 0, ended.err
    lines = [json.loads(line) for line in (tmp_path / "scores.jsonl").read_text().splitlines()]
    assert lines[1]["scores"]["train_loss_transducer"] < lines[0]["scores"]["train_loss_transducer"]
    assert 0 < lines[1]["scores"]["dev_loss_per"] <= 1.2
    [average] = json.loads((tmp_path / "averages.json").read_text())
    assert average["of"] == ["model.001.pt", "model.002.pt"]
