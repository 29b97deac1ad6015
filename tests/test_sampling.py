import random
from collections import Counter
from types import SimpleNamespace

import pytest
from require import require

np = require("numpy")

import sampling  # noqa: E402

DRAWS = 4000


def params(temperature=1.0, top_k=0, top_p=1.0, repetition_penalty=1.0):
    return SimpleNamespace(
        temperature=temperature, top_k=top_k, top_p=top_p, repetition_penalty=repetition_penalty
    )


def lines(size, seed=0):
    """A peaked line, a flat one, one with many equals, one far from zero."""
    noise = np.random.default_rng(seed)
    peaked = noise.normal(0, 4, size)
    yield from (peaked, noise.normal(0, 0.01, size), np.round(peaked), peaked + 1e4)


def reference(line, p, history=()):
    """Every id's probability, by sorting everything and in the order of the definitions."""
    scores = line.astype(np.float32)
    for token in set(history):
        score = scores[token]
        scores[token] = score / p.repetition_penalty if score > 0 else score * p.repetition_penalty
    scores = scores.astype(np.float64)
    scores = (scores - scores.max()) / p.temperature
    order = sorted(range(len(scores)), key=lambda i: (-scores[i], i))
    if p.top_k:
        order = order[: p.top_k]
    mass = np.exp(scores[order])
    mass /= mass.sum()
    below = np.cumsum(mass) - mass  # What likelier ids have: the one that crosses p stays.
    probabilities = np.zeros(len(scores))
    for token, each, before in zip(order, mass, below, strict=True):
        if before < p.top_p or p.top_p >= 1:
            probabilities[token] = each
    return probabilities / probabilities.sum()


CASES = [
    params(),
    params(temperature=0.3),
    params(temperature=4.0),
    params(top_k=1),
    params(top_k=7),
    params(top_k=10**9),
    params(top_p=0.5),
    params(top_p=0.95),
    params(top_p=0.999999),
    params(top_p=1e-9),
    params(temperature=0.7, top_k=20, top_p=0.8),
    params(repetition_penalty=1.3, top_p=0.9),
    params(repetition_penalty=0.8, top_k=5),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(vars(case)))
def test_the_distribution_is_the_definition_s(case):
    """The inverse CDF, met at the middle of each id's interval and beside its borders."""
    history = [3, 3, 17, 40]
    for line in lines(300):
        expected = reference(line, case, history)
        borders = np.cumsum(expected)
        for token in np.flatnonzero(expected > 1e-4):
            low, high = borders[token] - expected[token], borders[token]
            for draw in (low + 1e-5, (low + high) / 2, high - 1e-5):
                found = sampling.choose(line.astype(np.float32), case, history, Fixed(draw))
                assert found == token


class Fixed(random.Random):
    """A generator whose next number is known."""

    def __init__(self, value):
        super().__init__(0)
        self.value = value

    def random(self):
        return self.value


@pytest.mark.parametrize("top_k", [0, 1, 50, 5000])
@pytest.mark.parametrize("top_p", [0.1, 0.9, 0.99999, 1.0])
def test_what_is_kept_of_a_whole_vocabulary(top_k, top_p):
    for line in lines(49152, seed=1):
        mass = np.exp((line - line.max()).astype(np.float32))
        order = np.argsort(-mass, kind="stable")
        if top_k:
            order = order[:top_k]
        share = np.cumsum(mass[order], dtype=np.float64)
        share /= share[-1]
        count = len(order) if top_p == 1 else int(np.searchsorted(share, top_p)) + 1
        found = sampling.kept(mass, top_k, top_p)
        if found is None:
            assert count == len(mass)
        else:
            assert abs(len(found) - count) <= 1  # The share's last bits may decide one id.
            assert set(found) <= set(order[: count + 1])
            assert list(found) == sorted(found)


def test_frequencies_match_probabilities():
    line = next(lines(30)).astype(np.float32)
    case = params(temperature=2.0, top_p=0.9)
    draw = random.Random(11)
    counts = Counter(sampling.choose(line, case, [], draw) for _ in range(DRAWS))
    expected = reference(line, case)
    assert set(counts) <= set(np.flatnonzero(expected))
    for token, probability in enumerate(expected):
        deviation = (probability * (1 - probability) * DRAWS) ** 0.5
        assert abs(counts[token] - probability * DRAWS) <= 5 * deviation


def test_one_number_is_drawn_for_a_token_and_none_for_a_greedy_one():
    line = next(lines(100)).astype(np.float32)
    draw, same = random.Random(5), random.Random(5)
    for case in CASES:
        sampling.choose(line, case, [1], draw)
        same.random()
    sampling.choose(line, params(temperature=0, repetition_penalty=1.2), [1], draw)
    assert draw.getstate() == same.getstate()


def test_the_line_is_left_as_it_was():
    line = next(lines(100)).astype(np.float32)
    before = line.copy()
    sampling.choose(line, params(repetition_penalty=2.0), range(100), random.Random(0))
    assert (line == before).all()
    line.flags.writeable = False
    sampling.choose(line, params(repetition_penalty=2.0, top_k=3), [1], random.Random(0))


def test_the_penalty_is_transformers():
    torch = require("torch")
    transformers = require("transformers")
    history = [0, 5, 5, 99]
    for line in lines(100):
        line = line.astype(np.float32)
        theirs = transformers.RepetitionPenaltyLogitsProcessor(1.3)(
            torch.tensor([history]), torch.from_numpy(line.copy())[None]
        )[0]
        assert np.allclose(sampling.penalized(line, history, 1.3), theirs.numpy())


@pytest.mark.parametrize("temperature", [1e-320, 1e-9, 1e9, 1e308])
def test_any_temperature_is_a_distribution(temperature):
    for line in lines(1000):
        token = sampling.choose(
            line.astype(np.float32), params(temperature=temperature), [], random.Random(4)
        )
        if temperature < 1:
            assert line[token].astype(np.float32) == line.astype(np.float32).max()
        assert 0 <= token < 1000


@pytest.mark.parametrize("draw", [0.0, 1 - 2**-53])
def test_the_ends_of_the_draw_meet_ids_with_some_probability(draw):
    line = np.array([-np.inf, 0, 1, -np.inf, 0, -np.inf, -np.inf], np.float32)
    for case in (params(), params(top_k=3), params(top_k=6), params(top_p=0.99)):
        assert sampling.choose(line, case, [], Fixed(draw)) == (1 if draw == 0 else 4)


def test_greedy_after_a_penalty_takes_the_lowest_id_of_equals():
    line = np.array([1, 3, 2, 2], np.float32)
    case = params(temperature=0, repetition_penalty=2.0)
    assert sampling.choose(line, case, [1], random.Random(0)) == 2


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(vars(case)))
def test_of_allowed_ids_the_others_have_no_probability(case):
    """As if the others' logits were minus infinity, after the penalty and before all else."""
    allowed = np.array([3, 17, 40, 41, 299])
    for line in lines(300):
        line = line.astype(np.float32)
        masked = np.full(300, -np.inf, np.float32)
        masked[allowed] = sampling.penalized(line, [3, 17], case.repetition_penalty)[allowed]
        plain = params(case.temperature, case.top_k, case.top_p)
        for seed in range(20):
            found = sampling.choose(line, case, [3, 17], random.Random(seed), allowed)
            assert found == sampling.choose(masked, plain, [], random.Random(seed))


def test_among_allowed_ids_the_greedy_choice_is_the_likeliest_of_them():
    line = np.array([9, 1, 3, 3, 2], np.float32)
    case = params(temperature=0)
    assert sampling.choose(line, case, [], random.Random(0), np.array([1, 2, 3])) == 2
    assert sampling.choose(line, case, [], random.Random(0), np.array([4])) == 4


def test_a_token_that_is_the_only_one_takes_its_draw_all_the_same():
    line = next(lines(100)).astype(np.float32)
    draw, same = random.Random(5), random.Random(5)
    assert sampling.choose(line, params(), [], draw, np.array([7])) == 7
    same.random()
    assert draw.getstate() == same.getstate()


@pytest.mark.parametrize("count", [0, 1, 5, 20])
def test_logprobs_are_the_softmax_s(count):
    for line in lines(300):
        line = line.astype(np.float32)
        exact = line.astype(np.float64) - np.logaddexp.reduce(line.astype(np.float64))
        (token, own), *top = sampling.logprobs(line, 17, count)
        assert token == 17
        assert own == pytest.approx(exact[17], abs=1e-3)  # float32's step at 1e4
        expected = sorted(range(300), key=lambda i: (-line[i], i))[:count]
        assert [id for id, _ in top] == expected
        assert [each for _, each in top] == pytest.approx(exact[expected], abs=1e-3)
