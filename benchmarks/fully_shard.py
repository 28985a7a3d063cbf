"""What PyTorch's fully_shard (FSDP2) computes on CPUs over Gloo, compared with the same training without it on one process.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 benchmarks/fully_shard.py

In the last step, only rank 0 has a batch; the others run the model on one frame of zeros, with the loss times 0. Gradients are
sums over the ranks. One line is printed for each case: the largest relative difference of a loss, and the largest of a weight.
"""

import argparse
from collections.abc import Callable

import torch
import torch.distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

STEPS, FEATURES = 5, 5


class Model(torch.nn.Module):
    """Three layers, one more without a gradient, and a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(FEATURES, 7)
        self.second = torch.nn.Linear(7, 7)
        self.unused = torch.nn.Linear(3, 3)
        self.last = torch.nn.Linear(7, 3)
        self.scale = torch.nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.second(self.first(data).tanh()).tanh()
        return self.last(hidden) * self.scale  # type: ignore[no-any-return]


def made() -> Model:
    torch.manual_seed(1)
    return Model()


def sharded(model: Model, sum_only: bool = True, **options: MixedPrecisionPolicy) -> list[FSDPModule]:
    """Shard a model over all ranks, each layer by itself; return the modules that take part."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for module in (*model.children(), model):
        fully_shard(module, mesh=mesh, **options)
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for module in modules:
        module.set_gradient_divide_factor(1.0)  # sums, not means
        if sum_only:
            module.set_force_sum_reduction_for_comms(True)  # Gloo has no sum that multiplies on its way
    return modules


def squares(model: Model, data: torch.Tensor) -> torch.Tensor:
    return model(data).square().sum()  # type: ignore[no-any-return]


def compare(accumulate: int = 1, clip: float | None = None, sum_only: bool = True, **options: MixedPrecisionPolicy) -> str:
    """Train with and without fully_shard; return the differences."""
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    model, reference = made(), made()
    modules = sharded(model, sum_only, **options)
    optimizers = [torch.optim.AdamW(one.parameters(), 0.01) for one in (model, reference)]
    of_losses = 0.0
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        for batch in range(accumulate):
            is_last = batch == accumulate - 1
            data = torch.randn(size, 4, FEATURES, generator=generator)
            count = 1 if step == STEPS - 1 and is_last else size  # of the ranks with a batch
            for module in modules:
                module.set_requires_gradient_sync(is_last)
            loss = squares(model, data[rank]) if rank < count else 0.0 * squares(model, torch.zeros(1, FEATURES))
            loss.backward()  # type: ignore[no-untyped-call]
            expected = squares(reference, data[:count].reshape(-1, FEATURES))
            expected.backward()  # type: ignore[no-untyped-call]
            total = loss.detach().clone()
            torch.distributed.all_reduce(total)
            of_losses = max(of_losses, float(abs(total / expected.detach() - 1)))
        for one, optimizer in zip((model, reference), optimizers, strict=True):
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(one.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
    whole = [parameter.detach().full_tensor() for parameter in model.parameters()]  # type: ignore[attr-defined]
    pairs = zip(whole, [parameter.detach() for parameter in reference.parameters()], strict=True)
    return f"losses differ by {of_losses:.0e}, weights by {max(float((one - other).abs().max()) for one, other in pairs):.0e}"


def outside_of_forward() -> str:
    """A penalty on a weight that train_step reads by itself."""
    model = made()
    sharded(model)
    penalty = float(model.first.weight.detach().square().sum())
    return f"{penalty:.3f} instead of {float(made().first.weight.detach().square().sum()):.3f}"


def by_autograd() -> str:
    """Gradients that are not added to those of the parameters, as hvdtrain computes them for several normalized losses."""
    model = made()
    sharded(model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    found = torch.autograd.grad(squares(model, torch.ones(2, FEATURES)), trained, allow_unused=True)
    return f"for {sum(gradient is not None for gradient in found)} of {len(trained)} parameters"


CASES: dict[str, Callable[[], str]] = {
    "sums of gradients": compare,
    "3 batches an update": lambda: compare(accumulate=3),
    "clipped to a global norm": lambda: compare(clip=0.1),
    "bfloat16, reduced in float32": lambda: compare(mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32)),
    "set_gradient_divide_factor alone": lambda: compare(sum_only=False),
    "the square of a weight on rank 0": outside_of_forward,
    "torch.autograd.grad": by_autograd,
}


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    torch.distributed.init_process_group("gloo")
    for name, case in CASES.items():
        try:
            result = case()
        except RuntimeError as error:  # on all ranks alike
            result = f"RuntimeError: {str(error).splitlines()[0]}"
        if torch.distributed.get_rank() == 0:
            print(f"{name}: {result}", flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
