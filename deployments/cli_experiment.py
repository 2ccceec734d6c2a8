"""`gearshift experiment …`, `releases`, `history`: what runs, what is known, and a person's hand on it."""

from __future__ import annotations

import getpass
import os
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from gearshift.deployments import client
from gearshift.deployments.consoles import err, out

app = typer.Typer(no_args_is_help=True, help="Experiments of the running deployment.")

EXPLAINED_SHOWN = 0.01
DEFAULT_ADMIN_URL = "http://127.0.0.1:8001"
Name = Annotated[str, typer.Argument(help="The experiment.")]
AdminUrl = Annotated[str, typer.Option("--admin-url", envvar="GEARSHIFT_ADMIN_URL", help="The admin API's address.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for a program to read.")]
Why = Annotated[str, typer.Option("-m", "--message", help="Why; it stays in the log.")]


@app.command("list")
def list_all(admin_url: AdminUrl = DEFAULT_ADMIN_URL, as_json: JsonOption = False) -> None:
    """Show all experiments: where they are, and who gets what."""
    found = client.admin(admin_url, "GET", "/admin/experiments")
    if as_json:
        out.print_json(data=found)
        return
    table = Table("experiment", "status", "stage", "arms", "why")
    for name, each in found["experiments"].items():
        arms = ", ".join(f"{arm} {share:.4g}" for arm, share in each["arms"].items())
        table.add_row(name, each["status"], "" if each["stage"] < 0 else str(each["stage"] + 1), arms, each["why"])
    out.print(table)


@app.command("status")
def status(
    name: Name,
    admin_url: AdminUrl = DEFAULT_ADMIN_URL,
    as_json: JsonOption = False,
    plot: Annotated[Path | None, typer.Option(help="Draw how the intervals narrowed into this PNG.")] = None,
) -> None:
    """Show an experiment: arms, exposures, and each measure with its interval and what it says so far."""
    found = client.admin(admin_url, "GET", f"/admin/experiments/{name}")
    if plot is not None:
        from gearshift.eval.experiment_plot import draw

        draw(name, found["decided"] or found, plot)
    if as_json:
        out.print_json(data=found)
        return
    for line in _head(name, found):
        out.print(line, highlight=False)
    if found["decided"]:
        out.print("What follows is what was known when it was rolled back.", highlight=False)
        found = found["decided"]
    hidden = any(each["shadows"] for each in found["arms"].values())
    arms = Table(title="Arms", title_justify="left")
    for column in ("arm", "share", "exposures", f"{found['unit']}s", *(["in the shadow"] if hidden else [])):
        arms.add_column(column, justify="left" if column == "arm" else "right")
    for arm, each in found["arms"].items():
        role = " (baseline)" if arm == found["baseline"] else ""
        shadows = [f"{each['shadows']:,}"] if hidden else []
        arms.add_row(arm + role, f"{each['weight']:.4g}", f"{each['exposures']:,}", f"{each['units']:,}", *shadows)
    out.print(arms)
    measures = Table(title=_measures_title(found), title_justify="left")
    for column in ("measure", "arm", found["baseline"], "arm's", "difference", "verdict"):
        measures.add_column(column, justify="right" if column in (found["baseline"], "arm's", "difference") else "left")
    for each in found["measures"]:
        guard = " (guard)" if each["measure"] in found["guards"] else ""
        fell = [each["measure"], each["arm"]] in found["fallen"]
        said = "[red]guard fell[/]" if fell else _verdict(each)
        cells = _number(each, each["baseline_value"]), _number(each, each["value"]), _interval(each), said
        measures.add_row(each["measure"] + guard, each["arm"], *cells)
    out.print(measures)
    for each in found["measures"]:
        if each["explained"] > EXPLAINED_SHOWN:
            out.print(
                f"{each['measure']} of {each['arm']}: what users were like before takes {each['explained']:.0%} of the variance "
                "out of the interval (CUPED).",
                highlight=False,
            )


@app.command("set")
def set_weights(
    name: Name,
    weights: Annotated[list[str], typer.Argument(help="RELEASE=WEIGHT for each arm; one left out gets 0.")],
    why: Why = "",
    admin_url: AdminUrl = DEFAULT_ADMIN_URL,
) -> None:
    """Move traffic between the arms of an experiment, on all gateways at once. Counting starts anew."""
    try:
        arms = {arm: float(weight) for arm, weight in (text.split("=", 1) for text in weights)}
    except ValueError:
        err.print("Weights look like RELEASE=WEIGHT, for example qwen-v1=90 qwen-v2=10.", style="red")
        raise typer.Exit(1) from None
    body = {"arms": arms, "why": why}
    out.print_json(data=client.admin(admin_url, "PUT", f"/admin/experiments/{name}", body, who()))


@app.command("pause")
def pause(name: Name, why: Why = "", admin_url: AdminUrl = DEFAULT_ADMIN_URL) -> None:
    """Keep a rollout at its stage. Guards still watch."""
    _act(admin_url, name, "pause", why)


@app.command("resume")
def resume(name: Name, why: Why = "", admin_url: AdminUrl = DEFAULT_ADMIN_URL) -> None:
    """Let a paused rollout go on."""
    _act(admin_url, name, "resume", why)


@app.command("advance")
def advance(name: Name, why: Why = "", admin_url: AdminUrl = DEFAULT_ADMIN_URL) -> None:
    """Go to the next stage now, whatever the evidence still lacks."""
    _act(admin_url, name, "advance", why)


@app.command("abort")
def abort(name: Name, why: Why = "", admin_url: AdminUrl = DEFAULT_ADMIN_URL) -> None:
    """Give everything back to the baseline, and leave the other arms' cached answers behind."""
    _act(admin_url, name, "abort", why)


def releases(admin_url: AdminUrl = DEFAULT_ADMIN_URL, as_json: JsonOption = False) -> None:
    """Show each release: what it pins, where it serves, and what it scored."""
    found = client.admin(admin_url, "GET", "/admin/releases")
    if as_json:
        out.print_json(data=found)
        return
    table = Table("release", "model", "prompt", "policy", "serves", "scores")
    for each in found["releases"]:
        serves = ", ".join(f"{tier} {share:.4g}" if share < 1 else tier for tier, share in each["serves"].items())
        shown = ("valid", "feedback", "canary", "error", "ttft_p95")
        scores = "  ".join(
            f"{name} {each['scores'][name]['value']:.3g} ({each['scores'][name]['count']})"
            for name in shown
            if name in each["scores"]
        )
        table.add_row(each["release"], each["model"], each["prompt"], each["policy"], serves or "—", scores)
    out.print(table)


def who() -> dict[str, str]:
    """The header that says who acts."""
    return {"x-gearshift-who": os.environ.get("GEARSHIFT_WHO") or getpass.getuser()}


def _act(admin_url: str, name: str, action: str, why: str) -> None:
    path = f"/admin/experiments/{name}/{action}"
    out.print_json(data=client.admin(admin_url, "POST", path, {"why": why}, who()))


def _head(name: str, found: dict[str, Any]) -> list[str]:
    stage = f", stage {found['stage'] + 1} of {len(found['stages'])}" if found["stage"] >= 0 else ""
    since = datetime.fromtimestamp(found["since"]).isoformat(" ", "seconds") if found["since"] else "the start"
    lines = [f"[bold]{name}[/]: {found['status']}{stage}, since {since}"]
    lines += [f"Why: {found['why']}"] if found["why"] else []
    lines += [f"Next: {found['next']}"] if found["stage"] >= 0 and found["next"] else []
    if found["period"] != found["evidence_period"]:
        lines.append("These numbers are of the weights before; nothing has been seen with the present ones yet.")
    if found["mismatch"] is not None:
        lines.append(
            "[red]Sample ratio mismatch: units did not come to the arms by their shares. "
            "Something else than the assignment decides who is counted; trust no number below.[/]"
        )
    return lines


def _measures_title(found: dict[str, Any]) -> str:
    return f"Measures (all intervals hold together, at any time, with {1 - found['alpha']:.0%})"


def _number(each: dict[str, Any], value: float | None) -> str:
    if value is None:
        return "—"
    if each["kind"] in ("rate", "preference"):
        return f"{value:.1%}"
    return f"{value * 1000:.3g} ms" if each["unit"] == "s" else f"{each['unit']}{value:.3g}"


def _interval(each: dict[str, Any]) -> str:
    low, high = each["interval"]
    if each["verdict"] in ("not measured", "too few") or (round(low or 0, 2) == 0 and high is None):
        return "—"
    if each["kind"] in ("rate", "preference"):
        return f"{100 * low:+.1f} to {100 * high:+.1f} points"
    if each["kind"] == "p95":
        return f"× {low or 0:.2f} to " + ("any" if high is None else f"{high:.2f}")
    return f"{low:+.3g} to {high:+.3g}"


def _verdict(each: dict[str, Any]) -> str:
    colour = {"better": "green", "worse": "red"}.get(each["verdict"], "dim")
    more = f", about {each['more']:,} more" if each["more"] else ""
    return f"[{colour}]{each['verdict']}{more}[/]"
