"""EAGLE-3: norms around the first layer and at its end."""

from collections.abc import Iterator

from ...exporters import in_speculators_layout, is_mla, is_modelopt, is_torchspec
from ...family import Draft, Lint
from .geometry import Eagle3Geometry


def eagle3(draft: Draft) -> Eagle3Geometry | None:
    """The geometry of an EAGLE-3 draft, None for drafts of other kinds."""
    return draft.geometry if isinstance(draft.geometry, Eagle3Geometry) else None


def norm_before_residual(draft: Draft) -> Iterator[Lint]:
    """Whether the residual of layer 0 starts from the normed hidden state.

    Source: vLLM 0.33 `speculators/algos.py` (missing means true), speculators `eagle3/config.py`
    (missing means false); SGLang 0.5.23 `llama_eagle3.py` and TensorRT-LLM have no such option.
    """
    geometry = eagle3(draft)
    if geometry is None:
        return
    if in_speculators_layout(draft) and draft.checkpoint.config.get("norm_before_residual") is None:
        yield Lint(
            name="norm-before-residual-missing",
            level="warning",
            cause="config.json has no norm_before_residual: vLLM 0.33 then takes it as true,"
            " but speculators itself takes it as false",
            remedy="add the key with the value that the draft was trained with; replay shows"
            " which value is right",
        )
    elif geometry.norm_before_residual:
        yield Lint(
            name="norm-before-residual",
            level="warning",
            cause="norm_before_residual is true: vLLM 0.33 follows it, but SGLang 0.5.23 and"
            " TensorRT-LLM ignore it",
            remedy="serve this draft with vLLM",
        )


def norm_before_fc(draft: Draft) -> Iterator[Lint]:
    """Source: loaded in vLLM 0.33 (input_norm refused); SGLang 0.5.23 `kimi_k25_eagle3.py`."""
    geometry = eagle3(draft)
    if geometry is not None and geometry.norm_before_fc and is_mla(draft):
        yield Lint(
            name="mla-norm-before-fc",
            level="warning",
            cause="the draft has norm_before_fc with MLA: vLLM 0.33 refuses input_norm, and"
            " SGLang 0.5.23 silently serves without it",
            remedy="there is no remedy: no released engine serves this draft as it was"
            " trained, because both have the option for Llama layers only",
        )


def norm_output(draft: Draft) -> Iterator[Lint]:
    """Source: SpecForge @a6b6b02 `llama3_eagle.py`, corrected by its PR 879; vLLM, SGLang."""
    geometry = eagle3(draft)
    if geometry is None or not geometry.norm_output:
        return
    if is_mla(draft) or is_torchspec(draft) or in_speculators_layout(draft):
        return
    yield Lint(
        name="norm-output",
        level="warning",
        cause="norm_output is true: engines feed the normed hidden state back, but"
        " SpecForge @a6b6b02 trained with the un-normed one under the same key",
        remedy="if that SpecForge trained this draft, train again with a SpecForge after"
        " its PR 879, or replay with norm_output false",
    )


def sliding(draft: Draft) -> Iterator[Lint]:
    """Source: vLLM 0.33 `llama.py:189-207`; SGLang 0.5.23 `llama.py:240` gives no window."""
    geometry = eagle3(draft)
    window = (
        next(filter(None, map(geometry.window_of, range(geometry.num_layers))), None)
        if geometry
        else None
    )
    if window is not None:
        yield Lint(
            name="eagle3-sliding",
            level="warning",
            cause=f"layer_types has sliding_attention: vLLM 0.33 serves a window of {window}"
            " positions, SGLang 0.5.23 all of them, and replay computes neither",
            remedy="write full_attention into layer_types if the draft was trained with that",
        )


def double_norm(draft: Draft) -> Iterator[Lint]:
    """Source: ModelOpt 0.44 and 0.47 `modeling_eagle.py`; executed for Llama layers."""
    if eagle3(draft) is not None and is_modelopt(draft):
        yield Lint(
            name="modelopt-double-norm",
            level="warning",
            cause="ModelOpt trains with hidden_norm(input_layernorm(hidden)), but every"
            " server computes hidden_norm(hidden)",
            remedy="gate on replay, which computes what servers compute; do not use ModelOpt's"
            " pseudo_speculative_generate as the BF16 baseline",
        )


LINTS = (norm_before_residual, norm_before_fc, norm_output, sliding, double_norm)
