from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from gearshift.eval.bench import Bar, Report, collect


def report(value: float) -> Report:
    return Report(
        "demo", [collect("work", "ms", [3.0, 1.0, 2.0])], [Bar("work", value, 2.0, "max"), Bar("rate", 5, 4, "min")]
    )


def test_a_report_holds_when_all_its_bars_do() -> None:
    assert report(2.0).holds
    assert not report(2.1).holds
    assert not Bar("rate", 3.9, 4, "min").holds


def test_the_json_names_the_machine_and_has_spread_and_bars(tmp_path: Path) -> None:
    report(2.1).write(tmp_path / "r.json")
    written = json.loads((tmp_path / "r.json").read_text())
    assert written["bench"] == "demo"
    assert written["machine"]["versions"]["gearshift"]
    assert {key: written["results"][0][key] for key in ("min", "median", "max")} == {
        "min": 1.0,
        "median": 2.0,
        "max": 3.0,
    }
    assert written["bars"][0] == {"name": "work", "value": 2.1, "limit": 2.0, "direction": "max", "holds": False}


def test_the_table_says_what_does_not_hold(capsys: pytest.CaptureFixture[str]) -> None:
    report(2.1).show(Console(width=120))
    shown = capsys.readouterr().out
    assert "does not hold" in shown
    assert "work" in shown
