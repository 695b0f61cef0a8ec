"""What a draft reads from a trace, and whether it can read the trace at all.

Wrong features do not crash a draft, they only lower its acceptance: every mismatch that can be
detected is an error here.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from ...quantize.drafts.forward import BLOCK_ROWS as BATCHES_BLOCK_ROWS
from ...quantize.drafts.forward import DraftForward, whole_rows
from ...quantize.drafts.geometry import Geometry
from ...quantize.files.mapped_rows import BLOCK_ROWS, release
from ...quantize.stored.loading import LoadedDraft
from ...recipes.errors import CalibrationError, TraceError
from ..traces.manifest import TraceEntry
from ..traces.prompt_trace import PromptTrace
from ..traces.target_tables import EMBEDDING
from ..traces.trace_folder import TraceFolder
from .proposals import Proposals, batch_proposals, num_draft_tokens_fault


def default_aux_layer_ids(num_layers: int) -> tuple[int, ...]:
    """The layers that EAGLE-3 drafts read unless they say otherwise: [1, L/2 - 1, L - 4].

    Post-layer ids; the same tensors as the "input of layer" ids (2, L/2, L - 3) of vLLM and EAGLE.
    Targets of L < 7 have no such layers.
    Source: TorchSpec `misc.py`, ModelOpt `hf_eagle.py`, SpecForge `model_providers.py`.
    """
    ids = (1, num_layers // 2 - 1, num_layers - 4)
    if not 1 < ids[1] < ids[2]:
        what = f"the default aux layers [1, L/2 - 1, L - 4] = {list(ids)} are not ascending"
        fix = "give the draft that reads them (record --draft), or name them: --aux-layers I,J,K"
        raise TraceError(f"target of {num_layers} layers", what, fix=fix)
    return ids


def mask_token_ids(geometry: Geometry) -> tuple[int, ...]:
    """Tokens that a draft reads besides those of the text: the mask of a block draft."""
    return () if geometry.mask_token_id is None else (geometry.mask_token_id,)


def check_reads_layers(draft: LoadedDraft) -> None:
    """Check that the draft reads only tokens, or outputs of layers, which dumps hold."""
    if draft.geometry.reads_features and not draft.geometry.reads_layers:
        raise TraceError(
            f"draft {draft.name}",
            f"it has no fc that fuses layers: it {_LAST_STATE}",
            fix="record its traces: draftquant record --draft DRAFT --fused",
        )


_LAST_STATE = (
    "reads the target's last hidden state (after the final norm), not the outputs of layers"
)


def fused_features(draft: LoadedDraft, features: Tensor) -> Tensor:
    """[n, H], what the draft's fc makes of a target's features [n, width], on the CPU."""
    with torch.no_grad():
        return draft.forward.fuse(features[None].to(draft.device))[0].cpu()


def check_trace_fits(draft: LoadedDraft, traces: TraceFolder) -> None:
    """Check that the recorded features are those that the draft was trained to read."""
    g, features = draft.geometry, traces.manifest.features
    layers = _layers_read(g, traces)
    width = g.num_aux_layers * g.target_hidden_size if features.kind == "aux" else g.hidden_size
    if misfit := _misfit(draft, traces, layers, width):
        what = f"the draft {draft.name} cannot use them: {misfit[0]}"
        raise TraceError(traces.folder, what, fix=misfit[1])
    if "mask_embedding" not in draft.weights:  # a side file of the draft comes before the table
        masks = torch.tensor(mask_token_ids(draft.geometry), dtype=torch.int64)
        _check_embedded(draft, masks, traces)


@dataclass(frozen=True, slots=True, eq=False)
class DraftRun:
    """A draft that proposes K tokens at a time along traces."""

    draft: LoadedDraft
    traces: TraceFolder
    num_draft_tokens: int

    def check(self) -> None:
        """Refuse a K that the draft cannot propose, and traces that it cannot use."""
        if fault := num_draft_tokens_fault(self.draft.geometry, self.num_draft_tokens):
            raise CalibrationError(f"{self.draft.name}: num_draft_tokens", fault[0], fix=fault[1])
        check_trace_fits(self.draft, self.traces)

    def rows(self, entry: TraceEntry) -> range:
        """The rows of a prompt's continuation from which the draft proposes."""
        return rows_along(entry, self.num_draft_tokens)


def rows_along(text: TraceEntry | PromptTrace, num_draft_tokens: int) -> range:
    """The rows of a continuation that `num_draft_tokens` tokens follow."""
    return whole_rows(text.num_tokens, num_draft_tokens, first_row=text.prompt_length - 1)


def first_hidden(draft: LoadedDraft, traces: TraceFolder, trace: PromptTrace) -> Tensor:
    """[N - 1, W], the draft's hidden state before its first step, a constant to autograd."""
    return first_hidden_of_batch(draft, traces, [trace])[0]


def first_hidden_of_batch(
    draft: LoadedDraft,
    traces: TraceFolder,
    batch: Sequence[PromptTrace],
    forward: DraftForward | None = None,
) -> Tensor:
    """`first_hidden` of several prompts, [B, N - 1, W] for N tokens of the longest.

    Shorter ones are filled up with their last row. W is 0 for a draft that reads only tokens. The
    `OnInput` of `forward` sees the features; None = the draft's own maths.
    """
    _check_embedded(draft, torch.cat([trace.token_ids for trace in batch]), traces)
    together = TraceBatch.of(batch, draft.device)
    if not draft.geometry.reads_features:
        shape = (len(batch), together.features.shape[1], 0)
        return torch.empty(shape, device=draft.device, dtype=draft.dtype)
    fused = traces.manifest.features.kind == "fused"
    fuse = (forward or draft.forward).fuse
    count = together.features.shape[1]
    hidden = None
    for start in range(0, count, BLOCK_ROWS):
        block = together.features[:, start : start + BLOCK_ROWS].to(draft.device, draft.dtype)
        if not fused:
            with torch.no_grad():
                block = fuse(block)
        if count <= BLOCK_ROWS:
            return block
        if hidden is None:
            hidden = block.new_empty((len(block), count, block.shape[2]))
        hidden[:, start : start + BLOCK_ROWS] = block
        release(together.features)
    assert hidden is not None  # a trace has a feature
    return hidden


class TraceBatch(tuple[PromptTrace, ...]):
    """Prompts that go through drafts together, and the drafts' inputs, on their device.

    Attributes:
        token_ids: [B, N] int64, N tokens of the longest; the others are filled up with their last.
        features: [B, N - 1, width]; on the CPU for one prompt with more than `BLOCK_ROWS` rows.
    """

    token_ids: Tensor
    features: Tensor

    @classmethod
    def of(cls, prompts: Sequence[PromptTrace], device: torch.device) -> "TraceBatch":
        """A batch of these prompts, or the argument where it already is one."""
        if isinstance(prompts, cls):
            return prompts
        batch, longest = cls(prompts), max(trace.num_tokens for trace in prompts)
        ids = torch.stack([filled_up(trace.token_ids, longest) for trace in prompts])
        batch.token_ids = _moved(ids, device)
        if len(prompts) == 1 and longest > BLOCK_ROWS:
            batch.features = prompts[0].features[None]
        else:
            features = [filled_up(trace.features, longest - 1) for trace in prompts]
            batch.features = _moved(torch.stack(features), device)
        return batch


def _moved(values: Tensor, device: torch.device) -> Tensor:
    """To a device; a GPU copies from pinned memory asynchronously, in order with its work."""
    if device.type == "cuda":
        return values.pin_memory().to(device, non_blocking=True)
    return values.to(device)


def filled_up(rows: Tensor, length: int) -> Tensor:
    """Rows [N, ...], with the last one repeated, as [length, ...]; N is at least 1."""
    return torch.cat((rows, rows[-1:].expand(length - len(rows), *rows.shape[1:])))


def _check_embedded(draft: LoadedDraft, token_ids: Tensor, traces: TraceFolder) -> None:
    """Rows that a trace's tables do not carry are NaN, which an argmax would hide."""
    if EMBEDDING not in draft.weights:  # a draft that reads no tokens
        return
    absent = token_ids[draft.weights[EMBEDDING][token_ids, 0].isnan().to(token_ids.device)]
    if len(absent):
        token = int(absent[0])
        raise TraceError(
            traces.folder,
            f"the draft {draft.name} reads token {token}, but the traces do not hold that token's"
            " embedding",
            fix=f"give the target (--target M), or record again with --tables --table-ids {token}",
        )


def _misfit(
    draft: LoadedDraft, traces: TraceFolder, layers: tuple[int, ...] | None, width: int
) -> tuple[str, str] | None:
    """Why the draft cannot use the traces, and the fix."""
    g, features, target = draft.geometry, traces.manifest.features, traces.manifest.target
    of_its_target = "record traces of the target that this draft was trained for"
    if g.vocab_size != target.vocab_size:
        what = f"its vocabulary has {g.vocab_size} tokens, the target's {target.vocab_size}"
        return what, of_its_target
    if not g.reads_features:
        return None
    longest = max((prompt.num_tokens for prompt in traces.manifest.prompts), default=0)
    if g.indexer is not None and longest > g.indexer.most:
        return (
            f"its indexer chooses {g.indexer.most:,} positions (index_topk), which replay does not"
            f" compute where there are more; the longest prompt has {longest:,} with its answer",
            "record shorter prompts and answers; or serve both drafts: draftquant measure, then"
            " gate --measured",
        )
    if layers is None and g.reads_layers:
        return (
            "it reads the layers that EAGLE-3 drafts of deep targets read by default, but the"
            f" recorded target has {target.num_layers} layers",
            "use traces of the target that this draft was trained for, or name its layers:"
            " eagle_aux_hidden_state_layer_ids in its config.json",
        )
    if layers is None:
        return f"it {_LAST_STATE}", "record with --draft DRAFT --fused"
    if layers != features.aux_layer_ids:
        return (
            f"it reads the target layers {list(layers)} (after the layer), but the traces hold"
            f" {list(features.aux_layer_ids)}",
            "use traces that were recorded for this draft, or record with --aux-layers"
            f" {','.join(map(str, layers))}",
        )
    if features.width != width:
        what = f"it expects {features.kind} features of width {width}, but the traces hold features"
        return f"{what} of width {features.width}", of_its_target
    if features.kind == "fused" and features.fusion_sha256 != draft.fusion_sha256:
        return (
            "its fc is quantized, but another fc fused the recorded features"
            if "fc" in draft.quantized
            else "the fc of another draft fused the recorded features (fusion_sha256 differs)",
            "record traces without --fused, which fit every draft of this target, or record with"
            " this draft",
        )
    return None


def _layers_read(geometry: Geometry, traces: TraceFolder) -> tuple[int, ...] | None:
    """Layers of the target; None where it has none of them, or the traces lack their outputs."""
    num_layers = traces.manifest.target.num_layers
    if not geometry.reads_layers:
        return (num_layers - 1,) if traces.manifest.features.kind == "fused" else None
    try:
        return tuple(geometry.aux_layer_ids or default_aux_layer_ids(num_layers))
    except TraceError:
        return None


MAX_TOKENS = 4096  # of a batch, padding included; more is hardly faster


def batches_of(
    entries: Sequence[TraceEntry], *, max_tokens: int, max_prompts: int | None = None
) -> list[list[int]]:
    """Positions of prompts to run together, similar in length so that there is little padding.

    `max_prompts` limits a batch whatever their lengths; None = as many as `max_tokens` allows.
    """

    def lengths(position: int) -> tuple[int, int]:
        return entries[position].prompt_length, entries[position].num_tokens

    batches: list[list[int]] = []
    longest = 0
    for position in sorted(range(len(entries)), key=lengths):
        count = entries[position].num_tokens
        last = batches[-1] if batches else []
        fits = (len(last) + 1) * max(longest, count) <= max_tokens
        if last and (fits if max_prompts is None else len(last) < max_prompts):
            last.append(position)
            longest = max(longest, count)
        else:
            batches.append([position])
            longest = count
    return batches


def work_of(entries: Sequence[TraceEntry], num_draft_tokens: int) -> int:
    """Positions that a draft computes along prompts in one batch, for progress.

    Every prompt is as long as the longest; after each token of its continuation come K - 1 more.
    """
    tokens = max(entry.num_tokens for entry in entries)
    rows = tokens - min(entry.prompt_length for entry in entries)
    return len(entries) * (tokens + rows * (num_draft_tokens - 1))


def read_ahead(
    traces: TraceFolder, batches: Sequence[Sequence[int]], device: torch.device
) -> Iterator[TraceBatch]:
    """Read batches one after the other, each while a caller works on the previous one."""
    prompts = traces.manifest.prompts

    def read(positions: Sequence[int]) -> TraceBatch:
        return TraceBatch.of([traces.load(prompts[i]) for i in positions], device)

    with ThreadPoolExecutor(max_workers=1) as reader:
        coming = [reader.submit(read, positions) for positions in batches[:1]]
        for i in range(len(batches)):
            coming += [reader.submit(read, positions) for positions in batches[i + 1 : i + 2]]
            yield coming.pop(0).result()


def proposals_of_batch(
    draft: LoadedDraft,
    traces: TraceFolder,
    batch: Sequence[PromptTrace],
    *,
    num_draft_tokens: int,
    temperature: float | None = None,
) -> list[Proposals]:
    """What a draft proposes along several prompts, on the CPU.

    Counts up to the first proposal of a row that is not accepted: later ones do not matter, and
    are left out wherever no other row needs them. One scale for the inputs of a whole call needs
    all of them, so a draft that is not `rounds_alone` is given one prompt at a time.

    Prompts are padded with their own last token and features: nothing looks ahead, and padding is
    finite wherever the prompt is.
    """
    ranges = [rows_along(trace, num_draft_tokens) for trace in batch]
    rows = range(min(r.start for r in ranges), max(r.stop for r in ranges))
    together = TraceBatch.of(batch, draft.device)
    hidden = first_hidden_of_batch(draft, traces, together)
    proposed = batch_proposals(
        draft.forward,
        hidden,
        together.token_ids,
        rows=rows,
        num_draft_tokens=num_draft_tokens,
        temperature=temperature,
        block_rows=min(BATCHES_BLOCK_ROWS, max(1, MAX_TOKENS // len(batch))),
        counted=ranges if draft.rounds_alone else None,
    ).cpu()
    return [
        proposed.of_sequence(i, slice(r.start - rows.start, r.stop - rows.start))
        for i, r in enumerate(ranges)
    ]
