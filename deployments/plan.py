"""What applying a config would do, in words, before anything is done. Pure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from gearshift.deployments.identity import fingerprint
from gearshift.platform.config import Config, Model
from gearshift.platform.weights import source
from gearshift.router.arms import contents_of

FIXED = ("gateway.", "admin.", "redis.", "telemetry.", "evaluation.enabled:", "embedding", "cache.semantic")
"""What a running deployment can't change: where it listens, what it writes to, and which processes it has."""
SHOWN_CHARS = 60
PACKED = {"int8": 1.1, "int4": 0.6, None: 1.0}
"""Bytes of loaded weights over those of bfloat16 on disk, roughly; int8 on a CPU keeps a part of them twice."""


@dataclass(frozen=True, slots=True)
class Plan:
    """changes: what differs, a line each. refused: what a running deployment can't do. starts, stops: models by instance."""

    changes: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()
    starts: tuple[str, ...] = ()
    stops: tuple[str, ...] = ()
    memory: tuple[str, ...] = ()
    caches: tuple[str, ...] = ()
    experiments: tuple[str, ...] = ()

    @property
    def empty(self) -> bool:
        return not self.changes


def engine_key(config: Config, name: str) -> str:
    """Which engine serves a model, as NAME@DIGEST: another one as soon as anything of it changes but how many replicas it has
    and what it is asked first. It is what engine processes call their instance."""
    settings = config.models[name].model_dump(mode="json", exclude={"replicas", "autoscaling", "warm_up"})
    return f"{name}@{digest(settings)}"


def digest(settings: Mapping[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(settings, sort_keys=True).encode(), digest_size=4).hexdigest()


def instances_of(config: Config) -> dict[str, str]:
    """Instance to model, of those that run here."""
    return {engine_key(config, name): name for name, model in config.models.items() if model.upstream is None}


def plan(old: Config | None, new: Config) -> Plan:
    """`old` is None where nothing runs."""
    had = instances_of(old) if old is not None else {}
    has = instances_of(new)
    starts = tuple(instance for instance in has if instance not in had)
    changes = tuple(_differences(_plain(old) if old is not None else {}, _plain(new)))
    return Plan(
        changes=changes,
        refused=tuple(line for line in changes if old is not None and line.startswith(FIXED)),
        starts=starts,
        stops=tuple(instance for instance in had if instance not in has),
        memory=tuple(_memory(instance, new.models[has[instance]]) for instance in starts),
        caches=() if old is None else tuple(_caches(old, new)),
        experiments=() if old is None else tuple(_experiments(old, new)),
    )


def _plain(config: Config) -> dict[str, Any]:
    found: dict[str, Any] = config.model_dump(mode="json")
    return found


def _differences(old: Any, new: Any, path: str = "") -> Iterator[str]:
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for key in [*old, *(key for key in new if key not in old)]:
            where = f"{path}.{key}" if path else str(key)
            if key not in new:
                yield f"{where}: removed"
            elif key not in old:
                yield f"{where}: new" + ("" if isinstance(new[key], Mapping) else f", {_short(new[key])}")
            else:
                yield from _differences(old[key], new[key], where)
    elif old != new:
        yield f"{path}: {_short(old)} becomes {_short(new)}"


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= SHOWN_CHARS else text[: SHOWN_CHARS - 1] + "…"


def _memory(instance: str, model: Model) -> str:
    """Roughly; weights that are not on this machine yet are not known."""
    ranks = f"{model.tensor_parallel} ranks of which each has a share of " if model.tensor_parallel > 1 else ""
    scaling = model.autoscaling
    count = f"{scaling.min_replicas} to {scaling.max_replicas}" if scaling is not None else f"{model.replicas}"
    each = f"{instance}: {count} × {ranks}"
    kv = model.kv_cache_memory
    if model.source is None:
        return f"{each}nothing to speak of"
    found = source.locate(source.parse(model.source))
    if found is None:
        return f"{each}its weights, which are not here yet, and {_mib(kv)} of KV cache"
    files = sum(file.stat().st_size for file in found.path.glob("*.safetensors"))
    return f"{each}about {_mib(files * PACKED[model.quantization])} of weights and {_mib(kv * model.tensor_parallel)} of KV cache"


def _mib(count: float) -> str:
    return f"{count / 2**20:,.0f} MiB"


def _caches(old: Config, new: Config) -> Iterator[str]:
    """Of releases that both have: answers are found again under the same fingerprint only."""
    for name in new.releases:
        if name not in old.releases:
            continue
        before, after = (fingerprint(each, name, _sources(each)) for each in (old, new))
        if before != after:
            yield f"{name}: cached answers are left behind, as it would answer differently now"
    for name in old.releases:
        if name not in new.releases:
            yield f"{name}: cached answers are left behind, as it is gone"


def _sources(config: Config) -> dict[str, str]:
    """For comparing: a source names its revision."""
    return {name: str(model.source or model.upstream or "echo") for name, model in config.models.items()}


def _experiments(old: Config, new: Config) -> Iterator[str]:
    for name, experiment in new.experiments.items():
        before = old.experiments.get(name)
        if before is None:
            yield f"{name}: begins"
        elif contents_of(old, name) != (contents := contents_of(new, name)):
            changed = [arm for arm, content in contents.items() if contents_of(old, name).get(arm) != content]
            yield f"{name}: begins anew, as {' and '.join(changed) or 'its arms'} changed"
        elif before.arms != experiment.arms:
            yield f"{name}: goes on with the weights it has; `gearshift experiment set` moves them"
    for name in old.experiments:
        if name not in new.experiments:
            yield f"{name}: ends"
