"""Arguments that several verbs take, each said once."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from ...quantize.files.hub import Reference
from ...recipes.decode import AT_LEAST_0, AT_LEAST_1, CONFIDENCE, SHARE_OR_ALL, MisfitError
from ...recipes.errors import short
from ...recipes.formats import KvCacheChoice, OnlineHead
from ...recipes.regular_file import AnyPath as AnyPath
from ...recipes.schema import ALGORITHMS
from ...validate.counting.acceptance_counts import ComputeDtype, DraftSampling
from .settings import Argument, Option


def share(text: str) -> float:
    """A share as people write it: 0.01 or 1%; a misfit if it is neither."""
    number, percent = text.removesuffix("%"), text.endswith("%")
    try:
        return float(number) / (100 if percent else 1)
    except ValueError as exc:
        raise MisfitError(f"expected a share such as 0.01 or 1%, got {short(text)}") from exc


Draft = Annotated[Reference, Argument("draft: a folder or a Hub id (owner/name)", "DRAFT")]
Quantized = Annotated[Reference, Argument("quantized draft: a folder or a Hub id", "QUANT")]
Subtree = Annotated[
    str | None,
    Option(
        "DRAFT is a target's folder, and its draft is the MTP layer with this "
        "prefix (model.layers.61, model.mtp_layers.0, mtp); list several layers "
        "with commas",
        "PREFIX[,PREFIX...]",
    ),
]
GoldenFile = Annotated[
    AnyPath | None, Option("also write the draft's golden acceptance (JSON)", "F.json")
]
OutFolder = Annotated[AnyPath, Option("folder to create", "FOLDER")]
TargetLayers = Annotated[
    int | None,
    Option(
        "number of decoder layers of the target; layout fp8 needs it for the "
        "names in its exclude list",
        "LAYERS",
        bounds=AT_LEAST_1,
    ),
]
NumDraftTokens = Annotated[
    int | None,
    Option(
        "tokens drafted per verify step, as served (default: 3, or the whole "
        "block of a block draft)",
        "K",
        short="-k",
        bounds=AT_LEAST_1,
        fix="give the K that is served, such as -k 3",
    ),
]
Sampling = Annotated[
    DraftSampling,
    Option(
        "how drafts propose on sampled traces, as served: the most likely token "
        "(greedy, default), or sampled at the traces' temperature"
    ),
]
Device = Annotated[
    str,
    Option(
        "device to compute on: auto (the first GPU, else the CPU; default), cpu, cuda or cuda:I",
        "DEVICE",
    ),
]
Dtype = Annotated[
    ComputeDtype,
    Option("dtype that drafts compute in: float32 (default), or bfloat16 as engines do"),
]
HeadsOnline = Annotated[
    OnlineHead | None,
    Option(
        "replay with the head that vLLM makes while it loads (draft_lm_head_quantization; SGLang"
        " has no such option), every draft but the first of several"
    ),
]
KvCaches = Annotated[
    KvCacheChoice,
    Option(
        "KV cache: auto (what each folder declares; default), or fp8_e4m3 by the engines' option,"
        " every draft but the first of several"
    ),
]
KvCache = Annotated[KvCacheChoice, Option("KV cache of QUANT (default: auto, as it declares)")]
HeadOnline = Annotated[
    OnlineHead | None, Option("judge QUANT with vLLM's draft_lm_head_quantization")
]
BatchSize = Annotated[
    int | None, Option("prompts per batch (default: as many as fit)", "PROMPTS", bounds=AT_LEAST_1)
]
NoCache = Annotated[
    bool,
    Option(
        "replay the BF16 draft too, instead of recalling from the cache what it proposed, and keep"
        " nothing there"
    ),
]
Ray = Annotated[
    str | None,
    Option(
        "compute as tasks of this Ray cluster (HOST:PORT, auto, or local), whose nodes read"
        " the same paths",
        "ADDRESS",
    ),
]
Target = Annotated[
    AnyPath | None,
    Option(
        "folder of the target; needed if neither the draft nor the traces hold "
        "embedding and head, or if the recipe drops tables shared with the target",
        "TARGET",
    ),
]
FixConfig = Annotated[
    bool, Option("repair the output's config.json where 'inspect' reports problems")
]
Temperature = Annotated[
    float, Option("sampling temperature (default 0: greedy)", "TEMPERATURE", bounds=AT_LEAST_0)
]
TopP = Annotated[
    float,
    Option(
        "sample only from the most likely tokens with this total probability (default 1: all)",
        "SHARE",
        bounds=SHARE_OR_ALL,
    ),
]
TopK = Annotated[
    int,
    Option(
        "sample only from this many most likely tokens (default 0: all)",
        "TOKENS",
        bounds=AT_LEAST_0,
    ),
]
SamplingSeed = Annotated[int, Option("seed of the sampling (default 0)", "SEED")]
TableIds = Annotated[
    Sequence[int],
    Option(
        "further tokens whose embedding is stored (default: those of the traces "
        "and the mask token)",
        "TOKEN_ID,...",
        several="commas",
    ),
]
Overwrite = Annotated[bool, Option("replace report files that exist already")]
Options = Mapping[str, Any]
"""Field -> what it means: an `Option`, or an annotation with one."""
PASSES: Options = {
    "num_draft_tokens": NumDraftTokens,
    "target": Target,
    "device": Device,
    "dtype": Dtype,
    "draft_sampling": Sampling,
    "batch_size": BatchSize,
}
ON_TRACES: Options = {**PASSES, "no_cache": NoCache}
CHOSEN_PROMPTS: Options = {
    "prompts_split": Option("split of a Hub data set, and its config if several", "[CONFIG/]SPLIT"),
    "prompts_column": Option(
        "column that holds the prompts, if its name is not a usual one", "NAME"
    ),
    "num_prompts": Option(
        "draw so many prompts at random (default: take all)", "PROMPTS", bounds=AT_LEAST_1
    ),
    "prompts_seed": Option(
        "seed of --num-prompts (default 0); a larger draw contains a smaller one", "SEED"
    ),
}
PAGES: Options = {
    "html": Option("write the report as a self-contained HTML page", "F.html"),
    "markdown": Option("write the report as Markdown, for a pull request", "F.md"),
    "junit": Option("write the report as JUnit test cases, for CI", "F.xml"),
    "junit_inconclusive": Option(
        "what an INCONCLUSIVE verdict is in --junit: 'skipped' if it does not fail your job"
        " (--github then warns)"
    ),
    "github": Option(
        "in GitHub Actions: add the Markdown to the step's summary and the verdict as an annotation"
    ),
    "golden": GoldenFile,
    "overwrite": Overwrite,
}
FINDINGS: Options = {
    "report": Option("also write the findings to this file, for 'gate --parity'", "F.json"),
    "overwrite": Overwrite,
}
BOUNDED_FINDINGS: Options = {
    **FINDINGS,
    "confidence": Option(
        "confidence of each one-sided bound (default 0.95)",
        "SHARE",
        reads=share,
        bounds=CONFIDENCE,
        fix="write 95 % as 0.95",
    ),
}


BY_RECIPE: Options = {
    "draft": Draft,
    "recipe": Option("recipe: a built-in name or a .yaml file", "RECIPE"),
    "subtree": Subtree,
    "backend": Option("toolkit that computes the quantized values (default: the recipe's)"),
    "algorithm": Option(
        "algorithm for quantized values and scales (default: the recipe's); runs "
        "on backend torch unless --backend is given",
        f"{{{','.join(ALGORITHMS)}}}",
    ),
    "input_correction": Option(
        "whether GPTQ and learning correct the weights for the rounding of their inputs: auto "
        "(where they are rounded to four bits; default with --algorithm), or off"
    ),
    "kv_cache": Option(
        "declare an FP8 KV cache (kv_cache of the recipe), and where its scales come from: unit"
        " (1.0), or absmax and measured, which need --traces"
    ),
    "target_layers": TargetLayers,
}
