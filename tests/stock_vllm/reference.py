"""Compares stored states with those that transformers computes in float32.

reference.py MODEL FILE...   each FILE has hidden_states [T, L, H], token_ids [T + 1] and layer_ids [L]
Prints the largest relative error of a row.
"""

import sys

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

verifier = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()
last = {}
# transformers gives the last layer's states after the final norm alone
verifier.model.norm.register_forward_pre_hook(lambda _, given: last.update(states=given[0]))
largest = 0.0
for path in sys.argv[2:]:
    file = load_file(path)
    with torch.inference_mode():
        hidden = verifier.model(file["token_ids"][None, :-1], output_hidden_states=True).hidden_states
    layers = [last["states"][0] if layer == verifier.config.num_hidden_layers else hidden[layer][0]
              for layer in file["layer_ids"].tolist()]
    wanted = torch.stack(layers, 1)
    assert wanted.shape == file["hidden_states"].shape, path
    error = (file["hidden_states"] - wanted).norm(dim=-1) / wanted.norm(dim=-1)
    assert error.isfinite().all(), path
    largest = max(largest, float(error.max()))
print(largest)
