"""Routing and the cascade through the whole gateway, with engines that tell scripted log-probabilities."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from gearshift.platform import config_file
from gearshift.platform.config import Config
from gearshift.platform.engine.echo import EchoEngine
from gearshift.platform.errors import ConfigError, EngineUnavailable
from gearshift.router import artefact
from gearshift.router.answers import Attempt, Certainty
from gearshift.router.artefact import Card, data_hash
from gearshift.router.calibration import Calibration, CascadeThreshold, Data, Interval, Target
from gearshift.router.features import Query
from gearshift.router.learned import Examples, Kind, train
from gearshift.router.policy import Asked
from gearshift.router.router import Router

pytestmark = pytest.mark.anyio

CASCADE = "router: {scorer: length, cascade: {threshold: 0.5, window_tokens: 3}}\n"
SURE, UNSURE = (-0.1,), (-2.0,)
QUESTION = "one two three four five six"


async def ask(gateway: Any, text: str = QUESTION, model: str = "auto", key: str = "gs-alice", **fields: Any) -> Any:
    async with gateway.client(key) as client:
        return await client.chat.completions.with_raw_response.create(
            model=model, messages=[{"role": "user", "content": text}], **fields
        )


async def stream(gateway: Any, text: str = QUESTION) -> tuple[str, list[str]]:
    """The answer, and the models that its chunks name."""
    async with gateway.client() as client:
        chunks = await client.chat.completions.create(
            model="auto", messages=[{"role": "user", "content": text}], stream=True
        )
        seen = [chunk async for chunk in chunks]
    return "".join(c.delta.content or "" for chunk in seen for c in chunk.choices), [chunk.model for chunk in seen]


async def test_a_sure_answer_of_the_cheap_tier_is_sent(serve: Any) -> None:
    expensive = EchoEngine()
    async with serve(extra=CASCADE, small=EchoEngine(logprobs=SURE), large=expensive) as gateway:
        raw = await ask(gateway)
        text, models = await stream(gateway)
    assert raw.parse().choices[0].message.content == text == QUESTION
    assert raw.headers["x-gearshift-tier"] == "cheap"
    assert raw.headers["x-gearshift-route-reason"].endswith("cascade:0.905>=0.5")
    assert set(models) == {"small-v1"}
    assert expensive.stats().generation_tokens == 0


async def test_an_unsure_answer_is_given_up_before_the_client_sees_any_of_it(serve: Any) -> None:
    cheap = EchoEngine(logprobs=UNSURE)
    async with serve(extra=CASCADE, small=cheap) as gateway:
        raw = await ask(gateway)
        cheap_whole = cheap.stats()
        text, models = await stream(gateway)
        cheap_stream = cheap.stats()
    assert raw.parse().choices[0].message.content == text == QUESTION
    assert raw.headers["x-gearshift-tier"] == "expensive"
    assert "cascade:0.135<0.5" in raw.headers["x-gearshift-route-reason"]
    assert set(models) == {"large-v1"}
    assert cheap_whole.generation_tokens == 6  # a whole answer was read to its end
    assert (cheap_stream.generation_tokens, cheap_stream.aborted, cheap_stream.running) == (
        8,
        1,
        0,
    )  # stopped in the third


async def test_the_cost_of_the_failed_attempt_is_counted(serve: Any, tmp_path: Path) -> None:
    log = tmp_path / "records.jsonl"
    extra = CASCADE + f"telemetry: {{records: file, records_path: {log}, record_queries: true}}\n"
    async with serve(extra=extra, small=EchoEngine(logprobs=UNSURE)) as gateway:
        raw = await ask(gateway)
    record = json.loads(log.read_text())
    tier, reason, confidence, prompt, completion, dollars = record["attempts"][0]
    assert (tier, reason, prompt, completion) == ("cheap", "cascade:0.135<0.5", 6, 6)
    assert confidence == pytest.approx(0.1353, abs=1e-3)
    assert dollars == pytest.approx((6 * 1 + 6 * 2) / 1e6)
    assert record["cost_dollars"] == pytest.approx((6 * 10 + 6 * 20) / 1e6)
    assert (record["query"], record["scorer"], record["accepted"]) == (QUESTION, "length", False)
    assert raw.parse().usage.total_tokens == 12  # the client pays for the answer it got


async def test_an_answer_that_nobody_judged_is_not_served_from_the_cache(serve: Any) -> None:
    async with serve(extra=CASCADE, small=EchoEngine(logprobs=UNSURE)) as gateway:
        asked_for = await ask(gateway, model="cheap")
        await gateway.pipeline.settled()
        routed = await ask(gateway)
        await gateway.pipeline.settled()
        again = await ask(gateway)
    assert asked_for.headers["x-gearshift-cache"] == "miss"
    assert (routed.headers["x-gearshift-tier"], routed.headers["x-gearshift-cache"]) == ("expensive", "miss")
    assert (again.headers["x-gearshift-tier"], again.headers["x-gearshift-cache"]) == ("expensive", "hit")


async def test_a_judged_answer_is_served_from_the_cache(serve: Any) -> None:
    async with serve(extra=CASCADE, small=EchoEngine(logprobs=SURE)) as gateway:
        await ask(gateway)
        await gateway.pipeline.settled()
        again = await ask(gateway)
    assert (again.headers["x-gearshift-tier"], again.headers["x-gearshift-cache"]) == ("cheap", "hit")


async def test_when_nobody_else_can_answer_the_unsure_one_is_sent(serve: Any) -> None:
    gone = EchoEngine(fail_after=0, failure=EngineUnavailable("gone"))
    async with serve(extra=CASCADE, small=EchoEngine(logprobs=UNSURE), large=gone) as gateway:
        raw = await ask(gateway)
    assert (raw.headers["x-gearshift-tier"], raw.parse().choices[0].message.content) == ("cheap", QUESTION)


async def test_a_second_sample_that_disagrees_lowers_the_confidence(serve: Any) -> None:
    class Fickle(EchoEngine):
        """Says something else when it draws."""

        async def generate(self, request: Any) -> Any:
            if request.sampling.temperature:
                words = type(request.messages[0])("user", "quite another thing")
                request = type(request)(request.id, (words,), request.sampling)
            async for delta in super().generate(request):
                yield delta

    extra = CASCADE.replace("window_tokens: 3", "window_tokens: 3, second_sample: true")
    async with serve(extra=extra, small=Fickle(logprobs=SURE)) as gateway:
        differs = await ask(gateway)
    async with serve(extra=extra, small=EchoEngine(logprobs=SURE)) as gateway:
        agrees = await ask(gateway, "one two three")
    assert differs.headers["x-gearshift-tier"] == "expensive"
    assert agrees.headers["x-gearshift-tier"] == "cheap"


async def test_a_client_that_goes_away_while_an_answer_is_judged_stops_it(serve: Any) -> None:
    cheap = EchoEngine(delay_s=0.05, logprobs=SURE)
    async with serve(extra=CASCADE, small=cheap) as gateway, gateway.client() as client:
        task = asyncio.create_task(
            client.chat.completions.create(model="auto", messages=[{"role": "user", "content": "word " * 40}])
        )
        async with asyncio.timeout(10):
            while not cheap.stats().running:
                await asyncio.sleep(0.01)
        task.cancel()
        async with asyncio.timeout(10):
            while cheap.stats().running:
                await asyncio.sleep(0.01)
    assert cheap.stats().aborted == 1


async def test_a_header_forces_a_tier_and_an_unknown_one_is_an_error(serve: Any) -> None:
    async with serve() as gateway:
        raw = await ask(gateway, extra_headers={"x-gearshift-tier": "expensive"})
        with pytest.raises(openai.BadRequestError, match="there is no tier 'dear'"):
            await ask(gateway, extra_headers={"x-gearshift-tier": "dear"})
    assert (raw.headers["x-gearshift-tier"], raw.headers["x-gearshift-route-reason"]) == ("expensive", "forced")


async def test_tenants_are_pinned_to_a_tier_or_kept_out_of_one(serve: Any, base_config: str) -> None:
    hard = "Explain this python function and prove its complexity."
    for setting, reason in (("tier: cheap", "pinned"), ("tiers: [cheap]", "rule:allow-list")):
        text = base_config.replace("alice: {", f"alice: {{{setting}, ")
        async with serve(text) as gateway:
            raw = await ask(gateway, hard)
            assert (raw.headers["x-gearshift-tier"], raw.headers["x-gearshift-route-reason"]) == ("cheap", reason)
            if reason == "pinned":
                forced = await ask(gateway, hard, extra_headers={"x-gearshift-tier": "expensive"})
                assert forced.headers["x-gearshift-tier"] == "cheap"
            else:
                with pytest.raises(openai.PermissionDeniedError, match="may not use 'expensive'"):
                    await ask(gateway, hard, extra_headers={"x-gearshift-tier": "expensive"})


async def test_a_prompt_that_the_cheap_tier_can_not_hold_goes_to_the_other(serve: Any, base_config: str) -> None:
    text = base_config.replace("cheap: {release: small-v1,", "cheap: {release: small-v1, context: 20,")
    async with serve(text) as gateway:
        raw = await ask(gateway, "word " * 40)
    assert (raw.headers["x-gearshift-tier"], raw.headers["x-gearshift-route-reason"]) == ("expensive", "rule:context")


async def test_a_nearly_used_budget_raises_the_threshold_and_it_goes_back(serve: Any, base_config: str) -> None:
    extra = "router: {scorer: random, threshold: 0.5, pressure: {start: 0.2, most: 0.5}}\n"
    text = base_config.replace("alice: {", "alice: {limits: {tokens_per_minute: 100000}, ")
    async with serve(text, extra=extra) as gateway:
        free = await ask(gateway)
        near = await ask(gateway, max_completion_tokens=70_000)
    assert "load" not in free.headers["x-gearshift-route-reason"]
    assert "load:0.7" in near.headers["x-gearshift-route-reason"]


def scorer(folder: Path, kind: Kind = "tfidf", tiers: tuple[str, ...] = ("cheap", "expensive")) -> artefact.Artefact:
    """Knows that sums are hard; a judge knows that unsure answers are wrong."""
    sure, unsure = (Attempt("x", Certainty([value] * 4, [0.0] * 4)) for value in (-0.1, -2.0))
    queries = [Query(f"say {n}" if n % 2 else f"calculate {n}", attempt=sure if n % 2 else unsure) for n in range(60)]
    qualities = np.array([[float(n % 2), *[1.0] * (len(tiers) - 1)] for n in range(60)])
    data = Examples(queries, qualities)
    card = Card(kind, tiers, len(queries), data_hash(data))
    return artefact.save(folder / f"{kind}.safetensors", train(kind, data), card)


def calibrate(folder: Path, scorer_id: str, judge: str = "") -> None:
    sure = Interval(value=0.5, low=0.4, high=0.6)
    Calibration(
        scorer=scorer_id, target=Target(quality=0.95), threshold=0.3, expensive_share=0.5, saving=sure, quality=sure,
        quality_bound=0.9, data=Data(rows=60, hash="sha256:0"), scores=[0.0, 1.0],
        cascade=CascadeThreshold(threshold=0.4, judge=judge) if judge else None,
    ).write(folder / "calibration.yaml")  # fmt: skip


def configured(base_config: str, folder: Path, router: str) -> Config:
    (folder / "config.yaml").write_text(f"{base_config}router: {router}\n")
    return config_file.load(folder / "config.yaml")


async def test_a_router_that_looks_at_vectors_gets_them_and_does_without(
    serve: Any, base_config: str, tmp_path: Path
) -> None:
    texts = [f"number {n}" for n in range(60)]
    vectors = [(float(n % 2), 1.0) for n in range(60)]
    queries = [Query(text, embedding=vector) for text, vector in zip(texts, vectors, strict=True)]
    data = Examples(queries, np.array([[float(n % 2), 1.0] for n in range(60)]))
    card = Card("semantic", ("cheap", "expensive"), 60, data_hash(data), encoder="pypi:all-minilm-l6-v2")
    artefact.save(tmp_path / "s.safetensors", train("semantic", data), card)
    router = "{artefact: s.safetensors, threshold: 0.3}\n"
    with pytest.raises(ConfigError, match="add `embedding"):
        Router(configured(base_config, tmp_path, router))
    with pytest.raises(ConfigError, match="train it for that"):
        Router(configured(base_config, tmp_path, f"{router}embedding: {{source: hf:org/other}}"))
    asked: list[str] = []

    async def embed(text: str, timeout_s: float | None) -> tuple[float, ...]:
        asked.append(text)
        return () if "gone" in text else (float("easy" in text), 1.0)

    extra = f"router: {{artefact: {tmp_path}/s.safetensors, threshold: 0.5}}\nembedding: {{}}\n"
    async with serve(extra=extra, embed=embed) as gateway, gateway.client() as client:

        async def tier(text: str, model: str = "auto") -> str:
            messages: Any = [{"role": "user", "content": text}]
            raw = await client.chat.completions.with_raw_response.create(model=model, messages=messages)
            return str(raw.headers["x-gearshift-tier"])

        assert [await tier(text) for text in ("an easy one", "a hard one")] == ["cheap", "expensive"]
        await tier("gone")
        await tier("not the router's business", "cheap")
    assert asked == ["an easy one", "a hard one", "gone"]


def test_files_of_the_router_lie_beside_the_config(base_config: str, tmp_path: Path) -> None:
    made, judge = scorer(tmp_path), scorer(tmp_path, "answer")
    calibrate(tmp_path, made.digest, judge.digest)
    text = "{artefact: tfidf.safetensors, calibration: calibration.yaml, cascade: {judge: answer.safetensors}}"
    router = Router(configured(base_config, tmp_path, text))
    assert (router.threshold, router.cascade_threshold, router.scorer_id) == (0.3, 0.4, made.digest)
    easy, hard = (router.route(Query(text), Asked()) for text in ("say 77", "calculate 88"))
    assert (easy.tier, hard.tier) == ("cheap", "expensive")
    assert router.verifies(easy)
    assert not router.verifies(hard)
    assert router.judge(Query("say 1"), Attempt("x", Certainty([-0.1] * 4))).accepted
    assert not router.judge(Query("calculate 2"), Attempt("x", Certainty([-2.0] * 4))).accepted


@pytest.mark.parametrize(
    ("router", "told"),
    [
        ("{artefact: missing.safetensors}", "No such file"),
        ("{artefact: three.safetensors}", "trained for the tiers a, b, c"),
        ("{artefact: tfidf.safetensors, calibration: other.yaml}", "was made for the scorer length"),
        ("{artefact: tfidf.safetensors, calibration: calibration.yaml, cascade: {}}", "no threshold for this judge"),
        ("{artefact: answer.safetensors}", "router.artefact: .* is of kind answer"),
        ("{cascade: {judge: tfidf.safetensors, threshold: 0.5}}", "router.cascade.judge: .* is of kind tfidf"),
        ("{calibration: broken.yaml}", "not YAML"),
        ("{calibration: empty.yaml}", "make it anew"),
    ],
)
def test_files_that_do_not_belong_together_are_config_errors(
    base_config: str, tmp_path: Path, router: str, told: str
) -> None:
    scorer(tmp_path, tiers=("a", "b", "c"))
    (tmp_path / "tfidf.safetensors").rename(tmp_path / "three.safetensors")
    calibrate(tmp_path, "length")
    (tmp_path / "calibration.yaml").rename(tmp_path / "other.yaml")
    scorer(tmp_path, "answer")
    calibrate(tmp_path, scorer(tmp_path).digest)
    (tmp_path / "broken.yaml").write_text("a: [")
    (tmp_path / "empty.yaml").write_text("a: 1")
    with pytest.raises(ConfigError, match=told):
        Router(configured(base_config, tmp_path, router))


@pytest.mark.parametrize(
    ("router", "told"),
    [
        ("{calibration: a.yaml, threshold: 0.4}", "either threshold or calibration"),
        ("{cascade: {}}", "needs a threshold"),
        ("{cascade: {treshold: 1}}", "did you mean 'threshold'"),
    ],
)
def test_settings_that_contradict_are_config_errors(base_config: str, router: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        config_file.parse(f"{base_config}router: {router}\n")
