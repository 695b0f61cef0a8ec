"""The page of the engines that `check` knows."""

from collections.abc import Collection

from ....quantize.engines.contract import data_file
from ....quantize.engines.engine import Engine
from ....quantize.engines.versions import ENGINES
from ....quantize.gpus import GPUS, gpu_names
from .markdown import code, page, table, text


def engines_page() -> str:
    """Versions, GPUs, and the names of drafts and of quantization methods that each takes."""
    known = list(ENGINES.values())
    return page(
        "Engines",
        "`draftquant check` knows these engines and versions. Any other version is UNKNOWN to it."
        " The page on [engines](../../experiments/engines.md) has what each did with real folders.",
        table(
            ["engine", "version", "GPUs", "GPUs with `--gpu`", "how it is known"],
            map(_version, known),
        ),
        "Without `--gpu`, `check` asks about the GPUs of the third column. It asks about those"
        " of the fourth column only if `--gpu` names them.",
        "## GPUs",
        table(
            ["name", "architecture"], ([code(name), code(gpu.arch)] for name, gpu in GPUS.items())
        ),
        *(part for engine in known for part in _names(engine)),
    )


def _version(engine: Engine) -> list[str]:
    named = [gpu_names(engine.archs), gpu_names(engine.other_archs)]
    return [engine.title, engine.version, *named, text(engine.evidence)]


def _names(engine: Engine) -> list[str]:
    """The architectures and methods of one engine, as lists."""
    return [
        f"## {engine.title} {engine.version}",
        "Of these values of `quant_method` it is known how it takes them:"
        f" {_listed({*data_file('schemes')[engine.name], *engine.aliases})}.",
        "It serves these `architectures` as drafts: " + _listed(engine.architectures) + ".",
    ]


def _listed(names: Collection[str]) -> str:
    return ", ".join(code(name) for name in sorted(names))
