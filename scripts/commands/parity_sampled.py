"""`draftquant parity sampled`: how likely drawn output is to the target, with and without draft."""

import argparse
import os
import typing
from pathlib import Path
from typing import TYPE_CHECKING

from ..console import Bar, progress_bar
from .common import add_device
from .parity_report import (
    add_confidence,
    add_report_arguments,
    check_report,
    report_findings,
)
from .replaying import DTYPES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ...validate.parity.text_scores import Scores, Text

    Scorer = Callable[[Sequence[Text]], list[Scores]]

ENGINES = ("vllm", "sglang")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`parity sampled PLAIN SPECULATIVE --prompts P --target M | --score-server URL`."""
    parser.add_argument(
        "plain", type=Path, metavar="PLAIN", help="measured without a draft, with a --temperature"
    )
    parser.add_argument(
        "speculative", type=Path, metavar="SPECULATIVE", help="the same with a draft"
    )
    parser.add_argument(
        "--prompts",
        type=Path,
        required=True,
        metavar="PROMPTS",
        help="that both were measured with",
    )
    parser.add_argument(
        "--tokenizer",
        type=Path,
        metavar="FOLDER",
        help="folder of the tokenizer, for prompts that are text (default: --target)",
    )
    scorer = parser.add_mutually_exclusive_group(required=True)
    scorer.add_argument(
        "--target", type=Path, metavar="TARGET", help="target folder: transformers scores"
    )
    scorer.add_argument(
        "--score-server", metavar="URL", help="server of the target without a draft: it scores"
    )
    parser.add_argument(
        "--score-engine", choices=ENGINES, help="that runs at --score-server (default: PLAIN's)"
    )
    add_device(parser)
    parser.add_argument(
        "--dtype", choices=DTYPES, default=DTYPES[0], help="of --target (default float32)"
    )
    parser.add_argument(
        "--concurrency",
        type=int,
        default=8,
        metavar="REQUESTS",
        help="requests in flight at --score-server (default 8)",
    )
    parser.add_argument(
        "--max-logprob-drop",
        type=float,
        metavar="NATS",
        help="nats per token by which output may be less likely, or more (which is as wrong)",
    )
    add_confidence(parser)
    add_report_arguments(parser)


def run(options: argparse.Namespace) -> int:
    """See `add_arguments`."""
    from ...calibration.prompts.prompt_file import read_prompts
    from ...validate.measure.measurement_file import read_measurement
    from ...validate.parity.limits import limits
    from ...validate.parity.sampled_findings import check_sampled, sampled_finding, texts_of

    check_report(options)
    allowed = limits("--max-logprob-drop", options.max_logprob_drop, least=-1, most=1)
    plain, speculative = (read_measurement(x) for x in (options.plain, options.speculative))
    check_sampled(plain, speculative)
    engine = options.score_engine or plain.setup.server.engine
    prompts = read_prompts(options.prompts, target=options.tokenizer or options.target)
    texts = [texts_of(measured, prompts) for measured in (plain, speculative)]
    with progress_bar("score", sum(map(len, texts))) as bar:
        score = _scorer(options, engine, bar)
        scores = score([*texts[0], *texts[1]])
    count = len(texts[0])
    finding = sampled_finding(
        plain,
        speculative,
        (scores[:count], scores[count:]),
        max_logprob_drop=allowed,
        confidence=options.confidence,
    )
    return report_findings([finding], options)


def _scorer(options: argparse.Namespace, engine: str, bar: Bar) -> "Scorer":
    """Whoever scores: the target itself, or a server of it.

    Raises:
        ParityError: no server can be asked so.
    """
    import torch

    from ...calibration.passes.devices import resolve_device
    from ...calibration.server_client import KEY_VARIABLE
    from ...validate.errors import ParityError
    from ...validate.parity.text_scores import ScoringEngine, score_by_server, score_by_target

    if options.target is not None:
        device, dtype = resolve_device(options.device), getattr(torch, options.dtype)
        return lambda texts: score_by_target(
            options.target, texts, dtype=dtype, device=device, on_progress=bar.set
        )
    if options.concurrency < 1:
        raise ParityError("--concurrency", f"expected at least 1, got {options.concurrency}",
                          fix="leave it out for 8")  # fmt: skip
    if engine not in ENGINES:
        raise ParityError("--score-engine", f"{engine} does not score the tokens of a prompt",
                          fix="give --target M, or a server of vLLM or SGLang")  # fmt: skip
    return lambda texts: score_by_server(
        options.score_server,
        typing.cast(ScoringEngine, engine),
        texts,
        key=os.environ.get(KEY_VARIABLE) or None,
        concurrency=options.concurrency,
        on_progress=bar.set,
    )
