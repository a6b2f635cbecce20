"""Packed rows: every sequence stands whole in its pass, common beginnings once, nothing else."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from model_runtime.packing import MIN_SHARED_TOKENS, pack

# Few different tokens and long common beginnings: branches at every depth.
beginnings = st.sampled_from([[], [1] * 12, [1] * 12 + [2] * 9, [1] * 5, [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]])
sequences = st.lists(
    st.builds(
        lambda beginning, rest: np.asarray([*beginning, *rest], dtype=np.int32),
        beginnings,
        st.lists(st.integers(1, 3), max_size=20),
    ),
    max_size=12,
)


def read_back(packed, index):
    return packed.ids_N[packed.places[index]]


@settings(deadline=None, max_examples=200)
@given(sequences=sequences, max_tokens=st.integers(1, 80), share=st.booleans())
def test_every_sequence_can_be_read_back_from_the_places_its_tokens_see(sequences, max_tokens, share):
    passes = pack(sequences, max_tokens=max_tokens, share_prefixes=share)
    found = sorted(i for packed in passes for i in packed.places)
    assert found == [i for i, s in enumerate(sequences) if len(s)]
    for packed in passes:
        assert packed.segments[-1].end == len(packed.ids_N)
        sees = {}  # token → what it sees, itself included
        for segment in packed.segments:
            before = [np.arange(*r) for r in segment.before]
            for n in range(segment.start, segment.end):
                sees[n] = np.concatenate([*before, np.arange(segment.start, n + 1)])
        for i, place in packed.places.items():
            np.testing.assert_array_equal(read_back(packed, i), sequences[i])
            np.testing.assert_array_equal(packed.position_N[place], np.arange(len(place)))
            np.testing.assert_array_equal(sees[place[-1]], place)
        assert len(packed.ids_N) <= max_tokens or len(packed.segments) == 1


@given(sequences=sequences, max_tokens=st.integers(16, 80))
def test_the_same_sequences_give_the_same_passes(sequences, max_tokens):
    one, other = (pack(sequences, max_tokens=max_tokens, share_prefixes=True) for _ in range(2))
    assert [p.ids_N.tolist() for p in one] == [p.ids_N.tolist() for p in other]
    assert [list(p.places) for p in one] == [list(p.places) for p in other]


def group(rng, prompt_tokens, response_tokens, members):
    prompt = rng.integers(1, 900, prompt_tokens)
    return [np.concatenate([prompt, rng.integers(1, 900, response_tokens)]) for _ in range(members)]


def test_a_groups_prompt_is_read_once_and_nothing_is_padding():
    rng = np.random.default_rng(0)
    batch = group(rng, 100, 20, 4) + group(rng, 50, 30, 4)
    (packed,) = pack(batch, max_tokens=1024, share_prefixes=True)
    assert len(packed.ids_N) == 100 + 4 * 20 + 50 + 4 * 30
    (apart,) = pack(batch, max_tokens=1024, share_prefixes=False)
    assert len(apart.ids_N) == sum(map(len, batch))


def test_a_system_prompt_common_to_groups_is_read_once_too():
    rng = np.random.default_rng(0)
    system = rng.integers(1, 900, 64)
    batch = [np.concatenate([system, s]) for s in group(rng, 20, 5, 3) + group(rng, 20, 5, 3)]
    (packed,) = pack(batch, max_tokens=1024, share_prefixes=True)
    assert len(packed.ids_N) == 64 + 2 * 20 + 6 * 5


def test_groups_that_fit_are_not_torn_apart():
    rng = np.random.default_rng(0)
    batch = [s for _ in range(5) for s in group(rng, 100, 10, 4)]
    passes = pack(batch, max_tokens=300, share_prefixes=True)
    assert [len(p.ids_N) for p in passes] == [280, 280, 140]


def test_a_group_larger_than_a_pass_reads_its_prompt_once_in_each():
    rng = np.random.default_rng(0)
    passes = pack(group(rng, 40, 30, 6), max_tokens=100, share_prefixes=True)
    assert [len(p.ids_N) for p in passes] == [100, 100, 100]


def test_short_common_beginnings_are_read_again():
    short = [np.asarray([*range(1, MIN_SHARED_TOKENS), last]) for last in (50, 60)]
    (packed,) = pack(short, max_tokens=100, share_prefixes=True)
    assert len(packed.ids_N) == 2 * MIN_SHARED_TOKENS
