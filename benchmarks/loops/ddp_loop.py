"""A hand-written training loop with torch.distributed: DistributedDataParallel over gloo, started by mpirun."""

from __future__ import annotations

import os
import time

import shared
import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    options = shared.read_options()
    os.environ["RANK"] = os.environ["OMPI_COMM_WORLD_RANK"]
    os.environ["WORLD_SIZE"] = os.environ["OMPI_COMM_WORLD_SIZE"]
    distributed.init_process_group("gloo", init_method="env://")  # MASTER_ADDR and MASTER_PORT are set by the benchmark
    rank = distributed.get_rank()
    words = shared.Words(options.data, options.reading)
    epochs = shared.read_batches(options.batches, rank)
    config = shared.read_config(len(epochs), options.channels)

    model = DistributedDataParallel(config["get_model"](), gradient_as_bucket_view=True)  # broadcasts the weights of rank 0
    optimizer = shared.build_optimizer(config, model)
    schedule = shared.build_schedule(config, optimizer, sum(len(batches) for batches in epochs))

    step = 0
    for batches in epochs:  # the first epoch is a warm-up, the last one is timed
        started, cpu_before = time.perf_counter(), time.process_time()
        losses = []
        for indices in batches:
            batch = words.batch(indices)
            config["seed_dropout"](step, rank)
            optimizer.zero_grad()
            loss = shared.mean_loss(config, model, batch)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), config["gradient_clip_global_norm"])
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
            step += 1
        elapsed, cpu = time.perf_counter() - started, time.process_time() - cpu_before
    shared.report(rank, sum(map(len, batches)), elapsed, cpu, sum(losses) / len(losses))
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
