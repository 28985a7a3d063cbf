"""The benchmark's changes to configs/g2p.py, passed to hvdtrain as a second config file after it: convolutions whose weights are
matrices, which Muon needs, and a learning rate that does not decay to zero, which averages may need."""

# ruff: noqa: F821  `config` and the names of configs/g2p.py are defined while hvdtrain runs this file
import torch
from torch import nn

has_matrices = config.bool("has_matrices", False)
final_share = float(config.value("final_share", 0.0))


class MatrixConvolution(nn.Module):
    """A convolution over time that computes the same as another one, with a matrix for its weights."""

    def __init__(self, other):
        super().__init__()
        self.width = other.kernel_size[0]
        self.linear = nn.Linear(other.in_channels * self.width, other.out_channels)
        with torch.no_grad():
            self.linear.weight.copy_(other.weight.flatten(1))
            self.linear.bias.copy_(other.bias)

    def forward(self, frames):
        """Map (batch, channels, time) to (batch, channels, time)."""
        padded = nn.functional.pad(frames, (self.width // 2, self.width // 2))
        windows = padded.unfold(2, self.width, 1).transpose(1, 2).flatten(2)
        return self.linear(windows).transpose(1, 2)


def get_model(**_):
    model = LettersToPhones()
    for block in [*model.letter_blocks, *model.phone_blocks] if has_matrices else []:
        block.convolution = MatrixConvolution(block.convolution)
    return model


def dynamic_learning_rate(*, epoch_continuous, learning_rate, **_):
    """As in configs/g2p.py, but the decay ends at a share of the rate."""
    done = epoch_continuous / num_epochs
    decayed = final_share + (1 - final_share) * (1 - done) / 0.95
    return learning_rate * min(0.01 + done / 0.05, decayed)
