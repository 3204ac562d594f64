"""scripts/bench_peers.py: ratios, limits and the table, and peers that are absent. No peer is installed here."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from support.paths import ROOT
from support.recorded import needs_transformers
from tinygpt.kernels.cpu.simd.targets import choose

sys.path.insert(0, str(ROOT / "scripts"))
import bench_peers
from bench_peers import CASES, LOOK_CASES, Case, Engines, Row, floor, markdown
from peers import engines
from peers.setup import (
    AVX2,
    DTYPES,
    LENS,
    OUR_LOOK,
    OURS,
    PEERS,
    TORCH,
    Peer,
    PeerError,
    Setup,
    convert,
    held_to_avx2,
    locked,
    prepare,
    provide_folder,
    provide_python,
    run_logged,
)

SMALL_GPT2 = {"n_layer": 12, "n_embd": 768, "n_inner": None, "vocab_size": 50257}
DECODE_1, _, DECODE_32, PREFILL = CASES
LIMITS = {"bandwidth": 35e9, "float32": 230e9, "bfloat16": 460e9, "int8": 920e9, "int4": 920e9}
HERE = Path(sys.executable)
# There is no class "Gone": the process ends at once.
DEAD = Peer("dead", "Gone", (), ("int8",))


def row(**ms: list[float]) -> Row:
    return Row("decode, batch 1", "int8", 1, False, ms)


def test_ratio_is_the_best_peers_best_time_over_ours():
    measured = row(tinygpt=[5.0, 4.0], slow=[9.0, 10.0], fast=[20.0, 6.0])
    assert (measured.best_peer, measured.ratio) == ("fast", 1.5)
    for one_sided in ({"tinygpt": [1.0]}, {"tinygpt": [1.0], "failed": []}, {"tinygpt": [], "peer": [1.0]}):
        assert row(**one_sided).ratio is None


# GPT-2 124M: 124 M weights a token, 7.9 GFLOP for 32 sequences, 92 GFLOP for a prefill of 512.
@pytest.mark.parametrize(
    ("case", "dtype", "seconds", "limit"),
    [
        (DECODE_1, "float32", 498e6 / 35e9, "bandwidth"),
        (DECODE_1, "int4", 95e6 / 35e9, "bandwidth"),
        (DECODE_32, "int8", 8e9 / 920e9, "tile peak"),
        (PREFILL, "bfloat16", 92e9 / 460e9, "tile peak"),
    ],
)
def test_floor_is_the_limit_of_the_machine(case, dtype, seconds, limit):
    ms, found = floor(case, SMALL_GPT2, dtype, LIMITS, None)
    assert found == limit
    assert ms == pytest.approx(1e3 * seconds, rel=0.03)


def test_every_cached_position_of_every_sequence_is_read():
    slow = {**LIMITS, "bandwidth": 1.0}
    at_0, at_1000 = (
        floor(Case("", 8, prompt, 2), SMALL_GPT2, "bfloat16", slow, None)[0] for prompt in (0, 1000)
    )
    assert (at_1000 - at_0) / 1e3 == pytest.approx(8 * 1000 * 2 * 12 * 768 * 2)


def test_the_table_lists_the_absent_and_marks_the_best():
    measured = row(tinygpt=[4.0, 6.0, 5.0], peer=[8.0], other=[9.0])
    measured.floor_ms = 2.0
    measured.limit = "bandwidth"
    engines = ["tinygpt", "peer", "other", "broken", "unrelated"]
    *_, line = markdown([measured], engines, {("broken", "int8"): "why"}).splitlines()
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    times = ["4.00 (5.00)", "**8.00 (8.00)**", "9.00 (9.00)"]
    assert cells == ["decode, batch 1", "int8", *times, "absent", "-", "**2.00**", "50% (bandwidth)"]


def test_peers_held_to_avx2_are_switched_built_or_left_out():
    held = {peer.name: peer for peer in held_to_avx2(PEERS)}
    assert set(held) == {"transformers", "openvino", "ctranslate2", "llama.cpp"}
    assert "-DGGML_NATIVE=OFF -DGGML_AVX512=OFF" in held["llama.cpp"].build_variables["CMAKE_ARGS"]
    assert (held["llama.cpp"].build, held["ctranslate2"].build) == ("-avx2", "")
    assert held["transformers"].dtypes == held["openvino"].dtypes == ("float32",)
    assert held["llama.cpp"].dtypes == DTYPES
    features = AVX2["NUMBA_CPU_FEATURES"].split(",")
    assert choose(lambda name: f"+{name}" in features, AVX2["NUMBA_CPU_NAME"]).name == "AVX2"


def test_a_peer_that_cannot_be_installed_is_absent_with_the_reason(tmp_path, monkeypatch):
    def provide(peer, work):
        if peer.name == "gone":
            raise PeerError("no wheel for this Python")
        return HERE

    monkeypatch.setattr("peers.setup.provide_python", provide)
    gone = Peer("gone", "Gone", ("gone==1",), ("float32", "int8"))
    setup = prepare(tmp_path, "random:tiny", [OURS, gone], ["int8", "int4"])
    assert setup.absent == {("gone", "int8"): "no wheel for this Python"}
    assert set(setup.places) == {("tinygpt", "int8"), ("tinygpt", "int4")}


def test_a_form_is_made_once_and_whole(tmp_path):
    made = []
    for _ in range(2):
        assert provide_folder(tmp_path / "form", made.append) == tmp_path / "form"
    assert len(made) == 1

    def fail(folder: Path) -> None:
        run_logged([sys.executable, "-c", "import sys; sys.exit('disk full')"], tmp_path / "log", {})

    with pytest.raises(PeerError, match="disk full"):
        provide_folder(tmp_path / "other", fail)
    assert not (tmp_path / "other").exists()


def test_an_engine_that_fails_is_absent_from_then_on(tmp_path, monkeypatch):
    monkeypatch.setattr(bench_peers, "PAUSE", 0)
    setup = Setup(tmp_path, {"vocab_size": 10}, {("dead", "int8"): (DEAD, HERE, tmp_path)})
    engines = Engines(setup, "int8", 1, tmp_path / "logs")
    assert engines.measure(DECODE_1, 1).ms == {"dead": []}
    assert engines.measure(DECODE_1, 1).ms == {}
    assert "has no attribute 'Gone'" in setup.absent["dead", "int8"]


def test_a_peer_over_twenty_times_slower_than_ours_is_left_out_of_its_dtype(tmp_path, monkeypatch):
    class Fixed:
        def __init__(self, place, *_):
            self.times = iter(place)

        def call(self, method, **_):
            return {} if method == "limits" else next(self.times)

        def close(self):
            pass

    monkeypatch.setattr(bench_peers, "PAUSE", 0)
    monkeypatch.setattr(bench_peers, "Worker", Fixed)
    # The first time of each is of the warm-up, in which an engine may compile.
    times = {"tinygpt": [9.0, 2.0, 2.0, 2.0], "slow": [1.0, 41.0], "compiled": [900.0, 40.0, 40.0, 40.0]}
    setup = Setup(tmp_path, {"vocab_size": 10}, {(name, "int8"): each for name, each in times.items()})
    measured = Engines(setup, "int8", 1, tmp_path / "logs").measure(DECODE_1, 3)
    assert measured.ms == {"tinygpt": [2.0] * 3, "slow": [41.0], "compiled": [40.0] * 3}
    assert setup.absent == {("slow", "int8"): "decode, batch 1 took 41 ms, over 20 times ours of 2.0 ms"}


def test_two_runs_prepare_one_after_the_other(tmp_path):
    fcntl = pytest.importorskip("fcntl")
    with locked(tmp_path), (tmp_path / "lock").open() as other, pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with (tmp_path / "lock").open() as other:
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_torch_is_downloaded_once_for_all_environments(tmp_path, monkeypatch):
    commands = []

    def run(command, log, variables):
        commands.append(command)
        if "download" in command:
            (Path(command[command.index("--dest") + 1]) / "torch-2.13.0.whl").touch()

    monkeypatch.setattr("peers.setup.run_logged", run)
    monkeypatch.setattr("peers.setup.venv.create", lambda folder, **_: folder.mkdir(parents=True))
    for name in ("a", "b"):
        provide_python(Peer(name, "Gone", (f"{name}==1", TORCH), ("int8",)), tmp_path)
    wheel = str(tmp_path / "wheels" / "torch-2.13.0.whl")
    assert [command[3] for command in commands] == ["download", "install", "install"]
    assert [command[-2:] for command in commands[1:]] == [["a==1", wheel], ["b==1", wheel]]


def test_other_flags_of_a_build_install_anew(tmp_path, monkeypatch):
    installed = []
    monkeypatch.setattr("peers.setup.run_logged", lambda command, log, variables: installed.append(variables))
    monkeypatch.setattr(
        "peers.setup.venv.create", lambda folder, **_: folder.mkdir(parents=True, exist_ok=True)
    )
    first, second = {"CXXFLAGS": "-O2"}, {"CXXFLAGS": "-O3"}
    for variables in (first, first, second):
        provide_python(Peer("built", "Gone", ("built==1",), ("int8",), build_variables=variables), tmp_path)
    assert installed == [first, second]


def test_the_onnx_converter_leaves_its_result_alone(tmp_path, monkeypatch):
    source, folder = tmp_path / "safetensors", tmp_path / "form"

    def run(command, cwd, **_):
        Path(command[-1]).touch()
        (cwd / "safetensors_past.onnx").touch()
        (cwd / "safetensors_past_fp32").mkdir()
        (cwd / "safetensors_past_fp32" / "safetensors_past_fp32.onnx").touch()

    monkeypatch.setattr(engines.subprocess, "run", run)
    for place in (source, folder):
        place.mkdir()
    (source / "config.json").touch()
    engines.Onnxruntime.make(source, folder, "int8")
    assert {file.name for file in folder.iterdir()} == {"model.onnx", "config.json"}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return provide_folder(
        tmp_path_factory.mktemp("c") / "x", lambda to: convert("random:tiny", to, "safetensors")
    )


@needs_transformers
def test_torch_compiled_or_not_makes_the_same_steps(checkpoint, monkeypatch):
    import torch

    monkeypatch.setattr(torch, "compile", lambda run, **_: run)  # compiling takes half a minute
    ids = np.random.default_rng(0).integers(50257, size=(2, 7)).tolist()
    found = []
    for engine in (
        engines.Transformers(checkpoint, "float32", 1),
        engines.Compiled(checkpoint, "float32", 1),
    ):
        last = engine.last_logits(ids[0])
        assert min(engine.prefill_ms(ids), engine.step_ms(ids, 4), engine.step_ms(ids, 5)) > 0
        found.append([engine.tokens.tolist(), last, engine._forward(engine.tokens).logits[:, -1].tolist()])
    torch.set_grad_enabled(True)
    for eager, compiled in zip(*found, strict=True):
        np.testing.assert_allclose(eager, compiled, atol=1e-5)


def check_look(engine) -> np.ndarray:
    ids = np.random.default_rng(0).integers(50257, size=(2, 7)).tolist()
    assert min(engine.read_ms(ids[:1]), engine.steer_ms(ids, 4), engine.trace_ms(ids)) > 0
    return engine.trace(*ids)


def test_an_engine_looks_and_steers(checkpoint):
    trace = check_look(engines.TinygptLook(checkpoint, "float32", 1))
    assert trace.shape == (2, 7)
    assert (trace < 0).all()


def test_transformer_lens_traces_alike(checkpoint):
    pytest.importorskip("transformer_lens.model_bridge")
    traces = [
        check_look(kind(checkpoint, "float32", 1)) for kind in (engines.TinygptLook, engines.TransformerLens)
    ]
    np.testing.assert_allclose(*traces, atol=1e-4)


def test_a_look_study_has_cases_of_its_own(checkpoint, tmp_path, monkeypatch, capsys):
    setup = Setup(checkpoint, json.loads((checkpoint / "config.json").read_text()))
    monkeypatch.setattr(bench_peers, "PAUSE", 0)
    setup.places["tinygpt", "float32"] = OUR_LOOK, HERE, checkpoint
    prepared = []
    monkeypatch.setattr(bench_peers, "prepare", lambda *arguments: prepared.append(arguments) or setup)
    monkeypatch.setattr(
        sys, "argv", ["x", "--look", "--repeats", "1", "--threads", "1", "--work", str(tmp_path)]
    )
    bench_peers.main()
    assert [prepared[0][2], prepared[0][3]] == [[OUR_LOOK, LENS], ["float32"]]
    rows = [
        line.strip("|").split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| ")
    ]
    assert [row[0].strip() for row in rows[2:]] == [case.name for case in LOOK_CASES]
    assert all(float(row[2].split()[0]) > 0 for row in rows[2:])


def test_only_an_engine_with_a_choice_gets_the_kv_cache_dtype(checkpoint, tmp_path):
    def logits(peer: Peer, *cache: str) -> list[float]:
        setup = Setup(checkpoint, {"vocab_size": 50257}, {("tinygpt", "float32"): (peer, HERE, checkpoint)})
        engines = Engines(setup, "float32", 1, tmp_path / "logs", *cache)
        found = engines.last_logits()["tinygpt"]
        engines.close()
        return found

    own, int8 = logits(OURS), logits(OURS, "int8")
    assert own != int8
    assert own == pytest.approx(int8, abs=0.1)
    assert logits(replace(OURS, has_caches=False), "int8") == own


def test_an_interrupted_run_keeps_its_rows(checkpoint, tmp_path, monkeypatch):
    def measure(self, case: Case, count: int) -> Row:
        if case is not DECODE_1:
            raise KeyboardInterrupt
        return row(tinygpt=[1.0] * count)

    kept = tmp_path / "results.json"
    monkeypatch.setattr(
        bench_peers, "prepare", lambda *_: Setup(tmp_path, {"n_positions": 1024, "vocab_size": 10})
    )
    monkeypatch.setattr(Engines, "measure", measure)
    command = ["x", "--dtypes", "int8", "--repeats", "3", "--json", str(kept), "--work", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(KeyboardInterrupt):
        bench_peers.main()
    assert [(found["case"], found["ms"]) for found in json.loads(kept.read_text())["rows"]] == [
        (DECODE_1.name, {"tinygpt": [1.0, 1.0, 1.0]})
    ]
