"""A Hub id from first download to offline use, against a Hub on the loopback interface."""

import contextlib
import io
import json
import os
import subprocess
import sys
import warnings

import pytest
from safetensors.numpy import save_file

from support.apart import told
from support.hub_server import HubServer, _commit
from support.paths import DEMO, ROOT
from support.processes import run_process
from support.tiny_checkpoint import convert, random_tensors, write_checkpoint, write_json
from support.torch_files import torch_bytes
from tinygpt.errors import CheckpointError
from tinygpt.weights.files import looks_local
from tinygpt.weights.hub import parse
from tinygpt.weights.open import open_checkpoint, with_revision

BIAS = random_tensors()["transformer.ln_f.bias"].tolist()
UNWANTED = ("tf_model.h5", "README.md", ".gitattributes", "onnx/model.safetensors", "training_args.bin")


def opened(home, endpoint, model, **environment):
    """What a fresh process says that opens `model` with its cache in `home`, and its stderr."""
    (line,), stderr = opened_all(home, endpoint, [model], **environment)
    return line, stderr


def opened_all(home, endpoint, models, **environment):
    """What it says of each of several, and its stderr: huggingface_hub reads its environment when it is imported."""
    kept = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    kept = {name: value for name, value in kept.items() if not name.startswith("HF_")}
    env = kept | {"HF_HOME": str(home), "HF_ENDPOINT": endpoint, **environment}
    return told(open_models, str(home.parent), env, models, patience=100)[0]


def open_models(tell, folder, environment, models):
    assert "huggingface_hub" not in sys.modules
    warnings.simplefilter("ignore", DeprecationWarning)  # later Pythons warn of each fork
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    answers = []
    with contextlib.redirect_stderr(io.StringIO()) as stderr:
        for model in models:
            try:
                checkpoint = open_checkpoint(model)
            except CheckpointError as error:
                answers.append({"error": str(error)})
            else:
                path = checkpoint.path
                files = [path.name] if path.is_file() else sorted(path.name for path in path.iterdir())
                answers.append({"files": files, "bias": checkpoint.tensor("ln_f.bias").tolist()})
    tell((answers, stderr.getvalue()))


def hub_folder(folder):
    """A checkpoint with tokenizer files and with what a Hub repository holds besides."""
    write_checkpoint(folder)
    write_json(folder / "generation_config.json", {"eos_token_id": [2]})
    (folder / "vocab.json").write_text("{}")
    (folder / "merges.txt").write_text("#version: 0.2\n")
    for name in (*UNWANTED, "pytorch_model.bin"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"never wanted")
    return folder


def bin_folder(folder):
    folder = hub_folder(folder)
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(torch_bytes(random_tensors()))
    return folder


def sharded_folder(folder):
    folder = hub_folder(folder)
    (folder / "model.safetensors").unlink()
    weight_map = {name: f"model-{1 + len(name) % 2:05}-of-00002.safetensors" for name in random_tensors()}
    for shard in set(weight_map.values()):
        save_file({n: t for n, t in random_tensors().items() if weight_map[n] == shard}, folder / shard)
    write_json(folder / "model.safetensors.index.json", {"weight_map": weight_map})
    return folder


COMMON = ["config.json", "generation_config.json", "merges.txt", "vocab.json"]
FOLDERS = {
    "safetensors": (hub_folder, ["model.safetensors"]),
    "bin": (bin_folder, ["pytorch_model.bin"]),
    "shards": (
        sharded_folder,
        [
            "model-00001-of-00002.safetensors",
            "model-00002-of-00002.safetensors",
            "model.safetensors.index.json",
        ],
    ),
}


@pytest.mark.parametrize("form", FOLDERS)
def test_only_what_is_needed_is_downloaded(tmp_path, form):
    make, weights = FOLDERS[form]
    home = tmp_path / "home"
    with HubServer({"owner/tiny": make(tmp_path / "repo")}) as hub:
        first, progress = opened(home, hub.url, "owner/tiny")
        assert first == {"files": sorted(COMMON + weights), "bias": BIAS}
        assert hub.downloaded() == first["files"]
        assert "Fetching" in progress
    assert opened(home, hub.url, "owner/tiny")[0] == first  # no network, nobody said so


def test_downloaded_once_then_cached(tmp_path):
    home = tmp_path / "home"
    with HubServer({"owner/tiny": hub_folder(tmp_path / "repo")}) as hub:
        first, _ = opened(home, hub.url, "owner/tiny")
        hub.requests.clear()
        assert opened(home, hub.url, "owner/tiny")[0] == first
        assert hub.downloaded() == []


def test_a_local_folder_needs_no_hub(tmp_path):
    hub_folder(tmp_path / "owner")
    with HubServer({}) as hub:
        assert opened(tmp_path / "home", hub.url, "owner")[0]["bias"] == BIAS
        assert hub.requests == []


def test_what_cannot_be_had_is_a_sentence(tmp_path):
    home = tmp_path / "home"
    folders = {"owner/tiny": hub_folder(tmp_path / "repo"), "owner/none": tmp_path / "none"}
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "README.md").write_text("x")

    def errors(*models, **environment):
        return [line["error"] for line in opened_all(home, hub.url, models, **environment)[0]]

    with HubServer(folders, gated={"owner/tiny"}) as hub:
        unknown, gated, no_id, empty = errors("owner/tyni", "owner/tiny", "white space", "owner/none")
        assert "no such model on the Hub" in unknown
        assert "hf auth login" in unknown
        assert "asks for consent to its terms" in gated
        assert "nor a Hub id such as" in no_id
        assert "owner/none on the Hub has no config.json" in empty
        (offline,) = errors("owner/other", HF_HUB_OFFLINE="1")
        assert offline.startswith("'owner/other' is no local folder, and not all of it is in the cache")
        assert "HF_HUB_OFFLINE forbids downloads" in offline
    (unreachable,) = errors("owner/other")
    assert "cannot be reached" in unreachable


def values(home, endpoint, models, **environment):
    """The first element of ln_f.bias in each model."""
    return [found.get("bias", [found])[0] for found in opened_all(home, endpoint, models, **environment)[0]]


def of_value(folder, value):
    """A checkpoint whose ln_f.bias is this number."""
    write_checkpoint(folder)
    tensors = random_tensors()
    tensors["transformer.ln_f.bias"][:] = value
    save_file(tensors, folder / "model.safetensors")
    return folder


def gguf_folder(folder, files):
    """GGUF files by name, whose ln_f.bias is a number."""
    folder.mkdir()
    (folder / "README.md").write_text("x")
    for name, value in files.items():
        source = of_value(folder.parent / f"of-{value}", value)
        made = convert(source, folder.parent / f"{folder.name}-{value}", "--to", "gguf", "-q")
        (folder / name).parent.mkdir(exist_ok=True)
        next(made.glob("*.gguf")).rename(folder / name)
    return folder


def test_a_revision_a_folder_and_a_url(tmp_path):
    folders = {"owner/tiny": of_value(tmp_path / "main", 1), "owner/tiny@v1": of_value(tmp_path / "v1", 2)}
    of_value(tmp_path / "main" / "step-5", 3)
    names = {
        "owner/tiny": 1,
        "owner/tiny@v1": 2,
        f"owner/tiny@{_commit('owner/tiny@v1')}": 2,
        "owner/tiny/step-5": 3,
        "https://huggingface.co/owner/tiny": 1,
        "https://huggingface.co/owner/tiny/tree/v1": 2,
        "https://huggingface.co/owner/tiny/tree/main/step-5/": 3,
        "https://huggingface.co/owner/tiny/blob/v1/model.safetensors": 2,
        "hf://owner/tiny@v1": 2,
    }
    home = tmp_path / "home"
    with HubServer(folders) as hub:
        assert values(home, hub.url, names) == [*names.values()]
        (wrong,), _ = opened_all(home, hub.url, ["owner/tiny@v2"])
        assert "'owner/tiny@v2' on the Hub has no revision 'v2'" in wrong["error"]
        hub.requests.clear()
        assert values(home, hub.url, names, HF_HUB_OFFLINE="1") == [*names.values()]
        assert hub.requests == []


def test_a_gguf_file_by_its_name_or_its_quantization(tmp_path):
    files = {"tiny.Q8_0.gguf": 1, "tiny.Q4_K_M.gguf": 2, "f32/tiny-f32.gguf": 3}
    folders = {"owner/tiny-GGUF": gguf_folder(tmp_path / "many", files)}
    folders["owner/one"] = gguf_folder(tmp_path / "one", {"only.gguf": 4})
    names = {
        "owner/tiny-GGUF:q8_0": 1,
        "owner/tiny-GGUF/tiny.Q4_K_M.gguf": 2,
        "owner/tiny-GGUF/f32": 3,
        "owner/one": 4,
        "https://huggingface.co/owner/tiny-GGUF/resolve/main/tiny.Q8_0.gguf?download=true": 1,
    }
    home = tmp_path / "home"
    with HubServer(folders) as hub:
        assert values(home, hub.url, names) == [*names.values()]
        assert "README.md" not in hub.downloaded()
        wrong, _ = opened_all(home, hub.url, ["owner/tiny-GGUF", "owner/tiny-GGUF:q4_k", "owner/one/no.gguf"])
        several, none, absent = (answer["error"] for answer in wrong)
        assert (
            "it may mean 3 of the GGUF files f32/tiny-f32.gguf, tiny.Q4_K_M.gguf, tiny.Q8_0.gguf: name"
            in several
        )
        assert (
            "owner/tiny-GGUF:q4_k on the Hub has no config.json, and it may mean 0 of the GGUF files" in none
        )
        assert absent == "owner/one on the Hub has no no.gguf."
        assert values(home, hub.url, names, HF_HUB_OFFLINE="1") == [*names.values()]


def test_an_adapter_by_its_id(tmp_path):
    write_json(made(tmp_path / "lora") / "adapter_config.json", {"peft_type": "LORA", "r": 1})
    (tmp_path / "lora" / "adapter_model.safetensors").write_bytes(b"wanted")
    (tmp_path / "lora" / "README.md").write_text("x")
    code = "from tinygpt.weights.adapters.peft import existing_path; print(*existing_path('o/a').iterdir(), sep='\\n')"
    with HubServer({"o/a": tmp_path / "lora"}) as hub:
        env = os.environ | {
            "HF_HOME": str(tmp_path / "home"),
            "HF_ENDPOINT": hub.url,
            "PYTHONPATH": str(ROOT),
        }
        result = subprocess.run(
            [sys.executable, "-c", code], env=env, cwd=tmp_path, capture_output=True, text=True
        )
        found = sorted(line.rpartition("/")[2] for line in result.stdout.split())
        assert found == ["adapter_config.json", "adapter_model.safetensors"]
        listed = run_process("info", "--cached", "--json", env=env)
        (model,) = json.loads(listed.stdout)["models"]
        assert (model["id"], model["revisions"], model["files"]) == ("o/a", ["main"], 2)
        assert b"o/a" in run_process("info", "--cached", env=env).stdout


@pytest.mark.parametrize("model", ["demo", "random:tiny", "gpt2@main", str(DEMO)])
def test_a_revision_is_one_of_a_hub_model(model):
    with pytest.raises(CheckpointError, match="revision is 'v1' and the model is"):
        with_revision(model, "v1")


def test_a_revision_is_part_of_the_name():
    for given in (5, ""):
        with pytest.raises(CheckpointError, match="must be the name of a commit, branch or tag"):
            with_revision("gpt2", given)
    assert with_revision("owner/tiny/f32", "v1") == "owner/tiny@v1/f32"
    assert with_revision("https://huggingface.co/gpt2", "v1") == "gpt2@v1"
    name = parse(with_revision("owner/tiny", "a/b"))
    assert (name.repo_id, name.revision, name.path) == ("owner/tiny", "a/b", "")


@pytest.mark.parametrize(
    "name", ["no/such/model.gguf", "./owner/tiny", "~/tiny", "model.gguf", "a\\b", "/a/b/c"]
)
def test_a_path_is_no_name_on_the_hub(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    made(tmp_path / "no")
    assert looks_local(name)


def made(folder):
    folder.mkdir()
    return folder


def test_an_adapter_is_told_where_it_belongs(tmp_path):
    """Of its files only those are downloaded that say what it is."""
    folders = {"owner/lora": tmp_path / "lora", "owner/other": tmp_path / "other"}
    for folder, kind in zip(folders.values(), ("LORA", "LN_TUNING"), strict=True):
        folder.mkdir()
        write_json(folder / "adapter_config.json", {"peft_type": kind, "base_model_name_or_path": "gpt2"})
        (folder / "adapter_model.safetensors").write_bytes(b"never wanted")
    with HubServer(folders) as hub:
        lora, other = (line["error"] for line in opened_all(tmp_path / "home", hub.url, folders)[0])
        assert hub.downloaded() == ["adapter_config.json"]
    assert lora == (
        "owner/lora is an adapter of the type 'LORA', and no checkpoint: give the checkpoint that it was trained for, "
        "'gpt2', as the model, and owner/lora as --lora."
    )
    assert other.endswith("as the model, and no adapter, as such ones are not implemented.")


def test_a_shard_that_is_a_pattern_is_refused_before_the_hub_sees_it(tmp_path):
    shards = ("*", "[a-z]*.md", "onnx/model.safetensors", ".")
    folders = {f"owner/tiny{i}": sharded_folder(tmp_path / f"repo{i}") for i in range(len(shards))}
    for shard, folder in zip(shards, folders.values(), strict=True):
        write_json(folder / "model.safetensors.index.json", {"weight_map": {"x": shard}})
    with HubServer(folders) as hub:
        for line in opened_all(tmp_path / "home", hub.url, [*folders])[0]:
            assert "no file name in its own folder" in line["error"]
        assert hub.downloaded() == sorted([*COMMON, "model.safetensors.index.json"])
