"""`generate`, `stream` and `generate_many` over a scripted model: texts, deltas, choices, stop strings, deadlines, queues."""

from __future__ import annotations

import anyio
import pytest

from infer import Delta, QueueFullError, SamplingParams
from infer.config.model import GenerationDefaults
from infer.engine.engine import Engine
from infer.errors import InvalidRequestError
from infer.testing.fake_engine import EOS, fake_engine
from infer.testing.fake_executor import FakeWorker
from served import Script, answer, answer_text, letters, letters_engine, settings, wait_until_idle

pytestmark = pytest.mark.anyio


async def test_generate_answers_with_everything_in_place() -> None:
    async with letters_engine() as engine:
        done = await engine.generate("abc", SamplingParams(max_tokens=9, seed=5), request_id="mine")
        assert done.text == answer_text("abc", 9, 5)
        assert done.token_ids == tuple(answer("abc", 9, 5))
        assert (done.finish_reason, done.stop_reason, done.seed) == ("length", None, 5)
        assert (done.request_id, done.prompt_token_ids) == ("mine", tuple(b"abc"))
        assert (done.usage.prompt_tokens, done.usage.output_tokens, done.usage.cached_tokens) == (3, 9, 0)
        assert done.logprobs is None and done.prompt_logprobs is None and done.artifact is None
        assert done.timings is not None and 0 <= done.timings.queued <= done.timings.total
        assert done.sampling.seed == 5
        await wait_until_idle(engine)


async def test_text_ids_and_messages_are_prompts() -> None:
    async with letters_engine() as engine:
        params = SamplingParams(max_tokens=4, seed=1)
        by_text = await engine.generate("hello", params)
        by_ids = await engine.generate(list(b"hello"), params)
        by_chat = await engine.generate([{"role": "user", "content": "hello"}], params)
        assert by_text.token_ids == by_ids.token_ids
        assert bytes(by_chat.prompt_token_ids) == b"<user>hello\n<assistant>"


async def test_without_a_seed_one_is_drawn_and_told() -> None:
    async with letters_engine() as engine:
        first = await engine.generate("x", SamplingParams(max_tokens=4))
        second = await engine.generate("x", SamplingParams(max_tokens=4))
        assert first.seed != second.seed and first.sampling.seed == first.seed
        assert list(first.token_ids) == answer("x", 4, first.seed)


@pytest.mark.parametrize("max_tokens", [1, 7, 40])
async def test_deltas_add_up_to_the_result(max_tokens: int) -> None:
    async with letters_engine() as engine:
        params = SamplingParams(max_tokens=max_tokens, seed=3, logprobs=0)
        deltas: list[Delta] = []
        async with engine.stream("prompt", params) as stream:
            async for delta in stream:
                deltas.append(delta)
        assert "".join(delta.text for delta in deltas) == stream.result.text == answer_text("prompt", max_tokens, 3)
        assert sum((delta.token_ids for delta in deltas), ()) == stream.result.token_ids
        entries = [entry for delta in deltas for entry in delta.logprobs or ()]
        assert tuple(entries) == stream.result.logprobs
        assert [entry.token_id for entry in entries] == list(stream.result.token_ids)
        assert [delta.finish_reason for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
        assert deltas[-1].finish_reason == "length"


@pytest.mark.row("ENG-SCHED-KNOBS", "stream_interval=4 gives ceil(n/4) chunks whose concatenation equals interval 1")
@pytest.mark.parametrize("count", [1, 4, 10, 12])
async def test_stream_interval(count: int) -> None:
    texts = {}
    for interval in (1, 4):
        config = settings(stream_interval=interval, in_flight_depth=1)
        async with fake_engine(letters, config, latency=0.001) as engine:  # the reader keeps up
            chunks = []
            async with engine.stream("abc", SamplingParams(max_tokens=count, seed=2)) as stream:
                async for delta in stream:
                    chunks.append(delta.text)
            texts[interval] = "".join(chunks)
            assert len(chunks) == -(-count // interval)
    assert texts[1] == texts[4] == answer_text("abc", count, 2)


@pytest.mark.row("SAMPLE-N", "n=4 with seed s equals four requests with seeds s..s+3, prompt computed once, indexed")
async def test_n_choices_are_the_requests_with_the_following_seeds() -> None:
    workers: list[FakeWorker] = []
    engine = fake_engine(letters, settings(), on_worker=workers.append)
    async with engine:
        prompt = "p" * 50
        done = await engine.generate(prompt, SamplingParams(max_tokens=6, seed=10, n=4))
        computed = sum(plan.num_tokens for plan in workers[0].plans)
        assert [choice.index for choice in done.choices] == [0, 1, 2, 3]
        assert [choice.seed for choice in done.choices] == [10, 11, 12, 13]
        assert [list(choice.token_ids) for choice in done.choices] == [answer(prompt, 6, 10 + i) for i in range(4)]
        assert computed == 50 + 4 * 5, "the prompt once, then one row per choice and step"
        assert done.usage.output_tokens == 24
        assert (done.text, done.token_ids) == (done.choices[0].text, done.choices[0].token_ids)


async def test_streamed_choices_are_told_apart() -> None:
    async with letters_engine() as engine:
        texts = ["", "", ""]
        async with engine.stream("p" * 20, SamplingParams(max_tokens=5, seed=10, n=3)) as stream:
            async for delta in stream:
                texts[delta.choice_index] += delta.text
        assert texts == [choice.text for choice in stream.result.choices]
        assert texts == [answer_text("p" * 20, 5, seed) for seed in (10, 11, 12)]


async def test_generate_many_keeps_the_order_and_bounds_what_runs_at_once() -> None:
    async with letters_engine() as engine:
        most = 0

        async def watch() -> None:
            nonlocal most
            while True:
                most = max(most, engine.statistics().running + engine.statistics().waiting)
                await anyio.lowlevel.checkpoint()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(watch)
            prompts = [f"prompt {index}" for index in range(20)]
            params = [SamplingParams(max_tokens=1 + index % 5, seed=index) for index in range(20)]
            done = await engine.generate_many(prompts, params, max_concurrent=3)
            tasks.cancel_scope.cancel()
        assert [one.text for one in done] == [answer_text(f"prompt {i}", 1 + i % 5, i) for i in range(20)]
        assert 0 < most <= 3
        assert await engine.generate_many([]) == []


async def test_the_first_failure_of_many_is_raised_and_the_rest_is_freed() -> None:
    async with letters_engine() as engine:
        with pytest.raises(InvalidRequestError, match="token id"):
            await engine.generate_many(["a", [99999], "b"], SamplingParams(max_tokens=500))
        await wait_until_idle(engine)
        with pytest.raises(InvalidRequestError, match="2 prompts but 1 params"):
            await engine.generate_many(["a", "b"], [SamplingParams()])


async def test_abort_gives_the_partial_result() -> None:
    async with letters_engine() as engine:
        async with engine.stream("abc", SamplingParams(max_tokens=1000, seed=1), request_id="r") as stream:
            first = await anext(stream)
            assert engine.abort("r")
            async for _ in stream:
                pass
        assert stream.result.finish_reason == "abort"
        assert stream.result.token_ids[:1] == first.token_ids[:1]
        assert list(stream.result.token_ids) == answer("abc", len(stream.result.token_ids), 1)
        assert not engine.abort("r") and not engine.abort("unknown")
        await wait_until_idle(engine)


async def test_a_request_name_is_free_again_after_its_end_and_not_before() -> None:
    async with letters_engine() as engine:
        params = SamplingParams(max_tokens=50, seed=1)
        async with engine.stream("abc", params, request_id="r"):
            with pytest.raises(InvalidRequestError, match="running already"):
                await engine.generate("abc", params, request_id="r")
        assert (await engine.generate("abc", params, request_id="r")).finish_reason == "length"


async def test_names_made_up_by_the_engine_avoid_those_of_callers() -> None:
    async with letters_engine() as engine:
        params = SamplingParams(max_tokens=200, seed=1)
        async with engine.stream("abc", params, request_id="request-0") as mine, engine.stream("abd", params) as other:
            assert other.request_id != mine.request_id
            assert engine.abort("request-0")
            async for _ in other:
                pass
            assert other.result.finish_reason == "length"


async def test_long_prompts_of_one_name_are_not_both_taken() -> None:
    """Long texts are tokenized on a thread: both calls are past the first check before either is queued."""
    async with letters_engine(cache={"num_blocks": 4000}) as engine:
        outcomes: list[str] = []

        async def one() -> None:
            try:
                await engine.generate("x" * 1000, SamplingParams(max_tokens=500), request_id="same")
                outcomes.append("done")
            except InvalidRequestError:
                outcomes.append("refused")

        plain, entered = engine._admission.prompts.encode_text, list[str]()

        async def slow(text: str, *, add_special_tokens: bool) -> list[int]:
            entered.append(text)
            while len(entered) < 2:
                await anyio.lowlevel.checkpoint()
            return await plain(text, add_special_tokens=add_special_tokens)

        engine._admission.prompts.encode_text = slow  # type: ignore[method-assign]
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(one)
            tasks.start_soon(one)
        assert sorted(outcomes) == ["done", "refused"]


@pytest.mark.row("X-DEADLINE", "a late request ends with what it has and its own reason")
async def test_a_deadline_gives_the_partial_result() -> None:
    async with fake_engine(letters, settings(), latency=0.005) as engine:
        done = await engine.generate("abc", SamplingParams(max_tokens=1000, seed=1), deadline=0.05)
        assert done.finish_reason == "deadline"
        assert 0 < len(done.token_ids) < 1000
        assert list(done.token_ids) == answer("abc", len(done.token_ids), 1)
        late = await engine.generate("abc", SamplingParams(max_tokens=1000), deadline=1e-9)
        assert (late.finish_reason, late.token_ids, late.text) == ("deadline", (), "")
        await wait_until_idle(engine)


async def test_a_full_queue_refuses_with_a_time_to_retry() -> None:
    async with letters_engine(max_num_seqs=1, max_num_waiting=2) as engine:
        params = SamplingParams(max_tokens=1000)
        async with engine.stream("a", params) as running, engine.stream("b", params), engine.stream("c", params):
            await anext(running)
            with pytest.raises(QueueFullError, match="max_num_waiting=2") as refused:
                await engine.generate("d", params)
            assert refused.value.retry_after > 0
        await wait_until_idle(engine)
        assert (await engine.generate("d", SamplingParams(max_tokens=2))).finish_reason == "length"


@pytest.mark.parametrize("limit", [0, 1])
async def test_a_queue_limit_counts_those_who_wait_not_those_who_can_start(limit: int) -> None:
    async with letters_engine(max_num_seqs=4, max_num_waiting=limit) as engine:
        done = await engine.generate_many([f"prompt {i}" for i in range(4)], SamplingParams(max_tokens=20))
        assert [one.finish_reason for one in done] == ["length"] * 4


async def test_generation_defaults_apply_where_the_caller_is_silent_and_are_told() -> None:
    defaults = GenerationDefaults(values={"temperature": 0.5, "top_k": 7})
    async with letters_engine(generation=defaults) as engine:
        done = await engine.generate("x", SamplingParams(max_tokens=1, top_k=3))
        assert (done.sampling.temperature, done.sampling.top_k) == (0.5, 3)
        assert done.sampling_defaults == {"temperature": 0.5}


STOPS = [
    # stop, include, text, tokens kept
    ("cd", False, "ab", 4),
    ("cd", True, "abcd", 4),
    (["zz", "cde"], False, "ab", 5),
    ("f", False, "abcde", 6),
]


@pytest.mark.parametrize(("stop", "include", "text", "kept"), STOPS)
@pytest.mark.parametrize("streamed", [True, False])
async def test_case_54_a_stop_string_trims_text_tokens_and_logprobs_alike(
    stop: str, include: bool, text: str, kept: int, streamed: bool
) -> None:
    async with fake_engine(Script("abcdefgh"), settings()) as engine:
        params = SamplingParams(max_tokens=8, stop=stop, include_stop=include, logprobs=0)
        if streamed:
            async with engine.stream("p", params) as stream:
                seen = [delta async for delta in stream]
            done = stream.result
            assert "".join(delta.text for delta in seen) == text
            assert sum((delta.token_ids for delta in seen), ()) == done.token_ids
        else:
            done = await engine.generate("p", params)
        assert (done.text, done.token_ids) == (text, tuple(b"abcdefgh"[:kept]))
        assert done.logprobs is not None and len(done.logprobs) == kept
        assert (done.finish_reason, done.stop_reason) == ("stop", stop if isinstance(stop, str) else "cde")
        assert done.usage.output_tokens == kept
        await wait_until_idle(engine)


async def test_case_54_also_when_the_engine_had_stopped_on_eos_in_the_same_update() -> None:
    """The reader sleeps while the whole answer and its EOS arrive; the stop string inside it still wins."""
    async with fake_engine(Script("abcdef"), settings()) as engine:
        async with engine.stream("p", SamplingParams(stop="cd", logprobs=0)) as stream:
            while engine.statistics().running or not engine.statistics().finished_requests:
                await anyio.lowlevel.checkpoint()
            seen = [delta async for delta in stream]
        done = stream.result
        assert len(seen) == 1
        assert (done.text, done.token_ids, done.stop_reason) == ("ab", tuple(b"abcd"), "cd")
        assert done.logprobs is not None and len(done.logprobs) == 4


async def test_eos_ends_without_text_and_stays_among_the_ids() -> None:
    async with fake_engine(Script("hi"), settings()) as engine:
        done = await engine.generate("p")
        assert (done.text, done.token_ids, done.finish_reason) == ("hi", (*b"hi", EOS), "stop")
        told = await engine.generate("p", SamplingParams(stop_token_ids=(ord("i"),)))
        assert (told.text, told.stop_reason) == ("h", ord("i"))
        assert told.token_ids == tuple(b"hi")


async def test_case_55_a_slow_reader_gets_merged_deltas_and_loses_nothing() -> None:
    async with letters_engine() as engine:
        async with engine.stream("abc", SamplingParams(max_tokens=30, seed=4, logprobs=0)) as stream:
            deltas = [await anext(stream)]
            while engine.statistics().running:
                await anyio.lowlevel.checkpoint()
            deltas += [delta async for delta in stream]
        assert len(deltas) == 2
        assert sum((delta.token_ids for delta in deltas), ()) == tuple(answer("abc", 30, 4))
        assert sum(len(delta.logprobs or ()) for delta in deltas) == 30
        assert deltas[-1].finish_reason == "length"
        assert stream.result.text == "".join(delta.text for delta in deltas)


async def test_prompt_logprobs_have_one_entry_per_prompt_token() -> None:
    async with letters_engine(max_num_batched_tokens=16) as engine:
        prompt = "a prompt that needs several chunks to be computed"
        for _ in range(2):
            done = await engine.generate(prompt, SamplingParams(max_tokens=3, prompt_logprobs=0, n=2))
            assert done.prompt_logprobs is not None
            assert done.prompt_logprobs[0] is None
            assert bytes(entry.token_id for entry in done.prompt_logprobs[1:] if entry) == prompt.encode()[1:]


async def test_the_cache_is_reset_between_requests_and_not_during_one() -> None:
    async with letters_engine() as engine:
        prompt = "x" * 100
        params = SamplingParams(max_tokens=3, seed=1)
        await engine.generate(prompt, params)
        assert (await engine.generate(prompt, params)).usage.cached_tokens == 96
        async with engine.stream(prompt, SamplingParams(max_tokens=500)) as stream:
            await anext(stream)
            assert not await engine.reset_prefix_cache()
        await wait_until_idle(engine)
        assert await engine.reset_prefix_cache()
        assert (await engine.generate(prompt, params)).usage.cached_tokens == 0


async def test_salts_share_nothing() -> None:
    async with letters_engine() as engine:
        cached = []
        for salt in ("a", "a", "b", None):
            done = await engine.generate("x" * 100, SamplingParams(max_tokens=1, seed=1), cache_salt=salt)
            cached.append(done.usage.cached_tokens)
        assert cached == [0, 96, 0, 0]


@pytest.mark.row("ENG-PRIORITY-SCHED", "the priority field reaches the queue")
@pytest.mark.parametrize(("policy", "order"), [("priority", ["high", "low"]), ("fcfs", ["low", "high"])])
async def test_priority_decides_who_is_next(policy: str, order: list[str]) -> None:
    async with letters_engine(policy=policy, max_num_seqs=1) as engine:
        finished: list[str] = []

        async def one(name: str, priority: int) -> None:
            await engine.generate(name, SamplingParams(max_tokens=5), priority=priority)
            finished.append(name)

        async def waiting(count: int) -> None:
            while engine.statistics().waiting < count:
                await anyio.lowlevel.checkpoint()

        async with engine.stream("first", SamplingParams(max_tokens=1000)) as first, anyio.create_task_group() as tasks:
            await anext(first)
            tasks.start_soon(one, "low", 9)
            await waiting(1)
            tasks.start_soon(one, "high", 1)
            await waiting(2)
            engine.abort(first.request_id)
        assert finished == order


async def test_a_user_scheduler_is_used_and_a_wrong_one_refused() -> None:
    from infer.errors import ConfigError

    async with letters_engine(scheduler_class="schedulers:LastComeFirstServed") as engine:
        assert type(engine._parts.scheduler).__name__ == "LastComeFirstServed"  # type: ignore[union-attr]
        assert (await engine.generate("a", SamplingParams(max_tokens=2))).finish_reason == "length"
    for wrong in ("served:letters", "no_such_module:X", "schedulers"):
        with pytest.raises(ConfigError, match="scheduler_class") as refused:
            async with letters_engine(scheduler_class=wrong):
                pass
        assert refused.value.fields == ("scheduler.scheduler_class",)


@pytest.mark.row(
    "ENG-ASYNC-SCHED", "chunks, aborts, stop strings, preemption and 1-token outputs: same tokens on and off"
)
async def test_a_stress_mix_is_equal_at_depth_one_and_two() -> None:
    """Every answer is compared; an aborted one up to where the shorter of the two was cut."""
    outcomes: dict[int, list[tuple[int, ...]]] = {}
    for depth in (1, 2):
        cache = {"num_blocks": 20, "watermark": 0.0}
        async with letters_engine(
            cache=cache, in_flight_depth=depth, max_num_batched_tokens=24, max_num_seqs=8
        ) as engine:
            results: dict[int, tuple[int, ...]] = {}

            async def user(engine: Engine, number: int, results: dict[int, tuple[int, ...]]) -> None:
                stop = bytes(answer("u" * (10 + 9 * number), 12, number)[9:11]).decode()
                params = SamplingParams(
                    max_tokens=1 if number % 4 == 0 else 40,
                    seed=number,
                    stop=stop if number % 4 == 1 else (),
                )
                async with engine.stream("u" * (10 + 9 * number), params) as stream:
                    async for _ in stream:
                        if number % 4 == 2 and engine.statistics().preemptions:
                            engine.abort(stream.request_id)
                results[number] = stream.result.token_ids

            async with anyio.create_task_group() as tasks:
                for number in range(12):
                    tasks.start_soon(user, engine, number, results)
            assert engine.statistics().preemptions > 0
            await wait_until_idle(engine)
        outcomes[depth] = [results[number] for number in range(12)]
    for number, (one, two) in enumerate(zip(outcomes[1], outcomes[2], strict=True)):
        if number % 4 == 2:
            shorter = min(len(one), len(two))
            one, two = one[:shorter], two[:shorter]
        assert one == two


@pytest.mark.row("SERVE-CPP-API", "runs inside a running event loop and leaves nothing behind")
async def test_many_users_of_one_engine_get_their_own_answers() -> None:
    async with letters_engine(max_num_seqs=4, cache={"num_blocks": 24}) as engine:
        answers: dict[int, str] = {}

        async def user(number: int) -> None:
            for turn in range(3):
                prompt = f"{number}:{turn}:" + "z" * (7 * number)
                done = await engine.generate(prompt, SamplingParams(max_tokens=10, seed=number))
                answers[number, turn] = done.text == answer_text(prompt, 10, number)  # type: ignore[index]

        async with anyio.create_task_group() as tasks:
            for number in range(12):
                tasks.start_soon(user, number)
        assert list(answers.values()) == [True] * 36
        assert isinstance(engine, Engine)
        await wait_until_idle(engine)
