"""The composition root: from a config to a running deployment. The only place where Serve's decorators are applied."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import httpx

from gearshift.deployments import registry
from gearshift.deployments.files import check_files
from gearshift.deployments.plan import engine_key, instances_of, plan
from gearshift.deployments.ranks import CPU_SHARE, bundles
from gearshift.deployments.replicas import EngineReplica, EvaluatorReplica, GatewayReplica, Place
from gearshift.deployments.revisions import Revisions, dumped
from gearshift.deployments.warm_up import StartFailed, warm_up
from gearshift.platform.cache.embedded import EmbeddedRedis
from gearshift.platform.cache.store import StoreAway
from gearshift.platform.config import Config
from gearshift.platform.errors import ConfigError, GearshiftError
from gearshift.platform.weights import source
from gearshift.platform.weights.source import Progress, Weights

log = logging.getLogger(__name__)
Answer = TypeVar("Answer")

READY_TIMEOUT_S = 300.0
TAKE_OVER_TIMEOUT_S = 60.0
ASK_TIMEOUT_S = 5.0
GATEWAY_APP = "gateway"
MODEL_APP = "model-"
REPLICA_ENV = {
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",  # one event loop a process, and that is uvloop
}
ENGINE_ENV = {
    "OMP_WAIT_POLICY": "PASSIVE",  # spinning threads take the cores from each other
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
}


def fetch_weights(config: Config, progress: Progress) -> dict[str, Weights]:
    """The weights of every local model, by model name. Raises `WeightsError`."""
    sources = {name: model.source for name, model in config.models.items() if model.source is not None}
    found = {name: source.ensure(source.parse(text), progress) for name, text in sources.items()}
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


def engine_targets(config: Config, weights: dict[str, Weights], place: Place, env: dict[str, str]) -> dict[str, Any]:
    """One Serve application an engine key, so that versions of a model stand side by side."""
    from ray import serve

    targets = {}
    for name, model in config.models.items():
        if model.upstream is not None:
            continue
        key = engine_key(config, name)
        actor = {"num_cpus": 0, "num_gpus": model.num_gpus, "runtime_env": {"env_vars": env | ENGINE_ENV}}
        options = {"name": f"engine-{name}", "num_replicas": model.replicas, **_common(place)}
        if model.tensor_parallel > 1:
            actor["num_cpus"] = CPU_SHARE
            options |= {"placement_group_bundles": bundles(model), "placement_group_strategy": model.placement}
        engine = serve.deployment(EngineReplica, ray_actor_options=actor, **options)
        engine = engine.options(version=key, _internal=True)  # the same engine: only its number of replicas changes
        path = weights[name].path if name in weights else None
        settings = model.model_copy(update={"replicas": 1, "warm_up": []})  # these start nothing anew
        app = engine.bind(settings, name, key, path, place)
        targets[key] = serve.RunTarget(app, name=f"{MODEL_APP}{key}", route_prefix=None)
    return targets


def service_targets(
    config: Config, revision: int, weights: dict[str, Weights], place: Place, env: dict[str, str]
) -> list[Any]:
    """The gateways and the evaluator, which follow later revisions themselves."""
    from ray import serve

    actor = {"num_cpus": 0, "runtime_env": {"env_vars": env}}
    common = {"ray_actor_options": actor, **_common(place)}
    gateway = serve.deployment(GatewayReplica, name="gateway", num_replicas=config.gateway.replicas, **common)
    weights_of = revisions_of(config, weights)
    app = gateway.bind(config, revision, weights_of, place)
    targets = [serve.RunTarget(app, name=GATEWAY_APP, route_prefix=None)]
    if config.evaluation.enabled:
        evaluator = serve.deployment(EvaluatorReplica, name="evaluator", num_replicas=1, **common)
        targets.append(
            serve.RunTarget(evaluator.bind(config, revision, weights_of, place), name="evaluator", route_prefix=None)
        )
    return targets


def _common(place: Place) -> dict[str, Any]:
    return {
        "graceful_shutdown_timeout_s": place.drain_timeout_s + 10,
        "health_check_period_s": 1.0,
        "health_check_timeout_s": 30.0,
    }


class Deployment:
    """A running deployment. Owns the folder of sockets, the embedded Redis and the local Ray; `close` ends them all.

    What it starts with is the revision that served last, or the file where it is new: a revision that an earlier run left
    half applied is finished, or undone where it can't be.
    """

    def __init__(
        self,
        config: Config,
        progress: Progress = source.no_progress,
        who: str = "",
        on_step: Callable[[str], None] = lambda step: None,
    ) -> None:
        """on_step: called after each step of applying a revision, with its name."""
        check_environment(config)
        self._on_step = on_step
        self._progress = progress
        self._folder = Path(tempfile.mkdtemp(prefix="gearshift-"))
        self._redis: EmbeddedRedis | None = None
        url = os.environ[config.redis.url_env] if config.redis.url_env else config.redis.url
        try:
            if url is None:
                self._redis = EmbeddedRedis(self._folder)
                url = self._redis.url
            redis = config.redis
            self.place = Place(self._folder, url, redis.namespace, redis.timeout_s, config.gateway.drain_timeout_s)
            self.config, self.revision = self._begin(config, who)
        except BaseException:
            self.close()
            raise

    def ask(self, question: Callable[[Revisions], Coroutine[Any, Any, Answer]]) -> Answer:
        """About revisions, from a thread without an event loop. Raises `StoreAway`."""

        async def asked() -> Answer:
            store = self.place.store(ASK_TIMEOUT_S)
            try:
                return await question(Revisions(store))
            finally:
                await store.close()

        return asyncio.run(asked())

    def _begin(self, config: Config, who: str) -> tuple[Config, int]:
        """Starts what is to serve, and returns it."""
        head, known = self.ask(Revisions.head), self.ask(Revisions.all)
        is_new = all(dumped(config) != each.config for each in known)
        if not head.settled and is_new:  # the operator wants something else by now
            self.ask(lambda revisions: revisions.undo(head.serving, "another file was served"))
        elif not head.settled:
            wanted = known[head.target - 1]
            log.warning("revision %d was left half applied; finishing it", wanted.number)
            try:
                return self._start(wanted.parsed(), wanted.number)
            except (GearshiftError, RuntimeError) as error:
                problem = str(error)
                self.ask(lambda revisions: revisions.undo(head.serving, problem))
                if not head.serving:
                    raise
                log.error("revision %d can't be finished and is undone: %s", wanted.number, problem)
                self._stop_ray()
        if head.serving and not is_new:
            last = known[head.serving - 1]
            return self._start(last.parsed(), last.number)
        new = self.ask(lambda revisions: revisions.begin(config, head.serving, who, "served from its file", "serve"))
        try:
            return self._start(config, new.number)
        except BaseException as error:
            reason = str(error) or type(error).__name__
            self.ask(lambda revisions: revisions.undo(head.serving, reason))
            raise

    def _start(self, config: Config, revision: int) -> tuple[Config, int]:
        self.config = config
        self.weights = fetch_weights(config, self._progress)
        self._start_ray()
        self._progress("starting replicas", 0, 1)
        self.ask(lambda revisions: revisions.activate(revision, revisions_of(config, self.weights)))
        engines = engine_targets(config, self.weights, self.place, self._env)
        self._run([*engines.values(), *service_targets(config, revision, self.weights, self.place, self._env)])
        self._progress("starting replicas", 1, 1)
        self._warm_up(config, list(engines))
        self._wait_until_ready()
        self.ask(lambda revisions: revisions.finish(revision))
        return config, revision

    def _run(self, targets: list[Any]) -> None:
        """Raises `StartFailed`."""
        from ray import serve

        try:
            if targets:
                serve.run_many(targets)
        except RuntimeError as error:
            raise StartFailed(f"The replicas did not come up: {_reason(serve.status())}") from error

    @property
    def url(self) -> str:
        host = self.config.gateway.host
        return f"http://{f'[{host}]' if ':' in host else host}:{self.config.gateway.port}"

    def _start_ray(self) -> None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        import ray
        from ray import serve

        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        metrics = self._folder / "metrics"
        metrics.mkdir(exist_ok=True)
        self._env = REPLICA_ENV | {"PROMETHEUS_MULTIPROC_DIR": str(metrics)}
        self._progress("starting Ray", 0, 1)
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
        self._progress("starting Ray", 1, 1)

    def _stop_ray(self) -> None:
        import ray

        if ray.is_initialized():
            ray.shutdown()

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
        with contextlib.suppress(StoreAway):
            head = self.ask(Revisions.head)
            if not head.settled:
                self._apply(head.target)

    def _apply(self, number: int) -> None:
        """From the revision that serves to the one that was begun: what is new starts beside what runs, gateways take over,
        what is not needed any more goes. Before they have taken over, whatever fails undoes it all."""
        new = self.ask(lambda revisions: revisions.get(number)).parsed()
        had, has = instances_of(self.config), instances_of(new)
        self._on_step("begun")
        try:
            refused = plan(self.config, new).refused
            if refused:
                raise ConfigError(f"Not while it runs: {'; '.join(refused)}.")
            check_files(new)
            weights = fetch_weights(new, self._progress)
            targets = engine_targets(new, weights, self.place, self._env)
            changed = [
                key for key in has if key not in had or _replicas(self.config, had, key) != _replicas(new, has, key)
            ]
            self._run([targets[key] for key in changed])
            self._warm_up(new, [key for key in has if key not in had])
            self._on_step("prepared")
            self.ask(lambda revisions: revisions.activate(number, revisions_of(new, weights)))
            self._on_step("activated")
            self._wait_for_gateways(number)
        except (GearshiftError, RuntimeError) as error:
            self._undo(str(error), [key for key in has if key not in had])
            return
        self._on_step("taken over")
        old, self.config, self.revision, self.weights = self.config, new, number, weights
        self.ask(lambda revisions: revisions.finish(number))
        self._on_step("finished")
        self._delete(key for key in instances_of(old) if key not in has)
        self._on_step("retired")

    def _warm_up(self, config: Config, keys: Sequence[str]) -> None:
        """Asks engines that are new what they have to know. Raises `StartFailed`."""
        instances = instances_of(config)
        wanted = {key: config.models[instances[key]].warm_up for key in keys if config.models[instances[key]].warm_up}
        if wanted:
            asyncio.run(warm_up(self.place.store(ASK_TIMEOUT_S), wanted))

    def _undo(self, problem: str, started: list[str]) -> None:
        log.error("revision undone: %s", problem)
        self.ask(lambda revisions: revisions.activate(self.revision, revisions_of(self.config, self.weights)))
        with contextlib.suppress(StartFailed):
            self._wait_for_gateways(self.revision)
        self.ask(lambda revisions: revisions.undo(self.revision, problem))
        self._delete(started)

    def _delete(self, keys: Iterable[str]) -> None:
        """Their replicas finish what runs there."""
        from ray import serve

        for key in keys:
            serve.delete(f"{MODEL_APP}{key}", _blocking=False)

    def _wait_for_gateways(self, number: int) -> None:
        """Raises `StartFailed`."""

        async def revisions() -> list[int]:
            store = self.place.store(ASK_TIMEOUT_S)
            try:
                return [member.revision for member in await registry.members(store) if not member.model]
            finally:
                await store.close()

        deadline = time.monotonic() + TAKE_OVER_TIMEOUT_S
        while time.monotonic() < deadline:
            found = asyncio.run(revisions())
            if found and all(each == number for each in found):
                return
            time.sleep(0.05)
        raise StartFailed(f"Not all gateways took revision {number} over within {TAKE_OVER_TIMEOUT_S:g} s.")

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
        self._stop_ray()
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
    wanted += [(f"evaluation.webhooks.{n}.secret_env", w.secret_env) for n, w in enumerate(config.evaluation.webhooks)]
    try:
        check_files(config)
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


def _replicas(config: Config, instances: Mapping[str, str], key: str) -> int:
    return config.models[instances[key]].replicas


def _reason(status: Any) -> str:
    """The first message of a deployment that is not healthy, without its traceback."""
    for name, app in status.applications.items():
        for deployment in app.deployments.values():
            if deployment.status != "HEALTHY" and deployment.message:
                lines = [line for line in deployment.message.strip().splitlines() if line.strip()]
                return f"{name}: {lines[-1].strip()}"
    return "see the logs of Ray Serve in /tmp/ray/session_latest/logs/serve"
