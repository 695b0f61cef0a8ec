"""Runs the steps of a composite action as GitHub's runner does, as far as our action.yml needs it.

Each step is a script of bash. Expressions are names with dots.
"""

import dataclasses
import os
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

_EXPRESSION = re.compile(r"\$\{\{ ([\w.-]+) \}\}")


@dataclasses.dataclass(frozen=True)
class Run:
    """Exit code of the step that failed, outputs of the action, both streams of all steps."""

    code: int
    outputs: dict[str, str]
    log: str

    @property
    def obeyed(self) -> list[str]:
        """Lines that the runner takes for its commands, but those that stop and resume it.

        actions/runner, ActionCommand.TryParseV2 and TryParse, ActionCommandManager: `::name::` at a
        line's start, else `##[name]` anywhere in it; when stopped, the token as a name alone.
        """
        found, token = list[str](), ""
        for line in self.log.splitlines():
            names = token or "error|warning|notice|debug|group|endgroup|add-mask|set-output|set-env"
            names = names if token else f"{names}|stop-commands"
            command = re.match(rf"\s*::({names})(?: [^:]*)?::(.*)", line, re.IGNORECASE)
            command = command or re.search(rf"##\[({names})(?: [^\]]*)?\](.*)", line, re.IGNORECASE)
            if command is None:
                continue
            if not token and command[1] != "stop-commands":
                found.append(line)
            token = "" if token else command[2] * (command[1] == "stop-commands")
        return found


def run_action(
    file: Path,
    inputs: Mapping[str, str],
    *,
    cwd: Path,
    github: Mapping[str, str],
    environment: Mapping[str, str],
) -> Run:
    """Run an action's steps one after the other until one fails.

    `github` is the context of that name, `environment` of every step, beside what it declares.
    """
    action = yaml.safe_load(file.read_text(encoding="utf-8"))
    given = {f"github.{key}": value for key, value in github.items()}
    for name, declared in action["inputs"].items():
        given[f"inputs.{name}"] = inputs.get(name, str(declared.get("default", "")))
    assert set(inputs) <= set(action["inputs"])
    code, log = 0, ""
    for number, step in enumerate(action["runs"]["steps"]):
        output = cwd / f".output-{number}"
        output.write_text("", encoding="utf-8")
        finished = _bash(step, given, cwd, {**environment, "GITHUB_OUTPUT": str(output)})
        code, log = finished.returncode, log + finished.stdout
        for line in output.read_text(encoding="utf-8").splitlines():
            key, _, value = line.partition("=")
            given[f"steps.{step['id']}.outputs.{key}"] = value
        if code:
            break
    outputs = {name: _filled(each["value"], given) for name, each in action["outputs"].items()}
    return Run(code=code, outputs=outputs, log=log)


def _filled(text: str, given: Mapping[str, str]) -> str:
    """Text with its expressions replaced; what is not known is empty, as on GitHub."""
    return _EXPRESSION.sub(lambda match: given.get(match[1], ""), text)


def _bash(
    step: Mapping[str, Any], given: Mapping[str, str], cwd: Path, environment: Mapping[str, str]
) -> "subprocess.CompletedProcess[str]":
    assert step["shell"] == "bash"
    declared = {key: _filled(str(value), given) for key, value in step["env"].items()}
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
