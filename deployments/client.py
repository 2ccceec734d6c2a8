"""What the command line says to a running deployment, over the same HTTP APIs as everybody else."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from typing import Any

import httpx

from gearshift.platform.errors import GearshiftError

TIMEOUT = httpx.Timeout(300.0, connect=5.0)
FACTS = ("tier", "release", "route-reason", "cache", "overhead-ms")


class RequestFailed(GearshiftError):
    """The deployment answered with an error, or not at all. Seen at the command line only."""

    code = "request_failed"


class Chat:
    """A conversation. Remembers what was said, and the facts of the last answer's headers."""

    def __init__(self, url: str, key: str | None, model: str, max_tokens: int | None) -> None:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        self._client = httpx.Client(base_url=url, headers=headers, timeout=TIMEOUT)
        self._fields: dict[str, Any] = {"model": model} | ({"max_completion_tokens": max_tokens} if max_tokens else {})
        self._messages: list[dict[str, str]] = []
        self._facts: dict[str, str] = {}

    def whole(self, question: str) -> tuple[str, dict[str, str]]:
        body = self._ask(question)
        response = checked(lambda: self._client.post("/v1/chat/completions", json=body))
        self._note(response)
        answer = str(response.json()["choices"][0]["message"]["content"])
        self._messages.append({"role": "assistant", "content": answer})
        return answer, self._facts

    def pieces(self, question: str) -> Iterator[str]:
        body = self._ask(question) | {"stream": True}
        answer = ""
        try:
            with self._client.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.status_code != 200:
                    response.read()
                _raise_for(response)
                self._note(response)
                for line in response.iter_lines():
                    if not line.startswith("data: {"):
                        continue
                    chunk = json.loads(line.removeprefix("data: "))
                    if "error" in chunk:
                        raise RequestFailed(chunk["error"]["message"])
                    for choice in chunk["choices"]:
                        piece = choice["delta"].get("content") or ""
                        answer += piece
                        yield piece
        except httpx.HTTPError as error:
            raise _unreachable(self._client.base_url, error) from error
        self._messages.append({"role": "assistant", "content": answer})

    def facts_line(self) -> str:
        return "  ".join(f"{name}: {value}" for name, value in self._facts.items())

    def _ask(self, question: str) -> dict[str, Any]:
        self._messages.append({"role": "user", "content": question})
        return {**self._fields, "messages": self._messages}

    def _note(self, response: httpx.Response) -> None:
        found = {name: response.headers.get(f"x-gearshift-{name}") for name in FACTS}
        self._facts = {name: value for name, value in found.items() if value}


def admin(url: str, method: str, path: str, body: Any = None, more: Mapping[str, str] | None = None) -> Any:
    """One call of the admin API; the token is read from GEARSHIFT_ADMIN_TOKEN."""
    token = os.environ.get("GEARSHIFT_ADMIN_TOKEN")
    headers = {"authorization": f"Bearer {token}"} if token else {}
    with httpx.Client(base_url=url, headers=headers | dict(more or {}), timeout=10.0) as session:
        return checked(lambda: session.request(method, path, json=body)).json()


def checked(send: Any) -> httpx.Response:
    """Raises `RequestFailed` for anything but an answer."""
    try:
        response: httpx.Response = send()
    except httpx.HTTPError as error:
        raise _unreachable(error.request.url, error) from error
    _raise_for(response)
    return response


def _raise_for(response: httpx.Response) -> None:
    if response.status_code == 200:
        return
    try:
        message = response.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = response.text[:200]
    raise RequestFailed(f"{response.status_code}: {message}")


def _unreachable(url: object, error: Exception) -> RequestFailed:
    return RequestFailed(f"{url} does not answer ({type(error).__name__}). Is `gearshift serve` running?")
