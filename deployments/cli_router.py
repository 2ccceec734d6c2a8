"""`gearshift router …`: train it on answers, calibrate it to a promise, read what it does, and ask why."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from gearshift.deployments.consoles import config_path, err, out
from gearshift.deployments.progress import bars
from gearshift.platform.config import Embedding
from gearshift.platform.config_file import load
from gearshift.platform.errors import ConfigError

if TYPE_CHECKING:
    from gearshift.eval.answered import Answered

app = typer.Typer(no_args_is_help=True, help="Which queries need the expensive tier: train, calibrate, explain.")
Answers = Annotated[
    Path, typer.Argument(help="Answered questions, one JSON object a line, from `gearshift router collect`.")
]
Out = Annotated[Path, typer.Option("--out", help="File to write.")]
Artefact = Annotated[Path, typer.Option(help="Scorer, from `gearshift router train`.")]
Judge = Annotated[Path | None, typer.Option(help="Judge of answers, from `gearshift router train --kind answer`.")]
Window = Annotated[
    int | None, typer.Option(min=1, help="Judge the first so many tokens, as of a stream; all if left out.")
]
Split = Annotated[str, typer.Option(help="Rows of this split, or all.")]
Source = Annotated[str, typer.Option(help="Where the answers come from and under which licence; kept in the file.")]
Config = Annotated[Path | None, typer.Option(help="Deployment config; the example if left out.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for a program to read.")]
KINDS = ("features", "tfidf", "blend", "semantic", "answer")


@app.command()
def collect(
    out_file: Out,
    config: Config = None,
    questions: Annotated[
        Path | None, typer.Option(help="Questions with checkable answers, one JSON object a line; our own if left out.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 64,
    streams: Annotated[int, typer.Option(min=1, help="Questions asked at once.")] = 16,
) -> None:
    """Ask every tier of a config the same questions, grade the answers, and write down what each cost."""
    from gearshift.eval import answered, jsonl

    asked = jsonl.read(questions or answered.own_questions(), answered.Question)
    with bars(err) as progress:
        rows = answered.collect(load(config_path(config)), asked, max_tokens, streams, progress)
    jsonl.write(out_file, rows)
    for name, quality, cost in zip(
        answered.tier_names(rows), answered.qualities(rows).mean(0), answered.seconds(rows).mean(0), strict=True
    ):
        out.print(f"{name}: {quality:.1%} right, {cost:.2f} CPU seconds an answer", highlight=False)


@app.command()
def train(
    answers: Answers,
    out_file: Out,
    kind: Annotated[
        str, typer.Option(help=f"{', '.join(KINDS)} (a judge of answers); semantic looks at vectors.")
    ] = "tfidf",
    split: Split = "train",
    source: Source = "",
    encoder: Annotated[str, typer.Option(help="For semantic: what `embedding.source` says.")] = Embedding().source,
) -> None:
    """Train a scorer, or a judge of answers. Prints what it does on rows it has not seen (5 folds)."""
    from gearshift.eval import routing

    if kind not in KINDS:
        raise typer.BadParameter(f"--kind: {kind!r} is not one of {', '.join(KINDS)}")
    with bars(err) as progress:
        made = routing.train_scorer(_rows(answers, split), kind, out_file, source, encoder, progress)  # type: ignore[arg-type]
    facts = ", ".join(f"{name} {value:g}" for name, value in made.card.metrics.items())
    out.print(
        f"{out_file}: {kind} for {', '.join(made.card.tiers)}, {made.card.rows} rows, {made.digest}", soft_wrap=True
    )
    out.print(facts, highlight=False, soft_wrap=True)


@app.command()
def calibrate(
    answers: Answers,
    artefact: Artefact,
    out_file: Out,
    judge: Judge = None,
    quality: Annotated[
        float | None, typer.Option(min=0, max=1, help="Keep this share of the expensive tier's quality.")
    ] = None,
    estimate: Annotated[
        bool,
        typer.Option("--estimate", help="Keep the quality by estimate alone, without a bound: missed as often as not."),
    ] = False,
    share: Annotated[float | None, typer.Option(min=0, max=1, help="Send this share to the expensive tier.")] = None,
    cost: Annotated[
        float | None, typer.Option(min=0, help="Spend so much on 1,000 queries, in the answers' unit.")
    ] = None,
    window: Window = None,
    split: Split = "train",
    source: Source = "",
) -> None:
    """Find the thresholds that keep a promise, with a 95 % bound. Review the file, then pin it."""
    from gearshift.eval import routing
    from gearshift.router import artefact as files
    from gearshift.router.calibration import Target

    if sum(value is not None for value in (quality, share, cost)) != 1:
        raise typer.BadParameter("set exactly one of --quality, --share, --cost")
    target = Target(quality=quality, expensive_share=share, dollars_per_1000=cost, bound=not estimate)
    read = files.load(judge) if judge else None
    made = routing.calibrated(_rows(answers, split), files.load(artefact), read, target, source, window)
    made.write(out_file)
    out.print(out_file.read_text(), markup=False, highlight=False)


@app.command()
def report(
    answers: Answers,
    artefact: Artefact,
    calibration: Annotated[Path, typer.Option(help="From `gearshift router calibrate`.")],
    out_file: Out,
    judge: Judge = None,
    window: Window = None,
    split: Split = "test",
    plot: Annotated[Path | None, typer.Option(help="Also draw quality over cost.")] = None,
) -> None:
    """Write what a calibration does on answers that it was not made on, beside a coin and an oracle (Markdown and plot)."""
    from gearshift.eval import routing, routing_report
    from gearshift.router import artefact as files
    from gearshift.router.calibration import Calibration

    rows = routing.rows_of(_rows(answers, split), files.load(artefact), files.load(judge) if judge else None, window)
    text = routing_report.markdown(rows, Calibration.read(calibration))
    out_file.write_text(text)
    if plot is not None:
        routing_report.draw(routing.curves(rows), routing.summary(rows, Calibration.read(calibration)), plot)
    out.print(text, markup=False, highlight=False)


@app.command()
def explain(
    text: Annotated[str, typer.Argument(help="A user's message.")], config: Config = None, as_json: JsonOption = False
) -> None:
    """Show where a query goes, and what in it says so."""
    from gearshift.eval.routing import reader
    from gearshift.router.policy import Asked
    from gearshift.router.router import Router

    loaded = load(config_path(config))
    router = Router(loaded)
    query = reader(loaded, router)(text)
    route = router.route(query, Asked())
    facts = {
        "tier": route.tier,
        "reason": route.reason,
        "score": route.score,
        "threshold": router.threshold,
        "scorer": router.scorer_id,
        "gains": dict(zip((tier.name for tier in router.tiers), router.gains(query), strict=True)),
        "verified": router.verifies(route),
        "because": [{"what": what, "weight": weight} for what, weight in router.why(query)],
    }
    if as_json:
        out.print_json(data=facts)
        return
    verified = "; its answer is judged before it is sent" if facts["verified"] else ""
    out.print(f"[bold]{route.tier}[/]  {route.reason}{verified}", highlight=False)
    table = Table("what", "weight")
    for what, weight in router.why(query):
        table.add_row(what, f"{weight:+.3f}")
    out.print(table)


@app.command()
def replay(
    log: Annotated[Path, typer.Argument(help="Request records, as `telemetry.records: file` writes them.")],
    policy: Annotated[Path, typer.Option(help="The deployment config to try.")],
    as_json: JsonOption = False,
) -> None:
    """Show what another config would have done with logged requests: where they would go, and what it would cost."""
    from gearshift.eval import replayed

    facts = replayed.replay(log, load(policy))
    if as_json:
        out.print_json(data=facts.as_json())
        return
    table = Table("", *facts.tiers, "dollars")
    table.add_row("as logged", *(f"{facts.before[tier]}" for tier in facts.tiers), f"{facts.dollars_before:.6f}")
    table.add_row(
        "with the new config", *(f"{facts.after[tier]}" for tier in facts.tiers), f"{facts.dollars_after:.6f}"
    )
    out.print(table)
    out.print(facts.line(), highlight=False, soft_wrap=True)


def _rows(path: Path, split: str) -> list[Answered]:
    from gearshift.eval import answered, jsonl, routing

    rows = jsonl.read(path, answered.Answered)
    chosen = rows if split == "all" else routing.split(rows, split)
    if not chosen:
        raise ConfigError(
            f"{path}: has no rows of the split {split!r}; there are: {', '.join(sorted({r.split for r in rows}))}"
        )
    return chosen
