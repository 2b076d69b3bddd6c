"""Losses of one head on one document by the published Speculators package: the judge of `losses_agree_with_speculators`.

usage: speculators_parity.py CASE.json      (needs torch, transformers and speculators; prints a JSON list, a loss per step)

Speculators masks a position by the token that it embeds and shifts that mask with the steps, so with one mask later
steps also count chains that started inside the prompt. The engine never drafts there, and draftsmith leaves them out.
So each step is read from a run of its own, with the mask that picks draftsmith's chains at that step.
"""
import importlib.machinery
import importlib.util
import json
import sys
import types


class Unused(types.ModuleType):
    """Stands for packages that only Speculators' data loaders use, where they are not installed."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


for package in ("datasets", "hs_connectors", "loguru", "openai"):
    if importlib.util.find_spec(package) is None:
        sys.modules[package] = Unused(package)
        sys.modules[package].__spec__ = importlib.machinery.ModuleSpec(package, None)

import torch
from speculators import SpeculatorsConfig, VerifierConfig
from speculators.losses import resolve_loss_config
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import LlamaConfig

case = json.load(open(sys.argv[1]))
c = case["config"]
layer = LlamaConfig(
    vocab_size=c["vocab_size"], hidden_size=c["hidden_size"], intermediate_size=c["intermediate_size"], num_hidden_layers=1,
    num_attention_heads=c["num_attention_heads"], num_key_value_heads=c["num_key_value_heads"], head_dim=c["head_dim"],
    max_position_embeddings=c["max_position_embeddings"], rms_norm_eps=c["rms_norm_eps"],
    rope_parameters={"rope_type": "default", "rope_theta": c["rope"]["theta"]}, attn_implementation="eager")
model = Eagle3DraftModel(Eagle3SpeculatorConfig(
    transformer_layer_config=layer, draft_vocab_size=c["draft_vocab_size"], fc_norm=c["fc_norm"],
    norm_output=c["norm_output"], norm_before_residual=c["norm_before_residual"],
    speculators_config=SpeculatorsConfig(
        algorithm="eagle3", proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=case["steps"])],
        default_proposal_method="greedy", verifier=VerifierConfig(name_or_path=None, architectures=[]))))

weights = {f"{name}.weight": values for name, values in case["weights"].items()}
weights |= {"embed_tokens.weight": case["embed"], "verifier_lm_head.weight": case["verifier_head"],
            "verifier_norm.weight": case["verifier_norm"]}
own = model.state_dict()
missing = set(own) - set(weights) - {"t2d", "d2t"}
assert not missing and set(weights) <= set(own), (missing, set(weights) - set(own))
for name, values in weights.items():
    own[name] = torch.tensor(values, dtype=torch.float32).reshape(own[name].shape)
model.load_state_dict(own)
model.eval()

H, ids, prompt = c["hidden_size"], torch.tensor(case["token_ids"]), case["prompt_length"]
states = torch.tensor(case["states"]).reshape(-1, 4 * H)
rows = len(ids) - 2  # row p embeds x[p+1], and its target is the state of row p+1
losses = []
for step in range(case["steps"]):
    with torch.no_grad():
        _, _, metrics = model(
            hidden_states=states[None, :rows, : 3 * H], input_ids=ids[None, 1:rows + 1],
            document_ids=torch.zeros(1, rows, dtype=torch.long), loss_mask=(torch.arange(rows) >= prompt - 1 + step)[None],
            verifier_last_hidden_states=states[None, 1:rows + 1, 3 * H:], ttt_steps=case["steps"],
            loss_config=resolve_loss_config("kl_div", "eager"))  # the default kernels need a GPU
    losses.append(float(metrics[f"loss_{step}_sum"] / metrics[f"loss_{step}_total"]))
print(json.dumps(losses))
