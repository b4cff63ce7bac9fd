"""What mmspec assumes of transformers, diffusers, accelerate and peft: one row each, checked in their source files.

`python -m mmspec.pipelines.host.contract` checks the installed packages, or, with a folder as its argument, an unpacked
wheel. It needs no model and no network, and imports none of the packages. The second field of a row says how:

    is       it exists: a class, a function, a constant or an import
    knows    the function has these parameters
    takes    the same, and every other parameter has a default
    order    its first parameters are these, in this order, and every other has a default
    holds    the class defines these, or its methods set them on self
    says     its source contains these names: variables, attributes, keywords or strings
    calls    it calls these, which its file binds, with no keywords but those in `source.ARGUMENTS`
    line     its source contains this code, with any layout

`a|b` means one of the two: names are found by signature, never by version number.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Collection
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from mmspec.pipelines.host import source


class Assumption(NamedTuple):
    """One assumption."""

    what: str  # the dotted name of the object that is checked
    how: str  # how it is checked, see the module's docstring
    names: str  # what is searched for in it
    why: str  # what mmspec uses it for
    who: str  # the modules under `pipelines/` that depend on it
    # the only classes (of models, their modules, or objects passed to a call) that need it; "": all models do
    models: str = ""
    found: str = ""  # for a broken row: what was found instead

    def __str__(self) -> str:
        who = ", ".join(f"pipelines/{name}.py" for name in self.who.split())
        need = f"; only {', '.join(self.models.split())} need it" if self.models else ""
        return f"{self.what.replace('|', ' or ')}: {self.found or 'as expected'}. {self.why} ({who}){need}"


_MTP, _ASSISTANT = "MtpDrafter", "Gemma4AssistantForCausalLM Gemma4UnifiedAssistantForCausalLM"
_STATE = ".update_conv_state .update_recurrent_state"
_DELTA = f"causal_conv1d_fn torch_chunk_gated_delta_rule torch_recurrent_gated_delta_rule {_STATE}"
_KIMI = f"causal_conv1d_fn chunk_kimi_delta_attention recurrent_kimi_delta_attention {_STATE}"
_SSD = f"causal_conv1d_fn mamba2_chunk_scan mamba2_selective_state_update {_STATE}"
_CONV = "causal_conv1d_fn .update_conv_state"
_SCANS = "A draft's tree is read by replacing these functions inside the forward"
# fmt: off
ROWS: tuple[Assumption, ...] = tuple(Assumption(*row) for row in (
    # -- generate and its loop
    ("transformers.generation.utils.GENERATION_MODES_MAPPING", "line", "GenerationMode.SAMPLE: '_sample'", "Sampling is accelerated by overriding _sample", "host/loops"),
    ("transformers.generation.utils.GENERATION_MODES_MAPPING", "line", "GenerationMode.GREEDY_SEARCH: '_sample'", "Greedy decoding is accelerated by overriding _sample", "host/loops"),
    ("transformers.generation.utils.GENERATION_MODES_MAPPING", "says", "_beam_search _assisted_decoding", "These modes are overridden to run the stock path with a warning", "host/loops"),
    ("transformers.generation.utils.GenerationMixin.generate", "line", "getattr(type(self), GENERATION_MODES_MAPPING[", "The loop is looked up on the model's class, which enable swaps", "host/loops"),
    ("transformers.generation.utils.GenerationMixin.generate", "line", "self, input_ids, logits_processor=prepared_logits_processor, stopping_criteria=prepared_stopping_criteria, generation_config=generation_config", "Our _sample is called with these arguments", "host/loops"),
    ("transformers.generation.utils.GenerationMixin.generate", "knows", "inputs generation_config logits_processor stopping_criteria assistant_model streamer custom_generate", "Arguments of a call are looked at before stock reads them", "families/decoder_only host/assisted"),
    ("transformers.generation.utils.GenerationMixin._sample", "order", "input_ids logits_processor stopping_criteria generation_config synced_gpus streamer", "Our _sample has stock's parameters, and passes a call on to it", "host/loops host/call host/readable"),
    ("transformers.generation.utils.GenerationMixin._sample", "calls", "._prefill .prepare_inputs_for_generation ._update_model_kwargs_for_generation", "Our loop makes the forwards that stock's makes", "host/forward"),
    ("transformers.generation.utils.GenerationMixin._beam_search", "is", "", "A call with beams is passed on to it", "host/loops"),
    ("transformers.generation.utils.GenerationMixin._assisted_decoding", "is", "", "A call with stock's assisted generation is passed on to it", "host/loops"),
    ("transformers.generation.utils.GenerationMixin._prefill", "takes", "input_ids generation_config model_kwargs is_first_iteration", "The prompt is read by the model's own prefill", "host/forward"),
    ("transformers.generation.utils.GenerationMixin._prefill", "says", "cache|past_key_values prefill_chunk_size _mask_length get_seq_length", "It fills the cache of its model_kwargs, in one piece if prefill_chunk_size is None", "host/forward host/call"),
    ("transformers.generation.utils.GenerationMixin.prepare_inputs_for_generation", "takes", "input_ids next_sequence_length cache|past_key_values attention_mask inputs_embeds is_first_iteration", "It turns each draft into the arguments of a forward", "host/forward host/exotic/janus host/names"),
    ("transformers.generation.utils.GenerationMixin._supports_logits_to_keep", "says", "logits_to_keep", "This argument requests the logits of every node of a draft", "host/names"),
    ("transformers.generation.utils.GenerationMixin._update_model_kwargs_for_generation", "takes", "outputs model_kwargs is_encoder_decoder", "It returns the arguments of the step after the prefill", "host/forward host/readable"),
    ("transformers.generation.utils.GenerationMixin._maybe_prepare_encoder_kwargs_for_generation", "order", "inputs_tensor model_kwargs model_input_name generation_config", "It is overridden, so that cached prefixes need no vision tower", "host/loops"),
    ("transformers.generation.utils.GenerationMixin._prepare_cache_for_generation", "says", "_is_user_defined", "It marks a cache that the caller passed in", "host/call"),
    ("transformers.generation.utils.GenerationMixin._prepare_special_tokens", "says", "_pad_token_tensor", "Rows that have ended are filled with the pad token", "host/call"),
    ("transformers.generation.utils.MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL", "says", "mm_encoder_outputs", "These arguments are only for the prefill, and dropped afterwards", "host/call host/vision"),
    ("transformers.generation.utils.GenerateDecoderOnlyOutput", "holds", "sequences scores logits cache|past_key_values", "A call with return_dict_in_generate returns one", "host/call"),
    ("transformers.generation.configuration_utils.GenerationConfig", "says", "num_beams num_return_sequences do_sample prefill_chunk_size return_dict_in_generate output_scores output_logits output_attentions output_hidden_states is_assistant num_assistant_tokens prompt_lookup_num_tokens max_matching_ngram_size assistant_early_exit use_mtp", "These fields define a call", "patching/generate host/assisted patching/obstacles"),
    ("transformers.generation.streamers.BaseStreamer", "holds", "put end", "Streamers get each token once", "patching/generate serving/stream"),
    # -- the cache
    *((f"transformers.cache_utils.Cache.{method}", "order", names, "Our cache is called in its place", "host/cache")
      for method, names in (
        ("update", "key_states value_states layer_idx"),
        ("get_seq_length", "layer_idx"),
        ("get_mask_sizes", "query_length layer_idx"),
        ("get_conv_state", "layer_idx state_idx"),
        ("get_recurrent_state", "layer_idx state_idx"),
        ("update_conv_state", "conv_states layer_idx state_idx"),
        ("update_recurrent_state", "recurrent_states layer_idx state_idx"),
        ("update_indexer", "indexer_key_states layer_idx"),
        ("has_previous_state", "layer_idx state_idx"),
        ("is_recording_past", "layer_idx"),
      )),
    ("transformers.cache_utils.Cache.__init__", "takes", "layers layer_class_to_replicate", "Our cache begins as one without layers; a caller's may make layers of a class", "host/callers_cache"),
    ("transformers.cache_utils.Cache", "holds", "get_max_length get_query_offset is_compileable is_initialized is_sliding is_linear is_croppable offloading crop layers", "Stock uses these of any cache, and our cache defines or inherits them", "host/cache patching/generate host/processors/followed"),
    ("transformers.cache_utils.CacheLayerMixin", "holds", "keys values is_initialized reset lazy_initialization get_seq_length _layer_type", "A caller's cache is read and filled by layer", "host/callers_cache"),
    ("transformers.cache_utils.DynamicLayer.lazy_initialization", "order", "key_states value_states", "A caller's cache is given views of ours", "host/callers_cache"),
    ("transformers.cache_utils.StaticLayer.update", "order", "key_states value_states", "A caller's static cache is filled by it", "host/callers_cache"),
    ("transformers.cache_utils.DynamicCache", "is", "", "A call that returns its cache gets one", "host/callers_cache host/processors/followed"),
    *((f"transformers.cache_utils.{name}", "is", "", "A caller's cache of other classes runs the stock path", "host/callers_cache")
      for name in ("StaticCache", "DynamicSlidingWindowLayer", "StaticSlidingWindowLayer", "DummyLayer", "LinearAttentionLayer", "LinearAttentionAndFullAttentionLayer", "LinearAttentionAndStaticFullAttentionLayer")),
    ("transformers.cache_utils.DynamicSlidingWindowLayer.update", "line", "full_key_states[:, :, -self.sliding_window + 1:, :]", "A caller's keys are the latest of the text, in its order", "host/callers_cache"),
    ("transformers.cache_utils.LinearAttentionCacheLayerMixin", "holds", "number_of_states has_previous_state", "A caller's recurrent states are read and filled by layer", "host/callers_cache"),
    ("transformers.cache_utils.QuantizedCache", "is", "", "A call with one runs the stock path", "host/callers_cache"),
    # -- attention, masks, modules
    ("transformers.models.gemma3.modeling_gemma3.Gemma3ForConditionalGeneration.create_masks_for_generate", "knows", "token_type_ids", "Its parameters tell whether masks depend on token types", "host/model", "Gemma3ForConditionalGeneration"),
    ("transformers.integrations.sdpa_attention.sdpa_attention_forward", "order", "module query key value attention_mask dropout scaling", "Tree attention passes calls on to it that it does not handle", "host/tree_attention"),
    ("transformers.modeling_utils.AttentionInterface", "holds", "get_interface", "Tree attention is registered there, and stock attention looked up", "host/tree_attention"),
    ("transformers.utils.generic.GeneralInterface.register", "order", "key value", "Our attentions and their masks are registered by it", "host/tree_attention"),
    ("transformers.masking_utils.AttentionMaskInterface", "line", "'sdpa': sdpa_mask", "Tree attention makes sdpa's masks for prompts", "host/tree_attention"),
    ("transformers.masking_utils.sdpa_mask", "is", "", "Tree attention makes sdpa's masks for prompts", "host/tree_attention"),
    ("transformers.masking_utils._preprocess_mask_arguments", "line", "len(attention_mask.shape) == 4", "A 4-D mask, which defines what each node of a tree sees, is used unchanged", "target/vlm target/state"),
    ("transformers.models.llama.modeling_llama.LlamaAttention.forward", "says", "ALL_ATTENTION_FUNCTIONS _attn_implementation update scaling", "Attention modules read the implementation's name from their config", "host/tree_attention", "LlamaAttention"),
    ("transformers.models.llama.modeling_llama.LlamaModel.forward", "takes", "input_ids attention_mask position_ids cache|past_key_values inputs_embeds", "Decoders take explicit positions and a 4-D mask", "host/forward host/readable", "LlamaModel"),
    ("transformers.models.llama.modeling_llama.LlamaDecoderLayer.forward", "order", "hidden_states", "Features are the inputs of layers", "host/forward", "LlamaDecoderLayer"),
    ("transformers.models.llama.modeling_llama.LlamaRotaryEmbedding", "holds", "rope_type original_max_seq_len", "Frequencies that change with the length are found by these", "host/reach", "LlamaRotaryEmbedding"),
    ("transformers.modeling_outputs.BaseModelOutputWithPast", "holds", "last_hidden_state", "The decoder's features are read from its output", "host/names"),
    ("transformers.modeling_outputs.CausalLMOutputWithPast", "holds", "logits cache|past_key_values", "A forward returns logits; the reader in a processor's copy returns such an output", "target/vlm host/processors/followed"),
    ("transformers.modeling_utils.PreTrainedModel", "holds", "get_decoder config _is_stateful _supports_sdpa base_model", "The decoder, and what it supports, are found by these", "host/decoder host/readable host/tree_attention host/vision"),
    ("transformers.modeling_utils.PreTrainedModel.tp_size", "says", "_tp_size", "Whether several processes share a model's weights is read from it", "host/devices"),
    ("transformers.modeling_utils.EmbeddingAccessMixin", "holds", "get_input_embeddings get_output_embeddings", "The embedding and the head are found by these", "host/decoder"),
    ("transformers.configuration_utils.PreTrainedConfig|PretrainedConfig", "says", "_attn_implementation _name_or_path _commit_hash get_text_config is_encoder_decoder", "A model's attention, files and text config are found by these", "host/names host/tree_attention host/loading host/model"),
    ("transformers.utils.ModelOutput", "is", "", "It is the type of a forward's output in annotations", "host/kinds"),
    ("transformers.activations.ACT2FN", "is", "", "A convolution's activation is looked up by name", "host/recurrent"),
    ("transformers.models.auto.auto_factory._BaseAutoModelClass", "holds", "_model_mapping from_pretrained", "A draft model is loaded by the class that its config has", "host/loading"),
    ("transformers.models.auto.modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES", "is", "", "Model classes of this release are listed by it", "host/loading"),
    # -- layers with a recurrent state
    *((f"transformers.models.{file}.modeling_{file}.{cls}.forward", "calls", calls, _SCANS, "host/recurrent", cls)
      for file, cls, calls in (
        ("qwen3_5", "Qwen3_5GatedDeltaNet", _DELTA),
        ("qwen3_5_moe", "Qwen3_5MoeGatedDeltaNet", _DELTA),
        ("qwen3_next", "Qwen3NextGatedDeltaNet", _DELTA),
        ("qwen4_exp", "Qwen4ExpTextGatedDeltaNet", _DELTA),
        ("olmo_hybrid", "OlmoHybridGatedDeltaNet", _DELTA),
        ("kimi_linear", "KimiLinearDeltaAttention", _KIMI),
        ("bailing_hybrid", "BailingHybridDeltaAttention", _KIMI),
        ("glm5_next", "Glm5NextTextLinearAttention", _KIMI),
        ("mamba2", "Mamba2Mixer", _SSD),
        ("bamba", "BambaMixer", _SSD),
        ("falcon_h1", "FalconH1Mixer", _SSD),
        ("granitemoehybrid", "GraniteMoeHybridMambaLayer", _SSD),
        ("nemotron_h", "NemotronHMamba2Mixer", _SSD),
        ("zamba2", "Zamba2MambaMixer", _SSD),
        ("lfm2", "Lfm2ShortConv", _CONV),
        ("lfm2_moe", "Lfm2MoeShortConv", _CONV),
        ("lfm3", "Lfm3ShortConv", _CONV),
        ("inkling", "InklingShortConvolution", _CONV),
        ("inkling2", "Inkling2ShortConvolution", _CONV),
      )),
    # -- modules that count the slots of the cache (READERS in host/exotic/path_readers)
    *((f"transformers.models.{file}.modeling_{file}.{cls}.{method}", "order", names, why, "host/exotic/path_readers", cls)
      for file, cls, method, names, why in (
        ("minimax_m3_vl", "MiniMaxM3VLIndexer", "forward", "hidden_states position_embeddings cache|past_key_values position_ids", "The indexer reads each node as a row of its own"),
        ("minimax_m3_vl", "MiniMaxM3VLIndexer", "build_block_mask", "block_indices attention_mask key_length dtype device position_ids", "It turns blocks into slots"),
        ("glm5_next", "Glm5NextTextIndexer", "forward", "hidden_states q_resid attention_mask cache|past_key_values", "The indexer reads each node as a row of its own"),
        ("qwen4_exp", "Qwen4ExpTextQSAIndexer", "forward", "hidden_states position_embeddings attention_mask cache|past_key_values", "The indexer reads each node as a row of its own"),
        ("qwen4_exp", "Qwen4ExpTextNGramEmbedding", "forward", "input_ids cache|past_key_values", "The embedding of the last tokens follows each node's path"),
        ("qwen4_exp", "Qwen4ExpTextPLELayer", "_short_conv", "hidden_states cache|past_key_values", "The convolution follows each node's path"),
        ("kosmos2_5", "Kosmos2_5TextSinusoidalPositionalEmbedding", "forward", "input_ids inputs_embeds cache_length|past_key_values_length position_ids", "Positions are a node's depth, not its slot"),
        ("inkling", "InklingRelativeLogits", "forward", "relative_states query_positions key_positions", "The bias is by distance in the text, not between slots"),
        ("inkling2", "Inkling2DynamicShortConvolution", "forward", "hidden_states dynamic_input cache|past_key_values conv_mask", "The convolution follows each node's path"),
      )),
    *((f"transformers.models.{file}.modeling_{file}.{cls}.forward", "line", f"index_scores.topk({k}, dim=-1).indices",
       "This topk is replaced, to control which of tied scores an indexer selects", "host/exotic/path_readers host/exotic/by_path", cls)
      for file, cls, k in (
        ("mistral_large4", "MistralLarge4TextIndexer", "topk"),
        ("dots3_note", "Dots3NoteTextIndexer", "topk"),
        ("deepseek_v32", "DeepseekV32Indexer", "topk"),
        ("glm_moe_dsa", "GlmMoeDsaIndexer", "topk"),
        ("axk2", "AXK2Indexer", "topk"),
        ("hy_v4", "HYV4Indexer", "topk"),
        ("glm5_next", "Glm5NextTextIndexer", "select_k"),
      )),
    ("transformers.models.minimax_m3_vl.modeling_minimax_m3_vl.MiniMaxM3VLIndexer.forward", "calls", ".update_index", "The indexer's keys are kept in our cache", "host/cache host/exotic/by_path", "MiniMaxM3VLIndexer"),
    ("transformers.models.qwen4_exp.modeling_qwen4_exp.Qwen4ExpTextModel.forward", "says", "indexer_position_ids", "The positions of cached tokens are kept with the first indexer", "host/cache", "Qwen4ExpTextQSAIndexer"),
    ("transformers.models.inkling2.modeling_inkling2.Inkling2RelativePositionBias|Inkling2RelativeLogits.forward", "order", "hidden_states|relative_states relative_distance|query_positions position_ids|key_positions", "The bias is by distance in the text, not between slots", "host/exotic/path_readers", "Inkling2TextModel Inkling2Model Inkling2RelativePositionBias Inkling2RelativeLogits"),
    # -- families
    ("transformers.models.janus.modeling_janus.JanusForConditionalGeneration.generate", "calls", "._get_logits_processor ._prepare_static_cache .prepare_inputs_for_generation", "Stock prepares a picture's arguments, and we take them from these calls", "host/exotic/janus", "JanusForConditionalGeneration"),
    ("transformers.models.janus.modeling_janus.JanusForConditionalGeneration.generate", "says", "generation_mode generation_config input_ids inputs_embeds", "These distinguish image mode from text", "host/exotic/janus", "JanusForConditionalGeneration"),
    ("transformers.models.janus.modeling_janus.JanusForConditionalGeneration", "holds", "prepare_embeddings_for_image_generation", "Codes are embedded by it", "families/janus", "JanusForConditionalGeneration"),
    ("transformers.models.glm_image.modeling_glm_image.GlmImageModel", "holds", "get_rope_index _cached_decode_position_ids", "The prefill stores the positions of an image's tokens there", "host/exotic/pictures", "GlmImageForConditionalGeneration"),
    ("transformers.models.emu3.modeling_emu3.Emu3ImageVocabularyMapping", "holds", "img2bpe", "It maps image tokens to codes", "host/exotic/pictures", "Emu3ForConditionalGeneration"),
    ("transformers.models.chameleon.modeling_chameleon.ChameleonImageVocabularyMapping", "holds", "img2bpe image_tokens", "It maps image tokens to codes", "host/exotic/pictures", "ChameleonForConditionalGeneration"),
    # -- logits processors and stopping criteria
    *((f"transformers.generation.logits_process.{cls}", "holds", names, "It is applied along each node's path",
       "host/processors/history") for cls, names in (
        ("RepetitionPenaltyLogitsProcessor", "penalty prompt_ignore_length"),
        ("NoRepeatNGramLogitsProcessor", "ngram_size"),
        ("SequenceBiasLogitsProcessor", "sequence_bias"),
        ("MinLengthLogitsProcessor", "min_length eos_token_id"),
        ("MinNewTokensLengthLogitsProcessor", "prompt_length_to_skip min_new_tokens eos_token_id"),
        ("ForcedBOSTokenLogitsProcessor", "bos_token_id"),
        ("ForcedEOSTokenLogitsProcessor", "max_length eos_token_id"),
        ("SuppressTokensAtBeginLogitsProcessor", "begin_suppress_tokens begin_index"),
        ("ExponentialDecayLengthPenalty", "regulation_start regulation_factor eos_token_id"),
      )),
    ("transformers.generation.logits_process.LogitsProcessorList", "is", "", "Processors of a call come in one", "host/call host/processors/guidance host/processors/table host/exotic/janus"),
    ("transformers.generation.logits_process.TemperatureLogitsWarper", "is", "", "It is applied to all nodes at once", "host/processors/table"),
    ("transformers.generation.logits_process.TopKLogitsWarper", "holds", "top_k filter_value", "It is applied to all nodes at once", "host/processors/table"),
    ("transformers.generation.logits_process.TopPLogitsWarper", "holds", "top_p filter_value min_tokens_to_keep", "It has a faster twin on a GPU", "host/processors/table host/processors/nucleus"),
    ("transformers.generation.logits_process.NoBadWordsLogitsProcessor", "line", "class NoBadWordsLogitsProcessor(SequenceBiasLogitsProcessor)", "It is applied along each node's path", "host/processors/history"),
    ("transformers.generation.logits_process.PrefixConstrainedLogitsProcessor", "holds", "_prefix_allowed_tokens_fn _num_beams", "Its function is called for each node", "host/processors/table host/processors/history"),
    ("transformers.generation.logits_process.PrefixConstrainedLogitsProcessor.__init__", "order", "prefix_allowed_tokens_fn num_beams", "It is built again for the nodes of a tree", "host/processors/history"),
    ("transformers.generation.logits_process.UnbatchedClassifierFreeGuidanceLogitsProcessor", "holds", "guidance_scale model unconditional_context", "A second stream of the batch takes its place", "host/processors/guidance"),
    ("transformers.generation.logits_process.UnbatchedClassifierFreeGuidanceLogitsProcessor", "says", "input_ids attention_mask first_pass log_softmax", "The negative prompt is taken from its context", "host/processors/guidance"),
    ("transformers.generation.logits_process.ClassifierFreeGuidanceLogitsProcessor", "holds", "guidance_scale", "Guidance of image mode is taken from it", "host/exotic/janus", "JanusForConditionalGeneration"),
    ("transformers.generation.stopping_criteria.StoppingCriteriaList", "is", "", "Criteria of a call come in one", "host/processors/stopping"),
    ("transformers.generation.stopping_criteria.MaxLengthCriteria", "holds", "max_length", "A row's limit is read from it", "host/processors/stopping"),
    ("transformers.generation.stopping_criteria.EosTokenCriteria", "holds", "eos_token_id", "A row's ends are read from it", "host/processors/stopping"),
    ("transformers.generation.stopping_criteria.StopStringCriteria", "holds", "maximum_token_len", "It is called with the end of each row", "host/processors/stopping"),
    ("transformers.generation.stopping_criteria.MaxTimeCriteria", "is", "", "It is called once in each round", "host/processors/stopping"),
    # -- drafters made of transformers models
    ("transformers.modeling_layers.MtpLayer.__init__", "order", "config decoder_layer_cls norm_cls layer_idx", "MTP heads are built from it", "host/mtp", _MTP),
    ("transformers.modeling_layers.MtpLayer", "holds", "enorm hnorm eh_proj mtp_block post_norm", "A checkpoint's tensors are renamed to these", "host/mtp", _MTP),
    ("transformers.modeling_layers.MtpLayer.forward", "takes", "inputs_embeds previous_hidden_state position_embeddings attention_mask position_ids cache|past_key_values", "MTP heads are called by it", "drafters/mtp", _MTP),
    ("transformers.modeling_layers.MtpModel", "is", "", "MTP heads are a subclass of it", "host/mtp", _MTP),
    ("transformers.core_model_loading.convert_and_load_state_dict_in_model", "takes", "model state_dict load_config", "MTP heads are filled as transformers fills the model", "host/mtp", _MTP),
    ("transformers.core_model_loading.PrefixChange", "is", "", "Renamings of the whole model are skipped", "host/mtp", _MTP),
    ("transformers.conversion_mapping.get_checkpoint_conversion_mapping", "order", "model_type", "It defines how a checkpoint's tensors are mapped to the model's", "host/mtp", _MTP),
    ("transformers.modeling_utils.LoadStateDictConfig", "holds", "weight_mapping device_map dtype", "MTP heads are filled as transformers fills the model", "host/mtp", _MTP),
    ("transformers.core_model_loading.convert_and_load_state_dict_in_model", "says", "mismatched_keys missing_keys unexpected_keys", "An incomplete checkpoint is refused by these", "host/mtp", _MTP),
    ("transformers.utils.logging", "says", "is_progress_bar_enabled disable_progress_bar enable_progress_bar", "A few tensors are loaded without a progress bar", "host/mtp", _MTP),
    ("transformers.models.gemma4_assistant.modeling_gemma4_assistant.Gemma4AssistantForCausalLM", "holds", "pre_projection post_projection masked_embedding lm_head model", "The assistant is called part by part", "drafters/assistant", _ASSISTANT),
    ("transformers.models.gemma4.modeling_gemma4.Gemma4TextModel.forward", "says", "shared_kv_states", "The assistant's layers read the target's keys and values", "host/exotic/gemma4_assistant", _ASSISTANT),
    ("transformers.models.gemma4.modeling_gemma4.Gemma4TextAttention", "holds", "is_kv_shared_layer layer_type layer_idx", "The layers with keys of their own are found by these", "host/exotic/gemma4_assistant", _ASSISTANT),
    # -- accelerate, diffusers, peft
    ("accelerate.hooks.add_hook_to_module", "says", "_hf_hook", "Where a module computes is read from its hook", "host/devices"),
    ("accelerate.hooks.AlignDevicesHook", "holds", "execution_device pre_forward", "Where a module computes is read from its hook", "host/devices"),
    ("accelerate.hooks.SequentialHook", "holds", "hooks", "Where a module computes is read from its hooks", "host/devices"),
    ("diffusers.pipelines.pipeline_loading_utils.LOADABLE_CLASSES", "is", "", "Our own modules are loaded by name", "llamagen/pipeline mar/pipeline", "LlamaGenPipeline MARPipeline"),
    ("diffusers.utils.BaseOutput", "is", "", "Our pipelines return one", "llamagen/pipeline mar/pipeline", "LlamaGenPipeline MARPipeline"),
    ("diffusers.utils.is_bs4_available", "is", "", "Captions are cleaned if the libraries for it are installed", "llamagen/captions", "LlamaGenPipeline"),
    ("diffusers.utils.is_ftfy_available", "is", "", "Captions are cleaned if the libraries for it are installed", "llamagen/captions", "LlamaGenPipeline"),
    ("diffusers.image_processor.VaeImageProcessor", "is", "", "It converts the images that our pipelines return", "llamagen/pipeline mar/pipeline", "LlamaGenPipeline MARPipeline"),
    ("diffusers.pipelines.pixart_alpha.pipeline_pixart_alpha.PixArtAlphaPipeline._text_preprocessing", "takes", "text clean_caption", "Captions are cleaned as in training", "llamagen/captions", "LlamaGenPipeline"),
    ("diffusers.pipelines.glm_image.pipeline_glm_image.GlmImagePipeline", "says", "vision_language_encoder generate", "The model inside that generates tokens is the one to enable", "host/wrappers", "GlmImagePipeline"),
    ("peft.peft_model.PeftModel", "holds", "get_base_model active_peft_config peft_config", "The model inside an adapter is the one to enable", "host/adapters", "PeftModel"),
    ("peft.config.PromptLearningConfig", "holds", "is_prompt_learning", "Adapters that add virtual tokens are refused", "host/adapters", "PeftModel"),
))
# fmt: on


def broken(where: str | Path | None = None, models: Collection[str] = ()) -> list[Assumption]:
    """The broken rows, each with what was found instead.

    Args:
        where: a folder that contains packages, such as an unpacked wheel; None: the installed packages.
        models: class names of a model, its modules, and objects passed to a call: only rows that one of these needs, or
            that all models need. Empty: every row.

    Raises:
        ValueError: the folder contains none of the packages.
    """
    place, wanted = None if where is None else Path(where), frozenset(models)
    rows = judged(place)
    if not rows:
        names = sorted({row.what.split(".")[0] for row in ROWS})
        raise ValueError(f"{where} contains none of {', '.join(names)}; pass the folder that a wheel was unpacked into")
    needed = (row for row in rows if not wanted or not row.models or not wanted.isdisjoint(row.models.split()))
    return [row._replace(found=found) for row in needed if (found := _deviation(row, place))]


def judged(where: Path | None = None) -> list[Assumption]:
    """The rows that apply to these packages: without those of a package, or of a model, that is not there."""
    return [row for row in ROWS if _exists(row.what, where)]


def _exists(what: str, where: Path | None) -> bool:
    name, *parts = what.split(".")
    folder = source.package(name, where)
    if folder is None:  # not in this wheel, or an optional package
        return False
    return parts[0] != "models" or parts[1] == "auto" or (folder / "models" / parts[1]).is_dir()


@cache
def _deviation(row: Assumption, where: Path | None) -> str:
    """A sentence on what was found instead of the assumption; "": the assumption is true."""
    found = source.look(row.what, where)
    if isinstance(found, str):
        return found
    node, file = found
    try:
        return source.CHECKS[row.how](node, row.names, file)
    except TypeError as error:  # it is not a function, or not a class
        return str(error)


def _ranges() -> dict[str, str]:
    """package → the releases that mmspec requires, from pyproject.toml in a checkout, else from its metadata."""
    project = Path(__file__).resolve().parents[2] / "pyproject.toml"
    lines: list[str] = []
    if project.is_file():
        lines = tomllib.loads(project.read_text(encoding="utf-8"))["project"]["dependencies"]
    else:
        lines = [line for line in metadata.requires("mmspec") or [] if ";" not in line]
    names = (len(line) - len(line.lstrip("abcdefghijklmnopqrstuvwxyz0123456789-_.")) for line in lines)
    return {line[:n]: line[n:].strip() for line, n in zip(lines, names, strict=True)}


TESTED = _ranges()  # package → the releases that mmspec is tested with; "": any


def main(arguments: list[str]) -> int:
    """Print each broken row, and how many are broken or hold; returns the exit code."""
    if len(arguments) > 1 or any(each.startswith("-") for each in arguments):
        print("usage: python -m mmspec.pipelines.host.contract [FOLDER OF AN UNPACKED WHEEL]", file=sys.stderr)
        return 2
    where = Path(arguments[0]) if arguments else None
    try:
        rows = broken(where)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    release = f"transformers {source.version('transformers', where) or 'not there'}"
    for row in rows:
        print(row)
    count = len(judged(where))
    print(f"{len(rows)} of {count} rows are broken ({release})" if rows else f"{count} rows hold ({release})")
    return 1 if rows else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
