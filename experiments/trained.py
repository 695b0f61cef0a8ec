"""A draft that is trained on a real target, by the trainer of the shipped pairs."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from draftquant.scripts.dev.training.draft import DraftKind
from draftquant.scripts.dev.training.target import TargetSize


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """A draft that is trained.

    Attributes:
        kind: its family and published form.
        own: keys of config.json that differ from the small pair's.
        num_draft_tokens, decay, row_stride: of the loss; see `train_draft`.
        batch_size: texts of a step.
    """

    kind: DraftKind
    own: Mapping[str, Any]
    num_draft_tokens: int = 3
    decay: float = 0.8
    row_stride: int = 1
    batch_size: int = 8

    def config(self, target: TargetSize) -> dict[str, Any]:
        """The config.json, over the whole vocabulary."""
        small = dict(self.kind.config(target))
        nested = {k: {**small[k], **v} for k, v in self.own.items() if k.endswith("config")}
        return {**small, **self.own, **nested}
