"""`check` of folders that store scales of a KV cache, held against the engines' own loaders."""

import json
import sys
from pathlib import Path

import pytest
from draftquant.quantize.engines.contract import EngineName
from draftquant.quantize.engines.engine_check import check_draft

HERE = Path(__file__).parents[1] / "experiments" / "engines"
sys.path[:0] = [str(HERE), str(HERE / "foreign")]
import cache_scales  # noqa: E402

SAID = json.loads(cache_scales.OUT.read_text(encoding="utf-8"))
OFTEN = ("e3 compressed-tensors", "lm modelopt", "mimo quark", "qwen3 fp8")


def _cases() -> list[object]:
    return [
        case if case in OFTEN else pytest.param(case, marks=pytest.mark.slow)
        for case in cache_scales.CASES
    ]


def test_every_case_was_asked_of_both_engines() -> None:
    assert SAID.keys() == {f"{e} {case}" for e in ("vllm", "sglang") for case in cache_scales.CASES}
    drafts = ("e3", "dflash", "dspark")
    loads = {name for name, row in SAID.items() if row["verdict"] == "LOADS"}
    assert {n for n in SAID if n.split()[1] in drafts} <= loads  # both read every scale


@pytest.mark.parametrize("case", _cases())
def test_check_says_what_the_engines_do(case: str, tmp_path: Path) -> None:
    folder = cache_scales.write(case, tmp_path)
    engines: tuple[EngineName, ...] = ("vllm", "sglang")
    for engine in engines:
        answer = check_draft(folder, engine=engine, arch=cache_scales.ARCH, target_layers=None)
        row = SAID[f"{engine} {case}"]
        assert answer.verdict == row["verdict"], (engine, answer.error, row)
        if answer.verdict == "LOADS BUT WRONG":
            assert row["unread"][0] in str(answer.error)


def test_launch_lines_turn_the_cache_on(tmp_path: Path) -> None:
    folder = cache_scales.write("e3 compressed-tensors", tmp_path)
    vllm = check_draft(folder, engine="vllm", arch="sm90").launch
    sglang = check_draft(folder, engine="sglang", arch="sm90").launch
    assert '"kv_cache_dtype": "fp8"' in str(vllm)
    assert "--speculative-draft-kv-cache-dtype fp8_e4m3" in str(sglang)
    plain = check_draft(folder.parent / "plain", engine="vllm", arch="sm90").launch
    assert "kv_cache_dtype" not in str(plain)
