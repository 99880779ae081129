"""What enters a block's hash: behaviour cases 33 to 35 as pure functions."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from infer.engine.kv_cache.prefix import (
    ExtraKey,
    block_hash,
    extend_chain,
    first_block_extra,
    multimodal_extra,
    root_hash,
)
from step_driver import StepDriver, new_request

IDS = list(range(40))


def chain(*, salt: str | None = None, adapter: str | None = None, model: str = "m") -> list[bytes]:
    hashes: list[bytes] = []
    extend_chain(hashes, IDS, 16, root_hash(model, "bfloat16"), first_block_extra(salt, adapter))
    return hashes


def image_chain(items: list[tuple[str, int, int]]) -> list[bytes]:
    parent, hashes = root_hash("m", "bfloat16"), []
    for start in (0, 16, 32):
        parent = block_hash(parent, IDS[start : start + 16], multimodal_extra(start, 16, items))
        hashes.append(parent)
    return hashes


def test_only_full_blocks_have_a_hash_and_a_chain_grows_in_place() -> None:
    hashes: list[bytes] = []
    extend_chain(hashes, IDS[:20], 16, root_hash("m", "bfloat16"))
    first = list(hashes)
    extend_chain(hashes, IDS, 16, root_hash("m", "bfloat16"))
    assert (len(first), len(hashes)) == (1, 2)
    assert hashes == chain()


def test_case_33_the_salt_is_hashed_into_the_first_block_and_the_chain_carries_it_on() -> None:
    first, second = chain(salt="salt1")
    assert first == block_hash(root_hash("m", "bfloat16"), IDS[:16], (("salt", "salt1"),))
    assert second == block_hash(first, IDS[16:32])
    assert not {first, second} & {*chain(), *chain(salt="salt2")}


@pytest.mark.row("KV-PREFIX-CACHE", "another image shares 0")
def test_case_34_an_image_and_its_offset_in_the_block_enter_the_hash() -> None:
    plain, cat, dog = image_chain([]), image_chain([("cat", 4, 20)]), image_chain([("dog", 4, 20)])
    assert not set(cat) & set(dog) and not set(cat) & set(plain)
    assert multimodal_extra(0, 16, [("cat", 4, 20)]) == (("mm", "cat", 4),)
    assert multimodal_extra(16, 16, [("cat", 4, 20)]) == (("mm", "cat", -12),), "it began in the block before"
    assert multimodal_extra(32, 16, [("cat", 4, 20)]) == (), "it ended before this block"
    assert image_chain([("cat", 4, 20)]) == cat
    moved = image_chain([("cat", 5, 20)])
    assert not set(moved) & set(cat)
    later = image_chain([("cat", 20, 5)])
    assert later[0] == plain[0] and later[1] != plain[1]


def test_case_35_an_adapter_is_its_content_and_never_collides_with_a_salt() -> None:
    assert chain(adapter="content-1")[0] != chain(adapter="content-2")[0], "same name, new path: new content id"
    assert chain(adapter="x")[0] != chain(salt="x")[0]
    assert first_block_extra("x", "y") != first_block_extra("y", "x")


def test_other_weights_have_another_root() -> None:
    assert not set(chain(model="m")) & set(chain(model="n"))


def test_a_lookup_costs_one_hash_per_block_and_a_repeated_one_none(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[int] = []

    def counting(parent: bytes, token_ids: Sequence[int], extra: Sequence[ExtraKey] = ()) -> bytes:
        hashed.append(len(token_ids))
        return block_hash(parent, token_ids, extra)

    monkeypatch.setattr("infer.engine.kv_cache.prefix.block_hash", counting)
    driver = StepDriver()
    driver.add(range(16 * 50 + 3), 20)
    driver.run()
    assert hashed == [16] * 51, "the prompt's 50 blocks once, and the block that the output filled"
    request = new_request(range(16 * 50 + 3))
    driver.kv.match(request)
    driver.kv.match(request)
    assert len(hashed) == 51 + 50
