"""transformers' own ways to generate, on the same model, threads and requests, in the same process."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import torch

from gearshift.eval.bench import Bar, Report, collect
from gearshift.eval.drive import closed_loop
from gearshift.eval.engine_lab import Lab
from gearshift.eval.workload import Job, Shape, Spread
from gearshift.platform.engine.local import chat_encoder
from gearshift.platform.request import Message
from gearshift.platform.weights.source import Progress

if TYPE_CHECKING:
    from gearshift.eval.bench_engine import Plan

PAGE = 32
REQUESTS, OUTPUT = 32, Spread(16, 256)
BARS = {"generate_batch": 2.0, "generate": 1.8}


class Transformers:
    """`generate_batch` is its continuous batching; `generate` a static batch, padded on the left, that runs until its
    longest answer is done."""

    def __init__(self, lab: Lab) -> None:
        from transformers import AutoModelForCausalLM

        self._encode = chat_encoder(lab.tokenizer)
        self._model: Any = AutoModelForCausalLM.from_pretrained(lab.path, dtype=torch.bfloat16).eval()

    def _prompts(self, jobs: list[Job]) -> list[list[int]]:
        return [self._encode((Message("user", job.text),)) for job in jobs]

    @torch.inference_mode()
    def generate(self, jobs: list[Job]) -> float:
        """CPU-seconds. Answers are cut to their lengths afterwards: a static batch can't let one go early."""
        prompts = self._prompts(jobs)
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        tokens = max(job.output for job in jobs)
        begun = time.process_time()
        self._model.generate(ids, attention_mask=mask, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False)
        return time.process_time() - begun

    def generate_batch(self, jobs: list[Job]) -> float:
        """CPU-seconds. Its cache holds all requests and no more: by default it takes all memory, and masks as large."""
        from transformers import ContinuousBatchingConfig, GenerationConfig

        prompts = self._prompts(jobs)
        config = GenerationConfig(max_new_tokens=OUTPUT.high, do_sample=False, eos_token_id=-1)
        blocks = ContinuousBatchingConfig(page_size=PAGE, num_blocks=self._needed(jobs, prompts), max_batch_tokens=512)
        begun = time.process_time()
        manager = self._model.init_continuous_batching(config, blocks)
        manager.start()
        try:
            for number, (job, prompt) in enumerate(zip(jobs, prompts, strict=True)):
                manager.add_request(prompt, request_id=str(number), max_new_tokens=job.output)
            finished = 0
            while finished < len(jobs):
                result = manager.get_result(timeout=1)
                finished += result is not None and result.is_finished()
        finally:
            manager.stop(block=True)
        return time.process_time() - begun

    def _needed(self, jobs: list[Job], prompts: list[list[int]]) -> int:
        """Enough for all requests at once, and no more: it computes masks over all of them."""
        tokens = [len(prompt) + job.output for job, prompt in zip(jobs, prompts, strict=True)]
        return sum(-(-count // PAGE) + 1 for count in tokens)


def versus_transformers(lab: Lab, plan: Plan, report: Report, progress: Progress) -> None:
    theirs = Transformers(lab)
    speeds: dict[str, list[float]] = {}
    for repeat in range(plan.repeats):
        jobs = Shape(output=OUTPUT).jobs(REQUESTS, repeat, lab.count)
        tokens = sum(job.output for job in jobs)
        ways = {
            "ours": lambda jobs=jobs: asyncio.run(_ours(lab, jobs)),
            **{name: getattr(theirs, name) for name in BARS},
        }
        for number, (name, way) in enumerate(ways.items()):
            progress(f"beside transformers: {name}", repeat * len(ways) + number, plan.repeats * len(ways))
            seconds = way() if name == "ours" else way(jobs)
            speeds.setdefault(name, []).append(tokens / seconds)
    for name, values in speeds.items():
        report.results.append(collect(f"32 requests, answers {OUTPUT}, bfloat16: {name}", "tokens/CPU-s", values))
    for name, limit in BARS.items():
        ratios = [ours / other for ours, other in zip(speeds["ours"], speeds[name], strict=True)]
        result = collect(f"bfloat16 / transformers {name}", "x", ratios)
        report.results.append(result)
        report.bars.append(Bar(f"over transformers {name}", result.median, limit, "min"))


async def _ours(lab: Lab, jobs: list[Job]) -> float:
    async with lab.engine("bfloat16", max_num_seqs=REQUESTS) as target:
        return (await closed_loop(target, jobs, REQUESTS)).cpu_seconds
