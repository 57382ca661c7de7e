"""From GPT-2 to Kimi Delta Attention: one transformers model for every stage of the lineage."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
)

from .cache_kda import KDACache
from .configuration_kda import KDAConfig
from .modeling_kda import KDAForCausalLM, KDAForSequenceClassification, KDAModel, KDAPreTrainedModel
from .stages import STAGES, Stage

__version__ = "0.1.0"

AutoConfig.register(KDAConfig.model_type, KDAConfig)
AutoModel.register(KDAConfig, KDAModel)
AutoModelForCausalLM.register(KDAConfig, KDAForCausalLM)
AutoModelForSequenceClassification.register(KDAConfig, KDAForSequenceClassification)
# so that save_pretrained copies this code next to the weights
KDAConfig.register_for_auto_class("AutoConfig")
KDAModel.register_for_auto_class("AutoModel")
KDAForCausalLM.register_for_auto_class("AutoModelForCausalLM")
KDAForSequenceClassification.register_for_auto_class("AutoModelForSequenceClassification")
# Trainer (label smoothing) and pipelines look classes up by name in these tables, which register() does not fill
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[KDAConfig.model_type] = "KDAForCausalLM"
MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES[KDAConfig.model_type] = "KDAForSequenceClassification"
# LoRA's default targets: the projections between the residual stream and queries, keys, values and outputs, whichever
# of them a mixer has. Not those of `mla` that expand latents: decoding would have to multiply them out in every step
try:
    from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as LORA_TARGETS
except ImportError:
    LORA_TARGETS = {}
LORA_TARGETS[KDAConfig.model_type] = ["q_proj", "k_proj", "v_proj", "o_proj", "q_a_proj", "q_b_proj", "kv_a_proj"]

__all__ = [
    "STAGES",
    "KDACache",
    "KDAConfig",
    "KDAForCausalLM",
    "KDAForSequenceClassification",
    "KDAModel",
    "KDAPreTrainedModel",
    "Stage",
]
