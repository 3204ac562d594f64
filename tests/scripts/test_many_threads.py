"""scripts/many_threads.py: its phases and items are those of a true step; and times of small phases, by hand."""

import numpy as np
import pytest

from scripts import many_threads
from scripts.sharing.nodes import HUGE_PAGE, ONE_PAGE, SMALL_PAGE, near_cache, near_weights, node_of_thread
from scripts.sharing.phases import Load, phases_of
from scripts.sharing.simulation import run_phase
from tinygpt.config import ModelConfig
from tinygpt.execution.batch import Batch
from tinygpt.kernels import cpu
from tinygpt.kernels.cpu.runtime.team import CLAIMED, GROUP, OPEN
from tinygpt.weights.random_checkpoint import random_checkpoint

CONFIG = ModelConfig(vocab_size=333, n_positions=160, n_embd=192, n_layer=3, n_head=12)
THREADS = 5  # more than many a machine has cores
LOADS = [Load(1, 1), Load(13, 1), Load(2, 71)]  # decoding alone and together, and prompts of more than a row block


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_claims_are_those_of_a_true_step(dtype):
    checkpoint = random_checkpoint("three layers", CONFIG)
    params = cpu.load_params(checkpoint, dtype, 1)
    cache = cpu.new_kv_cache(CONFIG, 13, 160, "float32" if dtype == "float32" else "bfloat16")
    workspace = cpu.new_workspace(CONFIG, 160, 13, THREADS, dtype)
    team = workspace.team
    members = [team.leader, *(follower.team for follower in team._shared.followers)]
    for load in LOADS:
        phases, before = phases_of(CONFIG, dtype, load), team.leader.board[OPEN]
        for member in members:
            member.own[CLAIMED] = 0
        chunks = [[7] * load.tokens for _ in range(load.sequences)]
        cpu.forward(params, Batch.of(chunks, [0] * load.sequences, range(load.sequences)), cache, workspace)
        assert team.leader.board[OPEN] - before == len(phases)
        assert sum(member.own[CLAIMED] for member in members) == sum(phase.items for phase in phases)
    team.close()


OWN, TRANSFER, ITEM = 1.0, 100.0, 10_000.0


def test_a_thread_by_itself_waits_for_nobody():
    """It sees that the phase is open, claims each item, counts them in a group and in all, and opens the next."""
    found = run_phase(7, ITEM, 1, OWN, TRANSFER)
    assert found.seconds == 7 * (ITEM + OWN) + 4 * OWN
    assert (found.ideal, found.uneven, found.operations) == (7 * ITEM, 0, 9)


def test_two_threads_meet_where_they_count():
    """Both see the phase and claim from their own shares; the second to count waits for the first."""
    found = run_phase(2, ITEM, 2, OWN, TRANSFER)
    assert found.seconds == 2 * TRANSFER + ITEM + 2 * TRANSFER + TRANSFER + TRANSFER
    assert found.busiest == 2


def test_one_thread_more_than_items():
    """Two of three go away with nothing, and one does not wait for them."""
    found = run_phase(1, ITEM, 3, OWN, TRANSFER)
    assert found.seconds == 2 * TRANSFER + ITEM + 3 * TRANSFER
    assert found.uneven == pytest.approx(ITEM * 2 / 3)


def test_an_exchange_that_comes_second_fails_and_is_tried_again():
    """Of one counter: both have read 0, so the second fails, and succeeds on the line that it has by then."""
    found = run_phase(2, ITEM, 2, OWN, TRANSFER, has_one_counter=True)
    assert found.seconds == (TRANSFER + 2 * TRANSFER + OWN) + ITEM + TRANSFER + TRANSFER
    assert found.operations == 3 + 2


@pytest.mark.parametrize(("items", "threads"), [(12, 64), (36, 16), (786, 64), (1032, 128)])
def test_whoever_shares_the_items_does_each_once(items, threads):
    """Claims that fail are few where threads have shares, whatever their number."""
    found = run_phase(items, ITEM, threads, OWN, TRANSFER)
    counts = min(items, threads) + -(-threads // GROUP)  # of whole shares and groups
    assert items < found.operations <= 2 * items + counts
    assert found.seconds >= found.ideal + found.uneven


# Of one layer, in KB: c_attn has 3 panels of 16, attn_proj one, c_fc 4, mlp_proj one of 64, the head 2 of 16: 224 in
# all. Threads 0 and 1 are on a node, and what thread 0 reads counts as far: a panel of each kind.
NARROW, PAIRS = ModelConfig(vocab_size=128, n_positions=64, n_embd=64, n_layer=1, n_head=2), np.array([0, 0, 1, 1])


@pytest.mark.parametrize(
    ("page", "near"),
    [
        (SMALL_PAGE, 2 * 16 + 3 * 16 + 16),  # all that thread 0 does not read
        (None, 2 * 16 + 3 * 16 + 16),  # so little is in small pages
        (32 << 10, 2 * 16 + 3 * 16),  # both panels of the head lie in one
        (HUGE_PAGE, 16 + 16),  # thread 1's panel of c_attn, and of c_fc
        (ONE_PAGE, 16 + 16),
    ],
)
def test_weights_near_the_threads_that_read_them(page, near):
    assert near_weights(NARROW, "float32", PAIRS, page) == near / 224


def test_the_cache_is_near_the_threads_that_write_it():
    """Alone, a thread reads the heads that it writes, and 3 of 12 are the caller's. Of 32 sequences thread 1 of 4 reads
    heads 0 to 5 of half of them, and writes 3 to 5 of all."""
    assert near_cache(ModelConfig(), Load(), PAIRS) == 9 / 12
    assert near_cache(ModelConfig(), Load(32), np.arange(4)) == 3 / 4 / 2


@pytest.mark.parametrize(("threads", "nodes", "expected"), [(4, 2, [0, 0, 1, 1]), (6, 4, [0, 0, 1, 2, 2, 3])])
def test_nodes_of_threads(threads, nodes, expected):
    assert list(node_of_thread(threads, nodes)) == expected


@pytest.mark.parametrize("nodes", [2, 4])
@pytest.mark.parametrize("threads", [16, 32, 64, 128])
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_gpt_2_reads_what_is_near(dtype, threads, nodes):
    """At least 9 bytes of 10, where one thread's touch leaves no more than a node's part near."""
    node = node_of_thread(threads, nodes)
    assert near_weights(ModelConfig(), dtype, node, ONE_PAGE) < 1 / nodes
    assert near_weights(ModelConfig(), dtype, node) > 0.9


def test_impossible_numbers_and_models_are_sentences(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["many_threads.py", "--threads", "4", "0"])
    with pytest.raises(SystemExit):
        many_threads.main()
    assert "--threads must be above 0, not [4, 0]" in capsys.readouterr().err
    monkeypatch.setattr("sys.argv", ["many_threads.py", "--nodes", "-1"])
    with pytest.raises(SystemExit):
        many_threads.main()
    assert "--nodes must be above 0, not [-1]" in capsys.readouterr().err
    with pytest.raises(ValueError, match="positions"):
        phases_of(ModelConfig(positions="alibi"), "int8", Load())


def test_the_table(monkeypatch, capsys):
    monkeypatch.setattr(many_threads, "this_machine", lambda phases, args: MACHINE)
    monkeypatch.setattr("sys.argv", ["many_threads.py", "random:tiny", "--threads", "1", "64", "--one-counter"])
    assert many_threads.main() == 0
    rows = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert [row[0] for row in rows[1:]] == ["1", "64", "1, one counter", "64, one counter"]
    assert float(rows[1][2]) == 1
    assert float(rows[2][1]) < float(rows[4][1])


def test_the_table_of_nodes(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["many_threads.py", "random:tiny", "--threads", "4", "16", "--nodes", "2"])
    assert many_threads.main() == 0
    rows = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert [row[:2] for row in rows[1:]] == [["2", "4"], ["2", "16"]]
    assert {len(row) for row in rows} == {6}


MACHINE = many_threads.Machine(5e-9, 50e-9, 2e10, 3e11, {"int8": 3e11, "float32": 1e11})
