"""Scheduler and block pool under random worlds: no model is needed, so thousands of steps take a second."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gearshift.platform.engine.blocks import BlockPool
from gearshift.platform.engine.fairness import FairQueue, bound
from gearshift.platform.engine.pacing import CostModel, Load, Pacer
from gearshift.platform.engine.scheduler import Scheduler
from gearshift.platform.engine.sequence import Sampled, Sequence, Step
from gearshift.platform.request import SamplingParams, ServiceClass

END = 0


def sequence(name: str, prompt: int | list[int], answer: int, **fields: Any) -> Sequence:
    ids = [1] * prompt if isinstance(prompt, int) else prompt
    return Sequence(name, ids, SamplingParams(), max_tokens=answer, stop_ids=frozenset({END}), **fields)


class Memory:
    """Stands for the runner: remembers what text each slot was computed for, and looks whether a sequence finds its own
    whole history where its blocks say it is."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.slots: dict[int, int] = {}

    def run(self, step: Step, token: int = 1) -> list[int]:
        for each, start, end in step:
            ids = each.tokens(0, end)
            state = hash(each.salt)
            for position in range(end):
                state = hash((state, ids[position]))
                slot = each.blocks[position // self.block_size] * self.block_size + position % self.block_size
                if position >= start:
                    self.slots[slot] = state
                assert self.slots[slot] == state, f"{each.id} reads what is not its own at {position}"
        return [token] * sum(chunk.samples for chunk in step)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def advance(scheduler: Scheduler, token: int = 1, seconds: float = 0.0) -> Step:
    step = scheduler.schedule()
    scheduler.update(step, [Sampled(token)] * sum(chunk.samples for chunk in step), seconds)
    scheduler.check_integrity()
    return step


prompts = st.one_of(
    st.integers(1, 40).map(lambda length: [1] * length),  # shares its beginning with many
    st.lists(st.integers(1, 3), min_size=1, max_size=40),
)
requests = st.lists(
    st.tuples(
        prompts,
        st.integers(1, 30),  # answer
        st.integers(0, 20),  # arrival
        st.sampled_from(["", "a", "b"]),  # tenant
        st.sampled_from(["interactive", "batch"]),
        st.sampled_from([b"", b"x"]),  # salt
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=150, deadline=None)
@given(
    requests=requests,
    blocks=st.integers(18, 40),
    block_size=st.sampled_from([1, 4, 16]),
    seats=st.integers(1, 6),
    budget=st.integers(1, 64),
    target=st.sampled_from([None, 0.001, 0.02]),
    caching=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_every_request_ends_and_nothing_is_leaked(
    requests: list[tuple[list[int], int, int, str, ServiceClass, bytes]],
    blocks: int,
    block_size: int,
    seats: int,
    budget: int,
    target: float | None,
    caching: bool,
    seed: int,
) -> None:
    rng, clock = random.Random(seed), Clock()
    pool, memory = BlockPool(max(blocks, -(-70 // block_size)), block_size, caching), Memory(block_size)
    scheduler = Scheduler(pool, seats, budget, target, max_idle_s=2.0, clock=clock)
    coming = [
        (arrival, sequence(f"{n}", prompt, answer, tenant=tenant, service=service, salt=salt))
        for n, (prompt, answer, arrival, tenant, service, salt) in enumerate(requests)
    ]
    everybody = [each for _, each in coming]
    aborted: set[str] = set()
    for step_number in range(4000):
        for _, new in [item for item in coming if item[0] <= step_number]:
            scheduler.add(new)
        coming = [item for item in coming if item[0] > step_number]
        if not coming and not scheduler.has_work:
            break
        if rng.random() < 0.05:
            victim = rng.choice(everybody)
            if victim.arrival and victim.id not in aborted and len(victim.output_ids) < victim.max_tokens:
                scheduler.remove(victim)
                aborted.add(victim.id)
                scheduler.check_integrity()
        step = scheduler.schedule()
        ids = memory.run(step)
        tokens = sum(chunk.end - chunk.start for chunk in step)
        seconds = 0.001 + 0.0005 * tokens
        clock.now += seconds
        scheduler.update(step, [Sampled(each) for each in ids], seconds)
        scheduler.check_integrity()
        assert tokens <= budget
        assert len({chunk.sequence.id for chunk in step}) == len(step) <= seats
        assert step or coming or not scheduler.has_work, "nothing is computed although there is work"
    assert not scheduler.has_work
    assert pool.num_used == 0
    assert all(len(each.output_ids) == each.max_tokens for each in everybody if each.id not in aborted)


def test_requests_join_and_leave_between_steps() -> None:
    scheduler = Scheduler(BlockPool(16, 4), 4, 64)
    first, second = sequence("first", 4, 3), sequence("second", [2] * 4, 3)
    scheduler.add(first)
    advance(scheduler)
    scheduler.add(second)
    assert [chunk.sequence.id for chunk in advance(scheduler)] == ["first", "second"]
    advance(scheduler)
    assert [chunk.sequence.id for chunk in advance(scheduler)] == ["second"]
    assert not scheduler.has_work


def test_a_long_prompt_is_computed_in_chunks_beside_running_sequences() -> None:
    scheduler = Scheduler(BlockPool(64, 4), 4, 10)
    scheduler.add(sequence("running", [2, 3], 50))
    advance(scheduler)
    scheduler.add(sequence("long", 30, 5))
    spans = [[(c.sequence.id, c.start, c.end) for c in advance(scheduler)] for _ in range(4)]
    assert [span[1] for span in spans] == [("long", 0, 9), ("long", 9, 18), ("long", 18, 27), ("long", 27, 30)]
    assert all(span[0][0] == "running" for span in spans)


def test_when_blocks_run_out_the_youngest_waits_and_loses_no_token() -> None:
    scheduler = Scheduler(BlockPool(4, 4), 4, 64)
    old, young = sequence("old", 4, 9), sequence("young", [2] * 4, 9)
    scheduler.add(old)
    scheduler.add(young)
    while scheduler.has_work:
        advance(scheduler)
    assert scheduler.num_preemptions > 0
    assert len(old.output_ids) == len(young.output_ids) == 9


def test_an_answer_ends_with_its_stop_token() -> None:
    scheduler = Scheduler(BlockPool(4, 4), 4, 64)
    scheduler.add(sequence("a", 4, 9))
    advance(scheduler, token=END)
    assert not scheduler.has_work


def test_the_integrity_check_sees_a_leak() -> None:
    pool = BlockPool(4, 4)
    owner = sequence("a", 4, 1)
    pool.grow(owner, 8)
    pool.check_integrity([owner])
    with pytest.raises(AssertionError, match="leaked"):
        pool.check_integrity([])


# --- prefix cache


def finish(scheduler: Scheduler, *sequences: Sequence) -> None:
    for each in sequences:
        scheduler.add(each)
    while scheduler.has_work:
        advance(scheduler)


def test_a_prompt_seen_before_is_not_computed_again() -> None:
    scheduler = Scheduler(BlockPool(32, 4), 4, 64)
    prompt = list(range(1, 22))
    finish(scheduler, sequence("first", prompt, 1))
    again = sequence("again", [*prompt, 30], 2)
    scheduler.add(again)
    (chunk,) = advance(scheduler)
    assert (chunk.start, chunk.end) == (20, 22)
    assert again.cached_tokens == 20
    assert (scheduler.pool.queries, scheduler.pool.hits) == (43, 20)


def test_of_a_wholly_cached_prompt_the_last_block_is_computed_for_its_next_token() -> None:
    scheduler = Scheduler(BlockPool(32, 4), 4, 64)
    finish(scheduler, sequence("first", list(range(1, 9)), 1))
    scheduler.add(sequence("again", list(range(1, 9)), 1))
    (chunk,) = advance(scheduler)
    assert (chunk.start, chunk.end) == (4, 8)


def test_answers_are_cached_too_for_the_next_turn() -> None:
    scheduler = Scheduler(BlockPool(32, 4), 4, 64)
    finish(scheduler, sequence("turn", [1, 2, 3, 4], 8))
    following = sequence("next turn", [1, 2, 3, 4, *[1] * 8, 5, 6], 1)
    finish(scheduler, following)
    assert following.cached_tokens == 8  # the last token of the answer was never computed


def test_another_salt_finds_nothing_and_a_changed_beginning_finds_nothing() -> None:
    scheduler = Scheduler(BlockPool(32, 4), 4, 64)
    prompt = list(range(1, 22))
    finish(scheduler, sequence("first", prompt, 1, salt=b"one tenant"))
    stranger, changed = (
        sequence("s", prompt, 1, salt=b"another"),
        sequence("c", [99, *prompt[1:]], 1, salt=b"one tenant"),
    )
    finish(scheduler, stranger, changed)
    assert stranger.cached_tokens == changed.cached_tokens == 0


def test_running_sequences_share_blocks_and_the_least_recently_used_prefix_goes_first() -> None:
    scheduler = Scheduler(BlockPool(10, 4), 4, 64)
    a, b = [1] * 13, [2] * 13
    finish(scheduler, sequence("a", a, 1), sequence("b", b, 1))
    assert scheduler.pool.num_used == 0
    finish(scheduler, sequence("a again", a, 1))  # now b is the older one
    finish(scheduler, sequence("c", [3] * 16, 4))  # takes the unpublished blocks and the end of b
    kept, lost = sequence("a kept", a, 1), sequence("b lost", b, 1)
    finish(scheduler, kept)
    finish(scheduler, lost)
    assert kept.cached_tokens == 12
    assert lost.cached_tokens < 12
    first, second = sequence("x", [7] * 9, 3), sequence("y", [7] * 9, 3)
    scheduler.add(first)
    advance(scheduler)
    scheduler.add(second)
    advance(scheduler)
    assert first.blocks[:2] == second.blocks[:2]


def test_what_a_failed_step_computed_is_never_found() -> None:
    scheduler = Scheduler(BlockPool(32, 4), 4, 64)
    prompt = list(range(1, 22))
    scheduler.add(sequence("fails", prompt, 5))
    for chunk in scheduler.schedule():
        scheduler.remove(chunk.sequence)  # as the core does when the runner raises
    after = sequence("after", prompt, 1)
    finish(scheduler, after)
    assert after.cached_tokens == 0


def test_after_a_preemption_its_own_blocks_are_found_but_not_told_as_cached() -> None:
    scheduler = Scheduler(BlockPool(8, 4), 4, 64)
    young = sequence("young", list(range(1, 12)), 12)
    scheduler.add(sequence("old", [50] * 8, 14))
    scheduler.add(young)
    spans = []
    while scheduler.has_work:
        spans += [chunk for chunk in advance(scheduler) if chunk.sequence is young]
    assert scheduler.num_preemptions > 0
    assert any(chunk.start > 0 and chunk.end - chunk.start > 1 for chunk in spans)
    assert young.cached_tokens == 0


# --- classes, fairness, ageing


def test_an_interactive_request_takes_the_seat_of_a_batch_one() -> None:
    scheduler = Scheduler(BlockPool(64, 4), 2, 64)
    work = [sequence(f"b{n}", [n + 2] * 4, 20, service="batch") for n in range(2)]
    for each in work:
        scheduler.add(each)
    advance(scheduler)
    scheduler.add(sequence("i", 4, 5))
    ids = {chunk.sequence.id for chunk in advance(scheduler)}
    assert ids == {"i", "b0"}
    while scheduler.has_work:
        advance(scheduler)
    assert [len(each.output_ids) for each in work] == [20, 20]


def test_an_interactive_request_takes_the_blocks_of_batch_ones_only_if_they_suffice() -> None:
    scheduler = Scheduler(BlockPool(8, 4), 4, 64)
    scheduler.add(sequence("held", [9] * 12, 8))
    scheduler.add(sequence("b", [5] * 8, 8, service="batch"))
    advance(scheduler)
    scheduler.add(sequence("too large for now", 20, 1))
    assert {chunk.sequence.id for chunk in advance(scheduler)} == {"held", "b"}
    scheduler.add(sequence("fits", [6] * 9, 1, tenant="other"))
    while scheduler.has_work:
        advance(scheduler)


def test_batch_work_keeps_its_seat_when_the_arrival_would_find_no_blocks() -> None:
    scheduler = Scheduler(BlockPool(8, 4), 2, 64)
    scheduler.add(sequence("held", [9] * 16, 8))
    scheduler.add(sequence("b", [5] * 4, 8, service="batch"))
    advance(scheduler)
    scheduler.add(sequence("too large for now", 20, 1))
    for _ in range(3):
        assert {chunk.sequence.id for chunk in advance(scheduler)} == {"held", "b"}
    assert scheduler.num_preemptions == 0


def test_a_batch_request_that_gets_nothing_is_promoted() -> None:
    clock = Clock()
    scheduler = Scheduler(BlockPool(64, 4), 1, 64, max_idle_s=5.0, clock=clock)
    starved = sequence("batch", [2] * 4, 2, service="batch")
    scheduler.add(starved)
    served_at = None
    for n in range(200):  # more interactive work than fits, for ever
        while scheduler.num_waiting < 3:
            scheduler.add(sequence(f"i{n}-{scheduler.num_waiting}", [3] * 4, 3))
        clock.now += 0.1
        if any(chunk.sequence is starved for chunk in advance(scheduler)):
            served_at = clock.now
            break
    assert served_at is not None
    assert 5.0 < served_at < 7.0


def serve(queue: str, tenants: dict[str, int], steps: int) -> dict[str, float]:
    """Weighted tokens that each tenant got while all were backlogged."""
    scheduler = Scheduler(BlockPool(256, 4), 4, 64)
    rng, names = random.Random(0), iter(range(10**6))
    if queue == "one tenant for all":
        scheduler.queues["interactive"].first = lambda: min(  # type: ignore[method-assign]
            scheduler.queues["interactive"], key=lambda each: each.arrival
        )
    served = dict.fromkeys(tenants, 0.0)
    waiting = dict.fromkeys(tenants, 0)
    for _ in range(steps):
        for tenant, backlog in tenants.items():
            while waiting[tenant] < backlog:
                prompt = [rng.randrange(1, 10**6) for _ in range(rng.randint(4, 30))]
                scheduler.add(sequence(f"{next(names)}", prompt, rng.randint(2, 20), tenant=tenant))
                waiting[tenant] += 1
        step = advance(scheduler)
        for chunk in step:
            each = chunk.sequence
            outputs = chunk.samples or len(each.output_ids) > 0
            served[each.tenant] += 2.0 if outputs and chunk.end - chunk.start == 1 else chunk.end - chunk.start
            waiting[each.tenant] -= chunk.start == 0
    return served


def test_two_backlogged_tenants_are_served_alike_whatever_their_number_of_requests() -> None:
    fair = serve("fair", {"many": 20, "few": 2}, 1500)
    assert abs(fair["many"] - fair["few"]) <= bound(30, 4 * 50)
    by_request = serve("one tenant for all", {"many": 20, "few": 2}, 1500)
    assert by_request["many"] - by_request["few"] > 5 * bound(30, 4 * 50)


def test_a_tenant_that_comes_back_has_saved_up_nothing() -> None:
    queue = FairQueue()
    queue.add(sequence("a1", 1, 1, tenant="a"))
    queue.charge("a", inputs=1000)
    queue.add(sequence("b1", 1, 1, tenant="b"))
    assert queue.served == {"a": 1000.0, "b": 1000.0}
    assert queue.dispersion == 0.0
    queue.charge("b", outputs=10)
    assert queue.dispersion == 20.0
    assert queue.first().id == "a1"


# --- the rhythm of running streams


def simulate(scheduler: Scheduler, steps: int, clock: Clock) -> list[tuple[Step, float]]:
    """Steps that cost 5 ms, 1 ms a row and 0.5 us a score."""
    done = []
    for _ in range(steps):
        step = scheduler.schedule()
        load = Load()
        for chunk in step:
            load = load.plus(chunk.end - chunk.start, chunk.start)
        seconds = 0.005 + 0.001 * load.rows + 5e-7 * load.scores
        clock.now += seconds
        scheduler.update(step, [Sampled(1)] * sum(chunk.samples for chunk in step), seconds)
        done.append((step, seconds))
    return done


@pytest.mark.parametrize(("target", "most"), [(None, 2.1), (0.025, 1.9)])
def test_a_long_prompt_does_not_stall_running_streams(target: float | None, most: float) -> None:
    clock = Clock()
    scheduler = Scheduler(BlockPool(4096, 16), 32, 512, target, clock=clock)
    for n in range(8):
        scheduler.add(sequence(f"s{n}", [n + 2] * 4, 10_000))
    alone = simulate(scheduler, 20, clock)[-1][1]
    long = sequence("long", list(range(1, 4001)), 10)
    scheduler.add(long)
    steps = simulate(scheduler, 2500, clock)
    assert sorted(seconds for _, seconds in steps)[-9] <= most * alone + 0.003  # it may have to learn first
    assert max(seconds for _, seconds in steps) < 4 * alone
    assert len(long.output_ids) == 10


def test_batch_work_fills_what_the_target_leaves() -> None:
    clock = Clock()
    scheduler = Scheduler(BlockPool(1024, 16), 64, 512, 0.03, clock=clock)
    for n in range(4):
        scheduler.add(sequence(f"s{n}", [n + 2] * 4, 10_000))
    for n in range(40):
        scheduler.add(sequence(f"b{n}", [n + 20] * 4, 10_000, service="batch"))
    simulate(scheduler, 100, clock)
    before = {each.id: len(each.output_ids) for each in scheduler.running}
    steps = simulate(scheduler, 200, clock)
    assert all(sum(chunk.sequence.id.startswith("s") for chunk in step) == 4 for step, _ in steps)
    assert sorted(seconds for _, seconds in steps)[int(0.95 * len(steps))] <= 0.03
    shares = [sum(chunk.sequence.id.startswith("b") for chunk in step) for step, _ in steps]
    assert sum(shares) / len(shares) > 8
    tokens = [len(each.output_ids) - before[each.id] for each in scheduler.running if each.service == "batch"]
    assert max(tokens) - min(tokens) <= 3  # they take turns


def test_a_target_out_of_reach_does_not_stop_the_rest() -> None:
    clock = Clock()
    scheduler = Scheduler(BlockPool(1024, 16), 64, 512, 0.001, clock=clock)
    scheduler.add(sequence("s", 4, 10_000))
    scheduler.add(sequence("b", [2] * 40, 20, service="batch"))
    simulate(scheduler, 200, clock)
    assert [each.id for each in scheduler.running] == ["s"]


def test_the_cost_model_learns_what_steps_cost() -> None:
    model, rng = CostModel(), random.Random(0)
    for n in range(60):
        load = Load(8 + (n % 3 > 0) * rng.randrange(60), rng.randrange(20_000))
        noise = 1 + rng.uniform(-0.1, 0.1)
        model.observe(load, (0.01 + 0.002 * load.rows + 1e-6 * load.scores) * noise, mixed=load.rows > 8)
    assert model.seconds(Load(20, 10_000)) == pytest.approx(0.06, rel=0.1)
    assert model.seconds(Load(100, 50_000)) == pytest.approx(0.26, rel=0.15)


def test_before_anything_is_known_chunks_start_small_and_grow() -> None:
    pacer = Pacer()
    assert pacer.room(Load(8, 100), 0, 500, pacer.limit(Load(8, 100)), 0) == 16
    for rows in (8, 24, 24):
        pacer.observe(Load(rows, 100), 8, 0.001 * rows)
    assert pacer.room(Load(8, 100), 0, 500, 1.0, 0) == 32
