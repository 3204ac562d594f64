"""Soft prompts of NeMo's p-tuning, and as FasterTransformer's converter writes them."""

from pathlib import Path

import numpy as np
import pytest

from support.megatron_writer import tar_bytes
from support.torch_files import torch_bytes
from tinygpt.errors import CheckpointError
from tinygpt.weights.adapters.soft_prompt import read_soft_prompt
from tinygpt.weights.config import ModelConfig

CONFIG = ModelConfig(vocab_size=23, n_positions=16, n_embd=8, n_layer=3, n_head=2)
ROWS = {"sentiment": 5, "squad": 7, "spread": 3}
TABLES = {task: np.random.default_rng(rows).standard_normal((rows, 8), np.float32) for task, rows in ROWS.items()}
SETTINGS = """\
task_templates:
- {taskname: sentiment, total_virtual_tokens: 5, virtual_token_splits: [5], prompt_template: <|VIRTUAL_PROMPT_0|> {x}}
- {taskname: squad, total_virtual_tokens: 7, virtual_token_splits: [7]}
- {taskname: spread, total_virtual_tokens: 3, virtual_token_splits: [1, 2]}
""".replace("{x}", "text")
# What prompt_convert of nemo_ckpt_convert.py (NVIDIA/FasterTransformer df4a7534) added to a model's config.ini.
CONFIG_INI = """\
[gpt]
head_num = 2
weight_data_type = fp16
num_tasks = 2
prompt_learning_start_id = 50257
prompt_learning_type = 3

[task_0]
task_name = sentiment
prompt_length = 5

[task_1]
task_name = squad
prompt_length = 7

"""


def write_nemo(folder: Path, *tasks: str, dtype: str = "float32", is_nested: bool = True) -> Path:
    """As MegatronBasePromptLearningModel.state_dict and PromptTable have it, before 2022's change without nesting."""
    table = {f"prompt_table.{task}.prompt_embeddings.weight": TABLES[task].astype(dtype) for task in tasks}
    table |= {f"prompt_table.{task}.indices": np.arange(ROWS[task]) for task in tasks}
    state = {"prompt_table": table} if is_nested else {f"prompt_table.{name}": one for name, one in table.items()}
    members = {"./model_config.yaml": SETTINGS.encode(), "./model_weights.ckpt": torch_bytes(state)}
    (folder / "tuned.nemo").write_bytes(tar_bytes(members))
    return folder / "tuned.nemo"


@pytest.mark.parametrize("is_nested", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_nemo(tmp_path, dtype, is_nested):
    path = write_nemo(tmp_path, "sentiment", "squad", dtype=dtype, is_nested=is_nested)
    for task in ("sentiment", "squad"):
        prompt = read_soft_prompt(path, CONFIG, task)
        assert (prompt.kind, prompt.embeds.dtype) == ("prompt", np.float32)
        np.testing.assert_array_equal(prompt.embeds, TABLES[task].astype(dtype))
    one = read_soft_prompt(write_nemo(tmp_path, "squad"), CONFIG, "any name")
    np.testing.assert_array_equal(one.embeds, TABLES["squad"])


@pytest.mark.parametrize(
    ("tasks", "says"),
    [
        (("sentiment", "squad"), "holds prompts of sentiment, squad: name the soft prompt so"),
        ((), "holds prompts of no task"),
        (("spread",), "cuts spread into 2 places of a text"),
    ],
)
def test_a_nemo_without_the_task_before_a_text_is_refused(tmp_path, tasks, says):
    with pytest.raises(CheckpointError, match=says):
        read_soft_prompt(write_nemo(tmp_path, *tasks), CONFIG, "mine")


@pytest.mark.parametrize("dtype", ["float32", "float16"])  # whatever weight_data_type says
def test_fastertransformers_prompt_table(tmp_path, dtype):
    (tmp_path / "config.ini").write_text(CONFIG_INI)
    path = tmp_path / "model.prompt_table.squad.weight.bin"
    TABLES["squad"].astype(dtype).tofile(path)
    np.testing.assert_array_equal(read_soft_prompt(path, CONFIG).embeds, TABLES["squad"].astype(dtype))
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(CheckpointError, match="prompt_length is '7', and it must hold as many rows of 8"):
        read_soft_prompt(path, CONFIG)
    with pytest.raises(CheckpointError, match="prompt_length is '', and it must hold"):
        read_soft_prompt(path.rename(tmp_path / "model.prompt_table.other.weight.bin"), CONFIG)
