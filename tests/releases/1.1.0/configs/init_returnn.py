"""An LSTM learns the 12-AX task, in a config that RETURNN runs, too (docs/returnn.md).

    python -m hvdtrain init_returnn.py                                                trains in one process
    mpirun -np 2 --bind-to none python -m hvdtrain init_returnn.py ++use_horovod 1    on two Horovod ranks
    python -m returnn init_returnn.py                                                 with RETURNN's own engine

All need the package: pip install returnn dm-tree rapidfuzz soundfile. The same command continues a training that was
stopped. ++KEY VALUE overrides any key: ++num_epochs 5.
"""

import returnn.frontend as rf
import torch
from returnn.tensor import TensorDict

task = "train"
backend = "torch"
train = {"class": "Task12AXDataset", "num_seqs": 2000}
dev = {"class": "Task12AXDataset", "num_seqs": 200, "fixed_random_seed": 2}
extern_data = {"data": {"dim": 9}, "classes": {"dim": 2, "sparse": True}}

batching = "random"
batch_size = 4000  # frames per rank and step, with padding
max_seqs = 20
num_epochs = 4
optimizer = {"class": "adamw", "weight_decay": 0.01}
learning_rate = 0.01
gradient_clip_global_norm = 5.0
model = "exp/init_returnn/model"  # checkpoints: exp/init_returnn/model.001.pt, ...

# Often wanted, too; docs/keys.md has all keys.
# log_interval = 10  # seconds from one line about steps to the next; `python -m hvdtrain report exp/init_returnn` draws them
# cleanup_old_models = {"keep_last_n": 2, "keep_best_n": 1, "keep": []}  # removes other models; best.json names the best one
# early_stopping_patience = 5  # ends training after 5 epochs without a better score
# early_stopping_measure = "dev_loss_ce"  # the score by which epochs are compared
# trackers = ["wandb"]  # or "mlflow", or a class of your own: where numbers are reported
# callbacks = "my_callbacks:MyCallbacks"  # a class with methods such as on_epoch_end(training)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = torch.nn.LSTM(9, 32, batch_first=True)
        self.scores = torch.nn.Linear(32, 2)

    def forward(self, symbols):
        return self.scores(self.lstm(symbols)[0])


def get_model(*, epoch, step, **_kwargs):
    return Model()


def train_step(*, model: Model, extern_data: TensorDict, **_kwargs):
    """One loss per frame, with its axes, so that N ranks compute what one rank does."""
    data, classes = extern_data["data"], extern_data["classes"]
    scores, targets = model(data.raw_tensor), classes.raw_tensor.long()
    losses = torch.nn.functional.cross_entropy(scores.transpose(1, 2), targets, reduction="none")
    rf.get_run_ctx().mark_as_loss(losses, "ce", dims=data.dims[:2], use_normalized_loss=True)
    rf.get_run_ctx().mark_as_loss(scores.argmax(dim=2) != targets, "error", dims=data.dims[:2], as_error=True)
