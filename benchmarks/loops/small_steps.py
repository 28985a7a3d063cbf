"""Steps so small that they are nothing but overhead, trained by hand or by another trainer: `small_steps.py NAME`.

A linear layer of 9 units classifies the frames of 4 short sequences. `steps_config.py` is the same for hvdtrain. Each process
writes a line for every epoch to the file $STEPS_RECORD.RANK: its CPU seconds (all threads), its seconds, and the memory then.
"""

import json
import os
import sys
import time

import numpy

RANK, RANKS = (
    int(os.environ.get(name, os.environ.get(of_mpi, default)))
    for name, of_mpi, default in (("RANK", "OMPI_COMM_WORLD_RANK", "0"), ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "1"))
)
STEPS, EPOCHS, BATCH, FEATURES, CLASSES = int(os.environ["STEPS_OF_EPOCH"]), 2, 4, 5, 9


def decode(item):
    """Keep a core and Python's lock busy for $STEPS_DECODE microseconds, as reading that decodes does."""
    until = time.thread_time() + 1e-6 * float(os.environ.get("STEPS_DECODE", "0"))
    while time.thread_time() < until:
        pass
    return item


class Frames:
    """As many sequences of 3 to 8 frames as all ranks take in an epoch: vectors, and a class for each frame."""

    def __init__(self, decodes=True):
        self.decodes = decodes
        generator = numpy.random.default_rng(0)
        lengths = generator.integers(3, 9, STEPS * BATCH * RANKS)
        self.items = [
            {
                "data": generator.normal(size=(length, FEATURES)).astype("float32"),
                "classes": generator.integers(0, CLASSES, length),
            }
            for length in lengths
        ]

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        return decode(self.items[index]) if self.decodes else self.items[index]


class Clock:
    """A callback of hvdtrain, and for others two functions: what an epoch takes, and what the start took before the first one."""

    start = None

    def on_epoch_begin(self, training=None):
        if not self.start:
            self.start = {"start cpu": time.process_time(), "start": time.time() - float(os.environ["STEPS_BEGAN"])}
        self.began = time.process_time(), time.perf_counter()

    def on_epoch_end(self, training=None):
        spent = {"cpu": time.process_time() - self.began[0], "wall": time.perf_counter() - self.began[1], **self.start}
        with open("/proc/self/statm") as file:
            spent["resident"] = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        with open(f"{os.environ['STEPS_RECORD']}.{RANK}", "a") as file:
            print(json.dumps(spent), file=file)


def padded(items):
    import torch

    sequences = [[torch.from_numpy(item[key]) for item in items] for key in ("data", "classes")]
    lengths = torch.tensor([len(one) for one in sequences[0]])
    return *(torch.nn.utils.rnn.pad_sequence(one, batch_first=True) for one in sequences), lengths


def loss_of(model, data, classes, lengths):
    import torch

    mask = torch.arange(data.shape[1])[None, :] < lengths[:, None]
    return torch.nn.functional.cross_entropy(model(data)[mask], classes[mask])


def train(batches, model, optimizer, backward=lambda loss: loss.backward()):
    """What every loop in PyTorch does."""
    clock = Clock()
    for _ in range(EPOCHS):
        clock.on_epoch_begin()
        total = 0.0
        for data, classes, lengths in batches:
            optimizer.zero_grad()
            loss = loss_of(model, data, classes, lengths)
            backward(loss)
            optimizer.step()
            total += loss.item()
        clock.on_epoch_end()


def by_hand():
    import torch
    from torch.utils.data import DataLoader, DistributedSampler

    torch.set_num_threads(1)
    frames, model, sampler = Frames(), torch.nn.Linear(FEATURES, CLASSES), None
    if RANKS > 1:
        torch.distributed.init_process_group("gloo")
        model, sampler = torch.nn.parallel.DistributedDataParallel(model), DistributedSampler(frames)
    batches = DataLoader(frames, BATCH, shuffle=sampler is None, sampler=sampler, collate_fn=padded)
    train(batches, model, torch.optim.SGD(model.parameters(), lr=0.01))


def by_hand_horovod():
    import horovod.torch as hvd
    import torch
    from torch.utils.data import DataLoader, DistributedSampler

    torch.set_num_threads(1)
    hvd.init()
    frames, model = Frames(), torch.nn.Linear(FEATURES, CLASSES)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    sampler = DistributedSampler(frames, RANKS, RANK)
    train(DataLoader(frames, BATCH, sampler=sampler, collate_fn=padded), model, optimizer)
    hvd.shutdown()


def accelerate():
    import torch
    from accelerate import Accelerator
    from torch.utils.data import DataLoader

    torch.set_num_threads(1)
    accelerator, model = Accelerator(cpu=True), torch.nn.Linear(FEATURES, CLASSES)
    batches = DataLoader(Frames(), BATCH, shuffle=True, collate_fn=padded)
    model, optimizer, batches = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01), batches)
    train(batches, model, optimizer, accelerator.backward)
    accelerator.end_training()


def lightning_module():
    import lightning
    import torch
    from torch.utils.data import DataLoader

    class Layer(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = torch.nn.Linear(FEATURES, CLASSES)

        def training_step(self, batch, _):
            loss = loss_of(self.model, *batch)
            self.log("ce", loss, batch_size=BATCH, on_step=False, on_epoch=True)
            return loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.01)

        def train_dataloader(self):
            return DataLoader(Frames(), BATCH, shuffle=True, collate_fn=padded)

    return Layer()


def lightning():
    import lightning
    import torch

    class Times(lightning.Callback):
        clock = Clock()

        def on_train_epoch_start(self, trainer, module):
            self.clock.on_epoch_begin()

        def on_train_epoch_end(self, trainer, module):
            self.clock.on_epoch_end()

    torch.set_num_threads(1)
    strategy = {"devices": RANKS, "strategy": "ddp" if RANKS > 1 else "auto", "accelerator": "cpu"}
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = lightning.Trainer(max_epochs=EPOCHS, callbacks=[Times()], **strategy, **quiet)
    trainer.fit(lightning_module())


def brain():
    from functools import partial

    import speechbrain
    import torch

    class Layer(speechbrain.Brain):
        clock = Clock()

        def compute_forward(self, batch, stage):
            return batch

        def compute_objectives(self, predictions, batch, stage):
            return loss_of(self.modules.model, *predictions)

    modules = {"model": torch.nn.Linear(FEATURES, CLASSES)}
    return Layer(modules, partial(torch.optim.SGD, lr=0.01), run_opts={"device": "cpu", "noprogressbar": True})


def speechbrain():
    import torch

    torch.set_num_threads(1)
    made, clock = brain(), Clock()
    made.on_stage_start = lambda stage, epoch=None: clock.on_epoch_begin()
    made.on_stage_end = lambda stage, loss, epoch=None: clock.on_epoch_end()
    made.fit(range(EPOCHS), Frames(), train_loader_kwargs={"batch_size": BATCH, "shuffle": True, "collate_fn": padded})


def named(items):
    return dict(zip(("data", "labels", "lengths"), padded(items), strict=True))


def transformers_arguments():
    """What transformers.Trainer is made with."""
    import torch
    from transformers import TrainingArguments

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = torch.nn.Linear(FEATURES, CLASSES)

        def forward(self, data, labels, lengths):
            return {"loss": loss_of(self.model, data, labels, lengths)}

    options = {"learning_rate": 0.01, "num_train_epochs": EPOCHS, "per_device_train_batch_size": BATCH, "optim": "sgd"}
    quiet = {"report_to": [], "save_strategy": "no", "logging_strategy": "no", "disable_tqdm": True, "use_cpu": True}
    args = TrainingArguments("none", remove_unused_columns=False, max_grad_norm=0.0, **options, **quiet)
    return {"model_init": Layer, "args": args, "train_dataset": Frames(), "data_collator": named}


def transformers():
    import torch
    from transformers import Trainer, TrainerCallback

    class Times(TrainerCallback):
        clock = Clock()

        def on_epoch_begin(self, *_, **__):
            self.clock.on_epoch_begin()

        def on_epoch_end(self, *_, **__):
            self.clock.on_epoch_end()

    torch.set_num_threads(1)
    Trainer(**transformers_arguments(), callbacks=[Times()]).train()


def espnet_model():
    import torch

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = torch.nn.Linear(FEATURES, CLASSES)

        def forward(self, data, data_lengths, classes, classes_lengths):
            loss = loss_of(self.model, data, classes.clamp(min=0), data_lengths)
            return loss, {"loss": loss.detach()}, torch.tensor(len(data))

    return Layer()


def keras():
    """A loop around a tf.function, and around Horovod's tape on two ranks."""
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    model = tf.keras.Sequential([tf.keras.Input((None, FEATURES)), tf.keras.layers.Dense(CLASSES)])
    optimizer, clock, frames = tf.keras.optimizers.SGD(0.01), Clock(), Frames()
    wrapped = lambda tape: tape  # noqa: E731
    if RANKS > 1:
        import horovod.tensorflow as hvd

        hvd.init()
        wrapped = hvd.DistributedGradientTape

    @tf.function(
        input_signature=[
            tf.TensorSpec([None, None, FEATURES]),
            tf.TensorSpec([None, None], tf.int64),
            tf.TensorSpec([None], tf.int64),
        ]
    )
    def step(data, classes, lengths):
        with tf.GradientTape() as tape:
            mask = tf.sequence_mask(lengths)
            losses = tf.keras.losses.sparse_categorical_crossentropy(
                classes[mask], model(data, training=True)[mask], from_logits=True
            )
            loss = tf.reduce_mean(losses)
        gradients = wrapped(tape).gradient(loss, [variable.value for variable in model.trainable_variables])
        optimizer.apply(gradients, model.trainable_variables)
        return loss

    generator = numpy.random.default_rng(0)
    for _ in range(EPOCHS):
        clock.on_epoch_begin()
        order, total = generator.permutation(len(frames))[RANK::RANKS], 0.0
        for first in range(0, len(order), BATCH):
            items = [frames[index] for index in order[first : first + BATCH]]
            lengths = numpy.array([len(item["data"]) for item in items])
            data = numpy.zeros((BATCH, lengths.max(), FEATURES), "float32")
            classes = numpy.zeros((BATCH, lengths.max()), "int64")
            for row, item in enumerate(items):
                data[row, : lengths[row]], classes[row, : lengths[row]] = item["data"], item["classes"]
            total += float(step(data, classes, lengths))
        clock.on_epoch_end()


if __name__ == "__main__":
    loops = {"loop": by_hand, "horovod": by_hand_horovod, "accelerate": accelerate, "lightning": lightning, "keras": keras}
    (loops | {"speechbrain": speechbrain, "transformers": transformers})[sys.argv[1]]()
