"""Orders of rank 0: one after another, none after a failure, and an end for the others however its program ends.

Ranks are threads here (support/thread_world.py). Most tests need no model: what the others hear is enough.
"""

import threading
from concurrent.futures import Future

import numpy as np
import pytest

from support.golden_models import write_lora, write_model
from support.thread_world import Aborted, Threads, running
from tinygpt.cli.main import main
from tinygpt.engine.model_runner import ModelSource
from tinygpt.errors import CheckpointError, RequestError, Terminated, TinyGPTError
from tinygpt.llm_args import LLMArgs
from tinygpt.ranks.lead import (
    HEAD,
    Command,
    LoadCommand,
    ParallelRunner,
    RankZeroDriver,
    follow,
    plan_size,
)
from tinygpt.weights.config import ModelConfig

SIZES = LLMArgs(max_num_seqs=2).sizes(ModelConfig(n_layer=1, n_embd=4, n_head=4, vocab_size=7), 8)
PATIENCE = 60  # seconds for another thread


class Heard:
    """A rank that follows no order, and notes all of them."""

    def __init__(self):
        self.orders: list[Command] = []

    def follow(self, world) -> None:
        size = HEAD
        while Command.END not in self.orders:
            plan = np.zeros(size, np.int32)
            world.broadcast(plan)
            self.orders.append(Command(plan[0]))
            if plan[0] in (Command.OPEN, Command.CLOSE):
                size = plan_size(SIZES) if plan[0] == Command.OPEN else HEAD


@pytest.fixture
def stage():
    """A lead, and what one other rank hears of it."""
    threads, heard = Threads(2), Heard()
    lead = RankZeroDriver(running(threads, heard.follow))
    yield lead, heard, threads
    lead.end()


def open_model(lead: RankZeroDriver) -> None:
    with lead.order(opens_model=True):
        lead.tell(Command.OPEN)
        lead.note_model(SIZES)


def orders(threads: Threads, heard: Heard) -> list[Command]:
    """What was heard until the end, which has come."""
    for follower in threads.followers:
        follower.join(PATIENCE)
    assert not any(follower.is_alive() for follower in threads.followers)
    return heard.orders


def test_an_order_waits_for_another_threads(stage):
    """Each is a broadcast and more: what two threads send must not be mixed."""
    lead, heard, threads = stage
    open_model(lead)
    is_begun, second = threading.Event(), Future()

    def other() -> None:
        is_begun.wait(PATIENCE)
        with lead.order():
            second.set_result(list(done))
            lead.tell(Command.FORWARD)

    done = []
    thread = threading.Thread(target=other)
    thread.start()
    with lead.order():
        lead.tell(Command.CALL)
        is_begun.set()
        thread.join(0.05)  # the other would get in here
        assert not second.done()
        lead.tell(Command.CALL)
        done.append("first")
    assert second.result(PATIENCE) == ["first"]
    thread.join(PATIENCE)
    lead.end()
    names = ["OPEN", "CALL", "CALL", "FORWARD", "CLOSE", "END"]
    assert [order.name for order in orders(threads, heard)] == names


def test_the_end_waits_for_the_order_of_another_thread(stage):
    """A program that ends while its engine's thread takes a step: the step is no failure."""
    lead, heard, threads = stage
    open_model(lead)
    is_begun = threading.Event()
    may_go_on = threading.Event()

    def other() -> None:
        with lead.order():
            is_begun.set()
            may_go_on.wait(PATIENCE)
            lead.tell(Command.FORWARD)

    thread = threading.Thread(target=other)
    thread.start()
    assert is_begun.wait(PATIENCE)
    end = threading.Thread(target=lead.end)
    end.start()
    may_go_on.set()
    end.join(PATIENCE)
    expected = [Command.OPEN, Command.FORWARD, Command.CLOSE, Command.END]
    assert (orders(threads, heard), threads.aborted) == (expected, None)
    with pytest.raises(TinyGPTError, match="have ended"), lead.order():
        pass


@pytest.mark.parametrize(
    ("error", "said", "status"),
    [
        (OSError("the disk is on fire"), "error: rank 0 of 2, on here: OSError('the disk is on fire')", 1),
        (MemoryError(), "error: rank 0 of 2, on here: MemoryError()", 1),
        (SystemExit(3), "error: rank 0 of 2, on here: SystemExit(3)", 1),
        (KeyboardInterrupt(), "interrupted", 130),
        (Terminated(), "terminated", 143),
    ],
)
def test_an_order_that_fails_ends_all_ranks_with_one_sentence(capfd, stage, error, said, status):
    lead, heard, threads = stage
    open_model(lead)

    def order() -> None:
        with lead.order():
            lead.tell(Command.FORWARD)
            raise error

    with pytest.raises(Aborted):
        order()
    assert threads.aborted == status
    assert orders(threads, heard) == [Command.OPEN, Command.FORWARD]
    assert capfd.readouterr().err == f"tinygpt: {said}\n"


@pytest.mark.parametrize("has_model", [False, True])
def test_an_interrupt_at_the_end_ends_all_ranks(stage, monkeypatch, has_model):
    lead, _, threads = stage
    if has_model:
        open_model(lead)

    def interrupted(*given):
        raise KeyboardInterrupt

    monkeypatch.setattr(lead, "tell", interrupted)
    with pytest.raises(Aborted):
        lead.end()
    assert threads.aborted == 130


def test_a_second_model_is_refused_until_the_first_is_closed(stage):
    lead, heard, threads = stage
    open_model(lead)
    with pytest.raises(RequestError, match="another LLM of several ranks is open"):
        open_model(lead)
    lead.close_model()
    open_model(lead)
    lead.end()
    assert orders(threads, heard) == [Command.OPEN, Command.CLOSE, Command.OPEN, Command.CLOSE, Command.END]


# What ranks tell one another as they open a model: whose weights they have, where they run, what they must compile.

FIELDS = {"n_embd": 32, "n_head": 4, "n_layer": 2, "vocab_size": 37, "n_positions": 20}


@pytest.fixture
def opened(monkeypatch):
    """Opens a model over ranks that are threads, of which the others find what `there` names in its place."""
    leads = []

    def open_model(
        own: dict[str, str], there: dict[str, str] | None = None, tensor_size: int = 2
    ) -> ParallelRunner:
        layout = {"tensor_parallel_size": tensor_size, "pipeline_parallel_size": 2 // tensor_size}
        args, others = (
            LLMArgs(**given, **layout, threads=1, max_num_seqs=2) for given in (own, there or own)
        )
        source = ModelSource.open(args)
        opens = ModelSource.open

        def open_there(given):
            return opens(others if given == args else given)

        monkeypatch.setattr(ModelSource, "open", open_there)
        leads.append(RankZeroDriver(running(Threads(2), follow)))
        return ParallelRunner(leads[-1], source, LoadCommand(args, args.sizes(source.config, 16)))

    yield open_model
    for lead in leads:
        lead.end()


@pytest.fixture
def five(tmp_path):
    return write_model(tmp_path / "model", **FIELDS)


def changed(folder, name: str, path):
    """A copy of a folder, in one of whose files the last byte is another."""
    path.mkdir()
    for file in folder.iterdir():
        data = bytearray(file.read_bytes())
        if file.name == name:
            data[-1] ^= 1
        (path / file.name).write_bytes(data)
    return path


def test_a_host_with_one_other_weight_is_refused_by_name(opened, five, tmp_path):
    other = changed(five, "model.safetensors", tmp_path / "other")
    said = "rank 1 of 2, on here, has other weights than rank 0: give all hosts the same files"
    with pytest.raises(CheckpointError, match=said):
        opened({"model": str(five)}, {"model": str(other)})


def test_a_host_with_another_adapter_is_refused(opened, five, tmp_path):
    adapter = write_lora(tmp_path / "lora", 3, ["c_attn"], has_head=False, **FIELDS)
    other = changed(adapter, "adapter_model.safetensors", tmp_path / "other")
    with pytest.raises(CheckpointError, match="has other weights than rank 0"):
        opened(*({"model": str(five), "lora": str(lora)} for lora in (adapter, other)))


def test_a_host_whose_converted_weights_are_others_is_refused(opened, five, tmp_path):
    converted = [tmp_path / "a", tmp_path / "b"]
    second = changed(five, "model.safetensors", tmp_path / "second")
    for source, target in zip((five, second), converted, strict=True):
        assert main(["convert", str(source), str(target), "--dtype", "float32"]) == 0
    with pytest.raises(CheckpointError, match="has other weights than rank 0"):
        opened(*({"model": str(folder)} for folder in converted))


def test_a_host_with_another_model_is_refused(opened, five, tmp_path):
    other = write_model(tmp_path / "other", **{**FIELDS, "n_layer": 3})
    with pytest.raises(CheckpointError, match="rank 1 of 2, on here, has another model than rank 0"):
        opened({"model": str(five)}, {"model": str(other)})


def test_the_same_weights_elsewhere_are_the_same(opened, five, tmp_path):
    copy = changed(five, "no file", tmp_path / "copy")
    assert opened({"model": str(five)}, {"model": str(copy)}).config
    assert opened({"model": "random:tiny"}, tensor_size=1).config


def test_each_rank_is_sent_its_share_of_keys_and_values(opened):
    """Two stages of a layer each: half of both goes to the other."""
    runner = opened({"model": "random:tiny"}, tensor_size=1)
    keys, values = (np.arange(2 * 2 * 5 * 32, dtype=np.float32).reshape(2, 2, 5, 32) + i for i in (0, 0.5))
    runner.write_positions(1, 3, keys, values)
    found = runner.read_positions(1, 3, 8)
    np.testing.assert_array_equal(found, (keys, values))
    assert runner._lead.world._threads.num_scattered == keys.size
