"""What the name of a score says about whether higher values are better."""

from __future__ import annotations

import re

RISING = frozenset(
    "acc accuracy accuracies auc auroc auprc bleu sacrebleu chrf cider coverage dice f1 fmeasure fscore hits iou kappa map mcc "
    "meteor miou mos mrr ndcg pearson pesq precision psnr r2 recall reward rouge sdr sisdr sisnr snr spearman ssim stoi".split()
)
"""Words in a score's name that imply that higher is better. Trailing digits are ignored: bleu4, top5_acc."""

FALLING = frozenset("ce cer cost distance err error errors inverse loss neg negative nll per ter wer xent".split())
"""Words in a name that imply the opposite and take precedence: bleu_loss, accuracy_error."""


def base_of(score: str) -> str:
    """A score's name in train_step: `bleu` for `dev_loss_bleu`."""
    return score.partition("_loss_")[2] or score


def implies_higher_is_better(name: str) -> bool:
    """Whether a score's name implies that higher is better.

    >>> names = ("acc", "frameAccuracy", "BLEU4", "dice_loss", "map_error", "fer", "top5-acc")
    >>> [name for name in names if implies_higher_is_better(name)]
    ['acc', 'frameAccuracy', 'BLEU4', 'top5-acc']
    """
    words = re.findall(r"[a-z0-9]+", f"{name} {re.sub(r'(?<=[a-z])(?=[A-Z])', ' ', name)}".lower())
    words += [word.rstrip("0123456789") for word in words]
    return bool(RISING.intersection(words)) and not FALLING.intersection(words)
