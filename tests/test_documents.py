"""What strict decoding makes of every kind of value, and the words of errors, briefs and files."""

import json
import logging
import math
import pickle
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, Literal

import pytest
from draftquant.recipes import brief as briefs
from draftquant.recipes import errors as said
from draftquant.recipes import load_recipe, to_mapping
from draftquant.recipes.chosen_recipe import named_recipe
from draftquant.recipes.decode import Bounds, Spelled, encode, problem_of, walk
from draftquant.recipes.library import calibrated, recipe_file, recipe_of_alias
from draftquant.recipes.listener import SILENT, Heard, beyond_kept, verifying
from draftquant.recipes.packages import package_version
from draftquant.recipes.python_values import PythonValue
from draftquant.recipes.regular_file import looks_like_weights
from draftquant.recipes.strict_json import JsonProblem, decode, parse_json, parse_object
from told import check_told

# ---- decoding: a record with a field of every kind, given every kind of value


@dataclass(frozen=True, kw_only=True)
class Inner:
    k: Annotated[int | None, Bounds(least=1, most=1024)] = None
    also: str = "x"

    def problem(self) -> str | None:
        return "also: not this" if self.also == "bad" else None


@dataclass(frozen=True, kw_only=True)
class First:
    kind: Literal["first"] = "first"
    one: int


@dataclass(frozen=True, kw_only=True)
class Second:
    kind: Literal["second"] = "second"
    two: bool = False


@dataclass(frozen=True, kw_only=True)
class Every:
    version: Literal[1] = 1
    whole: int = 0
    number: float = 0.5
    text: str = ""
    flag: bool = False
    anything: object = None
    maybe: int | None = None
    choice: Literal["a", "b"] = "a"
    wholes: tuple[Annotated[int, Bounds(least=0)], ...] = ()
    numbers: Sequence[float] = ()
    texts: tuple[str, ...] = ()
    by_name: Mapping[str, int] = field(default_factory=dict)
    by_number: Mapping[int, str] = field(default_factory=dict)
    either: int | str = 0
    path: Path = Path("p")
    share: Annotated[float, Bounds(above=0, below=1)] = 0.5
    digest: Annotated[str, Spelled("[0-9a-f]{4}", "4 hex digits")] = "abcd"
    inner: Inner | None = None
    told_apart: First | Second = Second()
    inners: tuple[Inner, ...] = ()


VALUES: tuple[Any, ...] = (
    None, True, 0, 1, 2, -1, 1.5, math.nan, math.inf, 10**400, "a", "", "abcd", "x" * 70, [], [1],
    [1, 2.5], ["a"], [True], [-1], [math.inf], [[1]], {}, {"a": 1}, {"1": "a", "01": "b"}, {"k": 3},
    {"k": 0}, {"also": "bad"}, {"kind": "first"}, {"kind": "first", "one": 2}, {"kind": "third"},
    {"kind": "second", "two": 1}, [{"k": 2}, {"k": 2000}], {"one": 1}, {"n": math.nan},
)  # fmt: skip


def attempt(do: Callable[[], object]) -> str:
    """What a call gives or says."""
    try:
        return repr(do())
    except JsonProblem as exc:
        return f"! {exc}"
    except said.DraftQuantError as exc:
        return f"! {exc.where}: {exc.what} [{exc.fix}] {list(exc.details)}"
    except OSError as exc:
        return f"! {exc}"


def each(do: Callable[[Any], object], *values: Any) -> list[Any]:
    """What a call makes of values."""
    return [do(value) for value in values]


def _python(keys: Mapping[str, Any]) -> object:
    value, misfits = walk(Every, PythonValue(keys))
    return [f"{one}; {one.fix}" for one in misfits] or encode(value)


def decoding() -> dict[str, Any]:
    """Value by value, of JSON and of Python."""
    found: dict[str, Any] = {}
    for name, value in product(Every.__dataclass_fields__, VALUES):
        keys = {"version": 1, name: value}
        of_json = attempt(lambda k=keys: encode(decode(Every, k)))
        found.setdefault(name, {})[_shown(value)] = [of_json, attempt(lambda k=keys: _python(k))]
    whole = ({}, {"version": 1, "wole": 1}, [], {"version": 2, "whole": "x", "flag": 1}, 7)
    found["whole"] = [attempt(lambda v=v: encode(decode(Every, v))) for v in whole]
    found["of Python"] = [attempt(lambda v=v: _python(v)) for v in whole]
    made = Every(inner=Inner(k=0), wholes=(1, -2), by_name={"a": 1})
    found["made"] = [str(problem_of(made)), str(problem_of(Every())), encode(made)]
    return found


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) < 80 else f"{text[:20]}... of {len(text)}"


TEXTS = (
    '{"a": 1, "a": 2}', "[1]", "{", '{"a": 1,}', "[1,]", "{'a': 1}", '{"a": None}', '{"a": True}',
    '{"a": [1,\n 2,]}', '{"a": False}', '"\\ud800"', '{"a": "\\ud83d\\ude00"}', '{"a": 1e400}',
    f'{{"a": {10**41}}}', f'{{"a": {10**40}}}', f'{{"a": -{10**41}}}', "[" * 101 + "]" * 101,
    "[" * 100 + "]" * 100, "nul", '{"a": NaN}', '{"a": Nonesense}',
)  # fmt: skip


def texts() -> dict[str, list[str]]:
    """Texts that are JSON, or hardly."""
    shown = {}
    for t in TEXTS:
        both = [attempt(partial(parse, t)) for parse in (parse_object, parse_json)]
        shown[_shown(t)] = [_shown(each) for each in both]
    many = [attempt(lambda n=n: parse_json("," * n)) for n in (2_000_000, 2_000_001)]
    return shown | {"many": many}


def bounds() -> dict[str, list[Any]]:
    """Ends, just inside and just outside."""
    every = (
        Bounds(least=1), Bounds(above=0), Bounds(above=0, below=1), Bounds(above=0.5, most=1),
        Bounds(least=0, below=1), Bounds(least=0.5, most=2), Bounds(least=1, most=9),
        Bounds(most=3),
    )  # fmt: skip
    tried = (
        -1, 0, 10**400, 1e-9, 0.5, 0.75, 1, 1 - 1e-9, 2, 3, 4, 9, 10, math.inf, -math.inf, math.nan,
    )  # fmt: skip
    return {str(one): [value for value in tried if not one.problem(value)] for one in every} | {
        "said": [every[0].problem(0), every[0].problem(None)],
        "refused": [attempt(lambda: every[0].check(said.PlanError, "--n", 0, fix="more"))],
        "spelled": each(Spelled("a+", "many a").problem, "aa", "ab", None, ("a",), ("a", "ab")),
    }  # fmt: skip


# ---- recipe files


GOOD = """\
schema_version: 1
name: mine
summary: SUMMARY
backend: BACKEND
layout: quark
weights: {dtype: DTYPE, granularity: channel, symmetric: SYMMETRIC}
activations: ACTIVATIONS
algorithm: {scale: SCALE, rounding: nearest}
rules:
  - {role: ROLE, action: quantize}
expect: {quantized_per_layer: LAYER}
gate: {policy: release}
"""
USUAL = {
    "SUMMARY": "a test", "BACKEND": "torch", "DTYPE": "int4", "SYMMETRIC": "true",
    "ACTIVATIONS": "null", "SCALE": "absmax", "ROLE": "[attention, mlp]", "LAYER": "7",
}  # fmt: skip
TRIED = {
    "SUMMARY": ("yes", "1.5", "2020-01-01", "null", "", "[a]", "{a: b}", "'7'", "0x_", "~"),
    "BACKEND": ("modelopt", "trch"),
    "DTYPE": ("int8", "bf16", "on"),
    "SYMMETRIC": ("1", "'true'", "no", ""),
    "ACTIVATIONS": ("", "[]", "{dtype: fp8_e4m3, granularity: token, dynamic: true}", "none"),
    "SCALE": ("awq", "mse", "off"),
    "ROLE": ("mlp", "[]", "[mlp, [mlp]]", "[other, {a: b}]"),
    "LAYER": ("0", "1.0", "0x10", "true", "9" * 41, "-1", "1_0"),
}

FAULTS: tuple[dict[str, str], ...] = (
    {"summary:": "sumary:"}, {"summary: a test\n": ""}, {"version: 1": "version: 2"},
    {"backend: torch": "name: other"}, {"a test": "&a test"}, {"name: mine": "name: other"},
    {"a test": "!!python/name:os.system x"}, {"gate:": "---\ngate:"}, {"channel": "group"},
    {"rules:": "rules:\n  - {role: mlp, action: keep, why: a}"}, {"role: [": "role: [nrm, "},
    {"gate:": "gaet:", "int4": "int5", "layer: 7": "layer: x",
     "backend: torch": "backend: torch\nbackend: quark"},
)  # fmt: skip
CONTENTS = (
    b"just text\n", b"\x7fELF\x02\x01\x01\x00", b"name: caf\xe9\n", b"[" * 2000 + b"]" * 2000,
    b"extends: fp8-ptcp\nname: mine\n", b"extends: [fp8-ptpc]\nname: mine\n",
    b"extends: middle.yaml\nname: mine\n",
    b"extends: fp8-ptpc\nname: mine\ngate: {policy: x, policy: y}\n",
    b"extends: base.yaml\nname: mine\nbackend: trch\n",
)  # fmt: skip


def filled(**changed: str) -> str:
    """A recipe file, of which some values are others."""
    text = GOOD
    for name, value in (USUAL | changed).items():
        text = text.replace(name, value)
    return text


def recipes(folder: Path) -> dict[str, Any]:
    """Recipe files with one value changed, and names of recipes."""
    found: dict[str, Any] = {}

    def tell(name: str, content: str | bytes) -> None:
        path = folder / "mine.yaml"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        found[name] = attempt(lambda: load_recipe(path).summary)

    for key, values in TRIED.items():
        for value in values:
            tell(f"{key} {value[:20]}", filled(**{key: value}))
    (folder / "middle.yaml").write_text("extends: fp8-ptpc\nname: middle\n", encoding="utf-8")
    base = filled(DTYPE="int5").replace("mine", "base")
    (folder / "base.yaml").write_text(base, encoding="utf-8")
    for changes in FAULTS:
        text = filled()
        for old, new in changes.items():
            assert old in text
            text = text.replace(old, new, 1)
        tell(f"{changes}", text)
    for number, content in enumerate(CONTENTS):
        tell(f"content {number}", content)
    others = (folder, folder / "absent.yaml", folder / "folder.yaml", folder / "recipe.json")
    others[2].mkdir()
    others[3].write_text("{}", encoding="utf-8")
    names = (
        "H200", "W4A16", "nvfp4-learned", "fp8", "gb200", "a100", "sm90", "mi300", "w8a8", "x/y",
        "fp8-ptpc.yml", "fp8-ptcp", "zzz", "Learned", *map(str, others),
    )  # fmt: skip
    heard: list[str] = []
    found["names"] = {}
    for name in names:
        named = attempt(lambda n=name: named_recipe(n, _Hears(heard)).name)
        told = [named, recipe_of_alias(name), calibrated(name)]
        found["names"][name.replace(str(folder), "")] = told
    found["heard"] = heard
    own = to_mapping(load_recipe("fp8-ptpc"))
    for changes in ({}, {"layout": "quark"}, {"rules": own["rules"][:1]}, {"kv_cache": None}):
        recipe = named_recipe({**own, "name": "mine", **changes})
        found[f"file of {list(changes)}"] = recipe_file(recipe)
    extends = {"extends": "fp8-ptpc", "name": "other", "algorithm": {"scale": "mse"}}
    of_keys = (
        {}, {"layer": 1}, {"algorithm": {"rounding": "awq"}},
        {"backend": "modelopt", "algorithm": {"rounding": "learned"}},
    )  # fmt: skip
    found["keys"] = [
        attempt(lambda k=keys: named_recipe({**extends, **k}).algorithm) for keys in of_keys
    ]
    return json.loads(json.dumps(found).replace(str(folder), ""))  # type: ignore[no-any-return]


# ---- words


NAMES = (
    "model.safetensors", "a.BIN", "x.pt", "mask_embedding.pt", "sub/mask_embedding.pt", "a.json",
    "model.safetensors.index.json", "pytorch.bin.index.json", "a.gguf", "a.onnx_data", "a.txt",
    "bin", "a.ckpt", "a.ggml", "a.h5", "a.joblib", "a.msgpack", "a.npy", "a.npz", "a.onnx", "a.pt2",
    "a.pickle", "a.pkl", "a.pth", "a.tflite",
)  # fmt: skip


class _Hears(type(SILENT)):  # type: ignore[misc]
    def __init__(self, heard: list[str]) -> None:
        self.heard = heard

    def line(self, text: str) -> None:
        self.heard.append(text)


class _Said(briefs.Brief):
    def __init__(self, *values: object) -> None:
        self.values = values

    def brief(self) -> Mapping[str, object]:
        return {f"figure {i}": value for i, value in enumerate(self.values)}


def words() -> dict[str, Any]:
    """Of errors and briefs."""
    error = said.PlanError("a\x1b", "b" * 4001, fix="c\n", details=["d"], ids=["i"])
    other = said.PlanError("--a", "b of --a", fix="use --a", details=["--a too"])
    other.move("a=")
    again = pickle.loads(pickle.dumps(error))  # noqa: S301 (our own)
    values = (0, 1, 2, 1234567)
    shown = _Said("PASS: <b>", None, Path("/a" * 200), "x" * 301, 1)
    near = (
        (0.5, None, ".1f"), (0.51, 0.52, ".1f"), (0.5, 0.5, ".1f"), (0.0123, 0.0124, "+.2%"),
        (1, 1 + 1e-12, ".1f"), (1, 1 + 1e-13, ".1f"),
    )  # fmt: skip
    sizes = (0, 49_999, 50_000, 9_999_999, 1e7, 12_345_678, 999_999_999, 1e9, 3.26e9)
    fields = error.where, len(error.what), error.fix, error.details, error.ids, len(str(error))
    same = type(again) is type(error), str(again) == str(error), again.__dict__ == error.__dict__
    long = "x" * 300, list(range(20)), {i: i for i in range(20)}, 10**60
    return {
        "error": fields,
        "again": same,
        "moved": [str(other), other.where, other.what, other.fix, other.details],
        "lines": each(said.first_line, ValueError(""), ValueError(" a\nb"), ValueError("c")),
        "short": each(said.short, *long),
        "reasons": each(said.reason, OSError(2, "No such file"), ValueError("x")),
        "visible": each(said.visible, "a", "é\t", "\u202e'\\"),
        "problem": [str(said.LineProblem("a", "b")), said.LineProblem("a", "b").fix],
        "counted": each(lambda n: briefs.counted(n, "thing"), *values),
        "first": each(lambda n: briefs.first_of("abcde"[:n], 3), *range(6)),
        "bytes": each(briefs.megabytes, *sizes),
        "percent": each(briefs.percent, None, 0, 0.1234567, -0.5),
        "apart": each(lambda one: briefs.apart(*one), *near),
        "brief": [repr(shown), repr(_Said("UNKNOWN, so", "y" * 80))],
        "table": [shown._repr_html_(), _Said("x")._repr_html_()[-60:]],
        "weights": [name for name in NAMES if looks_like_weights(name)],
        "version": package_version("no-such-package-anywhere"),
    }


def listened() -> dict[str, Any]:
    """What the log hears of a run, and what a bar is told."""
    heard: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda m: heard.append(f"{m.levelname} {m.getMessage()}")  # type: ignore[method-assign]
    log = logging.getLogger("draftquant")
    log.addHandler(handler)
    level = log.level
    log.setLevel(logging.DEBUG)
    try:
        with (
            SILENT.bar("load", 1234, "bytes") as bar,
            warnings.catch_warnings(record=True) as caught,
        ):
            warnings.simplefilter("always")
            bar.phase("more")
            bar.advance()
            bar.label("x")
            bar.set(1, 2)
            SILENT.stage("write")
            SILENT.line("a line")
            SILENT.note("a note")
            SILENT.warning("careful")
            told: list[Any] = []
            add = told.append
            recorder: Any = SimpleNamespace(set=lambda *a: add(a), phase=lambda *a: add(a))
            show, begin = beyond_kept(recorder, 1), verifying(recorder)
            for done in (4, 5, 9):
                show(done, 10)
            for stage in ("write", "verify"):
                begin(stage)
            Heard().check()
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
    warned = [[w.category.__name__, str(w.message), Path(w.filename).name] for w in caught]
    shown = {"measured": bar.measured, "silent": repr(SILENT)}
    return {"log": heard, "warned": warned, "bar": told, **shown}


def test_what_comes_of_every_kind_of_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for make in (decoding, texts, bounds, words, listened):
        check_told("documents", {make.__name__: make()})
    check_told("documents", {"recipes": recipes(tmp_path.resolve())})
