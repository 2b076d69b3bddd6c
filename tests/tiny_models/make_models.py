"""Saves small models with random weights, one directory for each case, as transformers writes them.

make_models.py DIRECTORY     prints the names of the cases
"""

import sys
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

SHAPE = {
    "vocab_size": 500, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
}
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 512}
CASES = {
    "llama-linear": (LlamaForCausalLM, LlamaConfig(**SHAPE, rope_parameters=LINEAR)),
    "llama-llama3": (LlamaForCausalLM, LlamaConfig(**SHAPE, rope_parameters=LLAMA3)),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config(**SHAPE, rope_parameters=PLAIN)),
    # heads * head_dim is not the hidden size
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**SHAPE, head_dim=24, rope_parameters=PLAIN)),
    "qwen3-yarn": (Qwen3ForCausalLM, Qwen3Config(**SHAPE, head_dim=32, rope_parameters=YARN)),
}

for seed, (name, (kind, config)) in enumerate(CASES.items()):
    torch.manual_seed(seed)
    model = kind(config).float()
    with torch.no_grad():
        # transformers starts biases at zero and norms at one, which would hide that they are left out
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
            else:
                parameter.normal_(0, 0.15)
    model.save_pretrained(Path(sys.argv[1]) / name)
    print(name)
