"""A hand-written training loop for the model of configs/speech.py, with Horovod's PyTorch binding.

    make demo-speech                                     # speaks the sentences
    mpirun -np 2 --bind-to none python benchmarks/loops/speech_loop.py data/speech

The model, the optimizer's values, the learning rates and the features are the same. Everything else is written here, and only
what one run needs: it cannot be resumed, and every rank keeps the features that it has used in memory.
"""

from __future__ import annotations

import argparse
import time
from functools import cache
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import numpy
import shared
import soundfile
import torch
from rapidfuzz.distance import Levenshtein
from torch.nn import functional

from hvdtrain.config.source import load
from hvdtrain.plugins.packed.data import PackedData
from hvdtrain.plugins.speech.log_mel import LogMel

SAMPLE_RATE = 22050  # espeak-ng's
IN_BIN = 320


class Sentences:
    """A Kaldi folder with wav.scp, text and utt2num_samples."""

    def __init__(self, folder: Path, config: dict[str, Any]) -> None:
        tables = [
            dict(line.split(maxsplit=1) for line in (folder / name).open()) for name in ("wav.scp", "text", "utt2num_samples")
        ]
        paths, texts, samples = ([table[name].strip() for name in sorted(tables[0])] for table in tables)
        mel = LogMel(SAMPLE_RATE, config["MELS"])
        self.texts = texts
        self.frames = mel.num_frames(numpy.array(samples, dtype=int))
        self.features = cache(lambda index: mel.features(soundfile.read(paths[index], dtype="float32")[0]))
        self._letters = config["LETTERS"]

    def batch(self, indices: list[int], rng: numpy.random.Generator | None = None) -> tuple[PackedData, PackedData]:
        """Features, with random masks if there is a generator, and letters."""
        features = [torch.from_numpy(masked(self.features(index), rng) if rng else self.features(index)) for index in indices]
        letters = [torch.tensor([self._letters.index(letter) for letter in self.texts[index]]) for index in indices]
        return packed(features), packed(letters)


def packed(sequences: list[torch.Tensor]) -> PackedData:
    seq_lens = torch.tensor([len(sequence) for sequence in sequences], dtype=torch.int32)
    return PackedData(torch.cat(sequences), seq_lens, seq_lens)


def masked(features: numpy.ndarray, rng: numpy.random.Generator) -> numpy.ndarray:
    """SpecAugment with two spans of at most 20 frames and 10 % of the sentence, and two of at most 6 features."""
    features, mean = features.copy(), features.mean()
    for rows, longest in ((features, min(20, len(features) // 10)), (features.T, 6)):
        for _ in range(2):
            width = rng.integers(longest + 1)
            first = rng.integers(len(rows) - width + 1)
            rows[first : first + width] = mean
    return features


def batches_of(frames: numpy.ndarray, size: int, rng: numpy.random.Generator) -> list[list[int]]:
    """Batches of sentences of about the same length: a random order, sorted within each bin, up and down in turn."""
    bins = numpy.array_split(rng.permutation(len(frames)), max(1, len(frames) // IN_BIN))
    ordered = [some[numpy.argsort(frames[some])][:: 1 - 2 * (number % 2)] for number, some in enumerate(bins)]
    order = numpy.concatenate(ordered).tolist()
    return [order[first : first + size] for first in range(0, len(order), size)]


def ctc(config: dict[str, Any], log_probs: PackedData, letters: PackedData) -> torch.Tensor:
    """The loss of each sentence."""
    return functional.ctc_loss(
        log_probs.padded().transpose(0, 1),
        letters.raw_tensor,
        log_probs.seq_lens,
        letters.seq_lens,
        blank=config["BLANK"],
        reduction="none",
    )


def word_error_rate(config: dict[str, Any], model: torch.nn.Module, sentences: Sentences, size: int) -> float:
    """Of all ranks together; each of them computes a part of the sentences."""
    model.eval()
    own = range(hvd.rank(), len(sentences.texts), hvd.size())
    counts = torch.zeros(2, dtype=torch.float64)
    with torch.no_grad():
        for first in range(0, len(own), size):
            indices = list(own[first : first + size])
            found = config["decode"](model(sentences.batch(indices)[0]))
            for words, index in zip(found, indices, strict=True):
                expected = sentences.texts[index].split()
                counts += torch.tensor([Levenshtein.distance(words, expected), len(expected)])
    model.train()
    errors, words = hvd.allreduce(counts, op=hvd.Sum).tolist()
    return errors / words


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains the model of configs/speech.py with a hand-written loop.")
    parser.add_argument("folder", type=Path, help="the Kaldi folders train, dev and test")
    parser.add_argument("--num_epochs", type=int, default=14)
    parser.add_argument("--max_seqs", type=int, default=16, help="sentences of a batch, per rank")
    options = parser.parse_args()
    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    config = load([shared.ROOT / "configs/speech.py"], {"num_epochs": str(options.num_epochs)}, {}).values
    train, dev, test = (Sentences(options.folder / part, config) for part in ("train", "dev", "test"))
    model = config["get_model"]()
    optimizer = hvd.DistributedOptimizer(shared.build_optimizer(config, model), named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    began = time.perf_counter()

    for epoch in range(options.num_epochs):
        batches = batches_of(train.frames, options.max_seqs, numpy.random.default_rng(epoch))
        steps = len(batches) // hvd.size()
        rng = numpy.random.default_rng([epoch, hvd.rank()])
        losses = []
        for step in range(steps):
            rate = config["dynamic_learning_rate"](epoch_continuous=epoch + step / steps, learning_rate=config["learning_rate"])
            for group in optimizer.param_groups:
                group["lr"] = rate
            data, letters = train.batch(batches[step * hvd.size() + hvd.rank()], rng)
            optimizer.zero_grad()
            loss = ctc(config, model(data), letters).mean()
            loss.backward()
            optimizer.synchronize()
            torch.nn.utils.clip_grad_norm_(model.parameters(), config["gradient_clip_global_norm"])
            with optimizer.skip_synchronize():
                optimizer.step()
            losses.append(loss.item())
        rates = [word_error_rate(config, model, part, options.max_seqs) for part in (dev, test)]
        if hvd.rank() == 0:
            elapsed = time.perf_counter() - began
            print(
                f"epoch {epoch + 1}: ctc {sum(losses) / len(losses):.4f}, dev wer {rates[0]:.4f}, test wer {rates[1]:.4f}, "
                f"{elapsed:.0f} s, {time.process_time():.0f} CPU seconds of rank 0",
                flush=True,
            )
    hvd.shutdown()


if __name__ == "__main__":
    main()
