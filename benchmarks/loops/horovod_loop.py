"""A hand-written training loop with Horovod's PyTorch binding."""

from __future__ import annotations

import time

import horovod.torch as hvd
import shared
import torch


def main() -> None:
    options = shared.read_options()
    hvd.init()
    words = shared.Words(options.data, options.reading)
    epochs = shared.read_batches(options.batches, hvd.rank())
    config = shared.read_config(len(epochs), options.channels)

    model = config["get_model"]()
    optimizer = hvd.DistributedOptimizer(shared.build_optimizer(config, model), named_parameters=model.named_parameters())
    schedule = shared.build_schedule(config, optimizer, sum(len(batches) for batches in epochs))
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    for (
        state
    ) in optimizer.state.values():  # undoes the step with zero gradients that Horovod makes to create a state to broadcast
        state["step"].zero_()

    step = 0
    for batches in epochs:  # the first epoch is a warm-up, the last one is timed
        started, cpu_before = time.perf_counter(), time.process_time()
        losses = []
        for indices in batches:
            batch = words.batch(indices)
            config["seed_dropout"](step, hvd.rank())
            optimizer.zero_grad()
            loss = shared.mean_loss(config, model, batch)
            loss.backward()
            optimizer.synchronize()
            torch.nn.utils.clip_grad_norm_(model.parameters(), config["gradient_clip_global_norm"])
            with optimizer.skip_synchronize():
                optimizer.step()
            schedule.step()
            losses.append(loss.item())
            step += 1
        elapsed, cpu = time.perf_counter() - started, time.process_time() - cpu_before
    shared.report(hvd.rank(), sum(map(len, batches)), elapsed, cpu, sum(losses) / len(losses))
    hvd.shutdown()


if __name__ == "__main__":
    main()
