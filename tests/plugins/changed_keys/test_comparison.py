"""Keys that a resumed training has other values of than its checkpoint: each is a line that says what it was, is, and does."""

import re
from pathlib import Path

from launching import TOY, hvdtrain

LINE = re.compile(r"^([\w.]+): (.*) in the checkpoint(?:: (.*))?$", flags=re.M)


def test_each_changed_key_is_a_line(corpus: Path, tmp_path: Path) -> None:
    keys = {"corpus": corpus, "model": tmp_path / "model", "part": "two.hdf", "gradient_clip": 5.0}
    keys |= {"optimizer": {"class": "adam", "betas": (0.9, 0.99)}, "learning_rate_schedule": {"class": "cosine", "num_epochs": 9}}
    assert hvdtrain(TOY, {**keys, "num_epochs": 1}).status == 0
    same = hvdtrain(TOY, {**keys, "num_epochs": 1})
    assert same.status == 0, same.err
    assert LINE.findall(same.out) == []
    changed = {"random_seed": 7, "gradient_clip": 2.0, "learning_rate": 0.5, "ema_decay": 0.9, "num_epochs": 2, "max_seqs": 3}
    changed["optimizer"] = {"class": "adam", "betas": (0.8, 0.99), "eps": 1e-4}
    changed["learning_rate_schedule"] = {"class": "cosine", "num_epochs": 8}
    ended = hvdtrain(TOY, {**keys, **changed})
    assert ended.status == 0, ended.err
    told = {name: (text, effect) for name, text, effect in LINE.findall(ended.out)}
    # The schedule ends after its own number of epochs.
    assert told.keys() == {*changed, "optimizer.betas", "optimizer.eps"} - {"optimizer", "num_epochs"}
    assert told["gradient_clip"] == ("2.0 from here on, 5.0", "")
    assert told["optimizer.betas"] == ("(0.8, 0.99) from here on, (0.9, 0.99)", "")
    assert told["learning_rate_schedule"][0] == "{class: 'cosine', num_epochs: 8} from here on, {class: 'cosine', num_epochs: 9}"
    assert told["random_seed"][1].startswith("later steps use different random numbers")
    assert told["learning_rate"][0] == "0.5, 0.01"
    assert told["learning_rate"][1].startswith("no effect: an epoch uses the rate of the previous one")
    assert "epoch 2 global train step 1 with effective learning rate 0.0096194 ..." in ended.out, "0.01, on the new curve"
