"""What is to be measured, and where."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from ...calibration.prompts.prompt_file import Prompt
from ...calibration.server_client import Patience
from ...calibration.traces.prompt_trace import prompt_sha256
from ...quantize.files.package_version import package_version
from ...recipes.bounds import AT_LEAST_0, AT_LEAST_1
from ...recipes.errors import short
from ..errors import MeasureError
from .measurement import Asked, ServerIdentity, Setup, Speculation
from .measurement_checks import prompts_sha256
from .protocols.protocol import Ask, EngineProtocol
from .served_draft import DraftIdentity, identified


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerAddress:
    """Where a server is, and how patiently it is asked.

    Attributes:
        url: http://HOST:PORT. key: of the server; None = it asks for none.
        most_per_second: requests begun; None = as fast as they are answered.
    """

    url: str
    key: str | None = field(default=None, repr=False)
    patience: Patience = field(default_factory=Patience)
    most_per_second: float | None = None

    def __post_init__(self) -> None:
        """Check the rate.

        Raises:
            MeasureError: it is none.
        """
        rate = self.most_per_second
        if rate is not None and not 0 < rate < math.inf:
            raise MeasureError("--max-requests-per-second", f"expected more than 0, got {rate:g}",
                               fix="give a number, such as 10")  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is measured.

    Attributes:
        prompts: with unique ids, at least one. ask: of each.
        concurrency: requests in flight; fewer where the engine's interface allows no more.
        num_warm_up: requests before, over the first prompts again and again, not recorded.
        template_sha256: see `Asked`.
        draft: None = what the server says of its draft is all that is known.
        model: name that the server must serve; None = any.
    """

    prompts: Sequence[Prompt]
    ask: Ask
    concurrency: int = 8
    num_warm_up: int = 0
    template_sha256: str | None = None
    draft: DraftIdentity | None = None
    model: str | None = None

    def __post_init__(self) -> None:
        """Check the ranges.

        Raises:
            MeasureError: a number is out of range, or two prompts have one id.
        """
        for flag, value, allowed in (
            ("--concurrency", self.concurrency, AT_LEAST_1),
            ("--warm-up", self.num_warm_up, AT_LEAST_0),
            ("--max-new-tokens", self.ask.max_new_tokens, AT_LEAST_1),
        ):
            allowed.check(MeasureError, flag, value, fix="give a whole number")
        if len({prompt.id for prompt in self.prompts}) != len(self.prompts) or not self.prompts:
            raise MeasureError("prompts", "expected at least one prompt, and a unique id for each",
                               fix="give a prompt file")  # fmt: skip

    def setup(
        self, protocol: EngineProtocol, server: ServerIdentity, speculation: Speculation | None
    ) -> Setup:
        """What identifies a run of this plan.

        Args:
            protocol: which has identified the server.
            speculation: that it has found; None = the server uses no draft.

        Raises:
            MeasureError: the server is not what is expected.
        """
        if self.model is not None and server.model != self.model:
            raise MeasureError(
                "--model",
                f"expected {short(self.model)}, the server has {short(server.model)}",
                fix="give the --server of that model",
            )
        if self.draft is not None:
            if speculation is None:
                raise MeasureError(
                    "--draft",
                    "the server uses no draft",
                    fix="start it with this draft, or leave --draft out",
                )
            speculation = identified(speculation, self.draft, server)
        most = protocol.most_in_flight
        decoding = self.ask.decoding
        asked = Asked(
            prompts_sha256=prompts_sha256(
                (prompt.id, prompt.category, prompt_sha256(prompt.token_ids))
                for prompt in self.prompts
            ),
            template_sha256=self.template_sha256,
            temperature=decoding.temperature,
            top_p=decoding.top_p,
            top_k=decoding.top_k,
            seed=decoding.seed,
            max_new_tokens=self.ask.max_new_tokens,
            ignore_eos=self.ask.ignore_eos,
            concurrency=self.concurrency if most is None else min(self.concurrency, most),
            num_warm_up=self.num_warm_up,
            num_top_logprobs=decoding.num_top_logprobs,
        )
        return Setup(
            server=server,
            speculation=speculation,
            asked=asked,
            draftquant=package_version("draftquant"),
        )
