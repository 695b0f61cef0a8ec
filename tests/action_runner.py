"""Runs the steps of a composite action as GitHub's runner does, as far as our action.yml needs it.

Expressions are names with dots, `==`, `!=`, `&&` and text in quotes. A step with `uses` is not run;
what it was given is kept.
"""

import dataclasses
import os
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

_EXPRESSION = re.compile(r"\$\{\{ (.*?) \}\}")
_WORD = re.compile(r"'[^']*'|==|!=|&&|[\w.-]+")


@dataclasses.dataclass
class Run:
    """What a run left.

    Attributes:
        code: exit code of the step that failed, else 0.
        steps: names of those that ran.
        outputs: of the action.
        log: of all steps, both streams.
        used: name of a step with `uses` -> what it was given.
    """

    code: int = 0
    steps: list[str] = dataclasses.field(default_factory=list)
    outputs: dict[str, str] = dataclasses.field(default_factory=dict)
    log: str = ""
    used: dict[str, Mapping[str, str]] = dataclasses.field(default_factory=dict)


def run_action(
    file: Path,
    inputs: Mapping[str, str],
    *,
    cwd: Path,
    github: Mapping[str, str],
    environment: Mapping[str, str],
    only: str | None = None,
    before: Mapping[str, str] = MappingProxyType({}),
) -> Run:
    """Run an action's steps one after the other until one fails.

    Args:
        file: action.yml.
        inputs: what a workflow says under `with`.
        cwd: the workspace.
        github: the context `github`, keys with dots as they are asked for.
        environment: of every step, beside what it declares.
        only: the name of the one step to run, as if those before had been.
        before: what those gave, as `steps.gate.outputs.verdict`.
    """
    action = yaml.safe_load(file.read_text(encoding="utf-8"))
    given = {f"github.{key}": value for key, value in github.items()} | dict(before)
    for name, declared in action["inputs"].items():
        default = filled(str(declared.get("default", "")), given)
        given[f"inputs.{name}"] = inputs.get(name, default)
    assert set(inputs) <= set(action["inputs"])
    run = Run()
    for number, step in enumerate(action["runs"]["steps"]):
        if only not in (None, step["name"]):
            continue
        if "if" in step and not _holds(_EXPRESSION.fullmatch(step["if"])[1], given):  # type: ignore[index]
            continue
        run.steps.append(step["name"])
        if "uses" in step:
            run.used[step["name"]] = {k: filled(v, given) for k, v in step["with"].items()}
            continue
        output = cwd / f".output-{number}"
        output.touch()
        finished = _bash(step, given, cwd, {**environment, "GITHUB_OUTPUT": str(output)})
        run.log += finished.stdout
        run.code = finished.returncode
        if run.code:
            break
        for line in output.read_text(encoding="utf-8").splitlines():
            key, _, value = line.partition("=")
            given[f"steps.{step['id']}.outputs.{key}"] = value
    run.outputs = {name: filled(each["value"], given) for name, each in action["outputs"].items()}
    return run


def filled(text: str, given: Mapping[str, str]) -> str:
    """Text with its expressions replaced; what is not known is empty, as on GitHub."""
    return _EXPRESSION.sub(lambda match: given.get(match[1], ""), text)


def _bash(
    step: Mapping[str, Any], given: Mapping[str, str], cwd: Path, environment: Mapping[str, str]
) -> "subprocess.CompletedProcess[str]":
    assert step["shell"] == "bash"
    declared = {key: filled(str(value), given) for key, value in step.get("env", {}).items()}
    script = cwd / ".step.sh"
    script.write_text(step["run"], encoding="utf-8")
    return subprocess.run(
        ["bash", "--noprofile", "--norc", "-eo", "pipefail", str(script)],
        cwd=cwd,
        env={**os.environ, "LC_ALL": "C.UTF-8", **environment, **declared},  # a runner's own
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        check=False,
    )


def _holds(expression: str, given: Mapping[str, str]) -> bool:
    words = _WORD.findall(expression)
    assert "".join(words) == expression.replace(" ", ""), expression
    values = [word[1:-1] if word[0] == "'" else given.get(word, word) for word in words]
    assert values[3::4] == ["&&"] * len(values[3::4])
    compared = zip(values[0::4], values[1::4], values[2::4], strict=True)
    return all((left == right) is (sign == "==") for left, sign, right in compared)
