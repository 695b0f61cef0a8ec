"""What the launch line of a target says, in the flags of any of the engines."""

import json
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ...recipes.errors import reason, short
from ...recipes.strict_json import JsonProblem, parse_json
from ..errors import CheckpointError

_SPELLINGS: Mapping[str, tuple[str, ...]] = {
    "quantization": ("--quantization", "-q"),
    "dtype": ("--dtype",),
    "cache_dtype": ("--kv-cache-dtype",),
    "context": ("--max-model-len", "--context-length", "--max_seq_len"),
    "tp": ("--tensor-parallel-size", "-tp", "--tp-size", "--tp", "--tp_size"),
    "draft_quantization": ("--speculative-draft-model-quantization",),
    "draft_cache_dtype": ("--speculative-draft-kv-cache-dtype",),
    "speculative": ("--speculative-config",),
    "overrides": ("--json-model-override-args", "--hf-overrides"),
}
_KEYS = {spelling: key for key, spellings in _SPELLINGS.items() for spelling in spellings}
_THOUSANDS = {"k": 1_000, "K": 1_024, "m": 1_000_000, "M": 1_048_576}
"""Suffixes of lengths that vLLM's command line takes."""


_MOST_DIGITS = 12
_DTYPES: Mapping[str, str | None] = {
    "auto": None,
    "half": "float16",
    "float16": "float16",
    "bfloat16": "bfloat16",
    "float": "float32",
    "float32": "float32",
}
"""What `--dtype` of vLLM 0.33 (`ModelDType`, `config/model.py`) and of SGLang 0.5.23
(`server_args.py`) takes, by one name each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetArgs:
    """The flags of a target's launch line that matter to its draft.

    Attributes:
        quantization, dtype, cache_dtype, context, tp: of the target; None = not given.
        draft_quantization, draft_cache_dtype: SGLang's flags for the draft.
        overrides: of the target's config.json.
        words: all others, which a launch line repeats.
    """

    quantization: str | None = None
    dtype: str | None = None
    cache_dtype: str | None = None
    context: int | None = None
    tp: int | None = None
    draft_quantization: str | None = None
    draft_cache_dtype: str | None = None
    overrides: Mapping[str, object] | None = None
    words: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str | None) -> "TargetArgs":
        """Read the words of a command line.

        Raises:
            CheckpointError: they are no words of a shell, a flag has no value, or no number stands
                where one is expected.
        """
        try:
            words = shlex.split(text or "")
        except ValueError as exc:
            raise _wrong(f"are no words of a shell: {exc}") from exc
        flags, others = _flags(words)
        speculative = _object(flags, "speculative")
        cached = speculative.get("kv_cache_dtype")
        return cls(
            quantization=flags.get("quantization"),
            dtype=_dtype(flags.get("dtype")),
            cache_dtype=flags.get("cache_dtype"),
            context=_number(flags, "context"),
            tp=_number(flags, "tp"),
            draft_quantization=flags.get("draft_quantization"),
            draft_cache_dtype=flags.get("draft_cache_dtype") or (str(cached) if cached else None),
            overrides=_object(flags, "overrides") or None,
            words=others,
        )


def tensor_parallel_size(tp: int | None, args: TargetArgs) -> int:
    """In how many parts a target is split, and its draft with it; 1 where nothing says it.

    Args:
        tp: as `--tp` says it.

    Raises:
        CheckpointError: both say it, and differ; or it is below 1.
    """
    if tp is not None and tp < 1:
        what = f"expected a number of GPUs, at least 1, got {tp}"
        raise CheckpointError("--tp", what, fix="leave it out for one GPU")
    if tp is not None and args.tp is not None and tp != args.tp:
        what = f"--tp is {tp}, and --target-args says {args.tp}"
        raise CheckpointError("--tp", what, fix="leave one of the two out")
    return args.tp or tp or 1


def _flags(words: list[str]) -> tuple[dict[str, str], tuple[str, ...]]:
    """The known flags by key, and the words that are none of them."""
    flags: dict[str, str] = {}
    others: list[str] = []
    waiting = iter(words)
    for word in waiting:
        name, given, value = word.partition("=")
        key = _KEYS.get(name)
        if key is None:
            others.append(word)
        else:
            flags[key] = value if given else _value(name, waiting)
    return flags, tuple(others)


def _value(name: str, waiting: Iterator[str]) -> str:
    value = next(waiting, None)
    if value is None:
        raise _wrong(f"{name} has no value")
    return value


def _number(flags: Mapping[str, str], key: str) -> int | None:
    text = flags.get(key)
    if text is None or text in ("-1", "auto"):
        return None
    times = _THOUSANDS.get(text[-1:], 1)
    digits = text[:-1] if times > 1 else text
    if not digits.isdecimal() or len(digits) > _MOST_DIGITS or int(digits) < 1:
        expected = f"expected a whole number above 0 of at most {_MOST_DIGITS} digits"
        raise _wrong(f"{_SPELLINGS[key][0]}: {expected}, got {short(text)}")
    return int(digits) * times


def _dtype(text: str | None) -> str | None:
    """By one name each; None = the engine chooses."""
    if text is None:
        return None
    if text not in _DTYPES:
        known = ", ".join(_DTYPES)
        raise _wrong(f"--dtype: expected one that engines take ({known}), got {short(text)}")
    return _DTYPES[text]


def _object(flags: Mapping[str, str], key: str) -> Mapping[str, object]:
    if key not in flags:
        return {}
    try:
        value = parse_json(flags[key])
    except JsonProblem as exc:
        raise _wrong(f"{_SPELLINGS[key][0]}: not readable as JSON: {reason(exc)}") from exc
    if not isinstance(value, dict):
        raise _wrong(f"{_SPELLINGS[key][0]}: expected a JSON object, got {json.dumps(value)}")
    return value


def _wrong(what: str) -> CheckpointError:
    example = "--quantization fp8 --max-model-len 32768"
    return CheckpointError("--target-args", what, fix=f"give one string, such as '{example}'")
