from __future__ import annotations

import pickle

import pytest
from ray.exceptions import RayTaskError

from gearshift.deployments.wire import Failed
from gearshift.platform import errors
from gearshift.platform.errors import GearshiftError, InternalError, RateLimited, all_errors, public

STATUSES = {400, 401, 403, 404, 405, 409, 413, 429, 500, 502, 503, 504}
TABLE = sorted(all_errors().items())


@pytest.mark.parametrize(("name", "kind"), TABLE)
def test_every_error_has_a_place_in_the_table(name: str, kind: type[GearshiftError]) -> None:
    assert kind.status in STATUSES
    assert kind.type
    assert kind.code
    body = kind("text", "field").body()["error"]
    assert set(body) == {"message", "type", "param", "code"}
    assert isinstance(body["code"], str)


def test_every_error_of_the_module_is_in_the_table() -> None:
    defined = {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)}
    assert defined <= set(all_errors())


def test_a_client_is_not_told_to_repeat_what_can_t_succeed() -> None:
    assert {name for name, kind in TABLE if kind.retryable} == {
        "RateLimited",
        "GuardrailAway",
        "Overloaded",
        "UpstreamError",
        "EngineUnavailable",
        "LimitsUnavailable",
        "ShuttingDown",
        "StoreUnavailable",
    }


@pytest.mark.parametrize(("name", "kind"), TABLE)
def test_errors_survive_pickling_and_the_wire(name: str, kind: type[GearshiftError]) -> None:
    error = kind("text", "field", 2.5)
    for copy in (pickle.loads(pickle.dumps(error)), Failed.of("id", error).exception()):
        assert type(copy) is kind
        assert (copy.message, copy.param, copy.retry_after_s) == ("text", "field", 2.5)


def test_an_error_raised_in_another_ray_actor_is_unwrapped() -> None:
    remote = "\x1b[36mray::Engine()\x1b[39m Traceback (most recent call last): ..."
    for cause, shown in ((RateLimited("slow down"), RateLimited), (KeyError("secret"), InternalError)):
        wrapped = RayTaskError("generate", remote, cause)
        for error in (
            wrapped,
            wrapped.as_instanceof_cause(),
            pickle.loads(pickle.dumps(wrapped)).as_instanceof_cause(),
        ):
            assert type(public(error)) is shown
            assert "Traceback" not in str(public(error).body())
            assert "secret" not in str(public(error).body())


def test_internal_text_never_reaches_a_client() -> None:
    shown = public(RuntimeError("password=hunter2 at /srv/secret.py"))
    assert type(shown) is InternalError
    assert "hunter2" not in str(shown.body())
    assert "secret" not in Failed.of("id", KeyError("secret")).message
