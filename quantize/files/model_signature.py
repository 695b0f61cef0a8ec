"""A signature of a folder: who published it, and that nothing in it was changed since, on purpose.

model.sig has the format of OpenSSF model signing, which its own library writes and verifies here:
a Sigstore bundle around the sha256 of every file. `model_signing verify key` takes it too. The key
is a file, and nothing is asked of any server.

Source of the format: model-signing 1.1.1, `_signing/signing.py` and `_signing/sign_ec_key.py`.
"""

import base64
import binascii
import hashlib
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...recipes.errors import reason, short
from ...recipes.install_line import install_line
from ...recipes.regular_file import open_stream, read_text
from ...recipes.strict_json import JsonProblem, decode, parse_object
from ..errors import CheckpointError, OutputError
from .files_of_folder import SIGNATURE_FILE, check_own, files_of
from .staging import replace_text

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey

_DOWNLOADED = ".cache/huggingface"  # what a download from the Hub notes beside the files
_UNSIGNED = (SIGNATURE_FILE, ".gitattributes")  # the Hub makes the latter with every repository
_CURVES = ("secp256r1", "secp384r1", "secp521r1")
_LONGEST_KEY = 2**16  # bytes
_MAKE_KEY = (
    "openssl ecparam -name prime256v1 -genkey -noout -out KEY.pem; openssl ec -in KEY.pem -pubout"
    " -out KEY.pub"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Resource:
    """A file that was signed: its name in the folder, and the digest of its bytes in hex."""

    name: str
    algorithm: str
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Signed:
    """What model.sig says, whoever wrote it.

    Attributes:
        key_sha256: of the public key, as PEM, by which it says to be signed.
        sha256: of each file, by name.
    """

    key_sha256: str
    sha256: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class SignatureReport:
    """What was found of a signature.

    Attributes:
        key_sha256: of the public key that was given, as PEM.
        files: that are signed. faults: sentences without a full stop; empty = it holds.
    """

    folder: str
    key_sha256: str
    files: tuple[str, ...]
    faults: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """True if the holder of the key signed these files, and there are no others."""
        return not self.faults


def sign_folder(folder: Path, private_key: Path) -> Signed:
    """Write model.sig into a folder, over all of its files.

    Args:
        folder: as it is to be published.
        private_key: PEM of an elliptic curve (P-256, P-384 or P-521), without a password.

    Raises:
        CheckpointError: the key is none, model-signing is not installed, or the folder holds what
            is no file of it.
        OutputError: the folder is signed already, or cannot be written.
    """
    signing = _library().signing
    _private_key(private_key)
    if (folder / SIGNATURE_FILE).exists() or (folder / SIGNATURE_FILE).is_symlink():
        raise OutputError(
            folder / SIGNATURE_FILE,
            "a signature exists already, and is never overwritten",
            fix=f"remove it, and sign again: rm {folder / SIGNATURE_FILE}",
        )
    _files(folder)
    config = signing.Config().use_elliptic_key_signer(private_key=private_key)
    config.set_hashing_config(_hashing())
    with tempfile.TemporaryDirectory() as outside:
        written = Path(outside, SIGNATURE_FILE)
        try:
            config.sign(folder, written)
            text = read_text(written)
        except OSError as exc:
            where, why = exc.filename or folder, reason(exc)
            raise OutputError(where, f"cannot be signed: {why}", fix="make it readable") from exc
    replace_text(folder / SIGNATURE_FILE, text)
    return read_signature(folder)


def verify_signature(folder: Path, public_key: Path) -> SignatureReport:
    """Whether the holder of a key signed a folder as it is.

    Args:
        folder: with model.sig; one of the Hub's cache too.
        public_key: PEM, of somebody who is trusted.

    Raises:
        CheckpointError: the key is none, or model-signing is not installed.
    """
    _library()
    key_sha256 = _sha256_of_key(_public_key(public_key))
    signed: Signed | None = None
    faults: tuple[str, ...]
    try:
        files = _files(folder)
        if not (folder / SIGNATURE_FILE).exists():
            faults = (f"{SIGNATURE_FILE}: expected a signature, got none",)
        else:
            signed = read_signature(folder)
            faults = _faults(folder, signed, public_key, key_sha256)
            faults += tuple(f"{file}: is not signed" for file in files if file not in signed.sha256)
    except CheckpointError as exc:  # the folder's or the signature's: either way it does not hold
        faults = (f"{exc.where}: {exc.what}",)
    return SignatureReport(
        folder=str(folder),
        key_sha256=key_sha256,
        files=() if signed is None else tuple(signed.sha256),
        faults=tuple(dict.fromkeys(faults)),
    )


def _faults(folder: Path, signed: Signed, public_key: Path, key_sha256: str) -> tuple[str, ...]:
    from cryptography.exceptions import InvalidSignature

    config = _library().verifying.Config().use_elliptic_key_verifier(public_key=public_key)
    config.set_hashing_config(_hashing())
    if signed.key_sha256 != key_sha256:
        expected, got = key_sha256[:16], signed.key_sha256[:16]
        return (f"{SIGNATURE_FILE}: expected the signature of key {expected}, got that of {got}",)
    try:
        config.verify(folder, folder / SIGNATURE_FILE)
    except InvalidSignature:
        return (f"{SIGNATURE_FILE}: its content is not what the key signed: it was changed",)
    except ValueError as exc:  # names files without saying how they differ
        return differences(folder, signed) or (f"{SIGNATURE_FILE}: {short(str(exc))}",)
    except OSError as exc:
        return (f"{exc.filename or folder}: cannot be read: {reason(exc)}",)
    return ()


def differences(folder: Path, signed: Signed) -> tuple[str, ...]:
    """In what a folder is not what was signed, sentences without a full stop; no key is asked.

    Raises:
        CheckpointError: the folder holds what is no file of it.
    """
    files = _files(folder)
    found = [f"{file}: is not signed" for file in files if file not in signed.sha256]
    found += [
        f"{file}: it was signed, but is missing" for file in signed.sha256.keys() - set(files)
    ]
    for file in files:
        if signed.sha256.get(file, digest := _sha256(folder / file)) != digest:
            found.append(f"{file}: expected sha256 {signed.sha256[file][:16]}, got {digest[:16]}")
    return tuple(sorted(found))


def read_signature(folder: Path) -> Signed:
    """What model.sig of a folder says.

    Raises:
        CheckpointError: it is no signature by a key over the sha256 of files.
    """
    path = folder / SIGNATURE_FILE
    check_own(folder, SIGNATURE_FILE)
    try:
        bundle = parse_object(read_text(path))
        material = _object(bundle, "verificationMaterial")
        if "publicKey" not in material:
            raise JsonProblem("it is signed by a certificate or an identity, expected by a"
                              " key; the command model_signing verifies it")  # fmt: skip
        envelope = _object(bundle, "dsseEnvelope")
        if not envelope.get("signatures"):
            raise JsonProblem("it holds no signature")
        payload = base64.b64decode(decode(str, envelope.get("payload")), validate=True)
        statement = parse_object(payload.decode("utf-8"))
        resources = _object(statement, "predicate").get("resources")
        signed: tuple[Resource, ...] = decode(tuple[Resource, ...], resources)
        hint = decode(str, _object(material, "publicKey").get("hint"))
    except (OSError, JsonProblem, binascii.Error, UnicodeDecodeError) as exc:
        raise CheckpointError(
            path,
            f"is no signature by a key in the format of OpenSSF model signing: {reason(exc)}",
            fix="sign the folder again: draftquant verify --sign",
        ) from exc
    other = sorted({each.algorithm for each in signed} - {"sha256"})
    if other:
        raise CheckpointError(path, f"expected sha256 of each file, got {other[0]}",
                              fix="sign the folder again: draftquant verify --sign")  # fmt: skip
    return Signed(key_sha256=hint, sha256={each.name: each.digest for each in signed})


def _object(parent: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = parent.get(key)
    if not isinstance(found, dict):
        raise JsonProblem(f"{key}: expected an object, got {short(found)}")
    return found


def _files(folder: Path) -> list[str]:
    """What has to be signed: everything but the signature itself and what the Hub adds."""
    return files_of(
        folder, skip=lambda file: file in _UNSIGNED or Path(file).is_relative_to(_DOWNLOADED)
    )


def _sha256(path: Path) -> str:
    with open_stream(path) as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _hashing() -> Any:
    """Which files are hashed; where links may lead, `_files` has seen."""
    config = _library().hashing.Config().set_allow_symlinks(True)
    return config.set_ignored_paths(paths=[SIGNATURE_FILE, _DOWNLOADED])


def _library() -> Any:
    try:
        import model_signing
    except ImportError as exc:
        raise CheckpointError(
            SIGNATURE_FILE,
            f"needs model-signing, which cannot be imported: {exc}",
            fix=install_line("sign"),
        ) from exc
    return model_signing


def _private_key(path: Path) -> None:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    key = _key(path, "private", lambda pem: load_pem_private_key(pem, None))
    if not isinstance(key, EllipticCurvePrivateKey) or key.curve.name not in _CURVES:
        raise _no_key(path, "private", "another kind of key")


def _public_key(path: Path) -> "EllipticCurvePublicKey":
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    key = _key(path, "public", load_pem_public_key)
    if not isinstance(key, EllipticCurvePublicKey) or key.curve.name not in _CURVES:
        raise _no_key(path, "public", "another kind of key")
    return key


def _key(path: Path, kind: str, load: Callable[[bytes], object]) -> object:
    from cryptography.exceptions import UnsupportedAlgorithm

    try:
        return load(read_text(path, _LONGEST_KEY).encode())
    except TypeError as exc:
        fix = f"openssl ec -in {path} -out PLAIN.pem, or sign by 'model_signing sign key' itself"
        raise CheckpointError(path, "it has a password, which draftquant never asks for",
                              fix=fix) from exc  # fmt: skip
    except (OSError, ValueError, UnsupportedAlgorithm) as exc:
        raise _no_key(path, kind, reason(exc).splitlines()[0]) from exc


def _no_key(path: Path, kind: str, got: str) -> CheckpointError:
    curves = "P-256, P-384 or P-521"
    return CheckpointError(
        path, f"expected a {kind} key of the curves {curves} in PEM: {got}", fix=_MAKE_KEY
    )


def _sha256_of_key(key: "EllipticCurvePublicKey") -> str:
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    pem = key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    return hashlib.sha256(pem).hexdigest()
