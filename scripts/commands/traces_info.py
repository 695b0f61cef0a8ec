"""What is said of a trace folder, one that is there already or was just written."""

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ...recipes.decode import encode
from ..console import megabytes, print_json, print_table, stdout, table

if TYPE_CHECKING:
    from ...calibration.traces.manifest import TraceManifest
    from ...calibration.traces.trace_folder import TraceFolder
    from ..api.reports import TraceInfo


_STORED = {None: "", "fp8-per-token": ", rounded to FP8 per token", "zstd": ", packed by zstd"}


def print_info(info: "TraceInfo", folder: object, *, as_json: bool) -> None:
    """Print what the folder holds."""
    if as_json:
        print_json(_mapping(info))
        return
    numbers = ("prompts", "prompt tokens", "new tokens", "shortest", "longest")
    found = table(
        f"{folder}, {len(info.traces)} prompts,"
        f" {info.traces.manifest.num_tokens:,} tokens, {megabytes(info.nbytes)}",
        "category",
        *numbers,
        right=numbers,
    )
    for one in info.categories:
        found.row(
            one.category,
            f"{one.num_prompts:,}",
            f"{one.prompt_tokens:,}",
            f"{one.new_tokens:,}",
            f"{one.shortest:,}",
            f"{one.longest:,}",
        )
    print_table(found)
    for line in _lines(info):
        stdout().line(line)


def _lines(info: "TraceInfo") -> Iterator[str]:
    manifest = info.traces.manifest
    target, features = manifest.target, manifest.features
    yield f"sha256 {info.traces.sha256}"
    yield (
        f"target {target.name}, {target.num_layers} layers, vocabulary {target.vocab_size:,},"
        f" weights {(target.weights_sha256 or 'not known')[:16]},"
        f" recorded by {manifest.recorded_by or 'transformers'}"
    )
    yield (
        f"features {features.kind} of layers {list(features.aux_layer_ids)} (counted after the"
        f" layer), {features.width:,} wide, {features.dtype}"
        f"{_STORED[features.storage]}"
    )
    yield _decoding(manifest)
    if manifest.too_long:
        left, cut = len(manifest.too_long.skipped), len(manifest.too_long.truncated)
        yield f"too long for the target: {left} prompts left out, {cut} cut to their last tokens"
    for dataset in manifest.datasets or ():
        yield f"prompts of the data set {dataset}"
    yield (
        f"{info.num_independent} independent prompts; besides them {info.num_copies} copies,"
        f" {info.num_later_turns} later turns, {info.num_near_duplicates} near duplicates,"
        f" {info.num_clusters} declared clusters"
    )
    if info.suggested_clusters:
        yield info.suggested_clusters
    yield _tables(manifest)
    yield f"the target's argmax is known at {info.known_top1:.0%} of the prompts' positions"
    if info.head_agreement is not None:
        yield f"the stored head predicts {info.head_agreement:.1%} of the tokens"
    if info.features.checked:
        own = info.features.share[0]
        yield info.features.fault() or (
            f"hidden states fit their tokens, which explain {own:.0%} of their variance"
        )
    else:
        yield "too few tokens repeat to verify that the hidden states fit them"


def _decoding(manifest: "TraceManifest") -> str:
    sampling, logprobs = manifest.sampling, manifest.logprobs
    beside = f", {logprobs.kind} log-probabilities" if logprobs else ""
    beside += ", end of text ignored" if manifest.ignore_eos else ""
    if sampling is None:
        return f"greedy{beside}"
    seed = "not known" if sampling.seed is None else sampling.seed
    return (
        f"sampled at temperature {manifest.temperature:g}, top-p {sampling.top_p:g}, top-k"
        f" {sampling.top_k}, seed {seed}{beside}"
    )


def _tables(manifest: "TraceManifest") -> str:
    tables = manifest.tables
    if tables is None:
        return "no embedding and head stored: drafts without their own need the target"
    norm = "with" if tables.norm_dtype else "without"
    return (
        f"tables: {tables.num_token_ids:,} embeddings, the head {norm} its norm,"
        f" {megabytes(tables.nbytes)}"
    )


def _mapping(info: "TraceInfo") -> dict[str, Any]:
    manifest = info.traces.manifest
    kept = ("nbytes", "num_copies", "num_later_turns", "num_near_duplicates", "num_independent",
            "num_clusters", "suggested_clusters", "known_top1", "head_agreement")  # fmt: skip
    return {
        "sha256": info.traces.sha256,
        "num_prompts": len(info.traces),
        "num_tokens": manifest.num_tokens,
        "target": dataclasses.asdict(manifest.target),
        "recorded_by": manifest.recorded_by,
        "features": dataclasses.asdict(manifest.features),
        "temperature": manifest.temperature,
        "sampling": dataclasses.asdict(manifest.sampling) if manifest.sampling else None,
        "ignore_eos": manifest.ignore_eos,
        "logprobs": dataclasses.asdict(manifest.logprobs) if manifest.logprobs else None,
        "too_long": dataclasses.asdict(manifest.too_long) if manifest.too_long else None,
        "datasets": [dataclasses.asdict(one) for one in manifest.datasets or ()],
        "tables": dataclasses.asdict(manifest.tables) if manifest.tables else None,
        "categories": [dataclasses.asdict(one) for one in info.categories],
        **{name: getattr(info, name) for name in kept},
        "feature_evidence": encode(info.features),
        "feature_problem": info.features.fault(),
    }


def print_written(traces: "TraceFolder", of: str = "") -> None:
    """Print its name, how many traces and tokens it has, and its identity."""
    stdout().line(
        (str(traces.folder), "bold"),
        f": {len(traces)} traces{of}, {traces.manifest.num_tokens:,} tokens, sha256"
        f" {traces.sha256[:16]}",
    )


def written(traces: "TraceFolder") -> dict[str, Any]:
    """The same for JSON."""
    return {
        "out": str(traces.folder),
        "traces": len(traces),
        "tokens": traces.manifest.num_tokens,
        "sha256": traces.sha256,
    }
