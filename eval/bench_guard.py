"""`gearshift bench guardrails`: what the rules find, what they flag by mistake, and what they cost.

Every row is judged by classifiers that saw neither it nor its near-duplicates; only rows whose terms allow it are ever trained
on, so that the other sources are strangers throughout.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binomtest

from gearshift.eval import guard_data
from gearshift.eval.bench import Bar, Report, Result, collect
from gearshift.eval.bench_personal import FORMED, bench_personal
from gearshift.eval.disguises import DISGUISES
from gearshift.eval.guard_training import (
    RECIPES,
    Embed,
    Fitted,
    Mask,
    Point,
    Rows,
    counted_rows,
    fit,
    operating_point,
    own_rows,
    rows_of,
    short_enough,
    unseen_scores,
)
from gearshift.eval.tagger_training import States
from gearshift.guardrails.chain import Chain, make_chain
from gearshift.guardrails.credentials import Secrets
from gearshift.guardrails.normalise import normalise
from gearshift.guardrails.patterns import Rule
from gearshift.guardrails.rules import make_rule
from gearshift.guardrails.stream import Window
from gearshift.guardrails.trained import shipped
from gearshift.platform.config import Policy

FALSE_POSITIVES = 0.007
STRANGERS: tuple[tuple[str, ...], ...] = (
    ("deepset",), ("verazuo_inthewild",), ("giskard", "gptfuzz"), ("slabs",), ("yanismiraoui",), ("bipia", "bipia_context"),
    ("notinject", "xstest_safe", "jbb_benign"), ("wildguard_benign",), ("prompts_chat",),
    ("dolly", "selfinstruct_user", "selfinstruct_seed"), ("mt_bench", "vicuna_bench", "arena_hard"),
)  # fmt: skip
"""Sources that are left out together, since they have the same origin or the same kind of text."""
HOSTILE = (
    "a ", "A", "аб", "é", "<a ", "&#1", "%41", "a.b", "\\x41", "01", "[a", "aaab", "1a", "<!--", "](", "gur ", "a@", '="',
    "key ", "token:",     "x://a:", "GB82 ", "1-", "1.", "4111111111111111,", "ab:", "ab=" + "A" * 11 + "\n",
)  # fmt: skip
"""Repeated to a megabyte."""
DISGUISED = 300
"""Attacks, and as many harmless texts, that are put into each disguise."""
PARTS = ("injections", "secrets", "toxicity", "personal", "streams", "hostile")
Progress = Callable[[str, int, int], None]


@dataclass(slots=True)
class Streamed:
    """held: characters that wait after each piece. spent: ms of CPU of each piece. unlike: texts that came out otherwise."""

    held: list[float] = field(default_factory=list)
    spent: list[float] = field(default_factory=list)
    protected: int = 0
    unlike: int = 0


@dataclass(slots=True)
class GuardBench:
    """embed: texts to vectors, [n, width]. states: of `Embedder.words`."""

    folder: Path
    embed: Embed
    states: States
    progress: Progress
    report: Report
    known: dict[str, NDArray[Any]] = field(default_factory=dict)

    def run(self, only: str = "all") -> None:
        """only: one of `PARTS`."""
        for part in PARTS if only == "all" else (only,):
            getattr(self, part)()

    def _vectors(self, texts: Sequence[str]) -> NDArray[Any]:
        new = [text for text in dict.fromkeys(texts) if text not in self.known]
        if new:
            self.known |= zip(new, self.embed(new), strict=True)
        return np.array([self.known[text] for text in texts], dtype=np.float64)

    def injections(self) -> None:
        given = guard_data.injections(self.folder)
        rows, _ = rows_of(given, self._vectors)
        sources, kinds = np.array([row.source for row in given]), np.array([row.kind for row in given])
        allowed = np.isin(sources, list(guard_data.LICENCES))
        own = own_rows("injection", RECIPES["injection"].written, self._vectors)
        flags = self._unseen(rows, own, allowed)
        self._share("injection: recall, sources it was trained on", flags[allowed & rows.labels], 0.72, "min")
        self._share("injection: false positives, sources it was trained on", flags[allowed & ~rows.labels], 0.01, "max")
        self._share("injection: recall, every source", flags[rows.labels])
        self._share("injection: false positives, every source", flags[~rows.labels])
        self._share("injection: NotInject flagged", flags[sources == "notinject"], 0.05, "max")
        self._share("injection: XSTest-safe flagged", flags[sources == "xstest_safe"], 0.01, "max")
        self._share("injection: clean documents flagged", flags[kinds == "benign_document"], 0.03, "max")
        for source in sorted(set(sources)):
            for label, what in ((True, "recall"), (False, "flagged")):
                chosen = (sources == source) & (rows.labels == label)
                if chosen.any():
                    self._share(f"injection: {source}: {what}", flags[chosen])
        self._strangers(rows, own, allowed, sources)
        self._disguises([row.text for row in given], rows, own, allowed)
        self._cost([row.text for row in given])

    def _unseen(self, rows: Rows, own: Rows, allowed: Mask) -> Mask:
        """[n] Whether each row is flagged by classifiers of folds that it is not in."""
        from sklearn.model_selection import GroupKFold

        counts, more = counted_rows(rows.texts), counted_rows(own.texts)
        plain, joint = np.empty(len(rows.texts)), np.empty(len(rows.texts))
        folds = GroupKFold(4).split(rows.labels, groups=rows.groups)
        for done, (train, test) in enumerate(folds):
            self.progress("folds", done, 4)
            fitted = _fitted(counts, rows, train[allowed[train]], more, own)
            plain[test], joint[test] = fitted.scores(counts[test], rows.vectors[test])
        short = short_enough(rows.texts)
        known = plain[allowed], joint[allowed], short[allowed]
        return operating_point(*known, rows.labels[allowed], FALSE_POSITIVES).flags(plain, joint, short)

    def _strangers(self, rows: Rows, own: Rows, allowed: Mask, sources: NDArray[Any]) -> None:
        """Whole sources left out, the threshold chosen on folds of the others."""
        counts, more = counted_rows(rows.texts), counted_rows(own.texts)
        flags: Mask = np.zeros(len(rows.texts), dtype=bool)
        for done, left_out in enumerate(STRANGERS):
            self.progress("sources left out", done, len(STRANGERS))
            test = np.isin(sources, left_out)
            train = np.flatnonzero(~test & allowed)
            scores = _fitted(counts, rows, train, more, own).scores(counts[np.flatnonzero(test)], rows.vectors[test])
            flags[test] = _point_of(rows.of(train), own).flags(*scores, short_enough(rows.texts)[test])
        self._share("injection: recall, source left out", flags[rows.labels], 0.58, "min")
        self._share("injection: false positives, source left out", flags[~rows.labels], 0.025, "max")
        for left_out in STRANGERS:
            for label, what in ((True, "recall"), (False, "flagged")):
                chosen = np.isin(sources, left_out) & (rows.labels == label)
                if chosen.any():
                    self._share(f"injection: {left_out[0]} left out: {what}", flags[chosen])

    def _disguises(self, originals: Sequence[str], rows: Rows, own: Rows, allowed: Mask) -> None:
        """On a fold that the classifier has not seen: attacks and harmless texts in the same disguise."""
        from sklearn.model_selection import GroupKFold

        train, test = next(iter(GroupKFold(4).split(rows.labels, groups=rows.groups)))
        train, test = train[allowed[train]], test[allowed[test]]
        counts, more = counted_rows(rows.texts), counted_rows(own.texts)
        fitted, point = _fitted(counts, rows, train, more, own), _point_of(rows.of(train), own)
        draw = random.Random(0)
        chosen = [
            np.array(draw.sample(test[rows.labels[test] == label].tolist(), DISGUISED)) for label in (True, False)
        ]

        def flagged(texts: Sequence[str]) -> Mask:
            shown = [normalise(text).text for text in texts]
            return point.flags(*fitted.scores(counted_rows(shown), self._vectors(shown)), short_enough(shown))

        plain = [flagged([originals[place] for place in places]).mean() for places in chosen]
        kept, added = {}, {}
        for done, (name, disguise) in enumerate(DISGUISES.items()):
            self.progress("disguises", done, len(DISGUISES))
            found = [flagged([disguise(originals[place], draw) for place in places]).mean() for places in chosen]
            kept[name], added[name] = 100 * found[0] / plain[0], 100 * (found[1] - plain[1])
            self.report.results.append(collect(f"disguise: {name}: recall kept", "%", [kept[name]]))
            self.report.results.append(collect(f"disguise: {name}: false positives added", "points", [added[name]]))
        for name in DISGUISES:
            self.report.bars.append(Bar(f"disguise: {name}: recall kept, %", kept[name], 90, "min"))
            self.report.bars.append(Bar(f"disguise: {name}: false positives added, points", added[name], 3, "max"))

    def _cost(self, texts: Sequence[str]) -> None:
        """CPU of one prompt after another, with the vectors of those that the plain model is in doubt about; on one thread, as
        `embedding.threads` has it, since others only wait for it and burn CPU."""
        import torch

        torch.set_num_threads(1)
        classifier, draw = shipped("injection"), random.Random(0)
        alone: list[float] = []
        whole: list[float] = []
        asked = 0
        for text in draw.sample(list(texts), 400):
            begun = time.process_time()
            shown = normalise(text).text
            doubtful = classifier.doubtful(shown)
            classifier.score(shown)
            alone.append(1000 * (time.process_time() - begun))
            if doubtful:
                self.embed(doubtful)
                asked += 1
            whole.append(1000 * (time.process_time() - begun))
        for name, times in (("in the gateway", alone), ("with the encoder", whole)):
            self.report.results.append(collect(f"injection: CPU of a prompt, {name}", "ms", times))
        self.report.results.append(collect("injection: prompts that need a vector", "%", [100 * asked / len(alone)]))
        for share, most in ((50, 5.0), (99, 25.0)):
            spent = float(np.percentile(whole, share))
            self.report.bars.append(Bar(f"injection: CPU of a prompt, p{share}, ms", spent, most, "max"))

    def secrets(self) -> None:
        rule = Secrets(named=True)
        rows = guard_data.secrets(self.folder)
        found = np.array([bool(rule.find(row.text)) for row in rows])
        labels = np.array([row.label for row in rows])
        harmless = [row for row in guard_data.injections(self.folder) if not row.label]
        self._share("secrets: recall", found[labels], 0.93, "min")
        self._share("secrets: look-alikes flagged", found[~labels])
        flagged = np.array([bool(rule.find(row.text)) for row in harmless])
        self._share("secrets: harmless prompts flagged", flagged, 0.001, "max")

    def toxicity(self) -> None:
        given = [row for row in guard_data.toxic(self.folder) if row.source == "openai_moderation"]
        rows, _ = rows_of(given, self._vectors)
        recipe = RECIPES["toxicity"]
        plain, joint = unseen_scores(rows, None, recipe.fit)
        every = np.ones(len(given), dtype=bool)
        flags = operating_point(plain, joint, every, rows.labels, 0.09, recipe.always_ask).flags(plain, joint, every)
        right = int((flags & rows.labels).sum())
        f1 = 2 * right / (flags.sum() + rows.labels.sum())
        self._share("toxicity: recall, OpenAI's set", flags[rows.labels])
        self._share("toxicity: false positives, OpenAI's set", flags[~rows.labels], 0.10, "max")
        self.report.results.append(collect("toxicity: F1, OpenAI's set", "", [float(f1)]))
        self.report.bars.append(Bar("toxicity: F1, OpenAI's set", float(f1), 0.72, "min"))

    def personal(self) -> None:
        bench_personal(self.folder, self.states, self.report, self.progress)

    def streams(self) -> None:
        """Texts cut at random: does the stream say what the whole text would, and what does it hold back?"""
        personal = [each["text"] for each in guard_data.read(self.folder, "pii")]
        secret = [row.text for row in guard_data.secrets(self.folder)]
        found = self._stream("personal data", personal)
        self.report.bars.append(
            Bar("stream: characters held back, p99", float(np.percentile(found.held, 99)), 64, "max")
        )
        self.report.bars.append(
            Bar("stream: CPU of a piece, p50, ms", float(np.percentile(found.spent, 50)), 1.0, "max")
        )
        self._stream("secrets", secret)

    def _stream(self, name: str, texts: Sequence[str]) -> Streamed:
        rules = [{"rule": rule} for rule in ("secrets", *FORMED)]
        chain, draw = make_chain(Policy.model_validate({"rules": rules}), "output"), random.Random(0)
        made = Streamed()
        for text in texts:
            whole = chain.check(text)
            made.protected += sum(len(finding.spans) for finding in whole.findings)
            made.unlike += _streamed(chain, text, draw, made) != whole.text
        add = self.report.results.append
        add(collect(f"stream: {name}: protected places", "", [float(made.protected)]))
        add(collect(f"stream: {name}: characters held back", "", made.held))
        add(collect(f"stream: {name}: CPU of a piece", "ms", made.spent))
        self.report.bars.append(Bar(f"stream: {name}: texts unlike the whole", made.unlike, 0, "max"))
        return made

    def hostile(self) -> None:
        """A megabyte of what could make a rule or the normalisation slow, and how the cost grows with the length."""
        rules = [make_rule(name, (), "input") for name in ("secrets", *FORMED)]
        worst = 0.0
        for piece in HOSTILE:
            spent = [_seconds(piece * (size // len(piece)), rules) for size in (125_000, 1_000_000)]
            worst = max(worst, spent[1])
            self.report.results.append(collect(f"hostile: {piece[:8]!r}: CPU of 1 MB", "s", spent[1:]))
            self.report.results.append(
                collect(f"hostile: {piece[:8]!r}: 1 MB over an eighth", "", [spent[1] / spent[0]])
            )
        self.report.bars.append(Bar("hostile: CPU of 1 MB, the worst, s", worst, 1.0, "max"))

    def _share(self, name: str, flags: Mask, limit: float | None = None, direction: str = "max") -> None:
        """With its 95 % interval (Wilson)."""
        found = binomtest(int(flags.sum()), len(flags)).proportion_ci(method="wilson")
        values = tuple(100 * share for share in (found.low, float(flags.mean()), found.high))
        self.report.results.append(Result(f"{name} (95 % interval)", "%", values))
        if limit is not None:
            self.report.bars.append(Bar(f"{name}, %", values[1], 100 * limit, "min" if direction == "min" else "max"))


def _fitted(counts: Any, rows: Rows, train: NDArray[Any], more: Any, own: Rows) -> Fitted:
    from scipy import sparse

    both = rows.of(train).joined(own)
    return fit(sparse.vstack([counts[train], more]).tocsr(), both.labels, both.vectors)


def _point_of(rows: Rows, own: Rows) -> Point:
    plain, joint = unseen_scores(rows, own)
    return operating_point(plain, joint, short_enough(rows.texts), rows.labels, FALSE_POSITIVES)


def _streamed(chain: Chain, text: str, draw: random.Random, made: Streamed) -> str:
    window, said, at = Window(chain), "", 0
    while at < len(text):
        piece = text[at : at + draw.randint(1, 12)]
        at += len(piece)
        begun = time.process_time()
        said += window.push(piece).text
        made.spent.append(1000 * (time.process_time() - begun))
        made.held.append(float(window.held))
    return said + window.flush().text


def _seconds(text: str, rules: Sequence[Rule]) -> float:
    """CPU of undoing a disguise, or of the slowest rule on what comes out."""
    begun = time.process_time()
    shown = normalise(text).text
    spent = [time.process_time() - begun]
    for rule in rules:
        begun = time.process_time()
        rule.find(shown)
        spent.append(time.process_time() - begun)
    return max(spent)
