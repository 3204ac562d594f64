"""From tokens to the model's width and from there to scores, where embeddings have another width: E in place of C.

What depends on a type is small, as the compiler sees the bodies of both functions here once a model.
"""

from tinygpt.kernels.cpu.jit import inline
from tinygpt.kernels.cpu.layers.activations import NONE
from tinygpt.kernels.cpu.layers.embedding import add_positions, embed_tokens
from tinygpt.kernels.cpu.layers.formats import Nothing
from tinygpt.kernels.cpu.layers.layer_norm import ONE_LAYER, put_rows
from tinygpt.kernels.cpu.layers.linear import REPLACE, linear, linear_to_operand
from tinygpt.kernels.cpu.layers.ranks import share_rows
from tinygpt.kernels.cpu.runtime.by_type import by_type


@inline
def embed_rows(team, params, x, step, b):
    """x (N, C) = the embeddings of the step's tokens and positions."""
    rows, wpe = _first_rows(params.project_in, x, b.embedded, params.wpe, params.nothing)
    embed_tokens(team, rows, step.token_ids, step.embeds, step.positions, params.wte, params.wte_factors, wpe)  # (N, E)
    _project_in(team, params.project_in, x, rows, step.positions, params.wpe, b.every, b.to_project)  # (N, C)
    share_rows(team, x, b.ranks)  # (N, C)


@inline
def score_tokens(team, params, logits, b):
    """logits (R, V) of the operand `final` (R, C)."""
    final = _project_out(team, params.project_out, b.final, b.to_score, logits.shape[0])  # (R, E)
    segments = params.embedding_segments
    linear(team, logits, final, params.lm_head, ONE_LAYER, segments, NONE, REPLACE)  # (R, V)


def _rows_of_x(project_in, x, embedded, wpe, nothing):
    return x, wpe


def _narrow_rows(project_in, x, embedded, wpe, nothing):
    return embedded.values[: x.shape[0]], nothing


# _first_rows(project_in, x, embedded, wpe, nothing): where tokens' embeddings go, and the positions' to add at once.
_first_rows = by_type({Nothing: _rows_of_x}, otherwise=_narrow_rows)


def _is_there(team, project_in, x, rows, positions, wpe, every, to_project):
    pass


def _put_through(team, project_in, x, rows, positions, wpe, every, to_project):
    put_rows(team, to_project, rows, every[: x.shape[0]])  # (N, E)
    linear(team, x, to_project, project_in.linear, ONE_LAYER, project_in.segments, NONE, REPLACE)  # (N, C)
    add_positions(team, x, positions, wpe)  # (N, C)


# _project_in(team, project_in, x, rows, positions, wpe, every, to_project): x (N, C) of rows (N, E).
_project_in = by_type({Nothing: _is_there}, otherwise=_put_through, argument=1)


def _final_itself(team, project_out, final, to_score, rows):
    return final


def _narrowed(team, project_out, final, to_score, rows):
    linear_to_operand(team, to_score, final, project_out.linear, ONE_LAYER, project_out.segments, NONE, rows)
    return to_score


# _project_out(team, project_out, final, to_score, rows): the operand (R, E) that is scored, of `final` (R, C).
_project_out = by_type({Nothing: _final_itself}, otherwise=_narrowed, argument=1)
