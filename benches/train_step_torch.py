"""The step that `draftsmith bench train --device cpu --shape smollm2` times, in plain PyTorch: eager, f32, autograd.

usage: LD_PRELOAD=libiomp5.so KMP_BLOCKTIME=0 train_step_torch.py [--tokens N] [--documents N] [--supervised SHARE] [--steps N]
       [--dense]

Written as one would write it well: documents as a batch, one causal product with step 0's keys and the later steps' own keys
beside it, the target's distribution computed once for all steps, logits for supervised rows alone. With --dense, logits are
computed for all rows and masked, as the common trainers do. Both compute queries and the MLP for all rows.
"""
import argparse
import json
import math
import time

import torch
import torch.nn.functional as F

flags = argparse.ArgumentParser()
flags.add_argument("--tokens", type=int, default=8192)
flags.add_argument("--documents", type=int, default=8)
flags.add_argument("--supervised", type=float, default=1.0)
flags.add_argument("--unroll", type=int, default=3)
flags.add_argument("--steps", type=int, default=10)
flags.add_argument("--threads", type=int, default=2)
flags.add_argument("--dense", action="store_true")
a = flags.parse_args()
torch.set_num_threads(a.threads)
torch.manual_seed(0)

H, I, HEADS, KEY_HEADS, D, V, VD, EPS, THETA = 576, 1536, 9, 3, 64, 49152, 32000, 1e-5, 500_000.0
GROUP = HEADS // KEY_HEADS
B, T = a.documents, a.tokens // a.documents
chains = max(1, min(T, round(T * a.supervised)))
first = T - chains  # the row of the first chain


def weight(*shape):
    return torch.nn.Parameter(torch.randn(*shape) * 0.02)


def ones():
    return torch.nn.Parameter(torch.ones(H))


W = dict(fc=weight(H, 3 * H), fc_norm0=ones(), fc_norm1=ones(), fc_norm2=ones(), hidden_norm=ones(), input_layernorm=ones(),
         post_attention_layernorm=ones(), qkv=weight((HEADS + 2 * KEY_HEADS) * D, 2 * H), o=weight(H, HEADS * D),
         gate_up=weight(2 * I, H), down=weight(H, I), norm=ones(), lm_head=weight(VD, H))
embed = torch.randn(V, H) * 0.02
target_head = torch.randn(VD, H) * 0.02
frequencies = 1.0 / (THETA ** (torch.arange(0, D, 2).float() / D))
angles = torch.arange(T + a.unroll)[:, None].float() * frequencies
cosine, sine = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
hidden_keys = torch.ones(T, T, dtype=torch.bool).triu(1)


def rms(x, w):
    return F.rms_norm(x, (H,), w, EPS)


def rope(x, start):
    """[B, heads, T, D]"""
    half = torch.cat([-x[..., D // 2:], x[..., :D // 2]], -1)
    return x * cosine[start:start + T] + half * sine[start:start + T]


def loss_of(ids, states):
    """ids [B, T + 2], states [B, T + 1, 4H]"""
    parts = states[:, :T, :3 * H].split(H, -1)
    hidden = F.linear(torch.cat([rms(part, W[f"fc_norm{i}"]) for i, part in enumerate(parts)], -1), W["fc"])
    with torch.no_grad():
        logits = F.linear(F.rms_norm(states[:, first + 1:, 3 * H:], (H,), None, EPS), target_head)
        log_target = F.log_softmax(logits, -1)  # of rows first + 1..=T
        target = log_target.exp()
    loss, own = 0.0, []
    for s in range(a.unroll):
        tokens = F.pad(ids[:, 1 + s:], (0, s))[:, :T]
        x = torch.cat([rms(embed[tokens], W["input_layernorm"]), rms(hidden, W["hidden_norm"])], -1)
        q, k, v = F.linear(x, W["qkv"]).view(B, T, -1, D).transpose(1, 2).split([HEADS, KEY_HEADS, KEY_HEADS], 1)
        q, k = rope(q, s), rope(k, s)
        q = q.reshape(B, KEY_HEADS, GROUP, T, D)
        if s == 0:
            keys, values = k[:, :, None], v[:, :, None]
        else:
            own.append((k[:, :, None], v[:, :, None]))
        scores = (q @ keys.transpose(-1, -2)).masked_fill(hidden_keys, -math.inf)
        scores = torch.cat([scores, *((q * key).sum(-1, keepdim=True) for key, _ in own)], -1)
        p = torch.softmax(scores / math.sqrt(D), -1)
        attended = p[..., :T] @ values
        for i, (_, value) in enumerate(own):
            attended = attended + p[..., T + i:T + i + 1] * value
        middle = hidden + F.linear(attended.reshape(B, HEADS, T, D).transpose(1, 2).reshape(B, T, -1), W["o"])
        gate, up = F.linear(rms(middle, W["post_attention_layernorm"]), W["gate_up"]).chunk(2, -1)
        hidden = rms(middle + F.linear(F.silu(gate) * up, W["down"]), W["norm"])
        count = chains - s  # of each document: the target of row p is the state of row p + 1 + s
        if a.dense:
            log_draft = F.log_softmax(F.linear(hidden, W["lm_head"]), -1)[:, first:first + count]
        else:
            log_draft = F.log_softmax(F.linear(hidden[:, first:first + count], W["lm_head"]), -1)
        loss = loss + (target[:, s:] * (log_target[:, s:] - log_draft)).sum(-1).mean()
    return loss


batches = [(torch.randint(0, V, (B, T + 2)), torch.randn(B, T + 1, 4 * H)) for _ in range(2)]
optimizer = torch.optim.AdamW(W.values(), lr=1e-4, weight_decay=0.0, betas=(0.9, 0.95), fused=True)
times = []
for number in range(2 + a.steps):
    began = time.perf_counter()
    optimizer.zero_grad(set_to_none=True)
    loss = loss_of(*batches[number % 2])
    loss.backward()
    torch.nn.utils.clip_grad_norm_(W.values(), 1.0)
    optimizer.step()
    if number >= 2:
        times.append((time.perf_counter() - began) * 1e3)
milliseconds = sorted(times)[len(times) // 2]
print(json.dumps(dict(device=f"PyTorch {torch.__version__}, {a.threads} threads", dense=a.dense, tokens=a.tokens, documents=B,
                      supervised=a.supervised, unroll=a.unroll, milliseconds=milliseconds,
                      tokens_per_second=a.tokens / milliseconds * 1e3, last_loss=float(loss.detach()))))
