from __future__ import annotations

import pytest

from gearshift.platform.config import Tenant
from gearshift.platform.errors import InvalidApiKey, PermissionDenied
from gearshift.platform.tenants import Tenants, hash_key, new_key

KEY, OTHER = new_key(), new_key()


def test_a_key_belongs_to_its_tenant_and_no_other() -> None:
    tenants = Tenants({"a": Tenant(keys=[hash_key(KEY)]), "b": Tenant(keys=[hash_key(OTHER)])})
    assert tenants.identify(f"Bearer {KEY}").tenant == "a"
    assert tenants.identify(f"bearer {OTHER}").tenant == "b"


@pytest.mark.parametrize("header", ["", "Bearer", "Bearer wrong", f"Basic {KEY}", f"Bearer {KEY}x", hash_key(KEY)])
def test_anything_else_is_refused_without_being_repeated(header: str) -> None:
    with pytest.raises(InvalidApiKey) as caught:
        Tenants({"a": Tenant(keys=[hash_key(KEY)])}).identify(header)
    assert KEY not in caught.value.message


def test_without_a_known_key_the_open_tenant_answers() -> None:
    tenants = Tenants({"a": Tenant(keys=[hash_key(KEY)]), "dev": Tenant(open=True)})
    assert tenants.identify("").tenant == "dev"
    assert tenants.identify(f"Bearer {KEY}").tenant == "a"


def test_a_tenant_asks_only_for_its_models() -> None:
    caller = Tenants({"a": Tenant(open=True, models=["cheap"])}).identify("")
    caller.require("cheap")
    with pytest.raises(PermissionDenied, match="it may use: cheap"):
        caller.require("expensive")
