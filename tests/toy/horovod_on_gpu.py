"""Ten steps in one process over Horovod with NCCL; prints sums of the weights (tests/learner/test_gpu.py)."""

import json
import sys
from pathlib import Path

import horovod.torch as hvd
import torch

TESTS = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(TESTS), str(TESTS.parent)]
from gpu_training import few_steps  # noqa: E402

from hvdtrain.plugins.horovod.communicator import HorovodCommunicator  # noqa: E402

hvd.init()
torch.cuda.set_device(0)
print(json.dumps(few_steps(HorovodCommunicator(hvd), may_wait=True)))
hvd.shutdown()
