"""Public data that the guardrails are trained and measured on: a folder of `*.jsonl.gz`, and which of it may be trained on."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from gearshift.platform.errors import ConfigError

LICENCES = {
    "slabs": "S-Labs/prompt-injection-dataset, MIT",
    "yanismiraoui": "yanismiraoui/prompt_injections, Apache-2.0",
    "deepset": "deepset/prompt-injections, Apache-2.0",
    "gptfuzz": "sherdencooper/GPTFuzz, MIT",
    "giskard": "Giskard-AI/prompt-injections, MIT and Apache-2.0",
    "notinject": "leolee99/PIGuard NotInject, MIT",
    "xstest_safe": "paul-rottger/exaggerated-safety, CC-BY-4.0",
    "prompts_chat": "f/prompts.chat, CC0-1.0",
    "selfinstruct_user": "yizhongw/self-instruct, Apache-2.0",
    "mt_bench": "lm-sys/FastChat, Apache-2.0",
    "vicuna_bench": "lm-sys/FastChat, Apache-2.0",
    "arena_hard": "lm-sys/arena-hard-auto, Apache-2.0",
    "jbb_benign": "JailbreakBench, MIT",
    "openai_moderation": "openai/moderation-api-release, MIT",
}
"""Sources whose terms allow to train a classifier that is passed on under Apache-2.0. Others only measure."""


@dataclass(frozen=True, slots=True)
class Row:
    text: str
    label: bool
    source: str
    group: int
    kind: str = ""


def injections(folder: Path) -> list[Row]:
    rows = read(folder, "injection")
    return [Row(each["text"], bool(each["label"]), each["source"], each["group"], each["kind"]) for each in rows]


def toxic(folder: Path) -> list[Row]:
    rows = read(folder, "toxicity")
    return [Row(r["text"], bool(r["label"]), r["source"], i, r["category"]) for i, r in enumerate(rows)]


def secrets(folder: Path) -> list[Row]:
    return [Row(r["text"], bool(r["label"]), r["source"], i, r["rule"]) for i, r in enumerate(read(folder, "secrets"))]


def read(folder: Path, name: str) -> Iterator[dict[str, Any]]:
    """Raises `ConfigError` for a file that is missing or damaged."""
    path = folder / f"{name}.jsonl.gz"
    try:
        with gzip.open(path) as lines:
            yield from (msgspec.json.decode(line) for line in lines)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from error
    except (EOFError, msgspec.DecodeError) as error:
        raise ConfigError(f"{path} is damaged: {error}") from error
