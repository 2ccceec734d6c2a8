"""`gearshift watermark …`: was a text written by a release?"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from gearshift.deployments.cli_experiment import JsonOption
from gearshift.deployments.consoles import err, out
from gearshift.deployments.marks import mark_of
from gearshift.deployments.progress import bars
from gearshift.platform import config_file
from gearshift.platform.errors import InvalidRequest

app = typer.Typer(no_args_is_help=True, help="The watermark of releases (`releases.NAME.watermark`).")


@app.command("detect")
def detect(
    config: Annotated[Path, typer.Argument(help="The deployment config; its key_env must be set here too.")],
    release: Annotated[str, typer.Option(help="Whose watermark to look for.")],
    text: Annotated[
        Path | None, typer.Option(help="File with the text, without the question; stdin unless given.")
    ] = None,
    threshold: Annotated[
        float, typer.Option(min=0, help="Standard deviations above chance that count: 4 is wrong once in 30,000 texts.")
    ] = 4.0,
    as_json: JsonOption = False,
) -> None:
    """Tell whether a text carries a release's watermark. Ends with 0 if it does, with 1 if it can't be told from chance."""
    from gearshift.platform.engine.runner import read_config
    from gearshift.platform.engine.watermark import detect as found_in
    from gearshift.platform.engine.watermark import tokens_of
    from gearshift.platform.weights import source

    deployed = config_file.load(config)
    if release not in deployed.releases:
        raise InvalidRequest(f"There is no release {release!r}; there are: {', '.join(deployed.releases)}.")
    mark = mark_of(deployed.releases[release])
    if mark is None:
        raise InvalidRequest(f"{release} has no watermark; set releases.{release}.watermark.")
    written = sys.stdin.read() if text is None else text.read_text()
    weights = deployed.models[deployed.releases[release].model].source
    assert weights is not None  # which the config is checked for
    with bars(err) as progress:
        folder = source.ensure(source.parse(weights), progress).path
    told = found_in(tokens_of(written, str(folder)), mark, read_config(folder).vocab_size)
    carries = told.z >= threshold
    if as_json:
        out.print_json(data={"tokens": told.tokens, "green": told.green, "z": told.z, "p": told.p, "found": carries})
    else:
        verdict = "carries the watermark" if carries else "can't be told from a text without the watermark"
        facts = f"{told.green:.1%} of {told.tokens} tokens are green, {mark.share:.0%} by chance"
        sure = f"z = {told.z:.2f}, p = {told.p:.2g}"
        out.print(f"The text {verdict} of {release}: {facts}: {sure}.", highlight=False, soft_wrap=True)
    raise typer.Exit(0 if carries else 1)
