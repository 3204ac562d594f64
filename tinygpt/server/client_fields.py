"""Clients' fields on which nothing here depends, and fields that may ask for a thing that is not there.

FOREIGN has OpenAI's fields, from which models of requests derive, and which the README repeats; PEERS has those of
vLLM, llama.cpp, text-generation-webui and SGLang. Fields that do something are in `protocol`.
"""

import json
from collections.abc import Collection
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, Field, ValidationInfo, create_model

DROPPING = "dropping"  # the context of a request whose refused fields are passed over
EMPTY = (None, False, 0, "", "none", [], {})  # what asks for nothing in any field


@dataclass(frozen=True)
class RefusedField:
    """A field that is refused for this reason, but for EMPTY and a value that says what is so anyway."""

    reason: str
    usual: Any = None

    def check(self, value: Any, info: ValidationInfo) -> Any:
        """Return the value if it asks for nothing, and None for another one of a DROPPING request."""
        if value in EMPTY or value == self.usual:
            return value
        if info.context == DROPPING:
            return None
        raise ValueError(self.reason)


@dataclass(frozen=True)
class ForeignFields:
    """Fields of one model that are passed over, and fields that are refused unless they ask for nothing."""

    passed: str
    refused: dict[str, RefusedField]

    def fields(self) -> dict[str, Any]:
        fields: dict[str, Any] = {
            name: (Any, Field(None, description="Passed over.")) for name in self.passed.split()
        }
        for name, refused in self.refused.items():
            checked = Annotated[Any, AfterValidator(refused.check)]
            fields[name] = checked, Field(None, description=f"Nothing, as {refused.reason}.")
        return fields


TEXTS_ALONE = RefusedField("texts alone are read and written here")
STORED = RefusedField("nothing is stored here; send all messages")
CUT = 'send overflow, as "truncate"'
CHAT_TOOLS = "/v1/chat/completions calls tools, by a tool_choice that is forced"
FOREIGN = {
    "any request": ForeignFields(
        "store metadata service_tier safety_identifier prompt_cache_key prompt_cache_options prompt_cache_retention",
        {"moderation": RefusedField("no text is judged here")},
    ),
    "a chat": ForeignFields(
        "parallel_tool_calls reasoning_effort verbosity prediction",
        {
            "modalities": RefusedField(TEXTS_ALONE.reason, ["text"]),
            "audio": TEXTS_ALONE,
            "functions": RefusedField("tools is the newer name"),
            "function_call": RefusedField("tool_choice is the newer name", "auto"),
            "web_search_options": RefusedField("nothing is searched here"),
        },
    ),
    "a chat's message": ForeignFields(
        "annotations parsed cache_control",
        {
            "refusal": RefusedField("content has the text of an assistant"),
            "audio": TEXTS_ALONE,
            "function_call": RefusedField("tool_calls is the newer name"),
        },
    ),
    "a response": ForeignFields(
        "parallel_tool_calls max_tool_calls reasoning background_options access_programs",
        {
            "tool_choice": RefusedField(CHAT_TOOLS, "auto"),
            "image": TEXTS_ALONE,
            "include": RefusedField("a response has its text alone"),
            "top_logprobs": RefusedField("/v1/chat/completions has log probabilities"),
            "background": STORED,
            "previous_response_id": STORED,
            "conversation": STORED,
            "prompt": STORED,
            "truncation": RefusedField(CUT, "disabled"),
            "context_management": RefusedField(CUT),
        },
    ),
}


def with_foreign(kind: str, base: type[BaseModel]) -> Any:
    return create_model(base.__name__, __base__=base, **FOREIGN[kind].fields())


ORDERS = (
    ["dry", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"],
    ["penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"],
)
# Values that ask for what happens anyway, other than null, and the fields that they are such values of. (): any value.
PEERS = [
    (
        (),
        """request_id session_id rid extra_key id_slot cache_prompt n_cache_reuse mirostat_tau mirostat_eta
dynatemp_low dynatemp_high dynatemp_exponent smoothing_curve adaptive_decay sse_ping_interval include_reasoning
separate_reasoning stream_reasoning enable_thinking reasoning_effort reasoning_format reasoning num_ctx keep_alive think
spaces_between_special_tokens return_mm_kwargs chat_instruct_command speculative.n_max speculative.p_min
speculative.ngram_size_n speculative.ngram_size_m speculative.ngram_min_hits speculative.ngram_m_hits""",
    ),
    (
        EMPTY,
        """priority watermarking logits_processors guided_decoding_backend guided_whitespace_pattern
continue_final_message documents return_prompt_text return_token_offsets routed_experts_prompt_start kv_transfer_params
ec_transfer_params vllm_xargs mm_processor_kwargs media_io_kwargs grammar dynatemp_range n_indent n_keep n_discard
n_probs min_keep mirostat return_tokens return_progress timings_per_token verbose
post_sampling_probs backend_sampling response_fields lora image_data multimodal_data grammar_lazy grammar_type
grammar_triggers preserved_tokens chat_format chat_parser generation_prompt parse_tool_calls thinking_forced_open
reasoning_control reasoning_budget_start_tag reasoning_budget_end_tag reasoning_budget_end_tags speculative.n_min
speculative.type reasoning_budget_message smoothing_factor top_a penalty_alpha mirostat_mode max_tokens_second
dynamic_temperature temperature_last auto_max_new_tokens ban_eos_token static_cache truncation_length custom_token_bans
negative_prompt grammar_string sampler_priority impersonate continue_ custom_stopping_strings echo return_hidden_states
return_routed_experts routed_experts_start_len return_cached_tokens_details return_prompt_token_ids return_meta_info
no_stop_trim use_audio_in_video add_special_tokens reasoning_in_content""",
    ),
    ((True, None), "add_bos_token"),
    ((1,), "stream_interval n_cmpl tfs tfs_z guidance_scale encoder_repetition_penalty"),
    ((-1, 0), "thinking_token_budget adaptive_target t_max_prompt_ms t_max_predict_ms"),
    (
        (-1,),
        "reasoning_budget_tokens thinking_budget_tokens reasoning_budget repeat_last_n repetition_penalty_range",
    ),
    (("instruct",), "mode"),
    (ORDERS, "samplers"),
]
USUAL = {name: values for values, names in PEERS for name in names.split()}
LAST_N = ("repeat_last_n", "repetition_penalty_range")  # of tokens that penalties look at: all do here
PENALTIES = {"repetition_penalty": 1, "repeat_penalty": 1, "frequency_penalty": 0, "presence_penalty": 0}


def hint_of(name: str) -> str | None:
    """Return what a peer's field may be, if another value of it is refused."""
    values = USUAL.get(name)
    return values and f"this server has no such option, and takes {json.dumps(values[0])} alone"


def without_idle(body: dict[str, Any], known: Collection[str]) -> dict[str, Any]:
    """Return a request without fields that ask for nothing. known: those that its form has."""
    has_penalty = any(body.get(name, off) not in (None, off) for name, off in PENALTIES.items())

    def is_idle(name: str, value: Any) -> bool:
        values = USUAL.get(name)
        is_any = values == () or (name in LAST_N and not has_penalty)
        return value is None or is_any or (values is not None and value in values)

    return {name: value for name, value in body.items() if name in known or not is_idle(name, value)}
