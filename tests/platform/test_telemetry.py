from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from prometheus_client.metrics import MetricWrapperBase
from ruamel.yaml import YAML

from gearshift.deployments.exposition import metrics_page
from gearshift.platform import telemetry
from gearshift.platform.config import Telemetry
from gearshift.platform.request import SamplingParams, Usage
from gearshift.platform.telemetry import Emitter, Recent, Record, VerdictNote

PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def record(**fields: object) -> Record:
    made = Record("req_1", tenant="acme", asked="auto", tier="cheap", release="r1", status=200)
    made.sampling, made.usage = SamplingParams(temperature=0, max_tokens=9), Usage(5, 3)
    made.verdicts.append(VerdictNote("input", "redact", "email"))
    with made.step("admit"), made.step("inner"):
        pass
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def emitted(tmp_path: Path, headers: dict[str, str], made: Record, **config: object) -> list[dict[str, object]]:
    path = tmp_path / "traces.jsonl"
    emitter = Emitter(Telemetry.model_validate({"traces": "file", "traces_path": str(path), **config}))
    emitter.emit(made, emitter.begin(made, headers))
    emitter.close()
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_trace_has_the_steps_under_the_request_and_continues_the_caller_s(tmp_path: Path) -> None:
    spans = {str(span["name"]): span for span in emitted(tmp_path, {"traceparent": PARENT}, record())}
    assert set(spans) == {"chat auto", "admit", "inner"}
    root = spans["chat auto"]
    assert root["context"]["trace_id"] == "0x4bf92f3577b34da6a3ce929d0e0e4736"  # type: ignore[index]
    assert root["parent_id"] == "0x00f067aa0ba902b7"
    assert spans["admit"]["parent_id"] == root["context"]["span_id"]  # type: ignore[index]
    attributes = root["attributes"]
    assert isinstance(attributes, dict)
    assert attributes["gen_ai.request.max_tokens"] == 9
    assert attributes["gen_ai.usage.output_tokens"] == 3
    assert attributes["gen_ai.response.model"] == "r1"


def test_a_server_s_failure_is_an_error_span_and_a_client_s_is_not(tmp_path: Path) -> None:
    failed = emitted(tmp_path, {}, record(status=503, error="engine_unavailable"))[-1]
    assert failed["status"]["status_code"] == "ERROR"  # type: ignore[index]
    refused = emitted(tmp_path, {}, record(status=400, error="invalid_value"))[-1]
    assert refused["status"]["status_code"] == "UNSET"  # type: ignore[index]


def test_what_is_not_sampled_is_not_written(tmp_path: Path) -> None:
    assert emitted(tmp_path, {}, record(), sample_ratio=0.0) == []


def test_a_record_is_one_line_of_json(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    emitter = Emitter(Telemetry(records="file", records_path=str(path)))
    for status in (200, 429):
        made = record(status=status)
        emitter.emit(made, emitter.begin(made, {}))
    emitter.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["status"] for line in lines] == [200, 429]
    assert lines[0]["steps"][-1][0] == "admit"
    assert lines[0]["ended_ns"] >= lines[0]["started_ns"]


def test_metrics_of_all_processes_are_added_and_a_dead_one_s_gauges_are_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = (
        "import time; from gearshift.platform import telemetry as t;"
        "t.ENGINE_GAUGES['running'].labels('m', 'e').set(3); t.ENGINE_COUNTERS['preemptions'].labels('m', 'e').inc(2);"
        "print('set', flush=True); time.sleep(60)"
    )
    environ = os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    processes = [
        subprocess.Popen([sys.executable, "-c", code], env=environ, stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "set\n"
    for alive, running in ((2, "6.0"), (1, "3.0")):
        page = metrics_page()[0].decode()
        assert f'vllm:num_requests_running{{engine="e",model_name="m"}} {running}' in page, alive
        assert 'vllm:num_preemptions_total{engine="e",model_name="m"} 4.0' in page
        victim = processes.pop()
        os.kill(victim.pid, signal.SIGKILL)
        victim.wait()
        assert victim.stdout is not None
        victim.stdout.close()
    assert "vllm:num_requests_running{" not in metrics_page()[0].decode()


def test_recent_times_are_those_of_the_last_minute() -> None:
    recent = Recent()
    assert recent.told(0.0) == (0.0, 0.0, 0.0, 0)
    for n in range(1, 101):
        recent.add(float(n), n / 100)
    assert recent.told(60.0) == (0.5, 0.95, 0.99, 100)
    assert recent.told(110.5) == (0.75, 0.98, 1.0, 50)
    for _ in range(3000):
        recent.add(200.0, 1.0)
    assert recent.told(200.0)[3] == Recent.MOST


def test_alert_rules_name_series_and_labels_that_there_are() -> None:
    """A rule about a series that nobody writes never fires."""
    rules = YAML(typ="safe").load(Path(__file__).parents[2] / "infra" / "alerts.yaml")
    known: dict[str, set[str]] = {}
    for value in vars(telemetry).values():
        for metric in value.values() if isinstance(value, dict) else [value]:
            if isinstance(metric, MetricWrapperBase):
                ends = {"counter": ["_total"], "histogram": ["_bucket", "_count", "_sum"]}.get(str(metric._type), [""])
                known |= {metric._name + end: {*metric._labelnames, "le"} for end in ends}
    expressions = [rule["expr"] for group in rules["groups"] for rule in group["rules"]]
    assert len(expressions) > 10
    for expression in expressions:
        named = re.findall(r"\b(?:gearshift|vllm|gen_ai_server)[\w:]+", expression)
        assert named
        assert set(named) <= set(known), expression
        labels = [word for inner in re.findall(r"by \(([^)]*)\)", expression) for word in inner.split(", ")]
        labels += re.findall(r"[{,]\s*(\w+)=", expression)
        assert all(set(labels) <= known[name] for name in named), expression
    for group in rules["groups"]:
        for rule in group["rules"]:
            used = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]))
            series = re.findall(r"\b(?:gearshift|vllm|gen_ai_server)[\w:]+", rule["expr"])
            assert used <= set.intersection(*(known[name] for name in series)), rule["alert"]
