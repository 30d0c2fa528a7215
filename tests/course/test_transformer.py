"""The transformer that notebooks train, and what it learns."""

import torch
from torch.nn.functional import cross_entropy

from hooklab import lesson


def test_a_sequence_asks_for_the_value_that_follows_its_last_key():
    tokens, answers, asked = lesson.recall(300)
    assert tokens.shape == (300, 7)
    for sequence, answer, pair in zip(tokens.tolist(), answers.tolist(), asked.tolist(), strict=True):
        keys, values, last = sequence[:6:2], sequence[1:6:2], sequence[6]
        assert len({*keys}) == 3
        assert max(keys) < 6 <= min(values) <= max(values) < 12
        assert last == keys[pair]
        assert answer == values[pair]
    assert {*asked.tolist()} == {0, 1, 2}


def test_a_position_sees_nothing_of_what_comes_later():
    model, (tokens, _, _) = lesson.TinyTransformer(), lesson.recall(20)
    other = tokens.clone()
    other[:, 4:] = lesson.recall(20, seed=1)[0][:, 4:]
    assert torch.equal(model(tokens)[:, :4], model(other)[:, :4])
    assert not torch.equal(model(tokens)[:, 4:], model(other)[:, 4:])


def test_the_heads_share_the_width():
    model = lesson.TinyTransformer(width=24, heads=3, blocks=1)
    assert len(model.blocks) == 1
    assert model.blocks[0].attention.qkv.weight.shape == (72, 24)
    assert model(lesson.recall(5)[0]).shape == (5, 7, 12)


def test_trained_it_answers_every_question_and_with_one_block_it_cannot():
    tokens, answers, _ = lesson.recall(500)
    loss = {}
    for blocks in (1, 2):
        logits = lesson.trained_transformer(blocks=blocks)(tokens)[:, -1]
        loss[blocks] = cross_entropy(logits, answers).item()
    assert (logits.argmax(1) == answers).all()
    assert loss[2] < 0.02 < 0.5 < loss[1]


def test_training_is_the_same_each_time_and_leaves_generator_and_threads_as_they_were():
    torch.manual_seed(3)
    state, threads = torch.random.get_rng_state(), torch.get_num_threads()
    first, second, other = (lesson.trained_transformer(seed, steps=3) for seed in (0, 0, 1))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.get_num_threads() == threads
    assert all(map(torch.equal, first.parameters(), second.parameters()))
    assert not torch.equal(first.unembed.weight, other.unembed.weight)
    assert first.unembed.weight.dtype == torch.float64
    assert not first.training
