"""Fine-tuning with LoRA: the language model of language_model.py, which knows English, learns Python with small adapters.

python -m hvdtrain configs/cookbook/lora.py                        after language_model.py; needs the package peft
mpirun -np 2 --bind-to none python -m hvdtrain configs/cookbook/lora.py ++use_horovod 1
"""

from pathlib import Path
from sysconfig import get_path

import peft
import torch
from language_model import Decoder, paragraphs, train_step  # noqa: F401  the same loss

BASE = config.value("base", "exp/cookbook/language_model/model.003.pt")  # noqa: F821  defined while hvdtrain runs this file

library = sorted(Path(get_path("stdlib"), "asyncio").glob("*.py"))
train = paragraphs(path.read_text(encoding="utf-8") for path in library[4:8])
dev = paragraphs(path.read_text(encoding="utf-8") for path in library[:2])
batching = "laplace:.200"
batch_size_total = 1000  # characters per step, over all ranks
num_epochs = 3
optimizer = {"class": "adamw"}
learning_rate = 0.02  # adapters take larger ones than whole models
learning_rate_schedule = {"class": "cosine", "num_warmup_steps": 10, "final": 0.1}
gradient_clip_global_norm = 1.0
save_parameters = "trained"  # without those of the base; a hash of them is checked when the model is loaded
model = "exp/cookbook/lora/model"


def get_model(**_):
    """The base with adapters. Of a model of transformers, AutoModel.from_pretrained(...) is the base."""
    base = Decoder()
    base.load_state_dict(torch.load(BASE, weights_only=True)["model"])
    adapters = peft.LoraConfig(r=8, lora_alpha=16, target_modules=r".*(inputs|attended|feed_forward.[02]|output.1)")
    return peft.inject_adapter_in_model(adapters, base)
