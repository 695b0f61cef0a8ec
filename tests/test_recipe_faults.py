"""Faults in recipe files: class, `file:line: key: what` and fix, all of a file at once."""

from pathlib import Path
from typing import NamedTuple

import pytest
from draftquant.recipes import RecipeError, load_recipe
from draftquant.recipes.library import RecipeFileError

GOOD = """\
schema_version: 1
name: mine
summary: a test
loads_on: {engine: vllm, arch: sm90, family: dflash}
backend: torch
layout: quark
weights: {dtype: int4, granularity: channel, symmetric: true}
activations: null
algorithm: {scale: absmax, rounding: nearest}
rules:
  - {role: [attention, mlp], action: quantize}
  - {role: norm, action: keep, why: small}
expect: {quantized_per_layer: 7}
gate: {policy: release}
"""


class Fault(NamedTuple):
    """`old` of GOOD becomes `new`; the error is on `line`, says `what` and offers `fix`."""

    old: str
    new: str
    line: int
    what: str
    fix: str


FAULTS = {
    "misspelled key": Fault("summary:", "sumary:", 3, "sumary: unknown key", "'summary'?"),
    "missing key": Fault("summary: a test\n", "", 1, "summary: missing key", "add 'summary:'"),
    "too many digits": Fault("layer: 7", "layer: " + "9" * 5000, 13, "a whole number", "write"),
    "other version": Fault("version: 1", "version: 2", 1, "expected 1, got 2", "write 1"),
    "unknown role": Fault("role: norm", "role: nrm", 12, "rules[1].role[0]: expected", "'norm'?"),
    "key twice": Fault("backend: torch", "name: other", 5, "name: key given twice", "keep one"),
    "anchor": Fault("a test", "&a test", 3, "anchors and aliases are not allowed", "write the"),
    "tag": Fault("a test", "!!python/name:os.system x", 3, "tags are not allowed", "remove"),
    "two documents": Fault("gate:", "---\ngate:", 14, "not YAML: but found another doc", "correct"),
    "role in two rules": Fault("role: norm", "role: mlp", 1, "role 'mlp' is claimed twice", "READ"),
    "group without a size": Fault("channel", "group", 7, "group_size: int4 per group needs", "RE"),
    "other name": Fault("name: mine", "name: other", 2, "name: expected 'mine', got", "name: mine"),
}  # fmt: skip


def saved(folder: Path, text: str, name: str = "mine") -> Path:
    path = folder / f"{name}.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_faults_are_named_with_file_line_and_fix(tmp_path: Path) -> None:
    assert load_recipe(saved(tmp_path, GOOD)).name == "mine"
    for fault in FAULTS.values():
        assert GOOD.count(fault.old) >= 1
        path = saved(tmp_path, GOOD.replace(fault.old, fault.new, 1))
        with pytest.raises(RecipeFileError) as caught:
            load_recipe(path)
        (problem,) = [p for p in caught.value.problems if fault.what in p.what]
        assert (problem.file, problem.line) == (str(path), fault.line)
        assert fault.fix in problem.fix
        assert f"{path}:{fault.line}: {problem.what}\n  fix: {problem.fix}" in str(caught.value)


def test_faults_are_reported_together_in_the_order_of_lines(tmp_path: Path) -> None:
    text = GOOD.replace("gate:", "gaet:").replace("int4", "int5").replace("layer: 7", "layer: x")
    path = saved(tmp_path, text.replace("backend: torch", "backend: torch\nbackend: quark"))
    with pytest.raises(RecipeFileError) as caught:
        load_recipe(path)
    found = [(p.line, p.what.partition(":")[0]) for p in caught.value.problems]
    keys = ["gate", "backend", "weights.dtype", "expect.quantized_per_layer", "gaet"]
    assert found == list(zip([1, 6, 8, 14, 15], keys, strict=True))
    assert str(caught.value).count("\n  fix: ") == 5


# Files that are no recipe, or extend what is none


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"just text\n", "expected a mapping of recipe keys"),
        (b"\x7fELF\x02\x01\x01\x00", "not YAML"),
        (b"name: caf\xe9\n", "cannot be read: 'utf-8' codec"),
        (b"[" * 2000 + b"]" * 2000, "nested too deeply"),
        (b"extends: fp8-ptcp\nname: mine\n", "did you mean 'fp8-ptpc'?"),
        (b"extends: [fp8-ptpc]\nname: mine\n", "expected one recipe name"),
        (b"extends: middle.yaml\nname: mine\n", "'middle.yaml' extends another recipe itself"),
        (b"extends: fp8-ptpc\nname: mine\ngate: {policy: x, policy: y}\n", "given twice\n  fix: "),
        (b"extends: base.yaml\nname: mine\nbackend: trch\n", "base.yaml:7: weights.dtype: exp"),
    ],
    ids=range(9),
)
def test_file_that_is_no_recipe(content: bytes, what: str, tmp_path: Path) -> None:
    saved(tmp_path, "extends: fp8-ptpc\nname: middle\n", "middle")
    saved(tmp_path, GOOD.replace("int4", "int5").replace("mine", "base"), "base")
    path = tmp_path / "mine.yaml"
    path.write_bytes(content)
    with pytest.raises(RecipeError, match=r"\n  fix: ") as caught:
        load_recipe(path)
    assert str(path) in str(caught.value)
    assert what in str(caught.value)
