"""The composition root: from a config to a running deployment. The only place where Serve's decorators are applied."""

from __future__ import annotations

import logging
import os
import shutil
import socket
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

from gearshift.deployments.replicas import EngineReplica, EvaluatorReplica, GatewayReplica, Place
from gearshift.platform.cache.embedded import EmbeddedRedis
from gearshift.platform.config import Config
from gearshift.platform.errors import ConfigError, GearshiftError
from gearshift.platform.weights import source
from gearshift.platform.weights.source import Progress, Weights
from gearshift.router.router import Router

log = logging.getLogger(__name__)

READY_TIMEOUT_S = 300.0
GATEWAY_APP = "gateway"
REPLICA_ENV = {
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",  # one event loop a process, and that is uvloop
}
ENGINE_ENV = {
    "OMP_WAIT_POLICY": "PASSIVE",  # spinning threads take the cores from each other
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
}


class StartFailed(GearshiftError):
    """The deployment did not come up. Seen by operators only."""

    code = "start_failed"


def fetch_weights(config: Config, progress: Progress) -> dict[str, Weights]:
    """The weights of every local model, by model name. Raises `WeightsError`."""
    sources = {name: model.source for name, model in config.models.items() if model.source is not None}
    return {name: source.ensure(source.parse(text), progress) for name, text in sources.items()}


def revisions_of(config: Config, weights: dict[str, Weights]) -> dict[str, str]:
    """What the cache tells versions of a model apart by."""
    found = {name: fetched.revision for name, fetched in weights.items()}
    for name, model in config.models.items():
        if model.upstream is not None:
            found[name] = f"{model.upstream.base_url} {model.upstream.model}"
        if model.echo is not None:
            found[name] = "echo"
    return found


def build(config: Config, weights: dict[str, Weights], place: Place, env: dict[str, str]) -> list[Any]:
    """One Serve application a model version, so that versions stand side by side, and one for the gateways."""
    from ray import serve

    drain_s = config.gateway.drain_timeout_s
    common = {"graceful_shutdown_timeout_s": drain_s + 10, "health_check_period_s": 1.0, "health_check_timeout_s": 30.0}
    targets = []
    for name, model in config.models.items():
        if model.upstream is not None:
            continue
        actor = {"num_cpus": 0, "num_gpus": model.num_gpus, "runtime_env": {"env_vars": env | ENGINE_ENV}}
        engine = serve.deployment(
            EngineReplica, name=f"engine-{name}", num_replicas=model.replicas, ray_actor_options=actor, **common
        )
        path = weights[name].path if name in weights else None
        app = engine.bind(config, name, path, place)
        targets.append(serve.RunTarget(app, name=f"model-{name}", route_prefix=None))
    gateway = serve.deployment(
        GatewayReplica,
        name="gateway",
        num_replicas=config.gateway.replicas,
        ray_actor_options={"num_cpus": 0, "runtime_env": {"env_vars": env}},
        **common,
    )
    app = gateway.bind(config, revisions_of(config, weights), place)
    targets.append(serve.RunTarget(app, name=GATEWAY_APP, route_prefix=None))
    if config.evaluation.enabled:
        evaluator = serve.deployment(
            EvaluatorReplica,
            name="evaluator",
            num_replicas=1,
            ray_actor_options={"num_cpus": 0, "runtime_env": {"env_vars": env}},
            **common,
        )
        targets.append(serve.RunTarget(evaluator.bind(config, place), name="evaluator", route_prefix=None))
    return targets


class Deployment:
    """A running deployment. Owns the folder of sockets, the embedded Redis and the local Ray; `close` ends them all."""

    def __init__(self, config: Config, progress: Progress = source.no_progress) -> None:
        check_environment(config)
        self.config = config
        self.weights = fetch_weights(config, progress)
        self._folder = Path(tempfile.mkdtemp(prefix="gearshift-"))
        self._redis: EmbeddedRedis | None = None
        url = os.environ[config.redis.url_env] if config.redis.url_env else config.redis.url
        try:
            if url is None:
                self._redis = EmbeddedRedis(self._folder)
                url = self._redis.url
            self.place = Place(self._folder, url)
            self._start(progress)
        except BaseException:
            self.close()
            raise

    @property
    def url(self) -> str:
        host = self.config.gateway.host
        return f"http://{f'[{host}]' if ':' in host else host}:{self.config.gateway.port}"

    def _start(self, progress: Progress) -> None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        import ray
        from ray import serve

        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        metrics = self._folder / "metrics"
        metrics.mkdir()
        progress("starting Ray", 0, 1)
        ray.init(
            address="local",
            num_cpus=2,  # replicas ask for none; 0 would have their workers started one by one
            include_dashboard=False,
            log_to_driver=True,
            object_store_memory=100 * 1024**2,
            logging_level=logging.ERROR,
        )
        serve.start(
            proxy_location="Disabled",
            logging_config={"enable_access_log": False, "log_level": "WARNING"},
        )
        progress("starting Ray", 1, 1)
        progress("starting replicas", 0, 1)
        env = REPLICA_ENV | {"PROMETHEUS_MULTIPROC_DIR": str(metrics)}
        try:
            serve.run_many(build(self.config, self.weights, self.place, env))
        except RuntimeError as error:
            raise StartFailed(f"The replicas did not come up: {_reason(serve.status())}") from error
        progress("starting replicas", 1, 1)
        self._wait_until_ready()

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + READY_TIMEOUT_S
        while time.monotonic() < deadline:
            try:
                if httpx.get(f"{self.url}/ready", timeout=2.0).status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            time.sleep(0.05)
        raise StartFailed(f"{self.url}/ready did not answer within {READY_TIMEOUT_S:g} s.")

    def watch(self) -> None:
        """To be called now and then, from the thread that made the deployment: what Ray does not keep alive."""
        if self._redis is not None and self._redis.revive():
            log.error("the embedded Redis had ended and was started again; cached answers and counts are lost")

    def drain(self) -> None:
        """Ends the replicas in good order: gateways refuse new requests and finish the running ones
        (GatewayReplica.drain), and engines follow when nobody asks them any more."""
        from ray import serve

        serve.delete(GATEWAY_APP)
        for name in serve.status().applications:
            serve.delete(name, _blocking=False)
        while serve.status().applications:
            time.sleep(0.1)

    def close(self) -> None:
        """Leaves no process and no file, and waits for no answer. May be called at any point of the start."""
        import ray

        if ray.is_initialized():
            ray.shutdown()
        if self._redis is not None:
            self._redis.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def check_environment(config: Config) -> None:
    """What a config needs of the machine it starts on. Raises `ConfigError` before anything has been started."""
    problems: list[str] = []
    wanted = [
        (f"models.{n}.upstream.api_key_env", m.upstream.api_key_env) for n, m in config.models.items() if m.upstream
    ]
    wanted += [("redis.url_env", config.redis.url_env), ("admin.token_env", config.admin.token_env)]
    wanted += [("telemetry.metrics_token_env", config.telemetry.metrics_token_env)]
    try:
        Router(config)
    except ConfigError as error:
        problems += error.problems
    problems += [
        f"{path}: {env} is not set in the environment" for path, env in wanted if env and env not in os.environ
    ]
    for path, host, port in (
        ("gateway.port", config.gateway.host, config.gateway.port),
        ("admin.port", config.admin.host, config.admin.port),
    ):
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError as error:
                problems.append(f"{path}: {host}:{port} can't be listened on ({error.strerror})")
    if problems:
        raise ConfigError("\n".join(problems))


def _reason(status: Any) -> str:
    """The first message of a deployment that is not healthy, without its traceback."""
    for name, app in status.applications.items():
        for deployment in app.deployments.values():
            if deployment.status != "HEALTHY" and deployment.message:
                lines = [line for line in deployment.message.strip().splitlines() if line.strip()]
                return f"{name}: {lines[-1].strip()}"
    return "see the logs of Ray Serve in /tmp/ray/session_latest/logs/serve"
