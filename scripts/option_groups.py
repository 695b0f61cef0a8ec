"""Under which heading `--help` shows an option, where a command has many of them."""

import argparse
from collections.abc import Mapping

MANY = 8
"""Options that need no headings."""
NEEDED = "needed"
GROUPS: Mapping[str, tuple[str, ...]] = {
    "how it is quantized": (
        "algorithm", "allow_zero_rows", "backend", "carrier", "fix_config", "input_scale",
        "layout", "recipe", "recipes", "subtree", "target_layers",
    ),
    "how tokens are drafted": ("draft_sampling", "num_draft_tokens", "rope_theta"),
    "how text is continued": (
        "ignore_eos", "logprobs", "max_new_tokens", "seed", "temperature", "top_k",
        "top_logprobs", "top_p", "turns",
    ),
    "the target": (
        "target", "target_bytes", "target_step_ms", "tokenizer", "model", "tables", "table_ids",
        "aux_layer_ids", "fused",
    ),
    "the server": (
        "attempts", "concurrency", "engine", "engine_args", "max_requests_per_second",
        "print_server_args", "server", "shared", "timeout", "warm_up",
    ),
    "the verdict": (
        "confidence", "every_category_passes", "expect_baseline", "look",
        "max_relative_drop", "min_prompts", "policy", "spending", "unrecorded",
        "unrelated",
    ),
    "what servers measured": ("baseline_again", "measured", "parity"),
    "where it runs": ("batch_size", "device", "device_map", "dtype"),
    "files to write": (
        "github", "html", "junit", "junit_inconclusive", "markdown", "out", "overwrite",
        "plot", "report", "trend",
    ),
}  # fmt: skip
"""Heading -> names of options; what stands nowhere comes first, under `options`."""


def heading(option: argparse.Action) -> str | None:
    """The heading of an option, None for that of all others."""
    if option.required:
        return NEEDED
    return next((title for title, names in GROUPS.items() if option.dest in names), None)
