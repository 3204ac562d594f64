"""From tokens to the model's width and from there to scores, where embeddings have another width: E in place of C."""

from tinygpt.kernels.cpu.layers.activations import NONE
from tinygpt.kernels.cpu.layers.embedding import add_positions, embed_tokens
from tinygpt.kernels.cpu.layers.formats import Nothing
from tinygpt.kernels.cpu.layers.layer_norm import ONE_LAYER, put_rows
from tinygpt.kernels.cpu.layers.linear import REPLACE, linear, linear_to_operand
from tinygpt.kernels.cpu.runtime.by_type import by_type


def _embed(team, project_in, params, x, step, buffers):
    tables = params.wte, params.wte_factors, params.wpe
    embed_tokens(team, x, step.token_ids, step.embeds, step.positions, *tables)  # (N, C)


def _embed_and_project(team, project_in, params, x, step, buffers):
    b, n = buffers, x.shape[0]
    rows = b.embedded.values[:n]
    tables = params.wte, params.wte_factors, params.nothing
    embed_tokens(team, rows, step.token_ids, step.embeds, step.positions, *tables)  # (N, E)
    put_rows(team, b.to_project, rows, b.every[:n])  # (N, E)
    linear(team, x, b.to_project, project_in.linear, ONE_LAYER, project_in.segments, NONE, REPLACE)  # (N, C)
    add_positions(team, x, step.positions, params.wpe)  # (N, C)


# embed_rows(team, project_in, params, x, step, buffers): x (N, C) = the embeddings of the step's tokens and positions.
embed_rows = by_type({Nothing: _embed}, otherwise=_embed_and_project, argument=1)


def _score(team, project_in, params, logits, buffers):
    linear(team, logits, buffers.final, params.lm_head, ONE_LAYER, params.embd_segments, NONE, REPLACE)  # (R, V)


def _project_and_score(team, project_in, params, logits, buffers):
    b, out, rows = buffers, params.project_out, logits.shape[0]
    linear_to_operand(team, b.to_score, b.final, out.linear, ONE_LAYER, out.segments, NONE, rows)  # (R, E)
    linear(team, logits, b.to_score, params.lm_head, ONE_LAYER, project_in.segments, NONE, REPLACE)  # (R, V)


# score_tokens(team, project_in, params, logits, buffers): logits (R, V) of the operand `final` (R, C).
score_tokens = by_type({Nothing: _score}, otherwise=_project_and_score, argument=1)
