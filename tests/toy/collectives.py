"""Every collective on several ranks of a real job: `collectives.py FOLDER`, over one transport after the other.

Each rank leaves FOLDER/TRANSPORT.RANK.ok when everything was as it should be; what was not is in its traceback.
"""

import sys
import time
from pathlib import Path

import numpy
import pytest
import torch

import hvdtrain
from hvdtrain.comm.base import all_reduce
from hvdtrain.errors import ConfigError
from hvdtrain.plugins.compute.sync_batch_norm import synchronize
from hvdtrain.plugins.param_average.groups import BetweenGroups
from hvdtrain.plugins.sharded.optimizer import ShardedOptimizer
from hvdtrain.settings import read_settings
from hvdtrain.start_up.ranks import open_communicator

folder = Path(sys.argv[1])


def test_sums(comm) -> None:
    types = [torch.float32, torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32]
    tensors = [torch.full((number % 3, 2), comm.rank + 1, dtype=kind) for number, kind in enumerate(types)]
    sums = all_reduce(comm, [tensor.clone() for tensor in tensors if tensor.numel()], "sum", name="sums")
    for old, new in zip([tensor for tensor in tensors if tensor.numel()], sums, strict=True):
        assert (new.dtype, new.shape) == (old.dtype, old.shape)
        assert (new == sum(range(1, comm.size + 1))).all()
    [average] = all_reduce(comm, [torch.arange(6.0).reshape(2, 3).t() * (comm.rank + 1)], "average", name="average")
    torch.testing.assert_close(average, torch.arange(6.0).reshape(2, 3).t() * (comm.size + 1) / 2)
    assert all_reduce(comm, [], "sum", name="nothing") == []
    narrow = torch.tensor([1.0 if comm.rank else 256.0], dtype=torch.bfloat16)  # 257 cannot be represented in bfloat16
    for _ in range(3):
        [narrow] = all_reduce(comm, [narrow], "average", name="narrow")
    assert narrow.item() == torch.tensor((256 + comm.size - 1) / comm.size).bfloat16().item()


def test_sums_for_their_owners(comm) -> None:
    """Each owner gets its sums; where the types and sizes differ, and where a rank owns nothing of a type."""
    kinds = [torch.float32, torch.float64, torch.float32, torch.int64, torch.float32, torch.bfloat16]
    owners = [1, 0, 1, comm.size - 1, 0, 1]
    tensors = [torch.arange(2.0 + number).to(kind) + comm.rank for number, kind in enumerate(kinds)]
    expected = all_reduce(comm, [tensor.clone() for tensor in tensors], "sum", name="all")
    for op, divisor in (("sum", 1), ("average", comm.size)):
        given = [tensor.clone() for tensor in tensors if op == "sum" or tensor.is_floating_point()]
        wanted = [tensor for tensor in expected if op == "sum" or tensor.is_floating_point()]
        theirs = [owner for owner, tensor in zip(owners, tensors, strict=True) if op == "sum" or tensor.is_floating_point()]
        reduced = comm.finish(comm.start(given, op, name=f"owners.{op}", owners=theirs))
        for new, whole, owner in zip(reduced, wanted, theirs, strict=True):
            assert (new.dtype, new.shape) == (whole.dtype, whole.shape)
            if owner == comm.rank:
                torch.testing.assert_close(new, whole / divisor if op == "average" else whole)


def test_narrow_sums(comm) -> None:
    """float32 travels in 16 bits, whatever else in its own type; types and shapes come back."""
    large, small = 2.0**24 + 1, 1 + 2.0**-20  # an integer that float32 does not have, and a number that 16 bits do not
    for narrow in ("float16", "bfloat16") if transport != "use_horovod" else ("float16",):
        for op, divisor in (("sum", 1), ("average", comm.size)):
            tensors = [torch.full((3, 2), small).t(), torch.tensor([large], dtype=torch.float64), torch.full((5,), 1.0)]
            for owners in (None, [0, 0, 0]):
                given = [tensor.clone() for tensor in tensors]
                name = f"narrow.{narrow}.{op}.{owners}"
                reduced = comm.finish(comm.start(given, op, name=name, owners=owners, narrow=narrow))
                assert [one.dtype for one in reduced] == [torch.float32, torch.float64, torch.float32]
                if owners is None or comm.rank == 0:
                    assert torch.equal(reduced[0], torch.full((2, 3), comm.size / divisor)), reduced[0]
                    assert reduced[1].item() == large * comm.size / divisor
                    assert torch.equal(reduced[2], torch.full((5,), comm.size / divisor))
    [overflow] = comm.finish(comm.start([torch.full((2,), 60000.0)], "average", name="overflow", narrow="float16"))
    assert overflow.isinf().all()


def test_the_size_of_messages_follows_the_transport(comm) -> None:
    assert comm.bucket_bytes(on_gpu=False) == 2 << 20
    if not torch.cuda.is_available():  # so this is Gloo, or Horovod without NCCL
        assert comm.bucket_bytes(on_gpu=True) == 2 << 20


def test_start_does_not_wait(comm) -> None:
    comm.gather(None, name="together")
    if comm.rank == 1:
        time.sleep(1.5)
    began = time.monotonic()
    handles = [comm.start([torch.ones(1000)], "sum", name=f"early.{number}") for number in range(3)]
    started = time.monotonic() - began
    for handle in handles:
        assert comm.finish(handle)[0][0] == comm.size
    if comm.rank == 0:
        assert started < 0.7, started
        assert time.monotonic() - began > 0.9


def test_broadcast_and_gather(comm) -> None:
    sent = [
        torch.tensor([True, False]),
        torch.tensor(7),
        torch.zeros(0, 3),
        torch.randn(3, 4).t(),
        torch.ones(2, dtype=torch.bfloat16),
    ]
    mine = [tensor if comm.rank == 0 else torch.zeros_like(tensor) for tensor in sent]
    received = comm.broadcast(mine, name="broadcast")
    for old, new, first in zip(sent, received, comm.gather(sent, name="sent")[0], strict=True):
        assert (new.dtype, new.shape) == (old.dtype, old.shape)
        assert torch.equal(new, first)
    assert comm.gather({"rank": comm.rank, "long": "x" * comm.rank * 1000}, name="dicts")[-1]["rank"] == comm.size - 1
    assert [comm.local_rank, comm.local_size] == [comm.rank, comm.size]


def test_gather_rows(comm) -> None:
    rows = [torch.full((comm.rank, 2), comm.rank), torch.tensor([float(comm.rank)])]
    first, second = comm.gather_rows(rows, name="rows")
    assert first[:, 1].tolist() == [rank for rank in range(comm.size) for _ in range(rank)]
    assert second.tolist() == list(range(comm.size))
    lengths = [2 * rank + 1 for rank in range(comm.size)]
    values = torch.full((lengths[comm.rank],), 1 + 2.0**-20 + comm.rank)
    [known] = comm.gather_rows([values], name="known", lengths=lengths)
    assert torch.equal(known, torch.cat([torch.full((n,), 1 + 2.0**-20 + rank) for rank, n in enumerate(lengths)]))
    [narrow] = comm.gather_rows([values], name="narrow_rows", lengths=lengths, narrow="float16")
    assert narrow.dtype == torch.float32
    assert torch.equal(narrow, known.round())


def test_all_to_all(comm) -> None:
    rows = [torch.arange(6).to(torch.uint8) + 10 * comm.rank + 100 * other for other in range(2)]
    sent = torch.stack([*rows, torch.full((6,), comm.rank, dtype=torch.uint8)])
    before = comm.sent
    [received] = comm.finish(comm.all_to_all(sent, name="all_to_all"))
    assert comm.sent - before == 18
    assert (received.dtype, received.shape) == (torch.uint8, (3, 6))
    for other in range(comm.size):
        expected = torch.arange(6) + 10 * other + 100 * comm.rank if comm.rank < 2 else torch.full((6,), other)
        assert torch.equal(received[other], expected.to(torch.uint8))
    narrow = torch.full((comm.size, 2), float(comm.rank))
    assert comm.finish(comm.all_to_all(narrow, name="floats"))[0].tolist() == [[float(other)] * 2 for other in range(comm.size)]


def test_parts_of_the_ranks(comm) -> None:
    """Twice: two trainings in one process divide the ranks alike."""
    assert comm.split([[0, 1, 2]], name="all") is comm
    for _ in range(2):
        part = comm.split([[0, 2], [1]], name="part")
        assert (part.rank, part.size) == ((0, 2), (0, 1), (1, 2))[comm.rank]
        [total] = all_reduce(part, [torch.tensor([float(comm.rank + 1)])], "sum", name="sum_of_part")
        assert total.item() == (4.0, 2.0, 4.0)[comm.rank]
        [mean] = part.finish(part.start([torch.ones(2) * comm.rank], "average", name="narrow_part", narrow="float16"))
        assert mean.tolist() == [1.0, 1.0]
        [first] = part.broadcast([torch.tensor([comm.rank])], name="first_of_part")
        assert first.item() == (0, 1, 0)[comm.rank]
        gathered = part.gather({"rank": comm.rank}, name="gather_part")
        assert gathered == ([{"rank": 1}] if comm.rank == 1 else [{"rank": 0}, {"rank": 2}])
        [rows] = part.gather_rows([torch.full((comm.rank, 1), comm.rank)], name="rows_of_part")
        assert rows.flatten().tolist() == ([1] if comm.rank == 1 else [2, 2])
        [received] = part.finish(part.all_to_all(torch.arange(2 * part.size).view(part.size, 2) + 10 * comm.rank, name="of_part"))
        assert received.tolist() == (
            [[10, 11]] if comm.rank == 1 else [[part.rank * 2, part.rank * 2 + 1], [20 + part.rank * 2, 21 + part.rank * 2]]
        )
    last = comm.split([[1, 2]], name="last")
    assert (last is None) == (comm.rank == 0)
    assert last is None or last.broadcast([torch.tensor([comm.rank])], name="first_of_last")[0].item() == 1


def test_between_groups(comm) -> None:
    """Groups of unequal size: [0, 1] and [2]."""
    within = comm.split([[0, 1], [2]], name="within")
    leaders = comm.split([[0, 2]], name="leaders")
    between = BetweenGroups(within, leaders, number=comm.rank // 2, count=2)
    value = 1.0 + comm.rank // 2
    before = between.sent
    [mean] = all_reduce(between, [torch.full((3,), value)], "average", name="mean_of_groups")
    assert mean.tolist() == [1.5] * 3
    assert between.sent - before == (0 if comm.rank == 1 else 12)
    assert between.gather(comm.rank // 2, name="numbers") == [0, 1]
    assert between.broadcast([torch.tensor([value])], name="first_group")[0].item() == 1.0
    [rows] = between.gather_rows([torch.full((1, 2), value)], name="rows_of_groups", lengths=[1, 1])
    assert rows.tolist() == [[1.0, 1.0], [2.0, 2.0]]
    [received] = between.finish(between.all_to_all(torch.tensor([[value], [10 * value]]), name="between"))
    assert received.tolist() == ([[1.0], [2.0]] if comm.rank < 2 else [[10.0], [20.0]])


def test_for_configs(comm) -> None:
    called = folder / f"called.{comm.rank}"
    assert hvdtrain.run_on_main(lambda: (called.write_text(""), comm.rank + 10)[1]) == 10
    assert hvdtrain.run_on_main(lambda: comm.rank + 20, once_per="host") == 20
    assert [(folder / f"called.{rank}").exists() for rank in range(comm.size)] == [True] + [False] * (comm.size - 1)
    with pytest.raises(ConfigError, match="planted"):
        hvdtrain.run_on_main(fail)
    total = sum(range(1, comm.size + 1))
    assert hvdtrain.all_reduce(comm.rank + 1) == total
    assert hvdtrain.all_reduce(1e16 if comm.rank == 0 else 1.0) == 1e16 + (
        comm.size - 1
    )  # adding the values one by one gives another result
    assert hvdtrain.all_reduce(comm.rank + 1, "average") == total / comm.size
    assert (hvdtrain.all_reduce(comm.rank, "min"), hvdtrain.all_reduce(comm.rank, "max")) == (0, comm.size - 1)
    numpy.testing.assert_array_equal(hvdtrain.all_reduce(numpy.array([1, comm.rank])), [comm.size, total - comm.size])
    numpy.testing.assert_array_equal(hvdtrain.all_reduce(numpy.array([1.0, comm.rank]), "max"), [1, comm.size - 1])
    mine = torch.tensor([1.0, comm.rank + 1])
    assert hvdtrain.all_reduce(mine).tolist() == [comm.size, total]
    assert mine.tolist() == [1.0, comm.rank + 1]  # the input is unchanged
    with pytest.raises(ConfigError, match="expected 'sum' or 'average' for a tensor, got 'min'"):
        hvdtrain.all_reduce(mine, "min")


def fail() -> None:
    raise ConfigError(["planted"])


def test_sync_batch_norm(comm) -> None:
    """Every rank has a different number of rows, the last one none; the result equals that of one process with all rows."""
    torch.manual_seed(0)
    rows = torch.randn(7, 4, 5, dtype=torch.float64) * 3 + 100
    targets = torch.randn(7, 4, 5, dtype=torch.float64)
    own = torch.arange(7) % max(1, comm.size - 1) == comm.rank

    def model() -> torch.nn.Module:
        torch.manual_seed(1)
        return torch.nn.Sequential(
            torch.nn.Conv1d(4, 4, 1),
            torch.nn.BatchNorm1d(4),
            torch.nn.Tanh(),
            torch.nn.BatchNorm1d(4, momentum=None, affine=False),
        ).double()

    alone, together = model(), model()
    exchange = synchronize(together, comm.channel("sync_batch_norm"))
    assert alone.state_dict().keys() == together.state_dict().keys()
    for _ in range(2):
        expected = torch.autograd.grad((alone(rows) * targets).sum(), list(alone.parameters()))
        gradients = [torch.zeros_like(parameter) for parameter in together.parameters()]
        if own.any():
            loss = (together(rows[own]) * targets[own]).sum()
            exchange.end_pass(rows.device)
            gradients = list(torch.autograd.grad(loss, list(together.parameters())))
            exchange.end_pass(rows.device)
        else:
            exchange.join_without_batch(rows.device, forward=True)
            exchange.join_without_batch(rows.device, forward=False)
        for one, other in zip(expected, all_reduce(comm, gradients, "sum", name="gradients"), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
    for name, value in alone.state_dict().items():
        torch.testing.assert_close(value, together.state_dict()[name], rtol=1e-6, atol=1e-6)
    alone.eval()
    together.eval()
    torch.testing.assert_close(alone(rows), together(rows), rtol=1e-6, atol=1e-6)


def test_complex_numbers(comm) -> None:
    """Of any shape, also those that are not contiguous; with PyTorch, Horovod has no such type."""
    own = torch.view_as_complex(torch.arange(12.0).reshape(2, 3, 2)) + comm.rank
    total = own * comm.size + sum(range(comm.size)) - comm.rank * comm.size
    sums = all_reduce(comm, [own.T, own[0, 0], own.clone()], "sum", name="complex")
    for one, expected in zip(sums, [total.T, total[0, 0], total], strict=True):
        torch.testing.assert_close(one, expected)
    [rows] = comm.gather_rows([own], name="complex.rows")
    torch.testing.assert_close(rows[2 * comm.rank :][:2], own)


def test_sharded_optimizer(comm) -> None:
    """A sharded optimizer holds a part of the state and updates exactly like the whole one; each loads the other's state."""

    def model() -> torch.nn.Module:
        torch.manual_seed(2)
        return torch.nn.Sequential(*[torch.nn.Linear(6, 6) for _ in range(3)], torch.nn.Linear(6, 1).to(torch.float64))

    def optimizer_of(module: torch.nn.Module) -> torch.optim.Optimizer:
        groups = [{"params": list(module[:2].parameters()), "weight_decay": 0.1}, {"params": list(module[2:].parameters())}]
        return torch.optim.AdamW(groups, lr=0.01)

    whole, sharded = model(), model()
    whole_optimizer, inner = optimizer_of(whole), optimizer_of(sharded)
    sharded_optimizer = ShardedOptimizer(inner, comm)
    for step in range(4):
        if step == 2:  # each continues with the other's state
            sharded_optimizer.gather()
            saved = comm.gather(sharded_optimizer.state_dict() if comm.rank == 0 else None, name="saved")[0]
            before = whole_optimizer.state_dict()
            sharded_optimizer.load_state_dict(before)
            whole_optimizer.load_state_dict(saved)
        for module, optimizer in ((whole, whole_optimizer), (sharded, sharded_optimizer)):
            torch.manual_seed(step)
            optimizer.zero_grad(set_to_none=True)
            assert all(parameter.grad is None for parameter in module.parameters())
            for parameter in module.parameters():
                parameter.grad = torch.randn_like(parameter)
            if module is sharded:
                parameters = list(module.parameters())
                norms = [parameter.grad.norm() for parameter in parameters]
                own = [owner == comm.rank for owner in optimizer.owners(parameters)]
                for parameter, is_own in zip(parameters, own, strict=True):
                    parameter.grad *= 1.0 if is_own else float("nan")  # what the others have is undefined
                assert optimizer.norms(parameters, 2.0) == norms
            optimizer.step()
        for one, other in zip(whole.parameters(), sharded.parameters(), strict=True):
            assert torch.equal(one, other)

    def held(optimizer: torch.optim.Optimizer) -> int:
        return sum(state["exp_avg"].numel() for state in optimizer.state.values())

    shares = comm.gather(held(inner), name="shares")
    assert sum(shares) == held(whole_optimizer)
    assert max(shares) < 1.2 * sum(shares) / comm.size


for transport, value in (("use_horovod", "1"), ("torch_distributed", "{}")):
    overrides = {"corpus": str(folder), "model": str(folder / "model"), transport: value}
    overrides |= {"horovod_reduce_type": "param", "horovod_param_group": "3"}  # Horovod is initialized for `split`
    with open_communicator(read_settings([Path(__file__).parent / "config.py"], overrides)) as connection:
        for name, test in sorted(globals().copy().items()):
            if name.startswith("test_"):
                test(connection)
    names = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    assert "pt_gloo_runloop" not in names, names  # a thread that outlives the interpreter can abort the process with SIGABRT
    for called in folder.glob(f"called.{connection.rank}"):
        called.unlink()
    (folder / f"{transport}.{connection.rank}.ok").write_text("")
