#!/usr/bin/env python3
"""A small GPT against PyTorch in f32: logits, loss, all gradients and 50 training steps, in GPT-2's form and in LLaMA's.

Usage: torch_parity.py BUILD. The last line is "N passed, N failed, N skipped".
"""
import math
import pathlib
import subprocess
import sys
import tempfile

try:
    import torch
    import torch.nn.functional as F
    from safetensors.torch import load_file
except ImportError as error:
    print(f"skipped: {error}\n0 passed, 0 failed, 1 skipped")
    sys.exit(0)

NUM_HEADS, EPS = 4, 1e-5


class Model:
    """The model of tests/support/gpt_dump.cpp, written with PyTorch's own operations; which parts there are is told by
    the names of its weights."""

    def __init__(self, weights):
        self.weights = {name: value.clone().requires_grad_() for name, value in weights.items()}
        self.num_layers = 1 + max(int(name.split(".")[1]) for name in weights if name.startswith("h."))

    def get(self, name):
        return self.weights.get(name)

    def linear(self, x, name):
        return F.linear(x, self.get(name + ".weight"), self.get(name + ".bias"))

    def norm(self, x, name):
        weight, bias = self.get(name + ".weight"), self.get(name + ".bias")
        if bias is None:
            return F.rms_norm(x, weight.shape, weight, EPS)
        return F.layer_norm(x, weight.shape, weight, bias, EPS)

    def attention(self, x, name):
        batch, seq_len, dim = x.shape
        head_dim = dim // NUM_HEADS
        qkv = self.linear(x, name + ".qkv").view(batch, seq_len, -1, head_dim).transpose(1, 2)
        num_kv_heads = (qkv.shape[1] - NUM_HEADS) // 2
        query, key, value = qkv.split([NUM_HEADS, num_kv_heads, num_kv_heads], dim=1)
        if self.get("wpe.weight") is None:
            query, key = rotated(query), rotated(key)
        key, value = (t.repeat_interleave(NUM_HEADS // num_kv_heads, dim=1) for t in (key, value))
        scores = query @ key.transpose(2, 3) / math.sqrt(head_dim)
        hidden = torch.ones(seq_len, seq_len, dtype=torch.bool).triu(1)
        weights = scores.masked_fill(hidden, -math.inf).softmax(dim=-1)
        return self.linear((weights @ value).transpose(1, 2).reshape(batch, seq_len, dim), name + ".proj")

    def mlp(self, x, name):
        inner = self.linear(x, name + ".fc")
        if self.get(name + ".gate.weight") is None:
            return self.linear(F.gelu(inner, approximate="tanh"), name + ".proj")
        return self.linear(F.silu(self.linear(x, name + ".gate")) * inner, name + ".proj")

    def logits(self, tokens):
        x = F.embedding(tokens, self.get("wte.weight"))
        if self.get("wpe.weight") is not None:
            x = x + self.get("wpe.weight")[: tokens.shape[1]]
        for i in range(self.num_layers):
            x = x + self.attention(self.norm(x, f"h.{i}.ln_1"), f"h.{i}.attn")
            x = x + self.mlp(self.norm(x, f"h.{i}.ln_2"), f"h.{i}.mlp")
        head = self.get("lm_head.weight")
        return F.linear(self.norm(x, "ln_f"), self.get("wte.weight") if head is None else head)

    def loss(self, text):
        logits = self.logits(text[:, :-1])
        return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), text[:, 1:].reshape(-1))


def rotated(x):
    """Rotary positions in the form of GPT-NeoX: element i of a head is paired with element i + head_dim / 2."""
    half = x.shape[-1] // 2
    frequency = 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = torch.arange(x.shape[2], dtype=torch.float64)[:, None] * frequency
    cos, sin = angle.cos().float(), angle.sin().float()
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def train(model, batches):
    """Losses, and norms of gradients before they are clipped."""
    weights = list(model.weights.values())
    groups = [
        {"params": [w for w in weights if w.dim() >= 2], "weight_decay": 0.1},
        {"params": [w for w in weights if w.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95), eps=1e-8)
    losses, norms = [], []
    for text in batches:
        loss = model.loss(text)
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(weights, 1.0))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses), torch.stack(norms)


class Checks:
    def __init__(self):
        self.passed = self.failed = self.skipped = 0

    def close(self, name, ours, theirs, tolerance):
        """The largest difference, relative to the largest magnitude of PyTorch's."""
        error = ((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1e-30)).item()
        if ours.shape == theirs.shape and error <= tolerance:
            self.passed += 1
            return error
        self.failed += 1
        print(f"FAILED: {name}: shapes {tuple(ours.shape)} and {tuple(theirs.shape)}, error {error:.2e}, "
              f"expected at most {tolerance:.0e}")
        return error


def compare(checks, form, device, file):
    ours = load_file(file)
    weights = {name.removeprefix("weight."): x for name, x in ours.items() if name.startswith("weight.")}
    text = ours["tokens"]
    model = Model(weights)
    errors = {"logits": checks.close("logits", ours["logits"], model.logits(text[0, :, :-1]).detach(), 1e-5)}
    loss = model.loss(text[0])
    errors["loss"] = checks.close("loss", ours["loss"].reshape(()), loss.detach(), 2e-6)
    loss.backward()
    errors["gradients"] = max(
        checks.close(f"gradient of {name}", ours["grad." + name], w.grad, 2e-5) for name, w in model.weights.items()
    )
    losses, norms = train(Model(weights), text)
    errors["losses of 50 steps"] = checks.close("losses of 50 steps", ours["losses"], losses, 1e-4)
    errors["norms of gradients"] = checks.close("norms of gradients", ours["norms"], norms, 1e-3)
    print(f"{form} on {device}: loss {losses[0]:.4f} to {losses[-1]:.4f}; errors: "
          + ", ".join(f"{name} {error:.1e}" for name, error in errors.items()))


def main():
    build = pathlib.Path(sys.argv[1])
    torch.manual_seed(0)
    torch.set_num_threads(2)
    checks = Checks()
    with tempfile.TemporaryDirectory() as folder:
        for device in ("cpu", "cuda"):
            for form in ("gpt2", "llama"):
                file = pathlib.Path(folder) / f"{form}-{device}.safetensors"
                if device == "cuda" and not torch.cuda.is_available():
                    checks.skipped += 1
                    print(f"skipped: {form} on a GPU, as there is none")
                    continue
                run = subprocess.run([build / "tests/gpt_dump", form, device, file], capture_output=True, text=True)
                if "no CUDA backend" in run.stderr:
                    checks.skipped += 1
                    print(f"skipped: {form} on a GPU, which this build cannot use")
                    continue
                if run.returncode != 0:
                    checks.failed += 1
                    print(f"FAILED: gpt_dump {form} {device}: {run.stderr.strip()}")
                    continue
                compare(checks, form, device, file)
    print(f"{checks.passed} passed, {checks.failed} failed, {checks.skipped} skipped")
    return checks.failed > 0


if __name__ == "__main__":
    sys.exit(main())
