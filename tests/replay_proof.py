"""The proof that replay counts what an engine would: one step sequence, computed in two ways."""

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from block_pair import MASK_TOKEN_ID, shared_tables
from by_recipe import draft_of
from draftquant.calibration.linear_inputs.static_scales import calibrated_scales
from draftquant.calibration.passes.draft_inputs import DraftRun, first_hidden
from draftquant.calibration.traces.prompt_trace import PromptTrace
from draftquant.calibration.traces.trace_folder import TraceFolder
from draftquant.quantize.drafts.passes import BlockAttention, BlockForward
from draftquant.quantize.files.hub import DraftSource
from draftquant.quantize.making.quantize_draft import quantize_draft
from draftquant.quantize.numerics.number_formats import fp8_codes, fp8_scale
from draftquant.quantize.planning.quantization_plan import NOTHING_MEASURED, make_plan
from draftquant.quantize.stored.loading import LoadedDraft, load_draft
from draftquant.recipes import load_recipe
from draftquant.validate.counting.acceptance_counts import AcceptanceCounts
from draftquant.validate.counting.trace_replay import accepted_by_row, decoding_steps, replay_drafts
from engine_loop import speculative_decode
from k3_draft import TOKENS, features
from proposing import draft_proposals
from reference_draft import ReferenceDraft
from safetensors.torch import load_file
from torch import Tensor
from transformers import Qwen3ForCausalLM

RoundInput = Callable[[str, Tensor], Tensor]
EXECUTED = Path(__file__).parents[1] / "experiments" / "engines"


def block_logits(forward: BlockForward, context: Tensor, block: Sequence[int]) -> Tensor:
    """[K, draft vocabulary] of one block behind a context [1, T, features]."""
    position = context.shape[1]
    attention = BlockAttention(forward, forward.fuse(context))
    attention.begin(range(position, position + 1))
    hidden = forward.block(torch.tensor([block]), torch.tensor([position]), attention)
    return forward.logits(hidden)[0]


def assert_logits_of_engines(folder: Path, kept: str, case: str, atol: float) -> None:
    """Of one block: those that an engine's own class computed, of the first tokens."""
    expected = torch.tensor(json.loads((EXECUTED / f"{kept}.json").read_text("utf-8"))[case])
    head = load_file(folder / "model.safetensors")["embed_tokens.weight"]
    forward: Any = load_draft(folder, shared={"lm_head.weight": head}).forward
    got = block_logits(forward, features(3 * head.shape[1])[None], TOKENS)
    torch.testing.assert_close(got[:, : expected.shape[1]], expected, rtol=0, atol=atol)


def unrounded(_name: str, x: Tensor) -> Tensor:
    return x


def fp8_rounded(x: Tensor, scale: Tensor) -> Tensor:
    """Rounded to FP8 and back, in x's dtype."""
    return (fp8_codes(x, scale).float() * scale).to(x.dtype)


def fp8_per_token(name: str, x: Tensor) -> Tensor:
    """What the linears of decoder layers read; fc and the head read as they are."""
    if not name.startswith("layers."):
        return x
    return fp8_rounded(x, fp8_scale(x.abs().amax(-1, keepdim=True)))


def quantized_folder(
    source: Path,
    out: Path,
    recipe: str,
    traces: TraceFolder,
    num_draft_tokens: int,
    shared: Mapping[str, Tensor] | None = None,
) -> RoundInput:
    """Quantize a draft, its scales measured along traces; how kernels round the inputs of it."""
    chosen = dataclasses.replace(load_recipe(recipe), backend="torch")
    plan, found = make_plan(chosen, draft_of(source)), NOTHING_MEASURED
    if chosen.needs_input_scales:
        draft = load_draft(source, dtype=torch.float64, shared=shared)
        found = calibrated_scales(plan, DraftRun(draft, traces, num_draft_tokens))
    quantize_draft(plan, out, source=DraftSource(folder=source), measured=found)
    names = {step.row.canonical.removesuffix(".weight"): step.row.module for step in plan.quantized}

    def statically(name: str, x: Tensor) -> Tensor:
        if name not in names:
            return x
        return fp8_rounded(x, torch.tensor(found.input_scales[names[name]]))

    if found.input_scales:
        return statically
    return fp8_per_token if chosen.activations else unrounded


def replayed_steps(
    draft: LoadedDraft, traces: TraceFolder, trace: PromptTrace, num_draft_tokens: int
) -> list[int]:
    hidden, first = first_hidden(draft, traces, trace), trace.prompt_length - 1
    found = draft_proposals(
        draft.forward, hidden, trace.token_ids, first_row=first, num_draft_tokens=num_draft_tokens
    )
    return decoding_steps(accepted_by_row(trace, found.token_ids))


def assert_replay_is_the_engine(
    draft: LoadedDraft,
    round_input: RoundInput,
    model: Any,
    traces: TraceFolder,
    *,
    num_draft_tokens: int,
    num_prompts: int | None = None,
    reference: type[Any] = ReferenceDraft,
) -> AcceptanceCounts:
    """Decode each prompt online and compare step by step with replay and with the target alone.

    `reference` is the independent draft of the online side.
    """
    histogram = [0] * (num_draft_tokens + 1)
    for trace in list(traces)[:num_prompts]:
        run = speculative_decode(
            model,
            reference(draft.geometry, draft.weights, round_input),
            trace.token_ids[: trace.prompt_length].tolist(),
            aux_layer_ids=traces.manifest.features.aux_layer_ids,
            num_draft_tokens=num_draft_tokens,
            num_tokens=trace.num_tokens,
        )
        assert run.token_ids[: trace.num_tokens] == tuple(trace.token_ids.tolist())  # lossless
        # A step is known to replay if its deepest draft token lies inside the trace.
        last_row = trace.num_tokens - 2 - num_draft_tokens
        online = [accepted for row, accepted in run.steps if row <= last_row]
        assert replayed_steps(draft, traces, trace, num_draft_tokens) == online, trace.id
        for accepted in online:
            histogram[accepted] += 1
    return AcceptanceCounts(histogram=tuple(histogram))


def assert_fitted_draft_is_the_engine(
    folder: Path,
    target: Path,
    traces: TraceFolder,
    num_draft_tokens: int,
    recipe: str | None,
    reference: type[Any],
    kept: tuple[str, ...],
) -> None:
    """Of a block draft that `block_pair` fits, whose mask embedding becomes the table's own row.

    `kept`: ends of names of linears whose inputs no kernel rounds.
    """
    tables, side = shared_tables(target), folder / "mask_embedding.pt"
    tables["embed_tokens.weight"][MASK_TOKEN_ID] = torch.load(side, weights_only=True)["embedding"]
    side.unlink()
    rounded: RoundInput = unrounded
    if recipe is not None:
        made = folder.with_name("q")
        rounded = quantized_folder(folder, made, recipe, traces, num_draft_tokens, tables)
        folder = made
    draft = load_draft(folder, dtype=torch.float64, shared=tables)
    counts = assert_replay_is_the_engine(
        draft, lambda name, x: x if name.endswith(kept) else rounded(name, x),
        Qwen3ForCausalLM.from_pretrained(target, dtype=torch.float64), traces,
        num_draft_tokens=num_draft_tokens, reference=reference,
    )  # fmt: skip
    assert counts.mean_acceptance_length > 1.15
    (replay,) = replay_drafts([draft], traces, num_draft_tokens=num_draft_tokens)
    assert replay.counts == counts
