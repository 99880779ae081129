"""A weight that is packed for a platform stays in the memory it was loaded into."""

from __future__ import annotations

import torch

from infer.layers.parameter import moved_into


def test_what_fits_takes_the_old_place() -> None:
    old = torch.arange(96.0).view(16, 6)
    new = old.view(2, 8, 6).transpose(1, 2).contiguous()
    expected = new.clone()
    moved = moved_into(old, new)
    assert torch.equal(moved, expected)
    assert moved.data_ptr() == old.data_ptr() != new.data_ptr()


def test_what_does_not_fit_is_kept_as_it_is() -> None:
    old = torch.arange(96.0).view(16, 6)
    for new in (torch.ones(95), torch.ones(16, 6, dtype=torch.bfloat16), old.view(6, 16)):
        assert moved_into(old, new) is new
    strided = torch.arange(96.0).view(6, 16).t()
    new = strided.contiguous()
    assert moved_into(strided, new) is new
