"""`gearshift eval …`: releases on suites of questions."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from gearshift.deployments.consoles import err, out
from gearshift.deployments.progress import bars

app = typer.Typer(no_args_is_help=True, help="Releases on suites of questions with checkable answers.")
DEFAULT_URL = "http://127.0.0.1:8000"


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
    streams: Annotated[int, typer.Option(min=1, help="Questions at a time.")] = 8,
    url: Annotated[str, typer.Option(envvar="GEARSHIFT_URL", help="The API's address.")] = DEFAULT_URL,
    report: Annotated[Path | None, typer.Option(help="Write the report to this Markdown file.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write the numbers to this file.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the shares by kind into this PNG.")] = None,
    fresh: Annotated[bool, typer.Option(help="Ask anew, also where answers of this very release are kept.")] = False,
) -> None:
    """Ask a release of the running deployment a suite of questions, and grade its answers. Answers are kept, and asked for again
    when the release's weights, prompt or policy change. The API key is read from GEARSHIFT_API_KEY."""
    import tempfile

    import msgspec

    from gearshift.eval import answered, jsonl
    from gearshift.eval import suite as suites
    from gearshift.platform.weights.source import cache_dir

    path = suite or answered.own_questions()
    questions = [q for q in jsonl.read(path, answered.Question) if split in ("all", q.split)]
    if not questions:
        raise typer.BadParameter(f"--split: {path} has no question of split {split!r}")
    with tempfile.TemporaryDirectory() as empty, bars(err) as progress:
        folder = Path(empty) if fresh else cache_dir() / "generations"
        runs = [
            suites.run(
                suites.Asker(url, os.environ.get("GEARSHIFT_API_KEY"), folder, max_tokens, streams),
                name,
                questions,
                progress,
            )
            for name in (release, baseline)
            if name is not None
        ]
    found, text = suites.summary(questions, runs), suites.markdown(path.name, questions, runs)
    if report is not None:
        report.write_text(text)
    if json_file is not None:
        json_file.write_bytes(msgspec.json.format(msgspec.json.encode(found)) + b"\n")
    if plot is not None:
        suites.draw(found, plot)
    out.print(text, markup=False, highlight=False, soft_wrap=True)
    raise typer.Exit(1 if any(each.failed for each in runs) else 0)
