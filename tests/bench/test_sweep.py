"""The cases of bench and their prompts."""

from tinygpt.bench.sweep import Case, cases_of, prompts_to_continue, prompts_to_read


def test_cases_go_from_small_to_large():
    found = cases_of([8, 1, 8], [32], [16, 0, 4])
    assert found == tuple(Case(size, 32, new) for size in (1, 8) for new in (0, 4, 16))


def test_prompts_to_read_have_nothing_in_common():
    prompts = prompts_to_read(50, Case(40, 7))
    assert len({prompt[0] for prompt in prompts}) == 40
    assert {len(prompt) for prompt in prompts} == {7}
    assert prompts == prompts_to_read(50, Case(40, 7))


def test_prompts_to_continue_are_distinct():
    prompts = prompts_to_continue(50257, Case(40, 7, 5))
    assert len(set(map(tuple, prompts))) == 40
    first, *others = prompts
    assert len(first) == 6
    assert {tuple(prompt[:-1]) for prompt in others} == {tuple(first)}
    assert {len(prompt) for prompt in others} == {7}
    assert [len(prompt) for prompt in prompts_to_continue(50257, Case(1, 7, 5))] == [7]
