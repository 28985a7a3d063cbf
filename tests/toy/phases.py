"""On top of config.py: an event in places of a training, and what callbacks and train_step find there.

`event` is "signal" (to the last rank), "stop" (a callback's request of the last rank), "fail" (an error on every rank, after
which the training is started again), or "sleep" (until a time limit of a second is over). Each of `places` is a method of
callbacks, "train" or "evaluate", and the number of steps before it: the event happens in the first one, after the next start in
the second one, and so on.
"""

# ruff: noqa: F821  `config` is defined while hvdtrain runs this file
import hashlib
import json
import os
import signal
import time
from pathlib import Path

import torch

import hvdtrain
from hvdtrain.runtime.goodput import process_began

EVENTS = "train_begin epoch_begin step_end evaluation_begin evaluation_end epoch_end save stop".split()

event, places = config.value("event", ""), config.list("places", [])
notes = f"{Path(config.value('model')).parent}.notes.{hvdtrain.rank()}"
number = len([*Path(notes).parent.glob(f"{Path(notes).name}.done*")])  # of events before this start
place, at = [*places[2 * number :], "", -1][:2]
evaluates = config.bool("evaluates", True)
num_epochs, log_verbosity = 2, 3
train["partition_epoch"] = 4  # epochs of five steps
dev = {**dev, "partition_epoch": 3} if evaluates else None
if event == "sleep":  # the config is read at each start
    time_limit, time_limit_margin = time.time() - process_began() + 1.0, 0.0
if config.bool("modes", False):
    optimizer = lambda parameters: TwoPoints(parameters)  # noqa: E731


class TwoPoints(torch.optim.SGD):
    """Evaluates halfway between the weights of the first step, which all ranks have, and the trained ones."""

    def __init__(self, parameters):
        parameters = list(parameters)
        super().__init__(parameters, lr=0.0, momentum=0.9)
        self.all, self.first = parameters, {}
        self.trains = True

    def train(self):
        self._move(2.0, trains=True)

    def eval(self):
        self._move(0.5, trains=False)

    def step(self):
        assert self.trains
        self.first = self.first or {one: one.detach().clone() for one in self.all}
        super().step()

    def state_dict(self):
        return super().state_dict() | {"first": list(self.first.values())}

    def load_state_dict(self, stored):
        self.first = dict(zip(self.all, stored["first"], strict=True))
        super().load_state_dict({name: stored[name] for name in ("state", "param_groups")})

    @torch.no_grad()
    def _move(self, share, trains):
        if self.trains != trains:
            for one, first in self.first.items():
                one.copy_(first + share * (one - first))
        self.trains = trains


def weights_of(model):
    digest = hashlib.sha256()
    for tensor in model.state_dict().values():
        digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()[:12]


def note(*what):
    with open(notes, "a") as file:
        file.write(json.dumps(what) + "\n")


def happens(where, step, training=None):
    done = Path(f"{notes}.done{number}")
    if (where, step) != (place, int(at)) or done.exists():
        return
    if event in ("signal", "stop") and hvdtrain.rank() < hvdtrain.size() - 1:
        return
    done.touch()
    if event == "signal":
        os.kill(os.getpid(), signal.SIGTERM)
    elif event == "stop":
        training.stop("planted")
    elif event == "sleep":
        time.sleep(1.1)
    else:
        raise RuntimeError("planted in a phase")


class Sees:
    def see(self, kind, training):
        if kind in ("evaluation_begin", "evaluation_end", "epoch_end", "save"):
            with training.evaluated_weights(), training.evaluated_weights():
                evaluated = weights_of(training.model)
        else:
            evaluated = None
        assert (training.dataset is None) == ("evaluation" not in kind), (kind, training.dataset)
        place = [training.epoch, training.step, training.dataset, training.is_within_epoch]
        note(kind, *place, weights_of(training.model), evaluated)
        happens(kind, training.step, training)


for kind in EVENTS:
    setattr(Sees, f"on_{kind}", lambda self, training, kind=kind: self.see(kind, training))
callbacks = Sees


def train_step(*, model, extern_data, _step=train_step, **_):
    context = hvdtrain.get_run_ctx()
    kind = "train" if context.train_flag else "evaluate"
    note(kind, context.epoch, context.step, weights_of(model), extern_data["id"].raw_tensor[:, 0].tolist())
    happens(kind, context.step)
    _step(model=model, extern_data=extern_data)
