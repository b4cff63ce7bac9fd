"""What `tests/support/survey.py` found of image-text-to-text classes; written by it, so do not edit."""

VERSION = "5.24.0"  # of transformers

# classes that are token-identical to stock `generate`
_SAME = """
AriaForConditionalGeneration AyaVisionForConditionalGeneration Blip2ForConditionalGeneration
ChameleonForConditionalGeneration Cohere2VisionForConditionalGeneration CohereCompassForConditionalGeneration
Cosmos3EdgeForConditionalGeneration Cosmos3OmniForConditionalGeneration DeepseekOcr2ForConditionalGeneration
DeepseekVLForConditionalGeneration DeepseekVLHybridForConditionalGeneration Dots3NoteForConditionalGeneration
Emu3ForConditionalGeneration Ernie4_5_VLMoeForConditionalGeneration Exaone4_5_ForConditionalGeneration
FastVlmForConditionalGeneration FuyuForCausalLM Gemma3ForConditionalGeneration Gemma3nForConditionalGeneration
Gemma4ForConditionalGeneration Gemma4UnifiedForConditionalGeneration Glm46VForConditionalGeneration
Glm4vForConditionalGeneration Glm4vMoeForConditionalGeneration Glm5NextForConditionalGeneration
GlmOcrForConditionalGeneration GotOcr2ForConditionalGeneration Granite4VisionForConditionalGeneration
GraniteDoclingForConditionalGeneration HunYuanVLForConditionalGeneration HyperCLOVAXVisionV2ForConditionalGeneration
Idefics2ForConditionalGeneration Idefics3ForConditionalGeneration IdeficsForVisionText2Text
Inkling2ForConditionalGeneration InklingForConditionalGeneration InstructBlipForConditionalGeneration
InstructBlipVideoForConditionalGeneration InternVLForConditionalGeneration JanusForConditionalGeneration
Kimi_K25ForConditionalGeneration Kosmos2_5ForConditionalGeneration Lfm2VlForConditionalGeneration
Lfm3VlForConditionalGeneration LightOnOcrForConditionalGeneration LlavaForConditionalGeneration
LlavaNextForConditionalGeneration LlavaNextVideoForConditionalGeneration LlavaOnevisionForConditionalGeneration
MiniCPMOcrForConditionalGeneration MiniCPMV4_6ForConditionalGeneration MiniCPMV4_7ForConditionalGeneration
MiniMaxM3SparseForConditionalGeneration Mistral3ForConditionalGeneration Mistral4ForCausalLM
MistralLarge4ForConditionalGeneration MllamaForConditionalGeneration Molmo2ForConditionalGeneration
MuseGlimmerForConditionalGeneration MuseSparkForConditionalGeneration NemotronH_Omni_Reasoning_V3
Ovis2ForConditionalGeneration PaddleOCRVLForConditionalGeneration PaliGemmaForConditionalGeneration
PerceptionLMForConditionalGeneration Phi4MultimodalForCausalLM QianfanOCRForConditionalGeneration
Qwen2VLForConditionalGeneration Qwen2_5OmniForConditionalGeneration Qwen2_5OmniThinkerForConditionalGeneration
Qwen2_5_VLForConditionalGeneration Qwen3OmniMoeForConditionalGeneration Qwen3OmniMoeThinkerForConditionalGeneration
Qwen3VLForConditionalGeneration Qwen3VLMoeForConditionalGeneration Qwen3_5ForConditionalGeneration
Qwen3_5MoeForConditionalGeneration Qwen4ExpForConditionalGeneration SmolVLMForConditionalGeneration
Step3p7ForConditionalGeneration UnlimitedOcrForConditionalGeneration VideoLlama3ForConditionalGeneration
VideoLlavaForConditionalGeneration VipLlavaForConditionalGeneration
"""

# class -> why `enable` refuses it, or how stock fails
_OTHERS = {
    "BlipForConditionalGeneration": "get_decoder() does not return a text decoder with layers",
    "DiffusionGemmaForBlockDiffusion": "its decoder takes no position_ids, which the nodes of a tree need",
    "EvollaForProteinText2Text": "its layers attend to the protein with a mask for one token at a time",
    "Florence2ForConditionalGeneration": "it is an encoder-decoder model; only decoder-only models are supported",
    "GitForCausalLM": "get_decoder() does not return a text decoder with layers",
    "Kosmos2ForConditionalGeneration": "its generate delegates to a model that counts the slots of the cache",
    "Llama4ForConditionalGeneration": (
        "stock generate fails: AttributeError: 'MoeCausalLMOutputWithPast' object has no attribute 'image_outputs'"
    ),
    "PPFormulaNetForConditionalGeneration": "it is an encoder-decoder model; only decoder-only models are supported",
    "Pix2StructForConditionalGeneration": "it is an encoder-decoder model; only decoder-only models are supported",
    "T5Gemma2ForConditionalGeneration": "it is an encoder-decoder model; only decoder-only models are supported",
    "UdopForConditionalGeneration": "it is an encoder-decoder model; only decoder-only models are supported",
    "VisionEncoderDecoderModel": "it is an encoder-decoder model; only decoder-only models are supported",
}

# class -> why `enable` refuses it, or None
FOUND: dict[str, str | None] = dict(sorted({**dict.fromkeys(_SAME.split()), **_OTHERS}.items()))
