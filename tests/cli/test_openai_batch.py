"""`generate --input` with OpenAI's batch lines: replies in its format of results, refusals, continued runs."""

import gc
import json
import signal

import pytest

from support.gate import noting
from support.golden_models import write_lora
from support.tables import rows
from tinygpt import LLM
from tinygpt.cli import batch, openai_batch
from tinygpt.cli import main as cli

pytest.importorskip("fastapi")

SEEDED = {"max_tokens": 6, "seed": 5, "model": "gpt-4o-mini"}
CHAT = {"messages": [{"role": "user", "content": "The fox"}], **SEEDED}
COMPLETION = {"prompt": "The fox", **SEEDED}


def line(custom_id, url, body, method="POST"):
    return {"custom_id": custom_id, "method": method, "url": url, "body": body}


LINES = [
    line("chat", "/v1/chat/completions", CHAT),
    line("text", "/v1/completions", COMPLETION),
    line("vector", "/v1/embeddings", {"model": "gpt-4o-mini", "input": "The fox"}),
]
LONG = line("long", "/v1/completions", {"prompt": "The fox", "max_tokens": 5000})


@pytest.fixture
def run(tmp_path, capsys):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"

    def run(lines, *flags):
        source.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        code = cli.main(["generate", "--input", str(source), "--output", str(target), *flags])
        records = [json.loads(record) for record in target.read_text().splitlines()] if code < 2 else []
        return code, {record["custom_id"]: record for record in records}, capsys.readouterr().err

    run.target = target
    return run


@pytest.fixture
def heeds_interrupts():
    """As on a terminal: a shell's background job ignores them."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_replies_are_the_servers(run):
    code, records, err = run(LINES)
    assert code == 0
    assert "tinygpt: demo answers requests to gpt-4o-mini\n" in err
    assert records.keys() == {"chat", "text", "vector"}
    for record in records.values():
        assert record.keys() == {"id", "custom_id", "response", "error"}
        assert (record["error"], record["response"]["status_code"]) == (None, 200)
    bodies = {name: record["response"]["body"] for name, record in records.items()}
    with LLM("demo") as llm:
        asked = {"max_tokens": 6, "seed": 5, "temperature": 1.0}
        (text,) = llm.generate(["The fox"], **asked)
        vector = llm.embed(["The fox"])[0]
    assert bodies["text"]["choices"][0]["text"] == text.outputs[0].text
    assert bodies["chat"]["choices"][0]["message"]["content"] == text.outputs[0].text
    assert bodies["chat"]["object"] == "chat.completion"
    assert bodies["vector"]["data"][0]["embedding"] == pytest.approx(vector.tolist(), abs=1e-6)


def test_flags_are_defaults_of_bodies(run):
    body = {"prompt": "The fox", "max_tokens": 3}
    code, records, _ = run([line("a", "/v1/completions", body)], "--seed", "5", "--max-tokens", "6", "-q")
    (expected,) = run([line("a", "/v1/completions", body | {"seed": 5})], "--keep-order")[1].values()
    assert code == 0
    assert records["a"]["response"]["body"]["usage"]["completion_tokens"] == 3
    assert records["a"]["response"]["body"]["choices"] == expected["response"]["body"]["choices"]


def test_a_body_may_name_a_flags_field_as_other_programs(run):
    body = {"prompt": "The fox", "max_completion_tokens": 3}
    code, records, _ = run([line("a", "/v1/completions", body)], "--max-tokens", "6")
    assert code == 0
    assert records["a"]["response"]["body"]["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize(
    ("url", "body"),
    [
        ("/v1/completions", {"prompt": "The fox", "max_tokens": None}),
        ("/v1/completions", {"prompt": None}),
        ("/v1/responses", {"input": "The fox", "max_output_tokens": None}),
    ],
)
def test_null_in_a_body_leaves_a_field_to_the_flag(run, url, body):
    code, records, _ = run([line("a", url, body)], "--max-tokens", "3", "--ignore-eos")
    assert code == 0
    usage = records["a"]["response"]["body"]["usage"]
    assert usage.get("completion_tokens", usage.get("output_tokens")) == 3


RESPONSE = line("response", "/v1/responses", {"input": "The fox", "max_output_tokens": 3})


def test_a_flag_that_asks_for_nothing_is_for_each_url(run):
    code, records, _ = run([*LINES, RESPONSE], "--n", "1", "--max-tokens", "2", "--seed", "5")
    assert code == 0
    assert {record["response"]["status_code"] for record in records.values()} == {200}


def test_a_chats_log_probabilities(run):
    asked = [
        CHAT | {"logprobs": True},
        CHAT | {"logprobs": True, "top_logprobs": 2},
        CHAT | {"logprobs": False},
    ]
    lines = [line(str(i), "/v1/chat/completions", body) for i, body in enumerate(asked)]
    code, records, _ = run(lines)
    assert code == 0
    told = [records[str(i)]["response"]["body"]["choices"][0]["logprobs"] for i in range(3)]
    assert [told[i] and len(told[i]["content"][0]["top_logprobs"]) for i in range(3)] == [0, 2, None]
    assert run([line("a", "/v1/chat/completions", CHAT | {"top_logprobs": 2})])[2].splitlines()[1:] == [
        "  line 1: top_logprobs needs logprobs to be true."
    ]


TURNS = {"messages": CHAT["messages"], "stop": [" "]}


@pytest.mark.parametrize(
    ("url", "body"),
    [
        ("/v1/completions", {"prompt": "The fox", "stop": [" "], "max_tokens": -1, "min_tokens": 17}),
        ("/v1/chat/completions", TURNS | {"max_tokens": -1}),
        ("/v1/chat/completions", TURNS | {"min_tokens": 17}),
        ("/v1/chat/completions", TURNS | {"min_tokens": 17, "max_completion_tokens": 18}),
        ("/v1/responses", {"input": "The fox", "min_tokens": 17, "max_output_tokens": None, "stop": [" "]}),
    ],
    ids=str,
)
def test_tokens_without_a_bound_fill_the_context(run, url, body):
    code, _, err = run([line("a", url, body)])
    assert code == 0, err


@pytest.mark.parametrize(
    ("name", "value"), [("edits", [{"name": "hook_embed", "keep": 0}]), ("capture", "hook_embed")]
)
def test_looks_inside_are_refused_before_any_work(run, monkeypatch, name, value):
    monkeypatch.setattr(batch, "load_llm", None)
    _, _, err = run([line("a", "/v1/completions", COMPLETION | {name: value})])
    assert f"line 1: {name} needs a server that was started with --look" in err


@pytest.mark.parametrize("body", [{"prompt": "The fox"}, {"prompt": "The fox", "max_tokens": 16}])
def test_more_tokens_at_least_than_at_most_are_refused(run, monkeypatch, body):
    monkeypatch.setattr(batch, "load_llm", None)
    assert run([line("a", "/v1/completions", body | {"min_tokens": 17})])[0] == 2


@pytest.mark.parametrize(
    ("flag", "value", "fields"),
    [
        ("--logit-bias", "24=100", {"logit_bias": {"24": 100}}),
        ("--guided-choice", "mouse", {"guided_choice": ["mouse"]}),
        ("--repetition-detection", "3,2", {"repetition_detection": {"max_pattern_size": 3, "min_count": 2}}),
    ],
)
def test_a_flag_of_several_values_is_a_default_too(run, flag, value, fields):
    _, records, _ = run([line("a", "/v1/completions", COMPLETION | fields)])
    run.target.unlink()
    code, by_flags, _ = run([line("a", "/v1/completions", COMPLETION)], flag, value)
    assert code == 0
    assert by_flags["a"]["response"]["body"]["choices"] == records["a"]["response"]["body"]["choices"]


@pytest.mark.parametrize(
    "flags",
    [["--min-tokens", "20", "--max-tokens", "30"], ["--length-penalty", "2", "--num-beams", "3"]],
    ids=str,
)
def test_a_flag_may_need_another(run, flags):
    body = {"prompt": "The fox", "model": "demo"}
    fields = {
        name[2:].replace("-", "_"): float(value) for name, value in zip(*[iter(flags)] * 2, strict=True)
    }
    _, records, _ = run([line("a", "/v1/completions", body | fields | {"seed": 5})])
    run.target.unlink()
    code, by_flags, _ = run([line("a", "/v1/completions", body)], "--seed", "5", *flags)
    assert code == 0
    assert by_flags["a"]["response"]["body"]["choices"] == records["a"]["response"]["body"]["choices"]


def test_a_flag_that_needs_another_is_refused_alone(run, monkeypatch):
    monkeypatch.setattr(batch, "load_llm", None)
    code, _, err = run(LINES[1:], "--min-tokens", "20")
    assert code == 2
    assert err.splitlines()[1:] == [
        "  line 1: --min-tokens does not fit /v1/completions: min_tokens is 20 and must be at most "
        "max_tokens, which is 6."
    ]


def test_a_flag_that_a_url_does_not_know_is_told_with_it(run, monkeypatch):
    monkeypatch.setattr(batch, "load_llm", None)
    asked = "--n", "2", "--logprobs", "2", "--prompt-logprobs", "3"
    code, _, err = run([*LINES, RESPONSE], *asked)
    assert code == 2
    told = err.splitlines()[1:]
    assert [each.partition(": Input")[0] for each in told] == [
        "  line 1: --logprobs does not fit /v1/chat/completions: logprobs is 2",
        "  line 1: --prompt-logprobs does not fit /v1/chat/completions: prompt_logprobs is not available in a chat.",
        "  line 4: --logprobs does not fit /v1/responses: logprobs is 2",
        "  line 4: --n does not fit /v1/responses: n is 2",
        "  line 4: --prompt-logprobs does not fit /v1/responses: prompt_logprobs is 3",
    ]


def test_all_faults_of_a_line_are_told_at_once(run, monkeypatch):
    monkeypatch.setattr(batch, "load_llm", None)
    wrong = {"custom_id": 3, "method": "GET", "url": "/v2", "body": [], "more": 1}
    told = run([LINES[0], wrong])[2].splitlines()
    assert "1 line of" in told[0]
    assert [each.split()[2] for each in told[1:]] == ["unknown", "custom_id", "method", "url", "body"]


def test_a_reply_with_an_error_is_a_record_and_the_others_are_done(run):
    code, records, err = run([*LINES, LONG])
    assert code == 1
    assert {name: record["response"]["status_code"] for name, record in records.items()} == {
        **dict.fromkeys(("chat", "text", "vector"), 200),
        "long": 400,
    }
    error = records["long"]["response"]["body"]["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "max_tokens")
    assert '1 of 4 requests failed: "response" in their records says why' in err


def test_a_run_is_continued(run, monkeypatch):
    run(LINES[:2])
    before = run.target.read_bytes()
    cut = before[: before.index(b"\n") + 20]  # as a killed run leaves it
    run.target.write_bytes(cut)
    code, records, err = run([*LINES, LONG])
    assert (code, len(records)) == (1, 4)
    assert "1 of 4 prompts skipped" in err
    assert "ends in half a record of 19 bytes" in err
    monkeypatch.setattr(batch, "load_llm", None)
    assert run([*LINES, LONG])[0] == 1
    code, _, err = run([LINES[2]])
    assert code == 2
    assert "which --input does not have: name another file" in err
    code, _, err = run([*LINES, LONG], "--dtype", "bfloat16")
    assert code == 2
    assert "was made with dtype float32 and not bfloat16: name another file" in err


@pytest.mark.parametrize("i", range(3))
def test_a_run_is_continued_by_one_model(run, monkeypatch, tmp_path, i):
    """Also if the lines name a model that another program has."""
    run(LINES[i : i + 1])
    monkeypatch.setattr(batch, "load_llm", None)
    assert run(LINES[i : i + 1])[0] == 0
    code, _, err = run(LINES, "--model", str(tmp_path))
    assert code == 2
    assert f"was made by model demo and --model is {tmp_path}: name another file" in err


def test_a_run_with_an_adapter_is_continued(run, tmp_path):
    adapter = write_lora(tmp_path / "adapter", rank=2, targets=["c_attn"], has_head=False)
    body = {"prompt": "The fox", "max_tokens": 2}
    lines = [line(name, "/v1/completions", body | {"model": name}) for name in ("demo", "a")]
    flags = "--device", "reference", "--lora-modules", f"a={adapter}"
    run(lines[1:], *flags)
    code, records, err = run(lines, *flags)
    assert code == 0
    assert "1 of 2 prompts skipped" in err
    assert {name: record["response"]["body"]["model"] for name, record in records.items()} == {
        "demo": "demo",
        "a": "a",
    }


@pytest.mark.parametrize(
    ("changes", "message"),
    rows("""
{"method": "GET"} | method is "GET" and must be "POST".
{"url": "/v1/completion"} | url is "/v1/completion" and must be one of /v1/completions, /v1/chat/completions
{"url": []} | url is [] and must be one of /v1/completions
{"custom_id": null} | custom_id is null and must be a text.
{"custom_id": "chat"} | custom_id 'chat' is already that of line 1.
{"body": []} | body is [] and must be an object.
{"bodi": {}} | unknown field "bodi"; did you mean body?
{"body": {"prompt": "a", "stream": true}} | body.stream is true: the replies of a batch are whole.
{"body": {"prompt": "a", "seeed": 1}} | unrecognized request argument: seeed; did you mean seed?
{"body": {"prompt": "a", "temperature": -5}} | temperature is -5.0 and must be 0 (greedy)
{"body": {"max_tokens": 3}} | prompt is required.
"""),
)
def test_an_impossible_line_is_refused_before_any_work(run, changes, message, monkeypatch):
    monkeypatch.setattr(batch, "load_llm", None)
    wrong = line("wrong", "/v1/completions", {"prompt": "a"}) | changes
    code, _, err = run([LINES[0], wrong])
    assert code == 2
    headline, told = err.splitlines()
    assert "1 line of" in headline
    assert told.startswith(f"  line 2: {message}")
    assert not run.target.exists()


@pytest.mark.parametrize("flags", [["--ray", "1"], ["--steer", "x.gguf"]])
def test_flags_of_lines_with_a_prompt(run, flags, monkeypatch):
    monkeypatch.setattr("tinygpt.cli.generate._edits", lambda args: [])
    code, _, err = run(LINES, *flags)
    assert code == 2
    assert f"{flags[0]} is for lines with a prompt" in err


def test_a_bug_ends_the_run(run, monkeypatch):
    """The others would wait for its reply without end."""

    async def ask(app, request):
        raise ZeroDivisionError

    monkeypatch.setattr(openai_batch, "_ask", ask)
    code, _, err = run(LINES)
    assert code == 1
    assert "unexpected ZeroDivisionError" in err


def test_a_request_waits_until_others_leave_memory(run, monkeypatch):
    monkeypatch.setattr("tinygpt.server.turns.MAX_HELD", 100)
    monkeypatch.setattr(openai_batch, "RETRY_SECONDS", 0.01)
    statuses = []
    ask = openai_batch._ask

    async def noted(app, request):
        reply = await ask(app, request)
        statuses.append(reply.status)
        return reply

    monkeypatch.setattr(openai_batch, "_ask", noted)
    code, records, _ = run([line(str(i), "/v1/completions", COMPLETION) for i in range(4)])
    assert code == 0
    assert {record["response"]["status_code"] for record in records.values()} == {200}
    assert len(records) == 4
    assert openai_batch.FULL in statuses


@pytest.mark.usefixtures("heeds_interrupts")
def test_a_stopped_run_gives_up_what_is_under_way(run, monkeypatch):
    asked = noting(monkeypatch, openai_batch, "_ask", lambda app, request: request.id)
    monkeypatch.setattr(openai_batch.Reply, "line", lambda *_: signal.raise_signal(signal.SIGINT))
    endless = {"prompt": "The fox", "max_tokens": 500, "ignore_eos": True}
    code, _, err = run([LINES[2], *(line(str(i), "/v1/completions", endless) for i in range(3))])
    assert code == 130
    assert "0 of 4 prompts answered" in err
    assert len(asked) == 4


@pytest.mark.usefixtures("heeds_interrupts")
def test_a_run_that_is_stopped_within_a_request_says_so_alone(run, monkeypatch, caplog):
    monkeypatch.setattr(LLM, "read_prompt", lambda *_: signal.raise_signal(signal.SIGINT))
    code, _, err = run(LINES[1:2])
    assert code == 130
    assert "0 of 1 prompt answered" in err
    gc.collect()  # of tasks, which tell their errors then
    assert "asyncio" not in {record.name for record in caplog.records}
