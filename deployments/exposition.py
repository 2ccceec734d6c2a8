"""The /metrics page. With several processes on a node (gateways, engines) each writes its values to files in
`PROMETHEUS_MULTIPROC_DIR`, and whichever gateway is asked adds them up."""

from __future__ import annotations

import os
import re
from pathlib import Path

import psutil
from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY, CollectorRegistry, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead

_LIVE_GAUGE = re.compile(r"gauge_live\w*_(\d+)\.db")


def metrics_page() -> tuple[bytes, str]:
    """Body and content type."""
    folder = os.environ.get("PROMETHEUS_MULTIPROC_DIR")
    if not folder:
        return generate_latest(REGISTRY), CONTENT_TYPE_LATEST
    _forget_the_dead(Path(folder))
    registry = CollectorRegistry()
    MultiProcessCollector(registry, path=folder)
    return generate_latest(registry), CONTENT_TYPE_LATEST


def _forget_the_dead(folder: Path) -> None:
    """A killed process can't take its gauges away itself; its counters stay, since they happened."""
    pids = {int(match[1]) for file in folder.iterdir() if (match := _LIVE_GAUGE.fullmatch(file.name))}
    for pid in pids:
        if not psutil.pid_exists(pid):
            mark_process_dead(pid, path=str(folder))
