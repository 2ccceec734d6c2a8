"""Trains the classifiers of the guardrails: n-grams alone, n-grams beside a sentence vector, and when to ask for the vector.

Everything that is chosen (the operating point, the band of doubt) is chosen on scores of texts that the model which scored
them had not seen, near-duplicates kept on one side. What is shipped is then fitted on all rows.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from ruamel.yaml import YAML

from gearshift.eval import guard_data
from gearshift.eval.guard_data import Row
from gearshift.guardrails.artefact import Card
from gearshift.guardrails.classifier import MAX_ASKED_CHARS, NOTHING, Classifier, Model
from gearshift.guardrails.ngrams import PLACES, SHORT, counted
from gearshift.guardrails.normalise import characters, normalise
from gearshift.guardrails.view import View
from gearshift.platform.errors import ConfigError

Numbers = NDArray[np.float64]
Mask = NDArray[np.bool_]
Embed = Callable[[Sequence[str]], NDArray[Any]]
"""[n] texts to [n, width] vectors."""
FOLDS = 4
STRENGTH = 6.0
"""Inverse of the L2 penalty."""
BESIDE = 2.0
"""Length of a sentence vector beside n-grams of length one."""
SURE = 0.001
"""Share of harmless texts above the band of doubt: the plain model alone flags no more of them."""
ASKED = 0.35
"""Share of harmless texts above its lower end: whose vectors are asked for."""
GAMMA = 2.0
"""Of the radial kernel, chosen among 1, 2 and 4 on folds of OpenAI's moderation set (F1 0.74, 0.75, 0.73)."""
FOREIGN = ("yanismiraoui",)
"""Sources of attacks in many languages."""
_LETTERS = re.compile("[a-z]+")
_SLOT = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True, slots=True)
class Rows:
    """texts: normalised. labels: [n], True where the rule is to speak up. vectors: [n, width]. groups: [n], equal for
    near-duplicates."""

    texts: Sequence[str]
    labels: Mask
    vectors: Numbers
    groups: NDArray[np.int64]

    def of(self, places: NDArray[Any]) -> Rows:
        texts = [self.texts[place] for place in np.arange(len(self.texts))[places]]
        return Rows(texts, self.labels[places], self.vectors[places], self.groups[places])

    def joined(self, other: Rows) -> Rows:
        """With rows that share no group with these."""
        shift = int(self.groups.max(initial=0)) + 1
        return Rows(
            [*self.texts, *other.texts],
            np.concatenate([self.labels, other.labels]),
            np.concatenate([self.vectors, other.vectors]),
            np.concatenate([self.groups, other.groups + shift]),
        )


def written(name: str, count: int, seed: int = 0) -> list[tuple[str, bool, int]]:
    """About `count` examples made of the patterns in `guard/<name>.yaml`, each once: text, label, and the number of its
    pattern."""
    spec = YAML(typ="safe").load((files("gearshift.eval") / "guard" / f"{name}.yaml").read_text())
    slots, draw = spec["slots"] | spec["more_slots"], random.Random(seed)
    found: dict[str, tuple[bool, int]] = {}
    patterns = [(pattern, label) for label, key in ((True, "attacks"), (False, "benign")) for pattern in spec[key]]
    for number, (pattern, label) in enumerate(patterns):
        for _ in range(count // (2 * sum(each[1] == label for each in patterns))):
            text = _SLOT.sub(lambda slot: str(draw.choice(slots[slot[1]])), pattern).strip()
            text = text[0].upper() + text[1:] if draw.random() < 0.7 else text
            found[text.upper() if draw.random() < 0.1 else text] = (label, number)
    return [(text, label, number) for text, (label, number) in sorted(found.items())]


@dataclass(frozen=True, slots=True)
class Fitted:
    """Two linear models that are not yet told where to say yes."""

    idf: NDArray[np.float32]
    plain: Model
    joint: Model

    def scores(self, counts: Any, vectors: Numbers) -> tuple[Numbers, Numbers]:
        """[n] log-odds of the plain and of the joint model. counts: as of `counted_rows`."""
        grams = _weighted(counts, self.idf)
        plain = grams @ self.plain.weights + self.plain.bias
        of_vectors = np.array([self.joint.of_vector(vector) for vector in vectors])
        return plain, grams @ self.joint.weights + self.joint.bias + of_vectors


def counted_rows(texts: Sequence[str]) -> Any:
    """A sparse matrix [n, PLACES] of what `ngrams.counted` counts in the beginning of each text."""
    from scipy import sparse

    found = [counted(text) for text in texts]
    ends = np.cumsum([0, *(len(places) for places, _ in found)])
    places, values = (np.concatenate([each[part] for each in found]) for part in (0, 1))
    return sparse.csr_matrix((values, places.astype(np.int32), ends), shape=(len(texts), PLACES))


def _weighted(counts: Any, idf: NDArray[np.float32]) -> Any:
    from scipy import sparse

    weighted = counts.multiply(idf[np.newaxis]).tocsr()
    lengths = np.sqrt(np.asarray(weighted.multiply(weighted).sum(axis=1)).ravel() + SHORT**2)
    return sparse.diags(1 / lengths).astype(np.float32) @ weighted


def fit(counts: Any, labels: Mask, vectors: Numbers, strength: float = STRENGTH) -> Fitted:
    from scipy import sparse

    frequency = np.bincount(counts.indices, minlength=PLACES)
    idf = np.where(frequency > 1, np.log((1 + len(labels)) / (1 + frequency)) + 1, 0).astype(np.float32)
    grams = _weighted(counts, idf)
    weights, bias = _linear(grams, labels, strength)
    plain = Model(weights, bias)
    weights, bias = _linear(sparse.hstack([grams, sparse.csr_matrix(BESIDE * vectors)]).tocsr(), labels, strength)
    return Fitted(idf, plain, Model(weights[:PLACES], bias, BESIDE * weights[PLACES:]))


def fit_near(counts: Any, labels: Mask, vectors: Numbers) -> Fitted:
    """As `fit`, with a support vector machine over the vectors in the place of the joint model: for few rows, told apart
    by meaning."""
    from sklearn.svm import SVC

    fitted = fit(counts, labels, vectors, 1.0)
    machine = SVC(C=3, gamma=GAMMA, class_weight="balanced").fit(vectors, labels)
    near, pulls = machine.support_vectors_, machine.dual_coef_[0]
    return replace(fitted, joint=Model(np.zeros(PLACES), float(machine.intercept_[0]), NOTHING, near, pulls, GAMMA))


def _linear(inputs: Any, labels: Mask, strength: float) -> tuple[Numbers, float]:
    from sklearn.linear_model import LogisticRegression

    model = LogisticRegression(C=strength, solver="liblinear", tol=1e-3, max_iter=300, random_state=0)
    model.fit(inputs, labels)
    return model.coef_[0], float(model.intercept_[0])


@dataclass(frozen=True, slots=True)
class Point:
    """Where a classifier says yes. Log-odds of the plain model (`low`, `high`: the band of doubt; `alone`: without vectors) and
    of the joint one. short: [n], texts of which a vector may be asked at all."""

    low: float
    high: float
    alone: float
    beside: float

    def flags(self, plain: Numbers, joint: Numbers, short: Mask) -> Mask:
        asked = short & (plain > self.low) & (plain < self.high)
        return np.asarray(np.where(asked, joint > self.beside, plain > np.where(short, self.high, self.alone)))


def operating_point(
    plain: Numbers, joint: Numbers, short: Mask, labels: Mask, false_positives: float, always_ask: bool = False
) -> Point:
    """Of unseen scores: flags that share of the harmless texts, with vectors as without. always_ask: there is no band, the plain
    model is only for where no encoder runs."""
    harmless, beside, short = plain[~labels], joint[~labels], short[~labels]
    alone = float(np.quantile(harmless, 1 - false_positives))
    if always_ask:
        return Point(-np.inf, np.inf, alone, float(np.quantile(beside, 1 - false_positives)))
    high, low = np.quantile(harmless[short], [1 - min(SURE, false_positives / 2), 1 - ASKED])
    doubtful = short & (harmless > low) & (harmless < high)
    left = false_positives * len(harmless) - (harmless[short] >= high).sum() - (harmless[~short] > alone).sum()
    share = 1 - max(0.0, left) / max(1, doubtful.sum())
    return Point(float(low), float(high), alone, float(np.quantile(beside[doubtful], share)))


def short_enough(texts: Sequence[str]) -> Mask:
    return np.array([len(text) <= MAX_ASKED_CHARS for text in texts])


Fit = Callable[[Any, Mask, Numbers], Fitted]


def unseen_scores(rows: Rows, always: Rows | None = None, fit: Fit = fit) -> tuple[Numbers, Numbers]:
    """[n] of the plain and of the joint model, each row scored by models that saw neither it nor its near-duplicates. always:
    rows that every model sees."""
    from sklearn.model_selection import GroupKFold

    counts = counted_rows(rows.texts)
    more = counted_rows(always.texts) if always else None
    plain, joint = np.empty(len(rows.texts)), np.empty(len(rows.texts))
    for train, test in GroupKFold(FOLDS, shuffle=True, random_state=0).split(rows.labels, groups=rows.groups):
        fitted = fit(*_stacked(counts[train], rows.of(train), more, always))
        plain[test], joint[test] = fitted.scores(counts[test], rows.vectors[test])
    return plain, joint


def _stacked(counts: Any, rows: Rows, more: Any, always: Rows | None) -> tuple[Any, Mask, Numbers]:
    from scipy import sparse

    if always is None:
        return counts, rows.labels, rows.vectors
    both = rows.joined(always)
    return sparse.vstack([counts, more]).tocsr(), both.labels, both.vectors


def classifier(fitted: Fitted, point: Point, card: Card) -> Classifier:
    """With scores of 0 at the operating point."""
    plain = replace(fitted.plain, bias=fitted.plain.bias - point.alone)
    joint = replace(fitted.joint, bias=fitted.joint.bias - point.beside)
    return Classifier(card, fitted.idf, plain, joint, (point.low - point.alone, point.high - point.alone))


@dataclass(frozen=True, slots=True)
class Recipe:
    """What a classifier is made of. written: how many examples of our own are added."""

    read: Callable[[Path], list[Row]]
    fit: Fit
    written: int
    always_ask: bool


RECIPES = {
    "injection": Recipe(guard_data.injections, fit, 6000, always_ask=False),
    "toxicity": Recipe(guard_data.toxic, fit_near, 0, always_ask=True),
}


def train(
    name: str, folder: Path, embed: Embed, encoder: str, false_positives: float, also: Sequence[str] = ()
) -> Classifier:
    """name: of `RECIPES`. also: sources whose terms the caller knows. Raises `ConfigError` when nothing may be trained on."""
    recipe = RECIPES[name]
    allowed = {**guard_data.LICENCES, **dict(zip(also, also, strict=True))}
    chosen = [row for row in recipe.read(folder) if row.source in allowed]
    if {row.label for row in chosen} != {False, True}:
        raise ConfigError(
            f"{folder}: of the sources that may be trained on there are {len(chosen)} rows, and not of "
            "both kinds; name others with --also"
        )
    rows, sources = rows_of(chosen, embed)
    always = own_rows(name, recipe.written, embed) if recipe.written else None
    plain, joint = unseen_scores(rows, always, recipe.fit)
    short = short_enough(rows.texts) | recipe.always_ask
    point = operating_point(plain, joint, short, rows.labels, false_positives, recipe.always_ask)
    flags = point.flags(plain, joint, short)
    everything = rows.joined(always) if always else rows
    fitted = recipe.fit(counted_rows(everything.texts), everything.labels, everything.vectors)
    digest = hashlib.sha256(json.dumps([everything.texts, everything.labels.tolist()]).encode()).hexdigest()
    card = Card(
        name=name,
        rows=len(everything.texts),
        sources=tuple(allowed[source] for source in sources),
        data=f"sha256:{digest}",
        encoder=encoder,
        false_positives=round(float(flags[~rows.labels].mean()), 4),
        recall=round(float(flags[rows.labels].mean()), 4),
    )
    return classifier(fitted, point, card)


def vocabulary(rows: Sequence[Row], own: Sequence[str]) -> list[str]:
    """Words by which a disguise is known to be undone: of several harmless texts, of many attacks (a few are written in code),
    of attacks in other languages, and of our own examples."""
    harmless: Counter[str] = Counter()
    attacks: Counter[str] = Counter()
    foreign: Counter[str] = Counter()
    for row in rows:
        counts = foreign if row.source in FOREIGN else attacks if row.label else harmless
        counts.update(set(_LETTERS.findall(characters(View.of(row.text)).text.lower())))
    for text in own:
        harmless.update(set(_LETTERS.findall(characters(View.of(text)).text.lower())))
    seen = set(harmless) | set(attacks) | set(foreign)
    long = {word for word in seen if harmless[word] >= 3 or attacks[word] >= 10 or foreign[word] >= 2}
    return sorted(word for word in long if len(word) > 2 or word in "ai" or (len(word) == 2 and harmless[word] >= 60))


def rows_of(rows: Sequence[Row], embed: Embed) -> tuple[Rows, list[str]]:
    """Normalised, with the names of their sources."""
    texts = [normalise(row.text).text for row in rows]
    labels, groups = np.array([row.label for row in rows]), np.array([row.group for row in rows])
    return Rows(texts, labels, embed(texts), groups), sorted({row.source for row in rows})


def own_rows(name: str, count: int, embed: Embed) -> Rows:
    made = written(name, count)
    texts = [normalise(text).text for text, _, _ in made]
    labels, groups = np.array([label for _, label, _ in made]), np.array([number for _, _, number in made])
    return Rows(texts, labels, embed(texts), groups)
