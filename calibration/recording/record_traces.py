"""Recording: let a transformers target continue prompts, and keep what its drafts see.

It knows the target; of drafts it knows only which layers they read and how they fuse them.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...quantize.files.staging import check_output
from ...quantize.stored.loading import LoadedDraft
from ...recipes.bounds import AT_LEAST_1
from ..errors import TraceError
from ..passes.draft_inputs import fused_features
from ..prompts.prompt_file import Prompt
from ..traces.dataset_source import DatasetSource
from ..traces.manifest import FeatureDtype
from ..traces.prompt_trace import FEATURE_DTYPES, PromptTrace
from ..traces.target_tables import TargetTables
from ..traces.too_long import TooLongPrompts
from ..traces.trace_folder import TraceFolder
from ..traces.writer import trace_output
from .decoding import GREEDY, ChosenTokens, Decoding, TokenChooser
from .prompt_fit import check_prompts
from .target_model import (
    ON_CPU,
    Placement,
    configured_shape,
    decoder_layers,
    input_device,
    loaded_target,
    shape_of,
)
from .target_shape import chosen_layers, feature_spec, target_identity

_MAX_LOGITS = 2**26  # elements of one logits tensor while reading prompts: 256 MB in float32


def record_traces(
    target: Path,
    prompts: Sequence[Prompt],
    out: Path,
    *,
    max_new_tokens: int,
    decoding: Decoding = GREEDY,
    aux_layer_ids: Sequence[int] | None = None,
    fuse_with: LoadedDraft | None = None,
    dtype: FeatureDtype = "float32",
    batch_size: int = 32,
    placement: Placement = ON_CPU,
    table_ids: Collection[int] | None = None,
    too_long: TooLongPrompts | None = None,
    dataset: DatasetSource | None = None,
    on_progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> TraceFolder:
    """Continue every prompt and write the trace folder `out`.

    Args:
        target: local folder of a causal language model with safetensors weights; no remote code.
        prompts: at least one; prompts of equal length are run together.
        out: folder to create.
        max_new_tokens: tokens to add; a prompt ends earlier at the target's end-of-text token,
            unless `decoding` ignores it.
        decoding: how tokens are chosen.
        aux_layer_ids: layers whose outputs are recorded, 0-based, ascending. None = those of
            `fuse_with`, else [1, L/2 - 1, L - 4].
        fuse_with: store this draft's fused features, narrower but of use for drafts with the same
            fc only; it must compute in `dtype`, on any device.
        dtype: the target computes in, and features are stored in.
        batch_size: prompts run together.
        placement: where the target runs; features are moved to the CPU layer by layer.
        table_ids: carry the target's embedding and head, for drafts without their own; with the
            embeddings of the recorded tokens and of these. None = carry no tables.
        too_long: prompts that were left out or cut before, for trace.json.
        dataset: that the prompts were taken out of, for trace.json.
        on_progress: called with (work done, work) whenever the target has run; see `_Work`.

    Returns:
        The written folder, opened. Two runs with the same arguments write the same bytes.

    Raises:
        TraceError: the target cannot be loaded, placed or run, or an argument does not fit it.
        CheckpointError: the target's tables are asked for and not found.
        OutputError: `out` exists already, or its parent does not.
    """
    check_output(out)
    tables = None if table_ids is None else TargetTables.find(target)
    for name, value in (("max_new_tokens", max_new_tokens), ("batch_size", batch_size)):
        AT_LEAST_1.check(TraceError, name, value, fix="give a larger number")
    check_prompts(prompts, configured_shape(target), max_new_tokens)
    with loaded_target(target, FEATURE_DTYPES[dtype][0], placement, beside=out.parent) as model:
        layers = decoder_layers(model, target)
        shape = shape_of(model.config.get_text_config(), len(layers))
        identity = target_identity(target, shape)
        ids = chosen_layers(aux_layer_ids, fuse_with, shape)
        spec = feature_spec(shape, ids, fuse_with, dtype)
        last_state = fuse_with is not None and not fuse_with.geometry.reads_layers
        batches = list(_batches(prompts, batch_size))
        work = _Work(prompts, batches, max_new_tokens, on_progress)
        with (
            trace_output(
                out,
                identity,
                spec,
                temperature=decoding.temperature,
                sampling=decoding.sampling,
                ignore_eos=decoding.ignore_eos,
                logprobs=decoding.logprob_spec,
                tables=tables,
                table_ids=table_ids or (),
                too_long=too_long,
                datasets=(dataset,) if dataset else None,
            ) as writer,
            _Recorder(model, layers, ids, decoding, last_state=last_state) as recorder,
        ):
            for positions in batches:
                batch = [prompts[i] for i in positions]
                found = recorder.run(batch, max_new_tokens, fuse_with, work.ran)
                for position, trace in zip(positions, found, strict=True):
                    writer.add(trace, position=position)
                work.end_batch()
    return TraceFolder.open(out)


class _Work:
    """How much a recording has computed of what it will at most, in tokens.

    A run of the target on few tokens takes about as long as one on `_LEAST` more: it reads all the
    weights. So a batch of one prompt is no thirty-second part of a batch of 32.
    """

    _LEAST = 32

    def __init__(
        self,
        prompts: Sequence[Prompt],
        batches: Sequence[Sequence[int]],
        max_new_tokens: int,
        on_progress: Callable[[int, int], None],
    ) -> None:
        def work(batch: Sequence[int]) -> int:
            fed = len(batch) * (len(prompts[batch[0]].token_ids) + max_new_tokens - 1)
            return max_new_tokens * self._LEAST + fed

        self._until = list(accumulate(map(work, batches)))
        self._total, self._done = self._until[-1], 0
        self._on_progress = on_progress

    def ran(self, num_tokens: int) -> None:
        """The target ran on so many."""
        self._done += self._LEAST + num_tokens
        if self._done < self._until[0]:  # whose last run is its end
            self._on_progress(self._done, self._total)

    def end_batch(self) -> None:
        """What was not needed, because every prompt of the batch ended earlier, is done too."""
        self._done = self._until.pop(0)
        self._on_progress(self._done, self._total)


@dataclass(slots=True)
class _Fed:
    """Of the positions fed in one go: features [B, t, width], argmax [B, t], last logits [B, V].

    The logits are where the target's head is, the others on the CPU.
    """

    features: Tensor
    top1: Tensor
    last_logits: Tensor


class _Recorder:
    """The target with hooks behind its aux layers; hooks are removed on leaving the block.

    With `last_state` the one hook is before the head, which reads the state behind the final norm.
    """

    def __init__(
        self,
        model: Any,
        layers: nn.ModuleList,
        aux_layer_ids: tuple[int, ...],
        decoding: Decoding,
        *,
        last_state: bool,
    ) -> None:
        self._model = model
        self._last_state = last_state
        self._decoding = decoding
        self._layers = layers
        self._ids = aux_layer_ids
        self._captured: dict[int, Tensor] = {}
        self._hooks = ExitStack()
        ends = model.generation_config.eos_token_id if model.generation_config else None
        ends = model.config.get_text_config().eos_token_id if ends is None else ends
        ends = None if decoding.ignore_eos else ends
        self._ends = torch.tensor(
            ends if isinstance(ends, list) else [] if ends is None else [ends]
        )

    def __enter__(self) -> "_Recorder":
        for i in self._ids:
            if self._last_state:
                head = self._model.get_output_embeddings()
                handle = head.register_forward_pre_hook(self._keep_input(i))
            else:
                handle = self._layers[i].register_forward_hook(self._keep(i))
            self._hooks.callback(handle.remove)
        return self

    def __exit__(self, *_: object) -> None:
        self._hooks.close()

    @torch.inference_mode()
    def run(
        self,
        prompts: Sequence[Prompt],
        max_new_tokens: int,
        fuse_with: LoadedDraft | None,
        on_run: Callable[[int], None],
    ) -> Iterator[PromptTrace]:
        """Continue prompts of equal length together; `on_run` hears of how many tokens ran."""
        from transformers import DynamicCache

        cache = DynamicCache(config=self._model.config)
        token_ids = unread = torch.tensor([prompt.token_ids for prompt in prompts])
        length = token_ids.shape[1]
        ended = torch.zeros(len(prompts), dtype=torch.bool)
        chooser = TokenChooser(self._decoding, [prompt.token_ids for prompt in prompts])
        fed: list[_Fed] = []
        chosen: list[ChosenTokens] = []
        for _ in range(max_new_tokens):
            fed.extend(self._feed(unread, cache))
            on_run(unread.numel())
            chosen.append(chooser.choose(fed[-1].last_logits).cpu())
            unread = chosen[-1].token_ids[:, None]
            token_ids = torch.cat((token_ids, unread), dim=1)
            ended |= torch.isin(unread[:, 0], self._ends)
            if bool(ended.all()):
                break
        features = torch.cat([part.features for part in fed], dim=1)
        top1 = torch.cat([part.top1 for part in fed], dim=1)
        logprob = _stacked([one.logprob for one in chosen])
        top_token_ids = _stacked([one.top_token_ids for one in chosen])
        top_logprobs = _stacked([one.top_logprobs for one in chosen])
        for i, prompt in enumerate(prompts):
            count = length + self._num_new_tokens(token_ids[i, length:])
            kept = features[i, : count - 1]
            yield PromptTrace(
                id=prompt.id,
                category=prompt.category,
                prompt_length=length,
                token_ids=token_ids[i, :count],
                features=fused_features(fuse_with, kept) if fuse_with else kept.clone(),
                target_top1=top1[i, : count - 1],
                cluster=prompt.cluster,
                token_logprob=None if logprob is None else logprob[i, : count - length],
                top_token_ids=None if top_token_ids is None else top_token_ids[i, : count - length],
                top_logprobs=None if top_logprobs is None else top_logprobs[i, : count - length],
            )

    def _feed(self, token_ids: Tensor, cache: Any) -> Iterator[_Fed]:
        """Run the target, in pieces short enough that their logits fit in memory."""
        vocab_size = self._model.config.get_text_config().vocab_size
        piece = max(1, _MAX_LOGITS // (len(token_ids) * vocab_size))
        device = input_device(self._model)
        for part in torch.split(token_ids.to(device), piece, dim=1):
            logits = self._model(input_ids=part, past_key_values=cache, use_cache=True).logits
            features = torch.cat([self._captured[i] for i in self._ids], dim=-1)
            yield _Fed(features, logits.argmax(-1).cpu(), logits[:, -1])

    def _num_new_tokens(self, continuation: Tensor) -> int:
        """Up to and with the first end-of-text token."""
        ends = torch.isin(continuation, self._ends).nonzero()
        return int(ends[0]) + 1 if len(ends) else len(continuation)

    def _keep(self, layer: int) -> Callable[[nn.Module, Any, Any], None]:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            # A Tensor in transformers 5, a tuple before. Returning None leaves it unchanged.
            found: Tensor = output if isinstance(output, Tensor) else output[0]
            self._captured[layer] = found.cpu()

        return hook

    def _keep_input(self, layer: int) -> Callable[[nn.Module, Any], None]:
        def hook(_module: nn.Module, inputs: Any) -> None:
            self._captured[layer] = inputs[0].cpu()

        return hook


def _stacked(steps: Sequence[Tensor | None]) -> Tensor | None:
    """[B, steps, ...] of what every step has, None where none has it."""
    kept = [step for step in steps if step is not None]
    return torch.stack(kept, dim=1) if kept else None


def _batches(prompts: Sequence[Prompt], batch_size: int) -> Iterator[list[int]]:
    """Positions of prompts to run together: equal lengths only, so that nothing is padded."""
    by_length: dict[int, list[int]] = {}
    for position, prompt in enumerate(prompts):
        by_length.setdefault(len(prompt.token_ids), []).append(position)
    for _, positions in sorted(by_length.items()):
        for start in range(0, len(positions), batch_size):
            yield positions[start : start + batch_size]
