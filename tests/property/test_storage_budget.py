"""The byte budget under any interleaving of waits, grants, releases and cancellations."""

from __future__ import annotations

import random

import anyio
import anyio.lowlevel
from hypothesis import given, settings
from hypothesis import strategies as st

from infer.artifacts.budget import ByteBudget


@given(seed=st.integers(0, 2**32), total=st.integers(1, 40), backend=st.sampled_from(["asyncio", "trio"]))
@settings(max_examples=30)
def test_never_above_the_total_and_nothing_leaks(seed: int, total: int, backend: str) -> None:
    """BR-08."""
    chance = random.Random(seed)
    budget = ByteBudget(total)
    served: list[int] = []

    async def one(number: int) -> None:
        amount = chance.randrange(0, total + 3)
        with anyio.move_on_after(chance.choice([0, 0.001, 5])):
            granted = await budget.acquire(amount, chance.choice([0, 0.001, 5]))
            assert granted or amount >= 0
            if granted:
                assert amount <= total
                served.append(number)
                try:
                    assert 0 <= budget.reserved <= total
                    for _ in range(chance.randrange(4)):
                        await anyio.lowlevel.checkpoint()
                finally:
                    budget.release(amount)
        assert 0 <= budget.reserved <= total

    async def main() -> None:
        async with anyio.create_task_group() as tasks:
            for number in range(12):
                tasks.start_soon(one, number)

    anyio.run(main, backend=backend)
    assert budget.reserved == 0
    assert not budget._line


def test_in_order_of_arrival() -> None:
    """A large one at the head is not overtaken, and when it gives up the next is served."""
    order: list[str] = []

    async def main() -> None:
        budget = ByteBudget(10)
        assert await budget.acquire(8, 1)

        async def wait(name: str, amount: int, seconds: float) -> None:
            if await budget.acquire(amount, seconds):
                order.append(name)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait, "large", 10, 0.05)
            await anyio.wait_all_tasks_blocked()
            tasks.start_soon(wait, "small", 2, 5)
            await anyio.wait_all_tasks_blocked()
            assert order == []
        assert order == ["small"]

    anyio.run(main, backend="trio")
