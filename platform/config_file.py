"""From a YAML file to a `Config`, or to one error that lists every problem with its path, its line and a hint."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.error import MarkedYAMLError

from gearshift.platform.config import AUTO, Config
from gearshift.platform.errors import ConfigError, WeightsError
from gearshift.platform.weights import source

Loc = tuple[str | int, ...]
NAMED: tuple[Loc, ...] = tuple(
    (name,) for name in ("models", "prompts", "policies", "releases", "experiments", "tiers", "tenants")
)
"""Sections whose keys are names."""
Problem = tuple[Loc, str]


def load(path: Path) -> Config:
    """Raises `ConfigError`."""
    try:
        text = path.read_text()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    return _from_folder(parse(text, str(path)), path.parent)


def _from_folder(config: Config, folder: Path) -> Config:
    """Paths in the file are relative to the file."""
    router = config.router

    def found(value: str | None) -> str | None:
        return None if value is None else str((folder / value).resolve())

    files = {"artefact": found(router.artefact), "calibration": found(router.calibration)}
    if router.cascade is not None:
        files["cascade"] = router.cascade.model_copy(update={"judge": found(router.cascade.judge)})  # type: ignore[assignment]
    update: dict[str, Any] = {"router": router.model_copy(update=files)}
    canaries = config.evaluation.canaries
    if canaries is not None:
        at = canaries.model_copy(update={"file": found(canaries.file)})
        update["evaluation"] = config.evaluation.model_copy(update={"canaries": at})
    update["policies"] = {
        name: policy.model_copy(
            update={"rules": [rule.model_copy(update={"classifier": found(rule.classifier)}) for rule in policy.rules]}
        )
        for name, policy in config.policies.items()
    }
    if config.cache.semantic is not None:
        semantic = config.cache.semantic.model_copy(update={"verifier": found(config.cache.semantic.verifier)})
        update["cache"] = config.cache.model_copy(update={"semantic": semantic})
    if config.embedding is not None:
        update["embedding"] = config.embedding.model_copy(update={"tagger": found(config.embedding.tagger)})
    return config.model_copy(update=update)


def parse(text: str, name: str = "config") -> Config:
    """Raises `ConfigError` with a line for each problem: `name:line: path: what is wrong`."""
    try:
        raw = YAML(typ="rt").load(text)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise ConfigError(f"{name}:{mark.line + 1 if mark else 1}: not YAML: {error.problem}") from error
    if not isinstance(raw, CommentedMap):
        raise ConfigError(f"{name}:1: a config is a mapping with the keys {', '.join(Config.model_fields)}")
    config, problems = _validate(_plain(raw))
    readable = config if config is not None else _without(_plain(raw), [loc for loc, _ in problems])
    if readable is not None:
        problems += _cross_check(readable)
    if config is None or problems:
        lines = [(_line(raw, loc), ".".join(map(str, loc)), what) for loc, what in problems]
        raise ConfigError("\n".join(f"{name}:{line}: {path}: {what}" for line, path, what in sorted(lines)))
    return config


def _validate(plain: dict[str, Any]) -> tuple[Config | None, list[Problem]]:
    try:
        return Config.model_validate(plain), []
    except ValidationError as error:
        return None, [_problem(dict(detail)) for detail in error.errors(include_url=False)]


def _without(plain: dict[str, Any], locs: list[Loc]) -> Config | None:
    """The config without the values that are wrong, so that the names in the rest can be checked in the same go. None when
    something is wrong that others may refer to, or that can't be left out."""
    for loc in locs:
        node: Any = plain
        for part in loc[:-1]:
            node = node[int(part)] if isinstance(node, list) else node.get(part) if isinstance(node, dict) else None
        if not isinstance(node, dict) or isinstance(node.get(loc[-1]), dict | list) or loc[:-1] in NAMED:
            return None
        node.pop(loc[-1], None)
    return _validate(plain)[0]


def _plain(node: Any) -> Any:
    if isinstance(node, CommentedMap):
        return {key: _plain(value) for key, value in node.items()}
    if isinstance(node, CommentedSeq):
        return [_plain(value) for value in node]
    if isinstance(node, bool) or node is None:
        return node
    return next((plain(node) for plain in (int, float, str) if isinstance(node, plain)), node)


def _problem(detail: dict[str, Any]) -> Problem:
    loc: Loc = tuple(part for part in detail["loc"] if part != "[key]")
    if detail["type"] == "extra_forbidden":
        return loc, f"unknown key{_did_you_mean(str(loc[-1]), _keys_at(loc[:-1]))}"
    if detail["type"] == "missing":
        return loc, "is missing"
    message = detail["msg"].removeprefix("Value error, ")
    if detail["type"] == "literal_error":
        allowed = detail["ctx"]["expected"].replace("'", "").replace(" or ", ", ").split(", ")
        message += _did_you_mean(str(detail["input"]), allowed)
    given = detail["input"]
    shown = f" (got {given!r})" if isinstance(given, str | int | float) else ""
    return loc, message[0].lower() + message[1:] + shown


def _keys_at(loc: Loc) -> list[str]:
    """The keys that the config knows at a path."""
    kind: Any = Config
    for part in loc:
        model = _model_in(kind)
        if model is not None and part in model.model_fields:
            kind = model.model_fields[str(part)].annotation
        else:  # a name in a dict, or an index in a list
            kind = typing.get_args(kind)[-1]
    model = _model_in(kind)
    return list(model.model_fields) if model else []


def _model_in(kind: Any) -> type[BaseModel] | None:
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return kind
    if typing.get_origin(kind) in (typing.Union, types.UnionType, typing.Annotated):
        return next((model for arg in typing.get_args(kind) if (model := _model_in(arg))), None)
    return None


def _did_you_mean(word: str, known: Iterable[str]) -> str:
    near = get_close_matches(word, list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def _line(node: Any, loc: Loc) -> int:
    """The line of the deepest part of the path that is in the file, counted from 1."""
    line = 0
    for part in loc:
        if isinstance(node, CommentedMap) and part in node:
            line = node.lc.key(part)[0]
        elif isinstance(node, CommentedSeq) and isinstance(part, int) and part < len(node):
            line = node.lc.item(part)[0]
        else:
            break
        node = node[part]
    return int(line) + 1


def _cross_check(config: Config) -> Iterator[Problem]:
    """What no section can see alone: names that nothing answers to, names used twice, an open door used twice."""
    for name, model in config.models.items():
        if model.source is not None:
            yield from _source(("models", name, "source"), model.source)
    for name, release in config.releases.items():
        yield from _known(("releases", name, "model"), release.model, config.models)
        yield from _known(("releases", name, "prompt"), release.prompt, config.prompts)
        yield from _known(("releases", name, "policy"), release.policy, config.policies)
        served = config.models.get(release.model)
        rules = config.policies.get(release.policy)
        if rules is not None and rules.banned and served is not None and served.source is None:
            yield (
                ("releases", name, "policy"),
                f"{release.model} does not run here: {release.policy}.banned can't be held",
            )
        if release.watermark is not None and served is not None and served.source is None:
            yield (
                ("releases", name, "watermark"),
                f"{release.model} does not run here, and what it says can't be marked",
            )
        if name in config.tiers or name == AUTO:
            yield ("releases", name), "is also the name of a tier; a client asks for either by name"
    for name, experiment in config.experiments.items():
        for arm in experiment.arms if experiment.thresholds is None else ():
            yield from _known(("experiments", name, "arms", arm), arm, config.releases)
        yield from _layer(config, name)
        if config.evaluation.judge is None and "preferred" in (*experiment.guards, *experiment.metrics):
            yield ("experiments", name), "preferred is what a judge says; set evaluation.judge"
    for name, tier in config.tiers.items():
        if tier.release is not None:
            yield from _known(("tiers", name, "release"), tier.release, config.releases)
        if tier.experiment is not None:
            yield from _known(("tiers", name, "experiment"), tier.experiment, config.experiments)
            if tier.experiment in config.experiments and config.experiments[tier.experiment].thresholds is not None:
                yield ("tiers", name, "experiment"), "its arms are thresholds; it belongs to router.experiment"
        if name == AUTO:
            yield ("tiers", name), "auto is the router's name"
    if config.router.experiment is not None:
        yield from _known(("router", "experiment"), config.router.experiment, config.experiments)
        if config.router.experiment in config.experiments and (
            config.experiments[config.router.experiment].thresholds is None
        ):
            yield ("router", "experiment"), "its arms need thresholds; one of releases belongs to a tier"
    if config.evaluation.judge is not None:
        yield from _known(("evaluation", "judge", "release"), config.evaluation.judge.release, config.releases)
        if not config.evaluation.text_chars:
            yield ("evaluation", "judge"), "can't judge what it does not read; set text_chars above 0"
    if config.embedding is not None:
        yield from _source(("embedding", "source"), config.embedding.source)
    if config.cache.semantic is not None and config.embedding is None:
        yield ("cache", "semantic"), "compares vectors, and nothing makes any; add a section `embedding: {}`"
    askable = {"*", AUTO, *config.tiers, *config.releases}
    seen_keys: dict[str, str] = {}
    for name, tenant in config.tenants.items():
        for index, model_name in enumerate(tenant.models):
            yield from _known(("tenants", name, "models", index), model_name, askable)
        for index, key in enumerate(tenant.keys):
            if seen_keys.setdefault(key, name) != name:
                yield ("tenants", name, "keys", index), f"is also a key of tenant {seen_keys[key]!r}"
    for name, tenant in config.tenants.items():
        for index, tier_name in enumerate(tenant.tiers or ()):
            yield from _known(("tenants", name, "tiers", index), tier_name, config.tiers)
        if tenant.tier is not None:
            yield from _known(("tenants", name, "tier"), tenant.tier, config.tiers)
    if sum(tenant.open for tenant in config.tenants.values()) > 1:
        yield ("tenants",), "only one tenant can be open"
    if config.redis.url is not None and config.redis.url_env is not None:
        yield ("redis", "url_env"), "set either url or url_env"


def _known(loc: Loc, name: str, known: Mapping[str, Any] | set[str]) -> Iterator[Problem]:
    if name not in known:
        hint = _did_you_mean(name, known) or f"; there are: {', '.join(sorted(known)) or 'none'}"
        yield loc, f"{name!r} is not defined{hint}"


def _layer(config: Config, name: str) -> Iterator[Problem]:
    """Experiments of a layer either all say their share, or none does."""
    mine = config.experiments[name]
    if mine.layer is None:
        return
    shares = [each.layer_share for each in config.experiments.values() if each.layer == mine.layer]
    if None in shares and any(share is not None for share in shares):
        yield ("experiments", name, "layer_share"), f"either all experiments of layer {mine.layer!r} have one, or none"
    elif sum(share or 0 for share in shares) > 1 + 1e-9:
        yield ("experiments", name, "layer_share"), f"those of layer {mine.layer!r} add up to more than 1"


def _source(loc: Loc, text: str) -> Iterator[Problem]:
    try:
        source.parse(text)
    except WeightsError as error:
        yield loc, error.message
