"""What a user of the wheel does first: run by the interpreter that it was installed for.

Usage: PYTHON -I tests/wheel_check.py, in an empty folder. A checkout is needed for the shipped pair
alone; what is imported is what was installed.
"""

import importlib.metadata
import importlib.util
import subprocess
import sys
import sysconfig
from pathlib import Path

PAIR = Path(__file__).parent / "pairs" / "eagle3-llama"
ABSENT = ("quantize", "recipes", "benchmarks", "draftquant.scripts.dev")


def main() -> None:
    """Import, quantize, verify, check, record, replay, judge, and write a card."""
    import draftquant
    from draftquant import api as dq

    home = Path(sysconfig.get_path("purelib")).resolve()
    assert Path(draftquant.__file__).resolve().is_relative_to(home), draftquant.__file__
    assert draftquant.__version__ == importlib.metadata.version("draftquant")
    assert "torch" not in sys.modules
    assert [name for name in ABSENT if importlib.util.find_spec(name)] == []

    lines = (PAIR / "prompts.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    Path("prompts.jsonl").write_text("".join(lines[:10]), encoding="utf-8")
    draft, target = PAIR / "draft", PAIR / "target"
    assert dq.quantize(draft, "int4-channel", "int4").verification.ok
    assert dq.verify("int4", draft).ok
    assert dq.check("int4", "vllm", gpu="h200").verdict == "LOADS"
    dq.record(target, "prompts.jsonl", "traces", draft=draft, max_new_tokens=48)
    bf16, int4 = dq.replay([draft, "int4"], "traces")
    assert 1 < int4.counts.mean_acceptance_length < 1.2 * bf16.counts.mean_acceptance_length
    assert dq.gate(draft, "int4", "traces", policy="screening").verdict
    assert "license: mit" in dq.card("int4", base_model="a/b", license="mit")

    for start in ([sys.executable, "-m", "draftquant"], [f"{sys.prefix}/bin/draftquant"]):
        for arguments in (["--help"], ["recipes", "list"], ["inspect", str(draft)]):
            subprocess.run([*start, *arguments], check=True, stdout=subprocess.DEVNULL)
    version = ".".join(map(str, sys.version_info[:3]))
    print(f"wheel of draftquant {draftquant.__version__} works on Python {version}")


if __name__ == "__main__":
    main()
