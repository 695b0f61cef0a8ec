"""What lm_eval should run against a server."""

import dataclasses
import itertools
import json
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

from typing_extensions import override

from ...recipes.errors import ParityError
from ...recipes.listener import Heard
from ...recipes.regular_file import AnyPath
from ...recipes.strict_json import parse_object
from ..measure.measurement import EngineName

_MAY_CHANGE = {
    "listener", "engine", "out", "lm_eval", "confirm_run_unsafe_code",
    "concurrency", "max_retries", "timeout",
}  # fmt: skip
"""Settings that may change when a run resumes: they change no answer, or are kept elsewhere."""


@dataclass(frozen=True)
class TaskRun(Heard):
    """What lm_eval should do; None = as the task, or the server, has it.

    Attributes:
        tokenizer: folder; None with `chat`, where the server has the template.
        chat: messages to /v1/chat/completions instead of text to /v1/completions.
        gen_kwargs: how to generate, as "KEY=VALUE,...".
        max_length: tokens of prompt and answer. timeout: seconds of a request.
        lm_eval: a name, a path or "PYTHON -m lm_eval".
    """

    server: str
    engine: EngineName
    tasks: Sequence[str]
    out: AnyPath
    _: KW_ONLY
    model: str | None = None
    tokenizer: AnyPath | None = None
    chat: bool = False
    include_path: AnyPath | None = None
    num_fewshot: int | None = None
    limit: int | None = None
    seed: int = 1234
    concurrency: int = 8
    max_retries: int = 5
    timeout: int = 600
    max_length: int = 4096
    gen_kwargs: str | None = None
    confirm_run_unsafe_code: bool = False
    lm_eval: str = "lm_eval"

    @override
    def check(self) -> None:
        for option, fits, what, fix in (
            ("--server", self.server.startswith(("http://", "https://")),
             f"expected an address, got {self.server}", "give http://HOST:PORT"),
            ("--tasks", self.tasks and all(self.tasks), "expected names with commas between",
             "such as gsm8k,humaneval"),
            ("--tokenizer", self.tokenizer or self.chat, "is needed to make prompts of text",
             "give the target's folder, or --chat"),
            ("--tokenizer", self.tokenizer is None or Path(self.tokenizer).is_dir(),
             f"{self.tokenizer} is no folder", "give a local folder"),
            ("--include-path", self.include_path is None or Path(self.include_path).is_dir(),
             f"{self.include_path} is no folder", "give a local folder"),
        ):  # fmt: skip
            if not fits:
                raise ParityError(option, what, fix=fix)

    def arguments(self, output: Path, cache: Path) -> list[str]:
        """The command line of lm_eval, without its own name."""
        address = "chat/completions" if self.chat else "completions"
        model: dict[str, object] = {
            "model": self.model,
            "base_url": f"{self.server.rstrip('/').removesuffix('/v1')}/v1/{address}",
            "num_concurrent": self.concurrency,
            "max_retries": self.max_retries,
            "timeout": self.timeout,
            "max_length": self.max_length,
            "seed": self.seed,
        }
        if self.tokenizer is not None:
            # By default lm_eval would ask the server for a tokenizer, if it has one to offer.
            model["tokenizer"] = str(Path(self.tokenizer).absolute())
            model["tokenizer_backend"] = "huggingface"
        options = {
            "--model": "local-chat-completions" if self.chat else "local-completions",
            "--model_args": json.dumps(model),
            "--tasks": ",".join(self.tasks),
            "--seed": self.seed,
            "--batch_size": 1,  # vLLM tells metrics of speculation for single prompts only
            "--output_path": output,
            "--use_cache": cache,
            "--num_fewshot": self.num_fewshot,
            "--limit": self.limit,
            "--gen_kwargs": self.gen_kwargs,
            "--include_path": self.include_path and Path(self.include_path).absolute(),
        }
        given = ((option, str(value)) for option, value in options.items() if value is not None)
        chat = ["--apply_chat_template"] if self.chat else []
        unsafe = ["--confirm_run_unsafe_code"] if self.confirm_run_unsafe_code else []
        return ["run", *itertools.chain(*given), "--log_samples", *chat, *unsafe]

    @property
    def plan(self) -> dict[str, Any]:
        """What must be equal for a run to resume; as JSON reads it again."""
        names = {each.name for each in dataclasses.fields(self)} - _MAY_CHANGE
        kept = {name: getattr(self, name) for name in names}
        kept["unsafe_code"] = self.confirm_run_unsafe_code
        return dict(parse_object(json.dumps(kept, default=str)))
