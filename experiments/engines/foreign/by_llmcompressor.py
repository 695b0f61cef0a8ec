"""llm-compressor's `model_free_ptq`: from file to file, by its presets."""

from pathlib import Path

from compressed_tensors.quantization import preset_name_to_scheme
from llmcompressor import model_free_ptq

IGNORE = ["lm_head", "re:.*fc$", "re:.*embed.*", "re:.*kv_b_proj$"]


def make(scheme: str, source: Path, out: Path) -> None:
    """Write the folder `out`."""
    preset_name_to_scheme(scheme, [])  # what it does not know is an error here
    model_free_ptq(source, out, scheme=scheme, ignore=IGNORE, device="cpu")
