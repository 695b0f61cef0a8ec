"""How far a command says that it is: every phase rises to its total, and is told by name."""

from pathlib import Path
from typing import Any, ClassVar

import pytest
from draftquant.scripts.cli import main
from draftquant.scripts.frame import progress
from test_scenes import PAIR, PLAIN, said
from tiny_target import tiny_target
from told import check_told

pytestmark = pytest.mark.untold

COMMANDS = f"""\
quantize draft --recipe int4-channel-gptq --traces said --out gptq
quantize draft --recipe fp8-ptpc --vocab-size 24 --traces said --out cut
quantize draft --recipe blackwell-fp8 --kv-cache measured --traces said --out static
verify gptq --against draft
transcode cut --layout quark --out carried
dequantize gptq --out plain
quantize target --subtree model.mtp_layers.0 --recipe fp8-ptpc --out layer
graft target layer --replace --out grafted
vocab draft --traces said --size 24 --out rows
replay draft gptq --traces said -k 2 --batch-size 5
compare draft gptq plain --traces said -k 2
gate draft gptq --traces other -k 2
parity draft draft gptq --traces said -k 2
{PLAIN} --batch-size 2 --out recorded
traces merge said other --out both
"""


class Heard(progress.Phase):
    """A phase that is remembered, and never goes back or beyond its end."""

    phases: ClassVar[list["Heard"]] = []

    def __init__(self, *told: Any, **named: Any) -> None:
        super().__init__(*told, **named)
        self.phases.append(self)

    def move(self, done: int, total: int) -> None:
        assert self.done <= done <= (total or done), (self.label, self.done, done, total)
        super().move(done, total)


def test_every_phase_rises_to_its_total(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    said(tmp_path)
    tiny_target(tmp_path / "target", "mimo")
    monkeypatch.setattr(progress, "Phase", Heard)
    for number, line in enumerate(COMMANDS.splitlines(), 1):
        Heard.phases.clear()
        code = main(line.split())
        ends = [
            f"{one.label}: {one.done:,} of {one.total:,} {one.unit}"
            for one in Heard.phases
            if one.label
        ]
        name = line.replace(f"{PAIR}/", "")
        check_told("phases", {f"{number:02} {name}": "\n".join([f"exit code {code}", *ends])})
