"""What `gearshift status` shows of the admin API's facts."""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

ENGINE_COLUMNS = (
    "model",
    "replica",
    "node",
    "pids",
    "MiB",
    "running",
    "waiting",
    "queued",
    "KV",
    "first token p50",
    "p99",
    "prefix hits",
    "tokens out",
    "aborted",
)
GATEWAY_COLUMNS = ("gateway", "pid", "MiB", "first token p50", "p99", "answers a minute")
LEFT = (
    "model",
    "replica",
    "gateway",
    "tier",
    "served by",
    "starting",
    "last scaled",
    "node",
    "name",
    "state",
    "resources",
)


def page(facts: dict[str, Any]) -> RenderableType:
    """Engines, gateways, tiers, alerts and the revision."""
    nodes = [_nodes(facts)] if facts["nodes"] else []
    return Group(
        *nodes,
        _models(facts["models"], facts["starting"]),
        _engines(facts["engines"]),
        _gateways(facts["gateways"]),
        _tiers(facts["tiers"]),
        *_lines(facts),
    )


def _table(title: str, columns: tuple[str, ...]) -> Table:
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, justify="left" if column in LEFT else "right")
    return table


def _engines(engines: list[dict[str, Any]]) -> Table:
    table = _table("Engines", ENGINE_COLUMNS)
    for each in engines:
        cells = [
            each["model"],
            each["name"].removeprefix(each["model"] + "-"),
            each.get("node", "—"),
            " ".join(map(str, each["ranks"])),
            each["rss_mib"],
            each["running"],
            each["waiting"],
            each["queued_tokens"],
            f"{each['kv_usage']:.0%}",
            *_times(each["ttft"]),
            f"{each['prefix_hit_rate']:.0%}",
            each["generation_tokens"],
            each["aborted"],
        ]
        table.add_row(*map(str, cells))
    return table


def _gateways(gateways: list[dict[str, Any]]) -> Table:
    table = _table("Gateways", GATEWAY_COLUMNS)
    for each in gateways:
        cells = [each["name"], each["pid"], each["rss_mib"], *_times(each["ttft"]), each["ttft"]["count"]]
        table.add_row(*map(str, cells))
    return table


def _times(ttft: dict[str, Any]) -> list[str]:
    return [f"{1000 * value:.0f} ms" if ttft["count"] else "—" for value in (ttft["p50_s"], ttft["p99_s"])]


def _nodes(facts: dict[str, Any]) -> Table:
    table = _table("Nodes", ("node", "name", "state", "resources", "gateways", "engines"))
    for node in facts["nodes"]:
        here = [sum(each.get("node") == node["address"] for each in facts[kind]) for kind in ("gateways", "engines")]
        resources = ", ".join(f"{name} {amount:g}" for name, amount in sorted(node["resources"].items()))
        state = "alive" if node["alive"] else "dead"
        table.add_row(node["address"], node["name"], state, resources, *map(str, here))
    return table


def _models(models: dict[str, Any], starting: list[dict[str, Any]]) -> Table:
    """Why there are as many replicas as there are."""
    table = _table("Models", ("model", "replicas", "bounds", "held", "starting", "last scaled"))
    for name, each in models.items():
        scaled, bounds = each.get("scaled"), "—"
        if "max_replicas" in each:
            bounds = f"{each['min_replicas']} to {each['max_replicas']}"
        stages = ", ".join(one["stage"] for one in starting if one["model"] == each["instance"]) or "—"
        why = f"to {scaled['replicas']}: {scaled['why']}" if scaled else "—"
        table.add_row(name, str(each["replicas"]), bounds, str(each["held"]), stages, why)
    return table


def _tiers(tiers: dict[str, Any]) -> Table:
    table = _table("Tiers", ("tier", "served by"))
    for tier, served in tiers.items():
        arms = ", ".join(f"{arm} {weight:g}" for arm, weight in served.get("arms", {}).items())
        shown = f"experiment {served.get('experiment')} ({served.get('status')}): {arms}"
        table.add_row(tier, served.get("release") or shown)
    return table


def _lines(facts: dict[str, Any]) -> list[Text]:
    applying = f" (revision {facts['applying']} is being applied)" if facts["applying"] else ""
    undone = f" The last one begun was undone: {facts['problem']}" if facts["problem"] else ""
    uptime = f"up {facts['uptime_s']:.0f} s, version {facts['version']}"
    serving = f"Revision {facts['revision']}{applying}, epoch {facts['epoch']}, {uptime}.{undone}"
    return [*(Text(f"Alert: {alert}", style="red") for alert in facts["alerts"]), Text(serving)]
