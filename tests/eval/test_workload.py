from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import ClientSession, web
from typer.testing import CliRunner

from gearshift.deployments.cli import app
from gearshift.eval.bench import Report, collect
from gearshift.eval.drive import Http, Run, Trace, closed_loop, open_loop
from gearshift.eval.null_model import spread_between_tenants
from gearshift.eval.plot import draw
from gearshift.eval.workload import Job, Shape, Spread, text_of
from gearshift.platform.engine.fairness import bound
from gearshift.platform.errors import ConfigError

pytestmark = pytest.mark.anyio


def words(text: str) -> int:
    """A chat prompt of 10 tokens and one a word."""
    return 10 + len(text.split())


def test_lengths_are_numbers_or_ranges() -> None:
    assert Spread.parse("64") == Spread(64, 64)
    assert str(Spread.parse("16-256")) == "16-256"
    for wrong in ("", "0", "9-3", "a", "-5", "1-2-3"):
        with pytest.raises(ValueError, match="is not a length"):
            Spread.parse(wrong)


def test_prompts_have_the_tokens_they_should_and_share_what_they_should() -> None:
    jobs = Shape(Spread(30, 60), Spread(5, 9), shared_prefix=20).jobs(50, 1, words)
    assert all(30 <= words(job.text) <= 60 and 5 <= job.output <= 9 for job in jobs)
    assert len({" ".join(job.text.split()[:10]) for job in jobs}) == 1
    assert len({job.text for job in jobs}) == 50
    assert jobs == Shape(Spread(30, 60), Spread(5, 9), shared_prefix=20).jobs(50, 1, words)
    import random

    assert words(text_of(64, random.Random(0), words)) == 64


def test_arrivals_have_the_rate_they_should() -> None:
    jobs = Shape(rate=10.0).jobs(2000, 3, lambda text: 64 if text else 0)
    assert jobs[-1].at == pytest.approx(200, rel=0.1)


def test_gaps_of_a_window_and_of_pieces_with_several_tokens() -> None:
    trace = Trace(0.0, pieces=[1.0, 1.1, 1.5, 2.0], sizes=[1, 1, 2, 1])
    assert trace.gaps() == pytest.approx([0.1, 0.2, 0.2, 0.5])
    assert trace.gaps(1.05, 1.6) == pytest.approx([0.2, 0.2])


class Counting:
    def __init__(self) -> None:
        self.running = self.most = 0

    async def ask(self, job: Job, trace: Trace) -> None:
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(0.01)
        self.running -= 1
        trace.add(job.output)
        trace.output_tokens = job.output

    def cpu_seconds(self) -> float:
        return 0.0


async def test_a_closed_loop_never_has_more_than_its_streams_and_an_open_one_may() -> None:
    closed, opened = Counting(), Counting()
    run = await closed_loop(closed, [Job("", 5)] * 9, 3)
    assert (len(run.traces), run.output_tokens, closed.most) == (9, 45, 3)
    await open_loop(opened, [Job("", 5, at=0.0)] * 9)
    assert opened.most == 9


@pytest.fixture
async def server() -> AsyncIterator[str]:
    async def chat(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        response = web.StreamResponse()
        await response.prepare(request)
        for n in range(body["max_tokens"]):
            chunk = {"choices": [{"delta": {"content": f"{n} "}}]}
            await response.write(f"data: {json.dumps(chunk)}\n\n".encode())
        usage = {"prompt_tokens": 7, "completion_tokens": body["max_tokens"]}
        await response.write(f"data: {json.dumps({'choices': [], 'usage': usage})}\n\ndata: [DONE]\n\n".encode())
        return response

    application = web.Application()
    application.router.add_post("/v1/chat/completions", chat)
    runner = web.AppRunner(application)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
    yield f"http://127.0.0.1:{port}"
    await runner.cleanup()


@pytest.mark.parametrize("suffix", ["", "/", "/v1"])
async def test_a_server_behind_http_is_driven_the_same_way(server: str, suffix: str) -> None:
    async with ClientSession() as session:
        run = await closed_loop(Http(session, server + suffix, "m"), [Job("hi", 4)] * 3, 2)
        assert [(len(trace.pieces), trace.prompt_tokens, trace.output_tokens) for trace in run.traces] == [
            (4, 7, 4)
        ] * 3
        with pytest.raises(RuntimeError, match="answered 404"):
            await closed_loop(Http(session, f"{server}/nowhere", "m"), [Job("hi", 4)], 1)


def test_tokens_are_shared_within_the_bound_and_requests_are_not() -> None:
    limit = bound(512, 4096)
    assert spread_between_tenants(4096, 512, 0, by_tokens=True, steps=1500) <= limit
    assert spread_between_tenants(4096, 512, 0, by_tokens=False, steps=1500) > limit


def test_a_plot_of_a_report(tmp_path: Path) -> None:
    report = Report("engine")
    with pytest.raises(ConfigError, match="--plot"):
        draw(report, tmp_path / "none.png")
    for streams in (1, 16):
        report.results.append(collect(f"int8, {streams} streams: output", "tokens/CPU-s", [3.0 * streams, 4.0]))
        report.results.append(collect(f"int8, {streams} streams: inter-token p95", "ms", [3.0 * streams, 4.0]))
    draw(report, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes()[:4] == b"\x89PNG"


def test_a_run_counts_its_own_tokens() -> None:
    run = Run((Trace(0.0, [1.0], [1], output_tokens=30), Trace(0.0, [2.0], [1], output_tokens=10)), 4.0, 2.0)
    assert (run.tokens_per_second, run.tokens_per_cpu_second, run.ttft(50)) == (10.0, 20.0, 1.5)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [(["--formats", "int2"], "int2"), (["--only", "nothing"], "nothing"), (["--prompt-tokens", "x"], "not a length"),
     (["--streams", "a"], "'a'"), (["--streams", "0"], "--streams"), (["--model", "nobody"], "nobody")],
)  # fmt: skip
def test_wrong_options_are_named(arguments: list[str], problem: str) -> None:
    result = CliRunner().invoke(app, ["bench", "engine", *arguments])
    assert result.exit_code == 2
    assert problem in result.output


@pytest.mark.slow
def test_the_bench_runs_on_the_example_and_writes_what_it_found(tmp_path: Path) -> None:
    options = ["--streams", "1,2", "--formats", "int8", "--output-tokens", "4-8", "--repeats", "1"]
    parts = [
        "--only",
        "throughput,prefix,scheduling",
        "--json",
        str(tmp_path / "r.json"),
        "--plot",
        str(tmp_path / "p.png"),
    ]
    result = CliRunner().invoke(app, ["bench", "engine", *options, *parts])
    assert isinstance(result.exception, SystemExit | None), result.exception
    assert result.exit_code in (0, 1), result.output  # bars are for quiet machines
    names = {each["name"] for each in json.loads((tmp_path / "r.json").read_text())["results"]}
    assert {"int8, 2 streams: output", "first token, cached / cold", "scheduling, 64 running"} <= names
    assert (tmp_path / "p.png").exists()
