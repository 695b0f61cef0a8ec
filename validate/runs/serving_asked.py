"""What is asked of servers, and of golden acceptance: records whose fields are options."""

import typing
from dataclasses import KW_ONLY, dataclass
from typing import Literal

from typing_extensions import override

from ...calibration.prompts.prompt_forms import ChosenPrompts
from ...quantize.files.hub import Reference
from ...quantize.files.report_files import check_reports
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


Form = Literal["vllm", "sglang", "tensorrt-llm", "prometheus"]
_OF_RULES = ("engine", "model", "category_label", "max_drop", "window")


@dataclass(frozen=True)
class GoldenRun(Heard):
    """Which golden acceptance becomes what, and for which traffic."""

    golden: AnyPath
    _: KW_ONLY
    to: Form | None = None
    category: str | None = None
    category_label: str | None = None
    engine: EngineName | None = None
    model: str | None = None
    max_drop: float = 0.01
    window: str = "1h"
    out: AnyPath | None = None
    overwrite: bool = False

    @override
    def check(self) -> None:
        for name in _OF_RULES:
            given = getattr(self, name) != self.__dataclass_fields__[name].default
            if given and self.to != "prometheus":
                option = f"--{name.replace('_', '-')}"
                raise GoldenError(option, "is for --for prometheus alone",
                                  fix="leave it out, or ask for what takes it")  # fmt: skip
        if self.model is not None and not (self.model and self.model.isprintable()):
            raise GoldenError(
                "--model",
                f"expected a name, got {self.model!r}",
                fix="give the name under which the target is served",
            )
        if self.to is None and self.out is not None:
            raise GoldenError(
                "--out",
                "needs --for, which says what to write",
                fix="add --for prometheus, for example",
            )
