from __future__ import annotations

import asyncio
import time
from typing import Any

import httpx
import pytest

from gearshift.deployments import registry
from gearshift.deployments.admin import create_admin_app
from gearshift.deployments.control import SnapshotBoard, SnapshotHolder
from gearshift.deployments.scales import Scales
from gearshift.platform import config_file
from gearshift.platform.cache.store import Store
from gearshift.platform.errors import Conflict, InvalidRequest, NotFound
from gearshift.router.arms import PARTS, Segment, Snapshot, Trial, contents_of

pytestmark = pytest.mark.anyio

TEXT = """
models: {m: {echo: {}}}
prompts: {none: {}}
policies: {none: {}}
releases: {a: {model: m, prompt: none, policy: none}, b: {model: m, prompt: none, policy: none}}
experiments: {x: {arms: {a: 1, b: 0}}}
tiers: {cheap: {experiment: x}}
tenants: {dev: {open: true}}
admin: {token_env: TOKEN}
"""
CONFIG = config_file.parse(TEXT)
TRIAL = Trial((Segment(PARTS, "b"),), period=7, contents=contents_of(CONFIG, "x"))


async def until(condition: Any) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.002)


async def test_every_gateway_takes_over_new_weights_and_a_late_one_reads_them(store: Store) -> None:
    board = SnapshotBoard(store, CONFIG)
    holders = [SnapshotHolder(Snapshot.of(CONFIG)) for _ in range(3)]
    tasks = [asyncio.create_task(board.follow(holder)) for holder in holders[:2]]
    await asyncio.sleep(0.1)
    new = await board.set_weights("x", {"b": 1})
    assert new.epoch == 1
    await until(lambda: all(holder.current.trials["x"].weights == {"b": 1.0} for holder in holders[:2]))
    tasks.append(asyncio.create_task(board.follow(holders[2])))
    await until(lambda: holders[2].current.epoch == 1)
    for task in tasks:
        task.cancel()


async def test_weights_that_redis_has_lost_are_given_back_and_can_be_moved_again(store: Store) -> None:
    board, holder = (
        SnapshotBoard(store, CONFIG),
        SnapshotHolder(Snapshot(7, {"x": TRIAL})),
    )
    task = asyncio.create_task(board.follow(holder))
    async with asyncio.timeout(10):
        while (await board.read()).epoch != 7:
            await asyncio.sleep(0.01)
    assert (await board.read()).trials["x"].weights == {"b": 1.0}
    await board.set_weights("x", {"a": 1})
    await until(lambda: holder.current.trials["x"].weights == {"a": 1.0})
    task.cancel()


async def test_two_operators_can_t_overwrite_each_other(store: Store) -> None:
    board = SnapshotBoard(store, CONFIG)
    results = await asyncio.gather(
        *(board.set_weights("x", {"a": n, "b": 1}) for n in range(8)), return_exceptions=True
    )
    done = [result for result in results if isinstance(result, Snapshot)]
    assert len(done) + sum(isinstance(result, Conflict) for result in results) == 8
    assert sorted(snapshot.epoch for snapshot in done) == list(range(1, len(done) + 1))
    assert (await board.read()).epoch == len(done)


async def test_an_older_snapshot_is_not_taken() -> None:
    holder = SnapshotHolder(Snapshot(5, {}))
    holder.take(Snapshot(4, {}))
    assert holder.current.epoch == 5


async def test_wrong_weights_change_nothing(store: Store) -> None:
    board = SnapshotBoard(store, CONFIG)
    with pytest.raises(NotFound, match="there are: x"):
        await board.set_weights("y", {"a": 1})
    for weights in ({"c": 1.0}, {"a": -1.0, "b": 2.0}, {"a": 0.0}, {}):
        with pytest.raises(InvalidRequest):
            await board.set_weights("x", weights)
    assert (await board.read()) == Snapshot.of(CONFIG)


async def test_arms_that_are_no_longer_in_the_config_are_forgotten(store: Store) -> None:
    await SnapshotBoard(store, CONFIG).set_weights("x", {"b": 1})
    renamed = config_file.parse(TEXT.replace("arms: {a: 1, b: 0}", "arms: {a: 3}"))
    assert (await SnapshotBoard(store, renamed).read()).trials["x"].weights == {"a": 1.0}


async def test_who_is_up_is_known_until_it_leaves_or_falls_silent(store: Store) -> None:
    task = asyncio.create_task(registry.beat(store, lambda: registry.Member(name="e1", model="m", address="/x.sock")))
    dead = registry.Member(name="e0", model="m", address="/y.sock", seen_at=time.time() - 60)
    import msgspec

    await store.hash_set(store.key("members"), "e0", msgspec.msgpack.encode(dead))
    async with asyncio.timeout(10):
        while [member.name for member in await registry.members(store)] != ["e1"]:
            await asyncio.sleep(0.01)
    task.cancel()
    await registry.leave(store, "e1")
    assert await registry.members(store) == []


async def test_whoever_steers_next_goes_on_with_as_many_replicas(store: Store) -> None:
    text = TEXT.replace("{echo: {}}", "{echo: {}, autoscaling: {min_replicas: 0, max_replicas: 4}}")
    config, next_one = config_file.parse(text), Scales()
    [key] = next_one.wanted(config)
    for replicas in (3, 0):
        await registry.tell_scale(store, key, registry.Scaled(replicas, "a test", time.time()))
        next_one.numbers = await registry.scaled(store)
        assert next_one.wanted(config) == {key: replicas}
    await registry.forget_scales(store)
    assert await registry.scaled(store) == {}


async def test_admin_routes_need_the_token_and_say_what_is_wrong(store: Store) -> None:
    app = create_admin_app(lambda: CONFIG, store, {"TOKEN": "sesame"})
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://admin") as client:
        assert (await client.get("/admin/status")).status_code == 401
        client.headers["authorization"] = "Bearer sesame"
        status = (await client.get("/admin/status")).json()
        assert status["tiers"] == {
            "cheap": {"experiment": "x", "arms": {"a": 1.0, "b": 0.0}, "status": "running", "why": ""}
        }
        moved = await client.put("/admin/experiments/x", json={"arms": {"b": 2}, "why": "b is better"})
        found = {"arms": {"a": 0.0, "b": 1.0}, "status": "running", "stage": -1, "why": "b is better"}
        assert moved.json() == {"epoch": 1, "experiments": {"x": found}}
        assert (await client.get("/admin/experiments")).json() == moved.json()
        wrong = await client.put("/admin/experiments/x", json={"arms": {"z": 2}})
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "arms")


async def test_an_arm_that_changed_begins_anew_and_one_that_fell_stays_down(store: Store) -> None:
    text = TEXT.replace("arms: {a: 1, b: 0}", "arms: {a: 1, b: 1}")
    other = text.replace("b: {model: m, prompt: none,", "b: {model: m, prompt: none, sampling: {top_p: 0.5},")
    bad, better = config_file.parse(text), config_file.parse(other)
    await SnapshotBoard(store, bad).open()
    await SnapshotBoard(store, bad).abort("x", "me", "rude")
    changed = await SnapshotBoard(store, better).open()
    assert (changed.trials["x"].weights, changed.trials["x"].status) == ({"a": 0.5, "b": 0.5}, "running")
    assert changed.trials["x"].period == changed.epoch
    back = await SnapshotBoard(store, bad).open()
    assert (back.trials["x"].weights, back.trials["x"].status) == ({"a": 1.0}, "rolled back")
    assert back.trials["x"].why == "b fell before: rude"
    by_hand = await SnapshotBoard(store, bad).set_weights("x", {"a": 1, "b": 1})
    assert by_hand.trials["x"].weights == {"a": 0.5, "b": 0.5}
    await SnapshotBoard(store, better).open()
    assert (await SnapshotBoard(store, bad).open()).trials["x"].status == "running"
