"""Which models hand their hidden states to a draft: the rows of `quantize/engines/targets.toml`.

`experiments/run targets vllm` asks vLLM's own classes, and keeps
the rows of other engines; then the same for sglang.

Each class that a CPU can import is asked as the engine asks it; of one that wants another package
the source is read.
"""

import ast
import importlib
import json
import os
import re
import sys
import textwrap
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

os.environ.update(
    HF_HUB_OFFLINE="1",
    SGLANG_LOG_LEVEL="error",
    VLLM_LOGGING_LEVEL="ERROR",
    VLLM_NO_USAGE_STATS="1",
    VLLM_TARGET_DEVICE="cpu",
)

OUT = Path(__file__).resolve().parents[2] / "quantize" / "engines" / "targets.toml"
METHODS = ("dflash", "dspark", "eagle3")
_NO_TARGET = re.compile(
    "Draft|DSpark|DFlash|^Eagle(?!2_5)|Eagle3?$|MTP|NextN|Assistant|Embed(?!ded)|Bert|BERT|Roberta"
    "|CLIP|Siglip|Contriever|Gte|^Col|Bidirectional|Classification|Reward|Ranking|MaskedLM|Retrieval"
)
"""Drafts, layers of targets, encoders and judges of texts, which write none."""
HOOKS = {method: f"set_{method}_layers_to_capture" for method in METHODS}
"""SGLang's: `attention_backend_setup.py`; DSpark is also served by DFlash's."""
Answers = Iterator[tuple[str, dict[str, bool], str]]
"""Name of a class, whether it serves each method, and how that is known."""


def vllm_answers() -> Answers:
    """`supports_eagle3` of each registered class, whatever the method."""
    import vllm_platform

    vllm_platform.install("sm90")
    from vllm.model_executor.models.interfaces import supports_eagle3
    from vllm.model_executor.models.registry import ModelRegistry

    for name, entry in ModelRegistry.models.items():
        try:
            serves, how = supports_eagle3(entry.load_model_cls()), "executed"
        except Exception:  # noqa: BLE001  a package that is not there
            read = dict(ancestry(entry.module_name, entry.class_name))
            if not read:
                continue
            serves, how = "SupportsEagle3" in read, "read"
        yield name, dict.fromkeys(METHODS, serves), how


def sglang_answers() -> Answers:
    """The method that the engine looks for, of each class that a module registers."""
    import sglang_platform
    from torch.nn import Module

    sglang_platform.install("sm90")
    package = "sglang.srt.models"
    for file in sorted(_path(package).parent.glob("*.py")):
        module = f"{package}.{file.stem}"
        entry = [n.value for n in _tree(module).body if isinstance(n, ast.Assign) and _is_entry(n)]
        for node in (node for value in entry for node in ast.walk(value)):
            if not isinstance(node, ast.Name):
                continue
            try:
                own = getattr(importlib.import_module(module), node.id)
                made = {name for each in own.__mro__[:-1] for name in vars(each)}
                made -= {"__getattr__"} if own.__getattr__ is Module.__getattr__ else set()
                how = "executed"
            except Exception:  # noqa: BLE001
                made = {name for _, names in ancestry(module, node.id) for name in names}
                how = "read"
            if made and "__getattr__" not in made:  # an instance may have more than its class
                serves = {method: hook in made for method, hook in HOOKS.items()}
                yield node.id, {**serves, "dspark": serves["dspark"] or serves["dflash"]}, how


def _is_entry(node: ast.Assign) -> bool:
    return any(isinstance(each, ast.Name) and each.id == "EntryClass" for each in node.targets)


def ancestry(module: str, name: str) -> Iterator[tuple[str, list[str]]]:
    """A class and its bases, each with the functions that it defines, as their source has them."""
    tree, parts = _tree(module), module.split(".")
    parts = parts if _path(module).name == "__init__.py" else parts[:-1]
    imports = {}
    for node in (node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)):
        above = parts[: len(parts) - node.level + 1] if node.level else []
        base = ".".join([*above, *([node.module] if node.module else [])])
        imports |= {each.asname or each.name: (base, each.name) for each in node.names}
    own = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name]
    if own:
        yield name, [node.name for node in own[0].body if isinstance(node, ast.FunctionDef)]
        for each in own[0].bases:
            yield from ancestry(module, ast.unparse(each).partition("[")[0])
    elif name in imports and imports[name][0].startswith(("vllm.", "sglang.")):
        yield from ancestry(*imports[name])


def _path(module: str) -> Path:
    """Without importing anything below the package."""
    root, *parts = module.split(".")
    spec = find_spec(root)
    assert spec is not None
    assert spec.origin is not None
    path = Path(spec.origin).parent.joinpath(*parts)
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def _tree(module: str) -> ast.Module:
    return ast.parse(_path(module).read_text(encoding="utf-8"))


def write(engine: str, answers: Answers) -> None:
    """The rows of one engine; the head of the file and other engines' rows stay."""
    head, *rows = OUT.read_text(encoding="utf-8").split("[[row]]\n")
    rows = [row for row in rows if tomllib.loads(row)["engine"] != engine]
    alike: dict[tuple[str, tuple[str, ...]], list[str]] = defaultdict(list)
    for name, serves, how in answers:
        if any(serves.values()) and not _NO_TARGET.search(name):
            alike[how, tuple(method for method in METHODS if serves[method])].append(name)
    for (how, serves), names in alike.items():
        wrapped = textwrap.fill(" ".join(sorted(names)), 98, break_on_hyphens=False)
        rows.append(
            f'engine = "{engine}"\nversion = "{version(engine)}"\nsource = "{how}"\n'
            f"serves = {json.dumps(list(serves))}\n"
            f'classes = """\n{wrapped}\n"""\n\n'
        )
    OUT.write_text("[[row]]\n".join([head, *sorted(rows)]).rstrip("\n") + "\n", encoding="utf-8")


if __name__ == "__main__":
    write(sys.argv[1], {"vllm": vllm_answers, "sglang": sglang_answers}[sys.argv[1]]())
