"""What a config needs of the machine that it is served from: files, variables, ports, weights."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from gearshift.deployments.files import check_files
from gearshift.deployments.marks import marks_of
from gearshift.platform.config import Config
from gearshift.platform.errors import ConfigError
from gearshift.platform.weights import source
from gearshift.platform.weights.source import Progress, Weights


def check_environment(config: Config, joins: bool = False) -> None:
    """What a config needs of the machine it starts on. joins: an existing cluster, where gateways may listen already. Raises
    `ConfigError` before anything has been started."""
    problems: list[str] = []
    wanted = [
        (f"models.{n}.upstream.api_key_env", m.upstream.api_key_env) for n, m in config.models.items() if m.upstream
    ]
    wanted += [("redis.url_env", config.redis.url_env), ("admin.token_env", config.admin.token_env)]
    wanted += [("telemetry.metrics_token_env", config.telemetry.metrics_token_env)]
    wanted += [(f"evaluation.webhooks.{n}.secret_env", w.secret_env) for n, w in enumerate(config.evaluation.webhooks)]
    semantic = config.cache.semantic
    wanted += [("cache.semantic.api_key_env", semantic.api_key_env)] if semantic is not None else []
    for check in (check_files, marks_of):
        try:
            check(config)
        except ConfigError as error:
            problems += error.problems
    problems += [
        f"{path}: {env} is not set in the environment" for path, env in wanted if env and env not in os.environ
    ]
    if joins and config.redis.url is None and config.redis.url_env is None:
        problems.append("redis: nodes of a cluster need one that all of them reach; set redis.url or redis.url_env")
    listeners = [("admin.port", config.admin.host, config.admin.port)]
    if not joins:
        listeners.append(("gateway.port", config.gateway.host, config.gateway.port))
    for path, host, port in listeners:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError as error:
                problems.append(f"{path}: {host}:{port} can't be listened on ({error.strerror})")
    if problems:
        raise ConfigError("\n".join(problems))


def fetch_weights(config: Config, progress: Progress) -> dict[str, Weights]:
    """The weights of every local model, by model name. Raises `WeightsError`."""
    sources = {name: model.source for name, model in config.models.items() if model.source is not None}
    found = {name: source.ensure(source.parse(text), progress) for name, text in sources.items()}
    if config.embedding is not None:
        source.ensure(source.parse(config.embedding.source), progress)
    for name, model in config.models.items():
        if model.tensor_parallel > 1:
            check_ranks(name, found[name].path, model.tensor_parallel)
    return found


def check_ranks(name: str, path: Path, size: int) -> None:
    """Raises `ConfigError` when the model can't be shared by so many."""
    from gearshift.platform.engine.parallel import share_of
    from gearshift.platform.engine.runner import read_config

    try:
        share_of(read_config(path), size)
    except ConfigError as error:
        raise ConfigError(f"models.{name}.{error.message}") from error


def revisions_of(config: Config, weights: dict[str, Weights]) -> dict[str, str]:
    """What the cache tells versions of a model apart by."""
    found = {name: fetched.revision for name, fetched in weights.items()}
    for name, model in config.models.items():
        if model.upstream is not None:
            found[name] = f"{model.upstream.base_url} {model.upstream.model}"
        if model.echo is not None:
            found[name] = "echo"
    return found
