"""Arguments that several verbs take, each said once."""

import os
from collections.abc import Sequence
from typing import Annotated, Literal

from ...recipes.bounds import AT_LEAST_0, AT_LEAST_1, SHARE_OR_ALL
from ...recipes.decode import MisfitError
from ...recipes.errors import short
from ...recipes.schema import ALGORITHMS, BackendName
from ...validate.counting.estimand import DraftSampling
from .opening import AnyRecipe, Reference
from .option import Argument, Option

AnyPath = str | os.PathLike[str]
"""A file or folder; `Settings` hold it as a `Path`."""
ComputeDtype = Literal["float32", "bfloat16"]


def share(text: str) -> float:
    """A share as people write it: 0.01 or 1%.

    Raises:
        MisfitError: it is neither.
    """
    number, percent = text.removesuffix("%"), text.endswith("%")
    try:
        return float(number) / (100 if percent else 1)
    except ValueError as exc:
        raise MisfitError(f"expected a share such as 0.01 or 1%, got {short(text)}") from exc


Draft = Annotated[Reference, Argument("draft folder or Hub id (owner/name)", "DRAFT")]
Quantized = Annotated[Reference, Argument("quantized draft folder or Hub id", "QUANT")]
QuantizedFolder = Annotated[AnyPath, Argument("folder that 'quantize' wrote", "FOLDER")]
Subtree = Annotated[
    str | None,
    Option(
        "the folder is a target's, and its MTP layer below this prefix the draft"
        " (model.layers.61, model.mtp_layers.0, mtp), or its layers (model.layers.45,"
        "model.layers.46): nothing else is read",
        "PREFIX[,PREFIX...]",
    ),
]
OutFolder = Annotated[AnyPath, Option("folder to create", "FOLDER")]
RecipeName = Annotated[
    AnyRecipe,
    Option("built-in name or .yaml path", "RECIPE"),
]
Backend = Annotated[
    BackendName | None, Option("who computes the codes, instead of the recipe's choice")
]
AlgorithmName = Annotated[
    str | None,
    Option(
        "how codes and scales are found, instead of the recipe's choice; computed by backend"
        " torch unless --backend says otherwise",
        f"{{{','.join(ALGORITHMS)}}}",
    ),
]
TargetLayers = Annotated[
    int | None,
    Option(
        "decoder layers of the target, for layouts whose excludes are whole names (fp8)",
        "LAYERS",
        bounds=AT_LEAST_1,
    ),
]
NumDraftTokens = Annotated[
    int | None,
    Option(
        "tokens drafted per step, as served (default: 3, or a block draft's whole block)",
        "K",
        short="-k",
        bounds=AT_LEAST_1,
        fix="give the K that is served, such as -k 3",
    ),
]
Sampling = Annotated[
    DraftSampling,
    Option(
        "how drafts choose their proposals for traces with a temperature, as served: their"
        " most likely token (default), or drawn at that temperature"
    ),
]
Device = Annotated[
    str,
    Option("auto (the first GPU that torch sees, else the CPU), cpu, cuda or cuda:I", "DEVICE"),
]
Dtype = Annotated[
    ComputeDtype,
    Option("what drafts compute in: float32, the reference (default), or bfloat16 as engines do"),
]
BatchSize = Annotated[
    int | None,
    Option(
        "prompts that go through a draft together (default: as many as are of use and fit)",
        "PROMPTS",
        bounds=AT_LEAST_1,
    ),
]
Target = Annotated[
    AnyPath | None,
    Option(
        "target folder, for drafts without embedding or head where the traces carry neither,"
        " and for recipes that drop what equals the target's",
        "TARGET",
    ),
]
FixConfig = Annotated[
    bool, Option("change the output's config.json as the lints of 'inspect' ask for")
]
Temperature = Annotated[
    float, Option("draw tokens (default 0: greedy)", "TEMPERATURE", bounds=AT_LEAST_0)
]
TopP = Annotated[float, Option("default 1: all tokens", "SHARE", bounds=SHARE_OR_ALL)]
TopK = Annotated[int, Option("default 0: all tokens", "TOKENS", bounds=AT_LEAST_0)]
SamplingSeed = Annotated[int, Option("of the draws (default 0)", "SEED")]
TableIds = Annotated[
    Sequence[int],
    Option(
        "tokens whose embedding is carried beside those of the traces and DRAFT's mask token",
        "TOKEN_ID,...",
        several="commas",
    ),
]
AllowZeroRows = Annotated[bool, Option("store all-zero rows instead of refusing them")]
Overwrite = Annotated[bool, Option("replace report files that exist already")]
