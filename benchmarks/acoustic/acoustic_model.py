"""An acoustic-like model on 80 features. Imported by the configs in benchmarks/acoustic and benchmarks/packing."""

from torch import nn
from torch.nn import functional

FEATURES, CLASSES = 80, 40


class Acoustic(nn.Module):
    """Two convolutions with a total stride of 4, then two bidirectional LSTM layers; returns scores of classes and blank."""

    def __init__(self, channels=128, hidden=192):
        super().__init__()
        self.first = nn.Conv1d(FEATURES, channels, 5, stride=2, padding=2)
        self.second = nn.Conv1d(channels, channels, 5, stride=2, padding=2)
        self.recurrent = nn.LSTM(channels, hidden, num_layers=2, batch_first=True, bidirectional=True)
        self.output = nn.Linear(2 * hidden, CLASSES + 1)

    def forward(self, frames):
        hidden = functional.relu(self.second(functional.relu(self.first(frames.transpose(1, 2))))).transpose(1, 2)
        return self.output(self.recurrent(hidden)[0])
