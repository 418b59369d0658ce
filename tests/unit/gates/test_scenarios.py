"""What gates replay: the same every time, disjoint, and of the shapes that loops are about."""

from __future__ import annotations

import pytest

from layline.gates.scenarios import LOOPS, Scenario, ScenarioMaker

MAKE = ScenarioMaker(vocab=50, num_stages=3, chunk=6)


def all_scenarios(make: ScenarioMaker = MAKE) -> list[Scenario]:
    return make.of("all")


def test_the_same_seed_gives_the_same_steps() -> None:
    assert all_scenarios() == all_scenarios(ScenarioMaker(50, 3, 6))
    assert all_scenarios() != all_scenarios(ScenarioMaker(50, 3, 6, seed=1))


@pytest.mark.parametrize("scenario", all_scenarios(), ids=lambda each: each.name)
def test_tokens_are_in_the_vocabulary_and_blocks_in_the_cache(scenario: Scenario) -> None:
    for _, step in scenario.steps:
        (part,) = step.parts
        assert all(0 <= token_id < 50 for token_id in part.token_ids)
        assert sum(span.count for span in part.spans) == len(part.token_ids)
        for span in part.spans:
            assert all(0 < block < scenario.num_blocks for block in span.blocks)
            assert span.length <= 16 * len(span.blocks)
            assert (span.count == 1) or part.num_decode == 0


@pytest.mark.parametrize("scenario", all_scenarios(), ids=lambda each: each.name)
def test_the_split_comes_first_and_its_counters_must_move(scenario: Scenario) -> None:
    assert scenario.ways[0].name == "split"
    assert not scenario.ways[0].doors
    assert scenario.ways[0].expected.moving
    assert "remote_reads" in scenario.ways[0].expected.still


def test_microbatches_have_no_request_in_common() -> None:
    scenario = MAKE.batch(8)
    for call in scenario.calls:
        if call.loop == "batch":
            tables = [tuple(span.blocks) for step in call.steps for span in step.parts[0].spans]
            assert len(call.steps) == 3
            assert len(set(tables)) == len(tables) == 8
    assert len(MAKE.batch(1).calls[-1].steps) == 1


def test_verification_goes_back_to_what_was_accepted() -> None:
    starts = [
        [span.start for span in step.parts[0].spans]
        for call, step in MAKE.verify(3).steps
        if call.loop == "verify"
    ]
    assert starts == [[7, 8, 9], [10, 11, 12], [12, 13, 14], [13, 14, 15]]


def test_chunks_follow_each_other_and_the_last_is_short() -> None:
    chunks = [step.parts[0].spans[0] for call, step in MAKE.prime(4).steps if call.loop == "prime"]
    assert [(span.start, span.count) for span in chunks] == [(0, 6), (6, 6), (12, 6), (18, 2)]
    (one, other) = MAKE.prime_together().calls[0].steps[1].parts[0].spans
    assert (one.start, one.count, other.start, other.count) == (3, 3, 2, 2)
    sizes = [step.parts[0].num_tokens for _, step in MAKE.growing().steps]
    assert sizes == [6, 12, 18, 24]


def test_one_loop_or_all() -> None:
    names = [scenario.name for scenario in all_scenarios()]
    assert names == [each.name for loop in LOOPS for each in MAKE.of(loop)]
    assert len(set(names)) == len(names)
