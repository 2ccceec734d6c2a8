"""`gearshift plan`, `apply`, `scale`, `history`, `diff`, `rollback`: configs of a running deployment, as revisions."""

from __future__ import annotations

import json
import time
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from gearshift.deployments import client
from gearshift.deployments.cli_experiment import DEFAULT_ADMIN_URL, AdminUrl, JsonOption, Why, who
from gearshift.deployments.consoles import err, out
from gearshift.deployments.files import check_files
from gearshift.deployments.plan import Plan, plan
from gearshift.platform import config_file
from gearshift.platform.config import Config
from gearshift.platform.errors import ConfigError, GearshiftError, NotFound

File = Annotated[Path, typer.Argument(help="Deployment config.")]
TIMEOUT_S = 900.0


def plan_file(file: File, admin_url: AdminUrl = DEFAULT_ADMIN_URL, as_json: JsonOption = False) -> None:
    """Show what applying a config would do: what changes, starts and stops, the memory it takes, what caches lose."""
    _, _, planned = _planned(file, admin_url)
    if as_json:
        out.print_json(data={name: list(getattr(planned, name)) for name in Plan.__dataclass_fields__})
    else:
        _show(planned)
    raise typer.Exit(1 if planned.refused else 0)


def apply(
    file: File,
    why: Why = "",
    admin_url: AdminUrl = DEFAULT_ADMIN_URL,
    wait: Annotated[bool, typer.Option(help="Wait until it serves, or is undone.")] = True,
) -> None:
    """Have the running deployment serve with another config. It serves whole or not at all."""
    config, based_on, planned = _planned(file, admin_url)
    _show(planned)
    if planned.empty:
        return
    body = {"config": json.loads(config.model_dump_json()), "based_on": based_on, "why": why}
    begun = client.admin(admin_url, "POST", "/admin/revisions", body, who())
    _follow(admin_url, begun["number"], wait)


def scale(
    model: Annotated[str, typer.Argument(help="A model of the config.")],
    replicas: Annotated[int, typer.Argument(min=1, help="How many replicas it shall have.")],
    why: Why = "",
    admin_url: AdminUrl = DEFAULT_ADMIN_URL,
    wait: Annotated[bool, typer.Option(help="Wait until they serve, or it is undone.")] = True,
) -> None:
    """Give a model more or fewer replicas. Those that stay are not touched; those that go finish what they have begun."""
    serving = client.admin(admin_url, "GET", "/admin/revisions")["head"]["serving"]
    config = client.admin(admin_url, "GET", f"/admin/revisions/{serving}")["config"]
    if model not in config["models"]:
        raise NotFound(f"There is no model {model!r}; there are: {', '.join(config['models'])}.")
    if scaling := config["models"][model]["autoscaling"]:
        bounds = f"{scaling['min_replicas']} and {scaling['max_replicas']}"
        raise ConfigError(
            f"{model} scales itself between {bounds} replicas; apply a config with other bounds, or without."
        )
    config["models"][model]["replicas"] = replicas
    body = {"config": config, "based_on": serving, "why": why or f"{model} at {replicas} replicas"}
    begun = client.admin(admin_url, "POST", "/admin/revisions", body, who())
    _follow(admin_url, begun["number"], wait)


def rollback(
    revision: Annotated[int | None, typer.Argument(help="To which; the one before if left out.")] = None,
    why: Why = "",
    admin_url: AdminUrl = DEFAULT_ADMIN_URL,
    wait: Annotated[bool, typer.Option(help="Wait until it serves, or is undone.")] = True,
) -> None:
    """Apply an older revision again, as a new one."""
    begun = client.admin(admin_url, "POST", "/admin/rollback", {"revision": revision, "why": why}, who())
    out.print(f"Back to revision {begun['of']}, as revision {begun['number']}.", highlight=False)
    _follow(admin_url, begun["number"], wait)


def history(admin_url: AdminUrl = DEFAULT_ADMIN_URL, as_json: JsonOption = False) -> None:
    """Show what was done to the deployment and its experiments: when, by whom, and why."""
    found = client.admin(admin_url, "GET", "/admin/revisions")
    changes = client.admin(admin_url, "GET", "/admin/changes")["changes"]
    if as_json:
        out.print_json(data={**found, "changes": changes})
        return
    rows = [
        (each["at"], f"revision {each['number']}", each["who"], _kind(each), each["why"]) for each in found["revisions"]
    ]
    rows += [(each["at"], each["experiment"], each["who"], each["what"], each["why"]) for each in changes]
    table = Table("when", "what", "who", "done", "why")
    for at, *cells in sorted(rows):
        table.add_row(datetime.fromtimestamp(at).isoformat(" ", "seconds"), *cells)
    out.print(table)
    head = found["head"]
    undone = f" The last one begun was undone: {head['problem']}" if head["outcome"] == "undone" else ""
    out.print(f"Revision {head['serving']} serves.{undone}", highlight=False, markup=False)


def diff(
    a: Annotated[int, typer.Argument(help="A revision.")],
    b: Annotated[int, typer.Argument(help="Another one.")],
    admin_url: AdminUrl = DEFAULT_ADMIN_URL,
) -> None:
    """Show what differs from one revision to another."""
    old, new = (_config(client.admin(admin_url, "GET", f"/admin/revisions/{number}"), number) for number in (a, b))
    for line in plan(old, new).changes:
        out.print(line, highlight=False, markup=False, soft_wrap=True)


def _planned(file: Path, admin_url: str) -> tuple[Config, int, Plan]:
    """The config, the revision that serves, and what lies between them. Raises `ConfigError`."""
    config = config_file.load(file)
    check_files(config)
    serving = client.admin(admin_url, "GET", "/admin/revisions")["head"]["serving"]
    old = _config(client.admin(admin_url, "GET", f"/admin/revisions/{serving}"), serving)
    return config, serving, plan(old, config)


def _config(revision: dict[str, Any], number: int) -> Config:
    return config_file.parse(json.dumps(revision["config"]), f"revision {number}")


def _show(planned: Plan) -> None:
    if planned.empty:
        out.print("Nothing would change.")
    for title, lines in (
        ("Changes", planned.changes),
        ("Starts", planned.memory),
        ("Stops", planned.stops),
        ("Caches", planned.caches),
        ("Experiments", planned.experiments),
        ("[red]Not while it runs; restart it with this file[/]", planned.refused),
    ):
        if lines:
            out.print(f"[bold]{title}[/]")
        for line in lines:
            out.print(f"  {line}", highlight=False, markup=False, soft_wrap=True)


def _kind(revision: dict[str, Any]) -> str:
    return f"back to {revision['of']}" if revision["kind"] == "rollback" else str(revision["kind"])


def _follow(admin_url: str, number: int, wait: bool) -> None:
    """Until it serves. Raises `GearshiftError` when it was undone."""
    if not wait:
        return
    deadline = time.monotonic() + TIMEOUT_S
    with err.status(f"Applying revision {number} …"):
        while time.monotonic() < deadline:
            head = client.admin(admin_url, "GET", "/admin/revisions")["head"]
            if head["serving"] == number:
                break
            if head["target"] != number:
                raise GearshiftError(f"Revision {number} was undone: {head['problem']}")
            time.sleep(0.2)
        else:
            raise GearshiftError(f"Revision {number} does not serve after {TIMEOUT_S:g} s; see `gearshift history`.")
    out.print(f"Revision {number} serves.", highlight=False)
