"""The operations of sampling that a platform may have: random numbers and penalties, each against its definition.

Part of the kit of platforms; an entry that is None is passed over. On the calling thread.
"""

from __future__ import annotations

import torch

from infer.plugins.platform import Platform
from infer.testing.kits import expect

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
WORD = 0xFFFFFFFF
SEEDS = (0, 1, 2**32, 2**63 + 12345, 2**64 - 1)
POSITIONS = (0, 1, 31, 2**32 - 1, 2**33 + 7)


def check_uniforms(platform: Platform) -> None:
    """Of seeds and positions of up to 64 bits, to the last bit; also of none."""
    uniforms, device = platform.ops.uniforms, platform.device
    if uniforms is None:
        return
    pairs = [(seed, position) for seed in SEEDS for position in POSITIONS]
    with platform.step_context():
        seeds = torch.tensor([seed - (seed >> 63 << 64) for seed, _ in pairs], device=device)
        positions = torch.tensor([position for _, position in pairs], device=device)
        found = uniforms(seeds, positions)
        none = uniforms(seeds[:0], positions[:0])
        platform.synchronize()
    expect(found.dtype == torch.float64 and none.shape == (0,), f"uniforms: {found.dtype}, {tuple(none.shape)} of none")
    for (seed, position), number in zip(pairs, found.tolist(), strict=True):
        wanted = _uniform(seed, position)
        expect(number == wanted, f"the number of seed {seed} at position {position} is {number!r}, not {wanted!r}")


def _uniform(seed: int, position: int) -> float:
    """Philox4x32-10 (Salmon et al., 2011), in whole numbers."""
    counter = [position & WORD, position >> 32, 0, 0]
    key = [seed & WORD, seed >> 32]
    for _ in range(ROUNDS):
        first, second = MULTIPLIERS[0] * counter[0], MULTIPLIERS[1] * counter[2]
        counter = [
            second >> 32 ^ counter[1] ^ key[0],
            second & WORD,
            first >> 32 ^ counter[3] ^ key[1],
            first & WORD,
        ]
        key = [(one + weyl) & WORD for one, weyl in zip(key, WEYL, strict=True)]
    return (counter[0] << 21 | counter[1] >> 11) * 2.0**-53


def check_penalties(platform: Platform) -> None:
    """Only the given places change; a setting of one, zero and zero changes nothing, to the bit; masked logits stay masked."""
    penalties, device = platform.ops.penalties, platform.device
    if penalties is None:
        return
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 700, generator=generator) * 5
    logits[0, 5] = logits[1, 6] = -torch.inf
    places = torch.randperm(3 * 700, generator=generator)[:900]
    places = torch.cat((places[(places != 5) & (places != 706)], torch.tensor([5, 706])))
    counts = torch.randint(0, 4, (len(places),), generator=generator).float()
    settings = torch.arange(len(places)) % 3
    repetition, frequency, presence = torch.tensor([[1.0, 1.3, 0.5], [0.0, 0.25, -1.5], [0.0, 0.5, 2.0]])
    before, exact = logits.flatten(), logits.double().flatten()
    value, factor = exact[places], repetition.double()[settings]
    value = torch.where(value > 0, value / factor, value * factor)
    exact[places] = value - counts * frequency.double()[settings] - (counts > 0) * presence.double()[settings]
    with platform.step_context():
        found = logits.clone().to(device)
        given = (one.to(device) for one in (places, counts, settings, repetition, frequency, presence))
        penalties(found, *given)
        penalties(
            found,
            *(one.to(device) for one in (places[:0], counts[:0], settings[:0])),
            *[one.to(device) for one in (repetition, frequency, presence)],
        )
        platform.synchronize()
    result = found.cpu().flatten()
    same = torch.ones(len(result), dtype=torch.bool)
    same[places[settings != 0]] = False
    expect(torch.equal(result[same], before[same]), "penalties change logits that have none")
    masked = exact.isinf()
    expect(torch.equal(result[masked].double(), exact[masked]), "penalties: a masked logit is no longer masked")
    error = (result.double() - exact)[~masked].abs().max().item()
    expect(error <= 1e-5, f"penalties: off by {error:.2e}")
