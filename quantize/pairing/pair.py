"""What is asked about a pair, and what `check_pair` answers."""

import json
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, get_args

from typing_extensions import override

from ...recipes.brief import Brief
from ...recipes.errors import CheckpointError, reason, short
from ...recipes.strict_json import JsonProblem, parse_json
from ..drafts import Family
from ..drafts.geometry import Geometry
from ..engines.contract import EXIT_CODES, FROM_WORST, TITLES, EngineCheck, EngineName, Verdict
from ..engines.versions import ENGINES
from ..files.checkpoint import Checkpoint
from .target import Rotation, Target, Tokenizer

_KEYS = {
    flag: key
    for engine in ENGINES.values()
    for key, flags in engine.flags.items()
    for flag in flags
}
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
"""Values that `--dtype` of vLLM 0.33 (`ModelDType`, `config/model.py`) and of SGLang 0.5.23
(`server_args.py`) accept, with one name each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetArgs:
    """The flags of a target's launch line that matter to its draft; None = not given.

    Attributes:
        draft_cache_dtype: SGLang's flag for the draft.
        words: all other arguments, which a launch line repeats.
    """

    quantization: str | None = None
    dtype: str | None = None
    cache_dtype: str | None = None
    context: int | None = None
    tp: int | None = None
    draft_cache_dtype: str | None = None
    words: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str | None) -> "TargetArgs":
        """Read the words of a command line; CheckpointError if something is wrong with them."""
        try:
            words = shlex.split(text or "")
        except ValueError as exc:
            raise _wrong(f"are no words of a shell: {exc}") from exc
        flags, others = _flags(words)
        dtype, cache = flags.get("dtype", "auto"), flags.get("cache_dtype")
        cached = _object(flags, "speculative").get("kv_cache_dtype")
        if dtype not in _DTYPES:
            expected = f"expected one that engines take ({', '.join(_DTYPES)})"
            raise _wrong(f"--dtype: {expected}, got {short(dtype)}")
        return cls(
            quantization=flags.get("quantization"),
            dtype=_DTYPES[dtype],
            cache_dtype=None if cache == "auto" else cache,
            context=_number(flags, "context"),
            tp=_number(flags, "tp"),
            draft_cache_dtype=flags.get("draft_cache_dtype") or (str(cached) if cached else None),
            words=others,
        )


def tensor_parallel_size(tp: int | None, args: TargetArgs) -> int:
    """Number of parts into which a target, and its draft, are split; 1 by default."""
    if tp is not None and tp < 1:
        what = f"expected a number of GPUs, at least 1, got {tp}"
        raise CheckpointError("--tp", what, fix="leave it out for one GPU")
    if tp is not None and args.tp is not None and tp != args.tp:
        what = f"--tp is {tp}, and --target-args says {args.tp}"
        raise CheckpointError("--tp", what, fix="leave one of the two out")
    return args.tp or tp or 1


def _flags(words: list[str]) -> tuple[dict[str, str], tuple[str, ...]]:
    flags, others, waiting = dict[str, str](), list[str](), iter(words)
    for word in waiting:
        name, given, value = word.partition("=")
        if name not in _KEYS:
            others.append(word)
        elif (argument := value if given else next(waiting, None)) is None:
            raise _wrong(f"{name} has no value")
        else:
            flags[_KEYS[name]] = argument
    return flags, tuple(others)


def _flag(key: str) -> str:
    return next(flag for flag in _KEYS if _KEYS[flag] == key)


def _number(flags: Mapping[str, str], key: str) -> int | None:
    text = flags.get(key)
    if text is None or text in ("-1", "auto"):
        return None
    times = _THOUSANDS.get(text[-1:], 1)
    digits = text[:-1] if times > 1 else text
    if not digits.isdecimal() or len(digits) > _MOST_DIGITS or int(digits) < 1:
        expected = f"expected a whole number above 0 of at most {_MOST_DIGITS} digits"
        raise _wrong(f"{_flag(key)}: {expected}, got {short(text)}")
    return int(digits) * times


def _object(flags: Mapping[str, str], key: str) -> Mapping[str, object]:
    if key not in flags:
        return {}
    try:
        value = parse_json(flags[key])
    except JsonProblem as exc:
        raise _wrong(f"{_flag(key)}: not readable as JSON: {reason(exc)}") from exc
    if not isinstance(value, dict):
        raise _wrong(f"{_flag(key)}: expected a JSON object, got {json.dumps(value)}")
    return value


def _wrong(what: str) -> CheckpointError:
    example = "--quantization fp8 --max-model-len 32768"
    return CheckpointError("--target-args", what, fix=f"give one string, such as '{example}'")


Level = Literal["refused", "wrong", "unknown", "warning", "note"]
LEVELS: tuple[Level, ...] = get_args(Level)
"""In the order of reports. A warning is about what happens without the printed launch
line, or may happen; like a note it does not change the verdict."""
_OF_LEVELS: Mapping[Level, Verdict] = {
    "refused": "REFUSED",
    "wrong": "LOADS BUT WRONG",
    "unknown": "UNKNOWN",
}


class PairFinding(NamedTuple):
    """One thing about a pair.

    Attributes:
        level: refused = the engine ends with an error; wrong = it serves, and few tokens are
            accepted; unknown = one of these may happen; a warning is about what happens without the
            launch line, or may happen.
        subject: what it is about, in one word for machines.
        engine: None = every engine.
    """

    level: Level
    subject: str
    text: str
    remedy: str = ""
    engine: EngineName | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A draft beside a target, and how to serve them.

    Attributes:
        draft: config and headers; for a layer inside its target's folder those of the layer.
        config: the draft's config.json, a multimodal target's with its text section.
        own_tokenizer, target_tokenizer: of the two folders; None where one has none.
        largest_feature: magnitude among recorded hidden states of the target; None = none given.
    """

    draft: Checkpoint
    config: Mapping[str, Any]
    family: Family
    geometry: Geometry
    target: Target
    args: TargetArgs
    tp: int
    own_tokenizer: Tokenizer | None = None
    target_tokenizer: Tokenizer | None = None
    largest_feature: float | None = None

    @property
    def rotation(self) -> Rotation:
        """How the draft rotates positions, and for how many it is made."""
        return Rotation.of(self.config)

    @property
    def is_mtp(self) -> bool:
        """Whether the draft is an MTP layer, in a folder of its own or in its target's."""
        return self.family.engine_traits.is_mtp

    @property
    def is_inside(self) -> bool:
        """Whether the draft is in its target's folder."""
        return self.draft.subtree is not None

    @property
    def is_whole_model(self) -> bool:
        """Whether the draft is an ordinary language model."""
        return self.family.engine_traits.whole_model


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePair:
    """What one engine does with a pair.

    Attributes:
        answer: what it does with the draft alone, its layers numbered after this target's.
        findings: findings on the pair, the decisive one first, including those for every engine.
        launch: the whole command that serves the pair.
    """

    answer: EngineCheck
    findings: tuple[PairFinding, ...]
    launch: str | None

    @property
    def verdict(self) -> Verdict:
        """The worse of the draft's own and the pair's."""
        verdicts = [_OF_LEVELS[each.level] for each in self.findings if each.level in _OF_LEVELS]
        return min([self.answer.verdict, *verdicts], key=FROM_WORST.index)

    @property
    def judged(self) -> EngineCheck:
        """The answer for the draft alone, or where its target makes it worse, for the pair."""
        if self.verdict == self.answer.verdict:
            return self.answer
        worst = self.findings[0]
        return replace(
            self.answer, verdict=self.verdict, error=worst.text, remedy=worst.remedy, launch=None
        )

    def to_mapping(self) -> dict[str, Any]:
        """What `--json` prints for it."""
        alone = self.answer
        return {
            "engine": alone.engine,
            "version": alone.version,
            "gpu": alone.gpu,
            "verdict": self.verdict,
            "draft_alone": {
                "verdict": alone.verdict,
                "findings": [finding._asdict() for finding in alone.findings],
                "notes": list(alone.notes),
            },
            "findings": [finding._asdict() for finding in self.findings],
            "launch": self.launch,
            "launch_note": alone.launch_note if self.launch else None,
        }


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class PairCheck(Brief):
    """What engines do with a draft beside its target.

    Attributes:
        draft, target: their names in the launch lines.
        engines: an answer for each engine that was asked, for each of its GPUs where they differ.
        findings: all of them, each once, the worst first.
        tensor_parallel: sizes up to 16 that both allow.
        not_compared: what could not be compared, one sentence each.
    """

    draft: str
    target: str
    engines: tuple[EnginePair, ...]
    findings: tuple[PairFinding, ...]
    tensor_parallel: tuple[int, ...]
    not_compared: tuple[str, ...] = ()

    @property
    def verdict(self) -> Verdict:
        """With one engine its verdict; with several the best: the pair can be served there."""
        return max((each.verdict for each in self.engines), key=FROM_WORST.index)

    @property
    def remedy(self) -> str | None:
        """What to do about the worst finding; None where nothing is refused or wrong."""
        bad = (each for each in self.findings if each.level in ("refused", "wrong"))
        return next((each.remedy for each in bad), None)

    @property
    def exit_code(self) -> int:
        """0 an engine loads the pair, 1 REFUSED or LOADS BUT WRONG in all, else 3."""
        return EXIT_CODES[self.verdict]

    def of(self, engine: EngineName) -> EnginePair:
        """One engine's answer."""
        return next(each for each in self.engines if each.answer.engine == engine)

    def to_mapping(self) -> dict[str, Any]:
        """What `--json` prints."""
        return {
            "draft": self.draft,
            "target": self.target,
            "verdict": self.verdict,
            "engines": [each.to_mapping() for each in self.engines],
            "tensor_parallel": list(self.tensor_parallel),
            "not_compared": list(self.not_compared),
        }

    @override
    def brief(self) -> Mapping[str, object]:
        titles = [TITLES[e.answer.engine] for e in self.engines]
        each = {
            title if titles.count(title) == 1 else f"{title} on {e.answer.gpu}": e.verdict
            for title, e in zip(titles, self.engines, strict=True)
        }
        return {"verdict": self.verdict, **each, "remedy": self.remedy}


def in_order(findings: Iterable[PairFinding]) -> tuple[PairFinding, ...]:
    """Each finding once, the worst first."""
    return tuple(sorted(dict.fromkeys(findings), key=lambda each: LEVELS.index(each.level)))
