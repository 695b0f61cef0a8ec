"""`parity_sampled`: how likely drawn output is to the target, with a draft and without."""

import os
import typing
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from ..recipes.decode import AT_LEAST_1
from ..recipes.listener import Bar
from ..recipes.regular_file import AnyPath, optional_path
from ..validate.counting.acceptance_counts import ComputeDtype
from .frame import reports
from .frame.arguments import ChosenPrompts, Device
from .frame.findings import BoundedFindings, FindingsFile
from .frame.settings import Argument, Option
from .frame.verb import verb

if TYPE_CHECKING:
    from ..validate.parity.sampled_findings import Scores, Text

    Scorer = Callable[[Sequence[Text]], list[Scores]]

ScoringEngine = Literal["vllm", "sglang"]


@dataclass(frozen=True, slots=True)
class SampledSettings(BoundedFindings, ChosenPrompts):
    """Of which measurements, and who says how likely they are."""

    plain: Annotated[
        AnyPath, Argument("measurement without a draft, with a --temperature", "PLAIN")
    ]
    speculative: Annotated[AnyPath, Argument("the same measurement with a draft", "SPECULATIVE")]
    prompts: Annotated[AnyPath, Option("prompts that both were measured with", "PROMPTS")]
    _: KW_ONLY
    tokenizer: Annotated[
        AnyPath | None,
        Option("folder of the tokenizer, for prompts that are text (default: --target)", "FOLDER"),
    ] = None
    target: Annotated[
        AnyPath | None,
        Option("folder of the target, if transformers computes the scores", "TARGET"),
    ] = None
    score_server: Annotated[
        str | None,
        Option(
            "address of a server that runs the target without a draft, if it computes the scores",
            "URL",
        ),
    ] = None
    score_engine: Annotated[
        ScoringEngine | None, Option("engine at --score-server (default: that of PLAIN)")
    ] = None
    device: Device = "auto"
    dtype: Annotated[ComputeDtype, Option("dtype that --target computes in (default float32)")] = (
        "float32"
    )
    concurrency: Annotated[
        int,
        Option("concurrent requests at --score-server (default 8)", "REQUESTS", bounds=AT_LEAST_1),
    ] = 8
    max_logprob_drop: Annotated[
        float | None,
        Option(
            "largest difference of the mean log-probability per token, in nats, in "
            "either direction",
            "NATS",
        ),
    ] = None

    exclusive: ClassVar = (("target", "score_server"),)

    def check(self) -> None:
        """One of the two scores."""
        from ..recipes.errors import ParityError

        FindingsFile.check(self)
        if (self.target is None) == (self.score_server is None):
            raise ParityError("--target", "expected one who scores: --target or --score-server",
                              fix="give --target M, or --score-server URL")  # fmt: skip


@verb(SampledSettings)
def parity_sampled(settings: SampledSettings) -> "reports.Findings":
    """Compare how likely sampled output is to the target, with a draft and without.

    Returns:
        One finding.

    Raises:
        DraftQuantError: the measurements do not fit each other, or no target is given that can
            score them.
    """
    from ..calibration.prompts.prompt_file import PromptEncoder
    from ..validate.measure.measurement_file import read_measurement
    from ..validate.parity.finding import limits
    from ..validate.parity.sampled_findings import check_sampled, sampled_finding, texts_of
    from ..validate.served.served_gate import draft_sha256

    allowed = limits("--max-logprob-drop", settings.max_logprob_drop, least=-1, most=1)
    plain, speculative = (
        read_measurement(Path(path)) for path in (settings.plain, settings.speculative)
    )
    check_sampled(plain, speculative)
    engine = settings.score_engine or plain.setup.server.engine
    tokenizer = optional_path(settings.tokenizer) or optional_path(settings.target)
    prompts = settings.read_prompts(settings.prompts, PromptEncoder(tokenizer)).prompts
    texts = [texts_of(measured, prompts) for measured in (plain, speculative)]
    with settings.listener.bar("score", sum(map(len, texts))) as bar:
        score = _scorer(settings, engine, bar)
        scores = score([*texts[0], *texts[1]])
    count = len(texts[0])
    finding = sampled_finding(
        plain,
        speculative,
        (scores[:count], scores[count:]),
        max_logprob_drop=allowed,
        confidence=settings.confidence,
    )
    return settings.write([finding], lambda: [draft_sha256(speculative)])


def _scorer(settings: SampledSettings, engine: str, bar: Bar) -> "Scorer":
    """Whoever scores: the target itself, or a server of it.

    Raises:
        ParityError: no server can be asked so.
    """
    import torch

    from ..calibration.passes.memory import resolve_device
    from ..calibration.server_client import KEY_VARIABLE
    from ..recipes.errors import ParityError
    from ..validate.parity.sampled_findings import score_by_server, score_by_target

    target = optional_path(settings.target)
    if target is not None:
        device, dtype = resolve_device(settings.device), getattr(torch, settings.dtype)
        return lambda texts: score_by_target(
            target, texts, dtype=dtype, device=device, on_progress=bar.set
        )
    server = settings.score_server
    assert server is not None  # see `SampledSettings.check`
    if engine not in typing.get_args(ScoringEngine):
        raise ParityError("--score-engine", f"{engine} does not score the tokens of a prompt",
                          fix="give --target M, or a server of vLLM or SGLang")  # fmt: skip
    return lambda texts: score_by_server(
        server,
        typing.cast(ScoringEngine, engine),
        texts,
        key=os.environ.get(KEY_VARIABLE) or None,
        concurrency=settings.concurrency,
        on_progress=bar.set,
    )
