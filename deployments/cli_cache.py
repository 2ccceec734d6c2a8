"""`gearshift cache …`: what the cache saves, and what it forgets."""

from __future__ import annotations

import os
from collections import defaultdict
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
from prometheus_client.parser import text_string_to_metric_families
from rich.table import Table

from gearshift.deployments import client
from gearshift.deployments.cli_experiment import DEFAULT_ADMIN_URL, AdminUrl, JsonOption, who
from gearshift.deployments.consoles import err, out
from gearshift.deployments.progress import bars
from gearshift.platform.config import Embedding
from gearshift.platform.errors import InvalidRequest

app = typer.Typer(no_args_is_help=True, help="The cache of answers.")
DEFAULT_URL = "http://127.0.0.1:8000"
LOOKUPS, TOKENS, DOLLARS = "gearshift_cache_lookups", "gearshift_cache_saved_tokens", "gearshift_cache_saved_dollars"
TIMEOUT_S = 10.0


@app.command("stats")
def stats(
    url: Annotated[str, typer.Option(envvar="GEARSHIFT_URL", help="The API's address.")] = DEFAULT_URL,
    admin_url: AdminUrl = DEFAULT_ADMIN_URL,
    as_json: JsonOption = False,
) -> None:
    """Show how many answers came from the cache, and what that saved, by tenant and release. Counted since the gateways of that
    address's node began; a token for /metrics is read from GEARSHIFT_METRICS_TOKEN."""
    token = os.environ.get("GEARSHIFT_METRICS_TOKEN")
    headers = {"authorization": f"Bearer {token}"} if token else {}
    page = client.checked(lambda: httpx.get(f"{url}/metrics", headers=headers, timeout=TIMEOUT_S)).text
    found = summary(page)
    stored = client.admin(admin_url, "GET", "/admin/cache")["answers"]
    if as_json:
        out.print_json(data={"answers": stored, "by": found})
        return
    table = Table("tenant", "release", "looked up", "hit", "semantic", "shared", "tokens saved", "dollars saved")
    for each in found:
        rates = [f"{each[part] / each['lookups']:.1%}" for part in ("hit", "semantic", "shared")]
        saved = f"{each['saved_tokens']:,.0f}", f"{each['saved_dollars']:.4f}"
        table.add_row(each["tenant"], each["release"], f"{each['lookups']:,.0f}", *rates, *saved)
    out.print(table)
    out.print(f"{stored:,} answers are kept.", highlight=False)


@app.command("train")
def train(
    pairs: Annotated[
        list[Path], typer.Argument(help="Labelled pairs of questions: JSON objects with a, b and same, a line each.")
    ],
    out_file: Annotated[Path, typer.Option("--out", help="File to write, for `cache.semantic.verifier`.")],
    encoder: Annotated[str, typer.Option(help="What `embedding.source` says.")] = Embedding().source,
    false_hits: Annotated[
        float, typer.Option(min=1e-4, max=0.5, help="Share of different pairs that may be taken for the same.")
    ] = 0.0095,
    origin: Annotated[str, typer.Option("--source", help="Where the pairs come from and under which terms.")] = "",
) -> None:
    """Train what decides whether two questions ask the same, and calibrate it on pairs that it has not seen (5 folds)."""
    from gearshift.eval.paraphrases import read_pairs
    from gearshift.eval.verifier_training import train as trained
    from gearshift.platform.embedding import Embedder
    from gearshift.platform.weights import source

    labelled = [pair for file in pairs for pair in read_pairs(file)]
    with bars(err) as progress:
        embedder = Embedder(source.ensure(source.parse(encoder), progress).path)
        made = trained(
            labelled,
            lambda texts: embedder.embed(texts, lambda done, total: progress("embedding", done, total)),
            encoder,
            false_hits,
            origin,
        )
    made.save(out_file)
    card = made.card
    shares = {"false hits": card.false_hits, "recall": card.recall}
    told = ", ".join(f"{name} {at:.2%} ({low:.2%} to {high:.2%})" for name, (low, at, high) in shares.items())
    out.print(f"{out_file}: {card.rows} pairs; held out: {told}", highlight=False, soft_wrap=True)


@app.command("purge")
def purge(
    tenant: Annotated[str | None, typer.Option(help="Only this tenant's.")] = None,
    release: Annotated[str | None, typer.Option(help="Only this release's.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Of all tenants and releases.")] = False,
    admin_url: AdminUrl = DEFAULT_ADMIN_URL,
) -> None:
    """Delete kept answers."""
    if not everything and tenant is None and release is None:
        raise InvalidRequest("Say whose: --tenant, --release, both, or --all.")
    body = {"tenant": tenant, "release": release}
    count = client.admin(admin_url, "POST", "/admin/cache/purge", body, who())["deleted"]
    out.print(f"{count:,} answers deleted.", highlight=False)


def summary(page: str) -> list[dict[str, Any]]:
    """Of a page of metrics, by tenant and release."""
    found: dict[tuple[str, str], dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for family in text_string_to_metric_families(page):
        if family.name not in (LOOKUPS, TOKENS, DOLLARS):
            continue
        for sample in family.samples:
            if sample.name.endswith("_created"):
                continue
            labels = sample.labels
            mine = found[labels["tenant"], labels["release"]]
            if family.name == LOOKUPS:
                mine[labels["result"]] += sample.value
                mine["lookups"] += sample.value
            else:
                mine["saved_tokens" if family.name == TOKENS else "saved_dollars"] += sample.value
    parts = ("lookups", "hit", "semantic", "shared", "miss", "saved_tokens", "saved_dollars")
    return [
        {"tenant": tenant, "release": release, **{part: mine[part] for part in parts}}
        for (tenant, release), mine in sorted(found.items())
    ]
