"""A GRU predicts the class of each frame, trained on HDF files.

    python -m hvdtrain dump my_corpus.py:Corpus train.hdf                    converts a dataset (docs/hdf.md)
    python -m hvdtrain check train.hdf                                       prints the content of a file, and checks it
    python -m hvdtrain init_hdf.py                                                trains in one process
    python -m hvdtrain init_hdf.py ++ngpu 2                                       on two ranks of this host
    mpirun -np 2 --bind-to none python -m hvdtrain init_hdf.py ++use_horovod 1    on two Horovod ranks
    python -m hvdtrain init_hdf.py --dry-run                                      tries some steps, and writes nothing
    python -m hvdtrain export init_hdf.py                                         writes the trained model for other programs

The same command continues a training that was stopped. ++KEY VALUE overrides any key: ++num_epochs 5.
"""

from torch import nn

import hvdtrain

# Vectors in the data key "data", a class per frame in "classes"; `check` prints what your files have.
train = {"class": "HDFDataset", "files": ["train.hdf"], "seq_ordering": "laplace:.1000"}  # random, in bins of similar lengths
dev = {"class": "HDFDataset", "files": ["dev.hdf"]}  # evaluated after every epoch
FEATURES, CLASSES = 40, 100

batch_size = 10000  # frames per rank and step, with padding
num_epochs = 20
optimizer = {"class": "adamw", "weight_decay": 0.01}
learning_rate = 0.001
gradient_clip_global_norm = 5.0
model = "exp/init_hdf/model"  # checkpoints: exp/init_hdf/model.001.pt, ...

# Often wanted, too; docs/keys.md has all keys.
# log_interval = 10  # seconds from one line about steps to the next; `python -m hvdtrain report exp/init_hdf` draws them
# cleanup_old_models = {"keep_last_n": 2, "keep_best_n": 1, "keep": []}  # removes other models; best.json names the best one
# early_stopping_patience = 5  # ends training after 5 epochs without a better score
# early_stopping_measure = "dev_loss_ce"  # the score by which epochs are compared
# trackers = ["wandb"]  # or "mlflow", or a class of your own: where numbers are reported
# callbacks = "my_callbacks:MyCallbacks"  # a class with methods such as on_epoch_end(training)


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(FEATURES, 256, num_layers=2, batch_first=True)
        self.output = nn.Linear(256, CLASSES)

    def forward(self, frames):
        return self.output(self.gru(frames)[0])


def get_model(**_):
    return Tagger()


def train_step(*, model, extern_data, **_):
    """The losses of a batch: one number per frame, so that N ranks compute what one rank does."""
    data, classes = extern_data["data"], extern_data["classes"]
    scores = model(data.raw_tensor)[data.mask]  # raw_tensor (batch, time, features), mask (batch, time), seq_lens (batch,)
    targets = classes.raw_tensor[classes.mask].long()  # HDF files have int32 or smaller
    context = hvdtrain.get_run_ctx()
    context.mark_as_loss(nn.functional.cross_entropy(scores, targets, reduction="none"), "ce", use_normalized_loss=True)
    context.mark_as_loss(scores.argmax(-1) != targets, "error", as_error=True)
