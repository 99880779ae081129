"""Orders of events that a request with captured rows can meet in the scheduler: chunks, preemption, late output, ends,
failures, weight commits, forks."""

from __future__ import annotations

import pytest

from capture_driver import HIDDEN, PROFILES, ROUTES, CaptureDriver
from infer.engine.aux.coordinator import cap_external_hit
from infer.engine.aux.index import RetainedObjects
from infer.engine.aux.rows import CACHED, CAPTURED, RECOMPUTED
from infer.engine.request import Request, Status
from infer.engine.step import StepPlan
from step_driver import PlannedFailure, cache_config, full_group, new_request, sliding_group

MOE = (ROUTES.name,)
BOTH = (ROUTES.name, HIDDEN.name)


def prompt(length: int, family: int = 0) -> list[int]:
    return [family * 1000 + position for position in range(length)]


def status(request: Request) -> bytes:
    assert request.rows is not None
    return request.rows.export()[ROUTES.name].status


def hashes_sent(driver: CaptureDriver, capture_id: int = 0) -> list[int]:
    """After each plan, how many hashes of the capture the worker has."""
    total, out = 0, []
    for plan in driver.worker.plans:
        aux = plan.aux
        if aux is not None:
            total += sum(len(begin.hashes) for begin in aux.begins if begin.capture_id == capture_id)
            total += sum(len(hashes) for one, hashes in [*aux.hashes, *aux.ends] if one == capture_id)
        out.append(total)
    return out


def ends(plan: StepPlan) -> list[tuple[int, list[bytes]]]:
    return [] if plan.aux is None else plan.aux.ends


@pytest.mark.parametrize("depth", [1, 2])
def test_a_hash_is_sent_when_its_block_is_computed(depth: int) -> None:
    """Prompt 160, 64 tokens a step, blocks of 16."""
    driver = CaptureDriver(max_num_batched_tokens=64)
    request = driver.add(prompt(160), 20, fields=MOE)
    driver.run(depth)
    sent = hashes_sent(driver)
    # At depth 2 the id of the token that completes block 11 is known one plan later.
    assert sent[: 18 + depth] == [4, 8, 10] + [10] * (14 + depth) + [11]
    driver.check_rows(request)


def test_chunks_emit_nothing_until_the_prompt_is_complete() -> None:
    driver = CaptureDriver(max_num_batched_tokens=2)
    request = driver.add(prompt(3), 2, fields=MOE)
    driver.schedule()
    assert driver.in_flight[0][1].aux == {}  # type: ignore[union-attr]
    driver.apply()
    driver.schedule()
    rows = driver.in_flight[0][1].aux[0]  # type: ignore[union-attr]
    assert (rows.start, rows.count) == (0, 3)
    driver.run()
    driver.check_rows(request)


def test_without_anybody_who_asks_plans_carry_nothing() -> None:
    """RE-45: the engine can capture, nobody opted in: nothing is sent, kept or counted."""
    driver = CaptureDriver()
    requests = [driver.add(prompt(40, family), 8) for family in (0, 0, 1)]
    driver.run(2)
    assert [plan.aux for plan in driver.worker.plans] == [None] * len(driver.worker.plans)
    assert len(driver.aux.retained) == driver.aux.stats.captures == 0
    assert all(request.rows is None and request.capture_fields == () for request in requests)


def test_only_those_who_ask_are_captured() -> None:
    driver = CaptureDriver()
    asked, other = driver.add(prompt(40), 8, fields=MOE), driver.add(prompt(40, 1), 8)
    driver.run()
    begun = [begin for plan in driver.worker.plans if plan.aux for begin in plan.aux.begins]
    assert [begin.slot for begin in begun] == [driver.worker.plans[0].slots[0]]
    driver.check_rows(asked)
    assert other.rows is None


class TestHits:
    """Prompt 80, blocks of 16."""

    def driver_with(self, rows_of: int, **options: object) -> CaptureDriver:
        """All 80 tokens are in the prefix cache, the rows of the first `rows_of`."""
        driver = CaptureDriver(max_num_batched_tokens=rows_of or 80, **options)  # type: ignore[arg-type]
        if rows_of:
            first = driver.add(prompt(80), 4, fields=BOTH)
            driver.step()
            driver.scheduler.finish(first, "abort")
        driver.add(prompt(80), 1)
        driver.run()
        return driver

    @pytest.mark.row("X-AUX", "a prefix hit is shortened to the blocks whose rows survive")
    @pytest.mark.parametrize(("rows_of", "hit"), [(80, 64), (40, 32), (16, 16), (0, 0)])
    def test_a_hit_ends_where_rows_are_missing(self, rows_of: int, hit: int) -> None:
        driver = self.driver_with(rows_of)
        assert driver.hit(prompt(80)) == hit
        assert driver.hit(prompt(80), fields=()) == 64, "who asks for nothing loses nothing"

    def test_sliding_windows_give_the_same_numbers(self) -> None:
        for rows_of, hit in [(80, 64), (40, 32), (16, 16), (0, 0)]:
            driver = self.driver_with(rows_of, cache=cache_config(full_group(100), sliding_group(100, 90)))
            assert driver.hit(prompt(80)) == hit

    def test_a_shortened_hit_still_needs_its_window(self) -> None:
        """Rows reach to 48, but in front of 48 the sliding group has given its blocks away."""
        cache = cache_config(full_group(100), sliding_group(8, 20))
        driver = CaptureDriver(cache, max_num_batched_tokens=48)
        first = driver.add(prompt(80), 4, fields=MOE)
        driver.step()
        driver.scheduler.finish(first, "abort")
        driver.add(prompt(80), 1)
        driver.run()
        assert driver.hit(prompt(80)) == 48
        pool = driver.kv.pools[1]
        pool.unregister([block for h in first.blocks.hashes[1:2] if (block := pool.find(h))])
        assert driver.hit(prompt(80)) in (0, 16)
        request = driver.add(prompt(80), 3, fields=MOE)
        driver.run()
        driver.check_rows(request)

    @pytest.mark.parametrize(("start", "hit"), [(0, 16), (15, 16), (16, 16), (31, 16), (32, 64), (79, 64), (80, 64)])
    def test_blocks_in_front_of_the_start_do_not_count(self, start: int, hit: int) -> None:
        """Only the rows of block 1 are missing."""
        driver = self.driver_with(80)
        gone = [key for key in driver.aux.retained._objects if key[1] == driver.requests[0].blocks.hashes[1]]
        driver.refuse(gone)
        assert driver.hit(prompt(80), start=start) == hit

    def test_every_field_asked_for_counts(self) -> None:
        driver = self.driver_with(80)
        driver.refuse([(HIDDEN.name, driver.requests[0].blocks.hashes[2], 0)])
        assert driver.hit(prompt(80), fields=MOE) == 64
        assert driver.hit(prompt(80), fields=BOTH) == 32

    def test_rows_of_other_weights_do_not_count(self) -> None:
        driver = self.driver_with(80)
        driver.scheduler.commit_version(1)
        assert driver.hit(prompt(80)) == 0
        driver.scheduler.commit_version(0)
        assert driver.hit(prompt(80)) == 64, "returning to earlier weights makes their rows reachable again"

    def test_a_shortened_prompt_is_computed_again_and_complete(self) -> None:
        driver = self.driver_with(40)
        request = driver.add(prompt(80), 4, fields=BOTH)
        driver.run()
        assert request.num_cached_tokens == 32
        assert status(request) == bytes([CACHED] * 32 + [CAPTURED] * 51)
        driver.check_rows(request)

    @pytest.mark.parametrize(
        ("external", "cap", "counts"), [(32, 79, 32), (32, 16, 0), (31, 79, 0), (32, 0, 0), (0, 79, 0)]
    )
    def test_an_external_hit_counts_whole_or_not_at_all(self, external: int, cap: int, counts: int) -> None:
        assert cap_external_hit(0, external, cap, 16) == counts
        assert cap_external_hit(16, external, cap + 16, 16) == counts

    def test_prompt_logprobs_read_no_cache_and_get_rows(self) -> None:
        driver = self.driver_with(80)
        request = driver.add(prompt(80), 3, fields=MOE, prompt_logprobs=0)
        driver.run()
        assert request.num_cached_tokens == 0
        driver.check_rows(request)

    def test_a_neighbour_of_the_same_step_shares_blocks(self) -> None:
        """The second reads objects that the first computes in the same step."""
        driver = CaptureDriver()
        requests = [driver.add(prompt(80), 4, fields=MOE) for _ in range(2)]
        driver.run()
        assert requests[1].num_cached_tokens == 64 and driver.captures.num_reads == 1
        for request in requests:
            driver.check_rows(request)
        driver.assert_nothing_left()
        driver.check_drained()


class TestPreemption:
    def preempted(self, late: bool = False) -> tuple[CaptureDriver, Request]:
        """A request preempted with step n in flight, whose plan n + 1 tells the worker that it ended (RE-25)."""
        driver = CaptureDriver(cache_config(full_group(4)), late=late, max_num_seqs=2)
        driver.add(prompt(16), 40)
        loser = driver.add(prompt(16, 1), 40, fields=MOE)
        while loser.status is not Status.WAITING or not loser.num_preemptions:
            driver.step(2)
        return driver, loser

    @pytest.mark.parametrize("late", [False, True])
    def test_output_in_flight_is_accepted_by_cursor(self, late: bool) -> None:
        """RE-23, RE-25."""
        driver = CaptureDriver(cache_config(full_group(4)), late=late, max_num_seqs=2)
        driver.add(prompt(16), 40)
        loser = driver.add(prompt(16, 1), 40, fields=MOE)
        while not loser.num_preemptions:
            driver.schedule()
            if not loser.num_preemptions:
                driver.apply()
                driver.schedule()
        assert loser.num_pending and loser.rows is not None
        held = loser.rows.cursor
        assert driver.in_flight[-1][0].plan.aux is not None or driver.scheduler.aux is not None
        while loser.num_pending:
            driver.apply()
        assert loser.rows.cursor == len(loser.token_ids) - 1 > held
        driver.check_rows(loser)
        driver.run(2)
        driver.check_rows(loser)
        assert RECOMPUTED not in status(loser)[:held], "what was held is not replaced"

    @pytest.mark.parametrize("depth", [1, 2])
    def test_rows_survive_two_preemptions(self, depth: int) -> None:
        """RE-41."""
        driver = CaptureDriver(max_num_batched_tokens=24)
        requests = [driver.add(prompt(30, family), 40, fields=MOE) for family in range(3)]
        for number in range(60):
            driver.step(depth)
            if number in (1, 9, 30):
                for request in list(driver.scheduler.running):
                    driver.scheduler._preempt(request)
        driver.run(depth)
        assert min(request.num_preemptions for request in requests) >= 2
        for request in requests:
            driver.check_rows(request)
        driver.assert_nothing_left()
        driver.check_drained()

    def test_on_resume_emission_starts_at_what_was_delivered(self) -> None:
        driver, loser = self.preempted()
        assert loser.rows is not None
        driver.run(2)
        begins = [b for plan in driver.worker.plans if plan.aux for b in plan.aux.begins]
        assert len(begins) == loser.num_preemptions + 1
        assert begins[1].emit_from >= 16
        driver.check_rows(loser)

    @pytest.mark.parametrize("scheduled", [True, False], ids=["second-prefill", "before-it"])
    def test_aborted_after_preemption_keeps_what_it_held(self, scheduled: bool) -> None:
        """RE-58."""
        driver = CaptureDriver(cache_config(full_group(4)), max_num_seqs=2, max_num_batched_tokens=18)
        driver.add(prompt(16), 33)
        loser = driver.add(prompt(16, 1), 40, fields=MOE)
        while not loser.num_preemptions:
            driver.step(2)
        while scheduled and loser.status is not Status.RUNNING:
            driver.step(2)
        while driver.in_flight:
            driver.apply()
        held = len(loser.token_ids) - 1
        assert loser.rows is not None and loser.rows.cursor == held >= 16
        driver.scheduler.finish(loser, "abort")
        driver.check_rows(loser)
        driver.run()
        driver.check_rows(loser)

    def test_rows_computed_and_not_delivered_are_told_as_recomputed(self) -> None:
        """Restarted in the middle of a prompt, without a prefix cache to come back to."""
        cache = cache_config(full_group(50), prefix_caching=False)
        driver = CaptureDriver(cache, max_num_batched_tokens=20)
        request = driver.add(prompt(50), 3, fields=MOE)
        driver.step()
        driver.scheduler.reset_prefix_cache(restart_running=True)
        driver.run()
        driver.check_rows(request)
        assert status(request) == bytes([RECOMPUTED] * 20 + [CAPTURED] * 32)

    def test_rows_planned_and_taken_back_were_never_computed(self) -> None:
        """The victim of a step that had planned it already: that row of it is not told as computed again."""
        cache = cache_config(full_group(4), prefix_caching=False)
        driver = CaptureDriver(cache, max_num_seqs=2, policy="priority")
        victim = driver.add(prompt(17), 12, fields=MOE, priority=1)
        driver.step()
        driver.add(prompt(30, 1), 12, priority=0)
        driver.run()
        assert victim.num_preemptions == 1
        driver.check_rows(victim)
        assert RECOMPUTED not in status(victim)

    def test_blocks_of_a_preempted_request_are_read_again(self) -> None:
        """The chunks computed before are in the prefix cache, and so are their rows."""
        driver = CaptureDriver(max_num_batched_tokens=32)
        request = driver.add(prompt(80), 3, fields=MOE)
        driver.step()
        driver.scheduler._preempt(request)
        driver.run()
        driver.check_rows(request)
        assert status(request) == bytes([CACHED] * 32 + [CAPTURED] * 50)

    @pytest.mark.parametrize("restart", [True, False], ids=["restart", "preempt"])
    def test_weights_committed_between_stay_visible(self, restart: bool) -> None:
        """RE-13: rows keep the routing of the time their token was sampled; what is computed later says so."""
        driver = CaptureDriver(cache_config(full_group(50), prefix_caching=False))
        request = driver.add(prompt(20), 6, fields=MOE)
        for _ in range(3):
            driver.step()
        driver.scheduler.commit_version(7)
        if restart:
            driver.scheduler.reset_prefix_cache(restart_running=True)
        else:
            driver.scheduler._preempt(request)
        driver.run()
        driver.check_rows(request)
        driver.check_versions(request)
        assert request.rows is not None
        assert request.rows.versions == ((22, 0), (3, 7))
        assert request.weight_versions(6) == ((0, 3, 0), (3, 6, 7))


class TestEnds:
    @pytest.mark.parametrize("late", [False, True])
    def test_eos_on_the_first_token_in_flight_keeps_all_rows(self, late: bool) -> None:
        """RE-40: the step behind it runs and is void; real tokens decide."""
        driver = CaptureDriver(late=late)
        probe = driver.add(prompt(20), 1)
        driver.run()
        eos = probe.token_ids[-1]
        request = driver.add(prompt(20), 9, fields=MOE, stop_ids={eos: None})
        driver.schedule()
        driver.schedule()
        driver.apply()
        assert request.finish_reason == "stop" and request.num_in_flight == 1
        driver.check_rows(request)
        driver.run(2)
        driver.check_rows(request)
        assert request.rows is not None and request.rows.count == 20

    def test_the_end_waits_for_the_next_plan(self) -> None:
        driver = CaptureDriver()
        request = driver.add(prompt(33), 2, fields=MOE)
        driver.run()
        assert driver.schedule() is None
        assert 0 in driver.captures.captures, "nobody has told the worker yet"
        driver.add([1], 1)
        plan = driver.step()
        assert plan is not None and [capture_id for capture_id, _ in ends(plan)] == [0]
        assert not driver.captures.captures
        driver.check_rows(request)

    def test_an_abort_returns_what_was_accepted(self) -> None:
        driver = CaptureDriver()
        request = driver.add(prompt(20), 30, fields=MOE)
        for _ in range(5):
            driver.step(2)
        driver.scheduler.finish(request, "abort")
        driver.check_rows(request)
        assert request.rows is not None and request.rows.count == 24

    @pytest.mark.parametrize("steps", [0, 1], ids=["before-the-first-step", "in-the-prompt"])
    def test_an_abort_before_the_first_token_has_an_outcome(self, steps: int) -> None:
        driver = CaptureDriver(max_num_batched_tokens=8)
        request = driver.add(prompt(20), 30, fields=MOE)
        for _ in range(steps):
            driver.step()
        driver.scheduler.finish(request, "abort")
        driver.check_rows(request)
        driver.assert_nothing_left()
        driver.check_drained()

    @pytest.mark.parametrize(("start", "max_tokens", "count"), [(20, 1, 0), (20, 3, 2), (7, 1, 13)])
    def test_start(self, start: int, max_tokens: int, count: int) -> None:
        driver = CaptureDriver()
        request = driver.add(prompt(20), max_tokens, fields=BOTH, start=start)
        driver.run()
        driver.check_rows(request)
        assert request.rows is not None and request.rows.count == count

    @pytest.mark.row("SAMPLE-ROUTED-EXPERTS", "a turn goes on where the rows of the last one ended")
    def test_the_next_turn_brings_the_absent_row(self) -> None:
        """RE-14: the last token of turn 1 has no row; fed in turn 2, it has."""
        driver = CaptureDriver()
        first = driver.add(prompt(20), 15, fields=MOE)
        driver.run()
        driver.check_rows(first)
        assert first.rows is not None
        held = first.rows.count
        assert held == 34
        second = driver.add([*first.token_ids, 5, 6], 4, fields=MOE, start=held)
        driver.run()
        driver.check_rows(second)
        assert second.num_cached_tokens == 32, "rows held already are not needed again"
        assert second.rows is not None and second.rows.count == len(second.token_ids) - 1 - held


class TestFailures:
    def test_a_gap_fails_the_rows_and_not_the_request(self) -> None:
        driver = CaptureDriver()
        request, other = driver.add(prompt(20), 6, fields=MOE), driver.add(prompt(20, 1), 6, fields=MOE)
        driver.step()
        driver.schedule()
        driver.in_flight[0][1].aux[0].start += 1  # type: ignore[union-attr]
        driver.run()
        assert request.finish_reason == "length" and request.num_output == 6
        assert request.rows is not None and request.rows.failure == "rows start at position 21, where 20 is next"
        driver.check_rows(other)
        assert driver.aux.stats.failures == 1

    def test_rows_that_do_not_come_fail(self) -> None:
        driver = CaptureDriver()
        request = driver.add(prompt(20), 6, fields=MOE)
        driver.schedule()
        driver.in_flight[0][1].aux.clear()  # type: ignore[union-attr]
        driver.run()
        assert request.num_output == 6
        assert (
            request.rows is not None
            and request.rows.failure is not None
            and "end at position 0" in request.rows.failure
        )

    def test_lost_rows_of_a_hit_fail_once_and_heal(self) -> None:
        """The store lost an object behind the scheduler's back: one request is told, the next one computes it again."""
        driver = CaptureDriver()
        driver.add(prompt(80), 2, fields=MOE)
        driver.run()
        driver.captures.stores[ROUTES.name].data.clear()
        request = driver.add(prompt(80), 6, fields=MOE)
        driver.run()
        assert request.num_output == 6
        assert request.rows is not None and request.rows.failure is not None and "lost" in request.rows.failure
        again = driver.add(prompt(80), 6, fields=MOE)
        driver.run()
        assert again.num_cached_tokens == 0
        driver.check_rows(again)
        driver.assert_nothing_left()
        driver.check_drained()

    def test_a_field_that_breaks_is_not_offered_to_others(self) -> None:
        driver = CaptureDriver()
        driver.captures.break_field = HIDDEN.name
        broken, whole = driver.add(prompt(80), 6, fields=BOTH), driver.add(prompt(80, 1), 6, fields=MOE)
        driver.run()
        driver.check_rows(whole)
        assert broken.rows is not None and broken.rows.failure == "rows of hidden_states are lost"
        assert driver.hit(prompt(80), fields=(HIDDEN.name,)) == 0
        long = driver.add(prompt(20, 2), 40, fields=BOTH)
        driver.run()
        assert long.num_output == 40
        assert hashes_sent(driver, 2)[-1] == 1, "after the loss nothing more is shared"

    @pytest.mark.parametrize("late", [False, True])
    def test_nothing_of_a_failed_step_is_found(self, late: bool) -> None:
        """A is in the failed step; B came later, hit A's blocks and starts over; its rows are its own."""
        driver = CaptureDriver(late=late)
        driver.worker.fail_at = lambda plan: PlannedFailure("planted")
        a = driver.add(prompt(80), 6, fields=MOE)
        driver.schedule()
        driver.worker.fail_at = lambda plan: None
        b = driver.add(prompt(80), 6, fields=MOE)
        driver.schedule()
        assert b.num_cached_tokens == 64
        driver.run(2)
        assert a.finish_reason == "error" and b.finish_reason == "length"
        driver.check_rows(b)
        c = driver.add([*prompt(80), 1], 2, fields=MOE)
        driver.run(2)
        assert c.num_cached_tokens == 80
        driver.check_rows(c)
        driver.assert_nothing_left()
        driver.check_drained()

    @pytest.mark.parametrize("late", [False, True])
    def test_nothing_built_on_a_failed_step_stays_in_the_store(self, late: bool) -> None:
        """B computed a block behind A's lost ones, in a step that did not fail, and is aborted before it starts over."""
        driver = CaptureDriver(late=late)
        driver.worker.fail_at = lambda plan: PlannedFailure("planted")
        driver.add(prompt(80), 6, fields=MOE)
        driver.schedule()
        driver.worker.fail_at = lambda plan: None
        b = driver.add([*prompt(80), *prompt(20, 1)], 6, fields=MOE)
        driver.schedule()
        driver.apply()
        driver.scheduler.finish(b, "abort")
        driver.run()
        driver.assert_nothing_left()
        driver.check_drained()

    def test_a_row_that_failed_leaves_no_objects(self) -> None:
        driver = CaptureDriver()
        driver.worker.row_error = lambda ids: "poisoned" if len(ids) > 82 else None
        request = driver.add(prompt(80), 6, fields=MOE)
        driver.run()
        assert request.finish_reason == "error"
        assert driver.hit(prompt(80)) == 0 and len(driver.aux.retained) == 0
        driver.assert_nothing_left()
        assert not driver.captures.stores[ROUTES.name].data

    def test_objects_that_others_brought_outlive_a_row_that_failed(self) -> None:
        """The second computes the same blocks (it reads no cache) and fails."""
        driver = CaptureDriver()
        driver.add(prompt(80), 2, fields=MOE)
        driver.run()
        driver.worker.row_error = lambda ids: "poisoned" if len(ids) > 80 else None
        failed = driver.add(prompt(80), 2, fields=MOE, prompt_logprobs=0)
        driver.run()
        assert failed.finish_reason == "error"
        assert driver.hit(prompt(80)) == 64

    def test_objects_that_others_need_outlive_a_row_that_failed(self) -> None:
        """The second has hit the first's blocks and is still in its prompt when the first fails."""
        driver = CaptureDriver(max_num_batched_tokens=82)
        driver.worker.row_error = lambda ids: "poisoned" if 81 <= len(ids) < 200 else None
        first = driver.add(prompt(80), 4, fields=MOE)
        driver.step()
        second = driver.add([*prompt(80), *prompt(220, 1)], 4, fields=MOE)
        driver.run()
        assert first.finish_reason == "error" and second.num_cached_tokens == 80
        driver.check_rows(second)
        driver.assert_nothing_left()
        driver.check_drained()

    @pytest.mark.parametrize("late", [False, True])
    def test_what_ended_while_its_last_step_failed_is_not_found(self, late: bool) -> None:
        """Step 0 ends the request; step 1, which was to complete its first block, fails."""
        driver = CaptureDriver(late=late)
        probe = driver.add(prompt(15, 1), 1)
        driver.run()
        eos = probe.token_ids[-1]
        request = driver.add(prompt(15, 1), 9, fields=MOE, stop_ids={eos: None})
        driver.schedule()
        driver.worker.fail_at = lambda plan: PlannedFailure("planted")
        driver.schedule()
        driver.worker.fail_at = lambda plan: None
        driver.run(2)
        assert request.finish_reason == "stop"
        driver.check_rows(request)
        driver.add([*request.token_ids, 1], 1)
        driver.run()
        again = driver.add([*request.token_ids, 1], 1, fields=MOE)
        driver.run()
        driver.check_rows(again)
        driver.assert_nothing_left()
        driver.check_drained()

    def test_refused_objects_count_as_missing(self) -> None:
        driver = CaptureDriver()
        request = driver.add(prompt(80), 2, fields=MOE)
        driver.schedule()
        key = (ROUTES.name, request.blocks.hashes[1], 0)
        driver.in_flight[0][1].aux_refused = [key]  # type: ignore[union-attr]
        driver.run()
        assert driver.hit(prompt(80)) == 16
        driver.assert_nothing_left()
        driver.check_drained()


class TestLateHashes:
    """Depth 2: the token that completes block 0 is drawn by step 0 and fed by step 1, before its id is known."""

    def test_it_is_sent_though_the_request_is_not_in_the_step(self) -> None:
        driver = CaptureDriver()
        request = driver.add(prompt(15), 2, fields=MOE)
        driver.add(prompt(15, 1), 9)
        driver.schedule()
        driver.schedule()
        driver.apply()
        step = driver.schedule()
        assert step is not None and request not in step.requests
        assert hashes_sent(driver) == [0, 0, 1]
        driver.run(2)
        assert driver.hit([*request.token_ids, 1]) == 16

    @pytest.mark.parametrize("preempted", [False, True])
    def test_it_goes_with_the_end(self, preempted: bool) -> None:
        driver = CaptureDriver()
        request = driver.add(prompt(15), 3 if preempted else 2, fields=MOE)
        driver.schedule()
        driver.schedule()
        driver.apply()
        if preempted:
            driver.scheduler._preempt(request)
        driver.run(2)
        driver.add([7], 1)
        driver.run()
        sent = [len(hashes) for plan in driver.worker.plans for one, hashes in ends(plan) if one == 0]
        assert sent == [1]
        assert preempted or driver.hit([*request.token_ids, 1]) == 16
        driver.check_rows(request)


class TestRetention:
    def test_no_more_than_fits(self) -> None:
        """Two objects: the heads of the sequences that run stay, their tails are not kept."""
        driver = CaptureDriver(num_objects=2)
        request = driver.add(prompt(80), 4, fields=MOE)
        driver.run()
        driver.check_rows(request)
        assert driver.hit(prompt(80)) == 32
        driver.assert_nothing_left()
        driver.check_drained()

    def test_the_oldest_leaves_first_and_tails_before_heads(self) -> None:
        driver = CaptureDriver(num_objects=7)
        for family in range(2):
            driver.add(prompt(49, family), 1, fields=MOE)
            driver.run()
        assert driver.hit(prompt(49)) == driver.hit(prompt(49, 1)) == 48
        driver.add(prompt(33, 2), 1, fields=MOE)
        driver.run()
        assert driver.hit(prompt(49)) == 32, "one object had to go: the tail of the oldest"
        assert driver.hit(prompt(49, 1)) == 48

    def test_a_hit_makes_young_again(self) -> None:
        driver = CaptureDriver(num_objects=6)
        for family in (0, 1, 0, 2):
            driver.add(prompt(49, family), 1, fields=MOE)
            driver.run()
        assert driver.hit(prompt(49)) == 48
        assert driver.hit(prompt(49, 1)) == 0

    def test_objects_whose_block_is_gone_leave_before_older_ones(self) -> None:
        driver = CaptureDriver(num_objects=6)
        for family in range(2):
            driver.add(prompt(49, family), 1, fields=MOE)
            driver.run()
        pool = driver.kv.pools[0]
        pool.unregister([block for h in driver.requests[1].blocks.hashes if (block := pool.find(h))])
        driver.add(prompt(49, 2), 1, fields=MOE)
        driver.run()
        assert driver.hit(prompt(49)) == 48

    def test_what_nobody_can_hit_is_released_at_once(self) -> None:
        """KV blocks of the group are fewer than blocks of the sequences: overwritten ones need no rows."""
        driver = CaptureDriver(cache_config(full_group(6)), max_num_seqs=1)
        for family in range(6):
            driver.add(prompt(60, family), 4, fields=MOE)
        driver.run()
        cached = sum(driver.kv.is_cached(key[1]) for key in driver.aux.retained._objects)
        assert 0 < cached <= 6
        driver.assert_nothing_left()
        driver.check_drained()


class TestWeights:
    @pytest.mark.parametrize("depth", [1, 2])
    def test_rows_and_tokens_say_their_version(self, depth: int) -> None:
        driver = CaptureDriver()
        request = driver.add(prompt(20), 12, fields=MOE)
        for _ in range(4):
            driver.step(depth)
        driver.scheduler.commit_version(3)
        driver.run(depth)
        driver.check_rows(request)
        driver.check_versions(request)
        assert request.rows is not None and [version for _, version in request.rows.versions] == [0, 3]

    def test_a_block_under_two_versions_is_not_shared(self) -> None:
        driver = CaptureDriver()
        request = driver.add(prompt(40), 40, fields=MOE)
        for _ in range(3):
            driver.step()
        driver.scheduler.commit_version(3)
        driver.run()
        driver.check_rows(request)
        keys = [key for key in driver.aux.retained._objects if key[0] == ROUTES.name]
        assert sorted((key[1], key[2]) for key in keys) == sorted((h, 0) for h in request.blocks.hashes[:2])

    def test_new_requests_publish_under_the_new_version(self) -> None:
        driver = CaptureDriver()
        for version in (0, 5):
            driver.scheduler.commit_version(version)
            request = driver.add(prompt(40), 2, fields=MOE)
            driver.run()
            driver.check_rows(request)
            assert driver.hit(prompt(40)) == 32
        assert {key[2] for key in driver.aux.retained._objects} == {0, 5}


class TestForks:
    def family(
        self, driver: CaptureDriver, length: int, choices: int, max_tokens: int = 6, start: int = 0
    ) -> list[Request]:
        first = driver.add(prompt(length), max_tokens, fields=MOE, start=start)
        assert first.rows is not None
        others = [
            new_request(prompt(length), max_tokens, arrival=100 + index, seed=50 + index) for index in range(1, choices)
        ]
        for index, other in enumerate(others, start=1):
            other.choice_index, other.outbox = index, first.outbox
            other.rows = first.rows.sibling()
        first.siblings = tuple(others)
        driver.requests += others
        return [first, *others]

    @pytest.mark.parametrize("depth", [1, 2])
    @pytest.mark.parametrize(("length", "start"), [(40, 0), (48, 0), (40, 37), (40, 40)])
    def test_choices_share_the_prompt_and_get_their_own_rows(self, depth: int, length: int, start: int) -> None:
        driver = CaptureDriver()
        choices = self.family(driver, length, 3, max_tokens=20, start=start)
        driver.run(depth)
        for request in choices:
            driver.check_rows(request)
        assert len({tuple(request.token_ids) for request in choices}) == 3
        driver.assert_nothing_left()
        driver.check_drained()

    @pytest.mark.parametrize("late", [False, True])
    def test_the_parent_is_aborted_before_its_rows_come(self, late: bool) -> None:
        driver = CaptureDriver(late=late)
        first, *others = self.family(driver, 40, 3)
        driver.schedule()
        driver.scheduler.finish(first, "abort")
        assert first.rows is not None
        first.rows.release()
        driver.run(2)
        for request in others:
            driver.check_rows(request)

    def test_choices_that_find_no_slot_run_later(self) -> None:
        driver = CaptureDriver(max_num_seqs=2)
        choices = self.family(driver, 40, 4)
        driver.run(2)
        for request in choices:
            driver.check_rows(request)
        begins = [begin for plan in driver.worker.plans if plan.aux for begin in plan.aux.begins]
        assert [begin.emit_from for begin in begins] == [0, 40, 40, 40]

    def test_the_step_before_the_fork_fails(self) -> None:
        """The parent's chunk is lost with it; the choices forked from a later step start over on their own."""
        driver = CaptureDriver(max_num_batched_tokens=32)
        first, *others = self.family(driver, 40, 3)
        driver.worker.fail_at = lambda plan: PlannedFailure("planted")
        driver.schedule()
        driver.worker.fail_at = lambda plan: None
        driver.schedule()
        driver.run(2)
        assert first.finish_reason == "error"
        for request in others:
            assert request.num_output == 6
            driver.check_rows(request)

    def test_weights_committed_before_the_fork_end_the_sharing(self) -> None:
        """The choices go on from blocks of two versions: theirs are not those of the new weights alone."""
        driver = CaptureDriver(max_num_batched_tokens=32)
        choices = self.family(driver, 40, 3, max_tokens=30)
        driver.step()
        driver.scheduler.commit_version(4)
        driver.run()
        for request in choices:
            driver.check_rows(request)
        assert {key[2] for key in driver.aux.retained._objects} == {0}

    def test_rows_that_the_parent_lost_are_lost_for_all(self) -> None:
        driver = CaptureDriver()
        choices = self.family(driver, 40, 2)
        driver.captures.break_field = ROUTES.name
        driver.run()
        for request in choices:
            assert request.num_output == 6
            assert request.rows is not None and request.rows.failure == "rows of moe_routes are lost"


def test_profiles_differ_in_size() -> None:
    assert len({profile.row_bytes for profile in PROFILES}) == 2


class TestMissingObjects:
    """The store says that an object is not there."""

    def test_it_is_not_offered_and_who_counts_on_it_keeps_it(self) -> None:
        objects = RetainedObjects({"f": 2}, lambda block_hash: True)
        key = ("f", b"1", 0)
        pinned = objects.pin(key)
        assert pinned is not None
        objects.missing(key, 0)
        assert key not in objects and objects.take_changes() == ([key], [], [])
        objects.unpin(pinned)
        assert objects.take_changes() == ([], [key], []) and len(objects) == 0

    def test_publishing_it_once_more_brings_it_back(self) -> None:
        objects = RetainedObjects({"f": 2}, lambda block_hash: True)
        key = ("f", b"1", 0)
        objects.publish(key)
        objects.missing(key, 0)
        objects.pin(key)
        assert key not in objects
        objects.step_id = 1
        objects.publish(key)
        assert key in objects
        objects.missing(key, 0)
        assert key in objects, "step 0 does not know what step 1 brought"

    def test_an_idle_one_is_released(self) -> None:
        objects = RetainedObjects({"f": 2}, lambda block_hash: True)
        key = ("f", b"1", 0)
        pinned = objects.pin(key)
        assert pinned is not None
        objects.unpin(pinned)
        objects.missing(key, 0)
        assert objects.take_changes() == ([], [], []) and key not in objects
