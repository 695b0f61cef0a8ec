"""A matrix: which servers are started, and how each is measured. The keys of a YAML file.

    schema_version: 1
    engine: vllm
    target: /models/kimi-k2.5
    prompts: prompts.jsonl
    max_new_tokens: 512
    command: >-
      python -m vllm.entrypoints.openai.api_server --model {target} --host {host} --port {port}
    variants:
      - name: none
      - name: bf16
        draft: /drafts/bf16
        arguments: >-
          --speculative-config '{"method":"eagle3","model":"{draft}","num_speculative_tokens":3}'

All variants share one command: they differ by what their arguments and environment say. Nothing
is run by a shell; its quotes are understood. Paths are those of the folder that it is started in.
"""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

from yaml.nodes import MappingNode, Node, SequenceNode

from ...calibration.errors import TraceError
from ...recipes.decode import nearest
from ...recipes.recipe_file import Problem, RecipeFileError, compose, decode
from ..measure.measurement import EngineName

if TYPE_CHECKING:
    from ...calibration.recording.decoding import Decoding

PLACEHOLDERS = ("target", "draft", "host", "port")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)
_PLACEHOLDER = re.compile(r"\{([A-Za-z_]\w*)\}", re.ASCII)
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_MOST = 100_000
"""Of anything that is counted: more is a slip of the key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A server of the matrix.

    Attributes:
        name: of its files: letters, digits, ".", "_" and "-".
        draft: folder or Hub id that "{draft}" stands for; None = the server drafts nothing.
        served_as: what the server calls it, where that is another name (as in a container).
        arguments: behind the command. environment: beside the matrix's, and before it.
    """

    name: str
    draft: str | None = None
    served_as: str | None = None
    arguments: str = ""
    environment: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """Every variant is measured at every concurrency, as often as `repeats` says.

    Attributes:
        target: folder or Hub id that "{target}" stands for.
        prompts: file, see `read_prompts`; of text or messages `target` has the tokenizer.
        max_new_tokens: per prompt at most; exactly, if `ignore_eos`.
        temperature: 0 = greedy. top_p, top_k, seed: of the draws, see `Decoding`.
        num_top_logprobs: most likely tokens asked for at each place, for `parity`; they cost speed.
        command: starts a server, in words as a shell splits them.
        environment: variables that every server gets beside those of this process.
        variants: in the order in which they take turns. Speed-ups are against the one without a
            draft; of the others the first is the one that drafts are compared with.
        concurrencies: requests in flight. num_warm_up: requests before those that count.
        repeats: starts of each server. They alone tell what a server's speed varies by.
        start_seconds: until a server answers. stop_seconds: from SIGTERM to SIGKILL.
    """

    schema_version: Literal[1] = 1
    engine: EngineName
    target: str
    prompts: str
    max_new_tokens: int
    ignore_eos: bool = False
    temperature: float = 0
    top_p: float = 1
    top_k: int = 0
    seed: int = 0
    num_top_logprobs: int = 0
    command: str
    environment: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    host: str = "127.0.0.1"
    port: int = 8000
    variants: tuple[Variant, ...]
    concurrencies: tuple[int, ...] = (1, 2, 8, 40)
    repeats: int = 3
    num_warm_up: int = 8
    start_seconds: int = 1800
    stop_seconds: int = 60

    @property
    def url(self) -> str:
        """Where each server answers in its turn."""
        return f"http://{self.host}:{self.port}"

    @property
    def decoding(self) -> "Decoding":
        """How every server is asked to choose tokens.

        Raises:
            TraceError: a value is out of range, or says how to draw where nothing is drawn.
        """
        from ...calibration.recording.decoding import Decoding

        return Decoding(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            seed=self.seed,
            num_top_logprobs=self.num_top_logprobs,
        )

    def command_of(self, variant: Variant) -> tuple[str, ...]:
        """The words that start a server."""
        values = {
            "target": self.target,
            "draft": variant.draft or "",
            "host": self.host,
            "port": str(self.port),
        }
        # Once over each word: a path may hold braces of its own.
        return tuple(
            _PLACEHOLDER.sub(lambda found: values[found[1]], word)
            for word in (*shlex.split(self.command), *shlex.split(variant.arguments))
        )

    def environment_of(self, variant: Variant) -> dict[str, str]:
        """The variables that a server gets beside those of this process."""
        return {**self.environment, **variant.environment}


def load_matrix(path: Path) -> Matrix:
    """Read a matrix file.

    Raises:
        RecipeError: it cannot be read, or is no YAML mapping; RecipeFileError with every problem
            and its line.
    """
    node = compose(path, "matrix")
    matrix = decode(Matrix, node, explain=_explain)
    problems = [
        Problem(str(path), at.start_mark.line + 1, what, fix)
        for at, what, fix in (*_problems(matrix, node), *_variant_problems(matrix, node))
    ]
    if problems:
        raise RecipeFileError(problems)
    return matrix


def _explain(key: str, text: str) -> tuple[str, str] | None:
    if "environment." in key and text:
        return f"expected text, got {text!r}", f'quote it: "{text}"'
    return None


_Found = tuple[Node, str, str]


def _problems(matrix: Matrix, node: MappingNode) -> Iterator[_Found]:
    counts: dict[str, tuple[Sequence[int], int, int]] = {
        "max_new_tokens": ((matrix.max_new_tokens,), 1, 10 * _MOST),
        "num_top_logprobs": ((matrix.num_top_logprobs,), 0, 20),
        "port": ((matrix.port,), 1, 65535),
        "concurrencies": (matrix.concurrencies, 1, _MOST),
        "repeats": ((matrix.repeats,), 1, 1000),
        "num_warm_up": ((matrix.num_warm_up,), 0, _MOST),
        "start_seconds": ((matrix.start_seconds,), 1, _MOST),
        "stop_seconds": ((matrix.stop_seconds,), 1, _MOST),
    }
    for key, (values, least, most) in counts.items():
        for value in values:
            if not least <= value <= most:
                what = f"{key}: expected {least:,} to {most:,}, got {value:,}"
                yield _value(node, key), what, "correct the number"
    for doubled in sorted({c for c in matrix.concurrencies if matrix.concurrencies.count(c) > 1}):
        yield _value(node, "concurrencies"), f"concurrencies: {doubled} stands twice", "keep one"
    try:
        matrix.decoding  # noqa: B018 - checked by being made
    except TraceError as exc:
        key = str(exc.where).removeprefix("--").replace("-", "_")
        if key in ("temperature", "top_p", "top_k"):
            yield _value(node, key), f"{key}: {exc.what}", exc.fix
    if not re.fullmatch(r"[\w.:-]+", matrix.host, re.ASCII):
        what = f"host: expected a name or an address, got {matrix.host!r}"
        yield _value(node, "host"), what, "for example 127.0.0.1"
    yield from _command_problems(_value(node, "command"), "command", matrix.command, drafts=True)
    if not matrix.command.split():
        yield _value(node, "command"), "command: is empty", "write what starts a server"
    yield from _variable_problems(_value(node, "environment"), "environment", matrix.environment)
    if sum(variant.draft is None for variant in matrix.variants) > 1:
        what = "variants: more than one has no draft"
        yield _value(node, "variants"), what, "give the others a draft"


def _variant_problems(matrix: Matrix, node: MappingNode) -> Iterator[_Found]:
    listed = _value(node, "variants")
    nodes = listed.value if isinstance(listed, SequenceNode) else [listed]
    seen: set[str] = set()
    for i, (variant, at) in enumerate(zip(matrix.variants, nodes, strict=True)):
        key = f"variants[{i}]"
        name = _value(at, "name")
        if not _NAME.fullmatch(variant.name):
            what = f"{key}.name: {variant.name!r} cannot be a file name"
            yield name, what, 'use up to 64 letters, digits, ".", "_" and "-"'
        if variant.name in seen:
            yield name, f"{key}.name: {variant.name!r} stands twice", "name each variant once"
        seen.add(variant.name)
        arguments, drafts = _value(at, "arguments"), variant.draft is not None
        yield from _command_problems(
            arguments, f"{key}.arguments", variant.arguments, drafts=drafts
        )
        where = f"{key}.environment"
        yield from _variable_problems(_value(at, "environment"), where, variant.environment)
        if drafts and "{draft}" not in matrix.command + variant.arguments:
            what = f"{key}: its draft is nowhere in its command"
            yield at, what, "write {draft} where the server takes it"
        if not drafts and variant.served_as is not None:
            yield at, f"{key}.served_as: is given, but the variant has no draft", "add 'draft:'"
        if not drafts and "{draft}" in matrix.command:
            yield at, f"{key}: has no draft, and the command names {{draft}}", "give it a draft"


def _command_problems(at: Node, key: str, text: str, *, drafts: bool) -> Iterator[_Found]:
    try:
        words = shlex.split(text)
    except ValueError as exc:
        yield at, f"{key}: cannot be split into words: {exc}", "close the quotes, as in a shell"
        return
    if any("\0" in word for word in words):
        yield at, f"{key}: holds a NUL", "remove it"
    for name in dict.fromkeys(_PLACEHOLDER.findall(text)):
        if name not in PLACEHOLDERS:
            yield at, f"{key}: {{{name}}} stands for nothing", nearest(name, PLACEHOLDERS)
        elif name == "draft" and not drafts:
            yield at, f"{key}: names {{draft}}, and the variant has none", "add 'draft:'"


def _variable_problems(at: Node, key: str, variables: Mapping[str, str]) -> Iterator[_Found]:
    for name, value in variables.items():
        if not _VARIABLE.fullmatch(name) or "\0" in value:
            yield (
                at,
                f"{key}: {name!r} cannot be an environment variable",
                "use letters, digits and _",
            )


def _value(node: Node, key: str) -> Node:
    """What stands at a key; where it is left out, the mapping itself."""
    pairs = node.value if isinstance(node, MappingNode) else ()
    return next((value for name, value in pairs if name.value == key), node)
