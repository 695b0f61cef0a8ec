"""Which way a metric is better: what a score change means hangs on it, so that it is never guessed.

The results of either run say it (lm_eval writes "higher_is_better" of every task), else the command
line, else its name where that has one meaning.
"""

from collections.abc import Collection
from dataclasses import dataclass

from ..errors import ParityError
from .lm_eval_samples import TaskSamples

_HIGHER = frozenset((
    "acc", "acc_norm", "acc_mutual_info", "acc_bytes", "acc_all", "exact_match", "em", "f1", "mcc",
    "bleu", "chrf", "rouge1", "rouge2", "rougeL", "pass@1", "likelihood",
))  # fmt: skip
_LOWER = frozenset((
    "perplexity", "word_perplexity", "byte_perplexity", "bits_per_byte", "ppl", "brier_score",
    "mae", "mse", "wer", "cer",
))  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Directions:
    """What the command line says of metrics, by name."""

    higher: Collection[str] = ()
    lower: Collection[str] = ()

    def higher_is_better(self, metric: str, first: TaskSamples, second: TaskSamples) -> bool:
        """Whether more is better.

        Raises:
            ParityError: two of those who say it contradict each other, or nobody says it.
        """
        told = {
            str(one.path): one.higher_is_better[metric]
            for one in (first, second)
            if metric in one.higher_is_better
        }
        told |= {"--higher-is-better": True} if metric in self.higher else {}
        told |= {"--lower-is-better": False} if metric in self.lower else {}
        if len(set(told.values())) > 1:
            said = ", ".join(f"{who}: {'higher' if up else 'lower'}" for who, up in told.items())
            raise ParityError(
                f"{first.task}, {metric}",
                f"two places disagree on whether higher is better ({said})",
                fix="run both with one version of the task, whose results stand beside the samples",
            )
        if told:
            return next(iter(told.values()))
        if metric in _HIGHER | _LOWER:
            return metric in _HIGHER
        raise ParityError(
            f"{first.task}, {metric}",
            "it is not recorded whether a higher or a lower score is better: expected"
            " results_DATE.json beside the samples of one side",
            fix=f"--higher-is-better {metric}, or --lower-is-better {metric}",
        )
