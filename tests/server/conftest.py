"""The demo in a server, one for all tests of a file."""

from importlib.util import find_spec

import pytest

from support.engines import opened

if find_spec("fastapi") is None:  # of the extra `serve`
    collect_ignore_glob = ["test_*.py"]

MAX_NUM_SEQS, MAX_QUEUE = 4, 3


llm = opened("small_demo", max_num_seqs=MAX_NUM_SEQS, max_queue=MAX_QUEUE, split_special_tokens=True)


@pytest.fixture(scope="module")
def server(llm):
    from support.serving import served

    with served(llm) as server:
        yield server


@pytest.fixture(autouse=True)
def nothing_is_left_behind(request):
    yield
    if "llm" in request.fixturenames:
        from support.serving import until

        scheduler = request.getfixturevalue("llm").engine.scheduler
        until(
            lambda: (
                (scheduler.running, len(scheduler.waiting), scheduler.slots.num_free) == ([], 0, MAX_NUM_SEQS)
            )
        )
