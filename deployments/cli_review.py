"""`gearshift review …`: what waits for a human, and what was decided."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any

import typer
from rich.table import Table

from gearshift.deployments import client
from gearshift.deployments.cli_experiment import DEFAULT_ADMIN_URL, AdminUrl, JsonOption, who
from gearshift.deployments.consoles import err, out

app = typer.Typer(no_args_is_help=True, help="What rules with `action: review` hold back until a human has decided.")
Ticket = Annotated[str, typer.Argument(help="As `gearshift review list` tells it.")]
Why = Annotated[str, typer.Option("--why", help="For the log, and for whoever asked.")]


@app.command("list")
def list_(
    everything: Annotated[bool, typer.Option("--all", help="Also what was decided.")] = False,
    most: Annotated[int, typer.Option(min=1, max=1000, help="How many of the latest to look at.")] = 100,
    admin_url: AdminUrl = DEFAULT_ADMIN_URL,
    as_json: JsonOption = False,
) -> None:
    """Show what waits, latest first."""
    wanted = "" if everything else "&status=pending"
    found = client.admin(admin_url, "GET", f"/admin/review?most={most}{wanted}")["tickets"]
    if as_json:
        out.print_json(data=found)
        return
    table = Table("ticket", "since", "tenant", "release", "policy", "rule", "stage", "status")
    for each in found:
        held = each["held"]
        facts = (held["tenant"], held["release"], held["policy"], held["rule"], held["stage"], each["status"])
        table.add_row(each["id"], _time(each["at"]), *facts)
    out.print(table if found else "Nothing waits.")


@app.command("show")
def show(ticket: Ticket, admin_url: AdminUrl = DEFAULT_ADMIN_URL, as_json: JsonOption = False) -> None:
    """Show an exchange: what was asked, and what would be answered. What the other rules take out is not in it."""
    found = client.admin(admin_url, "GET", f"/admin/review/{ticket}")
    if as_json:
        out.print_json(data=found)
        return
    held = found["held"]
    for role, text in [(message["role"], message["content"]) for message in held["messages"]]:
        out.print(f"{role}: {text}", highlight=False, markup=False, soft_wrap=True)
    if held["answer"]:
        out.print(f"answer: {held['answer']}", highlight=False, markup=False, soft_wrap=True)
    decided = (
        f", by {found['who'] or 'somebody'} {_time(found['decided_at'])}: {found['why']}" if found["decided_at"] else ""
    )
    told = f"{held['rule']} ({held['policy']}, {held['stage']}), {found['status']}{decided}"
    err.print(told, highlight=False, markup=False, soft_wrap=True)


@app.command("approve")
def approve(ticket: Ticket, why: Why = "", admin_url: AdminUrl = DEFAULT_ADMIN_URL) -> None:
    """Let it pass: a held answer may be picked up, a held question be sent again."""
    _decide(ticket, "approved", why, admin_url)


@app.command("reject")
def reject(ticket: Ticket, why: Why = "", admin_url: AdminUrl = DEFAULT_ADMIN_URL) -> None:
    """Refuse it for good."""
    _decide(ticket, "rejected", why, admin_url)


@app.command("log")
def log(admin_url: AdminUrl = DEFAULT_ADMIN_URL, as_json: JsonOption = False) -> None:
    """Show every opening, decision and pick-up, and whether the log is whole; ends with 1 where it is not. Keep the last hash
    elsewhere: it vouches for all before it."""
    found = client.admin(admin_url, "GET", "/admin/review/log")
    if as_json:
        out.print_json(data=found)
    else:
        table = Table("", "at", "ticket", "what", "who", "why", "rule", "policy", "tenant")
        for each in found["entries"]:
            facts = (each[key] for key in ("ticket", "what", "who", "why", "rule", "policy", "tenant"))
            table.add_row(str(each["number"]), _time(each["at"]), *facts)
        out.print(table)
        last = found["entries"][-1]["hash"] if found["entries"] else "none"
        out.print(f"last hash: {last}", highlight=False, soft_wrap=True)
    if found["broken_at"] is not None:
        err.print(f"The log was tampered with: entry {found['broken_at']} does not follow the one before.")
        raise typer.Exit(1)


def _decide(ticket: str, decision: str, why: str, admin_url: str) -> None:
    found: Any = client.admin(admin_url, "POST", f"/admin/review/{ticket}", {"decision": decision, "why": why}, who())
    out.print(f"{found['id']}: {found['status']}", highlight=False)


def _time(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S")
