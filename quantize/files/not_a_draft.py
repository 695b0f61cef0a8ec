"""What a path is that was given as a draft and is none: the kind of mistake, and the way out."""

import difflib
import re
import shlex
from pathlib import Path

CONFIG_FILE = "config.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt")
"""Endings of what torch.save writes."""
_CACHED = re.compile(r"models--(.+?)--(.+)")
"""How huggingface_hub names the folder of owner/name."""
_GGUF = "GGUF of llama.cpp, which holds other tensors than the draft that it was made from"
_SAFETENSORS = "give the folder of safetensors that it was converted from"


def mistaken_file(path: Path) -> tuple[str, str]:
    """What is wrong with a file in the place of a draft folder, and the fix."""
    if path.suffix == ".gguf":
        return f"is {_GGUF}", _SAFETENSORS
    if path.suffix in PICKLES:
        return "is a file, not a draft folder", as_safetensors(path.parent)
    if path.suffix == ".safetensors" or path.name == CONFIG_FILE:
        return "is a file, not a draft folder", f"give a draft folder: {path.parent}"
    return "is a file, not a draft folder", "give a draft folder or a Hub id (owner/name)"


def pickles_in(folder: Path) -> list[str]:
    """Files that torch.save may have written, by name."""
    return sorted(path.name for path in folder.iterdir() if path.suffix in PICKLES)


def as_safetensors(folder: Path) -> str:
    """What makes safetensors of a folder of pickles, with the command for a shell."""
    command = f"draftquant unpickle {shlex.quote(str(folder))} --out SAFETENSORS"
    return f"convert the draft to safetensors, because pickled weights are not read ({command})"


def near_folder(path: Path) -> Path | None:
    """The folder beside one that is not there whose name is nearly the same."""
    beside = path.parent.iterdir() if path.parent.is_dir() else ()
    names = sorted(one.name for one in beside if one.is_dir())
    close = difflib.get_close_matches(path.name, names, n=1)
    return path.parent / close[0] if close else None


def without_safetensors(folder: Path) -> tuple[str, str]:
    """What a folder with a config.json holds in the place of safetensors, and the fix."""
    if any(folder.glob("*.gguf")):
        return f"holds {_GGUF}", _SAFETENSORS
    if pickles := pickles_in(folder):
        return f"no safetensors file (found {pickles[0]})", as_safetensors(folder)
    return "no safetensors file", "download the weights too (*.safetensors), not config.json alone"


def mistaken_folder(folder: Path) -> tuple[str, str] | None:
    """What a folder without config.json is instead, and the fix; None = nothing that is known."""
    if (folder / "params.json").exists():
        return (
            "is in Mistral's own form (params.json), which is not supported, EAGLE or not",
            "serve it with vLLM as it is, or give a draft with a config.json of its own",
        )
    if (folder / "adapter_config.json").exists():
        return (
            "is an adapter (LoRA), not a draft",
            "merge it into the model that it adapts (peft: merge_and_unload), and give that folder",
        )
    if (cached := _CACHED.fullmatch(folder.name)) and (folder / "snapshots").is_dir():
        hub_id = f"{cached[1]}/{cached[2]}"
        snapshots = sorted(path for path in (folder / "snapshots").iterdir() if path.is_dir())
        fix = f"give {hub_id}" + (f", or {snapshots[-1]}" if snapshots else "")
        return "is a folder of the Hub's cache, whose files lie below snapshots", fix
    if any(folder.glob("*.gguf")):
        return f"holds {_GGUF}", _SAFETENSORS
    if (folder / "trace.json").exists():
        return (
            "is a trace folder, not a draft",
            "give the draft first, and this folder behind --traces",
        )
    if any(folder.glob("*.safetensors")):
        return None
    if pickles := pickles_in(folder):
        return (
            f"has no {CONFIG_FILE}, and no safetensors file (found {pickles[0]})",
            f"put the draft's {CONFIG_FILE} beside it, then {as_safetensors(folder)}",
        )
    below = sorted(path.parent for path in folder.glob(f"*/{CONFIG_FILE}"))
    if below:
        return f"has no {CONFIG_FILE}, but {len(below)} folder(s) in it have", (
            f"did you mean {below[0]}?"
        )
    return None
