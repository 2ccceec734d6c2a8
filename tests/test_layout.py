"""The house stands: rooms, links, import direction, Ray at the rim."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROOMS = ("platform", "router", "guardrails", "eval", "deployments")
MAY_IMPORT = {
    "platform": {"platform"},
    "router": {"platform", "router"},
    "guardrails": {"platform", "guardrails"},
    "eval": {"platform", "router", "guardrails", "eval"},
    "deployments": set(ROOMS),
}


def imports_of(room: str) -> Iterator[tuple[Path, str]]:
    for path in sorted((ROOT / room).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                yield from ((path, alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                yield path, node.module


@pytest.mark.parametrize("room", ROOMS)
def test_each_room_is_linked_into_the_package(room: str) -> None:
    link = ROOT / "src" / "gearshift" / room
    assert link.is_symlink()
    assert link.readlink() == Path("../..") / room


def test_nothing_replaces_the_standard_library_s_platform() -> None:
    assert not (ROOT / "platform" / "__init__.py").exists()
    code = "import platform; print(platform.python_version())"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.stdout.startswith("3."), result.stderr


def test_tests_are_no_packages() -> None:
    assert list((ROOT / "tests").rglob("__init__.py")) == []


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_rooms_below_it(room: str) -> None:
    wrong = [
        (str(path.relative_to(ROOT)), module)
        for path, module in imports_of(room)
        if module.startswith("gearshift.") and module.split(".")[1] not in MAY_IMPORT[room]
    ]
    assert wrong == []


@pytest.mark.parametrize("room", ROOMS)
def test_only_deployments_imports_ray(room: str) -> None:
    found = {str(path.relative_to(ROOT)) for path, module in imports_of(room) if module.split(".")[0] == "ray"}
    assert found <= {
        "deployments/cluster.py",
        "deployments/targets.py",
        "deployments/ranks.py",
        "deployments/bench_tax.py",
    }


@pytest.mark.parametrize("name", ["scheduler", "blocks", "sequence", "core", "bridge", "text", "echo"])
def test_scheduling_needs_no_tensors(name: str) -> None:
    modules = {module.split(".")[0] for path, module in imports_of("platform") if path.stem == name}
    assert "torch" not in modules


def test_a_gateway_process_does_not_load_torch() -> None:
    code = "import gearshift.deployments.replicas, sys; print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"
