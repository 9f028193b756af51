"""The scheduler's decisions: the paper's check, order, affinity, growth, faults, and invariants of any history."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rstar2_jax.rollout import balance, lengths, queues


def rollout(name, family="p", prompt=2, budget=8):
    return balance.Rollout(name=name, family=family, prompt_tokens=prompt, budget_tokens=budget)


def submitted(balancer, *names, **more):
    made = [rollout(name, **more) for name in names]
    for one in made:
        balancer.submit(one)
    return made


def where(placed):
    return {one.name: engine for one, engine in placed}


def test_capacities_25_and_10_take_two_and_one_requests_of_10_and_the_fourth_waits_for_a_release():
    balancer = balance.Balancer([25, 10], quantile=None)
    a, *_ = [submitted(balancer, name, family=name)[0] for name in "abcd"]
    assert where(balancer.place()) == {"a": 0, "b": 0, "c": 1}
    assert balancer.waiting == 1 and balancer.place() == []
    balancer.release(a, ended=True)
    assert where(balancer.place()) == {"d": 0}


def test_nobody_passes_a_head_that_does_not_fit():
    balancer = balance.Balancer([20], quantile=None)
    submitted(balancer, "large", budget=16)
    submitted(balancer, "next", budget=16)
    submitted(balancer, "small", budget=0)
    assert where(balancer.place()) == {"large": 0}
    assert balancer.waiting == 2


def test_equal_engines_under_equal_load_are_filled_evenly():
    balancer = balance.Balancer([100] * 4, quantile=None)
    for number in range(20):
        submitted(balancer, f"{number}", family=f"{number}")
    balancer.place()
    assert [len(balancer.held(engine)) for engine in range(4)] == [5, 5, 5, 5]


def test_samples_of_one_prompt_share_an_engine_until_it_is_full():
    balancer = balance.Balancer([40, 40], quantile=None)
    submitted(balancer, "a0", "a1", "a2", "a3", "a4", family="a")
    submitted(balancer, "b0", family="b")
    assert where(balancer.place()) == {"a0": 0, "a1": 0, "a2": 0, "a3": 0, "a4": 1, "b0": 1}


def test_a_rollout_goes_home_even_when_another_engine_has_more_room_and_elsewhere_when_its_home_is_full_or_down():
    balancer = balance.Balancer([30, 100], quantile=None)
    one = rollout("one", family="one")
    one.home = 0
    balancer.submit(one)
    assert where(balancer.place()) == {"one": 0}
    balancer.release(one, ended=False)
    submitted(balancer, "x", budget=28)[0].home = 0
    balancer.place()
    balancer.submit(one)
    assert where(balancer.place()) == {"one": 1}
    balancer.release(one, ended=False)
    balancer.take_down(1)
    balancer.submit(one)
    assert balancer.place() == []
    balancer.bring_up(1)
    assert where(balancer.place()) == {"one": 1}


def ended(balancer, *lengths, budget=1000):
    for number, tokens in enumerate(lengths):
        (one,) = submitted(balancer, f"ended {number}", budget=budget)
        balancer.place()
        balancer.grow(one, tokens)
        balancer.release(one, ended=True)


def test_the_whole_budget_is_reserved_until_enough_have_ended_and_then_what_they_reached():
    balancer = balance.Balancer([2000], quantile=0.5)
    ended(balancer, *[100] * 31)
    assert balancer.need(rollout("early", budget=1000)) == 1002
    ended(balancer, 100)
    # All of them ended within one bucket of 1000 / 64 tokens, and the mean is its middle.
    assert balancer.need(rollout("late", budget=1000)) == pytest.approx(102, abs=8)
    assert balancer.need(rollout("short", budget=50)) == 52


@pytest.mark.parametrize(("siblings", "of_few", "of_many"), [(1, 6, 1105), (8, 4, 1050)])
def test_many_rollouts_need_less_of_a_margin_each_than_a_few_and_samples_of_one_prompt_a_larger_one(
    siblings, of_few, of_many
):
    few, many = balance.Balancer([3_000], quantile=0.95), balance.Balancer([300_000], quantile=0.95)
    for balancer in (few, many):
        ended(balancer, *(617 * number % 1000 for number in range(200)))
        for number in range(1500):
            submitted(balancer, f"{number}", family=f"{number // siblings}", prompt=1, budget=1000)
        balancer.place()
    # Of lengths between 0 and 1000 half are left after 500 tokens, when n of them hold most: n * 258 + 1.645 *
    # sqrt(n (1 + siblings) / 2) * 258 tokens, at the end of a 64th of the budget. Of what each reaches in the end, 500,
    # the memory would hold half as many.
    assert len(few.held(0)) == pytest.approx(of_few, abs=1) and len(many.held(0)) == pytest.approx(of_many, rel=0.04)


def test_what_still_runs_is_known_to_have_come_as_far_as_the_turns_that_end_beside_it():
    balancer = balance.Balancer([10_000], quantile=0.5)
    ended(balancer, *[400] * 32, budget=1000)
    first, second = submitted(balancer, "first", "second", prompt=0, budget=1000)
    balancer.place()
    before = balancer.free(0)
    for one in (first, second):
        assert balancer.begin(one) == 0
    balancer.grow(first, 390, 300)  # of which a tool has said 90
    assert balancer._engines[0].used_by(second) == 300 and balancer._engines[0].used_by(first) == 390
    balancer.grow(second, 20, 20)  # it waited for a place inside its engine
    assert balancer._engines[0].used_by(second) == 20
    # Both reach 400 at the same time, and so they do now that one is 370 tokens ahead: it ends before.
    assert before == pytest.approx(10_000 - 2 * 400, abs=70) and balancer.free(0) > before + 300


def test_what_rollouts_hold_together_is_the_sum_over_those_that_are_still_there():
    estimate = lengths.Lengths()
    for tokens in range(640):
        estimate.add(tokens)
    estimate.fit([], 640)  # a tenth ends in each tenth of the budget
    mean, variance = estimate.held([100, 50], [0, 320])
    for ahead in (0, 16, 40, 63):
        there = np.array([1 - ahead / 64, max(0, 1 - ahead / 32)])
        size = np.array([100 + 10 * (ahead + 1), 50 + 320 + 10 * (ahead + 1)])  # grown to the bucket's end
        assert mean[ahead] == pytest.approx(there @ size, rel=0.03, abs=8)
        assert variance[ahead] == pytest.approx(there * (1 - there) @ size**2, rel=0.1, abs=200)
    one, other = estimate.held([100], [0]), estimate.held([50], [320])
    np.testing.assert_allclose(mean, one[0] + other[0])
    np.testing.assert_allclose(variance, one[1] + other[1])


def test_the_lengths_of_one_step_are_not_forgotten_for_its_long_ones_alone():
    estimate = lengths.Lengths()
    for tokens in sorted(np.random.default_rng(0).integers(0, 1000, 9000).tolist()):
        estimate.add(tokens, together=9000)
    estimate.fit([], 1000)
    assert estimate.expected(0, 1000) == pytest.approx(500, abs=15)


def test_rollouts_that_a_small_budget_cut_say_nothing_of_what_a_large_one_is_used_for():
    balancer = balance.Balancer([100_000], quantile=0.95)
    ended(balancer, *[64] * 500, budget=64)
    for number in range(300):
        submitted(balancer, f"{number}", family=f"{number}", prompt=100, budget=8192)
    balancer.place()
    assert len(balancer.held(0)) == 100_000 // 8292


def test_a_call_seats_no_more_than_it_is_asked_to():
    balancer = balance.Balancer([1000], quantile=None)
    submitted(balancer, *"abcde")
    assert [len(balancer.place(2)) for _ in range(4)] == [2, 2, 1, 0]


def test_a_small_fleet_saves_up_for_a_long_rollout():
    balancer = balance.Balancer([10_000, 10_000], quantile=0.95, move_share=0.01)
    ended(balancer, *(617 * number % 1000 for number in range(200)))
    (one,) = submitted(balancer, "one", prompt=10, budget=5000)
    balancer.place()
    for _ in range(400):
        balancer.grow(one, 2000, 2000)
    assert balancer._may_move == 5010


def uneven(move_share, waiting=0):
    """(balancer, rollouts): of 40 on two engines, each with 500 of up to 1000 tokens, 20 of the second have ended."""
    balancer = balance.Balancer([10**6, 10**6], quantile=0.95, move_share=move_share)
    ended(balancer, *(617 * number % 1000 for number in range(200)))
    held = submitted(balancer, *(f"{number}" for number in range(40)), prompt=10, budget=1000)
    for number, one in enumerate(held):
        one.home = number % 2
    balancer.place()
    for one in held:
        balancer.begin(one)
    for one in held:
        balancer.grow(one, 500, 500)
    for one in held[1::2]:
        balancer.release(one, ended=False)
    submitted(balancer, *(f"w{number}" for number in range(waiting)), prompt=10, budget=999_000)
    return balancer, held[::2]


def test_between_turns_rollouts_move_to_the_engine_with_less_left_until_it_is_even():
    balancer, left = uneven(move_share=1.0)
    went = [balancer.begin(one) for one in left]
    assert went in ([1] * 9 + [0] * 11, [1] * 10 + [0] * 10)
    assert [balancer.begin(one) for one in left] == went  # even: nothing goes back
    assert {one.home for one in left} == {0, 1} and balancer.waiting == 0
    assert sorted(balancer.held(0) + balancer.held(1)) == sorted(one.name for one in left)


@pytest.mark.parametrize(("share", "moves"), [(0.0, 0), (0.05, 1), (0.1, 3)])
def test_moves_cost_no_more_than_their_share_of_what_was_sampled(share, moves):
    balancer, left = uneven(move_share=share)  # 20,000 tokens were sampled, a move computes 510 again
    assert sum(balancer.begin(one) == 1 for one in left) == moves


def test_nothing_moves_while_rollouts_wait_nor_to_an_engine_without_room_or_out_of_service():
    balancer, left = uneven(move_share=1.0, waiting=3)
    assert {balancer.begin(one) for one in left} == {0}
    balancer, left = uneven(move_share=1.0)
    balancer.take_down(1)
    assert {balancer.begin(one) for one in left} == {0}
    balancer, left = uneven(move_share=1.0)
    balancer._engines[1].capacity_tokens = 600
    assert {balancer.begin(one) for one in left} == {0}


def test_rollouts_that_still_run_count_as_longer_than_they_are():
    balancer = balance.Balancer([10**6], quantile=0.5)
    running = submitted(balancer, *(f"runs {number}" for number in range(100)), budget=1000)
    balancer.place()
    for one in running:
        balancer.grow(one, 500)
    ended(balancer, *[100] * 100)
    # Half of all ended at 100; nobody is known to have ended beyond, so that the others may reach the budget.
    assert balancer.need(rollout("new", budget=1000)) == pytest.approx(2 + 0.5 * 100 + 0.5 * 1000, abs=12)
    assert balancer.need(running[0]) == 1002


def test_the_estimate_forgets_the_oldest_lengths(monkeypatch):
    monkeypatch.setattr(lengths, "_MOST", 64)
    balancer = balance.Balancer([2000], quantile=0.5)
    ended(balancer, *[900] * 64)
    assert balancer.need(rollout("a", budget=1000)) > 850
    ended(balancer, *[20] * 64)
    assert balancer.need(rollout("b", budget=1000)) < 80


def test_a_rollout_that_outgrows_its_expectation_takes_more_of_its_engine_and_gives_all_of_it_back():
    balancer = balance.Balancer([1000], quantile=0.5)
    ended(balancer, *[100] * 32, budget=900)
    (one,) = submitted(balancer, "grows", budget=900)
    balancer.place()
    bucket = 900 / lengths.BUCKETS
    assert balancer.free(0) == pytest.approx(1000 - 2 - 100, abs=1.1 * bucket)
    balancer.grow(one, 500)  # longer than any was: it may reach its budget
    assert balancer.free(0) == pytest.approx(1000 - 2 - 900, abs=1.1 * bucket)
    balancer.release(one, ended=True)
    balancer.release(one, ended=True)
    assert balancer.free(0) == 1000


@settings(max_examples=100, deadline=None)
@given(
    gone=st.lists(st.integers(0, 400), min_size=32, max_size=80),
    running=st.lists(st.integers(0, 300), max_size=40),
    used=st.integers(0, 300),
    budget=st.integers(1, 300),
)
def test_an_expected_length_lies_between_what_a_rollout_has_and_its_budget(gone, running, used, budget):
    estimate = lengths.Lengths()
    for tokens in gone:
        estimate.add(tokens)
    estimate.fit(running, budget)
    assert min(used, budget) <= estimate.expected(used, budget) <= budget


def test_rollouts_of_an_engine_that_goes_down_come_back_in_their_order_and_go_first_where_asked():
    balancer = balance.Balancer([20, 20], quantile=None)
    submitted(balancer, *"abcdef", budget=8)
    balancer.place()
    moved = balancer.take_down(0)
    assert [one.name for one in moved] == ["a", "b"]
    for one in reversed(moved):
        balancer.submit(one, first=True)
    assert balancer.place() == [] and balancer.up == [1]
    balancer.bring_up(0)
    assert where(balancer.place()) == {"a": 0, "b": 0}


def test_longest_first_tries_every_prompt_twice_and_then_serves_those_whose_samples_were_long():
    balancer = balance.Balancer([10], quantile=None, longest_first=True)
    for family in ("short", "long", "unknown"):
        submitted(balancer, *(f"{family}{n}" for n in range(4)), family=family)
    order = []
    for _ in range(12):
        ((one, _),) = balancer.place()
        order.append(one.name)
        balancer.grow(one, {"short": 2, "long": 6, "unknown": 4}[one.family])
        balancer.release(one, ended=True)
    # The first sample of each tells all there is to know here.
    assert order[:3] == ["short0", "long0", "unknown0"]
    assert order[3:6] == ["long1", "long2", "long3"] and order[9:] == ["short1", "short2", "short3"]


def test_longest_first_starts_two_samples_of_each_prompt_before_anything_is_known():
    balancer = balance.Balancer([60], quantile=None, longest_first=True)
    for family in "ab":
        submitted(balancer, *(f"{family}{n}" for n in range(4)), family=family)
    assert list(where(balancer.place())) == ["a0", "a1", "b0", "b1", "a2", "a3"]


def test_rollouts_that_come_back_are_the_first_in_either_order():
    for longest_first in (False, True):
        balancer = balance.Balancer([10], quantile=None, longest_first=longest_first)
        (first,) = submitted(balancer, "first", family="a")
        balancer.place()
        submitted(balancer, "next", family="b")
        balancer.take_down(0)
        balancer.submit(first, first=True)
        balancer.bring_up(0)
        assert where(balancer.place()) == {"first": 0}


@pytest.mark.parametrize("capacities", [[], [0], [10, -1]])
def test_engines_without_memory_are_refused(capacities):
    with pytest.raises(ValueError, match="needs at least one engine"):
        balance.Balancer(capacities)


def test_a_rollout_that_fits_no_engine_is_refused_at_once():
    with pytest.raises(ValueError, match="may reach 12 tokens, the largest engine holds 11"):
        balance.Balancer([11, 5]).submit(rollout("long", prompt=2, budget=10))


@pytest.mark.parametrize("quantile", [0, 0.4, 1.0])
def test_a_quantile_outside_its_range_is_refused(quantile):
    with pytest.raises(ValueError, match="quantile = .* must be in"):
        balance.Balancer([10], quantile=quantile)


@settings(max_examples=150, deadline=None)
@given(
    capacities=st.lists(st.integers(20, 60), min_size=1, max_size=4),
    seed=st.integers(0, 2**31),
    quantile=st.sampled_from([None, 0.5, 0.9]),
    longest_first=st.booleans(),
)
def test_in_any_history_no_rollout_is_lost_or_twice_and_nothing_is_placed_beyond_the_memory(
    capacities, seed, quantile, longest_first
):
    rng = np.random.default_rng(seed)
    balancer = balance.Balancer(capacities, quantile=quantile, longest_first=longest_first)
    waiting, held, count = [], [], 0
    for _ in range(60):
        match rng.integers(6):
            case 0 | 1:
                one = rollout(f"{count}", family=f"{rng.integers(3)}", prompt=int(rng.integers(1, 6)), budget=14)
                count += 1
                balancer.submit(one, first=bool(rng.integers(2)))
                waiting.append(one)
            case 2 if held:
                one = held[rng.integers(len(held))]
                balancer.grow(one, min(14, one.used_tokens + int(rng.integers(8))))
            case 3 if held:
                balancer.release(held.pop(rng.integers(len(held))), ended=bool(rng.integers(2)))
            case 4:
                index = int(rng.integers(len(capacities)))
                moved = balancer.take_down(index)
                for one in moved:
                    held.remove(one)
                    balancer.submit(one)
                    waiting.append(one)
            case 5:
                balancer.bring_up(int(rng.integers(len(capacities))))
        idle = {engine for engine in range(len(capacities)) if not balancer.held(engine)}
        placed = balancer.place()
        for engine in {engine for _, engine in placed}:
            # Never beyond the memory, but for a rollout that has an idle engine to itself.
            assert engine in balancer.up
            assert balancer.free(engine) >= 0 or (engine in idle and len(balancer.held(engine)) == 1)
        for one, _ in placed:
            waiting.remove(one)
            held.append(one)
        names = [name for engine in range(len(capacities)) for name in balancer.held(engine)]
        assert sorted(names) == sorted(one.name for one in held) and balancer.waiting == len(waiting)
    for one in [*held, *waiting]:
        balancer.release(one, ended=False)
    assert [balancer.free(engine) for engine in range(len(capacities))] == capacities and balancer.waiting == 0


def test_a_head_that_only_an_engine_out_of_service_could_hold_is_set_aside_and_goes_first_once_it_is_back():
    balancer = balance.Balancer([100, 20], quantile=None)
    balancer.take_down(0)
    (large,) = submitted(balancer, "large", budget=60)
    submitted(balancer, "a", "b", "c", budget=8)
    assert where(balancer.place()) == {"a": 1, "b": 1} and balancer.waiting == 2
    assert balancer.stranded == [large] and balancer.able(large) == [0]
    balancer.bring_up(0)
    assert list(where(balancer.place())) == ["large", "c"] and not balancer.stranded
    balancer.take_down(0)
    balancer.submit(large, first=True)
    balancer.place()
    balancer.release(large, ended=False)
    assert not balancer.stranded and balancer.waiting == 0


def test_without_any_engine_in_service_the_queue_keeps_its_order():
    balancer = balance.Balancer([20], quantile=None)
    balancer.take_down(0)
    submitted(balancer, "a", "b", "c")
    assert balancer.place() == [] and not balancer.stranded
    balancer.bring_up(0)
    assert list(where(balancer.place())) == ["a", "b"]


def test_longest_first_remembers_a_bounded_number_of_prompts_and_its_sums_are_theirs(monkeypatch):
    monkeypatch.setattr(queues, "_MOST_FAMILIES", 16)
    balancer = balance.Balancer([1000], quantile=None, longest_first=True)
    for number in range(200):
        (one,) = submitted(balancer, f"{number}", family=f"p{number}")
        balancer.place()
        balancer.grow(one, 1 + number % 7)
        balancer.release(one, ended=True)
    queue = balancer._queue
    assert len(queue._known) == 16 and set(queue._known) == {f"p{number}" for number in range(184, 200)}
    assert queue._tokens == sum(1 + number % 7 for number in range(184, 200)) and queue._ended == 16


def test_small_budgets_do_not_cut_the_lengths_that_large_ones_are_judged_by():
    balancer = balance.Balancer([10**6], quantile=0.95)
    for number in range(400):
        budget = 1 if number % 10 == 9 else 12_288
        one = balance.Rollout(name=str(number), family=str(number), prompt_tokens=100, budget_tokens=budget)
        balancer.submit(one)
        balancer.place()
        balancer.grow(one, 1 if budget == 1 else 9_000)
        balancer.release(one, ended=True)
    wanted = balance.Rollout(name="last", family="last", prompt_tokens=100, budget_tokens=12_288)
    assert balancer.need(wanted) > 7_000
    assert not any(engine.families for engine in balancer._engines)  # nothing is kept of those that are gone
