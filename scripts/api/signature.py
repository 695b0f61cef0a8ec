"""Signatures of a quantized folder: who published it. Needs the extra `sign`."""

from pathlib import Path

from ...quantize.errors import OutputError
from ...quantize.files.hub import resolve_draft
from ...quantize.files.signature import SignatureReport, Signed, sign_folder, verify_signature
from .opening import Reference


def sign(output: Reference, private_key: str | Path) -> Signed:
    """Write model.sig into a folder, in the format of OpenSSF model signing.

    Args:
        output: folder that is as it is to be published, its card too.
        private_key: PEM of an elliptic curve, without a password.

    Raises:
        OutputError: it is a Hub id, signed already, or cannot be written.
        CheckpointError: the key is none, or model-signing is not installed.
    """
    source = resolve_draft(str(output))
    if source.hub_id is not None:
        raise OutputError(output, "is on the Hub, expected a folder to sign",
                          fix="sign the folder, then push it")  # fmt: skip
    return sign_folder(source.folder, Path(private_key))


def check_signature(output: Reference, public_key: str | Path) -> SignatureReport:
    """Whether the holder of a key signed a folder as it is.

    Args:
        output: folder or Hub id.
        public_key: PEM, of somebody who is trusted.

    Raises:
        CheckpointError: the key is none, or model-signing is not installed.
    """
    return verify_signature(resolve_draft(str(output)).folder, Path(public_key))
