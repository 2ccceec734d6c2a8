"""`gearshift guardrails …`: what the trained rules are made of."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gearshift.deployments.consoles import err, out
from gearshift.deployments.progress import bars
from gearshift.platform.config import Embedding
from gearshift.platform.weights.source import Progress

if TYPE_CHECKING:
    from gearshift.platform.embedding import Embedder

app = typer.Typer(no_args_is_help=True, help="The trained rules of policies.")


@app.command("words")
def words(
    data: Annotated[Path, typer.Option(help="Folder with injection.jsonl.gz.")],
    out_file: Annotated[Path, typer.Option("--out", help="File to write; the program reads guardrails/words.txt.")],
) -> None:
    """Collect the words by which a disguise is known to be undone. Classifiers read undisguised texts: train them after this."""
    from gearshift.eval import guard_data, guard_training

    rows = [row for row in guard_data.injections(data) if row.source in guard_data.LICENCES]
    own = [text for text, _, _ in guard_training.written("injection", guard_training.RECIPES["injection"].written)]
    found = guard_training.vocabulary(rows, own)
    out_file.write_text("\n".join(found) + "\n")
    out.print(f"{out_file}: {len(found)} words", highlight=False)


@app.command("train")
def train(
    name: Annotated[str, typer.Argument(help="injection, toxicity or personal.")],
    data: Annotated[
        Path,
        typer.Option(
            help="Folder with injection.jsonl.gz or toxicity.jsonl.gz (text, label, source, a line each), or pii.jsonl.gz (text, "
            "spans, template)."
        ),
    ],
    out_file: Annotated[Path, typer.Option("--out", help="File to write.")],
    encoder: Annotated[str, typer.Option(help="What `embedding.source` says.")] = Embedding().source,
    also: Annotated[
        list[str] | None,
        typer.Option(
            help="A source of rows that may be trained on, beside the public ones whose terms are known to allow it."
        ),
    ] = None,
    false_positives: Annotated[
        float | None,
        typer.Option(
            min=1e-4,
            max=0.5,
            help="Share of harmless texts that may score above 0.5 (0.007 unless given), or of harmless characters that personal "
            "may take for something (0.02).",
        ),
    ] = None,
) -> None:
    """Train a classifier on the rows whose terms allow it, and set its scores by texts that it has not seen."""
    from gearshift.eval import guard_training
    from gearshift.guardrails.classifier import save
    from gearshift.platform.embedding import Embedder
    from gearshift.platform.weights import source

    if name not in (*guard_training.RECIPES, "personal"):
        known = ", ".join((*guard_training.RECIPES, "personal"))
        raise typer.BadParameter(f"{name!r} is none of {known}", param_hint="NAME")
    with bars(err) as progress:
        embedder = Embedder(source.ensure(source.parse(encoder), progress).path)
        if name == "personal":
            _train_tagger(data, embedder, encoder, false_positives or 0.02, out_file, progress)
            return
        made = guard_training.train(
            name,
            data,
            lambda texts: embedder.embed(texts, lambda done, total: progress("embedding", done, total)),
            encoder,
            false_positives or 0.007,
            also or (),
        )
    save(out_file, made)
    card = made.card
    told = (
        f"{card.rows} texts; of unseen ones {card.recall:.1%} found, {card.false_positives:.2%} of the harmless flagged"
    )
    out.print(f"{out_file}: {told}", highlight=False, soft_wrap=True)


def _train_tagger(
    data: Path, embedder: Embedder, encoder: str, most_over: float, out_file: Path, progress: Progress
) -> None:
    from gearshift.eval import tagger_training
    from gearshift.guardrails.tagger import save

    made = tagger_training.train(
        data,
        lambda texts, places: embedder.words(texts, places, lambda done, total: progress("reading", done, total)),
        encoder,
        most_over,
    )
    save(out_file, made)
    card = made.card
    told = f"{card.recall:.1%} of the labelled characters found, {card.false_positives:.2%} of the others taken"
    out.print(f"{out_file}: {card.rows} texts; of unseen templates {told}", highlight=False, soft_wrap=True)
