"""What Serve shall run: the kinds of process of replicas.py as deployments. Serve's decorators are applied here only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gearshift.deployments.encoder import EncoderReplica
from gearshift.deployments.plan import digest, engine_key
from gearshift.deployments.ranks import CPU_SHARE, bundles
from gearshift.deployments.replicas import EngineReplica, EvaluatorReplica, GatewayReplica, Place
from gearshift.platform.config import Config, Embedding, Model

GATEWAY, EVALUATOR, ENCODER, MODEL = "gateway", "evaluator", "encoder", "model-"
ENV = {
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",  # one event loop a process, and that is uvloop
}
ENGINE_ENV = {
    "OMP_WAIT_POLICY": "PASSIVE",  # spinning threads take the cores from each other
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
}


class Targets:
    """Of one deployment. Those of an unchanged version differ in nothing, so that Serve leaves their replicas alone."""

    def __init__(self, prefix: str, place: Place) -> None:
        self._prefix = prefix
        self._place = place
        self._env = ENV | {"PROMETHEUS_MULTIPROC_DIR": str(place.metrics)}
        self._common = {
            "graceful_shutdown_timeout_s": place.drain_timeout_s + 10,
            "health_check_period_s": 1.0,
            "health_check_timeout_s": 30.0,
        }

    def engines(self, config: Config, numbers: Mapping[str, int]) -> dict[str, Any]:
        """One Serve application an engine key, so that versions of a model stand side by side. numbers: of replicas; those of
        none are left out."""
        found = {}
        for name, model in config.models.items():
            key = engine_key(config, name)
            if model.upstream is None and numbers[key]:
                found[key] = self._engine(name, key, model, numbers[key])
        return found

    def _engine(self, name: str, key: str, model: Model, replicas: int) -> Any:
        from ray import serve

        actor: dict[str, Any] = {
            "num_cpus": CPU_SHARE if model.tensor_parallel > 1 else 0,
            "num_gpus": model.num_gpus,
            "resources": model.resources,
            "runtime_env": {"env_vars": self._env | ENGINE_ENV},
        }
        if model.accelerator_type is not None:
            actor["accelerator_type"] = model.accelerator_type
        options: dict[str, Any] = {"name": f"engine-{name}", "num_replicas": replicas, **self._common}
        if model.max_replicas_per_node is not None:
            options["max_replicas_per_node"] = model.max_replicas_per_node
        if model.tensor_parallel > 1:
            options |= {"placement_group_bundles": bundles(model), "placement_group_strategy": model.placement}
        engine = serve.deployment(EngineReplica, ray_actor_options=actor, **options)
        engine = engine.options(version=key, _internal=True)  # the same engine: only its number of replicas changes
        # what does not belong to a version starts nothing anew
        settings = model.model_copy(update={"replicas": 1, "autoscaling": None, "warm_up": []})
        app = engine.bind(settings, name, key, self._place)
        return serve.RunTarget(app, name=f"{self._prefix}{MODEL}{key}", route_prefix=None)

    def services(self, config: Config, revision: int, weights: Mapping[str, str]) -> list[Any]:
        """The gateways and the evaluator, which follow later revisions themselves. weights: revisions of the models'."""
        gateway: dict[str, Any] = {"name": GATEWAY, "num_replicas": config.gateway.replicas}
        if config.gateway.max_replicas_per_node is not None:
            gateway["max_replicas_per_node"] = config.gateway.max_replicas_per_node
        found = [self._service(GatewayReplica, gateway, config, revision, weights)]
        if config.evaluation.enabled:
            evaluator = {"name": EVALUATOR, "num_replicas": 1}
            found.append(self._service(EvaluatorReplica, evaluator, config, revision, weights))
        if config.embedding is not None:
            found.append(self._encoder(config, config.embedding))
        return found

    def _encoder(self, config: Config, settings: Embedding) -> Any:
        from ray import serve

        actor = {
            "num_cpus": 0,
            "num_gpus": settings.num_gpus,
            "runtime_env": {"env_vars": self._env | ENGINE_ENV},
        }
        service = serve.deployment(
            EncoderReplica, name=ENCODER, num_replicas=1, ray_actor_options=actor, **self._common
        )
        fixed = config.model_dump(mode="json", include={"embedding": True, "cache": {"semantic"}})
        app = service.options(version=digest(fixed), _internal=True).bind(config, self._place)
        return serve.RunTarget(app, name=f"{self._prefix}{ENCODER}", route_prefix=None)

    def _service(
        self, kind: type, options: Mapping[str, Any], config: Config, revision: int, weights: Mapping[str, str]
    ) -> Any:
        from ray import serve

        actor = {"num_cpus": 0, "runtime_env": {"env_vars": self._env}}
        service = serve.deployment(kind, ray_actor_options=actor, **options, **self._common)
        # one that a restarted `serve` finds goes on: it reads what serves by now
        fixed = config.model_dump(mode="json", include={"gateway", "redis", "telemetry"})
        service = service.options(version=digest(fixed), _internal=True)
        app = service.bind(config, revision, dict(weights), self._place)
        return serve.RunTarget(app, name=f"{self._prefix}{options['name']}", route_prefix=None)
