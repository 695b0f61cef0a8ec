"""Under which heading `--help` shows an option, where a command has many of them."""

import argparse
from collections.abc import Mapping

MANY = 8
"""Options that need no headings."""
NEEDED, COMMON, RARE = "needed", "common", "rarely needed"
GROUPS: Mapping[str, tuple[str, ...]] = {
    COMMON: (
        "against", "baseline", "category", "coverage", "curve", "draft", "engine", "exact",
        "fix_config", "gpu", "html", "judge", "junit", "max_drop", "max_new_tokens",
        "num_draft_tokens", "num_prompts", "out", "plot", "prometheus", "prompts", "recipe",
        "recipes", "report", "server", "show", "size", "target", "target_step_ms", "to",
        "tokenizer", "traces", "traffic",
    ),
    "where the prompts come from": (
        "continued", "prompts_column", "prompts_seed", "prompts_split", "too_long", "turns",
    ),
    "how it is quantized": (
        "algorithm", "allow_zero_rows", "backend", "carrier", "input_correction", "input_scale",
        "kv_cache", "layout", "precise", "subtree", "target_layers", "vocab_coverage",
        "vocab_size",
    ),
    "how tokens are drawn": (
        "ignore_eos", "logprobs", "seed", "temperature", "top_k", "top_logprobs", "top_p",
    ),
    "what is recorded": ("aux_layer_ids", "feature_storage", "fused", "table_ids", "tables"),
    "the server": (
        "concurrency", "engine_args", "model", "print_server_args", "selector", "served_as",
        "shared",
    ),
    "when it reads": ("duration", "every", "once", "state", "until_alarm"),
    "limits of the verdict": (
        "alpha", "confidence SHARE", "every_category_passes", "max_relative_drop", "min_prompts",
        "policy",
    ),
    "what servers measured": ("baseline_again", "measured", "parity", "tasks"),
    "where it runs": (
        "batch_size", "device", "device_map", "dtype", "fixed_batches", "no_cache", "ray",
    ),
    "report files": ("github", "golden", "junit_inconclusive", "markdown", "overwrite"),
}  # fmt: skip
"""Heading -> names of options, the most used heading first; what stands nowhere is rarely needed.
A name that verbs use for different things has its metavar behind it.
"""


def heading(option: argparse.Action) -> str:
    """The heading of an option."""
    if option.required:
        return NEEDED
    own = {option.dest, f"{option.dest} {option.metavar}"}
    return next((title for title, names in GROUPS.items() if own & set(names)), RARE)
