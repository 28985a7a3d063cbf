"""With hvdtrain: python -m hvdtrain benchmarks/peers/with_hvdtrain.py ++ngpu 2 (or under torchrun or mpirun)"""

from spelling import BATCH, DEV, EPOCHS, FOLDER, SAVE_STEPS, TRAIN, NextLetter, Words

import hvdtrain

train, dev = Words(TRAIN), Words(DEV)
max_seqs = BATCH  # per rank
num_epochs = EPOCHS
optimizer = {"class": "adam"}
learning_rate = 0.003
model = f"{FOLDER}/model"
save_interval_steps = SAVE_STEPS or None


def get_model(**_):
    return NextLetter()


def train_step(*, model, extern_data, **_):
    letters = extern_data["data"]
    losses = model(letters.raw_tensor, letters.seq_lens)
    hvdtrain.get_run_ctx().mark_as_loss(losses, "ce", use_normalized_loss=True)
