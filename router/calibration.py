"""The calibration as a file: thresholds, what they promise, and on what data. A person reviews it; the config pins it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from gearshift.platform.errors import ConfigError

HEADER = "# Made by `gearshift router calibrate`. Review it, then pin it as router.calibration.\n"
QUANTILES = 20
"""Parts of equal size that the scores of the calibration rows are kept as, for watching drift."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Interval(_Strict):
    """A measured share or ratio with its 95 % confidence interval."""

    value: float
    low: float
    high: float


class Target(_Strict):
    """What was asked for: exactly one."""

    expensive_share: float | None = None
    dollars_per_1000: float | None = None
    quality: float | None = None
    """Of the expensive tier's, with probability 0.95."""
    bound: bool = True
    """False: the quality by estimate alone."""


class Data(_Strict):
    rows: int
    hash: str
    source: str = ""


class CascadeThreshold(_Strict):
    threshold: float
    judge: str = ""
    """SHA-256 of the judge's file; empty for the model's own certainty."""


class Calibration(_Strict):
    scorer: str
    """SHA-256 of the artefact, or the name of a scorer that needs none."""
    target: Target
    threshold: float
    cascade: CascadeThreshold | None = None
    expensive_share: float
    escalated_share: float = 0.0
    """Of all queries: asked the cheap tier first, and the expensive one then."""
    saving: Interval
    """Of the expensive tier's compute, cheap attempts counted."""
    quality: Interval
    """Of the routed answers over always-expensive."""
    quality_bound: float
    """At least this with probability 0.95."""
    data: Data
    scores: list[float]
    """Quantiles of the scores on these rows, from the least to the greatest."""

    @classmethod
    def read(cls, path: Path) -> Self:
        """Raises `ConfigError`."""
        try:
            raw: Any = YAML(typ="safe").load(path.read_text())
            return cls.model_validate(raw)
        except OSError as error:
            raise ConfigError(f"router.calibration: {path}: {error.strerror}") from error
        except (YAMLError, UnicodeDecodeError) as error:
            raise ConfigError(f"router.calibration: {path} is not YAML") from error
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(map(str, first["loc"])) or "file"
            raise ConfigError(f"router.calibration: {path}: {where}: {first['msg']}; make it anew") from error

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w") as out:
            out.write(HEADER)
            YAML().dump(self.model_dump(mode="json", exclude_none=True), out)
