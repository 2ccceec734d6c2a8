"""The composition root: from a config to a running deployment, and from one revision of it to the next."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from gearshift.deployments import registry
from gearshift.deployments.autoscale import Decision
from gearshift.deployments.cluster import Cluster, ClusterLost, node_address
from gearshift.deployments.environment import check_environment, fetch_weights, revisions_of
from gearshift.deployments.files import check_files
from gearshift.deployments.lease import Lease
from gearshift.deployments.meeting import SECRET_BYTES
from gearshift.deployments.plan import instances_of, plan
from gearshift.deployments.replicas import Place
from gearshift.deployments.revisions import Revisions, dumped
from gearshift.deployments.scales import Scales
from gearshift.deployments.targets import GATEWAY, MODEL, Targets
from gearshift.deployments.warm_up import StartFailed, warm_up
from gearshift.platform.cache.embedded import EmbeddedRedis
from gearshift.platform.cache.store import Store, StoreAway
from gearshift.platform.config import Config
from gearshift.platform.errors import ConfigError, GearshiftError
from gearshift.platform.weights import source
from gearshift.platform.weights.source import Progress

log = logging.getLogger(__name__)
Answer = TypeVar("Answer")

READY_TIMEOUT_S = 300.0
TAKE_OVER_TIMEOUT_S = 60.0
ASK_TIMEOUT_S = 5.0
FROM_FILE = "served from its file"


class Deployment:
    """A running deployment. Owns the folder of sockets, the embedded Redis and the local Ray; `close` ends them all.

    What it starts with is the revision that served last, or the file where it is new: a revision that an earlier run left
    half applied is finished, or undone where it can't be. On a cluster that it joined, replicas that an earlier run left
    behind go on.
    """

    def __init__(
        self,
        config: Config,
        progress: Progress = source.no_progress,
        who: str = "",
        on_step: Callable[[str], None] = lambda step: None,
        address: str | None = None,
    ) -> None:
        """on_step: called after each step of applying a revision, with its name. address: of an existing Ray cluster."""
        check_environment(config, joins=address is not None)
        self._on_step = on_step
        self._progress = progress
        self._address = address
        self._folder: Path | None = None
        self._redis: EmbeddedRedis | None = None
        self._cluster: Cluster | None = None
        self._lease: Lease | None = None
        self._scales = Scales()
        try:
            self.place = self._settle_down(config)
            if self._redis is None:
                self._lease = Lease(lambda: self.place.store(ASK_TIMEOUT_S))
            self.config, self.revision = self._begin(config, who)
        except BaseException:
            self.close()
            raise

    def _settle_down(self, config: Config) -> Place:
        redis = config.redis
        url = os.environ[redis.url_env] if redis.url_env else redis.url
        if self._address is None:
            self._folder = Path(tempfile.mkdtemp(prefix="gearshift-"))
        if url is None:
            assert self._folder is not None
            self._redis = EmbeddedRedis(self._folder)
            url = self._redis.url
        place = Place(self._folder or Path(), url, redis.namespace, redis.timeout_s, config.gateway.drain_timeout_s)
        if self._folder is None:  # where whoever served before on this cluster has its replicas
            secret = asyncio.run(_secret(place.store(ASK_TIMEOUT_S)))
            folder = Path(tempfile.gettempdir()) / f"gearshift-{secret[:8]}"
            place = replace(place, folder=folder, secret=secret)
        place.metrics.mkdir(mode=0o700, parents=True, exist_ok=True)
        return place

    def ask(self, question: Callable[[Store], Coroutine[Any, Any, Answer]]) -> Answer:
        """Of Redis, from a thread without an event loop. Raises `StoreAway`."""

        async def asked() -> Answer:
            store = self.place.store(ASK_TIMEOUT_S)
            try:
                return await question(store)
            finally:
                await store.close()

        return asyncio.run(asked())

    def _about_revisions(self, question: Callable[[Revisions], Coroutine[Any, Any, Answer]]) -> Answer:
        return self.ask(lambda store: question(Revisions(store)))

    def _begin(self, config: Config, who: str) -> tuple[Config, int]:
        """Starts what is to serve, and returns it."""
        head, known = self._about_revisions(Revisions.head), self._about_revisions(Revisions.all)
        is_new = all(dumped(config) != each.config for each in known)
        if not head.settled and is_new:  # the operator wants something else by now
            self._about_revisions(lambda revisions: revisions.undo(head.serving, "another file was served"))
        if head.serving and self._left_behind():  # goes on as it is; `watch` applies what is new to it
            self._scales.numbers = self.ask(registry.scaled)
            found = self._start(known[head.serving - 1].parsed(), head.serving)
            if is_new:
                self._about_revisions(lambda revisions: revisions.begin(config, head.serving, who, FROM_FILE, "serve"))
            return found
        self.ask(registry.forget_scales)
        if not head.settled and not is_new:
            wanted = known[head.target - 1]
            log.warning("revision %d was left half applied; finishing it", wanted.number)
            try:
                return self._start(wanted.parsed(), wanted.number)
            except (GearshiftError, RuntimeError) as error:
                problem = str(error)
                self._about_revisions(lambda revisions: revisions.undo(head.serving, problem))
                if not head.serving:
                    raise
                log.error("revision %d can't be finished and is undone: %s", wanted.number, problem)
        if head.serving and not is_new:
            last = known[head.serving - 1]
            return self._start(last.parsed(), last.number)
        new = self._about_revisions(lambda revisions: revisions.begin(config, head.serving, who, FROM_FILE, "serve"))
        try:
            return self._start(config, new.number)
        except BaseException as error:
            reason = str(error) or type(error).__name__
            self._about_revisions(lambda revisions: revisions.undo(head.serving, reason))
            raise

    def _left_behind(self) -> list[str]:
        """Applications of an earlier run, on a cluster that outlived it."""
        return self.cluster.applications() if self._address is not None else []

    def nodes(self) -> list[dict[str, Any]]:
        """Of the cluster that was joined; a local Ray has nothing to tell."""
        return self.cluster.nodes() if self._address is not None else []

    @property
    def cluster(self) -> Cluster:
        if self._cluster is None:
            self._progress("starting Ray", 0, 1)
            self._cluster = Cluster(self.place.namespace, self._address)
            self._targets = Targets(self._cluster.name(""), self.place)
            self._progress("starting Ray", 1, 1)
        return self._cluster

    def _start(self, config: Config, revision: int) -> tuple[Config, int]:
        self.config = config
        self.weights = fetch_weights(config, self._progress)
        cluster, weights = self.cluster, revisions_of(config, self.weights)
        had = cluster.applications()
        self._progress("starting replicas", 0, 1)
        numbers = self._scales.wanted(config)
        engines = self._targets.engines(config, numbers)
        try:
            self._about_revisions(lambda revisions: revisions.activate(revision, weights))
            cluster.run([*engines.values(), *self._targets.services(config, revision, weights)])
            self._progress("starting replicas", 1, 1)
            self._warm_up(config, list(engines))
            self._wait_until_ready(config)
        except BaseException:
            cluster.delete([name for name in cluster.applications() if name not in had], wait=True)
            raise
        self._about_revisions(lambda revisions: revisions.finish(revision))
        self._scales.follow(config, time.monotonic(), numbers)
        kept = [f"{MODEL}{key}" for key in engines]
        cluster.delete(name for name in had if name.startswith(MODEL) and name not in kept)
        return config, revision

    @property
    def url(self) -> str:
        host = self.config.gateway.host
        return f"http://{f'[{host}]' if ':' in host else host}:{self.config.gateway.port}"

    def _wait_until_ready(self, config: Config) -> None:
        """Until every gateway has reached every model. Raises `StartFailed`."""
        deadline = time.monotonic() + READY_TIMEOUT_S
        while time.monotonic() < deadline:
            gateways = [each for each in self.ask(registry.everybody) if not each.model]
            if sum(not each.stage for each in gateways) >= config.gateway.replicas:
                return
            time.sleep(0.05)
        problem = next((each.stage for each in gateways if each.stage), "no gateway is up")
        raise StartFailed(f"The gateways were not ready within {READY_TIMEOUT_S:g} s: {problem}")

    def watch(self) -> None:
        """To be called now and then, from the thread that made the deployment: what Ray does not keep alive, the number of
        replicas, and the revision that was asked for. Raises `ClusterLost`."""
        if self.cluster.is_lost():
            raise ClusterLost("The node that this process joined by is gone.")
        if self._redis is not None and self._redis.revive():
            log.error("the embedded Redis had ended and was started again; cached answers and counts are lost")
        if self._lease is not None and not self._lease.held:
            log.error("another `gearshift serve` has taken this deployment over")
            return
        with contextlib.suppress(StoreAway):
            self._autoscale()
            head = self._about_revisions(Revisions.head)
            if not head.settled:
                self._apply(head.target)

    def _autoscale(self) -> None:
        if not self._scales.automatic:
            return
        for key, decision in self._scales.look(time.monotonic(), self.ask(registry.members)).items():
            self._scale(key, decision)

    def _scale(self, key: str, decision: Decision) -> None:
        """Waits for nothing: whoever asks meanwhile is answered by those that are up, or held."""
        log.info("%s: %d replicas, as %s", key, decision.replicas, decision.why)
        if decision.replicas:
            try:
                self.cluster.run([self._targets.engines(self.config, self._scales.numbers)[key]], wait=False)
            except StartFailed as error:  # what runs goes on
                log.error("%s can't be scaled: %s", key, error.message)
        else:
            self.cluster.delete([f"{MODEL}{key}"])
        told = registry.Scaled(decision.replicas, decision.why, time.time())
        self.ask(lambda store: registry.tell_scale(store, key, told))

    def _apply(self, number: int) -> None:
        """From the revision that serves to the one that was begun: what is new starts beside what runs, gateways take over,
        what is not needed any more goes. Before they have taken over, whatever fails undoes it all."""
        new = self._about_revisions(lambda revisions: revisions.get(number)).parsed()
        had, wanted = dict(self._scales.numbers), self._scales.wanted(new)
        started = [key for key in wanted if key not in had]
        self._on_step("begun")
        try:
            refused = plan(self.config, new).refused
            if refused:
                raise ConfigError(f"Not while it runs: {'; '.join(refused)}.")
            check_files(new)
            weights = fetch_weights(new, self._progress)
            targets = self._targets.engines(new, wanted)
            self.cluster.run([target for key, target in targets.items() if had.get(key) != wanted[key]])
            self._warm_up(new, started)
            self._on_step("prepared")
            revisions = revisions_of(new, weights)
            self._about_revisions(lambda known: known.activate(number, revisions))
            self._on_step("activated")
            self._wait_for_gateways(number)
        except (GearshiftError, RuntimeError) as error:
            self._undo(str(error), started)
            return
        self._on_step("taken over")
        self.config, self.revision, self.weights = new, number, weights
        self._scales.follow(new, time.monotonic(), wanted)
        self._about_revisions(lambda known: known.finish(number))
        self._on_step("finished")
        self.cluster.delete(f"{MODEL}{key}" for key in had if key not in wanted)
        self._on_step("retired")

    def _warm_up(self, config: Config, keys: Sequence[str]) -> None:
        """Asks engines that are new what they have to know. Raises `StartFailed`."""
        instances = instances_of(config)
        wanted = {key: config.models[instances[key]].warm_up for key in keys if config.models[instances[key]].warm_up}
        if wanted:
            node = node_address() if self.place.secret else ""
            asyncio.run(warm_up(self.place.store(ASK_TIMEOUT_S), wanted, node, self.place.secret))

    def _undo(self, problem: str, started: Iterable[str]) -> None:
        log.error("revision undone: %s", problem)
        weights = revisions_of(self.config, self.weights)
        self._about_revisions(lambda revisions: revisions.activate(self.revision, weights))
        with contextlib.suppress(StartFailed):
            self._wait_for_gateways(self.revision)
        self._about_revisions(lambda revisions: revisions.undo(self.revision, problem))
        self.cluster.delete(f"{MODEL}{key}" for key in started)
        targets = self._targets.engines(self.config, self._scales.numbers)
        self.cluster.run(list(targets.values()), wait=False)  # as many of each as before

    def _wait_for_gateways(self, number: int) -> None:
        """Raises `StartFailed`."""
        deadline = time.monotonic() + TAKE_OVER_TIMEOUT_S
        while time.monotonic() < deadline:
            found = [member.revision for member in self.ask(registry.members) if not member.model]
            if found and all(each == number for each in found):
                return
            time.sleep(0.05)
        raise StartFailed(f"Not all gateways took revision {number} over within {TAKE_OVER_TIMEOUT_S:g} s.")

    def drain(self) -> None:
        """Ends the replicas in good order: gateways refuse new requests and finish the running ones
        (GatewayReplica.drain), and engines follow when nobody asks them any more."""
        self.cluster.delete([GATEWAY], wait=True)
        self.cluster.delete(self.cluster.applications(), wait=True)

    def close(self) -> None:
        """Leaves no process and no file, and waits for no answer. May be called at any point of the start. Of a cluster that was
        joined it leaves everything as it is."""
        if self._lease is not None:
            self._lease.give_back()
        if self._cluster is not None:
            self._cluster.close()
        if self._redis is not None:
            self._redis.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


async def _secret(store: Store) -> str:
    """Of the deployment of this namespace, which is made up once. Takes the store over."""
    try:
        key = store.key("secret")
        await store.set_new(key, secrets.token_hex(SECRET_BYTES // 2).encode())
        return ((await store.get(key)) or b"").decode()
    finally:
        await store.close()
