"""Ray and Ray Serve as a deployment needs them: a local one of its own, or an existing cluster that it joins."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Sequence
from typing import Any

from gearshift.deployments.warm_up import StartFailed
from gearshift.platform.errors import GearshiftError

LOOK_S = 2.0
LOST_APP = "see the logs of Ray Serve in /tmp/ray/session_latest/logs/serve"


def node_address() -> str:
    """Where other nodes reach the one that this process is on; no two have the same."""
    import ray

    return str(ray.util.get_node_ip_address())


class ClusterLost(GearshiftError):
    """Whoever steers has to join again. Seen by operators only."""

    code = "cluster_lost"


class Cluster:
    """A connection to Ray; `close` ends a local one with everything in it, and only the connection to one that was joined.

    Serve applications are named NAMESPACE-NAME, since a cluster has one Serve for everybody.
    """

    def __init__(self, namespace: str, address: str | None = None) -> None:
        """address: of an existing cluster, as Ray takes it; None starts a local one."""
        self._prefix = f"{namespace}-"
        self.joined = address is not None
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        import ray
        from ray import serve

        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        if address is None:
            ray.init(
                address="local",
                num_cpus=2,  # replicas ask for none; 0 would have their workers started one by one
                include_dashboard=False,
                log_to_driver=True,
                object_store_memory=100 * 1024**2,
                logging_level=logging.ERROR,
            )
        else:
            try:
                ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
            except (ConnectionError, ValueError, RuntimeError) as error:
                hint = "" if os.environ.get("RAY_AUTH_MODE") else "; if it asks for a token, set RAY_AUTH_MODE=token"
                raise StartFailed(f"No Ray cluster lets us in at {address!r}: {_first_line(error)}{hint}") from error
        serve.start(
            proxy_location="Disabled",
            logging_config={"enable_access_log": False, "log_level": "WARNING"},
        )

        self._node = ray.get_runtime_context().get_node_id()
        self._looked_at = time.monotonic()

    def is_lost(self) -> bool:
        """Whether the node that this process joined by has ended: through it nothing can be asked any more. Waits for the head
        where that is away, and where that takes a minute, Ray ends this process."""
        import ray

        if not self.joined or time.monotonic() < self._looked_at + LOOK_S:
            return False
        alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        self._looked_at = time.monotonic()
        return bool(alive) and self._node not in alive

    def name(self, application: str) -> str:
        return f"{self._prefix}{application}"

    def run(self, targets: Sequence[Any], wait: bool = True) -> None:
        """targets: of targets.py. wait: until all replicas are up. Raises `StartFailed` when they do not come up."""
        from ray import serve

        try:
            if targets:
                serve.run_many(targets, wait_for_ingress_deployment_creation=wait, wait_for_applications_running=wait)
        except RuntimeError as error:
            raise StartFailed(f"The replicas did not come up: {self._reason()}") from error

    def applications(self) -> list[str]:
        """Of this deployment, without the prefix."""
        from ray import serve

        names = serve.status().applications
        return [name.removeprefix(self._prefix) for name in names if name.startswith(self._prefix)]

    def delete(self, applications: Iterable[str], wait: bool = False) -> None:
        """Their replicas finish what runs there."""
        from ray import serve

        names = [self.name(each) for each in applications]
        for name in names:
            serve.delete(name, _blocking=False)
        while wait and not set(names).isdisjoint(serve.status().applications):
            time.sleep(0.1)

    def nodes(self) -> list[dict[str, Any]]:
        """Address, name, resources and whether alive, of each node."""
        import ray

        latest = {node["NodeManagerAddress"]: node for node in sorted(ray.nodes(), key=lambda node: node["Alive"])}
        return [
            {
                "address": node["NodeManagerAddress"],
                "name": node["NodeManagerHostname"],
                "alive": bool(node["Alive"]),
                "resources": {
                    name: amount
                    for name, amount in node["Resources"].items()
                    if not name.startswith(("node:", "object_store", "memory"))
                },
            }
            for _, node in sorted(latest.items())
        ]

    def close(self) -> None:
        import ray

        if ray.is_initialized():
            ray.shutdown()

    def _reason(self) -> str:
        """The first message of a deployment that is not healthy, without its traceback."""
        from ray import serve

        for name, app in serve.status().applications.items():
            for deployment in app.deployments.values() if name.startswith(self._prefix) else ():
                if deployment.status != "HEALTHY" and deployment.message:
                    return f"{name.removeprefix(self._prefix)}: {_last_line(deployment.message)}"
        return LOST_APP


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]


def _last_line(message: str) -> str:
    return [line for line in message.strip().splitlines() if line.strip()][-1].strip()
