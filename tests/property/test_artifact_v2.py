"""Format v2: whatever a record holds reads back the same, in slices too; v1 and v2 of one generation agree bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from artifact_samples import artifacts
from infer.artifacts import GenerationArtifact, decode, encode, open_artifact
from infer.artifacts.v2.writer import encode_v2

CODECS = ("none", "zstd")
V2 = "generation_artifact_v2"


@pytest.mark.row("X-ARTIFACT-V2", "v1 and v2 of one generation agree bit for bit")
@given(artifact=artifacts(), codec=st.sampled_from(CODECS))
def test_v1_and_v2_of_one_generation_agree_bit_for_bit(artifact: GenerationArtifact, codec: Any) -> None:
    """Either way round: v1 to v2 to v1 gives the same bytes, and so does v2 to v1 to v2."""
    first, second = encode(artifact, codec), encode(artifact, codec, format=V2)
    one, other = decode(first), decode(second)
    assert one == other == artifact
    for mine, theirs in zip(one.choices, other.choices, strict=True):
        ids: Any = (mine.sequence_token_ids, theirs.sequence_token_ids)
        assert ids[0].dtype == ids[1].dtype and ids[0].tobytes() == ids[1].tobytes()
        if mine.selected_logprobs is not None and theirs.selected_logprobs is not None:
            values: Any = (mine.selected_logprobs.logprobs, theirs.selected_logprobs.logprobs)
            assert values[0].dtype == values[1].dtype and values[0].tobytes() == values[1].tobytes()
    assert encode(other, codec) == first
    assert encode(one, codec, format=V2) == second


@given(artifact=artifacts(), codec=st.sampled_from(CODECS))
def test_what_was_read_is_written_again_as_it_was(artifact: GenerationArtifact, codec: Any) -> None:
    data = encode(artifact, codec, format=V2)
    reader: Any = open_artifact(data)
    again = encode_v2(reader.record(), codec=codec)
    assert again.data == data
    assert reader.verify(sha256=again.sha256, actual_bytes=len(data)).body_sha256 == again.body_sha256
    other = encode_v2(reader.record(), codec="none" if codec == "zstd" else "zstd")
    assert other.body_sha256 == again.body_sha256
    for choice in artifact.choices:
        assert np.array_equal(reader.tokens(choice.choice_index), choice.sequence_token_ids)
