"""`tinygpt score`: the library's scores, as a table and as JSON."""

import json

import pytest

TEXT = "Once upon a time, a surprisal"


def expected(llm, text: str, prompt: str = "") -> dict:
    """The facts of LLM.score, put together here."""
    [found] = llm.score(prompt, [text])
    return {
        "text": text,
        "logprob": sum(found.logprobs),
        "perplexity": found.perplexity,
        "bits_per_byte": found.bits_per_byte,
        "is_greedy": found.is_greedy,
        "tokens": [
            {"id": token_id, "text": token, "logprob": logprob, "surprisal": surprisal}
            for token_id, token, logprob, surprisal in zip(
                found.token_ids, found.tokens, found.logprobs, found.surprisals, strict=True
            )
        ],
    }


def without_words(line: str) -> dict:
    record = json.loads(line)
    assert "".join(word.pop("text") for word in record.pop("words")) == record["text"]
    assert (record.pop("model"), record.pop("dtype")) == ("demo", "float32")
    return record


def test_json(call, llm):
    result = call("score", TEXT, "The dog", "--json", "-p", "One day.")
    assert [without_words(line) for line in result.out.splitlines()] == [
        {"id": i, **expected(llm, text, "One day.")} for i, text in ((1, TEXT), (2, "The dog"))
    ]


def test_a_table_of_words(call, llm):
    title, head, *rows = call("score", TEXT).out.splitlines()
    [found] = llm.score("", [TEXT])
    facts = f"log probability {found.cumulative_logprob:.4f}, perplexity {found.perplexity:.4f}"
    assert (
        title == f"{TEXT!r}: {len(found.token_ids)} tokens, {facts}, {found.bits_per_byte:.4f} bits per byte"
    )
    assert head.split() == ["word", "bits", "tokens"]
    assert [row.split()[0] for row in rows] == TEXT.split()
    assert float(rows[-1].split()[1]) == pytest.approx(sum(found.surprisals[-3:]), abs=0.01)
    parts = [
        f"{token.strip()} {bits:.2f}" for token, bits in zip(found.tokens, found.surprisals, strict=True)
    ]
    assert rows[-1].endswith("  " + " | ".join(parts[-3:]))
    assert rows[0].split()[1:] == [f"{found.surprisals[0]:.2f}"]


def test_texts_of_files_and_of_stdin(call, llm, tmp_path, give_stdin):
    (lines := tmp_path / "lines.txt").write_text("The dog\n\n {x}\n")
    found = [json.loads(line) for line in call("score", "--input", str(lines), "--json").out.splitlines()]
    assert [(record["id"], record["text"]) for record in found] == [(1, "The dog"), (3, " {x}")]
    (records := tmp_path / "records.jsonl").write_text('{"text": "The dog", "id": "a"}\n{"text": "cat"}\n')
    found = [
        without_words(line) for line in call("score", "--input", str(records), "--json").out.splitlines()
    ]
    assert found == [{"id": "a", **expected(llm, "The dog")}, {"id": 2, **expected(llm, "cat")}]
    give_stdin(b"The dog\n")
    assert without_words(call("score", "--json").out) == {"id": 1, **expected(llm, "The dog\n")}
