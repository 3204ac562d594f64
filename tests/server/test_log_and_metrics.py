"""What is told of each request: a line in the log, an id, and figures for Prometheus."""

import json
import logging

import pytest
from prometheus_client.parser import text_string_to_metric_families

from support.gate import Gate
from support.serving import served
from tinygpt.cli.streams import logging_to_stderr
from tinygpt.server.monitoring import OUT_OF_DESCRIPTORS, JsonLines, Seldom, TextLines, configure_logging

ASKED = {"prompt": "Once upon a time", "max_tokens": 5, "temperature": 0, "ignore_eos": True}


@pytest.fixture
def fresh(llm):
    with served(llm) as server:
        yield server


def figures(server) -> dict[tuple[str, str], float]:
    """(name, a label that is not the model's) -> value."""
    families = text_string_to_metric_families(server.ask("/metrics").body.decode())
    samples = [sample for family in families for sample in family.samples]
    return {
        (
            sample.name,
            ",".join(v for k, v in sorted(sample.labels.items()) if k != "model_name"),
        ): sample.value
        for sample in samples
    }


def test_a_line_for_each_request(fresh, llm):
    num_prompt_tokens = len(llm.read_prompt(ASKED["prompt"]).token_ids)
    for is_streamed in (False, True):
        fresh.complete(**ASKED, n=2, stream=is_streamed)
        line = fresh.ended()
        assert (line["method"], line["path"], line["status"]) == ("POST", "/v1/completions", 200)
        assert (line["prompt_tokens"], line["completion_tokens"], line["finish"]) == (
            num_prompt_tokens,
            10,
            "length",
        )
        assert 0 <= line["queue"] <= line["ttft"] <= line["seconds"]
    fresh.complete(prompt="a", n=0)
    line = fresh.ended()
    assert line["status"] == 400
    assert "prompt_tokens" not in line


def test_an_id_comes_back_or_is_given(fresh):
    assert fresh.ask("/health", x_request_id="my-id.7").headers["x-request-id"] == "my-id.7"
    assert fresh.ended()["id"] == "my-id.7"
    assert len(fresh.ask("/health").headers["x-request-id"]) == 32
    assert len(fresh.ask("/health", x_request_id="a b\u00e9").headers["x-request-id"]) == 32
    assert fresh.complete(foo=1).headers["x-request-id"]


def test_a_strangers_path_cannot_steer_a_terminal(fresh):
    fresh.ask("/%1b[2J%0anew")
    assert fresh.ended()["path"] == r"/\x1b[2J\nnew"


def test_metrics_count_what_was_done(fresh, llm):
    num_prompt_tokens = len(llm.read_prompt(ASKED["prompt"]).token_ids)
    fresh.complete(**ASKED, n=2)
    fresh.complete(**ASKED, n=2, stream=True)
    fresh.complete(foo=1)
    fresh.ask("/v1/nowhere")
    found = figures(fresh)
    for prefix in ("tinygpt:", "vllm:"):
        assert found[f"{prefix}prompt_tokens_total", ""] == 2 * num_prompt_tokens
        assert found[f"{prefix}generation_tokens_total", ""] == 20
        assert found[f"{prefix}request_success_total", "length"] == 4
        times = "queue_time", "prefill_time", "decode_time", "inference_time", "time_per_output_token"
        for name in ("time_to_first_token", "e2e_request_latency", *(f"request_{time}" for time in times)):
            assert found[f"{prefix}{name}_seconds_count", ""] == 2
            assert found[f"{prefix}{name}_seconds_sum", ""] >= 0
        assert found[f"{prefix}request_generation_tokens_sum", ""] == 20
        assert found[f"{prefix}request_max_num_generation_tokens_sum", ""] == 10
        computed = 2 * num_prompt_tokens - found[f"{prefix}prefix_cache_hits_total", ""]
        assert found[f"{prefix}request_prefill_kv_computed_tokens_sum", ""] == computed
        assert found[f"{prefix}inter_token_latency_seconds_count", ""] == 2 * (
            5 - 1
        )  # of the stream's tokens
        assert found[f"{prefix}inter_token_latency_seconds_sum", ""] >= 0
    assert found["tinygpt:http_requests_total", "/v1/completions,200"] == 2
    assert found["tinygpt:http_requests_total", "/v1/completions,400"] == 1
    assert found["tinygpt:http_requests_total", "other,404"] == 1


def test_gauges_say_what_runs_and_waits(fresh, llm):
    with llm.engine.wrapped(Gate) as gate:
        client = fresh.begin(**ASKED | {"temperature": 1, "seed": 1}, n=6)
        gate.wait_until_asked(1)
        found = figures(fresh)
        assert (found["vllm:num_requests_running", ""], found["vllm:num_requests_waiting", ""]) == (4, 2)
        assert found["vllm:kv_cache_usage_perc", ""] == 1
        client.close()
        while fresh.ended()["status"] != 499:
            pass
        gate.allow(float("inf"))
        assert figures(fresh)["vllm:request_success_total", "abort"] == 1


@pytest.mark.parametrize("is_streamed", [True, False])
def test_what_was_done_for_who_left_is_counted(fresh, llm, is_streamed):
    num_prompt_tokens = len(llm.read_prompt(ASKED["prompt"]).token_ids)
    with llm.engine.wrapped(Gate) as gate:
        client = fresh.begin(
            **ASKED | {"temperature": 1, "seed": 1, "max_tokens": 400}, n=2, stream=is_streamed
        )
        gate.allow(7)
        gate.wait_until_asked(8)
        [one, other] = llm.engine.scheduler.running
        made = len(one.new_token_ids) + len(other.new_token_ids)
        assert made >= 2 * 6
        client.close()
        line = fresh.ended()
        gate.allow(float("inf"))
    assert (line["status"], line["finish"]) == (499, "abort")
    assert (line["prompt_tokens"], line["completion_tokens"]) == (num_prompt_tokens, made)
    assert 0 <= line["queue"] <= line["ttft"] <= line["seconds"]
    found = figures(fresh)
    assert found["tinygpt:prompt_tokens_total", ""] == num_prompt_tokens
    assert found["tinygpt:generation_tokens_total", ""] == made
    assert found["tinygpt:time_to_first_token_seconds_count", ""] == 1
    assert found["tinygpt:e2e_request_latency_seconds_count", ""] == 0
    assert found["tinygpt:request_success_total", "abort"] == 1


def test_metrics_are_what_prometheus_reads(fresh):
    reply = fresh.ask("/metrics")
    assert reply.headers["content-type"].startswith("text/plain; version=")
    families = list(text_string_to_metric_families(reply.body.decode()))
    assert len({family.name for family in families}) == len(families)
    assert all(family.documentation for family in families if family.name.startswith(("tinygpt:", "vllm:")))
    assert not [family.name for family in families if "_created" in family.name]


def record(**fields) -> logging.LogRecord:
    made = logging.makeLogRecord({"msg": "request", "levelname": "INFO", "created": 0.5})
    made.fields = fields
    return made


def test_lines_for_people_and_for_programs():
    assert TextLines().format(record(id="x", status=200, ttft=None)) == (
        "1970-01-01T00:00:00Z INFO request id=x status=200"
    )
    forged = TextLines().format(record(path="/v1/x status=200", status=404))
    assert forged.endswith('INFO request path="/v1/x status=200" status=404')
    told = json.loads(JsonLines().format(record(id='a"b', ttft=None)))
    assert told == {"time": 0.5, "level": "info", "message": "request", "id": 'a"b', "ttft": None}


@pytest.mark.parametrize(("level", "shown"), [("error", ["failed"]), ("info", ["request", "failed"])])
def test_errors_alone_are_shown_if_the_flag_asks_for_it(capsys, monkeypatch, level, shown):
    """As `serve -q`, whose requests were told all the same."""
    log = logging.getLogger("tinygpt.server")
    for name in ("tinygpt.server", "uvicorn", "asyncio"):
        for field in ("handlers", "level", "propagate"):
            monkeypatch.setattr(logging.getLogger(name), field, getattr(logging.getLogger(name), field))
    with logging_to_stderr(level):
        configure_logging("json")
        log.info("request")
        log.error("failed")
    assert [json.loads(line)["message"] for line in capsys.readouterr().err.splitlines()] == shown


def test_used_up_descriptors_are_told_once_a_minute():
    seldom, kept = Seldom(), []
    for time, message in (
        (0, OUT_OF_DESCRIPTORS),
        (1, OUT_OF_DESCRIPTORS),
        (1, "other"),
        (61, OUT_OF_DESCRIPTORS),
    ):
        told = logging.makeLogRecord({"msg": f"{message} ...", "created": 1e9 + time})
        kept.append(seldom.filter(told))
    assert kept == [True, False, True, True]
