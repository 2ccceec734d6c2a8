"""`gearshift eval …`: releases on suites of questions."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from gearshift.deployments.consoles import err, out
from gearshift.deployments.progress import bars

app = typer.Typer(no_args_is_help=True, help="Releases on suites of questions with checkable answers.")
DEFAULT_URL = "http://127.0.0.1:8000"
VERDICT_TOKENS = 16
Url = Annotated[str, typer.Option(envvar="GEARSHIFT_URL", help="The API's address.")]
Streams = Annotated[int, typer.Option(min=1, help="Questions at a time.")]
Fresh = Annotated[bool, typer.Option(help="Ask anew, also where answers of this very release are kept.")]


@app.callback()
def _group() -> None:
    """Releases on suites of questions with checkable answers."""


@app.command("run")
def run(
    suite: Annotated[
        Path | None,
        typer.Argument(
            help="Questions, one JSON object a line: id, split, kind (text, number, choice, exact), question, answers. Ours "
            "if left out."
        ),
    ] = None,
    release: Annotated[str, typer.Option(help="What to ask: a release, a tier or auto.")] = "auto",
    baseline: Annotated[str | None, typer.Option(help="What to compare it with, on the same questions.")] = None,
    split: Annotated[str, typer.Option(help="Questions of this split, or all.")] = "all",
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 64,
    streams: Streams = 8,
    url: Url = DEFAULT_URL,
    report: Annotated[Path | None, typer.Option(help="Write the report to this Markdown file.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write the numbers to this file.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the shares by kind into this PNG.")] = None,
    judge: Annotated[
        str | None, typer.Option(help="With a baseline: also let this release judge whose answers are better.")
    ] = None,
    fresh: Fresh = False,
) -> None:
    """Ask a release of the running deployment a suite of questions, and grade its answers. Answers are kept, and asked for again
    when the release's weights, prompt or policy change. The API key is read from GEARSHIFT_API_KEY."""
    from gearshift.eval import answered, jsonl, pairs
    from gearshift.eval import suite as suites

    if judge is not None and baseline is None:
        raise typer.BadParameter("--judge: needs a --baseline to compare with")
    path = suite or answered.own_questions()
    questions = [q for q in jsonl.read(path, answered.Question) if split in ("all", q.split)]
    if not questions:
        raise typer.BadParameter(f"--split: {path} has no question of split {split!r}")
    with _kept(fresh) as folder, bars(err) as progress:
        key = os.environ.get("GEARSHIFT_API_KEY")
        runs = [
            suites.run(suites.Asker(url, key, folder, max_tokens, streams), name, questions, progress)
            for name in (release, baseline)
            if name is not None
        ]
        found, text = suites.summary(questions, runs), suites.markdown(path.name, questions, runs)
        if judge is not None:
            both = zip(questions, runs[0].generations, runs[1].generations, strict=True)
            asked = [(question.question, mine.answer, other.answer) for question, mine, other in both]
            asker = suites.Asker(url, key, folder, VERDICT_TOKENS, streams)
            found["judge"] = pairs.preferred(pairs.judged(asker, judge, asked, progress), runs)
            text += pairs.markdown(judge, found["judge"])
    if report is not None:
        report.write_text(text)
    if json_file is not None:
        json_file.write_text(json.dumps(found, indent=2) + "\n")
    if plot is not None:
        suites.draw(found, plot)
    out.print(text, markup=False, highlight=False, soft_wrap=True)
    raise typer.Exit(1 if any(each.failed for each in runs) else 0)


@app.command("judge")
def judge(
    labels: Annotated[
        Path,
        typer.Argument(
            help="Pairs that people have judged, one JSON object a line: id, question, a, b, preferred (a, b, tie)."
        ),
    ],
    release: Annotated[str, typer.Option(help="The judge.")],
    streams: Streams = 8,
    url: Url = DEFAULT_URL,
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write the numbers to this file.")] = None,
    fresh: Fresh = False,
) -> None:
    """See how far a release agrees with people on which of two answers is better, before you let it judge. Each pair is asked in
    both orders."""
    import msgspec
    from rich.table import Table

    from gearshift.eval import jsonl, pairs
    from gearshift.eval import suite as suites

    labelled = jsonl.read(labels, pairs.LabelledPair)
    with _kept(fresh) as folder, bars(err) as progress:
        asker = suites.Asker(url, os.environ.get("GEARSHIFT_API_KEY"), folder, VERDICT_TOKENS, streams)
        told = pairs.judged(asker, release, [(each.question, each.a, each.b) for each in labelled], progress)
    try:
        found = pairs.agreement_with(labelled, told)
    except ValueError as error:
        err.print(f"{release}: {error}; it can't serve as one.", style="red")
        raise typer.Exit(1) from None
    if json_file is not None:
        json_file.write_text(json.dumps(msgspec.to_builtins(found), indent=2) + "\n")
    table = Table("", release, title=f"Agreement with people on {found.pairs} pairs", title_justify="left")
    table.add_row("says the same (95 % interval)", _span(found.share))
    table.add_row("kappa (0 is chance)", "—" if found.kappa is None else f"{found.kappa:.2f}")
    table.add_row("both take a side", str(found.decided))
    table.add_row("of those, the same side", _span(found.agreed) if found.decided else "—")
    table.add_row("followed the order", str(found.followed_order))
    table.add_row("no verdict", str(found.unclear))
    out.print(table)


@contextmanager
def _kept(fresh: bool) -> Iterator[Path]:
    """Where answers are kept from one run to the next."""
    from gearshift.platform.weights.source import cache_dir

    if not fresh:
        yield cache_dir() / "generations"
        return
    with tempfile.TemporaryDirectory() as empty:
        yield Path(empty)


def _span(interval: tuple[float, float, float]) -> str:
    low, middle, high = interval
    return f"{middle:.0%} ({low:.0%}–{high:.0%})"
