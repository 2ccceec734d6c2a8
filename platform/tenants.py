"""Who is asking, and what they may ask for."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Mapping
from dataclasses import dataclass

from gearshift.platform.config import Limits, Tenant
from gearshift.platform.errors import InvalidApiKey, PermissionDenied

PREFIX = "gs-"


@dataclass(frozen=True, slots=True)
class Caller:
    """A known tenant, with what the request path needs of it."""

    tenant: str
    models: frozenset[str]
    limits: Limits

    def may_ask(self, model: str) -> bool:
        return "*" in self.models or model in self.models

    def require(self, model: str) -> None:
        if not self.may_ask(model):
            allowed = ", ".join(sorted(self.models))
            raise PermissionDenied(
                f"Tenant {self.tenant!r} may not use {model!r}; it may use: {allowed}.", param="model"
            )


def new_key() -> str:
    """256 random bits: long enough that a plain SHA-256 of it is a safe thing to store."""
    return PREFIX + secrets.token_urlsafe(32)


def hash_key(key: str) -> str:
    return "sha256:" + hashlib.sha256(key.encode()).hexdigest()


def require_token(token: str | None, authorization: str) -> None:
    """For routes behind one token. None asks for none; raises `InvalidApiKey`."""
    if token is not None and not hmac.compare_digest(authorization.encode(), f"Bearer {token}".encode()):
        raise InvalidApiKey("The token of this route is missing or wrong; send it as `Authorization: Bearer TOKEN`.")


class Tenants:
    """Knows the hashes of all keys. A key is found by the beginning of its hash and compared in constant time."""

    INDEX_CHARS = len("sha256:") + 8

    def __init__(self, tenants: Mapping[str, Tenant]) -> None:
        self._by_index: dict[str, list[tuple[str, Caller]]] = {}
        self._open: Caller | None = None
        for name, tenant in tenants.items():
            caller = Caller(name, frozenset(tenant.models), tenant.limits)
            if tenant.open:
                self._open = caller
            for digest in tenant.keys:
                self._by_index.setdefault(digest[: self.INDEX_CHARS], []).append((digest, caller))

    def identify(self, authorization: str) -> Caller:
        """`authorization` is the header's value, or empty. Raises `InvalidApiKey`, which never repeats the key."""
        scheme, _, key = authorization.partition(" ")
        if scheme.lower() == "bearer" and key.strip():
            digest = hash_key(key.strip())
            for known, caller in self._by_index.get(digest[: self.INDEX_CHARS], ()):
                if hmac.compare_digest(known, digest):
                    return caller
        if self._open is not None:
            return self._open
        if not key:
            raise InvalidApiKey("No API key was given; send it as `Authorization: Bearer KEY`.")
        raise InvalidApiKey("The API key is not known.")
