"""Rules that a classifier stands behind: they judge a whole text, by its normalised view."""

from __future__ import annotations

from functools import lru_cache
from importlib.resources import as_file, files
from pathlib import Path

from gearshift.guardrails.classifier import Classifier, load
from gearshift.guardrails.subject import Subject
from gearshift.platform.config import Rule as RuleConfig
from gearshift.platform.errors import ConfigError


class Trained:
    def __init__(self, name: str, classifier: Classifier, threshold: float) -> None:
        self.name = name
        self.threshold = threshold
        self.classifier = classifier

    def doubtful(self, subject: Subject) -> list[str]:
        """Texts whose vectors the score will need; none of a text that can't be read, which the score will say."""
        try:
            return self.classifier.doubtful(subject.view.text)
        except Exception:
            return []

    def score(self, subject: Subject) -> float | None:
        """0 to 1; None where the vector that the decision needs did not come in time."""
        vectors = subject.vectors
        return self.classifier.score(subject.view.text, vectors.get if vectors is not None else None)


def make_trained(rule: RuleConfig, encoder: str) -> Trained:
    """encoder: whose vectors there will be; empty where there are none. Raises `ConfigError`."""
    classifier = shipped(rule.rule) if rule.classifier is None else load(Path(rule.classifier))
    if classifier.card.name != rule.rule:
        raise ConfigError(f"{rule.classifier} was trained for {classifier.card.name}, not for {rule.rule}")
    if encoder and encoder != classifier.card.encoder:
        raise ConfigError(
            f"the classifier of {rule.rule} knows vectors of {classifier.card.encoder}, and embedding.source is {encoder}; train "
            f"it for that with `gearshift guardrails train {rule.rule} --encoder {encoder}`"
        )
    return Trained(rule.rule, classifier, rule.threshold)


@lru_cache(2)
def shipped(name: str) -> Classifier:
    with as_file(files("gearshift.guardrails") / f"{name}.safetensors") as path:
        return load(path)
