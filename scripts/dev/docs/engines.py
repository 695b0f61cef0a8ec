"""The page of the engines that `check` knows."""

from collections.abc import Collection

from ....quantize.engines.engine import Engine
from ....quantize.engines.registry import ENGINES
from ....quantize.gpus import GPUS
from .markdown import code, page, table, text


def engines_page() -> str:
    """Versions, GPUs, and the names of drafts and of quantization methods that each takes."""
    known = list(ENGINES.values())
    return page(
        "Engines",
        "What `draftquant check` knows. Another version than these is judged as the newest known"
        " one, and says so. What each did with real folders: [engines](../engines.md).",
        table(["engine", "version", "GPUs", "how it is known"], map(_version, known)),
        "GPUs behind a + are judged where `--arch` names them.",
        "## GPUs",
        table(
            ["name", "architecture"], ([code(name), code(gpu.arch)] for name, gpu in GPUS.items())
        ),
        *(part for engine in known for part in _names(engine)),
    )


def _version(engine: Engine) -> list[str]:
    gpus = ", ".join(engine.archs) + "".join(f" +{arch}" for arch in engine.other_archs)
    return [engine.name, engine.version, gpus, text(engine.evidence)]


def _names(engine: Engine) -> list[str]:
    """The architectures and methods of one engine, as lists."""
    return [
        f"## {engine.name} {engine.version}",
        "`quant_method` that it takes: "
        + _listed({*engine.declaration.methods, *engine.declaration.aliases})
        + ".",
        "`architectures` that it serves as drafts: " + _listed(engine.architectures) + ".",
    ]


def _listed(names: Collection[str]) -> str:
    return ", ".join(code(name) for name in sorted(names))
