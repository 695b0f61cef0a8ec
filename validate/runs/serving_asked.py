"""What is asked of servers, and of golden acceptance: records whose fields are options."""

import typing
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Literal

from typing_extensions import override

from ...calibration.prompts.prompt_forms import ChosenPrompts
from ...quantize.files.hub import Reference
from ...quantize.files.report_files import check_place, check_reports
from ...recipes.errors import GoldenError, MeasureError
from ...recipes.listener import Heard
from ...recipes.regular_file import AnyPath
from ..measure.measurement import EngineName
from .judging_asked import given

_NEEDED = {
    "server": "--server http://HOST:PORT",
    "engine": f"--engine {' or '.join(typing.get_args(EngineName))}, as the server runs",
    "prompts": "--prompts FILE",
    "out": "--out FILE",
}


@dataclass(frozen=True)
class MeasureRun(ChosenPrompts):
    """Which server is asked what, or which measurement is shown."""

    _: KW_ONLY
    server: str | None = None
    engine: EngineName | None = None
    prompts: AnyPath | None = None
    out: AnyPath | None = None
    show: AnyPath | None = None
    tokenizer: AnyPath | None = None
    draft: Reference | None = None
    served_as: str | None = None
    model: str | None = None
    max_new_tokens: int = 128
    ignore_eos: bool = False
    temperature: float = 0
    top_p: float = 1
    top_k: int = 0
    seed: int = 0
    top_logprobs: int = 0
    concurrency: int = 8
    warm_up: int = 0
    max_requests_per_second: float | None = None
    timeout: float = 600
    attempts: int = 6
    golden: AnyPath | None = None
    overwrite: bool = False

    @override
    def check(self) -> None:
        check_reports(given({"golden": self.golden}), overwrite=self.overwrite)
        if self.show is not None:
            return
        if self.served_as is not None and not self.draft:
            raise MeasureError("--served-as", "is another name of --draft", fix="add --draft DRAFT")
        missing = [name for name in _NEEDED if getattr(self, name) is None]
        if missing:
            fix = f"give {_NEEDED[missing[0]]}; or --show MEASUREMENT to look at one"
            raise MeasureError(f"--{missing[0]}", "is needed to measure a server", fix=fix)


Form = Literal["profile", "vllm", "sglang", "tensorrt-llm", "dynamo"]


@dataclass(frozen=True)
class GoldenRun(Heard):
    """Which acceptance becomes what, and for which traffic."""

    golden: AnyPath
    _: KW_ONLY
    to: Form | None = None
    category: str | None = None
    out: AnyPath | None = None
    overwrite: bool = False

    @override
    def check(self) -> None:
        if self.category is not None and self.to == "profile":
            raise GoldenError("--category", "is for load tests: a profile has all categories",
                              fix="leave it out")  # fmt: skip
        if self.to is None and self.out is not None:
            raise GoldenError("--out", "needs --for, which says what to write",
                              fix="add --for profile, for example")  # fmt: skip
        if self.out is not None:
            check_place(Path(self.out), overwrite=self.overwrite)
