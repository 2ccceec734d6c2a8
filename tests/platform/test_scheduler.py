"""Scheduler and block pool under random worlds: no model is needed, so thousands of steps take a second."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gearshift.platform.engine.blocks import BlockPool
from gearshift.platform.engine.scheduler import Scheduler
from gearshift.platform.engine.sequence import Sequence, Step
from gearshift.platform.request import SamplingParams

END = 0


def sequence(name: str, prompt: int, answer: int) -> Sequence:
    return Sequence(name, [1] * prompt, SamplingParams(), max_tokens=answer, stop_ids=frozenset({END}))


def advance(scheduler: Scheduler, token: int = 1) -> Step:
    step = scheduler.schedule()
    scheduler.update(step, [token] * sum(chunk.samples for chunk in step))
    scheduler.check_integrity()
    return step


@settings(max_examples=150, deadline=None)
@given(
    requests=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 30), st.integers(0, 20)), min_size=1, max_size=12),
    blocks=st.integers(18, 40),
    block_size=st.sampled_from([1, 4, 16]),
    seats=st.integers(1, 6),
    budget=st.integers(1, 64),
    data=st.data(),
)
def test_every_request_ends_and_nothing_is_leaked(
    requests: list[tuple[int, int, int]], blocks: int, block_size: int, seats: int, budget: int, data: st.DataObject
) -> None:
    pool = BlockPool(max(blocks, -(-70 // block_size)), block_size)
    scheduler = Scheduler(pool, seats, budget)
    coming = [(arrival, sequence(f"{n}", prompt, answer)) for n, (prompt, answer, arrival) in enumerate(requests)]
    everybody = [sequence for _, sequence in coming]
    aborted: set[str] = set()
    for step_number in range(4000):
        for _, new in [item for item in coming if item[0] <= step_number]:
            scheduler.add(new)
        coming = [item for item in coming if item[0] > step_number]
        if not coming and not scheduler.has_work:
            break
        if scheduler.running and data.draw(st.integers(0, 30)) == 0:
            victim = data.draw(st.sampled_from(scheduler.running))
            scheduler.remove(victim)
            aborted.add(victim.id)
        step = advance(scheduler)
        assert sum(chunk.end - chunk.start for chunk in step) <= budget
        assert len({chunk.sequence.id for chunk in step}) == len(step) <= seats
    assert not scheduler.has_work
    assert pool.num_used == 0
    assert all(len(each.output_ids) == each.max_tokens for each in everybody if each.id not in aborted)


def test_requests_join_and_leave_between_steps() -> None:
    scheduler = Scheduler(BlockPool(16, 4), 4, 64)
    first, second = sequence("first", 4, 3), sequence("second", 4, 3)
    scheduler.add(first)
    advance(scheduler)
    scheduler.add(second)
    assert [chunk.sequence.id for chunk in advance(scheduler)] == ["first", "second"]
    advance(scheduler)
    assert [chunk.sequence.id for chunk in advance(scheduler)] == ["second"]
    assert not scheduler.has_work


def test_a_long_prompt_is_computed_in_chunks_beside_running_sequences() -> None:
    scheduler = Scheduler(BlockPool(64, 4), 4, 10)
    scheduler.add(sequence("running", 2, 50))
    advance(scheduler)
    scheduler.add(sequence("long", 30, 5))
    spans = [[(c.sequence.id, c.start, c.end) for c in advance(scheduler)] for _ in range(4)]
    assert [span[1] for span in spans] == [("long", 0, 9), ("long", 9, 18), ("long", 18, 27), ("long", 27, 30)]
    assert all(span[0][0] == "running" for span in spans)


def test_when_blocks_run_out_the_youngest_waits_and_loses_no_token() -> None:
    scheduler = Scheduler(BlockPool(4, 4), 4, 64)
    old, young = sequence("old", 4, 9), sequence("young", 4, 9)
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
