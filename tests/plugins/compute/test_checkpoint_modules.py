"""`checkpoint_modules`: activations that are computed again in backward."""

from pathlib import Path

import torch
from documented import first_example
from launching import TOY, Finished, hvdtrain

ENCODER = """
class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Dropout(0.3)) for _ in range(2))
        self.norm = nn.BatchNorm1d(4)
        self.last = nn.Linear(4, 5)
        for layer in self.encoder:
            layer[0].register_forward_hook(lambda *_: calls.append(self.training))

    def forward(self, frames, mask):
        for layer in self.encoder:
            frames = layer(frames)
        return self.last(self.norm(frames.transpose(1, 2)).transpose(1, 2))


calls = []
_train_step = train_step


def get_model(**_):
    torch.manual_seed(1)
    return Encoder()


def train_step(*, model, extern_data, **_):
    _train_step(model=model, extern_data=extern_data)


def track_epoch(**_):
    print(f"computed {calls.count(True)} times in training, {calls.count(False)} in evaluation")
"""


def train(corpus: Path, folder: Path, more: str) -> Finished:
    folder.mkdir()
    (folder / "config.py").write_text(TOY.read_text() + ENCODER + more)
    return hvdtrain(folder / "config.py", {"corpus": corpus, "model": folder / "model", "evaluated": True})


def test_gradients_and_names_stay_the_same(corpus: Path, tmp_path: Path) -> None:
    """With the example of the docs, and with dropout in what is computed twice."""
    example = first_example("training.md", "Activation checkpointing")
    models = []
    for name, more, times in (("kept", "", 40), ("again", example, 80)):
        ended = train(corpus, tmp_path / name, more)
        assert ended.status == 0, ended.err
        assert f"computed {times} times in training, 18 in evaluation" in ended.out
        models.append(torch.load(tmp_path / name / "model.001.pt", weights_only=True)["model"])
    assert models[0].keys() == models[1].keys()
    assert all(torch.equal(models[0][name], models[1][name]) for name in models[0])


def test_mistakes_are_told_together(corpus: Path, tmp_path: Path) -> None:
    ended = train(corpus, tmp_path / "wrong", "checkpoint_modules = ['encoder', 'norm', 'decoder.*']\n")
    assert ended.status == 2
    for got in ("'decoder.*'", "ModuleList encoder", "got norm"):
        assert ended.names("checkpoint_modules", got)
    both = "checkpoint_modules, torch_compile = ['encoder.*'], True\n"
    assert train(corpus, tmp_path / "compiled", both).names("checkpoint_modules", "torch_compile")
    other = hvdtrain(TOY, {"model": tmp_path / "model", "checkpoint_modules": ["encoder.*"], "backend": "tensorflow"})
    assert other.names("checkpoint_modules", "'tensorflow'")
