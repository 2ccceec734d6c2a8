from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import pytest

from gearshift.platform.config_file import load, parse
from gearshift.platform.errors import ConfigError

PRESET = Path(str(files("gearshift.deployments").joinpath("presets/local.yaml")))
TEXT = PRESET.read_text()


def problems(text: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse(text, "f.yaml")
    return caught.value.problems


def line_of(text: str, part: str) -> int:
    return next(number for number, line in enumerate(text.splitlines(), 1) if part in line)


def test_the_example_is_valid_and_resolves_defaults() -> None:
    config = load(PRESET)
    assert list(config.tiers) == ["cheap", "expensive"]
    assert config.gateway.host == "127.0.0.1"
    assert config.models["smollm2-135m"].kv_cache_memory == 512 * 1024**2


@pytest.mark.parametrize(
    ("old", "new", "path", "hint"),
    [
        ("    threads: 1", "    treads: 1", "models.smollm2-135m.treads", "unknown key; did you mean 'threads'?"),
        ("router:", "ruoter:", "ruoter", "unknown key; did you mean 'router'?"),
        ("max_num_seqs: 32", "max_num_seqs: many", "models.smollm2-135m.max_num_seqs", "valid integer"),
        ("max_num_seqs: 32", 'max_num_seqs: "32"', "models.smollm2-135m.max_num_seqs", "valid integer"),
        ("prompt: assistant", "prompt: asistant", "releases.smollm2-v1.prompt", "did you mean 'assistant'?"),
        ("model: qwen-coder-0.5b", "model: gpt", "releases.qwen-v1.model", "'gpt' is not defined; there are: "),
        ("artefact: router/local.safetensors", "scorer: feature", "router.scorer", "did you mean 'features'?"),
        ("release: qwen-v1", "release: qwen-v2", "tiers.expensive.release", "did you mean 'qwen-v1'?"),
        ("pypi:smollm2-135m-instruct", "pypi:smollm", "models.smollm2-135m.source", "no such model in the catalog"),
        ("kv_cache_memory: 512MiB", "kv_cache_memory: lots", "models.smollm2-135m.kv_cache_memory", "byte"),
        ("artefact: router/local.safetensors", "threshold: 1.5", "router.threshold", "less than or equal to 1"),
        ("ttl_s: 3600", "ttl_s: -1", "cache.ttl_s", "greater than 0"),
        ("action: block, terms", "action: block, term", "policies.standard.rules.6.term", "did you mean 'terms'?"),
        ('models: ["*"]', "models: [cheep]", "tenants.dev.models.0", "did you mean 'cheap'?"),
    ],
)
def test_a_problem_is_told_with_its_line_its_path_and_a_hint(old: str, new: str, path: str, hint: str) -> None:
    text = TEXT.replace(old, new, 1)
    found = problems(text)
    expected = f"f.yaml:{line_of(text, new)}: {path}: "
    assert any(problem.startswith(expected) and hint in problem for problem in found), found


def test_all_problems_are_told_at_once() -> None:
    text = TEXT.replace("threads: 1", "treads: 1").replace("ttl_s: 3600", "ttl_s: soon")
    text = text.replace("artefact: router/local.safetensors", "scorer: featurs").replace(
        "release: qwen-v1", "release: qwen-v2"
    )
    found = problems(text)
    assert len(found) == 4
    lines = [int(problem.split(":")[1]) for problem in found]
    assert lines == sorted(lines)


def test_what_follows_from_a_broken_definition_is_not_told_as_well() -> None:
    found = problems(TEXT.replace("  assistant:\n    version: 1\n", "  assistant: 5\n  other:\n    version: 1\n"))
    assert [problem.split(": ")[1] for problem in found] == ["prompts.assistant"]


def test_negative_weights_and_weights_that_are_all_zero() -> None:
    text = TEXT + "\nexperiments:\n  x:\n    arms: { smollm2-v1: -1, qwen-v1: 2 }\n  y:\n    arms: { qwen-v1: 0 }\n"
    found = problems(text)
    assert any(
        "experiments.x.arms.smollm2-v1" in problem and "greater than or equal to 0" in problem for problem in found
    )
    assert any("experiments.y" in problem and "at least one weight" in problem for problem in found)


def test_a_model_has_one_origin() -> None:
    assert (
        "exactly one of source, upstream, echo"
        in problems(TEXT.replace("    quantization: int8", "    echo: {}\n    quantization: int8", 1))[0]
    )


def test_a_name_means_one_thing() -> None:
    text = TEXT.replace("  smollm2-v1:", "  cheap:").replace("release: smollm2-v1", "release: cheap")
    assert any("is also the name of a tier" in problem for problem in problems(text))


def test_admin_routes_stay_on_loopback_without_a_token() -> None:
    assert "needs token_env" in problems(TEXT + "\nadmin: { host: 0.0.0.0 }\n")[0]


@pytest.mark.parametrize("text", ["a: [", "a: 1\na: 2", "- 1", "", "just text"])
def test_what_is_not_a_mapping_is_told_with_a_line(text: str) -> None:
    assert problems(text)[0].startswith("f.yaml:")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: No such file"):
        load(tmp_path / "nowhere.yaml")
