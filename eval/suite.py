"""A suite of questions with checkable answers, asked of a release over the API; alone, or beside a baseline."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import msgspec
import numpy as np
from scipy.stats import binomtest

from gearshift.eval.answered import Question
from gearshift.eval.graders import GRADERS
from gearshift.platform.errors import ConfigError
from gearshift.platform.request import JsonObject
from gearshift.platform.weights.source import Progress

ROUNDS = 2000
"""Of the bootstrap."""
SHOWN = 10
"""Questions on which the two differ that the report shows."""
SHOWN_CHARS = 160


class Generation(msgspec.Struct, frozen=True):
    """An answer, or why there is none."""

    id: str
    answer: str
    error: str = ""
    completion_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Graded:
    """A release's answers. right: by question, 0 for one that failed."""

    release: str
    fingerprint: str
    generations: tuple[Generation, ...]
    right: tuple[bool, ...]
    reused: int = 0

    @property
    def failed(self) -> int:
        return sum(bool(each.error) for each in self.generations)


class Asker:
    """Asks one release. Answers are kept in a folder under the release's fingerprint, and are not asked for again while it
    stays the same."""

    def __init__(self, url: str, key: str | None, folder: Path, max_tokens: int, streams: int) -> None:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        self._http = httpx.AsyncClient(base_url=url, headers=headers, timeout=httpx.Timeout(300.0, connect=5.0))
        self._folder = folder
        self._max_tokens = max_tokens
        self._gate = asyncio.Semaphore(streams)

    async def run(self, release: str, questions: Sequence[Question], progress: Progress) -> Graded:
        """Raises `GearshiftError` when the release can't be asked at all."""
        async with self._http:
            first, fingerprint = await self._ask(release, questions[0])
            if first.error:
                raise ConfigError(f"--release {release}: {first.error}")
            kept = self._read(fingerprint)
            kept[_key(questions[0])] = first
            missing = [question for question in questions if _key(question) not in kept]
            done = 0

            async def ask(question: Question) -> None:
                nonlocal done
                generation, again = await self._ask(release, question)
                if again == fingerprint and not generation.error:
                    kept[_key(question)] = generation
                answers[question.id] = generation
                done += 1
                progress(release, done, len(missing))

            answers: dict[str, Generation] = {}
            await asyncio.gather(*(ask(question) for question in missing))
        self._write(fingerprint, kept)
        generations = tuple(answers.get(each.id) or kept[_key(each)] for each in questions)
        right = tuple(
            not said.error and GRADERS[asked.kind](said.answer, asked.answers)
            for asked, said in zip(questions, generations, strict=True)
        )
        return Graded(release, fingerprint, generations, right, len(questions) - len(missing) - 1)

    async def _ask(self, release: str, question: Question) -> tuple[Generation, str]:
        """The answer, and the fingerprint of what gave it."""
        body = {
            "model": release,
            "messages": [{"role": "user", "content": question.question}],
            "temperature": 0,
            "max_completion_tokens": self._max_tokens,
        }
        async with self._gate:
            try:
                answer = await self._http.post("/v1/chat/completions", json=body)
            except httpx.HTTPError as error:
                return Generation(question.id, "", f"{self._http.base_url}: {type(error).__name__}"), ""
        found = answer.json()
        if answer.status_code != 200:
            return Generation(question.id, "", str(found["error"]["message"])), ""
        text = found["choices"][0]["message"]["content"] or ""
        tokens = found["usage"]["completion_tokens"]
        return Generation(question.id, text, "", tokens), found["system_fingerprint"]

    def _file(self, fingerprint: str) -> Path:
        return self._folder / f"{fingerprint}-{self._max_tokens}.msgpack"

    def _read(self, fingerprint: str) -> dict[str, Generation]:
        try:
            return msgspec.msgpack.decode(self._file(fingerprint).read_bytes(), type=dict[str, Generation])
        except (OSError, msgspec.DecodeError):
            return {}

    def _write(self, fingerprint: str, kept: Mapping[str, Generation]) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._file(fingerprint).write_bytes(msgspec.msgpack.encode(kept))


def run(asker: Asker, release: str, questions: Sequence[Question], progress: Progress) -> Graded:
    return asyncio.run(asker.run(release, questions, progress))


def _key(question: Question) -> str:
    return hashlib.sha256(question.question.encode()).hexdigest()[:32]


def share(right: Sequence[bool]) -> tuple[float, float, float]:
    """Share that is right with Wilson's 95 % interval: low, share, high."""
    found = binomtest(sum(right), len(right)).proportion_ci(method="wilson")
    return float(found.low), sum(right) / len(right), float(found.high)


def mean_with_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Low, mean, high: percentile bootstrap, 95 %."""
    found = np.array(values, float)
    rng = np.random.default_rng(0)
    means = found[rng.integers(0, len(found), (ROUNDS, len(found)))].mean(axis=1)
    low, high = np.quantile(means, [0.025, 0.975])
    return float(low), float(found.mean()), float(high)


def difference(right: Sequence[bool], baseline: Sequence[bool]) -> tuple[float, float, float, float]:
    """Of the shares, on the same questions: low, difference, high (percentile bootstrap over questions, 95 %), and the exact
    p-value of McNemar's test (1947): among the questions on which they differ, either is right as often."""
    gap = np.array(right, float) - np.array(baseline, float)
    rng = np.random.default_rng(0)
    means = gap[rng.integers(0, len(gap), (ROUNDS, len(gap)))].mean(axis=1)
    low, high = np.quantile(means, [0.025, 0.975])
    better, worse = int((gap > 0).sum()), int((gap < 0).sum())
    p = float(binomtest(better, better + worse).pvalue) if better + worse else 1.0
    return float(low), float(gap.mean()), float(high), p


def summary(questions: Sequence[Question], runs: Sequence[Graded]) -> JsonObject:
    """What the report says, for a program to read. The last run is the baseline when there are two."""
    kinds = ["all", *dict.fromkeys(question.kind for question in questions)]
    rows = {}
    for kind in kinds:
        of_kind = [place for place, question in enumerate(questions) if kind in ("all", question.kind)]
        rows[kind] = {
            "questions": len(of_kind),
            "shares": {run.release: share([run.right[i] for i in of_kind]) for run in runs},
        }
        if len(runs) == 2:
            rows[kind]["difference"] = difference(*([run.right[i] for i in of_kind] for run in runs))
    return {
        "questions": len(questions),
        "releases": [
            {
                "release": run.release,
                "fingerprint": run.fingerprint,
                "failed": run.failed,
                "reused": run.reused,
                "completion_tokens": sum(each.completion_tokens for each in run.generations),
            }
            for run in runs
        ],
        "kinds": rows,
    }


def markdown(name: str, questions: Sequence[Question], runs: Sequence[Graded]) -> str:
    """The report."""
    found = summary(questions, runs)
    names = [run.release for run in runs]
    against = len(runs) == 2
    head = ["", "questions", *names, *(["difference", "p"] if against else [])]
    lines = [
        f"# {name}",
        "",
        f"Greedy answers to {len(questions)} questions; shares that are right, with 95 % intervals.",
        "",
    ]
    lines += [f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}"]
    for kind, row in found["kinds"].items():
        cells = [kind, str(row["questions"]), *(_span(row["shares"][each]) for each in names)]
        if against:
            low, gap, high, p = row["difference"]
            cells += [f"{100 * gap:+.1f} ({100 * low:+.1f} to {100 * high:+.1f}) points", f"{p:.2g}"]
        lines.append(f"| {' | '.join(cells)} |")
    lines += [""] + [
        f"- `{each['release']}` ({each['fingerprint']}): {each['failed']} failed, {each['completion_tokens']:,} tokens"
        for each in found["releases"]
    ]
    return "\n".join(lines + (_differing(questions, runs) if against else [])) + "\n"


def _span(interval: tuple[float, float, float]) -> str:
    low, middle, high = interval
    return f"{middle:.1%} ({low:.1%}–{high:.1%})"


def _differing(questions: Sequence[Question], runs: Sequence[Graded]) -> list[str]:
    lines = ["", "## Where they differ", ""]
    places = [i for i in range(len(questions)) if runs[0].right[i] != runs[1].right[i]]
    lines.append(f"{len(places)} questions" + (f", the first {SHOWN} of them:" if len(places) > SHOWN else ":"))
    for i in places[:SHOWN]:
        lines += ["", f"**{questions[i].question}** (accepted: {', '.join(questions[i].answers)})"]
        for run in runs:
            said = run.generations[i].error or " ".join(run.generations[i].answer.split())
            lines.append(f"- {'✓' if run.right[i] else '✗'} `{run.release}`: {said[:SHOWN_CHARS]}")
    return lines


def draw(found: JsonObject, path: Path) -> None:
    """Shares by kind with their intervals. Raises `ConfigError` when there is nothing to draw with."""
    from gearshift.eval.plot import pyplot

    plt = pyplot()
    kinds, names = list(found["kinds"]), [each["release"] for each in found["releases"]]
    figure, axis = plt.subplots(figsize=(1.6 * len(kinds) + 2, 3.6), layout="constrained")
    for number, name in enumerate(names):
        spans = [found["kinds"][kind]["shares"][name] for kind in kinds]
        at = [place + (number - (len(names) - 1) / 2) * 0.2 for place in range(len(kinds))]
        errors = [[mid - low for low, mid, _ in spans], [high - mid for _, mid, high in spans]]
        axis.errorbar(at, [mid for _, mid, _ in spans], yerr=errors, fmt="o", capsize=3, label=name)
    axis.set_xticks(range(len(kinds)), [f"{kind}\n{found['kinds'][kind]['questions']}" for kind in kinds])
    axis.set(ylabel="share that is right", ylim=(0, 1))
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    figure.savefig(path, dpi=100)
    plt.close(figure)
