"""The command line where no deployment needs to run; what needs one is in test_end_to_end.py."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest

from gearshift import __version__
from gearshift.platform.tenants import hash_key

PRESET = str(files("gearshift.deployments").joinpath("presets/local.yaml"))
COMMANDS = [
    ["serve"], ["chat"], ["status"], ["models", "list"], ["models", "pull"], ["config", "check"], ["keys", "new"],
    ["experiment", "list"], ["experiment", "set"], ["experiment", "status"], ["experiment", "abort"], ["releases"], ["history"],
    ["bench", "eval"], ["eval", "run"],
    ["plan"], ["apply"], ["rollback"], ["diff"], ["bench", "gateway"], ["bench", "engine"], ["bench", "router"],
    ["router", "collect"], ["router", "train"], ["router", "calibrate"], ["router", "report"], ["router", "explain"],
    ["router", "replay"],
]  # fmt: skip


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "gearshift", *arguments], capture_output=True, text=True, check=False)


def test_the_version() -> None:
    assert run("--version").stdout == f"gearshift {__version__}\n"


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_explains_itself(command: list[str]) -> None:
    result = run(*command, "--help")
    assert result.returncode == 0
    assert len(result.stdout) > 200


def test_a_good_config_is_printed_with_its_defaults() -> None:
    resolved = json.loads(run("config", "check", PRESET, "--json").stdout)
    assert resolved["gateway"]["port"] == 8000
    assert "port: 8000" in run("config", "check", PRESET).stdout


def test_what_config_check_prints_is_a_config_again(tmp_path: Path) -> None:
    again = tmp_path / "again.yaml"
    again.write_text(run("config", "check", PRESET).stdout.replace("cheap:", "zero:"))
    again.write_text(
        re.sub(r"(artefact|calibration): .*", r"\1:", again.read_text())
    )  # trained for tiers of these names
    printed = run("config", "check", str(again)).stdout
    assert printed == again.read_text()
    assert printed.index("zero:") < printed.index("expensive:")  # from cheap to expensive, not from a to z


@pytest.mark.parametrize("command", [["config", "check"], ["serve"], ["models", "list"]])
def test_a_bad_config_is_told_in_one_line_a_problem(command: list[str], tmp_path: Path) -> None:
    bad = tmp_path / "bad.yaml"
    bad.write_text("models: {}\ntires: {}\n")
    result = run(*command, str(bad))
    assert result.returncode == 1
    assert re.search(r"bad\.yaml:2: tires: unknown key; did you mean 'tiers'\?", result.stderr)
    assert "Traceback" not in result.stderr


def test_a_config_that_needs_an_unset_variable_does_not_start(tmp_path: Path) -> None:
    text = Path(PRESET).read_text() + "\nredis: { url_env: GEARSHIFT_TEST_NOT_SET }\n"
    config = tmp_path / "c.yaml"
    config.write_text(text)
    result = run("serve", str(config))
    assert result.returncode == 1
    assert "redis.url_env: GEARSHIFT_TEST_NOT_SET is not set in the environment" in result.stderr


def test_a_new_key_fits_its_hash_and_is_never_the_same() -> None:
    first, second = (json.loads(run("keys", "new", "--json").stdout) for _ in range(2))
    assert first["hash"] == hash_key(first["key"])
    assert first["key"] != second["key"]


@pytest.mark.parametrize("command", [["status", "--admin-url"], ["chat", "hello", "--url"]])
def test_a_deployment_that_is_not_there_is_told_so(command: list[str]) -> None:
    result = run(*command, "http://127.0.0.1:9")
    assert result.returncode == 1
    assert "does not answer" in result.stderr
    assert "Traceback" not in result.stderr


def test_an_unknown_source_is_told_how_to_fix() -> None:
    result = run("models", "pull", "pypi:smollm2")
    assert result.returncode == 1
    assert "no such model in the catalog" in result.stderr
