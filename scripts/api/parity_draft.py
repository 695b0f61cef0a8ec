"""`parity_draft`: proposals of a quantized draft against those of BF16."""

from dataclasses import KW_ONLY, dataclass
from typing import Annotated

from ...recipes.bounds import AT_LEAST_1
from . import reports
from .arguments import AnyPath, Device, Dtype, NumDraftTokens, Target
from .findings import BoundedFindings
from .loaded_drafts import load_for_replay
from .measured_draft import draft_identity
from .opened_traces import open_traces
from .option import Argument, Option
from .references import Reference
from .replay import OnTracesSettings
from .verb import verb


@dataclass(frozen=True, slots=True)
class DraftParitySettings(BoundedFindings):
    """Of which drafts along which traces, and how far they may part."""

    baseline: Annotated[Reference, Argument("the BF16 draft: a folder or a Hub id", "BF16")]
    candidate: Annotated[Reference, Argument("the quantized draft: a folder or a Hub id", "QUANT")]
    traces: Annotated[AnyPath, Option("trace folder", "TRACES")]
    _: KW_ONLY
    num_draft_tokens: NumDraftTokens = None
    target: Target = None
    device: Device = "auto"
    dtype: Dtype = "float32"
    top: Annotated[
        int,
        Option(
            "how many most likely tokens are compared as a set (default 5)",
            "TOKENS",
            bounds=AT_LEAST_1,
        ),
    ] = 5
    max_kl: Annotated[
        float | None, Option("largest mean KL(BF16 || QUANT) per drafted token, in nats", "NATS")
    ] = None
    min_agreement: Annotated[
        float | None,
        Option("smallest share of drafted tokens with the same most likely token", "SHARE"),
    ] = None
    min_top_agreement: Annotated[
        float | None, Option("smallest shared part of the --top most likely tokens", "SHARE")
    ] = None
    min_overlap: Annotated[
        float | None,
        Option(
            "smallest mean overlap of the two distributions (sum of the smaller probabilities)",
            "SHARE",
        ),
    ] = None
    max_right_drop: Annotated[
        float | None,
        Option("how much less often the most likely token may equal the target's", "SHARE"),
    ] = None
    max_perplexity_rise: Annotated[
        float | None,
        Option(
            "largest relative rise of the draft's perplexity on the target's tokens (0.01 is 1 %%)",
            "SHARE",
        ),
    ] = None
    max_alpha_drop: Annotated[
        float | None,
        Option(
            "largest drop of the expected acceptance of sampled proposals (for sampled traces)",
            "SHARE",
        ),
    ] = None


@verb(DraftParitySettings)
def parity_draft(settings: DraftParitySettings) -> "reports.Findings":
    """Compare the proposals of a quantized draft with those of the BF16 draft, at each draft step.

    Returns:
        One finding for each figure, with its parts by draft step and by category.

    Raises:
        DraftQuantError: a draft or the traces cannot be read, or they do not fit each other.
    """
    from ...validate.counting.trace_replay import chosen_num_draft_tokens
    from ...validate.parity.draft_agreement import draft_agreement
    from ...validate.parity.draft_findings import DraftLimits, check_limits, draft_findings

    allowed = DraftLimits(
        max_kl=settings.max_kl,
        min_agreement=settings.min_agreement,
        min_top_agreement=settings.min_top_agreement,
        min_overlap=settings.min_overlap,
        max_right_drop=settings.max_right_drop,
        max_perplexity_rise=settings.max_perplexity_rise,
        max_alpha_drop=settings.max_alpha_drop,
    )
    check_limits(allowed)
    traces = open_traces(settings.traces, settings.listener)
    how = OnTracesSettings(
        listener=settings.listener,
        num_draft_tokens=settings.num_draft_tokens,
        target=settings.target,
        device=settings.device,
        dtype=settings.dtype,
        batch_size=1,
    )
    loaded = load_for_replay([settings.baseline, settings.candidate], traces, how)
    with settings.listener.bar("compare", len(traces), "work") as bar:
        prompts = draft_agreement(
            *loaded.both,
            traces,
            num_draft_tokens=chosen_num_draft_tokens(settings.num_draft_tokens, loaded.drafts),
            top=settings.top,
            on_progress=bar.set,
        )
    findings = draft_findings(prompts, allowed, top=settings.top, confidence=settings.confidence)
    both = (settings.baseline, settings.candidate)
    return settings.write(findings, lambda: [draft_identity(one).draft_sha256 for one in both])
