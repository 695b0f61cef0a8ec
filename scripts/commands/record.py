"""`draftquant record`: what a target does on prompts, for calibration and replay."""

import argparse
import typing
from pathlib import Path

from ..console import progress_bar, stdout
from .common import target_tables


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`record --target M --prompts P --out T`."""
    from ...calibration.trace_manifest import FeatureDtype

    parser.add_argument(
        "--target",
        required=True,
        type=Path,
        metavar="M",
        help="transformers folder of the target (safetensors, no remote code)",
    )
    parser.add_argument(
        "--prompts",
        required=True,
        type=Path,
        metavar="P",
        help='JSON lines: {"id", "category", and token_ids, text or messages}',
    )
    parser.add_argument("--out", required=True, type=Path, metavar="T", help="folder to create")
    parser.add_argument(
        "--draft", metavar="DRAFT", help="read the target layers from this draft's config"
    )
    parser.add_argument(
        "--fused",
        action="store_true",
        help="store the features after the draft's fc: narrower, for drafts with the same fc only",
    )
    parser.add_argument(
        "--aux-layers",
        metavar="I,J,K",
        type=_layer_ids,
        help="target layers whose outputs are recorded, 0-based",
    )
    parser.add_argument("--max-new-tokens", type=int, default=128, metavar="N")
    parser.add_argument(
        "--dtype",
        choices=typing.get_args(FeatureDtype),
        default="float32",
        help="what the target computes in (default float32)",
    )
    parser.add_argument("--batch-size", type=int, default=32, metavar="B")


def run(options: argparse.Namespace) -> int:
    """See `add_arguments`."""
    import torch
    from transformers.utils import logging

    from ...calibration.errors import TraceError
    from ...calibration.prompts import read_prompts
    from ...calibration.record import record_traces
    from ...quantize.hub import resolve_draft
    from ...quantize.loading import load_draft

    logging.disable_progress_bar()  # type: ignore[no-untyped-call] # one bar is enough
    if options.fused and not options.draft:
        raise TraceError("--fused", "needs the draft whose fc is applied", fix="add --draft DRAFT")
    aux_layer_ids, fuse_with = options.aux_layers, None
    if options.draft:
        shared = target_tables(options.target)
        dtype = getattr(torch, options.dtype)
        draft = load_draft(resolve_draft(options.draft).folder, dtype=dtype, shared=shared)
        aux_layer_ids = aux_layer_ids or draft.geometry.aux_layer_ids
        fuse_with = draft if options.fused else None
    prompts = read_prompts(options.prompts, target=options.target)
    with progress_bar("record", len(prompts)) as bar:
        traces = record_traces(
            options.target,
            prompts,
            options.out,
            max_new_tokens=options.max_new_tokens,
            aux_layer_ids=aux_layer_ids,
            fuse_with=fuse_with,
            dtype=options.dtype,
            batch_size=options.batch_size,
            on_progress=bar.set,
        )
    stdout().print(
        f"[bold]{options.out}[/]: {len(traces)} traces,"
        f" {traces.manifest.num_tokens:,} tokens, sha256 {traces.sha256[:16]}"
    )
    return 0


def _layer_ids(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))
