"""The benchmark's changes to configs/g2p.py, passed to hvdtrain as a second config file after it.

The hand-written loops use the model and seeds from here, too, so that all variants start from the same weights and apply the
same dropout, and their losses can be compared.
"""

import json
import time

import torch

import hvdtrain

dev = None
eval = None
log = None
log_verbosity = 3

train_step_of_g2p = train_step  # noqa: F821  names of configs/g2p.py are defined while this file runs


channels = config.int("channels", 160)  # noqa: F821  `config` is defined while hvdtrain runs this file


def get_model(**_):
    """The model of configs/g2p.py, of any width, with weights from a fixed seed."""
    torch.manual_seed(1)
    return LettersToPhones(channels)  # noqa: F821


def seed_dropout(step, rank):
    """Called before every forward pass, in all variants. (torch.manual_seed takes 120 microseconds, this takes 3.)"""
    torch.default_generator.manual_seed(1000 * step + rank)


def train_step(**given):
    seed_dropout(hvdtrain.get_run_ctx().step, hvdtrain.rank())
    train_step_of_g2p(**given)


class Clock:
    """Prints the CPU seconds of all threads in each epoch as a line of JSON."""

    def on_epoch_begin(self, training):
        self.began = time.process_time()

    def on_epoch_end(self, training):
        print(json.dumps({"epoch": training.epoch, "cpu": time.process_time() - self.began}) + "\n", end="", flush=True)


callbacks = Clock()
