"""The target with hooks: what its layers give on tokens, beside its logits."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .target_model import input_device


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """Of tokens [B, t]: features [B, t, width], top1 [B, t] int64, and last_logits [B, V]."""

    features: Tensor
    top1: Tensor
    last_logits: Tensor


class RecordedTarget:
    """The target with hooks behind its aux layers; hooks are removed on leaving the block.

    Args:
        last_state: record what the head reads, behind the final norm, instead of layers.
    """

    def __init__(
        self,
        model: Any,
        layers: nn.ModuleList,
        aux_layer_ids: Sequence[int],
        *,
        last_state: bool,
    ) -> None:
        self.model = model
        self.config = model.config.get_text_config()
        self.device = input_device(model)
        self.width = len(aux_layer_ids) * int(self.config.hidden_size)
        self._layers = layers
        self._last_state = last_state
        self._ids = tuple(aux_layer_ids)
        self._captured: dict[int, Tensor] = {}
        self._hooks = ExitStack()
        ends = model.generation_config.eos_token_id if model.generation_config else None
        ends = self.config.eos_token_id if ends is None else ends
        self.ends = torch.tensor(ends if isinstance(ends, list) else [] if ends is None else [ends])

    def __enter__(self) -> "RecordedTarget":
        for i in self._ids:
            if self._last_state:
                head = self.model.get_output_embeddings()
                handle = head.register_forward_pre_hook(self._keep_input(i))
            else:
                handle = self._layers[i].register_forward_hook(self._keep(i))
            self._hooks.callback(handle.remove)
        return self

    def __exit__(self, *_: object) -> None:
        self._hooks.close()

    def run(self, token_ids: Tensor, cache: Any, given: dict[str, Tensor]) -> Ran:
        """Run it on tokens [B, t], all of which end in the last column."""
        ran = self.model(input_ids=token_ids, past_key_values=cache, use_cache=True, **given)
        parts = [self._captured.pop(i).to(self.device) for i in self._ids]
        return Ran(
            features=parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1),
            top1=ran.logits.argmax(-1).to(self.device),
            last_logits=ran.logits[:, -1].to(self.device),
        )

    def _keep(self, layer: int) -> Callable[[nn.Module, Any, Any], None]:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            # A Tensor in transformers 5, a tuple before. Returning None leaves it unchanged.
            self._captured[layer] = output if isinstance(output, Tensor) else output[0]

        return hook

    def _keep_input(self, layer: int) -> Callable[[nn.Module, Any], None]:
        def hook(_module: nn.Module, inputs: Any) -> None:
            self._captured[layer] = inputs[0]

        return hook
