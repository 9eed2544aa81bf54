import torch

from oqc import seeding


def test_streams_are_keyed_by_role():
    keys = {seeding.key(s, *r) for s in range(3) for r in (("host",), ("branch",), ("shuffle",), ("host", "a"))}
    assert len(keys) == 12
    assert all(0 <= k < 2**63 for k in keys)
    assert torch.equal(
        torch.rand(3, generator=seeding.generator(0, "host")), torch.rand(3, generator=seeding.generator(0, "host"))
    )


def test_mix_is_splitmix64():
    """The finaliser applied to the first two states of the published generator started at 0."""
    got = [int(x) % 2**64 for x in seeding.mix(torch.tensor([1, 2]))]
    assert got == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4]


def test_uniform_is_uniform_and_stateless():
    steps, places = torch.arange(200)[:, None], torch.arange(500)
    x = seeding.uniform(seeding.key(0, "augment"), steps, places)
    assert x.shape == (200, 500)
    assert x.min() >= 0
    assert x.max() < 1
    counts = torch.histc(x, 50, 0, 1)
    chi2 = ((counts - 2000) ** 2 / 2000).sum()
    assert chi2 < 95  # 49 degrees of freedom: p about 1e-4
    assert abs(torch.corrcoef(torch.stack([x[:-1].flatten(), x[1:].flatten()]))[0, 1]) < 0.02
    assert torch.equal(seeding.uniform(seeding.key(0, "augment"), steps[7], places), x[7])
