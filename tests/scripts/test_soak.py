"""scripts/soak.py: what it counts."""

from scripts.soak import num_samples
from support.gate import Gate
from tinygpt import LLM


def test_a_cancelled_sample_and_the_one_that_took_its_place_in_the_queue_count_once(small_demo):
    with LLM(small_demo, threads=1, max_num_seqs=2, max_queue=2) as llm, llm.engine.wrapped(Gate) as gate:
        futures = [llm.submit([5 + i], max_tokens=4) for i in range(4)]
        gate.wait_until_asked(1)
        assert num_samples(llm.engine) == 4
        futures.pop(0).cancel()
        futures.append(llm.submit([9], max_tokens=4))  # though the step still has the cancelled one
        assert num_samples(llm.engine) == 4
        gate.allow(1000)
        assert [future.result().outputs[0].finish_reason is not None for future in futures] == [True] * 4
